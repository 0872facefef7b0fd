"""A step in parts: where the batch does not fit into memory.

The parts are steps of their own, each with its own search for bad samples. Their gradients are joined to that of the
mean over all that was kept: the step on the whole batch, up to the rounding of sums, unless samples meet in a
BatchNorm, a mean over tokens or a loss that compares them, or a dropout draws other numbers. So the loss of the whole
batch is computed too, without a graph, which takes far less memory, and compared.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import torch

from gradgate._state import TrainingState
from gradgate._trees import Ids, with_own_containers
from gradgate.guard._result import GuardResult, hand_over, incident_of, log, mean_of
from gradgate.guard._trial import StepFault, is_out_of_memory
from gradgate.records import Incident

if TYPE_CHECKING:
    from gradgate.guard._guard import Guard

OutOfMemory = Literal["raise", "split", "skip"]
_CLOSE = {torch.float64: 1e-6, torch.float32: 1e-4}
"""How far apart two equal losses may be, as a share of them; 1e-2 in lower precisions."""


@dataclass(slots=True)
class StepInParts:
    """One step of a guard that has less memory than the batch needs."""

    _guard: Guard
    _batch: Any
    _ids: Ids | None
    _how: tuple[Any, ...]  # the arguments of a trial

    def run(self) -> GuardResult:
        """Make the step on the whole batch, or in as many parts as it takes."""
        guard, untouched = self._guard, with_own_containers(self._batch)
        try:
            return guard._own_step(self._batch, self._ids, self._how)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            fault = StepFault.raised(error)
            incident = incident_of(fault, guard._common(), cause="out of memory", transient=True)
            failed = error.with_traceback(None)  # it holds the activations
            del fault
        self._batch = untouched
        size = guard._reader.count(untouched, self._ids)
        if guard.out_of_memory == "skip":
            incident = self._record(incident, {"batch": size, "tried": "nothing: the step is skipped"})
            sums = guard._sums_of_nothing()
            guard._tally = guard._tally.after_step(size, bad=False, incidents=(incident,), sums=sums)
            guard.global_step += 1
            return GuardResult(torch.tensor(float("nan")), None, [], (incident,), ["out of memory: no step was made"])
        if size // 2 < guard.min_kept or guard._reader.leaves(untouched):  # gradients of the batch have no weight
            raise failed
        state, tally, step = TrainingState(guard._modules), guard._tally, guard.global_step
        state.remember(guard._state.adopted)
        try:
            result = self._in_parts(incident, size)
        except BaseException:
            state.give_back()
            guard._tally, guard.global_step = tally, step
            raise
        state.add_earlier_gradients()
        return result

    def _in_parts(self, incident: Incident, size: int) -> GuardResult:
        guard, before, step = self._guard, self._guard._tally, self._guard.global_step
        closed = replace(before, window=None)  # so that a part's window is its own
        names, expected = guard._ids_of(self._batch, size, self._ids), self._whole_loss()
        waiting = [range(size // 2), range(size // 2, size)]
        results, kept = list[GuardResult](), list[int]()
        gradients: dict[torch.Tensor, torch.Tensor] = {}
        totals: torch.Tensor | None = None  # where the loss function returns a total and its count
        while waiting:
            rows = waiting.pop(0)
            guard._tally, guard.global_step = closed, step
            torch.cuda.empty_cache()
            try:
                ids = None if names is None else [names[row] for row in rows]
                result = guard._own_step(guard._reader.select(self._batch, rows, size), ids, self._how, rows.start)
            except Exception as error:
                if not is_out_of_memory(error) or len(rows) // 2 < guard.min_kept:
                    raise
                error.with_traceback(None)
                waiting[:0] = [rows[: len(rows) // 2], rows[len(rows) // 2 :]]
                continue
            results.append(result)
            kept += [rows.start + row for row in result.kept]
            if not result.kept:
                continue
            if (sums := guard._tally.window) is not None:
                totals = sums if totals is None else totals + sums
            for parameter in guard._state.parameters:
                if parameter.grad is not None:
                    gradient = parameter.grad.detach() * (len(result.kept) if sums is None else 1)
                    gradients[parameter] = gradients[parameter] + gradient if parameter in gradients else gradient
                parameter.grad = None
        for parameter, total in gradients.items():
            parameter.grad = total / len(kept) if totals is None else total
        some = [result for result in results if result.kept]
        loss = torch.tensor(float("nan"))
        if totals is not None:
            loss = mean_of(totals, some[0].loss)
        elif some:
            loss = torch.stack([result.loss * len(result.kept) for result in some]).sum() / len(kept)
        reasons = [result.reason for result in results if result.reason]
        if len(kept) < size:
            reasons.append("the batch was split, so the step without the bad samples is equal up to rounding at best")
        elif reason := _difference(expected, loss):
            reasons.append(reason)
        sizes = [len(result.kept) + len(result.dropped) for result in results]
        incident = self._record(incident, {"batch": size, "parts": sizes, "exact": not reasons})
        incidents = [incident, *(one for result in results for one in (*result.dropped, *result.transient))]
        bad = any(result.dropped for result in results)
        guard._tally, guard.global_step = before, step + 1
        sums = totals if kept else guard._sums_of_nothing()
        guard._tally = before.after_step(size, bad=bad, incidents=incidents, sums=sums)
        losses = [result.losses for result in some if result.losses is not None]
        clipped = sum(result.clipped for result in results)
        return GuardResult(loss, torch.cat(losses) if losses else None, kept, incidents, reasons, clipped)

    def _whole_loss(self) -> torch.Tensor | None:
        """Compute the loss of the whole batch without a graph; None where that does not fit either."""
        guard = self._guard
        guard._state.remember()
        try:
            with torch.no_grad():
                value: Any = self._how[0](with_own_containers(self._batch))
            if isinstance(value, tuple):
                value = value[0] / value[1]
            return value.detach().mean() if isinstance(value, torch.Tensor) else None
        except Exception:  # noqa: BLE001 - a bad sample, or no memory; the parts will tell
            return None
        finally:
            guard._state.give_back()

    def _record(self, incident: Incident, details: dict[str, Any]) -> Incident:
        incident = replace(incident, details=details)
        log([incident])
        hand_over(self._guard, [incident], None, None)
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
