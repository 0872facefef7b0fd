"""`watch`: a check of the gradients before the optimizer uses them, and a replay of the step when they are bad."""

from __future__ import annotations

import copy
import math
import sys
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from statistics import median
from typing import Any, Literal, TypeVar

import torch

from gradgate._checks import check_module, wrong_type, wrong_value
from gradgate._names import describe, listed
from gradgate._patches import Patches, to_the_end
from gradgate._state import BufferCopies, FiniteCheck, RandomState
from gradgate._text import user_level
from gradgate._torch_distributed import WatchedRanks
from gradgate._torch_private import ThreadModes, copy_tensors, step_hooks, undispatched, write_grad_mode
from gradgate.doctor._case import finding_at, namespaces_of
from gradgate.doctor._diagnose import GROWS, WINDOW, Tracing, runaway, smaller_rate
from gradgate.doctor._diagnosis import Diagnosis
from gradgate.doctor._numerics import bad_kind, is_readable, local_values, norm_of, total
from gradgate.doctor._tracer import parameters_of
from gradgate.errors import BadStepError, BadStepWarning
from gradgate.records import Finding

Result = TypeVar("Result")

# --- the state that a step starts from --------------------------------------------------------------------------------


class StepSnapshot:
    """The state of a model and its surroundings before a step."""

    # Buffers and the random states are copied at the start of each step. Weights are copied only when an optimizer is
    # about to write to them, because until then they are what they were.

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        # By owner, the model or an optimizer: what it has, and the copies.
        self._copies: dict[object, tuple[list[torch.Tensor], BufferCopies]] = {model: ([], BufferCopies([]))}
        self._written: list[torch.optim.Optimizer] = []
        self._random = RandomState(parameter.device for parameter in model.parameters())
        self.states: dict[torch.optim.Optimizer, dict[str, Any]] = {}  # of those that a replayed step uses

    def take(self) -> None:
        self._copy(self._model, list(self._model.buffers()))
        self._random.remember()
        self._written = []

    def before_write(self, optimizer: torch.optim.Optimizer) -> None:
        """Copy the weights that an optimizer is about to write to for the first time in this step."""
        if optimizer not in self._written:
            self._copy(optimizer, parameters_of(optimizer))
            self._written.append(optimizer)

    def _copy(self, owner: object, tensors: list[torch.Tensor]) -> None:
        """Copy tensors to where they were copied before, if they are the same ones."""
        if owner not in self._copies or list(map(id, tensors)) != list(map(id, self._copies[owner][0])):
            self._copies[owner] = tensors, BufferCopies(tensors)
        with torch.no_grad():
            self._copies[owner][1].take()

    def rewound(self, function: Callable[[], Result]) -> Result:
        """Run a function from the state before the step, and return to the present state after it."""
        parameters = list(self._model.parameters())
        written = [parameter for optimizer in self._written for parameter in parameters_of(optimizer)]
        tensors = [*parameters, *self._model.buffers(), *written]
        kept = [tensor.detach().clone() for tensor in tensors]
        gradients = [(p, p.grad) for p in parameters]
        random = RandomState(parameter.device for parameter in parameters)
        random.remember()
        training = [(module, module.training) for module in self._model.modules()]
        modes = ThreadModes()

        def come_back() -> None:
            with torch.no_grad():
                copy_tensors(tensors, kept)
            for parameter, gradient in gradients:
                parameter.grad = gradient
            for module, mode in training:
                module.training = mode
            for optimizer, state in self.states.items():
                optimizer.load_state_dict(state)
            random.restore()
            modes.restore()

        try:
            for owner in (*reversed(self._written), self._model):
                self._copies[owner][1].put_back()
            for parameter in parameters:
                parameter.grad = None
            self._random.restore()
            write_grad_mode(True)
            return function()
        finally:
            to_the_end(come_back)
            self.states.clear()


_check = FiniteCheck()


def all_finite(gradients: Iterable[torch.Tensor]) -> bool:
    """Return whether every element of every tensor is finite."""
    local = [local_values(gradient) for gradient in gradients]
    with undispatched():
        return not _check.has_nonfinite(local)


# --- the norms of many steps ------------------------------------------------------------------------------------------

