"""One try of the user's code on a batch: run it, judge what it returned, run backward; and what can go wrong in it."""

from __future__ import annotations

import dis
import inspect
import math
import re
import types
from collections.abc import Callable, Collection
from dataclasses import dataclass
from numbers import Real
from typing import Any, Literal, Protocol

import torch

from gradgate._finite import FiniteCheck
from gradgate._names import describe
from gradgate._source import raising_line, raising_spot
from gradgate._state import TrainingState
from gradgate._text import class_name, text_of
from gradgate._torch_private import ModuleCall, innermost_call
from gradgate._trees import non_finite_rows, tensors_in
from gradgate.errors import ArgumentTypeError, ArgumentValueError
from gradgate.guard._outsiders import reachable
from gradgate.records import Stage

# --- Faults ---------------------------------------------------------------------------------------------------------


Cause = Literal["exception", "non-finite loss", "non-finite gradient", "non-finite output"]

NO_MEMORY = (MemoryError, torch.OutOfMemoryError)
FATAL = (*NO_MEMORY, torch.AcceleratorError)
# torch says these with a plain RuntimeError: the machine has no memory left, or the device is beyond repair.
NO_MEMORY_TEXTS = ("out of memory", "can't allocate memory", "not enough memory", "CUBLAS_STATUS_ALLOC_FAILED")
FATAL_TEXTS = (*NO_MEMORY_TEXTS, "device-side assert")


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
        """Tell whether another try failed in the same way: the same cause, and for exceptions the same origin."""
        if self.error is None or other.error is None:
            return self.cause == other.cause
        return type(self.error) is type(other.error) and self.spot == other.spot and self.module is other.module

    @property
    def module(self) -> torch.nn.Module | None:
        """The innermost module that the exception came through."""
        return None if self.call is None else self.call.module

    @property
    def exception_type(self) -> str | None:
        """The class of the exception with its module, as `package.Error`; Python's own without it."""
        kind = type(self.error)
        return None if self.error is None else class_name(kind)

    @property
    def message(self) -> str:
        """What the exception or the check said, in one text."""
        if self.error is not None:
            return text_of(self.error)
        return f"{self.cause}: {self.loss}" if self.cause == "non-finite loss" else self.cause

    @property
    def where(self) -> str | None:
        """The user's line that the exception came through."""
        return None if self.error is None else raising_line(self.error.__traceback__)


def must_pass(error: BaseException) -> bool:
    """Tell whether an exception is never blamed on a sample, whatever `catch` says."""
    if not isinstance(error, Exception) or isinstance(error, FATAL):
        return True
    return isinstance(error, RuntimeError) and any(text in text_of(error) for text in FATAL_TEXTS)


def is_out_of_memory(error: BaseException) -> bool:
    """Tell whether an exception says that there is no memory left."""
    if isinstance(error, NO_MEMORY):
        return True
    return isinstance(error, RuntimeError) and any(text in text_of(error) for text in NO_MEMORY_TEXTS)


# --- What to say about them -----------------------------------------------------------------------------------------


_MODELS = ("model", "net", "network", "module")
_DIAGNOSE = "print(gg.diagnose(lambda: loss_fn(batch), model=model))   # names the line"
# torch has a dozen texts for these two; whether the batch is what differs is looked up, not read from them.
_OTHER_DEVICE = re.compile(r"same device|expected device|different device|weight type")
_OTHER_DTYPE = re.compile(r"type")


def check_function(batch: Any, function: Any, call: str) -> None:
    """Refuse a function that cannot be called; `call` is the line that is right."""
    if callable(function):
        return
    method, _, name = call.strip(")").partition("(batch, ")
    swapped = callable(batch) and not isinstance(batch, torch.Tensor)
    raise ArgumentTypeError(
        f"{method.capitalize()}(): `{name}` is {describe(function)}"
        + (", and `batch` a function." if swapped else "."),
        why="the batch comes first."
        if swapped
        else "the guard calls it, and again with parts of the batch if one is bad.",
        fix=call if swapped else f"{call}   # the function itself, not what it returned",
    )


def check_call(function: Callable[..., Any], batch: Any, error: BaseException) -> None:
    """Refuse a loss function that cannot be called with the batch alone: then the error is not from within it."""
    traceback = error.__traceback__
    while traceback is not None and traceback.tb_next is not None:
        traceback = traceback.tb_next
    raised_in = traceback.tb_frame.f_globals.get("__name__", "") if traceback is not None else ""
    if not isinstance(error, TypeError) or raised_in not in ("gradgate.guard._trial", "torch.nn.modules.module"):
        return
    try:
        signature = inspect.signature(function.forward if isinstance(function, torch.nn.Module) else function)
        if _fits(signature, batch):
            return
    except ValueError:  # a builtin without a signature
        return
    raise ArgumentTypeError(
        f"Guard.backward(): `loss_fn{signature}` cannot be called with the batch alone: {text_of(error)}",
        why="the guard calls loss_fn(batch), and again with parts of the batch if a sample is bad.",
        fix=_adapted(function, signature, batch),
    )


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


