"""One step of all ranks: each finds its own bad samples, all agree on what counts, and all make the same step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from time import perf_counter
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from gradgate._text import class_name, text_of
from gradgate._torch_distributed import collectives_made
from gradgate._trees import Ids, with_own_containers
from gradgate.errors import ArgumentValueError, OtherRankError
from gradgate.guard._result import (
    GuardResult,
    IncidentRecorder,
    Wishes,
    hand_over,
    log,
    refuse_row,
    refuse_share,
    refused,
)
from gradgate.guard._search import Dropped, Recovered, raise_as_it_is
from gradgate.guard._trial import LossFunction, LossTrial, Outcome, Scaler, StepFault, advice, check_function
from gradgate.guard.distributed._ranks import RankTotals, Share
from gradgate.guard.distributed._replicas import Replicas
from gradgate.guard.distributed._shards import Shards
from gradgate.records import Incident

if TYPE_CHECKING:
    from gradgate.guard._guard import Guard


# --- What every rank does -------------------------------------------------------------------------------------------


class SharedStep:
    """One step of one rank, among others."""

    def __init__(self, guard: Guard, agreement: Replicas | Shards, batch: Any, ids: Ids | None) -> None:
        self._guard = guard
        self._agreement = agreement
        self._batch = batch
        self._ids = ids
        self._function: LossFunction
        self._size = 0
        self._outcome = Outcome()
        self._made_before: int | None = None  # collectives; only where those of the loss are to be counted
        self._recovered: Recovered | None = None
        self._recorder: IncidentRecorder | None = None
        self._snapshot: bytes | None = None
        self._incidents: tuple[Incident, ...] = ()

    def run(self, loss_fn: LossFunction, scaler: Scaler | None, accumulate: int) -> GuardResult:
        """Make the step."""
        guard = self._guard
        guard._refuse_nesting()
        error: BaseException | None = None
        self._function = loss_fn
        try:
            check_function(self._batch, loss_fn, "guard.backward(batch, loss_fn)")
            self._size = 0 if self._batch is None else guard._reader.count(self._batch, self._ids)
        except BaseException as raised:  # noqa: BLE001 - it is raised when the others know
            error = raised
        self._meet()
        with self._agreement.apart(training=True):
            guard._state.remember(guard._reader.leaves(self._batch) if self._size else ())
            try:
                error = self._make(loss_fn, scaler, accumulate, error)
                result = self._agree(error)
            except torch.AcceleratorError:
                guard._state.give_back(device_died=True)  # the device died; more would only hide its error
                raise
            except BaseException:
                guard._outsiders.forget()
                guard._state.give_back()
                raise
        guard._outsiders.warn()
        return result

    def _make(
        self, loss_fn: LossFunction, scaler: Scaler | None, accumulate: int, error: BaseException | None
    ) -> BaseException | None:
        """Make the step with this rank's samples; return `error`, or what was raised and no sample is blamed for."""
        raise NotImplementedError

    def _meet(self) -> None:
        """Make sure, in the first step, that all ranks do the same; the first rank decides on the name of the run."""
        guard = self._guard
        if guard._wishes is None:
            terms = f"max_bad={guard.max_bad}, patience={guard.patience}, min_kept={guard.min_kept}"
            self._agreement.meet(self._size, terms)
            first = self._agreement.gather((guard.run, Wishes.of(guard._sinks, guard.payload)))[0]
            guard.run, guard._wishes = first

    def _refuse_collectives(self) -> None:
        """Refuse, in the first step, a loss that talks to other ranks itself; before backward or a search."""
        if self._made_before is None:
            return
        made, self._made_before = collectives_made() - self._made_before - self._agreement.made, None
        if made and self._agreement.world_size > 1:
            raise ArgumentValueError(
                f"Guard.backward(): `loss_fn` makes collectives of its own ({made} in the first step).",
                why="after a fault one rank runs it again, with parts of its batch, and the others would not answer.",
                fix="guard.backward(batch, loss_fn)   # with a loss of this rank's samples; exchange before or after",
            )

    def _search(self, trial: LossTrial, fault: StepFault, writes: int) -> None:
        guard = self._guard
        if guard._reader.writes(self._batch) != writes:
            raise_as_it_is(fault, self._size, "the batch was written to in place, so nothing can be tried again")
        self._recorder = guard._recorder(self._outcome, self._batch, self._size, self._ids)
        assert guard._wishes is not None
        self._snapshot = guard._snapshot(guard._wishes)
        self._recovered = found = guard._search(trial, self._outcome, self._batch, self._size, _allow)
        self._outcome = found.outcome or Outcome()
        self._incidents = self._recorder.dropped(found.dropped) + self._recorder.transient(found.transient)

    def _tell(self, error: BaseException | None) -> tuple[Share, RankTotals]:
        """Tell the other ranks how the step went here; return that, and how it went everywhere."""
        share = self._share(error)
        in_haste = not isinstance(error, Exception | None)
        return share, self._agreement.exchange(share, self._guard._state, in_haste=in_haste)

    def _share(self, error: BaseException | None) -> Share:
        guard, found = self._guard, self._recovered
        if error is not None:
            found = self._recovered = Recovered(None, [], [])
            self._outcome, self._incidents = Outcome(), ()
            guard._state.forget_gradients()
        kept = self._kept
        return Share(
            size=self._size,
            kept=len(kept),
            bad=0 if found is None else len(found.dropped),
            whole=found is not None and found.whole is not None,
            failed=error is not None,
            reported=found is not None and bool(self._incidents or found.reasons),
            more=guard._more,
            by_total=self._outcome.count is not None,
            loss=self._outcome.value if kept else None,
            count=self._outcome.count,
        )

    @property
    def _kept(self) -> list[int]:
        return list(range(self._size)) if self._recovered is None else self._recovered.kept

    def _agree(self, error: BaseException | None) -> GuardResult:
        """Agree with the others on the result of the step."""
        guard = self._guard
        try:
            share, totals = self._tell(error)
            if totals.failed:
                self._raise_failure(error)
        except OtherRankError:
            if error is not None:
                raise error from None
            raise
        guard._others_have_more, guard._busy_ranks = totals.more > 0, totals.busy
        reasons = [] if self._recovered is None else self._recovered.reasons
        packs = self._agreement.gather((self._incidents, reasons)) if totals.reported else []
        everything = tuple(incident for pack in packs for incident in pack[0])
        if totals.whole and totals.whole == totals.busy:
            self._raise_whole()
        self._judge(totals, everything, packs)
        self._record(everything, packs)
        if totals.kept:
            self._agreement.settle(share, totals, guard._state)
        else:
            guard._state.give_back()
        sums = self._outcome.sums
        if sums is None and (totals.by_total or not (totals.kept or guard._tally.has_means)):  # nothing from here
            sums = torch.zeros(2, dtype=torch.float64, device=self._agreement.device)
        tally = guard._tally.after_step(totals.size, bad=totals.bad > 0, incidents=everything, sums=sums)
        if self._agreement.rank == 0:
            guard._log_counts(totals.kept, tally)
        guard._tally, guard.global_step = tally, guard.global_step + 1
        return self._result(self._kept, totals, [reason for pack in packs for reason in pack[1]])

    def _raise_failure(self, error: BaseException | None) -> NoReturn:
        """Raise what was raised here; on the other ranks, an error that names it."""
        texts = self._agreement.gather(None if error is None else _described(error))
        if error is not None:
            raise error
        rank, text = next((rank, text) for rank, text in enumerate(texts) if text is not None)
        raise OtherRankError(
            f"Guard: rank {rank} of {self._agreement.world_size} raised {text}",
            why="no sample is to blame for that, so no rank has made the step; everything is as before it.",
            fix=f"# see the traceback of rank {rank}",
        )

    def _raise_whole(self) -> NoReturn:
        """Raise a fault that every sample of every rank has."""
        found = self._recovered
        if found is not None and found.whole is not None:
            why, fix = advice(found.whole, self._batch, self._function, self._guard._state.parameters)
            raise_as_it_is(found.whole, self._size, f"on every rank, {found.evidence}", why, fix)
        raise OtherRankError(
            "Guard: every sample of every other rank fails; this rank has none.",
            why="a fault that all samples have is in the code or the weights.",
            fix="# see the tracebacks of the other ranks",
        )

    def _judge(self, totals: RankTotals, incidents: tuple[Incident, ...], packs: Sequence[Any]) -> None:
        """Refuse the step if too much is bad; all ranks decide alike."""
        guard = self._guard
        too_many = totals.bad > guard.max_bad * totals.size
        dropped = refused([incident for incident in incidents if not incident.transient], too_many=too_many)
        in_a_row = guard._tally.in_a_row + 1
        if too_many or (totals.bad and in_a_row >= guard.patience):
            if not too_many:
                guard._tally.in_a_row = in_a_row
            self._record(dropped, packs)
            cause = None if self._recovered is None or self._recovered.whole is None else self._recovered.whole.error
            try:
                if too_many:
                    refuse_share(dropped, totals.bad, totals.size, guard.max_bad)
                refuse_row(dropped, in_a_row, guard.patience)
            except RuntimeError as refusal:
                raise refusal from cause

    def _record(self, incidents: Sequence[Incident], packs: Sequence[Any]) -> None:
        """Write down what happened: each rank to its log, the first one for all to the sinks."""
        guard, wishes = self._guard, self._guard._wishes
        if not incidents:
            return
        own = [incident for incident in incidents if incident.rank == self._agreement.rank]
        log(own)
        assert wishes is not None
        evidence: dict[int, tuple[dict[str, bytes] | None, bytes | None]] = {}
        if wishes.payload is not None or wishes.snapshot is not None:
            samples = None
            if own and wishes.payload is not None and self._recorder is not None:
                samples = self._recorder.samples(own, wishes.payload)
            owners = [rank for rank, pack in enumerate(packs) if pack[0]]
            evidence = self._agreement.bring((samples, self._snapshot), owners)
        if self._agreement.rank == 0:
            for rank in dict.fromkeys(incident.rank for incident in incidents):
                samples, snapshot = evidence.get(rank, (None, None))
                of_rank = [incident for incident in incidents if incident.rank == rank]
                hand_over(of_rank, guard._sinks, samples, snapshot, payload=guard.payload)

    def _result(self, kept: list[int], totals: RankTotals, reasons: list[str]) -> GuardResult:
        value = self._outcome.value
        like = torch.empty((), dtype=torch.float32) if value is None else value
        count = totals.count if totals.by_total else totals.kept
        mean = totals.loss / count if count else 0.0 if totals.kept else float("nan")
        loss = torch.full_like(like, mean)
        loss.__dict__["of_all_ranks"] = mean, self._agreement.world_size  # `Rewind` need not ask the ranks again
        return GuardResult(
            loss=loss,
            losses=self._outcome.per_sample if kept else None,
            kept=kept,
            dropped=tuple(incident for incident in self._incidents if not incident.transient),
            exact=not reasons,
            reason="; ".join(dict.fromkeys(reasons)),
            transient=tuple(incident for incident in self._incidents if incident.transient),
        )


