"""One step of all ranks: each finds its own bad samples, all agree on what counts, and all make the same step."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator, Sequence
from time import perf_counter
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import distributed

from gradgate._names import listed
from gradgate._state import TrainingState
from gradgate._text import class_name, text_of
from gradgate._torch_distributed import Replica, collectives_made, shard_group, shard_roots
from gradgate._trees import Ids, with_own_containers
from gradgate.errors import ArgumentTypeError, ArgumentValueError, OtherRankError
from gradgate.guard._result import GuardResult, Wishes, hand_over, log
from gradgate.guard._search import raise_as_it_is
from gradgate.guard._step import Step
from gradgate.guard._trial import LossTrial, Outcome, StepFault, advice, check_function
from gradgate.guard.distributed._ranks import Share, SingleProcess, in_a_group
from gradgate.guard.distributed._replicas import Replicas
from gradgate.guard.distributed._shards import Shards
from gradgate.records import Incident

if TYPE_CHECKING:
    from gradgate.guard._guard import Guard


# --- Who trains a model together ------------------------------------------------------------------------------------


def agreement_of(modules: Sequence[torch.nn.Module], state: TrainingState) -> Replicas | Shards | SingleProcess:
    """Find out with whom a model is trained."""
    if not in_a_group():
        return SingleProcess()
    parts = list(dict.fromkeys(part for module in modules for part in module.modules()))
    for part in parts if distributed.get_world_size() > 1 else ():
        if isinstance(part, torch.nn.SyncBatchNorm):
            why = "their forward waits for all ranks, but after a fault one rank runs the model again alone."
            fix = "torch.nn.BatchNorm2d   # statistics of each rank's own batch; or torch.nn.GroupNorm"
            _refuse("the model has SyncBatchNorm layers", fix, why)
        if isinstance(part, distributed.fsdp.FullyShardedDataParallel):
            why = "its collectives cannot be seen, so a rank that raises could not take part in them."
            _refuse("the model is in FullyShardedDataParallel", "torch.distributed.fsdp.fully_shard(model)", why)
    replicas = [part for part in parts if isinstance(part, Replica)]
    roots = [root for module in modules for root in shard_roots(module)]
    if not replicas and not roots:
        _refuse_inner_modules(parts)
        return SingleProcess()
    if replicas and roots:
        what = "the model has replicas (DistributedDataParallel) and shards (fully_shard)"
        _refuse(what, "Guard(model)   # a guard for each")
    shared = {p for part in (*replicas, *roots) for p in part.parameters()}
    own = [name for m in modules for name, p in m.named_parameters() if p.requires_grad and p not in shared]
    if own:
        what = f"the model has parameters that no wrapper reduces ({listed(own, 3)})"
        _refuse(what, "DistributedDataParallel(head)")
    if replicas:
        groups: set[Any] = {replica.process_group for replica in replicas}
        if len(groups) > 1:
            _refuse("the model has parts of several process groups", "Guard(model)   # a guard for each")
        return Replicas(replicas)
    groups = {shard_group(root) for root in roots}
    group = groups.pop()
    if groups or group is None:
        what = "the model has shards on several meshes, or split by tensor parallelism"
        _refuse(what, "fully_shard(model)   # on one mesh")
    return Shards(roots, group, state)


def _refuse(what: str, fix: str, why: str = "") -> NoReturn:
    same = "all ranks must make the same step, and the guard knows how for one process group and one kind of wrapper."
    raise ArgumentTypeError(f"Guard(): {what}.", why=why or same, fix=fix)


def _refuse_inner_modules(parts: Sequence[torch.nn.Module]) -> None:
    """Refuse a module whose DistributedDataParallel is elsewhere: the loss would run that, and wait."""
    parameters = {id(p) for part in parts for p in part.parameters(recurse=False)}
    replicas = [thing for thing in gc.get_objects() if issubclass(type(thing), Replica)]
    if any(id(parameter) in parameters for replica in replicas for parameter in replica.parameters()):
        why = "the guard must see the wrapper to run the model without the other ranks."
        fix = "gg.Guard(ddp_model)   # the wrapped model, not ddp_model.module"
        _refuse("`model` is inside of a DistributedDataParallel", fix, why)


# --- What every rank does -------------------------------------------------------------------------------------------


class SharedStep(Step):
    """One step of one rank, among others."""

    def __init__(self, guard: Guard, agreement: Any, batch: Any, ids: Ids | None) -> None:
        super().__init__(guard, batch, ids)
        self._agreement: Replicas | Shards = agreement
        self._trial: LossTrial
        self._first = guard._first
        self._made_before: int | None = None  # collectives; only where those of the loss are to be counted
        self._answer: tuple[Share, Share] | None = None  # what this rank said about the step, and all together

    def run(self, trial: LossTrial) -> GuardResult:
        guard, batch = self._guard, self._batch
        guard._refuse_nesting()
        self._trial = trial
        error = self._raised_by(self._read)
        self._meet()
        self._kept = range(self._size)
        with self._agreement.apart(training=True):
            guard._state.remember(guard._reader.leaves(batch) if self._size else ())
            try:
                error = self._make(batch, error)
                result = self._agree(error)
            except BaseException as raised:  # if the device died, more would only hide its error
                guard._outsiders.forget()
                guard._state.give_back(device_died=isinstance(raised, torch.AcceleratorError))
                raise
        guard._outsiders.warn()
        self._note_losses(result)
        return result

    def _read(self) -> None:
        guard, batch, trial = self._guard, self._batch, self._trial
        check_function(batch, trial.function, "guard.backward(batch, loss_fn)")
        self._batch = with_own_containers(batch)
        if batch is not None:
            self._size, self._writes = guard._reader.count(batch, self._ids), guard._reader.writes(batch)
        if self._size and self._first:
            trial.first = True
            guard._outsiders.look(trial.function)

    def _make(self, batch: Any, error: BaseException | None) -> BaseException | None:
        """Make the step with this rank's samples; return `error`, or what was raised and no sample is blamed for."""
        raise NotImplementedError

    def _raised_by(self, part: Callable[[], None]) -> BaseException | None:
        """Run a part of the step; return what it raises, which is raised when the others know."""
        try:
            part()
        except torch.AcceleratorError:
            raise  # nothing more can be sent from here
        except BaseException as raised:
            if self._agreement.broken:
                raise
            return raised
        return None

    def _meet(self) -> None:
        """Make sure, in the first step, that all ranks do the same; the first rank decides on the name of the run."""
        guard = self._guard
        if guard._wishes is None:
            terms = f"max_bad={guard.max_bad}, patience={guard.patience}, min_kept={guard.min_kept}"
            self._agreement.meet(self._size, terms)
            first = self._agreement.gather((guard.run, Wishes.of(guard._sinks, guard.payload)))[0]
            guard.run, guard._wishes = first
        self._wishes = guard._wishes

    def _refuse_collectives(self) -> None:
        """Refuse, in the first step, a loss that talks to other ranks itself; before backward or a search."""
        if self._made_before is None:
            return
        made, self._made_before = collectives_made() - self._made_before - self._agreement.made, None
        if made and self._agreement.world_size > 1:
            what = f"Guard.backward(): `loss_fn` makes collectives of its own ({made} in the first step)."
            why = "after a fault one rank runs it again, with parts of its batch, and the others would not answer."
            fix = "guard.backward(batch, loss_fn)   # with a loss of this rank's samples; exchange before or after"
            raise ArgumentValueError(what, why=why, fix=fix)

    def _tell(self, error: BaseException | None) -> Share:
        """Tell the other ranks how the step went here; return how it went everywhere."""
        share = self._share(error)
        in_haste = not isinstance(error, Exception | None)
        totals = self._agreement.exchange(share, self._guard._state, in_haste=in_haste)
        self._answer = share, totals
        return totals

    def _share(self, error: BaseException | None) -> Share:
        guard, outcome = self._guard, self._outcome
        if error is not None:
            self._outcome = outcome = Outcome()
            self._kept, self._incidents, self._reasons, self._whole = [], (), [], None
            guard._state.forget_gradients()
        kept = len(self._kept)
        return Share(
            size=self._size,
            kept=kept,
            busy=self._size > 0,
            whole=self._whole is not None,
            failed=error is not None,
            reported=bool(self._incidents or self._reasons),
            more=guard._more,
            by_total=outcome.count is not None,
            loss=outcome.value.detach() if kept and outcome.value is not None else 0.0,
            count=0.0 if outcome.count is None else outcome.count,
        )

    def _agree(self, error: BaseException | None) -> GuardResult:
        """Agree with the others on the result of the step."""
        guard, agreement = self._guard, self._agreement
        try:
            if self._answer is None:
                self._tell(error)
            assert self._answer is not None
            share, totals = self._answer
            if totals.failed:
                self._raise_failure(error)
        except OtherRankError:
            if error is not None:
                raise error from None
            raise
        guard._others_have_more, guard._busy_ranks = totals.more > 0, totals.busy
        packs = agreement.gather((self._incidents, self._reasons)) if totals.reported else []
        everything = tuple(incident for incidents, _ in packs for incident in incidents)
        reasons = [reason for _, reasons in packs for reason in reasons]
        if totals.whole and totals.whole == totals.busy:
            self._raise_whole()
        if everything:
            self._judge(everything, totals.size, at_end=True)
            self._record(everything)
        if totals.kept:
            agreement.settle(share, totals, guard._state)
        else:
            guard._state.give_back()
        sums = self._outcome.sums
        if sums is None and (totals.by_total or not (totals.kept or guard._tally.has_means)):  # nothing from here
            sums = torch.zeros(2, dtype=torch.float64, device=agreement.device)
        bad = any(not incident.transient for incident in everything)
        tally = guard._tally.after_step(totals.size, bad=bad, incidents=everything, sums=sums)
        if agreement.rank == 0:
            guard._log_counts(totals.kept, tally)
        guard._tally, guard.global_step = tally, guard.global_step + 1
        count = totals.count if totals.by_total else totals.kept
        mean = totals.loss / count if count else 0.0 if totals.kept else float("nan")
        value = self._outcome.value
        loss = torch.full_like(torch.empty((), dtype=torch.float32) if value is None else value, mean)
        loss.__dict__["of_all_ranks"] = mean, agreement.world_size  # `Rewind` need not ask the ranks again
        losses = self._outcome.per_sample if self._kept else None
        return GuardResult(loss, losses, self._kept, self._incidents, reasons)

    def _raise_failure(self, error: BaseException | None) -> NoReturn:
        """Raise what was raised here; on the other ranks, an error that names it."""
        texts = self._agreement.gather(None if error is None else _described(error))
        if error is not None:
            raise error
        rank, text = next((rank, text) for rank, text in enumerate(texts) if text is not None)
        what = f"Guard: rank {rank} of {self._agreement.world_size} raised {text}"
        why = "no sample is to blame for that, so no rank has made the step; everything is as before it."
        raise OtherRankError(what, why=why, fix=f"# see the traceback of rank {rank}")

    def _raise_whole(self) -> NoReturn:
        """Raise a fault that every sample of every rank has."""
        if self._whole is not None:
            why, fix = advice(self._whole, self._batch, self._trial.function, self._guard._state.parameters)
            raise_as_it_is(self._whole, self._size, f"on every rank, {self._evidence}", why, fix)
        what = "Guard: every sample of every other rank fails; this rank has none."
        why = "a fault that all samples have is in the code or the weights."
        raise OtherRankError(what, why=why, fix="# see the tracebacks of the other ranks")

    def _record(self, incidents: Sequence[Incident]) -> None:
        """Pass incidents on: each rank to its log, the first one for all to those who keep them."""
        rank, wishes = self._agreement.rank, self._wishes
        own = [incident for incident in incidents if incident.rank == rank]
        log(own)
        owners = sorted({incident.rank for incident in incidents})
        evidence: dict[int, Any] = {}
        if wishes is not None and (wishes.payload is not None or wishes.snapshot is not None):
            evidence = self._agreement.bring((self._samples(own), self._snapshot), owners)
        for owner in owners if rank == 0 else ():
            of_rank = [incident for incident in incidents if incident.rank == owner]
            kept = evidence.get(owner, (None, None))
            hand_over(self._guard, of_rank, *kept)