_ENOUGH = 20  # norms before a norm can be out of their range
_OUT_OF_RANGE = 10.0  # times 1.4826 MAD over the median, and times the median itself
_STILL = 100  # steps after which weights are compared with what they were


class GradientLog:
    """The gradient norm of each step and, every 100 steps, the weights: one more pass over the gradients."""

    def __init__(self) -> None:
        self.updates = 0
        self._norms: deque[tuple[int, float]] = deque(maxlen=100)  # each with its update
        self._weights: dict[int, float] = {}
        self._ran_away = False

    def observe(self, held: list[torch.Tensor], names: dict[int, str], lr: float | None) -> Iterator[Finding]:
        """Record the gradients before an update, and yield what is new: a norm out of range, or weights that stay."""
        local = [local_values(p.grad) for p in held if p.grad is not None]
        with undispatched(), torch.no_grad():
            norm = float(torch.nn.utils.get_total_norm([x for x in local if is_readable(x)]))
        if math.isfinite(norm):
            yield from self._out_of_range(norm, held, names)
            self._norms.append((self.updates, norm))
            yield from self._running_away(lr)
        self.updates += 1
        if self.updates % _STILL == 1:
            yield from self._not_moved(held, names)

    def _out_of_range(self, norm: float, held: list[torch.Tensor], names: dict[int, str]) -> Iterator[Finding]:
        if len(self._norms) < _ENOUGH:
            return
        middle = median(x for _, x in self._norms)
        spread = 1.4826 * median(abs(x - middle) for _, x in self._norms)
        if norm > middle + _OUT_OF_RANGE * spread and norm > _OUT_OF_RANGE * middle:
            largest = max(held, key=lambda p: norm_of(local_values(p.grad)) if p.grad is not None else 0.0)
            name = names.get(id(largest), "a parameter")
            left = f"the gradient norm left its range at step {self.updates}: {norm:.3g}, most of it in {name}"
            reason = f"The median of the last {len(self._norms)} steps is {middle:.3g}, the spread {spread:.3g}."
            fix = "torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)     # or look at the batch of this step"
            module = name.rpartition(".")[0] or None
            yield finding_at(None, f"warning GG308: {left}", reason, fix, module=module)

    def _running_away(self, lr: float | None) -> Iterator[Finding]:
        series = list(self._norms)[-2 * WINDOW - 1 :]
        last = [size for _, size in series[-3:]]
        # One large gradient is no trend.
        grows = last == sorted(last) and last[0] > GROWS * max(1.0, min(size for _, size in series))
        found = runaway(series) if grows and not self._ran_away else None
        if found is not None:
            self._ran_away = True
            change = f"the gradient norm grows from {found.before:.3g} to {found.after:.3g}"
            rate = f" with a learning rate of {lr:g}" if lr is not None else ""
            headline = f"error GG907: the training runs away since update {found.update}: {change}{rate}"
            reason = "Each update goes too far, so that the next gradient is larger."
            yield finding_at(None, headline, reason, smaller_rate(lr) if lr else "")

    def _not_moved(self, held: list[torch.Tensor], names: dict[int, str]) -> Iterator[Finding]:
        with undispatched(), torch.no_grad():
            now = {id(p): float(total(local_values(p)).real) for p in held if p.requires_grad and is_readable(p)}
        still = [names[number] for number, size in now.items() if self._weights.get(number) == size and number in names]
        self._weights = now
        if still:
            have = "has" if len(still) == 1 else "have"
            headline = f"warning GG309: {listed(still, 4)} {have} not moved for {_STILL} steps"
            reason = "The optimizer holds it, and its values are the same to the last bit."
            fix = "gg.diagnose(step_fn, model=model)     # names the line that takes the gradient away"
            yield finding_at(None, headline, reason, fix)


# --- the watch --------------------------------------------------------------------------------------------------------

OnBad = Literal["raise", "warn", "skip"]


