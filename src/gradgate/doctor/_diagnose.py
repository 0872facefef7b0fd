"""`diagnose` and `trace`: one step, or every step of a block, under the tracer."""

from __future__ import annotations

import math
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from types import FrameType, TracebackType
from typing import Any

import torch

from gradgate._checks import check_module
from gradgate._names import describe
from gradgate._patches import Patches, to_the_end
from gradgate._source import Location, is_foreign
from gradgate._torch_private import ThreadModes, is_compiled, run_as_written, without_compiled_wrappers
from gradgate.doctor._case import Case, Names, Unused, namespaces_of
from gradgate.doctor._diagnosis import Diagnosis
from gradgate.doctor._graph import Graph, Layer, draw
from gradgate.doctor._history import History
from gradgate.doctor._numerics import Gradients, is_all_zero, is_readable
from gradgate.doctor._trace import Flow, Trace
from gradgate.doctor._tracer import Tracer
from gradgate.doctor.rules import apply_rules, fold
from gradgate.doctor.rules._gradients import unused_findings
from gradgate.doctor.rules._modes import find_statistics
from gradgate.errors import ArgumentTypeError
from gradgate.records import Finding

_HOOK_WARNING = "Using `torch.compile.module.` when there are global hooks"

# --- one step ---------------------------------------------------------------------------------------------------------


class Examination:
    """A tracer together with what it takes to draw a conclusion."""

    def __init__(self, model: torch.nn.Module | None, namespaces: list[Mapping[str, Any]]) -> None:
        self.given = model
        self.model = without_compiled_wrappers(model) if model is not None else None
        self.namespaces = namespaces
        self.tracer = Tracer()
        self.tracer.before_step.append(self._before_step)
        self._surroundings = Patches()
        self._modes = ThreadModes()
        self.thorough = True
        self.one_step = True
        self.unused: dict[int, Unused] = {}
        self._trained: set[int] = set()
        self.files: tuple[str, ...] = ()
        self.gradients = Gradients(model.parameters() if model is not None else ())
        if model is not None:
            self.tracer.reuse.start(model.parameters())
            self.tracer.running.drawn = frozenset(id(module) for module in model.modules())

    def _before_step(self, optimizer: torch.optim.Optimizer | None) -> None:
        if self.thorough and optimizer is not None:
            self.gradients.take(parameter for group in optimizer.param_groups for parameter in group["params"])

    @contextmanager
    def running(self) -> Iterator[None]:
        """Trace a block."""
        try:
            self.tracer.install()
            self.resume()
            yield
        finally:
            self.stop()

    def stop(self, *, interrupted: bool = False) -> None:
        """Trace no longer, and leave nothing behind; may be called again."""
        to_the_end(partial(self._stop, interrupted))

    def _stop(self, interrupted: bool) -> None:
        self.pause()
        self.tracer.uninstall()
        if interrupted:
            self._modes.restore()

    def resume(self) -> None:
        """Begin to trace, with torch.compile standing aside."""
        run_as_written(self._surroundings)
        warnings.filterwarnings("ignore", message=_HOOK_WARNING)
        self.tracer.resume()

    def pause(self) -> None:
        """Trace no longer."""
        self.tracer.pause()
        self._surroundings.undo()
        # All other filters, also new ones, stay as the user has them.
        ours = next((entry for entry in warnings.filters if entry[1] and entry[1].pattern == _HOOK_WARNING), None)
        if ours is not None:
            warnings.filters.remove(ours)  # type: ignore[attr-defined]

    def run(self, step_fn: Callable[[], Any]) -> None:
        """Run a step, and backward if the step leaves it to us."""
        result = step_fn()
        if isinstance(result, torch.Tensor) and not self.tracer.trace.backwards:
            result.backward()  # type: ignore[no-untyped-call]

    def attempt(self, step_fn: Callable[[], Any]) -> Exception | None:
        """Trace a step."""
        try:
            with self.running():
                self.run(step_fn)
        except Exception as error:  # noqa: BLE001 - whatever the step raises is what the diagnosis is about
            return error
        except BaseException:  # an interrupt, perhaps in the block's own end
            self.stop(interrupted=True)
            raise
        return None

    def diagnosis(self, exception: BaseException | None) -> Diagnosis:
        """Return what was found in one step, with one finding for each cause."""
        found = self.conclude(exception)
        return replace(found, findings=fold(found.findings))

    def conclude(self, exception: BaseException | None) -> Diagnosis:
        """Return everything that the rules say about what has been traced."""
        trace, case = self.tracer.trace, self._case(exception)
        findings = apply_rules(case)
        roots = [*trace.modules, *([self.given] if self.given is not None else [])]
        compiled = [path for root in roots for path, module in root.named_modules() if is_compiled(module)]
        self.unused.update((id(entry.parameter), entry) for entry in case.unused)
        self._trained |= {id(op.module) for op in trace.ops if op.records and op.module is not None}
        return Diagnosis((*findings, *_note_on_compiling(compiled)), exception, *draw(case, findings))

    def validation(self) -> list[Finding]:
        """Return what is wrong with a forward pass without gradients."""
        return list(find_statistics(self._case(None)))

    def _case(self, exception: BaseException | None) -> Case:
        trace = self.tracer.trace
        names = Names(self.model, trace.modules, [*self.namespaces, *_variables_of_users()])
        flow = Flow(trace)
        parameters = self._parameters(names, flow)
        self.gradients.take(parameters.values())
        trace.gradients_left = any(
            p.grad is not None and (not is_readable(p.grad) or not is_all_zero(p.grad)) for p in parameters.values()
        )
        return Case(
            trace=trace,
            flow=flow,
            names=names,
            parameters=parameters,
            gradients=self.gradients.taken,
            exception=exception,
            previous=self.tracer.previous,
            known_model=self.model is not None or bool(trace.optimizer_steps) or trace.updated_by_hand is not None,
            one_step=self.one_step,
            files=self.files,
            frozen_at={n: freeze for n, (tensor, freeze) in self.tracer.frozen.items() if tensor() is not None},
            trained_modules=frozenset(self._trained),
        )

    def _parameters(self, names: Names, flow: Flow) -> dict[str, torch.Tensor]:
        """Return what ought to learn: the model's parameters, else what the optimizers hold, else the leaves in use."""
        if self.model is not None:
            return dict(self.model.named_parameters())
        trace = self.tracer.trace
        steps = trace.optimizer_steps
        every = {v: r.tensor for v, r in trace.roots.items() if r.leaf and r.requires_grad and r.tensor is not None}
        # A plain leaf that the step itself computed is data: the input of a gradient penalty, a loss without a graph.
        given = flow.behind_losses - flow.losses - flow.maker.keys()
        leaves = [leaf for v, leaf in every.items() if v in given or isinstance(leaf, torch.nn.Parameter)]
        held = [p for step in steps for group in step.optimizer.param_groups for p in group["params"]]
        if held:
            # Another network may take part that is not meant to learn here; what has a gradient is asked about, though.
            leaves = [leaf for leaf in leaves if leaf.grad is not None]
        used = [p for module in trace.modules for p in module.parameters()] if not held else []
        found: dict[str, torch.Tensor] = {}
        for leaf in dict.fromkeys([*held, *used, *leaves] or every.values()):
            name = names.of_tensor(leaf)
            if name is None and trace.modules and leaf.grad is None:  # of an old model or layer, or tied since
                continue
            name = name or f"the tensor of shape {tuple(leaf.shape)}"
            found[name if name not in found else f"{name} ({len(found)})"] = leaf
        return found


