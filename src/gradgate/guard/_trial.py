"""One try of the user's code on a batch: run it, judge what it returned, run backward; and what can go wrong in it."""

from __future__ import annotations

import dis
import functools
import inspect
import math
import re
import sys
import types
import warnings
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from numbers import Real
from traceback import walk_stack, walk_tb
from typing import Any, ClassVar, Literal, Protocol
from weakref import WeakKeyDictionary

import torch

from gradgate._names import describe, listed
from gradgate._source import raising_line, raising_spot
from gradgate._state import FiniteCheck, TrainingState
from gradgate._text import class_name, text_of, user_level
from gradgate._torch_private import ModuleCall, buffers_of, children_of, end_checkpoints, innermost_call, write_count
from gradgate._trees import non_finite_rows, tensors_in
from gradgate.errors import ArgumentTypeError, ArgumentValueError, GradgateError, GradgateWarning, OtherRankError
from gradgate.records import Stage

# --- Modules that are not under guard -------------------------------------------------------------------------------

# Found in the first step and in bad ones, warned of once. Nothing is hooked. What a loss function can reach is walked
# (closures, globals that its code names, attributes), and of that only what the step has really written or trained is
# reported: a teacher in eval mode is reachable, but unchanged.

# Objects looked at, and elements of one container: a trainer may lead to a dataset of millions.
REACHED, ELEMENTS = 5_000, 200
_LEAVES = (str, bytes, int, float, complex, types.NoneType, torch.dtype, torch.device, torch.Size)
_EVERY_MODULE_HAS = frozenset(vars(torch.nn.Module()))
Marks = list[tuple[int, int]]


def reachable(function: Callable[..., Any]) -> Iterator[tuple[str, Any]]:
    """Walk what a function can reach, nearest first, each with the expression that the user writes for it."""
    waiting: deque[tuple[str, Any]] = deque([("", function)])
    seen: set[int] = set()
    while waiting and len(seen) < REACHED:
        path, thing = waiting.popleft()
        if id(thing) not in seen and not isinstance(thing, _LEAVES):
            seen.add(id(thing))
            yield path, thing
            waiting.extend(islice(_parts(path, thing), ELEMENTS))


def _parts(path: str, thing: Any) -> Iterator[tuple[str, Any]]:
    """List what hangs directly on an object, without running any code of its class."""
    if isinstance(thing, types.MethodType):
        yield path.rpartition(".")[0] or "self", thing.__self__
        yield "", thing.__func__
    elif isinstance(thing, types.FunctionType):
        yield from _of_function(thing)
    elif isinstance(thing, functools.partial):
        yield from (("", part) for part in (thing.func, *thing.args, *thing.keywords.values()))
    elif isinstance(thing, dict | list | tuple):
        pairs = list(thing.items()) if isinstance(thing, dict) else enumerate(thing)
        yield from ((f"{path}[{key!r}]" if path else "", value) for key, value in pairs)
    elif not isinstance(thing, type | types.ModuleType | torch.Tensor):
        attributes = dict(children_of(thing)) if isinstance(thing, torch.nn.Module) else {}
        with suppress(AttributeError):
            attributes |= object.__getattribute__(thing, "__dict__")
        yield from ((f"{path}.{n}" if path else "", v) for n, v in attributes.items() if n not in _EVERY_MODULE_HAS)
        if isinstance(call := getattr(type(thing), "__call__", None), types.FunctionType):  # noqa: B004
            yield "", call


def _of_function(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    # What torch's own functions name is not the user's; their closures may be.
    scope = {} if (function.__module__ or "").partition(".")[0] == "torch" else function.__globals__
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=False):
        if cell != types.CellType():  # an empty one has no contents to ask for
            yield name, cell.cell_contents
    parameters = inspect.signature(function, follow_wrapped=False).parameters
    yield from ((name, parameter.default) for name, parameter in parameters.items())
    names = _names_in(function.__code__)
    for name in names:
        value = scope.get(name)
        if not isinstance(value, type | types.ModuleType):
            yield name, value
        elif value is not torch:
            yield from ((f"{name}.{inner}", vars(value)[inner]) for inner in names if inner in vars(value))


