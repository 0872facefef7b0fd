"""A step in parts: where the batch does not fit into memory.

The parts are steps of their own, with a search of their own for bad samples. Their gradients are set aside one after
the other, and joined with the weights that make them the gradient of the mean over all that was kept. That equals the
step on the whole batch, up to the rounding of sums, if the loss of the batch is the mean of the losses of its parts. It
is not where samples meet: in a BatchNorm, in a mean over tokens, in a loss that compares samples, in a dropout that
draws other numbers. So the loss of the whole batch is computed too, without a graph, which takes far less memory, and
compared.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

import torch

from gradgate._state import random_state, set_random_state
from gradgate._trees import Ids, with_own_containers
from gradgate.guard._result import GuardResult, Tally, hand_over, incident_of, log, mean_of
from gradgate.guard._trial import LossFunction, Scaler, StepFault, is_out_of_memory
from gradgate.records import Incident

if TYPE_CHECKING:
    from gradgate.guard._guard import Guard

OutOfMemory = Literal["raise", "split", "skip"]
_CLOSE = {torch.float64: 1e-6, torch.float32: 1e-4}
"""How far apart two equal losses may be, as a share of them; 1e-2 in lower precisions."""


class StepInParts:
    """One step of a guard that has less memory than the batch needs."""

    def __init__(
        self, guard: Guard, batch: Any, loss_fn: LossFunction, ids: Ids | None, scaler: Scaler | None, accumulate: int
    ) -> None:
        self._guard = guard
        self._batch = batch
        self._loss_fn = loss_fn
        self._ids = ids
        self._scaler = scaler
        self._accumulate = accumulate

    def run(self) -> GuardResult:
        """Make the step on the whole batch, or in as many parts as it takes."""
        guard, untouched = self._guard, with_own_containers(self._batch)
        try:
            return self._make(self._batch, self._ids, 0)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            fault = StepFault.raised(error)
            incident = replace(incident_of(fault, guard._common(), {}), cause="out of memory")
            failed = error.with_traceback(None)  # it holds the activations
            del fault
        self._batch = untouched
        size = guard._reader.count(untouched, self._ids)
        if guard.out_of_memory == "skip":
            return self._skipped(incident, size)
        if size // 2 < guard.min_kept or guard._reader.leaves(untouched):  # gradients of the batch have no weight
            raise failed
        return self._kept_safe(lambda: self._in_parts(incident, size))

    def _make(self, batch: Any, ids: Ids | None, first_row: int) -> GuardResult:
        self._guard._first_row = first_row
        try:
            return self._guard.backward(batch, self._loss_fn, ids, scaler=self._scaler, accumulate=self._accumulate)
        finally:
            self._guard._first_row = None

    def _skipped(self, incident: Incident, size: int) -> GuardResult:
        guard = self._guard
        incident = self._record(incident, {"batch": size, "tried": "nothing: the step is skipped"})
        tally, nothing = guard._tally, torch.zeros(2, dtype=torch.float64, device=guard._state.parameters[0].device)
        sums = None if tally.has_means else nothing
        guard._tally = tally.after_step(size, bad=False, incidents=(incident,), sums=sums)
        guard.global_step += 1
        return GuardResult(
            torch.tensor(float("nan")), None, [], (), False, "out of memory: no step was made", (incident,)
        )

    def _in_parts(self, incident: Incident, size: int) -> GuardResult:
        guard, before, step = self._guard, self._guard._tally, self._guard.global_step
        names = guard._ids_of(self._batch, size, self._ids)
        expected = self._whole_loss()
        waiting = [range(size // 2), range(size // 2, size)]
        parts: list[tuple[int, GuardResult]] = []
        window: torch.Tensor | None = None
        sums: dict[torch.Tensor, torch.Tensor] = {}
        while waiting:
            rows = waiting.pop(0)
            guard._tally, guard.global_step = before, step
            _empty_cache()
            try:
                part = guard._reader.select(self._batch, rows, size)
                result = self._make(part, None if names is None else [names[row] for row in rows], rows.start)
            except Exception as error:
                if not is_out_of_memory(error) or len(rows) // 2 < guard.min_kept:
                    raise
                error.with_traceback(None)
                waiting[:0] = [rows[: len(rows) // 2], rows[len(rows) // 2 :]]
                continue
            parts.append((rows.start, result))
            if (total := guard._tally.window) is not None and total is not before.window:
                total = total if before.window is None else total - before.window
                window = total if window is None else window + total
            self._add(sums, 1 if total is not before.window else len(result.kept))
        return self._joined(parts, sums, window, incident, before, size, expected)

    def _add(self, sums: dict[torch.Tensor, torch.Tensor], weight: int) -> None:
        for parameter in self._guard._state.parameters:
            if (gradient := parameter.grad) is not None and weight:
                gradient = gradient.detach() * weight
                sums[parameter] = sums[parameter] + gradient if parameter in sums else gradient
            parameter.grad = None

    def _joined(
        self,
        parts: Sequence[tuple[int, GuardResult]],
        sums: dict[torch.Tensor, torch.Tensor],
        window: torch.Tensor | None,
        incident: Incident,
        before: Tally,
        size: int,
        expected: torch.Tensor | None,
    ) -> GuardResult:
        guard, results = self._guard, [result for _, result in parts]
        kept = [first_row + row for first_row, result in parts for row in result.kept]
        some = [result for result in results if result.kept]
        if window is not None:
            loss = mean_of(window, results[0].loss)
        elif some:
            loss = torch.stack([result.loss * len(result.kept) for result in some]).sum() / len(kept)
        else:
            loss = torch.tensor(float("nan"))
        for parameter, total in sums.items():
            parameter.grad = total / len(kept) if window is None else total
        reasons = [result.reason for result in results if result.reason]
        if len(kept) == size and (reason := _difference(expected, loss)):
            reasons.append(reason)
        elif len(kept) < size:
            reasons.append("the batch was split, so the step without the bad samples is equal up to rounding at best")
        sizes = [len(result.kept) + len(result.dropped) for result in results]
        incident = self._record(incident, {"batch": size, "parts": sizes, "exact": not reasons})
        dropped = tuple(one for result in results for one in result.dropped)
        transient = (incident, *(one for result in results for one in result.transient))
        losses = [result.losses for result in some if result.losses is not None]
        guard._tally = before.after_step(size, bad=bool(dropped), incidents=(*dropped, *transient), sums=window)
        return GuardResult(
            loss=loss,
            losses=torch.cat(losses) if losses else None,
            kept=kept,
            dropped=dropped,
            exact=not reasons,
            reason="; ".join(dict.fromkeys(reasons)),
            transient=transient,
            clipped=sum(result.clipped for result in results),
        )

    def _whole_loss(self) -> torch.Tensor | None:
        """Compute the loss of the whole batch without a graph; None where that does not fit either."""
        guard = self._guard
        guard._state.remember()
        try:
            with torch.no_grad():
                value: Any = self._loss_fn(with_own_containers(self._batch))
            if isinstance(value, tuple):
                value = value[0] / value[1]
            return value.detach().mean() if isinstance(value, torch.Tensor) else None
        except Exception:  # noqa: BLE001 - a bad sample, or no memory; the parts will tell
            return None
        finally:
            guard._state.give_back()

    def _kept_safe(self, run: Callable[[], GuardResult]) -> GuardResult:
        """Add what `run` makes to the gradients that are there; whatever is raised, all is as before."""
        guard = self._guard
        parameters = [*guard._state.parameters]
        earlier = [(parameter, parameter.grad) for parameter in parameters]
        buffers = {buffer: buffer.detach().clone() for module in guard._modules for buffer in module.buffers()}
        chance, tally, step = random_state(), guard._tally, guard.global_step
        try:
            for parameter in parameters:
                parameter.grad = None
            result = run()
        except BaseException:
            with torch.no_grad():
                for buffer, copy in buffers.items():
                    buffer.copy_(copy)
            set_random_state(chance)
            for parameter, gradient in earlier:
                parameter.grad = gradient
            guard._tally, guard.global_step = tally, step
            raise
        for parameter, gradient in earlier:
            if gradient is not None:
                parameter.grad = gradient if parameter.grad is None else gradient + parameter.grad
        guard.global_step = step + 1
        return result

    def _record(self, incident: Incident, details: dict[str, Any]) -> Incident:
        incident = replace(incident, details=details)
        log([incident])
        hand_over([incident], self._guard._sinks, None, None, payload=False)
        return incident


def _difference(expected: torch.Tensor | None, loss: torch.Tensor) -> str:
    if expected is None:
        return "the whole batch could not be computed without a graph either, so its parts were not compared with it"
    share = _CLOSE.get(expected.dtype, 1e-2)
    if torch.allclose(expected.double(), loss.double(), rtol=share, atol=1e-12):
        return ""
    return (
        f"the loss of the whole batch is {expected.item():.6g}, that of its parts {loss.item():.6g}: samples meet "
        "(in a BatchNorm, a mean over tokens, a loss that compares them), or random numbers are drawn"
    )


def _empty_cache() -> None:
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
