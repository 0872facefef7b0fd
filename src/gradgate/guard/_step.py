"""One guarded call: a try, the search after its fault, the try without the bad samples, and what is recorded of it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch

from gradgate._loader_link import follow
from gradgate._payload import encode
from gradgate._state import capture
from gradgate._torch_private import add_tensors, as_written, leaf_of, nodes_below, tree_flatten, tree_unflatten
from gradgate._trees import Ids, batch_dim_of, index_of, read_ids, with_own_containers
from gradgate.errors import TooManyBadSamples
from gradgate.guard._result import GuardResult, Tally, Wishes, hand_over, incident_of, incident_table, log, mean_of
from gradgate.guard._search import Blame, Recovery, Refuse, raise_as_it_is
from gradgate.guard._trial import LossTrial, Outcome, StepFault, Trial
from gradgate.records import Incident

if TYPE_CHECKING:
    from gradgate.guard._guard import Guard

Made = TypeVar("Made")
Incidents = Sequence[Incident]


class Step:
    """One call of a guard, alone or with other ranks."""

    def __init__(self, guard: Guard, batch: Any, ids: Ids | None, first_row: int = 0) -> None:
        self._guard = guard
        self._batch = batch
        self._ids = ids
        self._first_row = first_row  # of this part, where a batch is made in parts
        self._size = self._writes = 0
        self._outcome = Outcome()
        self._kept: Sequence[int] = ()
        self._reasons: list[str] = []  # why the step may not be exact
        self._searched = False
        self._whole: StepFault | None = None  # a fault that every sample has, on this rank
        self._evidence = ""
        self._incidents: tuple[Incident, ...] = ()
        self._names: Ids | None = None
        self._losses: torch.Tensor | None = None  # of the samples, in the first try
        self._wishes: Wishes | None = None
        self._snapshot: bytes | None = None

    def _record(self, incidents: Incidents) -> None:
        """Pass incidents to the log and to those who keep them."""
        log(incidents)
        hand_over(self._guard, incidents, self._samples(incidents), self._snapshot)

    def _search(self, trial: Trial, refuse: Refuse | None = None) -> None:
        """Find out who is to blame for a failed try, and make it without them."""
        guard, state, failed = self._guard, self._guard._state, self._outcome
        assert failed.fault is not None
        if guard._reader.writes(self._batch) != self._writes:
            evidence = "the batch was written to in place, so nothing can be tried again"
            raise_as_it_is(failed.fault, self._size, evidence)
        self._names, self._losses = guard._ids_of(self._batch, self._size, self._ids), failed.per_sample
        self._wishes = self._wishes or Wishes.of(guard._sinks, guard.payload)
        if self._wishes.snapshot is not None and guard._agreement.has_whole_weights:
            state.restore()
            model = guard._modules[0] if len(guard._modules) == 1 else torch.nn.ModuleList(guard._modules)
            self._snapshot = capture(model, limit=self._wishes.snapshot)
        recovery = Recovery(guard, trial, self._batch, self._size, refuse)
        recovery.run(failed.fault)
        self._outcome, self._kept, self._reasons = recovery.outcome, recovery.kept, recovery.reasons
        self._incidents = self._dropped(recovery.dropped) + tuple(map(self._transient, recovery.transient))
        # Not the recovery itself: it holds the trial, which may hold this step, and the activations of the fault.
        self._searched, self._whole, self._evidence = True, recovery.whole, recovery.evidence

    def _dropped(self, blames: Iterable[Blame]) -> tuple[Incident, ...]:
        pairs = [(row, blame) for blame in blames for row in blame.rows]
        return tuple(self._incident(row, blame) for row, blame in sorted(pairs, key=lambda pair: pair[0]))

    def _incident(self, row: int, blame: Blame) -> Incident:
        fault, together = blame.fault, [self._first_row + other for other in blame.rows if other != row]
        details: dict[str, Any] = {"batch": self._size, "tried": blame.method, "tests": blame.tests}
        if together:
            details |= {"together_with": together, "fault": fault.cause}
        name = None if self._names is None else self._names[row]
        # The mean of a batch is not the sample's own loss, unless it is spoilt.
        loss = fault.loss if fault.cause == "non-finite loss" else None
        return incident_of(
            fault,
            self._guard._common(),
            sample_id=None if name is None else str(name.tolist() if isinstance(name, torch.Tensor) else name),
            row=self._first_row + row,
            stage=blame.stage,
            cause="together" if together else fault.cause,
            message=blame.message,
            where=blame.where,
            module=self._path(blame.module),
            loss=loss if self._losses is None else float(self._losses[row]),
            grad_norm=blame.norm,
            details=details,
        )

    def _transient(self, fault: StepFault) -> Incident:
        """Make the incident of a fault that did not come again: nobody's, so without a row."""
        details = {"batch": self._size, "tried": "the same batch once more under the same state"}
        known = {"module": self._path(fault.module), "loss": fault.loss, "details": details}
        return incident_of(fault, self._guard._common(), transient=True, **known)

    def _path(self, sought: torch.nn.Module | None) -> str | None:
        """Name a module by its path below a guarded one; by its class if it is that itself, or in none."""
        guard = self._guard
        roots = guard._modules
        for number, root in enumerate(roots):
            for path, module in root.named_modules():
                if module is sought:
                    path = as_written(path)
                    return f"{number}.{path}" if path and len(roots) > 1 else path or type(module).__name__
        return None if sought is None else type(sought).__name__

    def _samples(self, incidents: Incidents) -> dict[str, bytes] | None:
        """Encode the samples of incidents, if somebody keeps them."""
        if self._wishes is None or (limit := self._wishes.payload) is None:
            return None
        take = self._guard._reader.select
        rows = {one.id: one.row - self._first_row for one in incidents if one.row is not None}
        return {name: encode(take(self._batch, [row], self._size), limit=limit) for name, row in rows.items()} or None

    def _judge(self, incidents: Incidents, size: int, fault: StepFault | None = None, *, at_end: bool = False) -> None:
        """Refuse a step of which too much is bad or, at its end, the last of too many bad steps in a row."""
        guard, in_a_row = self._guard, self._guard._tally.in_a_row + 1
        dropped = tuple(incident for incident in incidents if not incident.transient)
        too_many = len(dropped) > guard.max_bad * size
        if too_many:
            what = f"{len(dropped)} of {size} samples are bad"
            why = f"more than max_bad={guard.max_bad:g} of a batch points to the code or the weights."
            fix = "gg.Guard(model, max_bad=...)   # if so many bad samples are to be expected"
        elif at_end and dropped and in_a_row >= guard.patience:
            guard._tally.in_a_row = in_a_row
            what = f"{in_a_row} steps in a row had bad samples, most recently"
            why = f"patience={guard.patience} bad steps in a row point to something that does not pass by itself."
            fix = "gg.Guard(model, patience=...)   # if bad samples are to be expected in every step"
        else:
            return
        dropped = tuple(replace(one, transient=too_many, details={**one.details, "refused": True}) for one in dropped)
        self._record(dropped)
        if self._searched:
            fault = self._whole
        refusal = TooManyBadSamples(f"Guard: {what}:\n{incident_table(dropped)}", why=why, fix=fix, incidents=dropped)
        raise refusal from (None if fault is None else fault.error)

    def _note_losses(self, result: GuardResult) -> None:
        """Keep the losses of samples for the ledger, where the guard has a history."""
        history = self._guard._loss_history
        if history is not None and result.losses is not None:
            history.add(self._guard._ids_of(self._batch, self._size, self._ids), result.kept, result.losses)

    def _look_around(self, outcome: Outcome, known: Collection[torch.Tensor] = ()) -> None:
        """Take in, at the first step, parameters that are trained although no guarded module owns them."""
        guard, leaves = self._guard, map(leaf_of, nodes_below([outcome.value]))
        trained = [leaf for leaf in leaves if isinstance(leaf, torch.nn.Parameter) and leaf not in known]
        guard._outsiders.trained(guard._state.adopt(trained))
        guard._first = False