def _names_in(code: types.CodeType) -> list[str]:
    nested = (const for const in code.co_consts if isinstance(const, types.CodeType))
    return [*code.co_names, *(name for inner in nested for name in _names_in(inner))]


class Outsiders:
    """What runs in a guard's steps and is not under guard."""

    def __init__(self, roots: Sequence[torch.nn.Module]) -> None:
        self._roots = roots
        self._looked = self._warned = False
        self._names: WeakKeyDictionary[torch.nn.Module, str] = WeakKeyDictionary()
        self.forget()

    def forget(self) -> None:
        self._marks: dict[torch.nn.Module, Marks] = {}
        self._found: dict[torch.nn.Module, str] = {}

    def look(self, function: Callable[..., Any]) -> None:
        """Note the modules that a function can reach, and what their buffers are now; they are looked for once."""
        if not self._looked:
            for path, thing in reachable(function):
                if issubclass(type(thing), torch.nn.Module):  # not isinstance: a weak proxy says that it is one
                    self._names.setdefault(thing, path)
            self._looked = True
        self.note(self._names)

    def note(self, modules: Iterable[torch.nn.Module]) -> None:
        """Note modules that may run, and what the buffers are of those that are not under guard."""
        inside = {module for root in self._roots for module in root.modules()}
        for module in modules:
            if module not in inside:
                self._marks.setdefault(module, _marks(module))

    def trained(self, parameters: Iterable[torch.Tensor]) -> None:
        """Note who owns parameters that the loss trains although no guarded module owns them."""
        wanted = set(parameters)
        for module in self._marks:
            if wanted and not wanted.isdisjoint(module.parameters(recurse=False)):
                self._found[module] = "parameters that the loss trains"

    def written(self) -> str:
        """Say which modules have written buffers since they were noted; empty where none has."""
        wrote = [module for module, marks in self._marks.items() if _marks(module) != marks]
        self._found |= dict.fromkeys(wrote, "buffers that the step writes")
        if not wrote:
            return ""
        return f"modules that are not under guard wrote buffers: {self._listed(wrote)}; use {self._line(wrote)}"

    def warn(self) -> None:
        self.written()
        found, reasons = list(self._found), dict.fromkeys(self._found.values())
        if self._warned or not found:
            self.forget()
            return
        self._warned = True
        text = (
            f"Guard: a module runs in the loss and is not under guard: {self._listed(found)}.\n"
            f"Why: it has {' and '.join(reasons)}; only what is under guard is checked and put back in every step.\n"
            f"Fix: guard = {self._line(found)}"
        )
        self.forget()
        warnings.warn(text, GradgateWarning, stacklevel=user_level())

    def _tops(self, modules: Sequence[torch.nn.Module]) -> list[torch.nn.Module]:
        """Return the outermost named modules that are not under guard and contain these."""
        named = [module for module in self._marks if self._names.get(module)]
        inner = {part for module in named for part in module.modules() if part is not module}
        top_of = {part: top for top in named if top not in inner for part in top.modules()}
        return list(dict.fromkeys(top_of.get(module, module) for module in modules))

    def _listed(self, modules: Sequence[torch.nn.Module]) -> str:
        tops = [(self._names.get(top), type(top).__name__) for top in self._tops(modules)]
        return listed(list(dict.fromkeys(f"`{name}` ({kind})" if name else kind for name, kind in tops)), 3)

    def _line(self, modules: Sequence[torch.nn.Module]) -> str:
        """Write the guard that would have them all."""
        tops = self._tops(modules)
        contained = {inner for top in tops for inner in top.modules()}
        roots = [root for root in self._roots if root not in contained]
        # Those that have a part in the loss, as far as that is known.
        runs = [r for r in roots if r in self._names or any(p.grad is not None for p in r.parameters())]
        named = [self._names.get(root) or "model" for root in runs] + [self._names.get(top) or "other" for top in tops]
        return f"gg.Guard({named[0]})" if len(named) == 1 else f"gg.Guard([{', '.join(dict.fromkeys(named))}])"