def _allow(dropped: Sequence[Dropped]) -> None:
    """Refuse nothing: that is for all ranks to decide."""


def _described(error: BaseException) -> str:
    where = StepFault.raised(error).where if isinstance(error, Exception) else None
    first_line = next(iter(text_of(error).strip().splitlines()), "")
    return f"{class_name(type(error))}: {first_line}" + (f" ({where})" if where else "")


# --- Replicas -------------------------------------------------------------------------------------------------------


class ReplicatedStep(SharedStep):
    """One step of one rank that runs the model without the others."""

    _agreement: Replicas

    def _make(
        self, loss_fn: LossFunction, scaler: Scaler | None, accumulate: int, error: BaseException | None
    ) -> BaseException | None:
        guard, state = self._guard, self._guard._state
        if error is not None:
            return error
        if not self._size:
            self._recovered = Recovered(None, [], [])
            return None
        try:
            trial = LossTrial(loss_fn, state, self._agreement, guard._catch, scaler, accumulate)
            trial.before_backward = self._before_backward
            if first := guard._first:
                trial.first = True
                guard._outsiders.look(loss_fn)
                self._made_before = collectives_made()
            writes = guard._reader.writes(self._batch)
            untouched = with_own_containers(self._batch)
            started = perf_counter()
            self._outcome = trial.run(self._batch, self._size)
            if self._outcome.fault is not None or not first:  # a healthy first one may have compiled the model
                passes, seconds = 2 * self._size.bit_length() + 6, perf_counter() - started  # to find one bad sample
                self._agreement.warn_of_timeout(passes * seconds, f"{passes} passes of {seconds:.3g} s")
            trial.before_backward = None
            if self._outcome.skipped:
                self._recovered = Recovered(None, [], [])
            if self._outcome.fault is not None:
                self._refuse_collectives()
                self._batch = untouched
                self._agreement.withdraw()
                self._search(trial, self._outcome.fault, writes)
        except torch.AcceleratorError:
            raise  # nothing more can be sent from here
        except BaseException as raised:  # noqa: BLE001 - it is raised when the others know
            self._agreement.withdraw()
            return raised
        return None

    def _before_backward(self, outcome: Outcome) -> None:
        self._refuse_collectives()
        if self._guard._first:
            self._guard._look_around(outcome)
        self._agreement.before_backward(self._size, self._guard._state, by_total=outcome.count is not None)


