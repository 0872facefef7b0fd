"""Who is to blame for a fault: hints from one replay, and tests of the user's function on groups of rows.

A hint - the module whose output first has a bad row, the gradient that is not finite - only says where to look
first. Nobody is dropped on a hint: a row is blamed if the batch passes without it and fails with it.

The recovery goes from a failed step to the step without the bad samples: blame, drop, run again, until it runs or must
be raised.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from itertools import cycle, islice, pairwise
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch.autograd.graph import Node

from gradgate._names import listed
from gradgate._patches import Patches
from gradgate._source import Line, definition_line, running_line, written
from gradgate._torch_private import (
    ThreadModes,
    anything_compiled,
    call_with_gradient,
    compiled_as_written,
    is_compiled,
    watched_modules,
    write_grad_mode,
)
from gradgate._trees import batch_dim_of, index_of, non_finite_rows, select_rows, tensors_in, with_own_containers
from gradgate.errors import GradgateError, TooManyBadSamples
from gradgate.guard._trial import LossTrial, Outcome, StepFault, Trial, advice, must_pass
from gradgate.records import Stage

if TYPE_CHECKING:
    from gradgate.guard._guard import Guard

# --- Group testing --------------------------------------------------------------------------------------------------


Group = list[int]
SCREENED = 8
TRIED = 3  # finds that are tried at once; with more of them, all rows are tested before the next try
TOGETHER = 4  # more rows that fail only together are not sought: that is the size of the batch
LIKELY = 0.7  # with this many guilty rows in a group on average, there is none half of the time


class Verdict(Enum):
    """How a test of some rows ended."""

    PASSES = "passes"
    SAME = "fails as the whole batch does"
    OTHER = "fails in another way"


Test = Callable[[Group], Verdict]


class Search:
    """A search for the minimal sets of rows that fail, knowing that all rows together do."""

    def __init__(self, rows: Group, test: Test, hint: Iterable[int] = ()) -> None:
        self.groups: list[tuple[int, ...]] = []
        self.everyone = False
        self.by_size = False
        self.tests = 0
        self._rows = rows
        self._test = test
        hinted = frozenset(hint)
        self._hint = [row for row in rows if row in hinted]
        self._unhinted = [row for row in rows if row not in hinted]
        self._verdicts: dict[tuple[int, ...], Verdict] = {tuple(rows): Verdict.SAME}
        self._passed_sizes: set[int] = set()
        self._full_size = False
        self._anchor: Group = []
        self._good: Group = []

    def run(self) -> Iterator[None]:
        """Search, and pause whenever the batch without `groups` may pass; going on means that it fails as before."""
        for self._full_size in (False, True):
            if self._find_anchor():
                yield from self._sweep()
            anomalous = not self._anchor or Verdict.OTHER in self._verdicts.values()
            if self.groups or self.by_size or not anomalous:
                return
        self.everyone = not self._anchor and Verdict.OTHER not in self._verdicts.values()

    def _find_anchor(self) -> bool:
        """Find two rows that pass together, else one that passes beside itself; at full size, a part that passes."""
        self._anchor = []
        if self._full_size:
            counts = (2, 4, 8) if Verdict.OTHER in self._verdicts.values() else (2,)
            found = (part for count in counts for part in _parts(self._rows, count)) if len(self._rows) > 2 else ()
            groups = list(found)
        else:
            rows = (spread(self._unhinted, SCREENED) + spread(self._hint, SCREENED))[:SCREENED]
            pairs = zip(rows[::2], rows[1::2], strict=False) if len(self._rows) > 2 else ()
            groups = [*map(list, pairs), *([row] for row in rows)]
        verdicts = []
        for group in groups:
            verdicts.append(self._ask(group if self._full_size or len(group) > 1 else group * 2))
            if verdicts[-1] is Verdict.PASSES:
                self._anchor = self._good = group
                return True
            if verdicts == [Verdict.OTHER] * 2 and not self._full_size:
                break  # so few rows are not what the model is made for
        return False

    def _sweep(self) -> Iterator[None]:
        """Find the minimal failing sets among all rows but the anchor."""
        hinted = [row for row in self._hint if row not in self._anchor]
        while hinted and self._is_guilty(hinted[0]) and (self.groups or not self._needs_anchor(hinted[:1])):
            self.groups.append((hinted.pop(0),))
        if self.groups and not self._full_size:
            yield
        pool = hinted + [row for row in self._unhinted if row not in self._anchor]
        cut = len(hinted) if len(hinted) < len(pool) else 0
        # A model that needs its full size may need all guilty rows to be away at once.
        for _ in range(0 if self._full_size else TRIED):
            if not pool:
                return
            found = self._first(pool, cut or len(pool) // 2)
            if found is None:
                return
            conflict, pool = found
            self.groups.append(conflict)
            yield
            cut = 0
        count = 0 if self._full_size else len(self.groups)
        self._sweep_groups(pool[::-1])
        if len(self.groups) > count:
            yield

    def _sweep_groups(self, pool: Group) -> None:
        """Test a pool, the last row first, in groups that are as likely to pass as to fail."""
        total = len(self._rows)
        while pool:
            size = min(len(pool), max(1, round(LIKELY * (total - len(pool) + 2) / (len(self.groups) + 1))))
            group = pool[: -size - 1 : -1]
            del pool[-size:]
            if self._fails(group) and (found := self._first(group, len(group) // 2)) is not None:
                self.groups.append(found[0])
                pool += reversed(found[1])

    def _first(self, failing: Group, cut: int) -> tuple[tuple[int, ...], Group] | None:
        """Find one minimal failing set of rows that fail, and the rows of which nothing is known then."""
        group, unknown = failing, list[int]()
        while len(group) > 1:
            left, group = group[:cut], group[cut:]
            if self._fails(left):
                unknown = group + unknown
                group = failing = left
            cut = len(group) // 2  # where the left part passes, the right one should fail: no test is spent on it
        if self._is_guilty(group[0]) and not self._needs_anchor(group):
            return (group[0],), unknown
        conflict = self._together(failing) or self._in_its_place(group[0])
        return None if conflict is None else (conflict, [row for row in failing if row not in conflict] + unknown)

    def _is_guilty(self, row: int) -> bool:
        """Return whether a row makes the anchor fail while as many good rows pass."""
        if not self._fails([row]):
            return False
        if self._full_size or len(self._anchor) + 1 in self._passed_sizes:
            return True
        others = dict.fromkeys([next(self._others([row]), self._anchor[0]), self._anchor[0]])
        return any(self._ask([*self._anchor, other]) is Verdict.PASSES for other in others)

    def _together(self, failing: Group) -> tuple[int, ...] | None:
        """Find a minimal set of rows that fails only as a whole; None if the fault cannot be laid to one."""
        if not self._fails(failing):  # it takes rows that pass by themselves
            failing = [row for row in self._remaining() if row not in self._anchor]
            if not self._fails(failing):
                return None
        self._members = 0
        conflict = self._conflict([], False, failing)
        if self._needs_anchor(conflict):
            guilty = [row for row in self._anchor if self._ask([*conflict, row]) is Verdict.SAME]
            conflict = conflict + (guilty or self._anchor)
        if len(conflict) > min(TOGETHER, max(2, len(self._rows) // 2)):
            return None
        self.by_size = not self._full_size and self._fails_as_filled([], conflict)
        if self.by_size or any(self._fails_as_filled([r for r in conflict if r != row], conflict) for row in conflict):
            return None
        return tuple(sorted(conflict))

    def _fails_as_filled(self, part: Group, conflict: Group) -> bool:
        """Return whether a part of a conflict fails, too, whatever rows stand in for the others."""
        company = [row for row in self._anchor if row not in conflict]
        others = list(self._others(conflict)) or self._anchor
        fills = (others, others[::-1], self._anchor)  # some may be guilty themselves, or fail as copies
        count = len(conflict) - len(part)
        return all(self._ask(part + company + _repeated(fill, count)) is Verdict.SAME for fill in fills)

    def _in_its_place(self, row: int) -> tuple[int, ...] | None:
        """Blame a row that fails only where it stands: the rest passes, also with a good row in its place."""
        rows = self._remaining()
        good = next(other for other in self._good if other != row)
        swapped = [good if other == row else other for other in rows]
        if any(self._ask(test, False) is not Verdict.PASSES for test in ([o for o in rows if o != row], swapped)):
            return None
        self.by_size = False
        return (row,)

    def _remaining(self) -> Group:
        found = {row for group in self.groups for row in group}
        return [row for row in self._rows if row not in found]

    def _others(self, group: Group) -> Iterator[int]:
        """Return rows that are neither in a group nor in the anchor, those that are known to pass first."""
        found = {row for group in self.groups for row in group}.union(group, self._anchor)
        return (row for row in dict.fromkeys([*self._good, *self._unhinted, *self._hint]) if row not in found)

    def _needs_anchor(self, group: Group) -> bool:
        """Return whether rows fail with the anchor only."""
        others = list(islice(self._others(group), 2)) or group
        return not self._full_size and self._ask([*group, *others]) is Verdict.PASSES

    def _conflict(self, background: Group, grown: bool, group: Group) -> Group:
        """Find a minimal subset that fails together with a background, by halving (Junker's QuickXplain)."""
        if self._members > TOGETHER:
            return group
        if grown and self._fails(background):
            return []
        if len(group) == 1:
            self._members += 1
            return group
        left, right = _parts(group, 2)
        of_right = self._conflict(background + left, True, right)
        of_left = self._conflict(background + of_right, bool(of_right), left)
        return of_left + of_right

    def _fails(self, group: Group) -> bool:
        return bool(group) and self._ask(group + self._anchor) is Verdict.SAME

    def _ask(self, rows: Group, grouped: bool = True) -> Verdict:
        if self._full_size and grouped:
            rows = _repeated(rows, max(len(self._rows), len(rows)))
        if grouped:
            rows = sorted(rows)  # in the order of the batch: it may mean something
        verdict = self._verdicts.get(tuple(rows))
        if verdict is None:
            self.tests += 1
            verdict = self._verdicts[tuple(rows)] = self._test(rows)
        if verdict is Verdict.PASSES:
            self._passed_sizes.add(len(rows))
            self._good = list(dict.fromkeys([*self._good, *rows]))
        return verdict


def _repeated(rows: Group, size: int) -> Group:
    return list(islice(cycle(rows), size))


def _parts(group: Group, count: int) -> list[Group]:
    """Cut a group into parts of nearly equal length."""
    ends = [-(-len(group) * number // count) for number in range(count + 1)]
    return [group[start:end] for start, end in pairwise(ends) if start < end]


def spread(rows: Sequence[int], count: int) -> Group:
    """Choose some rows from all over, without repeats."""
    return list(rows) if len(rows) <= count else [rows[number * len(rows) // count] for number in range(count)]


# --- Hints: what modules took and gave ------------------------------------------------------------------------------


@dataclass(slots=True)
class Sighting:
    """Rows that were not finite, and the module and line that this is laid to; None for the batch or the loss."""

    rows: frozenset[int]
    module: torch.nn.Module | None
    where: str | None
    norms: dict[int, float] = field(default_factory=dict)


@dataclass(eq=False)
class Observer:
    """Hooks around one replay."""

    _size: int
    _batch_dim: int
    _patches: Patches
    _values: bool
    _gradients: bool
    _thread: int = field(default_factory=threading.get_ident)
    _finite: tuple[torch.nn.Module | None, Line | None] = (None, None)
    _hooked: set[tuple[Node | torch.Tensor, int]] = field(default_factory=set)
    _done: bool = False
    modules: dict[torch.nn.Module, None] = field(default_factory=dict)
    sightings: list[Sighting] = field(default_factory=list)

    @contextmanager
    def watching(self, batch: Any) -> Iterator[None]:
        """Look at the batch, and at what modules take and give as long as the block lasts."""
        try:
            with watched_modules(self._patches, self._enter_module, self._leave_module):
                if self._values:
                    self._look(tensors_in(batch), None)
                yield
        finally:
            self._hooked.clear()

    @property
    def hint(self) -> frozenset[int]:
        """The rows that were not finite before they were mixed into all others, as far as rows are samples."""
        return self.sightings[-1].rows if self.sightings else frozenset()

    def _look(self, tensors: list[torch.Tensor], module: torch.nn.Module | None) -> None:
        """Look at what a module takes or gives, and note which rows are not finite while these are some of them."""
        rows = non_finite_rows(tensors, self._size, self._batch_dim)
        if rows and len(rows) < self._size:
            if rows != self.hint:
                self.sightings.append(Sighting(rows, module, _written(running_line()) if module else None))
        elif rows and self.sightings:
            self._done = True  # all rows at once after some: something mixed them

    def _enter_module(self, module: torch.nn.Module, args: Any) -> None:
        if threading.get_ident() == self._thread:
            self.modules[module] = None
            if self._values and not self._done:
                self._look(tensors_in(args), module)

    def _leave_module(self, module: torch.nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        if threading.get_ident() != self._thread or self._done:
            return
        if self._values:
            self._look(tensors_in(output), module)
        if self._gradients:
            self._watch(module, [tensor for tensor in tensors_in(output) if tensor.requires_grad])

    def _watch(self, module: torch.nn.Module, outputs: list[torch.Tensor]) -> None:
        """Look at the gradients of what a module gave as soon as they come."""
        for tensor in outputs:
            source = (tensor if tensor.grad_fn is None else tensor.grad_fn), tensor.output_nr
            # A container gives what its last child gave, and the innermost module that gave it is the one to ask.
            if source in self._hooked:
                continue
            self._hooked.add(source)
            # A hook must not hold the tensor that will hold it, nor the observer, which holds some of them.
            look = partial(Observer._look_back, weakref.proxy(self), module=module, line=running_line())
            if tensor.grad_fn is None:
                call_with_gradient(self._patches, tensor, look)
            else:
                tensor.register_hook(look)  # type: ignore[no-untyped-call]

    def _look_back(self, grad: torch.Tensor, module: torch.nn.Module, line: Line | None) -> None:
        if self._done:
            return
        rows = non_finite_rows([grad], self._size, self._batch_dim)
        if not rows:
            self._finite = module, line
            return
        self._done = True
        if len(rows) < self._size:
            # What came back to the module before was finite: it was born in that one's backward (or in the loss).
            born_in, line = self._finite
            self.sightings.append(Sighting(rows, born_in, _written(line), self._norms(grad, rows)))

    def _norms(self, grad: torch.Tensor, rows: frozenset[int]) -> dict[int, float]:
        dim = batch_dim_of(grad, self._size, self._batch_dim)
        assert dim is not None
        chosen, others = sorted(rows), [axis for axis in range(grad.dim()) if axis != dim]
        values = grad.index_select(dim, index_of(chosen).to(grad.device))
        norms = torch.linalg.vector_norm(values, dim=others) if others else values.abs()
        return dict(zip(chosen, norms.tolist(), strict=True))


def _written(line: Line | None) -> str | None:
    return None if line is None else written(line)


# --- Probes: the user's function on some rows -----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Blame:
    """Rows that are dropped, alone or together, and why."""

    rows: tuple[int, ...]
    fault: StepFault
    message: str
    stage: Stage
    module: torch.nn.Module | None
    where: str | None
    norm: float | None = None
    method: str = "every sample"
    tests: int = 0


class Probes:
    """Runs the user's function on some rows of a batch, to find out which of them are to blame for a fault."""

    def __init__(self, recovery: Recovery, rows: Group, fault: StepFault, *, eager: bool) -> None:
        self.repeated = False
        self.modules: list[torch.nn.Module] = []
        self._trial, self._state = recovery.probe, recovery.state
        self._batch, self._reader = recovery.batch_of(rows), recovery.reader
        self._rows, self._size = rows, len(rows)
        self._fault = fault
        self._eager = eager
        self._take = self._reader.taking(self._batch, self._size)
        self._ask = partial(Probes._test, weakref.proxy(self))  # a search must not hold the probes that hold it
        self.search = Search([], self._ask)
        self._runs_backward = fault.stage == "backward"
        self._recording = self._runs_backward
        self._passed = False
        self._ambient = torch.is_grad_enabled()
        self._messages: dict[int, str] = {}

    def localise(self) -> Iterator[list[Blame]]:
        """Find the rows to blame; pause whenever the batch without them may pass, go on if it fails as before."""
        # `search` says why where nobody is blamed in the end.
        observer, hint = self._replay()
        if not self.repeated:
            return
        hint = hint or self._suspects()
        self.search = Search(list(range(self._size)), self._ask, hint)
        for _ in self.search.run():
            yield [self._blame(rows, hint, observer.sightings) for rows in self.search.groups]

    def _replay(self) -> tuple[Observer, frozenset[int]]:
        """Run the batch again to see which rows to suspect; without recording if the fault shows so too."""
        fault = self._fault
        values, gradients = fault.error is None and not self._runs_backward, fault.cause == "non-finite gradient"
        for recording in (True,) if self._runs_backward else (False, True):  # some losses call backward themselves
            self._recording = recording
            observer = Observer(self._size, self._reader.batch_dim, self._state.patches, values, gradients)
            batch = with_own_containers(self._batch)
            with observer.watching(batch):
                outcome = self._run(batch, self._size)
            self.modules = list(observer.modules)
            if outcome.fault is not None and outcome.fault.same_as(fault):
                break
        again = outcome.fault
        if again is not None and (again.same_as(fault) or (self._eager and again.error and fault.error)):
            self._fault = again  # compiled code words its errors differently
            self.repeated = True
        return observer, outcome.bad_rows or observer.hint

    def _suspects(self) -> frozenset[int]:
        """Search in the module that raised alone, as if its arguments had a row for each sample: a hint for little."""
        call = self._fault.call
        if call is None or self._runs_backward or next(call.module.children(), None) is not None:
            return frozenset()
        everything = list(range(self._size))

        def test(rows: Group) -> Verdict:
            index, layout = index_of(rows), self._reader.layout
            try:
                args, kwargs = (select_rows(given, index, self._size, layout) for given in (call.args, call.kwargs))
                call.module(*args, **kwargs)
            except Exception as error:
                if must_pass(error):
                    raise
                return Verdict.SAME if self._fault.same_as(StepFault.raised(error)) else Verdict.OTHER
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
                return Outcome(StepFault.raised(error))

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
        if hint.issuperset(rows) and (fault.error is None or fault.call is not None):
            kind = "gradients" if self._runs_backward else "values"
            method = f"{kind} that are not finite" if fault.error is None else "search in the module that raised"
        stage, module, norm = fault.stage, fault.module, None
        first = next((sighting for sighting in sightings if sighting.rows.issuperset(rows)), None)
        if first is not None:  # where a row was first seen not to be finite
            stage = "forward" if fault.stage == "loss" else fault.stage
            module, where, norm = first.module, first.where or where, first.norms.get(rows[0])
            if module is None and not self._runs_backward:
                method += ", in the batch itself"
        group = tuple(self._rows[place] for place in rows)
        return Blame(group, fault, message, stage, module, where, norm, method, self.search.tests)


Refuse = Callable[[Sequence[Blame], StepFault], None]


class Recovery:
    """The way back from one fault, and how it ended."""

    def __init__(self, guard: Guard, trial: Trial, batch: Any, size: int, refuse: Refuse | None) -> None:
        self.trial = self.probe = trial
        self.state = guard._state
        self.outsiders = guard._outsiders
        self.reader = guard._reader
        self.min_kept = guard.min_kept
        self.batch = batch
        self.size = size
        self.refuse = refuse  # None where all ranks decide together
        self.compiled = anything_compiled() or any(map(is_compiled, self.state.modules))
        if isinstance(trial, LossTrial) and trial.scaler is not None:
            self.probe = LossTrial(trial.function, self.state, trial.check, trial.catch, accumulate=trial.accumulate)
        self.outcome = Outcome()
        self.kept = list(range(size))
        self.dropped: list[Blame] = []
        self.transient: list[StepFault] = []
        self.reasons: list[str] = []
        self.whole: StepFault | None = None  # that every sample has, on this rank
        self.evidence = ""

    def run(self, fault: StepFault) -> None:
        """Find who is to blame for a fault, and make the step without them."""
        marks = self.state.parameter_marks()
        self.outsiders.look(self.trial.function)
        if (outcome := self._left_to_scaler(fault, self.kept)) is not None:
            self.outcome = outcome
        else:
            self._run(fault)
        for trial in {self.trial, self.probe}:
            trial.let_go(but=[*self.transient, self.whole])
        if written := self.state.written_parameters(marks):
            self.reasons.append(f"parameters are written inside the step: {listed(written, 3)}")
        if strangers := self.outsiders.written():
            self.reasons.append(strangers)
        if appeared := self.state.new_buffers():
            self.reasons.append(f"buffers appeared inside the step: {listed(appeared, 3)}")

    def _run(self, fault: StepFault) -> None:
        retried = False
        while True:
            probes = Probes(self, self.kept, fault, eager=self.compiled and not retried)
            outcome, kept, new = None, self.kept, list[Blame]()
            for new in probes.localise():
                blamed = {row for blame in new for row in blame.rows}
                kept = [row for row in self.kept if row not in blamed]
                if len(kept) < self.min_kept:
                    self._drop(new, [], fault)
                    self.state.restore()
                    few = f"only {len(kept)} of {self.size} samples are left, fewer than min_kept={self.min_kept}"
                    self.reasons.append(f"{few}: no step was made")
                    return
                outcome = self._try(kept)
                if outcome.fault is None or not outcome.fault.same_as(fault):
                    break
            search = probes.search
            self.outsiders.note(probes.modules)
            if not probes.repeated:
                if retried:
                    self._raise(fault, "it comes and goes: it did not show again when it was searched for")
                retried = True
                outcome = self._try(kept)
                if outcome.fault is None:
                    self.transient.append(fault)
            elif outcome is None and search.everyone and self.refuse is None:
                self._drop_all(fault, search)
                return
            elif outcome is None or search.by_size:
                self._raise(fault, _explained(search, len(self.kept)))
            self._drop(new, kept, fault)
            if outcome.fault is None:
                self.outcome = outcome
                if self.trial.runs_backward and outcome.skipped:
                    self.kept = []
                return
            fault = outcome.fault

    def batch_of(self, rows: list[int]) -> Any:
        if len(rows) == self.size:
            return with_own_containers(self.batch)
        return self.reader.select(self.batch, rows, self.size)

    def _try(self, rows: list[int]) -> Outcome:
        self.state.restore()
        outcome = self.trial.run(self.batch_of(rows), len(rows))
        if outcome.fault is not None and (left := self._left_to_scaler(outcome.fault, rows)) is not None:
            return left
        return outcome

    def _left_to_scaler(self, fault: StepFault, rows: list[int]) -> Outcome | None:
        """Return the step with its overflow, for the scaler to see, if the overflow is gone without scaling."""
        if self.trial is self.probe or fault.cause != "non-finite gradient":
            return None
        self.state.restore()
        if self.probe.run(self.batch_of(rows), len(rows)).fault is not None:
            return None
        self.state.restore()
        outcome = self.trial.run(self.batch_of(rows), len(rows))
        outcome.fault = None
        return outcome

    def _drop(self, new: list[Blame], kept: list[int], fault: StepFault) -> None:
        self.dropped += new
        self.kept = kept
        if self.refuse is not None:
            self.refuse(self.dropped, fault)

    def _drop_all(self, fault: StepFault, search: Search) -> None:
        """Make no step here: every sample has the fault. Whether it is the code's is for all ranks to say."""
        self.state.restore()
        self.whole, self.evidence = fault, _explained(search, len(self.kept))
        why = fault, fault.message, fault.stage, fault.module, fault.where
        self.dropped += [Blame((row,), *why, tests=search.tests) for row in self.kept]
        self.kept = []

    def _raise(self, fault: StepFault, evidence: str) -> NoReturn:
        if self.dropped:
            rows = listed([row for blame in self.dropped for row in blame.rows])
            evidence = f"without the bad samples (rows {rows}) the batch cannot run either: {evidence}"
        if fault.error is None and (spoilt := self.state.spoilt_parameters()):
            evidence = f"{evidence}; parameters are not finite themselves: {listed(spoilt, 3)}"
        why, fix = advice(fault, self.batch, self.trial.function, self.state.parameters)
        raise_as_it_is(fault, self.size, evidence, why, fix)


def raise_as_it_is(fault: StepFault, size: int, evidence: str, why: str = "", fix: str = "") -> NoReturn:
    """Raise a fault that no sample is blamed for: the user's exception with the evidence behind it, or our own."""
    if fault.error is None:
        raise TooManyBadSamples(f"Guard: {fault.message} in a batch of {size} samples; {evidence}.", why=why, fix=fix)
    explained = GradgateError(f"Guard: {evidence}.", why=why or "a fault of the code must be seen.", fix=fix)
    explained.__cause__ = fault.error.__cause__
    with suppress(Exception):  # a class may let nobody set an attribute; the evidence stands behind it all the same
        fault.error.add_note(f"gradgate: {evidence}; no sample was dropped, and everything is as before the step.")
    raise fault.error from explained


def _explained(found: Search, size: int) -> str:
    if found.everyone:
        return f"every sample that was tried fails in the same way ({found.tests} tests in a batch of {size})"
    if found.by_size:
        return f"no sample can be blamed for it: as many samples that pass otherwise fail, too (a batch of {size})"
    return f"no sample can be blamed for it ({found.tests} tests in a batch of {size})"