def _note_on_compiling(compiled: list[str]) -> list[Finding]:
    if not compiled:
        return []
    return [
        Finding(
            code="GG001",
            severity="info",
            title="the model is compiled; it ran without torch.compile for this diagnosis",
            module=compiled[0] or None,
            reason="Compiled code has no lines to point at. What is found here holds for the compiled model as well, "
            "unless the compiler itself is at fault.",
            fix="",
        )
    ]


def diagnose(step_fn: Callable[[], Any], model: torch.nn.Module | None = None) -> Diagnosis:
    """Run one step under the tracer and say why it does not learn, where a NaN comes from, or which line overwrote it.

    The step does forward, loss and backward itself, or returns the loss; it may call an optimizer. It is run once, and
    what it changes (gradients, weights, buffers, random state) is changed as in any step. When it raises, that is part
    of the diagnosis and not raised again. Compiled models run uncompiled.

    Args:
        step_fn: The step; takes nothing.
        model: The model that ought to learn. Without it, what the optimizers hold counts, else whatever is used.

    Returns:
        The findings, and the exception if there was one.

    Raises:
        ArgumentTypeError: `step_fn` is not callable, or `model` is not a module.

    Examples:
        >>> encoder, head = torch.nn.Linear(3, 3), torch.nn.Linear(3, 1)
        >>> model = torch.nn.ModuleDict({"encoder": encoder, "head": head})
        >>> def step():
        ...     features = encoder(torch.ones(4, 3)).detach()
        ...     return head(features).mean()
        >>> finding = gg.diagnose(step, model=model).findings[0]
        >>> finding.code, finding.title
        ('GG101', 'encoder.weight, encoder.bias get no gradient: cut at `encoder(torch.ones(4, 3)).detach()`')
    """
    if not callable(step_fn):
        raise ArgumentTypeError(
            f"diagnose(): `step_fn` is {describe(step_fn)}.",
            why="it runs one step of yours: forward, loss and backward.",
            fix="gg.diagnose(lambda: loss_fn(model(x), y), model=model)",
        )
    if model is not None:
        check_module(model, name="model", function="diagnose")
    namespaces = [*namespaces_of(step_fn), *_variables_of_caller()]
    examination = Examination(model, namespaces)
    raised = examination.attempt(step_fn)
    if raised is not None and "saved tensor hooks" in str(raised):
        # torch.func.grad does not bear the hooks that tell who saved what; the rest can be seen without them.
        examination = Examination(model, namespaces)
        examination.tracer.saves = False
        raised = examination.attempt(step_fn)
    return examination.diagnosis(raised)


