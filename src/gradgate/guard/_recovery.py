"""From a failed step to the step without the bad samples: blame, drop, run again, until it runs or must be raised."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NoReturn

from gradgate._batches import BatchReader
from gradgate._names import listed
from gradgate._state import TrainingState
from gradgate._trees import with_own_containers
from gradgate.errors import GradgateError, TooManyBadSamples
from gradgate.guard._faults import StepFault, advice
from gradgate.guard._outsiders import Outsiders
from gradgate.guard._search import Blame, Localisation, Probes
from gradgate.guard._trial import Outcome, Trial


@dataclass(frozen=True, slots=True)
class Dropped:
    """One row of the batch that was dropped, with the rows that it fails together with, and how that was found."""

    row: int
    together: tuple[int, ...]
    blame: Blame
    tests: int


@dataclass(slots=True)
class Recovered:
    """How a recovery ended."""

    outcome: Outcome | None
    kept: list[int]
    dropped: list[Dropped]
    transient: list[StepFault] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)
    whole: StepFault | None = None
    evidence: str = ""


@dataclass
class Recovery:
    """The way back from one fault."""

    trial: Trial
    probe: Trial
    state: TrainingState
    outsiders: Outsiders
    reader: BatchReader
    batch: Any
    size: int
    compiled: bool
    min_kept: int
    refuse: Callable[[Sequence[Dropped]], None]
    with_others: bool = False

    def run(self, fault: StepFault) -> Recovered:
        """Find who is to blame for a fault, and make the step without them."""
        marks = self.state.parameter_marks()
        self.outsiders.look(self.trial.function)
        result = self._run(fault, Recovered(None, list(range(self.size)), []))
        for trial in {self.trial, self.probe}:
            trial.let_go(but=[*result.transient, result.whole])
        written = self.state.written_parameters(marks)
        if written:
            result.reasons.append(f"parameters are written inside the step: {listed(written, 3)}")
        if strangers := self.outsiders.written():
            result.reasons.append(strangers)
        if appeared := self.state.new_buffers():
            result.reasons.append(f"buffers appeared inside the step: {listed(appeared, 3)}")
        return result

    def _run(self, fault: StepFault, result: Recovered) -> Recovered:
        if (outcome := self._left_to_scaler(fault, result.kept)) is not None:
            result.outcome = outcome
            return result
        retried = False
        while True:
            probes = self._probes(fault, result.kept, eager=self.compiled and not retried)
            outcome, kept, new = None, result.kept, list[Dropped]()
            for found in probes.localise():
                new = _dropped(found, result.kept)
                blamed = {drop.row for drop in new}
                kept = [row for row in result.kept if row not in blamed]
                if len(kept) < self.min_kept:
                    return self._give_up(result, new, kept, fault)
                outcome = self._try(kept)
                if outcome.fault is None or not outcome.fault.same_as(fault):
                    break
            found = probes.found
            self.outsiders.note(found.modules)
            if not found.repeated:
                if retried:
                    self._raise(fault, result, "it comes and goes: it did not show again when it was searched for")
                retried = True
                outcome = self._try(kept)
                if outcome.fault is None:
                    result.transient.append(fault)
            elif outcome is None and found.everyone and self.with_others:
                return self._drop_all(result, fault, found)
            elif outcome is None or found.by_size:
                self._raise(fault, result, _explained(found, len(result.kept)))
            result.kept = kept
            result.dropped += new
            self._refuse(result, fault)
            if outcome.fault is None:
                result.outcome = outcome
                if self.trial.runs_backward and outcome.skipped:
                    result.kept = []
                return result
            fault = outcome.fault

    def _probes(self, fault: StepFault, rows: list[int], *, eager: bool) -> Probes:
        return Probes(self.probe, self.state, self.reader, self._rows(rows), len(rows), fault, eager=eager)

    def _rows(self, rows: list[int]) -> Any:
        if len(rows) == self.size:
            return with_own_containers(self.batch)
        return self.reader.select(self.batch, rows, self.size)

    def _try(self, rows: list[int]) -> Outcome:
        self.state.restore()
        outcome = self.trial.run(self._rows(rows), len(rows))
        if outcome.fault is not None and (left := self._left_to_scaler(outcome.fault, rows)) is not None:
            return left
        return outcome

    def _left_to_scaler(self, fault: StepFault, rows: list[int]) -> Outcome | None:
        """Give the step with its overflow, for the scaler to see, if the overflow is gone without scaling."""
        if self.trial is self.probe or fault.cause != "non-finite gradient":
            return None
        self.state.restore()
        if self.probe.run(self._rows(rows), len(rows)).fault is not None:
            return None
        self.state.restore()
        outcome = self.trial.run(self._rows(rows), len(rows))
        outcome.fault = None
        return outcome

    def _refuse(self, result: Recovered, fault: StepFault) -> None:
        try:
            self.refuse(result.dropped)
        except TooManyBadSamples as refused:
            raise refused from fault.error

    def _give_up(self, result: Recovered, new: list[Dropped], kept: list[int], fault: StepFault) -> Recovered:
        """Make no step at all: nobody is left, or fewer than the model can work with."""
        result.dropped += new
        self._refuse(result, fault)
        self.state.restore()
        result.kept = []
        result.reasons.append(
            f"only {len(kept)} of {self.size} samples are left, fewer than min_kept={self.min_kept}: no step was made"
        )
        return result

    def _drop_all(self, result: Recovered, fault: StepFault, found: Localisation) -> Recovered:
        """Make no step here: every sample has the fault. Whether it is the code's is for all processes to say."""
        self.state.restore()
        result.whole, result.evidence = fault, _explained(found, len(result.kept))
        for row in result.kept:
            blame = Blame((row,), fault, fault.message, fault.stage, fault.module, fault.where, None, "every sample")
            result.dropped.append(Dropped(row, (), blame, found.tests))
        result.kept = []
        return result

    def _raise(self, fault: StepFault, result: Recovered, evidence: str) -> NoReturn:
        """Raise a fault that is nobody's."""
        if result.dropped:
            rows = listed([drop.row for drop in result.dropped])
            evidence = f"without the bad samples (rows {rows}) the batch cannot run either: {evidence}"
        if fault.error is None and (spoilt := self.state.spoilt_parameters()):
            evidence = f"{evidence}; parameters are not finite themselves: {listed(spoilt, 3)}"
        why, fix = advice(fault, self.batch, self.trial.function, self.state.parameters)
        raise_as_it_is(fault, self.size, evidence, why, fix)