# --- Shards ---------------------------------------------------------------------------------------------------------


class ShardedStep(SharedStep):
    """One step of one rank that runs the model together with the others."""

    # Every try is a pass of all ranks through FSDP2's own collectives. If it fails anywhere, its gradients are dropped
    # everywhere, the ranks with a fault search for their bad samples while the others follow, and all try again.

    _agreement: Shards

    def __init__(self, guard: Guard, agreement: Shards, batch: Any, ids: Ids | None) -> None:
        super().__init__(guard, agreement, batch, ids)
        self._answer: tuple[Share, RankTotals]
        self._trial: LossTrial
        self._again = False

    def _make(
        self, loss_fn: LossFunction, scaler: Scaler | None, accumulate: int, error: BaseException | None
    ) -> BaseException | None:
        guard, state = self._guard, self._guard._state
        self._trial = LossTrial(loss_fn, state, self._agreement, guard._catch, scaler, accumulate)
        if not self._size:
            self._recovered = Recovered(None, [], [])
        elif guard._first and error is None:
            self._trial.first = True
            guard._outsiders.look(loss_fn)
        writes = guard._reader.writes(self._batch) if self._size else 0
        untouched = with_own_containers(self._batch)
        error = self._try(self._batch, error)
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
        """Run the kept samples with all other ranks, or only take part; return what no sample is blamed for."""
        agreement, count = self._agreement, len(self._kept)
        first = self._guard._first
        agreement.begin(known=not self._again, counts=first)
        self._made_before = collectives_made() if first else None
        self._outcome = Outcome()
        self._trial.before_backward = self._before_backward
        if error is None and count:
            try:
                self._outcome = self._trial.run(batch, count)
                if self._outcome.fault is not None:
                    self._refuse_collectives()
                if not first:
                    agreement.warn_of_timeout(agreement.longest_pause, "its longest time between two gathers")
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
        self._refuse_collectives()
        if self._guard._first:
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
        """Return what a second try without the bad samples raised, or an error about values that are not finite."""
        fault = self._outcome.fault
        if fault is None:
            return None
        try:
            raise_as_it_is(fault, self._size, "no rank has a sample that can be blamed for it; it came in a second try")
        except Exception as raised:  # noqa: BLE001 - it is raised when the others know
            return raised

    def _tell_all(self, error: BaseException | None) -> RankTotals:
        self._answer = super()._tell(error)
        return self._answer[1]

    def _tell(self, error: BaseException | None) -> tuple[Share, RankTotals]:
        return self._answer  # of `_make`

    def _share(self, error: BaseException | None) -> Share:
        fault = self._outcome.fault if error is None else None
        share = super()._share(error)
        share.stale = fault is not None
        share.spoilt = fault is not None and fault.cause == "non-finite gradient"
        if fault is not None:
            share.loss = share.count = None
        return share