class OwnStep(Step, ABC, Generic[Made]):
    """One call of a guard that decides alone."""

    def __init__(self, guard: Guard, batch: Any, ids: Ids | None, first_row: int = 0) -> None:
        super().__init__(guard, batch, ids, first_row)
        self._size, self._writes, self.guests = guard._reader.read(batch, ids)
        self._kept = range(self._size)

    @abstractmethod
    def _conclude(self) -> tuple[Made, Tally, int]:
        """Return the result, and the counts and the global step after this step."""

    def run(self, trial: Trial) -> Made:
        """Make the step; whatever is raised, everything is as before."""
        guard, state = self._guard, self._guard._state
        try:
            try:
                state.remember(self.guests)
                self._make(trial)
                result, tally, step = self._conclude()
                sums = map(add_tensors, *state.sums())
                # Python looks for interrupts after calls and at jumps. Unpacking is neither, and nothing that follows
                # is: an interrupt comes before, and everything is as before the step, or after the return.
                _ = [*sums]
                state.open, guard._tally, guard.global_step = False, tally, step
                return result
            except BaseException as error:  # if the device died, more would only hide its error
                guard._outsiders.forget()
                state.give_back(device_died=isinstance(error, torch.AcceleratorError))
                raise
        except BaseException:  # perhaps a second interrupt, in the clean-up after the first
            state.give_back()
            raise

    def _make(self, trial: Trial) -> None:
        batch, self._batch = self._batch, with_own_containers(self._batch)
        self._outcome = trial.run(batch, self._size)
        if self._outcome.fault is not None:
            self._search(trial, lambda blames, fault: self._judge(self._dropped(blames), self._size, fault))
            self._judge(self._incidents, self._size, at_end=trial.runs_backward)
            self._record(self._incidents)
        elif trial.runs_backward and self._outcome.skipped:
            self._kept = []