def _described(error: BaseException) -> str:
    where = StepFault.raised(error).where if isinstance(error, Exception) else None
    first_line = next(iter(text_of(error).strip().splitlines()), "")
    return f"{class_name(type(error))}: {first_line}" + (f" ({where})" if where else "")


# --- Replicas -------------------------------------------------------------------------------------------------------


class ReplicatedStep(SharedStep):
    """One step of one rank that runs the model without the others."""

    _agreement: Replicas

    def _make(self, batch: Any, error: BaseException | None) -> BaseException | None:
        if error is None and self._size and (error := self._raised_by(lambda: self._try(batch))) is not None:
            self._agreement.withdraw()
        return error

    def _try(self, batch: Any) -> None:
        agreement, trial = self._agreement, self._trial
        trial.before_backward = self._before_backward
        if self._first:
            self._made_before = collectives_made()
        started = perf_counter()
        self._outcome = trial.run(batch, self._size)
        if self._outcome.fault is not None or not self._first:  # a healthy first one may have compiled the model
            passes, seconds = 2 * self._size.bit_length() + 6, perf_counter() - started  # to find one bad sample
            agreement.warn_of_timeout(passes * seconds, f"{passes} passes of {seconds:.3g} s")
        trial.before_backward = None
        if self._outcome.skipped:
            self._kept = []
        if self._outcome.fault is not None:
            self._refuse_collectives()
            agreement.withdraw()
            self._search(trial)

    def _before_backward(self, outcome: Outcome) -> None:
        self._refuse_collectives()
        if self._guard._first:
            self._look_around(outcome)
        self._agreement.before_backward(self._size, self._guard._state, by_total=outcome.count is not None)


