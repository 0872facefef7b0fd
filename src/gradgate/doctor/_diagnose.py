"""`diagnose` and `trace`: one step, or every step of a block, under the tracer."""

from __future__ import annotations

import math
import sys
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from statistics import median
from traceback import walk_stack
from typing import Any, NamedTuple, Self

import torch

from gradgate._checks import check_module, wrong_type
from gradgate._patches import Patches, to_the_end
from gradgate._source import Location, is_foreign
from gradgate._torch_private import ThreadModes, is_compiled, run_as_written, undispatched, without_compiled_wrappers
from gradgate.doctor._case import Case, Unused, finding_at, namespaces_of
from gradgate.doctor._diagnosis import Diagnosis
from gradgate.doctor._graph import draw
from gradgate.doctor._numerics import Gradients, is_readable, norm_of
from gradgate.doctor._trace import Trace
from gradgate.doctor._tracer import Tracer, parameters_of
from gradgate.doctor.rules import apply_rules, fold
from gradgate.doctor.rules._gradients import unused_findings
from gradgate.doctor.rules._setup import live_optimizers
from gradgate.records import Finding

# --- a run of many steps ----------------------------------------------------------------------------------------------

WINDOW = 20  # the losses that a loss is compared with
GROWS = 10.0  # times the recent ones: if the update was larger than half of the weights, or the loss ends as NaN
_RUNS_AWAY = 1e3  # times the recent ones: whatever the update was
_LARGE_UPDATE = 0.5


@dataclass
class _Rates:
    """The learning rates of one optimizer."""

    location: Location | None
    steps: int = 0
    last: float = 0.0
    largest: float = 0.0
    scheduled: bool = False


class Runaway(NamedTuple):
    """The update since which a loss ran away, and the loss before and after."""

    update: int
    before: float
    after: float


@dataclass
class History:
    """The losses, learning rates and updates of a run."""

    updates: int = 0
    backwards: int = 0
    last_backward: Location | None = None
    last_update: Location | None = None
    scaled: bool = False
    largest_move: float = 0.0  # the largest update, relative to the weights
    _losses: defaultdict[Location | None, list[tuple[int, float | torch.Tensor]]] = field(
        default_factory=lambda: defaultdict(list)
    )
    _rates: dict[int, _Rates] = field(default_factory=dict)
    _before: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)

    def backward(self, loss: float | torch.Tensor | None, location: Location | None) -> None:
        """Record a backward pass; a tensor is read later, so that nothing waits for it."""
        self.backwards += 1
        self.last_backward = location
        if loss is not None:
            self._losses[location].append((self.updates, loss))

    def update(self, optimizer: torch.optim.Optimizer | None, location: Location | None) -> None:
        """Record an update: a step of an optimizer, or one by hand."""
        self.updates += 1
        self.last_update = location or self.last_update
        if optimizer is None:
            return
        rates = self._rates.setdefault(id(optimizer), _Rates(location))
        groups = [group for group in optimizer.param_groups if any(p.grad is not None for p in group["params"])]
        rates.steps += bool(groups)
        rates.last = max((float(group.get("lr", math.nan)) for group in groups), default=rates.last)
        rates.largest = max(rates.largest, abs(rates.last)) if not math.isnan(rates.last) else math.nan
        rates.scheduled |= any("initial_lr" in group for group in groups)

    def weights_before(self, optimizer: torch.optim.Optimizer) -> None:
        """Copy the weights that an optimizer is about to change."""
        with undispatched(), torch.no_grad():
            held = [p for p in parameters_of(optimizer) if p.grad is not None and is_readable(p)]
            self._before = [(p, p.detach().clone()) for p in held]

    def weights_after(self) -> None:
        """Compare the update with the weights."""
        with undispatched(), torch.no_grad():
            moved = math.hypot(*(norm_of(p - old) for p, old in self._before))
            size = math.hypot(*(norm_of(old) for _, old in self._before))
        self._before = []
        if size and math.isfinite(moved):
            self.largest_move = max(self.largest_move, moved / size)

    def losses(self) -> Iterator[float]:
        """Yield the loss of each backward pass, line by line."""
        for losses in self._losses.values():
            yield from (float(loss) for _, loss in losses)

    def findings(self, learned: set[int]) -> Iterator[Finding]:
        """Yield what only the whole run shows; `learned` has the `id` of what got a gradient, if the run has ended."""
        never_updated = self.backwards and not self.updates and not self.scaled
        if never_updated and any(id(p) in learned for optimizer in live_optimizers() for p in parameters_of(optimizer)):
            reason = f"backward() ran {self.backwards} time{'s' * (self.backwards > 1)} and gave gradients to what "
            reason += "the optimizer holds, but nothing changed the weights."
            headline, fix = (
                "error GG905: optimizer.step() is never called",
                "optimizer.step()     # after loss.backward()",
            )
            yield finding_at(self.last_backward, headline, reason, fix)
        yield from self._without_rate()
        yield from self._running_away()

    def _without_rate(self) -> Iterator[Finding]:
        for rates in self._rates.values():
            if not rates.steps or rates.largest != 0 or (rates.scheduled and rates.steps <= 2):
                continue
            steps = f"each of the {rates.steps} steps" if rates.steps > 1 else "the 1 step"
            by, fix = ".", "torch.optim.AdamW(model.parameters(), lr=1e-3)"
            if rates.scheduled:
                by = ", as its scheduler set it."
                fix = "look at the scheduler: what it multiplies the learning rate by, and how often step() runs"
            headline = "error GG906: the learning rate is 0: no weight changes"
            yield finding_at(rates.location, headline, f"It was 0 in {steps} of this optimizer{by}", fix)

    def _running_away(self) -> Iterator[Finding]:
        runs = (
            runaway([(n, float(loss)) for n, loss in losses], self.largest_move) for losses in self._losses.values()
        )
        found = next(filter(None, runs), None)
        if found is None:
            return
        what, fix = "update", "param -= 0.01 * lr * param.grad     # a learning rate a hundred times smaller"
        if self._rates:
            lr = max(rates.last for rates in self._rates.values())
            what, fix = f"learning rate {lr:g}", smaller_rate(lr)
        reason = f"After update {found.update} the loss grows from step to step: each update goes too far."
        if self.largest_move > _LARGE_UPDATE:
            reason += f" An update was {self.largest_move:.3g} times as large as the weights."
        change = f"{found.before:.3g} -> {found.after:.3g}"
        headline = f"error GG907: the loss runs away since step {found.update} ({change}): the {what} is too large"
        yield finding_at(self.last_update, headline, reason, fix)