def raise_as_it_is(fault: StepFault, size: int, evidence: str, why: str = "", fix: str = "") -> NoReturn:
    """Raise a fault that no sample is blamed for: the user's exception with the evidence behind it, or our own."""
    if fault.error is None:
        raise TooManyBadSamples(f"Guard: {fault.message} in a batch of {size} samples; {evidence}.", why=why, fix=fix)
    told = GradgateError(f"Guard: {evidence}.", why=why or "a fault of the code must be seen.", fix=fix)
    told.__cause__ = fault.error.__cause__
    with suppress(Exception):  # a class may let nobody set an attribute; the evidence stands behind it all the same
        fault.error.add_note(f"gradgate: {evidence}; no sample was dropped, and everything is as before the step.")
    raise fault.error from told


def _dropped(found: Localisation, rows: list[int]) -> list[Dropped]:
    """Turn blames of places in the current batch into rows of the whole one."""
    dropped = []
    for blame in found.blames:
        group = tuple(rows[place] for place in blame.rows)
        dropped += [Dropped(row, tuple(other for other in group if other != row), blame, found.tests) for row in group]
    return dropped


def _explained(found: Localisation, size: int) -> str:
    if found.everyone:
        return f"every sample that was tried fails in the same way ({found.tests} tests in a batch of {size})"
    if found.by_size:
        return f"no sample can be blamed for it: as many samples that pass otherwise fail, too (a batch of {size})"
    return f"no sample can be blamed for it ({found.tests} tests in a batch of {size})"