def _marks(module: torch.nn.Module) -> Marks:
    return [(id(buffer), -1 if buffer is None else write_count(buffer)) for buffer in buffers_of(module).values()]


# --- Faults ---------------------------------------------------------------------------------------------------------


Cause = Literal["exception", "non-finite loss", "non-finite gradient", "non-finite output"]

# torch says this with a plain RuntimeError, too.
NO_MEMORY_TEXTS = ("out of memory", "can't allocate memory", "not enough memory", "CUBLAS_STATUS_ALLOC_FAILED")


@dataclass(frozen=True, eq=False, slots=True)
class StepFault:
    """One way in which a try failed."""

    cause: Cause
    stage: Stage
    error: Exception | None = None
    loss: float | None = None
    call: ModuleCall | None = None
    spot: tuple[str, int] | None = None

    @classmethod
    def raised(cls, error: BaseException, stage: Stage | None = None) -> StepFault:
        """Make the fault of an exception; in forward if it came through a module, else in the loss."""
        assert isinstance(error, Exception)
        call = innermost_call(error.__traceback__)
        found: Stage = "loss" if call is None else "forward"
        return cls("exception", stage or found, error, call=call, spot=raising_spot(error.__traceback__))

    def same_as(self, other: StepFault) -> bool:
        """Return whether another try failed in the same way: the same cause, and for exceptions the same origin."""
        if self.error is None or other.error is None:
            return self.cause == other.cause
        return type(self.error) is type(other.error) and self.spot == other.spot and self.module is other.module

    @property
    def module(self) -> torch.nn.Module | None:
        return None if self.call is None else self.call.module

    @property
    def exception_type(self) -> str | None:
        return None if self.error is None else class_name(type(self.error))

    @property
    def message(self) -> str:
        if self.error is not None:
            return text_of(self.error)
        return f"{self.cause}: {self.loss}" if self.cause == "non-finite loss" else self.cause

    @property
    def where(self) -> str | None:
        return None if self.error is None else raising_line(self.error.__traceback__)


def must_pass(error: BaseException) -> bool:
    """Return whether an exception is never blamed on a sample, whatever `catch` says."""
    fatal = not isinstance(error, Exception) or isinstance(error, (torch.AcceleratorError, OtherRankError))
    return fatal or is_out_of_memory(error) or _says(error, "device-side assert")


def is_out_of_memory(error: BaseException) -> bool:
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or _says(error, *NO_MEMORY_TEXTS)


def _says(error: BaseException, *texts: str) -> bool:
    return isinstance(error, RuntimeError) and any(text in text_of(error) for text in texts)


# --- What to say about them -----------------------------------------------------------------------------------------


_MODELS = ("model", "net", "network", "module")
_DIAGNOSE = "print(gg.diagnose(lambda: loss_fn(batch), model=model))   # names the line"
# torch has a dozen texts for it; whether the batch is what differs is looked up, not read from them.
_OTHER_DEVICE = re.compile(r"same device|expected device|different device|weight type")


def check_function(batch: Any, function: Any, call: str) -> None:
    """Refuse a function that cannot be called; `call` is the line that is right."""
    if callable(function):
        return
    method, _, name = call.strip(")").partition("(batch, ")
    what = f"{method.capitalize()}(): `{name}` is {describe(function)}"
    if callable(batch) and not isinstance(batch, torch.Tensor):
        raise ArgumentTypeError(f"{what}, and `batch` a function.", why="the batch comes first.", fix=call)
    why = "the guard calls it, and again with parts of the batch if one is bad."
    raise ArgumentTypeError(f"{what}.", why=why, fix=f"{call}   # the function itself, not what it returned")


