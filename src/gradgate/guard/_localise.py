"""Whose fault it was: from a fault of the whole batch to the rows that are to blame.

First the cheap ways, each of which looks close to where the fault was born: an exception is searched for in the one
module that did not return, with the arguments it had; a value that is not finite is seen at the module where it
first shows, before others mix it into every row; a gradient likewise on its way back. What they find is believed
only until the batch without these rows has run; if the same fault comes again, `find` is asked once more without
them, and tests the user's whole function on groups of rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch

from gradgate._source import definition_line
from gradgate._torch_compat import ModuleCall
from gradgate.guard._faults import Fault
from gradgate.guard._observer import Observer, Open, Sighting
from gradgate.guard._scenes import Scenes, has_rows, untouched
from gradgate.guard._search import Search, Test, Verdict, isolate, spread
from gradgate.guard._tape import Tape
from gradgate.records import Stage

__all__ = ["Blame", "Localisation", "localise"]

# A module's own arguments may all be spoilt by one row; a few failing rows there prove nothing, so ask no more.
SCREENED_IN_MODULE = 3
LOOKED_AT = 4


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
    """What a search for the guilty gave.

    Attributes:
        blames: Who is to blame.
        everyone: Whether every sample that was tested fails.
        repeated: Whether the fault came again at all under the same state.
        tests: How many tests were made.
        modules: The modules that ran, as far as they were seen.
    """

    blames: list[Blame] = field(default_factory=list)
    everyone: bool = False
    repeated: bool = True
    tests: int = 0
    modules: list[torch.nn.Module] = field(default_factory=list)


def localise(scenes: Scenes, fault: Fault, *, thorough: bool = False) -> Localisation:
    """Find the rows that are to blame for a fault.

    Args:
        scenes: The batch and the ways to test it.
        fault: The fault of the whole batch.
        thorough: Test the user's whole function on groups of rows, whatever that costs.

    Returns:
        What was found. Nothing blamed, not everyone and repeated: it could not be told.
    """
    localiser = _Localiser(scenes, fault)
    with scenes.as_written():
        if not thorough:
            localiser.quickly()
        if localiser.found.repeated and not localiser.found.blames:
            localiser.thoroughly()
    return localiser.found


class _Localiser:
    """One search."""

    def __init__(self, scenes: Scenes, fault: Fault) -> None:
        self.scenes = scenes
        self.fault = fault
        self.found = Localisation()
        self._rows = list(range(scenes.size))

    def quickly(self) -> None:
        if self.fault.error is not None and self.fault.stage != "backward":
            self._in_module()
        elif self.fault.cause == "non-finite gradient":
            self._by_gradients()
        elif self.fault.error is None:
            self._by_values()

    def thoroughly(self) -> None:
        """Test the whole function, on all rows first: a fault that does not come again is nobody's."""
        test = self.scenes.whole(self.fault)
        self.found.repeated = False
        for recording in (False, True):  # without it is cheaper, but some losses walk back themselves
            self.scenes.recording = recording
            self.found.tests += 1
            if test(self._rows) is not Verdict.SAME:
                continue
            self.found.repeated = True
            search = self._isolate(test)
            if search.groups or search.everyone:
                self._blame(search, "search with the whole function")
                return

    # --- exceptions ------------------------------------------------------------------------------------------------

    def _in_module(self) -> None:
        """Search in the innermost module that did not return."""
        call = self.fault.call
        # The traceback still holds the arguments. If no module inside has anything to answer, no replay is needed.
        ready = call is not None and next(call.module.children(), None) is None and untouched(call)
        if call is not None and ready and self._search_in(call, Open(call.module)):
            return
        observer = self._replay()
        if observer is None:
            return
        running = observer.inside(self.fault.module)
        if self.fault.call is not None:
            self._search_in(self.fault.call, running)
            return
        tape = self._tape(running)
        if tape.usable:
            with self.scenes.around(self.fault, tape) as test:
                self._search_from(test, "search in the loss function")

    def _search_in(self, call: ModuleCall, running: Open) -> bool:
        tape = self._tape(running)
        if not tape.usable or not has_rows(call, self.scenes.size, self.scenes.batch_dim):
            return False
        with self.scenes.inside(self.fault, call, tape, running.autocast) as test:
            return self._search_from(test, "search in the module that raised")

    def _tape(self, running: Open) -> Tape:
        return Tape(running.answers, self.scenes.size, self.scenes.batch_dim)

    def _replay(self) -> Observer | None:
        """Run the batch again under the same state to see what ran, without recording if the fault shows so too."""
        for recording in (False, True):
            self.scenes.recording = recording
            observer = Observer(self.scenes.size, self.scenes.batch_dim, self.scenes.state.patches)
            with self.scenes.prepared(), observer:
                again = self.scenes.trial.forward(self.scenes.batch, self.scenes.size).fault
            self.found.modules = list(observer.modules)
            if again is not None and (again.same_as(self.fault) or (self.scenes.eager and again.error is not None)):
                self.fault = again  # compiled code words its errors differently; from here on this is the fault
                return observer
        self.found.repeated = again is not None
        return None

    def _search_from(self, test: Test, method: str, sightings: Sequence[Sighting] = ()) -> bool:
        """Search with a test that first has to fail on all rows."""
        self.found.tests += 1
        if test(self._rows) is not Verdict.SAME:
            return False
        search = self._isolate(test, screened=SCREENED_IN_MODULE)
        search.everyone = False  # seen from one module only
        self._blame(search, method, sightings)
        return bool(search.groups)

    # --- values ----------------------------------------------------------------------------------------------------

    def _by_values(self) -> None:
        """See at which module the first rows were not finite, before they were mixed into all others."""
        for recording in (False, True):
            self.scenes.recording = recording
            observer = Observer(self.scenes.size, self.scenes.batch_dim, self.scenes.state.patches, values=True)
            outcome = None
            with self.scenes.prepared(), observer:
                observer.look(self.scenes.batch)
                outcome = self.scenes.trial.forward(self.scenes.batch, self.scenes.size)
            self.found.modules = list(observer.modules)
            if outcome is None:
                self._blame_smearing(observer)
                return
            if outcome.fault is not None and outcome.fault.same_as(self.fault):
                break
        else:
            self.found.repeated = outcome is not None and outcome.fault is not None
            return
        seen = observer.sightings[-1].rows if observer.sightings else frozenset()
        hint = outcome.bad_rows or seen
        tape = self._tape(observer.open[0])
        if tape and tape.usable:
            with self.scenes.around(self.fault, tape) as test:
                self._blame_hint(hint, test, "values that are not finite", observer.sightings)
        elif 0 < len(hint) < self.scenes.size:
            self._blame(_single(hint), "values that are not finite", observer.sightings)

    def _blame_smearing(self, observer: Observer) -> None:
        """Blame the rows that a module let into all others; of several, those that it does let in."""
        rows = sorted(observer.sightings[-1].rows)
        call = observer.smeared_by
        if call is not None and len(rows) > 1:
            companion = next(row for row in self._rows if row not in rows)
            rows = self._guilty(rows, lambda row: self.scenes.smears(call, row, companion)) or rows
        self._blame(_single(rows), "values that are not finite", observer.sightings)

    # --- gradients -------------------------------------------------------------------------------------------------

    def _by_gradients(self) -> None:
        """See at which module the first gradient that is not finite came back, and in which rows."""
        scenes = self.scenes
        observer = Observer(scenes.size, scenes.batch_dim, scenes.state.patches, gradients=True)
        with scenes.prepared(recording=True), observer:
            outcome = scenes.trial.forward(scenes.batch, scenes.size)
            if outcome.fault is not None or not observer.entries:
                return
            entries = observer.look_back()
            scenes.trial.attempt(lambda: torch.autograd.grad(outcome.value, entries, allow_unused=True))
        self.found.modules = list(observer.modules)
        if observer.is_outermost:
            tape = self._tape(observer.open[0])
            if tape.usable:
                hint = observer.sightings[-1].rows if observer.sightings else frozenset()
                with scenes.around_and_back(tape) as test:
                    self._blame_hint(hint, test, "gradients that are not finite", observer.sightings)
                return
        if observer.sightings:
            self._blame(_single(observer.sightings[-1].rows), "gradients that are not finite", observer.sightings)

    # --- what they share -------------------------------------------------------------------------------------------

    def _blame_hint(self, hint: frozenset[int], test: Test, method: str, sightings: list[Sighting]) -> None:
        """Blame suspected rows after a look at each in company; search among all where that does not explain it."""
        rest = [row for row in self._rows if row not in hint]
        guilty: list[int] = []
        if hint and rest:
            self.found.tests += 1
            if test(rest) is not Verdict.SAME:
                guilty = self._guilty(sorted(hint), lambda row: test(sorted([row, rest[0]])) is Verdict.SAME)
        if len(guilty) == len(hint) > 0 or (guilty and test(self._without(guilty)) is Verdict.PASSES):
            self._blame(_single(guilty), method, sightings)
            return
        self._search_from(test, f"search around {method}", sightings)

    def _guilty(self, rows: list[int], is_guilty: Callable[[int], bool]) -> list[int]:
        """Look at suspects one by one; of many at some from all over, and at the rest if one of those is innocent."""
        some = spread(rows, LOOKED_AT)
        guilty = [row for row in some if is_guilty(row)]
        self.found.tests += len(some)
        if len(guilty) == len(some):
            return rows
        rest = [row for row in rows if row not in some]
        self.found.tests += len(rest)
        return sorted(guilty + [row for row in rest if is_guilty(row)])

    def _without(self, rows: list[int]) -> list[int]:
        left_out = set(rows)
        return [row for row in self._rows if row not in left_out]

    def _isolate(self, test: Test, **options: int) -> Search:
        search = isolate(self._rows, test, **options)
        self.found.tests += search.tests
        return search

    def _blame(self, search: Search, method: str, sightings: Sequence[Sighting] = ()) -> None:
        self.found.everyone = search.everyone
        fault, where = self.fault, self.fault.where or definition_line(self.scenes.trial.function)
        for rows in search.groups:
            if len(rows) > max(2, self.scenes.size // 2):
                continue  # most of the batch together: that is its size, not its samples
            message = self.scenes.messages.get(rows[0], fault.message)
            first = next((sighting for sighting in sightings if sighting.rows.issuperset(rows)), None)
            if first is None:
                blame = Blame(rows, fault, message, fault.stage, fault.module, where, None, method)
            else:  # where a row was first seen not to be finite
                stage: Stage = "forward" if fault.stage == "loss" else fault.stage
                how = method if first.module or stage == "backward" else f"{method}, in the batch itself"
                norm = first.norms.get(rows[0])
                blame = Blame(rows, fault, message, stage, first.module, first.where or where, norm, how)
            self.found.blames.append(blame)


def _single(rows: Iterable[int]) -> Search:
    return Search([(row,) for row in sorted(rows)])
