"""Whose fault it was: from a fault of the whole batch to the rows that are to blame.

The batch is run once more under hooks, which see at which module the first value or gradient is not finite, and in
which rows, before other modules mix it into all of them. That is a hint and no more: a module may see one sample a
call, or classes along its first dimension. Whatever the hint says, rows are blamed only after tests with the user's
whole function, on small groups of rows under the same state.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from gradgate._source import definition_line
from gradgate._torch_compat import ThreadModes, compiled_as_written, write_grad_mode
from gradgate._trees import with_own_containers
from gradgate.errors import GradgateError
from gradgate.guard._batches import BatchReader, index_of, taking
from gradgate.guard._faults import Fault, must_pass
from gradgate.guard._observer import Observer, Sighting
from gradgate.guard._search import Group, Search, Verdict
from gradgate.guard._state import TrainingState
from gradgate.guard._trial import Outcome, Trial
from gradgate.records import Stage


@dataclass(frozen=True, slots=True)
class Blame:
    """Rows that are to blame, and for what.

    Attributes:
        rows: One row, or rows that fail only together.
        fault: The fault of the batch.
        message: What was said when these rows were tested by themselves, else what the batch said.
        stage: Where it showed first.
        module: The module it is laid to.
        where: The user's line.
        norm: The norm of the gradient that came back to the row.
        method: How it was found.
    """

    rows: tuple[int, ...]
    fault: Fault
    message: str
    stage: Stage
    module: torch.nn.Module | None
    where: str | None
    norm: float | None
    method: str


@dataclass(slots=True)
class Localisation:
    """What a search for the guilty rows gave so far.

    Attributes:
        blames: Who is to blame.
        everyone: Whether every sample that was tested fails.
        by_size: Whether as many samples that pass otherwise fail in the same way.
        repeated: Whether the fault came again at all under the same state.
        tests: How many tests were made.
        modules: The modules that ran.
    """

    blames: list[Blame] = field(default_factory=list)
    everyone: bool = False
    by_size: bool = False
    repeated: bool = False
    tests: int = 0
    modules: list[torch.nn.Module] = field(default_factory=list)


class Probes:
    """Runs the user's function on rows of one batch, to find out which of them are to blame for a fault.

    Args:
        trial: Runs the user's function.
        state: Is put back before each run.
        reader: Takes rows of the batch.
        batch: The batch.
        size: How many samples it holds.
        eager: Something compiled may run. It runs as it was written, so that hooks see inside and no size is compiled.
        fault: The fault of the whole batch.
    """

    def __init__(
        self,
        trial: Trial,
        state: TrainingState,
        reader: BatchReader,
        batch: Any,
        size: int,
        fault: Fault,
        *,
        eager: bool,
    ) -> None:
        self.found = Localisation()
        self._trial = trial
        self._state = state
        self._batch = batch
        self._size = size
        self._fault = fault
        self._eager = eager
        self._batch_dim = reader.batch_dim
        self._take = reader.taking(batch, size)
        self._runs_backward = fault.stage == "backward"
        self._recording = self._runs_backward
        self._passed = False
        self._ambient = torch.is_grad_enabled()
        self._messages: dict[int, str] = {}

    def localise(self) -> Iterator[Localisation]:
        """Find who is to blame; pause whenever the batch without them may pass. Going on means that it fails as before.

        `found` says why where nobody is blamed in the end.
        """
        observer, hint = self._replay()
        if not self.found.repeated:
            return
        hint = hint or self._suspects()
        search = Search(list(range(self._size)), self._test, hint)
        for _ in search.run():
            self.found.tests = search.tests
            self.found.blames = [self._blame(rows, hint, observer.sightings) for rows in search.groups]
            yield self.found
        self.found.tests, self.found.everyone, self.found.by_size = search.tests, search.everyone, search.by_size

    def _replay(self) -> tuple[Observer, frozenset[int]]:
        """Run the batch again to see which rows to suspect; without recording if the fault shows so too."""
        fault = self._fault
        values, gradients = fault.error is None and not self._runs_backward, fault.cause == "non-finite gradient"
        for recording in (True,) if self._runs_backward else (False, True):  # some losses call backward themselves
            self._recording = recording
            observer = Observer(self._size, self._batch_dim, self._state.patches, values=values, gradients=gradients)
            batch = with_own_containers(self._batch)
            with observer:
                observer.look(batch)
                outcome = self._run(batch, self._size)
            self.found.modules = list(observer.modules)
            if outcome.fault is not None and outcome.fault.same_as(fault):
                break
        again = outcome.fault
        if again is not None and (again.same_as(fault) or (self._eager and again.error and fault.error)):
            self._fault = again  # compiled code words its errors differently
            self.found.repeated = True
        return observer, outcome.bad_rows or observer.hint

    def _suspects(self) -> frozenset[int]:
        """Search in the module that raised alone, as if its arguments had a row for each sample: a hint for little."""
        call = self._fault.call
        if call is None or self._runs_backward or next(call.module.children(), None) is not None:
            return frozenset()
        args, kwargs = (taking(tree, self._size, self._batch_dim) for tree in (call.args, call.kwargs))
        everything = list(range(self._size))

        def test(rows: Group) -> Verdict:
            index = index_of(rows)
            try:
                call.module(*args(index), **kwargs(index))
            except Exception as error:
                if must_pass(error):
                    raise
                return Verdict.SAME if self._fault.same_as(Fault.raised(error)) else Verdict.OTHER
            return Verdict.PASSES

        with self._as_written(), self._recorded(False):
            if test(everything) is not Verdict.SAME:
                return frozenset()
            search, found = Search(everything, test), frozenset[int]()
            for _ in search.run():
                found = frozenset(row for rows in search.groups for row in rows)
                if test([row for row in everything if row not in found]) is not Verdict.SAME:
                    break
        return found

    def _test(self, rows: Group) -> Verdict:
        """Test rows of the batch with the user's whole function, and backward where the fault showed there."""
        outcome = self._run(self._take(rows, index_of(rows)), len(rows))
        if outcome.fault is None:
            self._passed = True
            return Verdict.PASSES
        # A loss that leaves a NaN out of a large batch, but not its gradient, may have to take it in a small one.
        spoilt = (self._fault.cause, outcome.fault.cause) == ("non-finite gradient", "non-finite loss")
        if not spoilt and not self._fault.same_as(outcome.fault):
            if self._recording or self._passed:
                return Verdict.OTHER
            self._recording = True  # behind the fault, the loss may call backward itself
            return self._test(rows)
        if len(set(rows)) <= 3:  # what a suspect beside an anchor says is its own
            self._messages.update(dict.fromkeys(rows, outcome.fault.message))
        return Verdict.SAME

    def _run(self, batch: Any, size: int) -> Outcome:
        self._state.restore()
        run = self._trial.run if self._runs_backward else self._trial.forward
        with self._as_written(), self._recorded(self._recording and self._ambient):
            try:
                return run(batch, size)
            except GradgateError:
                raise
            except Exception as error:  # not to be caught, but it may come from the number of rows alone
                if must_pass(error):
                    raise
                return Outcome(Fault.raised(error))

    @contextmanager
    def _recorded(self, flag: bool) -> Iterator[None]:
        """Set the mode of autograd, in a way that an interrupt cannot tear apart."""
        with self._state.patches.block():
            self._state.patches.later(ThreadModes().restore)
            write_grad_mode(flag)
            yield

    def _as_written(self) -> AbstractContextManager[None]:
        return compiled_as_written(self._state.patches) if self._eager else nullcontext()

    def _blame(self, rows: tuple[int, ...], hint: frozenset[int], sightings: list[Sighting]) -> Blame:
        fault = self._fault
        message = self._messages.get(rows[0], fault.message)
        where = fault.where or definition_line(self._trial.function)
        method = "search with the whole function"
        if hint.issuperset(rows):
            kind = "gradients" if self._runs_backward else "values"
            method = f"{kind} that are not finite" if fault.error is None else "search in the module that raised"
        first = next((sighting for sighting in sightings if sighting.rows.issuperset(rows)), None)
        if first is None:
            return Blame(rows, fault, message, fault.stage, fault.module, where, None, method)
        # Where a row was first seen not to be finite.
        stage: Stage = "forward" if fault.stage == "loss" else fault.stage
        if first.module is None and not self._runs_backward:
            method += ", in the batch itself"
        return Blame(rows, fault, message, stage, first.module, first.where or where, first.norms.get(rows[0]), method)