def check_call(function: Callable[..., Any], batch: Any, error: BaseException) -> None:
    """Refuse a loss function that cannot be called with the batch alone: then the error is not from within it."""
    homes = [frame.f_globals.get("__name__") for frame, _ in walk_tb(error.__traceback__)]
    if not isinstance(error, TypeError) or homes[-1] not in ("gradgate.guard._trial", "torch.nn.modules.module"):
        return
    try:
        signature = inspect.signature(function.forward if isinstance(function, torch.nn.Module) else function)
    except ValueError:  # a builtin without a signature
        return
    if not _fits(signature, batch):
        what = f"`loss_fn{signature}` cannot be called with the batch alone: {text_of(error)}"
        why = "the guard calls loss_fn(batch), and again with parts of the batch if a sample is bad."
        raise ArgumentTypeError(f"Guard.backward(): {what}", why=why, fix=_adapted(function, signature, batch))


def _fits(signature: inspect.Signature, *args: Any, **kwargs: Any) -> bool:
    try:
        signature.bind(*args, **kwargs)
    except TypeError:
        return False
    return True


def _adapted(function: Callable[..., Any], signature: inspect.Signature, batch: Any) -> str:
    """Write the function of one argument that calls this one, where the batch shows how; else nothing."""
    home = getattr(function, "__module__", None) or type(function).__module__
    needed = [
        name for name, it in signature.parameters.items() if it.default is it.empty and it.kind is not it.VAR_KEYWORD
    ]
    given = ""
    if home.startswith("torch.nn.") and isinstance(batch, list | tuple) and len(batch) == 2:
        given = "model(batch[0]), batch[1]"
    elif len(needed) == 2 and len(set(needed) & set(_MODELS)) == 1:
        given = ", ".join("model" if name in _MODELS else "batch" for name in needed)
    elif isinstance(batch, list | tuple) and _fits(signature, *batch):
        given = "*batch"
    elif isinstance(batch, dict) and _fits(signature, **batch):
        given = "**batch"
    return given and f"guard.backward(batch, lambda batch: loss_fn({given}))"


def refuse_foreign_loop() -> None:
    """Refuse a step inside of a `training_step` of which Lightning makes the backward pass."""
    for frame, _ in walk_stack(sys._getframe()):
        home = frame.f_globals.get("__name__", "")
        if frame.f_code.co_name == "_training_step" and home.endswith(".loops.optimization.automatic"):
            what = "Guard.backward(): it is called in a `training_step` with automatic optimization."
            why = "Lightning sets the gradients to zero after training_step, and makes the backward pass itself."
            fix = "class Lit(GuardedModule, L.LightningModule):   # of gradgate.integrations.lightning; return loss"
            raise GradgateError(what, why=why, fix=fix)


def advice(
    fault: StepFault, batch: Any, function: Callable[..., Any], parameters: list[torch.Tensor]
) -> tuple[str, str]:
    """Return the reason and the fix that fit a fault that no sample is blamed for."""
    if _ignores_batch(function):
        return "`loss_fn` must use the batch that it is given: the guard calls it with parts of yours.", ""
    if fault.error is not None:
        return _of_exception(text_of(fault.error), batch, function, parameters)
    if not all(map(_finite, parameters)):
        return "the parameters were not finite before this step: an earlier one wrote them, or the checkpoint did.", ""
    for tensor in tensors_in(batch):
        if tensor.is_floating_point() and tensor.dim() and not any(_finite(row) for row in tensor):
            return f"no row of {describe(tensor)} in the batch is finite: the data or what prepares it is at fault.", ""
    why = "a fault that no sample can be blamed for is in the code, the weights or the learning rate"
    if fault.cause == "non-finite loss":
        why += "; a loss can also be a mean over nothing (cross_entropy with every label ignored)"
    return f"{why}.", _DIAGNOSE


