"""`watch`: a look at the gradients before the optimizer uses them, and a replay of the step when they are bad."""

from __future__ import annotations

import copy
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping
from types import TracebackType
from typing import Any, Literal, TypeVar

import torch

from gradgate._checks import check_module
from gradgate._names import describe, listed
from gradgate._patches import Patches, to_the_end
from gradgate._state import FiniteCheck, RandomState
from gradgate._text import user_level
from gradgate._torch_distributed import WatchedRanks
from gradgate._torch_private import ThreadModes, copy_tensors, step_hooks, undispatched, write_grad_mode
from gradgate.doctor._case import namespaces_of
from gradgate.doctor._diagnose import Examination
from gradgate.doctor._diagnosis import Diagnosis
from gradgate.doctor._history import GradientLog
from gradgate.doctor._numerics import bad_kind, local_values
from gradgate.errors import ArgumentTypeError, ArgumentValueError, BadStepError, BadStepWarning
from gradgate.records import Finding

Result = TypeVar("Result")

# --- the state that a step starts from --------------------------------------------------------------------------------


class StepSnapshot:
    """What a model and its surroundings were before a step."""

    # Buffers and the random states are copied at the start of each step. Weights are copied only when an optimizer is
    # about to write to them, because until then they are what they were.

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._buffers: list[torch.Tensor] = []
        self._buffer_copies: list[torch.Tensor] = []
        self._weights: dict[torch.Tensor, torch.Tensor] = {}
        self._written: dict[torch.Tensor, torch.Tensor] = {}
        self._random = RandomState(parameter.device for parameter in model.parameters())
        self._states: list[tuple[torch.optim.Optimizer, dict[str, Any]]] = []

    def take(self) -> None:
        """Remember the state of now."""
        buffers = list(self._model.buffers())
        if [id(x) for x in buffers] != [id(x) for x in self._buffers] or any(
            x.shape != y.shape or x.dtype != y.dtype for x, y in zip(buffers, self._buffer_copies, strict=False)
        ):
            self._buffers, self._buffer_copies = buffers, [torch.empty_like(x) for x in buffers]
        with torch.no_grad():
            copy_tensors(self._buffer_copies, buffers)
        self._random.remember()
        self._written = {}

    def before_write(self, optimizer: torch.optim.Optimizer) -> None:
        """Remember the weights that an optimizer is about to write to."""
        held = [p for group in optimizer.param_groups for p in group["params"] if p not in self._written]
        for parameter in held:
            if parameter not in self._weights or self._weights[parameter].shape != parameter.shape:
                self._weights[parameter] = torch.empty_like(parameter, requires_grad=False)
            self._written[parameter] = self._weights[parameter]
        with torch.no_grad():
            copy_tensors([self._weights[p] for p in held], held)

    def before_replayed_write(self, optimizer: torch.optim.Optimizer) -> None:
        """Remember the state of an optimizer that a replayed step is about to use."""
        if not any(optimizer is known for known, _ in self._states):
            self._states.append((optimizer, copy.deepcopy(optimizer.state_dict())))

    def rewound(self, function: Callable[[], Result]) -> Result:
        """Run a function from the remembered state, and return to the state of now after it."""
        parameters = list(self._model.parameters())
        tensors = [*parameters, *self._model.buffers(), *self._written]
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
            for optimizer, state in self._states:
                optimizer.load_state_dict(state)
            random.restore()
            modes.restore()

        try:
            with torch.no_grad():
                copy_tensors(list(self._written), list(self._written.values()))
                copy_tensors(self._buffers, self._buffer_copies)
            for parameter in parameters:
                parameter.grad = None
            self._random.restore()
            write_grad_mode(True)
            return function()
        finally:
            to_the_end(come_back)
            self._states.clear()


_check = FiniteCheck()