# --- Shards ---------------------------------------------------------------------------------------------------------


class ShardedStep(SharedStep):
    """One step of one rank that runs the model together with the others."""

    # Every try is a pass of all ranks through FSDP2's own collectives. If it fails anywhere, its gradients are dropped
    # everywhere, the ranks with a fault search for their bad samples while the others follow, and all try again.

    _agreement: Shards
    _again = False  # whether this is the second try, without the bad samples

    def _make(self, batch: Any, error: BaseException | None) -> BaseException | None:
        guard = self._guard
        error = self._try(batch, error)
        totals = self._tell(error)
        if totals.failed or not totals.stale:
            return error
        self._again = True
        self._agreement.search()
        error = self._raised_by(lambda: self._look_for_faults(totals))
        if self._agreement.follow(failed=error is not None):
            self._tell(error)
            return error
        batch, kept = self._batch, self._kept
        guard._state.restore()
        if len(kept) < self._size and kept:
            batch = guard._reader.select(batch, kept, self._size)
        error = self._try(with_own_containers(batch), None)
        totals = self._tell(error)
        if totals.failed or not totals.stale:
            return error
        if (fault := self._outcome.fault) is not None:
            evidence = "no rank has a sample that can be blamed for it; it came in a second try"
            error = self._raised_by(lambda: raise_as_it_is(fault, self._size, evidence))
        self._tell(error)
        return error

    def _try(self, batch: Any, error: BaseException | None) -> BaseException | None:
        """Run the kept samples with all other ranks, or only take part; return what no sample is blamed for."""
        agreement, count = self._agreement, len(self._kept)
        first = self._guard._first
        agreement.begin(known=not self._again, counts=first)
        self._made_before = collectives_made() if first else None
        self._outcome = Outcome()
        self._trial.before_backward = self._before_backward

        def run() -> None:
            self._outcome = self._trial.run(batch, count)
            if self._outcome.fault is not None:
                self._refuse_collectives()
            if not first:
                agreement.warn_of_timeout(agreement.longest_pause, "its longest time between two gathers")

        if error is None and count:
            error = self._raised_by(run)
        self._trial.before_backward, self._trial.weight = None, 1.0
        fault = self._outcome.fault
        try:
            agreement.complete(failed=error is not None or fault is not None or self._outcome.skipped)
        except OtherRankError as lost:
            raise lost from (fault.error if error is None and fault is not None else error)
        if self._again and self._trial.scaler is not None and fault is not None and fault.error is None:
            self._outcome.fault = None  # each rank's own gradients are finite without the scale: it is left to see them
        if count and error is None and self._outcome.skipped:
            self._kept = []
        return error

    def _before_backward(self, outcome: Outcome) -> None:
        self._refuse_collectives()
        if self._guard._first:
            self._look_around(outcome, self._agreement.gathered())
        self._trial.weight = self._agreement.weight(len(self._kept), by_total=outcome.count is not None)

    def _look_for_faults(self, totals: Share) -> None:
        """Search for this rank's bad samples, if it has a fault of its own; the others take part in every pass."""
        guard, fault = self._guard, self._outcome.fault
        guard._state.restore()
        if self._size and guard._reader.writes(self._batch) != self._writes:
            if fault is not None and fault.cause != "non-finite gradient":
                self._search(self._trial)
            what = "Guard: a rank has bad samples, and `loss_fn` has written into the batch of this one."
            why = "with FSDP2 all ranks make the step again without the bad samples, each with its own batch."
            raise ArgumentValueError(what, why=why, fix="x = x / 255   # a new tensor, not x.div_(255)")
        if self._kept and totals.spoilt and (fault is None or fault.cause == "non-finite gradient"):
            self._outcome = self._trial.run(with_own_containers(self._batch), self._size)
            fault = self._outcome.fault  # of this rank's own gradients; in the shards are those of all
        if fault is not None and self._kept:
            self._search(self._trial)

    def _share(self, error: BaseException | None) -> Share:
        fault = self._outcome.fault if error is None else None
        share = super()._share(error)
        share.stale = fault is not None
        share.spoilt = fault is not None and fault.cause == "non-finite gradient"
        if fault is not None:
            share.loss = share.count = 0.0
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
        nothing = next((form for _, form in forms if form is not None), None)
    while True:
        following = END if batch is END else next(batches, END)
        guard._more, guard._others_have_more = following is not END, None
        yield nothing if batch is END else batch
        if guard._others_have_more is None:
            why = "the other ranks make one, and wait for this one."
            fix = "for batch in guard.batches(loader): guard.backward(batch, loss_fn)   # with every batch"
            raise ArgumentValueError("Guard.batches(): no step was made with the last batch.", why=why, fix=fix)
        if not guard._others_have_more:
            return
        batch = following


def _of_no_rows(guard: Guard, batch: Any) -> Any:
    """Return a batch of the same form with no rows; None where `select` of the user cannot make one."""
    try:
        return guard._reader.select(batch, [], guard._reader.count(batch))
    except Exception:  # noqa: BLE001 - the batch itself is judged when it is used
        return None