def _of_exception(
    text: str, batch: Any, function: Callable[..., Any], parameters: list[torch.Tensor]
) -> tuple[str, str]:
    if "does not require grad" in text:
        if not torch.is_grad_enabled():
            fix = "with torch.enable_grad(): guard.backward(batch, loss_fn)"
            return "recording is switched off around the step (no_grad, inference_mode).", fix
        if not any(parameter.requires_grad for parameter in parameters):
            return "no parameter of the guarded model requires a gradient.", "model.requires_grad_(True)"
        return "the loss does not depend on a parameter that is trained: something cuts it off.", _DIAGNOSE
    if "backward through the graph a second time" in text:
        why = "the loss reaches into a graph that was made before the step and has been walked already"
        if fix := _changed(batch, lambda part: part.grad_fn is not None, "detach()"):
            return f"{why}: the batch has one.", fix
        for path, thing in reachable(function):
            if path and isinstance(thing, torch.Tensor) and thing.grad_fn:
                return f"{why}: `{path}` has one.", f"{path} = {path}.detach()   # before guard.backward(...)"
        return f"{why}.", ""
    devices, dtypes = ({getattr(p, of) for p in parameters} for of in ("device", "dtype"))
    if _OTHER_DEVICE.search(text) and len(devices) == 1:
        (device,) = devices
        fix = _changed(batch, lambda part: part.device != device, f'to("{device}")')
        both = f"model and batch are on {device}; something else is not."
        return f"the model is on {device}, and the batch is not." if fix else both, fix
    if "type" in text and len(dtypes) == 1:
        (dtype,) = dtypes
        if fix := _changed(batch, lambda part: part.is_floating_point() and part.dtype != dtype, f"to({dtype})"):
            return f"the model has {dtype} parameters, and the batch another dtype.", fix
    return "a fault of the code must be seen; no sample was dropped.", ""


def _changed(batch: Any, wrong: Callable[[torch.Tensor], bool], call: str) -> str:
    """Write the batch with a call on each tensor that is wrong; empty where none is, or the batch is odd."""
    if isinstance(batch, torch.Tensor):
        return f"batch = batch.{call}" if wrong(batch) else ""
    if type(batch) not in (list, tuple, dict) or len(batch) > 8:
        return ""
    keys = list(batch) if isinstance(batch, dict) else list(range(len(batch)))
    found = [key for key in keys if isinstance(batch[key], torch.Tensor) and wrong(batch[key])]
    if not found:
        return ""
    if isinstance(batch, dict):
        return "batch = {**batch, " + ", ".join(f"{key!r}: batch[{key!r}].{call}" for key in found) + "}"
    inner = ", ".join(f"batch[{key}].{call}" if key in found else f"batch[{key}]" for key in keys)
    return f"batch = [{inner}]" if isinstance(batch, list) or len(keys) < 2 else f"batch = ({inner})"


def _finite(tensor: torch.Tensor) -> bool:
    return bool(torch.isfinite(tensor.detach()).all())


def _ignores_batch(function: Callable[..., Any]) -> bool:
    if not isinstance(function, types.FunctionType) or function.__code__.co_argcount != 1:
        return False
    name = function.__code__.co_varnames[0]
    reads = (step for step in dis.get_instructions(function) if "LOAD_FAST" in step.opname)
    return name not in function.__code__.co_cellvars and not any(name in s.argrepr.split(", ") for s in reads)


Catch = tuple[type[BaseException], ...]
LossFunction = Callable[[Any], torch.Tensor | tuple[torch.Tensor, float | torch.Tensor]]
NO_LOSS: Any = object()
"""What a loss function of an integration gives where the user's code skips the batch."""