class LossStep(OwnStep[GuardResult]):
    """A call of `Guard.backward` in one process."""

    _first = False

    def run(self, trial: Trial) -> GuardResult:
        guard = self._guard
        if isinstance(trial, LossTrial) and guard._first:
            self._first, trial.first, trial.before_backward = True, True, self._look_around
            guard._outsiders.look(trial.function)
            follow(None, self._batch, guard)
            if self._ids is None and guard._read_ids is not None:
                read_ids(guard._read_ids, self._batch, self._size)  # what is wrong about it is said at the first step
        return super().run(trial)

    def _conclude(self) -> tuple[GuardResult, Tally, int]:
        guard, outcome = self._guard, self._outcome
        if self._first or self._searched:
            guard._outsiders.warn()
        loss, sums = outcome.value, outcome.sums
        if sums is not None:
            loss = mean_of(sums, loss)
        elif loss is None:
            loss, sums = torch.tensor(float("nan")), guard._sums_of_nothing()
        result = GuardResult(loss, outcome.per_sample, self._kept, self._incidents, self._reasons, outcome.clipped)
        tally = guard._tally.after_step(self._size, bad=bool(result.dropped), incidents=self._incidents, sums=sums)
        guard._log_counts(len(self._kept), tally)
        self._note_losses(result)
        return result, tally, guard.global_step + 1


class OutputStep(OwnStep[tuple[Any, torch.Tensor]]):
    """A call of `Guard.forward`."""

    fill_value = float("nan")

    def _conclude(self) -> tuple[tuple[Any, torch.Tensor], Tally, int]:
        """Return rows at their places among all rows of the batch, and which of them are real."""
        guard, value = self._guard, self._outcome.value
        leaves, form = tree_flatten(value)
        device = next((leaf.device for leaf in leaves if isinstance(leaf, torch.Tensor)), None)
        keep = torch.ones(self._size, dtype=torch.bool, device=device)
        if self._searched:
            guard._outsiders.warn()
            index = index_of(self._kept)
            keep = torch.zeros(self._size, dtype=torch.bool, device="cpu").index_fill(0, index, True).to(device)
            value = tree_unflatten([self._filled(leaf, index) for leaf in leaves], form)
        return (value, keep), guard._tally.after_incidents(self._incidents), guard.global_step

    def _filled(self, leaf: Any, index: torch.Tensor) -> Any:
        """Put the rows of an output at their places among all rows, and the fill value elsewhere."""
        batch_dim = self._guard._reader.batch_dim
        if not isinstance(leaf, torch.Tensor) or (dim := batch_dim_of(leaf, len(index), batch_dim)) is None:
            return leaf
        shape = [*leaf.shape[:dim], self._size, *leaf.shape[dim + 1 :]]
        value = self.fill_value if _can_hold(leaf.dtype, self.fill_value) else 0
        return leaf.new_full(shape, value).index_copy(dim, index.to(leaf.device), leaf)


def _can_hold(dtype: torch.dtype, value: float) -> bool:
    if dtype.is_floating_point or dtype.is_complex:
        return True
    low, high = (0, 1) if dtype is torch.bool else (torch.iinfo(dtype).min, torch.iinfo(dtype).max)
    return float(value).is_integer() and low <= value <= high