class Watch:
    """A watch over a model; `watch` makes it.

    Attributes:
        bad_steps: How many steps had a gradient that is not finite.
        diagnosis: What the doctor found in the last step that `step` replayed; None before.
        findings: What finite gradients showed: a norm out of its own range (GG308), weights that have not moved for 100
            steps (GG309), the update since which the training runs away (GG907). Nothing is raised for them.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer | None,
        on_bad: OnBad,
        namespaces: list[Mapping[str, Any]],
    ) -> None:
        self.bad_steps = 0
        self.diagnosis: Diagnosis | None = None
        self.findings: tuple[Finding, ...] = ()
        self._log = GradientLog()
        self._names = {id(parameter): name for name, parameter in model.named_parameters()}
        self._model = model
        self._optimizer = optimizer
        self._on_bad = on_bad
        self._namespaces = namespaces
        self._mine: dict[int, bool] = {}
        self._snapshot = StepSnapshot(model)
        self._step_fn: Callable[[], Any] | None = None
        self._checked = False
        self._replaying = False
        self._patches = Patches()
        self._ranks = WatchedRanks(model)

    def __repr__(self) -> str:
        return f"Watch({type(self._model).__name__}, bad_steps={self.bad_steps})"

    def __enter__(self) -> Watch:
        self._patches.put(step_hooks(self._optimizer), self, self._before_step)
        return self

    def __exit__(self, *error: object) -> None:
        to_the_end(self._patches.undo)

    def step(self, step_fn: Callable[[], Result]) -> Result:
        """Run one step; if it goes wrong, run it again under the tracer and explain it.

        The step must compute on a batch that it closes over, not draw a new one: it is run a second time from the same
        weights, buffers and random state. After the replay all of them are what the first run left.

        Args:
            step_fn: The step: forward, loss, backward and, if you like, the optimizer. Takes nothing.

        Returns:
            What the step returns.

        Raises:
            BadStepError: A gradient is not finite and `on_bad` is "raise"; `.diagnosis` says where it was produced.
            Exception: What the step raised, with the findings as notes.

        Examples:
            >>> layer = torch.nn.Linear(2, 1)
            >>> def step():
            ...     loss = (layer(torch.zeros(4, 2)) * 0).sqrt().mean()
            ...     loss.backward()
            >>> with gg.watch(layer) as watch:
            ...     watch.step(step)
            Traceback (most recent call last):
            gradgate.errors.BadStepError: the gradient of weight, bias is not finite...
        """
        self._snapshot.take()
        self._step_fn, self._checked = step_fn, False
        try:
            result = step_fn()
            if not self._checked:
                self._check(self._model.parameters())
        except BadStepError:
            raise
        except Exception as error:
            self.diagnosis = self._replay(step_fn)
            for finding in self.diagnosis.at_least("warning"):
                error.add_note(f"gradgate {finding.code}: {finding.title} ({finding.where})\nFix: {finding.fix}")
            raise
        finally:
            self._step_fn = None
        return result

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        if not self._is_mine(optimizer) or getattr(optimizer, "found_inf", None) is not None:
            return None  # a fused optimizer under GradScaler skips the step by itself
        if self._step_fn is not None and not self._replaying:
            self._snapshot.before_write(optimizer)
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        held = parameters_of(optimizer)
        if closure is None:
            self._check(held)
            if not self._replaying:
                rates = [group["lr"] for group in optimizer.param_groups if isinstance(group.get("lr"), float)]
                self.findings += tuple(self._log.observe(held, self._names, max(rates, default=None)))
        if self._replaying and optimizer not in self._snapshot.states:
            self._snapshot.states[optimizer] = copy.deepcopy(optimizer.state_dict())
        if closure is None:
            return None

        def watched() -> Any:
            loss = closure()
            self._check(held)
            return loss

        return ((args[0], watched, *args[2:]), kwargs) if len(args) > 1 else (args, {**kwargs, "closure": watched})

    def _is_mine(self, optimizer: torch.optim.Optimizer) -> bool:
        if id(optimizer) not in self._mine:
            own = set(map(id, self._model.parameters()))
            shared = not own.isdisjoint(map(id, parameters_of(optimizer)))
            self._mine[id(optimizer)] = self._optimizer is not None or shared
        return self._mine[id(optimizer)]

    def _check(self, parameters: Iterable[torch.Tensor]) -> None:
        self._checked = True
        gradients = [(p, p.grad) for p in parameters if p.grad is not None]
        if self._ranks.any(not all_finite(gradient for _, gradient in gradients)):
            if self._replaying:
                raise _Seen
            self._bad(gradients)

    def _bad(self, gradients: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        self.bad_steps += 1
        names = {id(parameter): name for name, parameter in self._model.named_parameters()}
        own = [names.get(id(p), describe(p)) for p, gradient in gradients if bad_kind(local_values(gradient))]
        found = self._ranks.union(own)
        bad = [name for name in names.values() if name in found] + [name for name in own if name not in names.values()]
        # Backward comes from the loss, so the last layer that is bad was bad first.
        what = f"the gradient of {listed(bad)} is not finite; {bad[-1]} is the nearest to the loss."
        why = "the optimizer would write NaN or Inf into the weights, and into its own state for good."
        fix = "gg.watch(model).step(step_fn)   # replays the step and names the line"
        if self._step_fn is not None:
            self.diagnosis = self._replay(self._step_fn)
            worst = self.diagnosis.at_least("warning")[:1]
            why = f"{worst[0].title} ({worst[0].where}). {worst[0].reason}" if worst else why
            fix = worst[0].fix if worst else "gg.Guard(model)   # drops the samples that are to blame"
        if self._on_bad == "raise":
            raise BadStepError(what, why=why, fix=fix, diagnosis=self.diagnosis)
        if self._ranks.is_first:
            warnings.warn(BadStepWarning(f"{what}\nWhy: {why}\nFix: {fix}"), stacklevel=user_level())
        if self._on_bad == "skip":
            # Every optimizer leaves a parameter without gradient alone: bit for bit, with its momentum.
            for parameter, _ in gradients:
                parameter.grad = None

    def _replay(self, step_fn: Callable[[], Any]) -> Diagnosis:
        tracing = Tracing(self._model, [*namespaces_of(step_fn), *self._namespaces], one_step=True)

        def replayed() -> Any:
            with suppress(_Seen):
                return step_fn()

        try:
            self._replaying = True
            return self._snapshot.rewound(lambda: tracing.explain(replayed))
        finally:
            self._replaying = False


class _Seen(Exception):
    """The replay has reached the point where the optimizer would write."""


def watch(model: torch.nn.Module, optimizer: torch.optim.Optimizer | None = None, on_bad: OnBad = "raise") -> Watch:
    """Check the gradients of a model before an optimizer uses them; it costs next to nothing.

    Use it as a block around the training loop. When a gradient is NaN or Inf it names the layers, and nothing has been
    written yet. With `watch.step(step_fn)` in place of the body of the loop, a bad step is also run again under the
    tracer, and the line is named where the NaN was produced, or whatever else the step raised.

    Args:
        model: The model.
        optimizer: The optimizer to watch; without it, every one that holds a parameter of the model.
        on_bad: "raise" a BadStepError, "warn" and go on, or warn and "skip" the step: the weights and the state of the
            optimizer stay as they are, bit for bit.

    Returns:
        The watch, to be used as a block.

    Raises:
        ArgumentTypeError: `model` is not a module or `optimizer` not an optimizer.
        ArgumentValueError: `on_bad` is another word.

    Examples:
        >>> layer = torch.nn.Linear(2, 1)
        >>> optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
        >>> with gg.watch(layer, optimizer):
        ...     (layer(torch.ones(4, 2)) / 0).sum().backward()
        ...     optimizer.step()
        Traceback (most recent call last):
        gradgate.errors.BadStepError: the gradient of weight, bias is not finite; bias is the nearest to the loss...
        >>> layer.weight.isfinite().all()
        tensor(True)
    """
    check_module(model, name="model", function="watch")
    if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
        why = "it is asked to call the watch before each of its steps."
        fix = "gg.watch(model)   # every optimizer that holds a parameter of the model"
        raise wrong_type(optimizer, "optimizer", "watch", why, fix)
    if on_bad not in ("raise", "warn", "skip"):
        why, fix = 'it is one of "raise", "warn" and "skip".', 'gg.watch(model, on_bad="raise")'
        raise wrong_value(on_bad, "on_bad", "watch", why, fix)
    frame = sys._getframe(1)
    return Watch(model, optimizer, on_bad, [frame.f_locals, frame.f_globals])