class Scaler(Protocol):
    """What the guard needs of `torch.amp.GradScaler`."""

    def scale(self, outputs: torch.Tensor, /) -> torch.Tensor: ...

    def is_enabled(self) -> bool: ...


@dataclass(slots=True)
class Outcome:
    """How a try ended."""

    fault: StepFault | None = None
    value: Any = None
    per_sample: torch.Tensor | None = None
    bad_rows: frozenset[int] | None = None
    count: torch.Tensor | None = None
    clipped: int = 0

    @property
    def skipped(self) -> bool:
        return self.fault is None and self.value is None

    @property
    def judged(self) -> torch.Tensor:
        """What must be finite of a loss: its value, and its count where it has one."""
        value: torch.Tensor = self.value
        return value if self.count is None else value.detach() + self.count

    @property
    def sums(self) -> torch.Tensor | None:
        """The total and the count of a loss that is given so."""
        return None if self.count is None else torch.stack([self.value.detach().double(), self.count])


class Trial(ABC):
    """A try that can be made again and again."""

    runs_backward: ClassVar[bool]
    function: Callable[[Any], Any]
    catch: Catch
    faults: list[StepFault]

    @abstractmethod
    def forward(self, batch: Any, size: int) -> Outcome:
        """Run the user's code and judge its result, without a backward pass."""

    def run(self, batch: Any, size: int) -> Outcome:
        return self.forward(batch, size)

    def let_go(self, *, but: Collection[StepFault | None]) -> None:
        """Drop the tracebacks of faults so far, except of some: they hold what the user's code held when it failed."""
        for fault in self.faults:
            if fault.error is not None and fault not in but:
                fault.error.with_traceback(None)  # also where the class lets nobody set an attribute
        self.faults.clear()

    def _fault(self, error: BaseException, stage: Stage | None = None) -> StepFault:
        """Make the fault of an exception that was caught; raise it again if no sample may be blamed for it."""
        if must_pass(error):
            raise error
        end_checkpoints(error.__traceback__)
        fault = StepFault.raised(error, stage)
        self.faults.append(fault)
        return fault


