"""Which rows make a test fail: group testing over row numbers, with no knowledge of models.

A test says of a list of rows whether it passes, fails in the *same* way as the whole batch did, or in some *other* way.
A sample that fails only alone is not bad, so every group is tested together with an *anchor*: two rows that pass. Where
small groups fail in another way, the search is repeated at full size: each group is repeated until it is as long as the
batch. If nothing passes then either, every row fails, and the fault is not in the data.

Hints only say which rows to test first. A row is guilty if it makes the anchor fail while as many good rows pass: a
fault of the *size* of the batch is nobody's. Rows fail *together* if every smaller set of them passes.

One guilty row of n takes about log2(n) + 5 tests: after each of the first finds the caller tries the rest. For many,
groups are of the size that passes half of the time, judged by what was found so far (nested group testing after Sobel
and Groll): k guilty rows of n take at most 2 k (log2(n / k) + 2) tests and a few to begin with.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import Enum
from itertools import cycle, islice

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
    """A search for the minimal sets of rows that fail, knowing that all rows together do.

    Args:
        rows: The rows in question.
        test: Tests a list of rows, in which a row may stand more than once.
        hint: Rows to test first.

    Attributes:
        groups: Minimal sets of rows that fail: single rows, or rows that fail only together.
        everyone: Whether every row that was tested fails, so that nobody can be blamed.
        by_size: Whether as many rows of those that pass fail, too, so that nobody can be blamed.
        tests: How many tests were made.
    """

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
        """Tell whether a row makes the anchor fail while as many good rows pass."""
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
        """Tell whether a part of a conflict fails, too, whatever rows stand in for the others."""
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
        """Give rows that are neither in a group nor in the anchor, those that are known to pass first."""
        found = {row for group in self.groups for row in group}.union(group, self._anchor)
        return (row for row in dict.fromkeys([*self._good, *self._unhinted, *self._hint]) if row not in found)

    def _needs_anchor(self, group: Group) -> bool:
        """Tell whether rows fail with the anchor only."""
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
        """Tell whether rows fail in the same way beside the anchor, which they are no part of."""
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


def _parts(group: Group, count: int) -> Iterator[Group]:
    """Cut a group into parts of nearly equal length."""
    size, longer = divmod(len(group), count)
    start = 0
    for number in range(count):
        stop = start + size + (number < longer)
        if stop > start:
            yield group[start:stop]
        start = stop


def spread(rows: Sequence[int], count: int) -> Group:
    """Choose some rows from all over, without repeats."""
    return list(rows) if len(rows) <= count else [rows[number * len(rows) // count] for number in range(count)]