def refuse_own_backward() -> None:
    """Refuse a loss function that has made gradients before the guard did."""
    raise ArgumentTypeError(
        "Guard.backward(): `loss_fn` calls backward() itself.",
        why="the guard does that with the loss that is returned; gradients would be there twice.",
        fix="return loss   # without loss.backward() before it",
    )


def advice(
    fault: StepFault, batch: Any, function: Callable[..., Any], parameters: list[torch.Tensor]
) -> tuple[str, str]:
    """Give the reason and the fix that fit a fault that no sample is blamed for."""
    if _ignores_batch(function):
        return "`loss_fn` must use the batch that it is given: the guard calls it with parts of yours.", ""
    if fault.error is None:
        return _of_values(fault, batch, parameters)
    return _of_exception(text_of(fault.error), batch, function, parameters)


def _of_values(fault: StepFault, batch: Any, parameters: list[torch.Tensor]) -> tuple[str, str]:
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
        kept = [
            path for path, thing in reachable(function) if path and isinstance(thing, torch.Tensor) and thing.grad_fn
        ]
        if kept:
            return f"{why}: `{kept[0]}` has one.", f"{kept[0]} = {kept[0]}.detach()   # before guard.backward(...)"
        return f"{why}.", ""
    devices, dtypes = ({getattr(p, of) for p in parameters} for of in ("device", "dtype"))
    if _OTHER_DEVICE.search(text) and len(devices) == 1:
        (device,) = devices
        fix = _changed(batch, lambda part: part.device != device, f'to("{device}")')
        where = (
            f"the model is on {device}, and the batch is not"
            if fix
            else f"model and batch are on {device}; something else is not"
        )
        return f"{where}.", fix
    if _OTHER_DTYPE.search(text) and len(dtypes) == 1:
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
    """Tell whether a plain function never reads its only argument."""
    if not isinstance(function, types.FunctionType) or function.__code__.co_argcount != 1:
        return False
    name = function.__code__.co_varnames[0]
    if name in function.__code__.co_cellvars:
        return False
    reads = (
        step for step in dis.get_instructions(function) if step.opname.startswith(("LOAD_FAST", "STORE_FAST_LOAD"))
    )
    return not any(name == step.argval or (isinstance(step.argval, tuple) and name in step.argval) for step in reads)


Catch = tuple[type[BaseException], ...]
LossFunction = Callable[[Any], torch.Tensor | tuple[torch.Tensor, float | torch.Tensor]]
NO_LOSS: Any = object()
"""What a loss function of an integration gives where the user's code skips the batch."""


class Scaler(Protocol):
    """What the guard needs of `torch.amp.GradScaler`."""

    def scale(self, outputs: torch.Tensor, /) -> torch.Tensor:
        """Multiply a loss by the scale."""

    def is_enabled(self) -> bool:
        """Tell whether there is a scale at all."""


@dataclass(slots=True)
class Outcome:
    """How a try ended."""

    fault: StepFault | None = None
    value: Any = None
    per_sample: torch.Tensor | None = None
    bad_rows: frozenset[int] | None = None
    count: torch.Tensor | None = None

    @property
    def skipped(self) -> bool:
        """Whether the loss function gave no loss, on purpose."""
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


class Trial(Protocol):
    """A try that can be made again and again."""

    runs_backward: bool
    catch: Catch

    def forward(self, batch: Any, size: int) -> Outcome:
        """Run the user's code and judge its result, without walking back."""

    def run(self, batch: Any, size: int) -> Outcome:
        """Run it as the step does."""

    def let_go(self, *, but: Collection[StepFault | None]) -> None:
        """Drop the tracebacks of faults so far: they hold what the user's code held when it failed."""

    @property
    def function(self) -> Callable[[Any], Any]:
        """The user's code."""


class _Catching:
    """Keeps the faults that were caught, to let go of what they hold."""

    catch: Catch
    _faults: list[StepFault]

    def let_go(self, *, but: Collection[StepFault | None]) -> None:
        """Drop the tracebacks of faults so far, except of some, which would keep activations alive."""
        for fault in self._faults:
            if fault.error is not None and fault not in but:
                fault.error.with_traceback(None)  # also where the class lets nobody set an attribute
        self._faults.clear()

    def _fault(self, error: BaseException, stage: Stage | None = None) -> StepFault:
        """Make a fault of an exception that was caught."""
        fault = StepFault.raised(error, stage)
        self._faults.append(fault)
        return fault