@dataclass(eq=False)
class LossTrial(Trial):
    """The tries of `Guard.backward`: a loss function, and backward."""

    runs_backward: ClassVar[bool] = True
    function: LossFunction
    state: TrainingState
    check: FiniteCheck
    catch: Catch
    scaler: Scaler | None = None
    accumulate: int = 1
    before_backward: Callable[[Outcome], None] | None = None
    first: bool = False
    weight: float = 1.0
    faults: list[StepFault] = field(default_factory=list)

    def forward(self, batch: Any, size: int) -> Outcome:
        outcome = self._call(batch, size)
        if outcome.fault is None and not outcome.skipped and not math.isfinite(number := outcome.judged.item()):
            self._blame_loss(outcome, number, size)
        return outcome

    def run(self, batch: Any, size: int) -> Outcome:
        """Run the loss function, walk back, and look at the loss and the gradients, with one read by the host."""
        outcome = self._call(batch, size)
        if outcome.fault is not None or outcome.skipped:
            return outcome
        loss = outcome.value
        # On the CPU a look costs nothing and may save the way back; elsewhere it would make the host wait twice.
        if loss.is_cpu and not math.isfinite(number := outcome.judged.item()):
            return self._blame_loss(outcome, number, size)
        if self.before_backward is not None:
            self.before_backward(outcome)
        root = loss if self.accumulate == 1 or outcome.count is not None else loss / self.accumulate
        if self.weight != 1:
            root = root * self.weight
        try:
            (root if self.scaler is None else self.scaler.scale(root)).backward()
        except self.catch as error:
            outcome.fault = self._fault(error, "backward")
            return outcome
        outcome.value = loss.detach()
        if self.check.has_nonfinite(self.state.gradients(), None if loss.is_cpu else outcome.judged):
            number = float(outcome.judged.item())
            if not math.isfinite(number):
                return self._blame_loss(outcome, number, size)
            outcome.fault = StepFault("non-finite gradient", "backward", loss=number)
        return outcome

    def _call(self, batch: Any, size: int) -> Outcome:
        try:
            value: Any = self.function(batch)
        except self.catch as error:
            check_call(self.function, batch, error)
            return Outcome(self._fault(error))
        if value is NO_LOSS:
            return Outcome()
        # Judged outside of the try: a loss of the wrong kind is nobody's fault but the caller's.
        if (self.first or not isinstance(value, torch.Tensor)) and self.state.has_own_gradients():
            why = "the guard does that with the loss that is returned; gradients would be there twice."
            fix = "return loss   # without loss.backward() before it"
            raise ArgumentTypeError("Guard.backward(): `loss_fn` calls backward() itself.", why=why, fix=fix)
        count = None
        if type(value) is tuple and len(value) == 2 and isinstance(value[0], torch.Tensor):
            value, count = value[0], _counted(*value)
        if isinstance(value, torch.Tensor) and not value.is_complex():
            if value.dim() == 0:
                return Outcome(None, value, count=count)
            if value.dim() == 1 and value.shape[0] == size:
                return Outcome(None, value.mean(), value.detach())
            if value.numel() == 1:
                return Outcome(None, value.reshape(()))
        what = f"Guard.backward(): `loss_fn` returned {describe(value)}"
        if not isinstance(value, torch.Tensor):
            why = "it gives the mean loss of the batch, one loss for each sample, or a total and its count."
            fix = "return loss   # the tensor, no loss.item(); or return losses.sum(), len(losses)"
            raise ArgumentTypeError(f"{what}.", why=why, fix=fix)
        if value.is_complex():
            why = "a loss is minimised, and complex numbers have no order."
            raise ArgumentTypeError(f"{what}.", why=why, fix="return loss.abs()   # or loss.real")
        why, fix = "a loss is one number for the batch or one for each sample.", "return losses.flatten(1).mean(1)"
        raise ArgumentValueError(f"{what} for a batch of {size} samples.", why=why, fix=fix)

    def _blame_loss(self, outcome: Outcome, number: float, size: int) -> Outcome:
        outcome.fault = StepFault("non-finite loss", "loss", loss=number)
        if outcome.per_sample is not None:
            outcome.bad_rows = non_finite_rows([outcome.per_sample], size, 0)
        return outcome


def _counted(total: torch.Tensor, count: Any) -> torch.Tensor:
    """Return the count of a total in double precision; a tensor is not read by the host."""
    numbers = count.numel() if isinstance(count, torch.Tensor) else int(isinstance(count, Real))
    if total.dim() or numbers != 1:
        what = f"Guard.backward(): `loss_fn` returned a tuple of {describe(total)} and {describe(count)}."
        why = "two values are the sum of the loss and how much it is a sum of (samples, tokens), one number each."
        fix = "return losses.sum(), len(losses)   # then guard.finish() before optimizer.step()"
        raise ArgumentTypeError(what, why=why, fix=fix)
    return torch.as_tensor(count, dtype=torch.float64, device=total.device).detach().reshape(())


@dataclass(eq=False)
class OutputTrial(Trial):
    """The tries of `Guard.forward`: any function of a batch whose outputs have one row for each sample."""

    runs_backward: ClassVar[bool] = False
    function: Callable[[Any], Any]
    catch: Catch
    batch_dim: int
    faults: list[StepFault] = field(default_factory=list)

    def forward(self, batch: Any, size: int) -> Outcome:
        try:
            outcome = Outcome(None, self.function(batch))
        except self.catch as error:
            return Outcome(self._fault(error))
        outcome.bad_rows = non_finite_rows(tensors_in(outcome.value), size, self.batch_dim)
        if outcome.bad_rows:
            outcome.fault = StepFault("non-finite output", "forward")
        return outcome