def all_finite(gradients: Iterable[torch.Tensor]) -> bool:
    """Return whether every element of every tensor is finite."""
    local = [local_values(gradient) for gradient in gradients]
    with undispatched():
        return not _check.has_nonfinite(local)


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
        self._looked = False
        self._replaying = False
        self._patches = Patches()
        self._ranks = WatchedRanks(model)

    def __repr__(self) -> str:
        return f"Watch({type(self._model).__name__}, bad_steps={self.bad_steps})"

    def __enter__(self) -> Watch:
        hooks = step_hooks(self._optimizer)
        self._patches.put(hooks, self, self._before_step)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        to_the_end(self._patches.undo)

    def step(self, step_fn: Callable[[], Result]) -> Result:
        """Run one step; if it goes wrong, run it again under the tracer and explain it.

        The step must compute on a batch that it closes over, not draw a new one: it is run a second time from the same
        weights, buffers and random state. After the replay all of them are what the first run left.

        Args:
            step_fn: The step: forward, loss, backward and, if you like, the optimizer. Takes nothing.

        Returns:
            What the step gives.

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
        self._step_fn, self._looked = step_fn, False
        try:
            result = step_fn()
            if not self._looked:
                self._look(self._model.parameters())
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
        held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        if closure is None:
            self._look(held)
            if not self._replaying:
                rates = [group["lr"] for group in optimizer.param_groups if isinstance(group.get("lr"), float)]
                self.findings += tuple(self._log.observe(held, self._names, max(rates, default=None)))
        if self._replaying:
            self._snapshot.before_replayed_write(optimizer)
        if closure is None:
            return None

        def watched() -> Any:
            loss = closure()
            self._look(held)
            return loss

        return ((args[0], watched, *args[2:]), kwargs) if len(args) > 1 else (args, {**kwargs, "closure": watched})

    def _is_mine(self, optimizer: torch.optim.Optimizer) -> bool:
        if self._optimizer is not None:
            return True
        known = self._mine.get(id(optimizer))
        if known is None:
            own = {id(parameter) for parameter in self._model.parameters()}
            known = any(id(p) in own for group in optimizer.param_groups for p in group["params"])
            self._mine[id(optimizer)] = known
        return known

    def _look(self, parameters: Iterable[torch.Tensor]) -> None:
        self._looked = True
        held = [parameter for parameter in parameters if parameter.grad is not None]
        gradients = [parameter.grad for parameter in held if parameter.grad is not None]
        if self._ranks.any(not all_finite(gradients)):
            if self._replaying:
                raise _Seen
            self._bad(held)

    def _bad(self, held: list[torch.Tensor]) -> None:
        self.bad_steps += 1
        names = {id(parameter): name for name, parameter in self._model.named_parameters()}
        own = [names.get(id(p), describe(p)) for p in held if p.grad is not None and _is_bad(p.grad)]
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
            for parameter in held:
                parameter.grad = None

    def _replay(self, step_fn: Callable[[], Any]) -> Diagnosis:
        examination = Examination(self._model, [*namespaces_of(step_fn), *self._namespaces])

        def replayed() -> Diagnosis:
            raised: BaseException | None = None
            try:
                with examination.running():
                    examination.run(step_fn)
            except _Seen:
                raised = None
            except Exception as error:  # noqa: BLE001 - whatever the step raises is what the diagnosis is about
                raised = error
            self._replaying = False
            return examination.diagnosis(raised)

        try:
            self._replaying = True
            return self._snapshot.rewound(replayed)
        finally:
            self._replaying = False
            examination.stop()


class _Seen(Exception):
    """The replay has come to the point where the optimizer would write: everything has been seen."""


def _is_bad(gradient: torch.Tensor) -> bool:
    return bad_kind(local_values(gradient)) is not None


def watch(model: torch.nn.Module, optimizer: torch.optim.Optimizer | None = None, on_bad: OnBad = "raise") -> Watch:
    """Look at the gradients of a model before an optimizer uses them; it costs next to nothing.

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
        raise ArgumentTypeError(
            f"watch(): `optimizer` is {describe(optimizer)}.",
            why="it is asked to call the watch before each of its steps.",
            fix="gg.watch(model)   # every optimizer that holds a parameter of the model",
        )
    if on_bad not in ("raise", "warn", "skip"):
        raise ArgumentValueError(
            f"watch(): `on_bad` is {describe(on_bad)}.",
            why='it is one of "raise", "warn" and "skip".',
            fix='gg.watch(model, on_bad="raise")',
        )
    frame = sys._getframe(1)
    return Watch(model, optimizer, on_bad, [frame.f_locals, frame.f_globals])