class LossTrial(_Catching):
    """The tries of `Guard.backward`: a loss function, and backward."""

    runs_backward = True

    def __init__(
        self,
        function: LossFunction,
        state: TrainingState,
        check: FiniteCheck,
        catch: Catch,
        scaler: Scaler | None = None,
        accumulate: int = 1,
    ) -> None:
        self.function = function
        self.catch = catch
        self._faults = []
        self.scaler = scaler
        self.accumulate = accumulate
        self._state = state
        self._check = check
        self.before_backward: Callable[[Outcome], None] | None = None
        self.first = False

    def forward(self, batch: Any, size: int) -> Outcome:
        """Run the loss function and look at the loss."""
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
        try:
            (root if self.scaler is None else self.scaler.scale(root)).backward()
        except self.catch as error:
            if must_pass(error):
                raise
            outcome.fault = self._fault(error, "backward")
            return outcome
        outcome.value = loss.detach()
        if self._check.has_nonfinite(self._state.gradients(), None if loss.is_cpu else outcome.judged):
            number = float(outcome.judged.item())
            if not math.isfinite(number):
                return self._blame_loss(outcome, number, size)
            outcome.fault = StepFault("non-finite gradient", "backward", loss=number)
        return outcome

    def _call(self, batch: Any, size: int) -> Outcome:
        try:
            value: Any = self.function(batch)
        except self.catch as error:
            if must_pass(error):
                raise
            check_call(self.function, batch, error)
            return Outcome(self._fault(error))
        if value is NO_LOSS:
            return Outcome()
        # Judged outside of the try: a loss of the wrong kind is nobody's fault but the caller's.
        if (self.first or not isinstance(value, torch.Tensor)) and self._state.has_own_gradients():
            refuse_own_backward()
        count = None
        if type(value) is tuple and len(value) == 2 and isinstance(value[0], torch.Tensor):
            value, count = value[0], _counted(*value)
        if not isinstance(value, torch.Tensor):
            raise ArgumentTypeError(
                f"Guard.backward(): `loss_fn` returned {describe(value)}.",
                why="it gives the mean loss of the batch, one loss for each sample, or a total and its count.",
                fix="return loss   # the tensor, no loss.item(); or return losses.sum(), len(losses)",
            )
        if value.is_complex():
            raise ArgumentTypeError(
                f"Guard.backward(): `loss_fn` returned {describe(value)}.",
                why="a loss is made smaller, and complex numbers have no order.",
                fix="return loss.abs()   # or loss.real",
            )
        if value.dim() == 0:
            return Outcome(None, value, count=count)
        if value.dim() == 1 and value.shape[0] == size:
            return Outcome(None, value.mean(), value.detach())
        if value.numel() == 1:
            return Outcome(None, value.reshape(()))
        raise ArgumentValueError(
            f"Guard.backward(): `loss_fn` returned {describe(value)} for a batch of {size} samples.",
            why="a loss is one number for the batch or one for each sample.",
            fix="return losses.flatten(1).mean(1)",
        )

    def _blame_loss(self, outcome: Outcome, number: float, size: int) -> Outcome:
        outcome.fault = StepFault("non-finite loss", "loss", loss=number)
        if outcome.per_sample is not None:
            outcome.bad_rows = non_finite_rows([outcome.per_sample], size, 0)
        return outcome


def _counted(total: torch.Tensor, count: Any) -> torch.Tensor:
    """Give the count of a total in double precision; a tensor is not read by the host."""
    numbers = count.numel() if isinstance(count, torch.Tensor) else int(isinstance(count, Real))
    if total.dim() or numbers != 1:
        raise ArgumentTypeError(
            f"Guard.backward(): `loss_fn` returned a tuple of {describe(total)} and {describe(count)}.",
            why="two values are the sum of the loss and how much it is a sum of (samples, tokens), one number each.",
            fix="return losses.sum(), len(losses)   # then guard.finish() before optimizer.step()",
        )
    return torch.as_tensor(count, dtype=torch.float64, device=total.device).detach().reshape(())


class OutputTrial(_Catching):
    """The tries of `Guard.forward`: any function of a batch whose outputs have one row for each sample."""

    runs_backward = False

    def __init__(self, function: Callable[[Any], Any], catch: Catch, batch_dim: int) -> None:
        self.function = function
        self.catch = catch
        self._faults = []
        self._batch_dim = batch_dim

    def forward(self, batch: Any, size: int) -> Outcome:
        """Run the function and look at its outputs."""
        try:
            outcome = Outcome(None, self.function(batch))
        except self.catch as error:
            if must_pass(error):
                raise
            return Outcome(self._fault(error))
        outcome.bad_rows = non_finite_rows(tensors_in(outcome.value), size, self._batch_dim)
        if outcome.bad_rows:
            outcome.fault = StepFault("non-finite output", "forward")
        return outcome

    def run(self, batch: Any, size: int) -> Outcome:
        """Run it as `forward` does: there is no way back."""
        return self.forward(batch, size)