def _variables_of_users() -> Iterator[Mapping[str, Any]]:
    """Yield the variables of the functions of the user that are running."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if not is_foreign(frame.f_code.co_filename):
            yield frame.f_locals
        frame = frame.f_back


def _variables_of_caller() -> list[Mapping[str, Any]]:
    frame = sys._getframe(2)
    return [frame.f_locals, frame.f_globals]


# --- step after step --------------------------------------------------------------------------------------------------


# The rules look at so many steps in full; after that only at steps in which the tracer saw something new.
_STEPS_IN_FULL = 2


class Tracing:
    """A trace in progress; `trace` makes it.

    Attributes:
        steps: How many steps have been traced: of an optimizer, or updates by hand.
        tracing: Whether it is tracing now.
        without_saves: Do not look at what is saved for backward; torch.func.grad cannot run while that is done.
        after_step: Called after each step that was traced.
        history: The losses and learning rates of the whole run.
    """

    def __init__(
        self, model: torch.nn.Module | None, namespaces: list[Mapping[str, Any]], files: tuple[str, ...] = ()
    ) -> None:
        self.steps = 0
        self.tracing = False
        self.without_saves = False
        self.after_step: Callable[[torch.optim.Optimizer | None], None] | None = None
        self.at_end: list[Callable[[], None]] = []
        self.history = History()
        self.own_losses = True
        self.steps_in_full = _STEPS_IN_FULL
        self._examination = Examination(model, namespaces)
        self._examination.one_step, self._examination.files = False, files
        self._examination.tracer.before_step.insert(0, self._before_step)
        self._examination.tracer.after_step.append(self._after_step)
        self._findings: dict[Finding, None] = {}
        self._drawn: tuple[Graph | None, tuple[Layer, ...]] = (None, ())
        self._exception: BaseException | None = None
        self._ended = False
        self._zeros = 0
        self._noted = 0
        self._learned: set[int] = set()
        self._functional = self._validating = self._validated = False

    @property
    def diagnosis(self) -> Diagnosis:
        """Return what was found so far, over all steps; inside the block, up to the last step of the optimizer.

        The graph is that of the newest step that the rules looked at: one of the first, or a later one that looked
        suspicious.
        """
        unused = [entry for entry in self._examination.unused.values() if id(entry.parameter) not in self._learned]
        run = self.history.findings(self._learned if self._ended and self._exception is None else set())
        return Diagnosis(fold((*self._findings, *unused_findings(unused), *run)), self._exception, *self._drawn)

    def __repr__(self) -> str:
        return f"Tracing(steps={self.steps}, {'on' if self.tracing else 'off'})"

    def __enter__(self) -> Tracing:
        try:
            self._examination.tracer.install()
            self.resume()
        except BaseException:  # an interrupt: nobody calls `__exit__`
            self._examination.stop(interrupted=True)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._ended = error is None
        self.end_validation()
        for undo in self.at_end:
            undo()
        try:
            if self.tracing:
                self.pause(error)
        finally:
            self._examination.stop(interrupted=kind is not None and not issubclass(kind, Exception))

    def resume(self) -> None:
        """Go on tracing after `pause`."""
        self._examination.tracer.saves = not self.without_saves
        self.tracing = True
        self._examination.resume()

    def pause(self, error: BaseException | None = None) -> None:
        """Stop tracing until `resume`, and say what was found in what has been traced."""
        self.tracing = False
        self._examination.pause()
        self._exception = None if isinstance(error, KeyboardInterrupt | SystemExit | GeneratorExit) else error
        trace = self._examination.tracer.trace
        if self._exception is not None or trace.backwards or not self.steps:
            self._conclude(self._exception)
        self._begin_step()

    @property
    def modules(self) -> list[torch.nn.Module]:
        """Return the outermost modules that were called."""
        return self._examination.tracer.trace.modules

    @property
    def trained(self) -> bool:
        """Return whether any backward pass ran, or torch.func did the work."""
        return bool(self.history.backwards or self.history.updates) or self._functional

    def covers(self, step: int) -> bool:
        """Return whether the step of this number was traced."""
        return step < self.steps or self._exception is not None

    def begin_validation(self, module: torch.nn.Module) -> None:
        """Trace a forward pass without gradients in which a BatchNorm layer learns, until `end_validation`."""
        if self._validated or self.tracing:
            return
        self.resume()
        self._validating = True
        self._examination.tracer.running.begin(module, self._examination.tracer.trace)

    def end_validation(self) -> None:
        """Stop tracing a validation, and say if BatchNorm learned from it."""
        if not self._validating:
            return
        self._validating, self.tracing = False, False
        self._examination.pause()
        found = self._examination.validation()
        self._validated = bool(found)
        self._findings.update(dict.fromkeys(found))
        self._begin_step()

    def untraced_step(self, optimizer: torch.optim.Optimizer, location: Location | None) -> None:
        """Record a step of an optimizer that is not traced: its learning rate, and parameters that learn after all."""
        self.history.update(optimizer, location)
        for entry in self._examination.unused.values():
            if entry.parameter.grad is not None:
                self._learned.add(id(entry.parameter))

    def _before_step(self, optimizer: torch.optim.Optimizer | None) -> None:
        trace = self._examination.tracer.trace
        self._examination.thorough = self.steps < self.steps_in_full or _is_suspicious(trace, self._zeros)
        self._note_losses()
        if optimizer is None:
            self.history.update(None, trace.updated_by_hand)
            return
        self.history.update(optimizer, trace.optimizer_steps[-1].location)
        if self.steps < self.steps_in_full:
            self.history.weights_before(optimizer)

    def _after_step(self, optimizer: torch.optim.Optimizer | None) -> None:
        examination = self._examination
        self.steps += 1
        self.history.weights_after()
        if examination.thorough or any(step.again for step in examination.tracer.trace.optimizer_steps):
            self._zeros = len(examination.tracer.trace.zeros)
            self._conclude(None)
        self._begin_step()
        if self.after_step is not None and (optimizer is None or examination.tracer.can_pause()):
            self.after_step(optimizer)

    def _note_losses(self) -> None:
        trace = self._examination.tracer.trace
        self.history.scaled |= trace.scaled
        self._functional |= trace.functional or any(backward.inputs is not None for backward in trace.backwards)
        for backward in trace.backwards[self._noted :] if self.own_losses else ():
            self.history.backward(backward.loss, backward.location)
        self._noted = len(trace.backwards)

    def _conclude(self, exception: BaseException | None) -> None:
        diagnosis = self._examination.conclude(exception)
        self._learned.update(number for number, taken in self._examination.gradients.taken.items() if taken.present)
        self._findings.update(dict.fromkeys(diagnosis.findings))
        if diagnosis.graph is not None:
            self._drawn = diagnosis.graph, diagnosis.layers

    def _begin_step(self) -> None:
        examination, model = self._examination, self._examination.model
        self._note_losses()
        self._noted = 0
        examination.tracer.begin_again()
        examination.gradients = Gradients(model.parameters() if model is not None else ())
        examination.thorough = True


def _is_suspicious(trace: Trace, zeros: int) -> bool:
    return (
        bool(trace.overwrites)
        or len(trace.zeros) != zeros
        or any(bad.kind == "nan" or bad.stage == "backward" for bad in trace.bad)
        or any(backward.loss is not None and not math.isfinite(backward.loss) for backward in trace.backwards)
    )


def trace(model: torch.nn.Module | None = None) -> Tracing:
    """Trace everything that this thread does in a block, step after step, and say what is wrong with it.

    It costs about as much as `torch.autograd.detect_anomaly` and says more; for a watch that costs nearly nothing see
    `watch`. A step ends with the step of an optimizer. An exception of the block is explained and goes on its way.

    Args:
        model: The model that ought to learn. Without it, what the optimizers hold counts, else whatever is used.

    Returns:
        The trace, to be used as a block; its `diagnosis` says what was found.

    Raises:
        ArgumentTypeError: `model` is not a module.

    Examples:
        >>> layer = torch.nn.Linear(2, 1)
        >>> optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
        >>> with gg.trace(layer) as traced:
        ...     for _ in range(3):
        ...         layer(torch.ones(4, 2)).mean().backward()
        ...         optimizer.step()
        >>> print(traced.diagnosis.findings[0].title)
        gradients grow from step to step: zero_grad is missing
    """
    if model is not None:
        check_module(model, name="model", function="trace")
    frame = sys._getframe(1)
    return Tracing(model, [frame.f_locals, frame.f_globals])