# --- Batches for all ranks equally often ----------------------------------------------------------------------------


END = object()


def even_batches(guard: Guard, agreement: Replicas | Shards, loader: Iterable[Any]) -> Iterator[Any]:
    """Yield batches; when this rank has no more, batches of 0 rows (or None) until no rank has any."""
    # Each step tells the other ranks whether this one has another batch, so there is one collective, at the beginning.
    batches = iter(loader)
    batch = next(batches, END)
    nothing = None if batch is END else _of_no_rows(guard, batch)
    forms = agreement.gather((batch is not END, nothing))
    if not any(has_one for has_one, _ in forms):
        return
    if batch is END:
        batch = nothing = next((form for _, form in forms if form is not None), None)
        following = END
    else:
        following = next(batches, END)
    while True:
        guard._more, guard._others_have_more = following is not END, None
        yield batch
        if guard._others_have_more is None:
            raise ArgumentValueError(
                "Guard.batches(): no step was made with the last batch.",
                why="the other ranks make one, and wait for this one.",
                fix="for batch in guard.batches(loader): guard.backward(batch, loss_fn)   # with every batch",
            )
        if not guard._others_have_more:
            return
        if following is END:
            batch = nothing
        else:
            batch, following = following, next(batches, END)


def _of_no_rows(guard: Guard, batch: Any) -> Any:
    """Return a batch of the same form with no rows; None where `select` of the user cannot make one."""
    try:
        return guard._reader.select(batch, [], guard._reader.count(batch))
    except Exception:  # noqa: BLE001 - the batch itself is judged when it is used
        return None
