"""A step of ranks with shards: tried by all together, and after a fault, searched by those who have one."""

from __future__ import annotations

from typing import Any

import torch

from gradgate._torch_distributed import collectives_made
from gradgate._trees import Ids, with_own_containers
from gradgate.errors import ArgumentValueError, OtherRankError
from gradgate.guard._search import Recovered, raise_as_it_is
from gradgate.guard._trial import LossFunction, LossTrial, Outcome, Scaler
from gradgate.guard.distributed._ranks import RankTotals, Share
from gradgate.guard.distributed._shards import Shards
from gradgate.guard.distributed._shared_step import SharedStep


class ShardedStep(SharedStep):
    """One step of one rank that runs the model together with the others."""

    # Every try is a pass of all ranks through FSDP2's own collectives. If it fails anywhere, its gradients are dropped
    # everywhere, the ranks with a fault search for their bad samples while the others follow, and all try again.

    _agreement: Shards

    def __init__(self, guard: Any, agreement: Shards, batch: Any, ids: Ids | None) -> None:
        super().__init__(guard, agreement, batch, ids)
        self._told: tuple[Share, RankTotals]
        self._trial: LossTrial
        self._again = False

    def _alone(
        self, loss_fn: LossFunction, scaler: Scaler | None, accumulate: int, error: BaseException | None
    ) -> BaseException | None:
        """Make the step with all others, and give what was raised here and no sample is blamed for."""
        guard, state = self._guard, self._guard._state
        check = self._agreement.check(guard._check)
        self._trial = LossTrial(loss_fn, state, check, guard._catch, scaler, accumulate)
        if not self._size:
            self._recovered = Recovered(None, [], [])
        elif guard._first and error is None:
            self._trial.first = True
            guard._outsiders.look(loss_fn)
        writes = guard._reader.writes(self._batch) if self._size else 0
        untouched = with_own_containers(self._batch)
        first = guard._first
        error = self._try(self._batch, error)
        if not first:
            pause = self._agreement.longest_pause
            self._agreement.warn_of_timeout(pause, "its longest time between two gathers")
        totals = self._tell_all(error)
        if totals.failed or not totals.stale:
            return error
        self._batch, self._again = untouched, True
        error = self._look_for_faults(totals, writes)
        if self._agreement.follow(failed=error is not None):
            self._tell_all(error)
            return error
        kept = self._kept
        state.restore()
        if len(kept) < self._size and kept:
            untouched = guard._reader.select(untouched, kept, self._size)
        error = self._try(with_own_containers(untouched), None)
        totals = self._tell_all(error)
        if totals.stale and not totals.failed:
            error = self._unexplained()
            self._tell_all(error)
        return error

    def _try(self, batch: Any, error: BaseException | None) -> BaseException | None:
        """Run the kept samples with all other ranks, or only take part; give what is nobody's fault."""
        agreement, count = self._agreement, len(self._kept)
        agreement.begin(known=not self._again, counts=self._guard._first)
        self._made_before = collectives_made() if self._guard._first else 0
        self._outcome = Outcome()
        self._trial.before_backward = self._before_backward
        if error is None and count:
            try:
                self._outcome = self._trial.run(batch, count)
            except torch.AcceleratorError:
                raise  # nothing more can be sent from here
            except BaseException as raised:
                if agreement.broken:
                    raise
                error = raised
        self._trial.before_backward, self._trial.weight = None, 1.0
        fault = self._outcome.fault
        try:
            agreement.complete(failed=error is not None or fault is not None or self._outcome.skipped)
        except OtherRankError as lost:
            raise lost from (fault.error if error is None and fault is not None else error)
        if self._again and self._trial.scaler is not None and fault is not None and fault.error is None:
            self._outcome.fault = None  # each rank's own gradients are finite without the scale: it is left to see them
        if count and error is None and self._outcome.skipped:
            self._recovered = self._recovered or Recovered(None, [], [])
            self._recovered.kept = []
        return error

    def _before_backward(self, outcome: Outcome) -> None:
        if self._guard._first:
            self._refuse_collectives()
            self._guard._look_around(outcome, self._agreement.gathered())
        self._trial.weight = self._agreement.weight(len(self._kept), by_total=outcome.count is not None)

    def _look_for_faults(self, totals: RankTotals, writes: int) -> BaseException | None:
        """Search for this rank's bad samples, if it has a fault of its own; the others take part in every pass."""
        guard, fault = self._guard, self._outcome.fault
        self._agreement.search()
        try:
            guard._state.restore()
            if self._size and guard._reader.writes(self._batch) != writes:
                if fault is not None and fault.cause != "non-finite gradient":
                    self._search(self._trial, fault, writes)
                raise ArgumentValueError(
                    "Guard: a rank has bad samples, and `loss_fn` has written into the batch of this one.",
                    why="with FSDP2 all ranks make the step again without the bad samples, each with its own batch.",
                    fix="x = x / 255   # a new tensor, not x.div_(255)",
                )
            if self._kept and totals.spoilt and (fault is None or fault.cause == "non-finite gradient"):
                self._outcome = self._trial.run(with_own_containers(self._batch), self._size)
                fault = self._outcome.fault  # of this rank's own gradients; in the shards are those of all
            if fault is not None and self._kept:
                self._search(self._trial, fault, writes)
        except torch.AcceleratorError:
            raise
        except BaseException as raised:
            if self._agreement.broken:
                raise
            return raised
        return None

    def _unexplained(self) -> BaseException | None:
        """Give what a second try without the bad samples raised, or the values that are not finite."""
        fault = self._outcome.fault
        if fault is None:
            return None
        try:
            raise_as_it_is(fault, self._size, "no rank has a sample that can be blamed for it; it came in a second try")
        except Exception as raised:  # noqa: BLE001 - it is raised when the others know
            return raised

    def _tell_all(self, error: BaseException | None) -> RankTotals:
        self._told = super()._tell(error)
        return self._told[1]

    def _tell(self, error: BaseException | None) -> tuple[Share, RankTotals]:
        """Give what was reported in `_alone`."""
        return self._told

    def _share(self, error: BaseException | None) -> Share:
        fault = self._outcome.fault if error is None else None
        share = super()._share(error)
        share.stale = fault is not None
        share.spoilt = fault is not None and fault.cause == "non-finite gradient"
        if fault is not None:
            share.loss = share.count = None
        return share