def smaller_rate(lr: float) -> str:
    return f"lr={lr / 100:g}     # and torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)"


def runaway(losses: list[tuple[int, float]], largest_move: float = 0.0) -> Runaway | None:
    """Find the update since which a loss ran away; None for a loss that only wanders."""
    sizes = [abs(loss) for _, loss in losses]
    for number in range(1, len(sizes)):
        recent = sizes[max(0, number - WINDOW) : number]
        early = max(1.0, median(recent[: max(1, len(recent) // 2)]))
        size = sizes[number]
        ends_bad = not math.isfinite(size) and recent[-1] > GROWS * early
        moved = largest_move > _LARGE_UPDATE and all(x > GROWS * early for x in sizes[number : number + 3])
        if size > _RUNS_AWAY * early or ends_bad or (moved and size > GROWS * early):
            first = next(i for i in range(max(0, number - WINDOW), number + 1) if not sizes[i] <= 3 * early)
            peak = max((x for x in sizes[first:] if math.isfinite(x)), default=math.inf)
            return Runaway(losses[first][0], early if first == 0 else sizes[first - 1], peak)
    return None


# --- tracing ----------------------------------------------------------------------------------------------------------

# The rules examine so many steps in full; after that only steps in which the tracer saw something new.
_STEPS_IN_FULL = 2
_HOOK_WARNING = "Using `torch.compile.module.` when there are global hooks"


class Tracing:
    """A trace in progress; `trace` makes it.

    Attributes:
        steps: How many steps have been traced: of an optimizer, or updates by hand.
        tracing: Whether it is tracing now.
        history: The losses and learning rates of the whole run.
    """

    steps_in_full = _STEPS_IN_FULL

    def __init__(
        self,
        model: torch.nn.Module | None,
        namespaces: list[Mapping[str, Any]],
        *,
        one_step: bool = False,
        files: tuple[str, ...] = (),
    ) -> None:
        self.steps = 0
        self.tracing = False
        self.history = History()
        self.tracer = Tracer(self.before_update, self.after_update, self.note_backward)
        self.unused: dict[int, Unused] = {}
        self._given = model
        self._model = without_compiled_wrappers(model) if model is not None else None
        self._namespaces = namespaces
        self._one_step = one_step
        self._files = files
        self._findings: dict[Finding, None] = {}
        self._drawn = Diagnosis()  # the newest with a graph
        self._exception: BaseException | None = None
        self._ended = False
        self._zeros = 0
        self._trained: set[int] = set()
        self._learned: set[int] = set()
        self._functional = False
        self._surroundings = Patches()
        self._modes = ThreadModes()
        self._begin_step()
        if model is not None:
            self.tracer.reuse.start(model.parameters())
            self.tracer.drawn = frozenset(id(module) for module in model.modules())

    @property
    def diagnosis(self) -> Diagnosis:
        """Return what was found so far, over all steps; inside the block, up to the last step of the optimizer.

        The graph is that of the newest step that the rules examined: one of the first, or a later one that was
        suspicious.
        """
        unused = [entry for entry in self.unused.values() if id(entry.parameter) not in self._learned]
        run = self.history.findings(self._learned if self._ended else set())
        findings = fold((*self._findings, *unused_findings(unused), *run))
        return replace(self._drawn, findings=findings, exception=self._exception)

    def __repr__(self) -> str:
        return f"Tracing(steps={self.steps}, {'on' if self.tracing else 'off'})"

    def __enter__(self) -> Self:
        try:
            self.tracer.install()
            self.resume()
        except BaseException:  # an interrupt: nobody calls `__exit__`
            self.stop(interrupted=True)
            raise
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        try:
            self._ended = error is None
            if self.tracing:
                self.pause(error)
        finally:
            self.stop(interrupted=error is not None and not isinstance(error, Exception))

    def explain(self, step_fn: Callable[[], Any]) -> Diagnosis:
        """Trace a step, and backward if it returns a loss instead; return what was found."""
        try:
            with self:
                result = step_fn()
                if isinstance(result, torch.Tensor) and not self.tracer.trace.backwards:
                    result.backward()  # type: ignore[no-untyped-call]
        except Exception as error:
            if error is not self._exception:  # whatever the step raises is what the diagnosis is about
                raise
        except BaseException:  # an interrupt, perhaps while it stops
            self.stop(interrupted=True)
            raise
        return self.diagnosis

    def resume(self) -> None:
        """Go on tracing after `pause`; compiled models run uncompiled meanwhile."""
        self.tracing = True
        run_as_written(self._surroundings)
        warnings.filterwarnings("ignore", message=_HOOK_WARNING)
        self.tracer.resume()

    def pause(self, error: BaseException | None = None) -> None:
        """Stop tracing until `resume`, and draw conclusions from what has been traced."""
        self.stop_tracing()
        self._exception = None if isinstance(error, KeyboardInterrupt | SystemExit | GeneratorExit) else error
        if self._exception is not None or self.tracer.trace.backwards or not self.steps:
            self._conclude(self._exception)
        self._end_step()

    def stop_tracing(self) -> None:
        self.tracing = False
        self.tracer.pause()
        self._surroundings.undo()
        # All other filters, also new ones, stay as the user has them.
        for ours in [entry for entry in warnings.filters if entry[1] and entry[1].pattern == _HOOK_WARNING][:1]:
            warnings.filters.remove(ours)  # type: ignore[attr-defined]

    def stop(self, *, interrupted: bool = False) -> None:
        """Stop tracing and remove every hook; it may be called again."""

        def clean_up() -> None:
            self.stop_tracing()
            self.tracer.uninstall()
            if interrupted:
                self._modes.restore()

        to_the_end(clean_up)

    def note_backward(self, loss: float | None, location: Location | None) -> None:
        """Called for each backward pass that is traced."""
        if not self._one_step:
            self.history.backward(loss, location)

    def before_update(self, optimizer: torch.optim.Optimizer | None) -> None:
        """Called before each step of an optimizer that is traced, and each update by hand."""
        trace = self.tracer.trace
        if not self._one_step:
            self._thorough = self.steps < self.steps_in_full or _is_suspicious(trace, self._zeros)
            location = trace.updated_by_hand if optimizer is None else trace.optimizer_steps[-1].location
            self.history.update(optimizer, location)
            if optimizer is not None and self.steps < self.steps_in_full:
                self.history.weights_before(optimizer)
        if self._thorough and optimizer is not None:
            self.gradients.take(parameters_of(optimizer))

    def after_update(self, optimizer: torch.optim.Optimizer | None) -> None:
        """Called after it."""
        trace = self.tracer.trace
        if self._one_step:
            return
        self.steps += 1
        self.history.weights_after()
        if self._thorough or any(step.again for step in trace.optimizer_steps):
            self._zeros = len(trace.zeros)
            self._conclude(None)
        self._end_step()

    def _begin_step(self) -> None:
        self.gradients = Gradients(self._model.parameters() if self._model is not None else ())
        self._thorough = True

    def _end_step(self) -> None:
        trace = self.tracer.trace
        self.history.scaled |= trace.scaled
        self._functional |= trace.functional or any(backward.inputs is not None for backward in trace.backwards)
        self.tracer.begin_again()
        self._begin_step()

    def _conclude(self, exception: BaseException | None) -> None:
        """Apply the rules to what has been traced."""
        case = self.case(exception)
        findings = apply_rules(case)
        self._findings.update(dict.fromkeys((*findings, *self._note_on_compiling())))
        self.unused.update((id(entry.parameter), entry) for entry in case.unused)
        self._trained |= case.trained_modules
        self._learned.update(number for number, taken in self.gradients.taken.items() if taken.present)
        graph, layers = draw(case, findings)
        if graph is not None:
            self._drawn = Diagnosis(graph=graph, layers=layers)

    def case(self, exception: BaseException | None) -> Case:
        spaces = [*self._namespaces, *_variables_of_users()]
        case = Case(self.tracer, self._model, spaces, self.gradients, exception)
        case.one_step, case.files = self._one_step, self._files
        case.trained_modules |= self._trained
        return case

    def _note_on_compiling(self) -> Iterator[Finding]:
        roots = [*self.tracer.trace.modules, *([self._given] if self._given is not None else [])]
        compiled = [path for root in roots for path, module in root.named_modules() if is_compiled(module)]
        if compiled:
            headline = "info GG001: the model is compiled; it ran without torch.compile for this diagnosis"
            reason = "Compiled code has no lines to point at. What is found here holds for the compiled model as "
            reason += "well, unless the compiler itself is at fault."
            yield finding_at(None, headline, reason, module=compiled[0] or None)


def _is_suspicious(trace: Trace, zeros: int) -> bool:
    return (
        bool(trace.overwrites)
        or len(trace.zeros) != zeros
        or any(bad.kind == "nan" or bad.stage == "backward" for bad in trace.bad)
        or any(backward.is_bad for backward in trace.backwards)
    )


def _variables_of_users() -> Iterator[Mapping[str, Any]]:
    """Yield the variables of the functions of the user that are running."""
    for frame, _ in walk_stack(sys._getframe(1)):
        if not is_foreign(frame.f_code.co_filename):
            yield frame.f_locals


# --- one step, and step after step ------------------------------------------------------------------------------------


def diagnose(step_fn: Callable[[], Any], model: torch.nn.Module | None = None) -> Diagnosis:
    """Run one step under the tracer and explain why it does not learn, where a NaN comes from, or what overwrote it.

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
        why = "it runs one step of yours: forward, loss and backward."
        fix = "gg.diagnose(lambda: loss_fn(model(x), y), model=model)"
        raise wrong_type(step_fn, "step_fn", "diagnose", why, fix)
    if model is not None:
        check_module(model, name="model", function="diagnose")
    frame = sys._getframe(1)
    namespaces = [*namespaces_of(step_fn), frame.f_locals, frame.f_globals]
    diagnosis = Tracing(model, namespaces, one_step=True).explain(step_fn)
    if diagnosis.exception is not None and "saved tensor hooks" in str(diagnosis.exception):
        # torch.func.grad does not run under hooks for saved tensors; the rest can be traced without them.
        without_hooks = Tracing(model, namespaces, one_step=True)
        without_hooks.tracer.saves = False
        diagnosis = without_hooks.explain(step_fn)
    return diagnosis


def trace(model: torch.nn.Module | None = None) -> Tracing:
    """Trace everything that this thread does in a block, step after step, and explain what is wrong with it.

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
