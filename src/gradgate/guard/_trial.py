"""One try of the user's code on a batch: run it, judge what it gave, and walk back where gradients are wanted."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass
from numbers import Real
from typing import Any, Protocol

import torch

from gradgate._batches import non_finite_rows, tensors_in
from gradgate._finite import FiniteCheck
from gradgate._names import describe
from gradgate._state import TrainingState
from gradgate.errors import ArgumentTypeError, ArgumentValueError
from gradgate.guard._faults import StepFault, check_call, must_pass, refuse_own_backward
from gradgate.records import Stage

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
