"""Which rows make a test fail: group testing over row numbers, with no knowledge of models.

A test says of a list of rows whether it passes, fails in the *same* way as the whole batch did, or in some *other*
way. A sample that fails only when it is alone is not bad, so every group is tested in company: together with an
*anchor*, two rows that have been seen to pass. A batch in which none are found is tested again at full size
(each group repeated until it is as long as the batch), for models that depend on the size of the batch. If nothing
passes then either, everybody fails, and the fault is not in the data.

Groups are of the size that passes half of the time, judged by what was found so far (nested group testing after Sobel
and Groll): for many bad rows this comes within an eighth of the least number of tests that any search needs. Finding k
bad rows of n takes at most 2 k (log2(n / k) + 2) tests and a few to begin with.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from itertools import cycle, islice

__all__ = ["Group", "Search", "Test", "Verdict", "isolate", "spread"]

Group = list[int]
SCREENED = 8
LIKELY = 0.7  # of this many bad rows in a group on average, none is there half of the time


class Verdict(Enum):
    """How a test of some rows ended."""

    PASSES = "passes"
    SAME = "fails as the whole batch does"
    OTHER = "fails in another way"


Test = Callable[[Group], Verdict]


@dataclass
class Search:
    """What a search found.

    Attributes:
        groups: Minimal sets of rows that fail: single rows, or rows that fail only together.
        everyone: Whether every row that was tested fails, so that nobody can be blamed.
        tests: How many tests it took.
    """

    groups: list[tuple[int, ...]] = field(default_factory=list)
    everyone: bool = False
    tests: int = 0


def isolate(rows: Group, test: Test, *, screened: int = SCREENED) -> Search:
    """Find the minimal sets of rows that fail, knowing that all rows together do.

    Args:
        rows: The rows in question.
        test: Says how a list of rows fares; a list may hold a row more than once.
        screened: How many single rows must fail before everybody is said to.

    Returns:
        What was found; nothing at all if the test cannot tell.
    """
    return _Isolation(rows, test).run(screened)


class _Isolation:
    """One search: the test, the anchor, and the count."""

    def __init__(self, rows: Group, test: Test) -> None:
        self._rows = rows
        self._test = test
        self._anchor: Group = []
        self._good: Group = []
        self._full_size = False
        self._search = Search()

    def run(self, screened: int) -> Search:
        verdicts = self._find_anchor(screened)
        if self._anchor:
            suspects = [row for row in self._rows if row not in self._anchor]
            if suspects:  # with the anchor they are all rows, which fail
                self._search.groups = self._with_anchor(self._sweep(suspects))
        else:
            self._search.everyone = Verdict.OTHER not in verdicts and bool(verdicts)
        return self._search

    def _find_anchor(self, screened: int) -> list[Verdict]:
        """Look for two rows that pass together, else for one that passes beside itself, else at full size."""
        verdicts = []
        rows = spread(self._rows, screened)
        pairs = [list(pair) for pair in zip(rows[::2], rows[1::2], strict=False)] if len(self._rows) > 2 else []
        for group in [*pairs, *([row] for row in rows)]:
            verdicts.append(self._ask(group if len(group) > 1 else group * 2))
            if verdicts[-1] is Verdict.PASSES:
                self._anchor = self._good = group
                return verdicts
        if len(self._rows) > 2:
            counts = (2, 4, 8) if Verdict.OTHER in verdicts else (2,)
            for group in (part for count in counts for part in _parts(self._rows, count)):
                verdicts.append(self._ask(self._filled(group)))
                if verdicts[-1] is Verdict.PASSES:
                    self._anchor, self._full_size = group, True
                    return verdicts
        return verdicts

    def _sweep(self, suspects: Group) -> list[tuple[int, ...]]:
        """Find the minimal failing sets among rows that fail together, group by group.

        A group is of the size that is as likely to pass as to fail, by what was found so far: then a test tells most.
        """
        found: list[tuple[int, ...]] = []
        pool = suspects[::-1]  # the next row is the last: cheap to take and to put back
        while pool:
            seen = len(suspects) - len(pool)
            size = round(LIKELY * (seen + 2) / (len(found) + 1)) if seen else -(-len(pool) // 3)
            if len(pool) <= 1.5 * size:
                size = len(pool)
            group = pool[: -size - 1 : -1]
            del pool[-size:]
            if not found and not pool:  # all others are innocent, so these should be guilty
                failing = suspects
            elif self._fails(group):
                failing = group
            else:
                continue
            conflict, unknown = self._first(group, failing)
            found.append(conflict)
            pool += reversed(unknown)
        return found

    def _first(self, group: Group, failing: Group) -> tuple[tuple[int, ...], Group]:
        """Find one minimal failing set of a group, and the rows that nothing is known of then.

        Args:
            group: Where it is likely to be.
            failing: The rows that are known to fail together; the group is the end of them.
        """
        unknown: Group = []
        while len(group) > 1:
            left, group = group[: len(group) // 2], group[len(group) // 2 :]
            if self._fails(left):
                unknown = group + unknown
                group = failing = left
            # Else the other half should be guilty; a test is saved by taking it for granted.
        if group == failing or self._fails(group):
            return tuple(group), unknown
        conflict = self._conflict([], False, failing)  # only together, although no part of them fails
        return tuple(sorted(conflict)), [row for row in failing if row not in conflict] + unknown

    def _with_anchor(self, groups: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
        """Blame of the anchor what rows fail only together with; more than two such cases are not expected."""
        if self._full_size or len(groups) > 2:
            return groups
        for place, group in enumerate(groups):
            others = [row for row in self._good if row not in self._anchor] or list(group)
            if self._ask([*group, *others]) is Verdict.PASSES:
                guilty = [row for row in self._anchor if self._ask([*group, row]) is Verdict.SAME]
                groups[place] = tuple(sorted([*group, *(guilty or self._anchor)]))
        return groups

    def _conflict(self, background: Group, grown: bool, group: Group) -> Group:
        """Find a minimal subset that fails together with a background, by halving (Junker's QuickXplain)."""
        if grown and self._fails(background):
            return []
        if len(group) == 1:
            return group
        left, right = _parts(group, 2)
        of_right = self._conflict(background + left, True, right)
        of_left = self._conflict(background + of_right, bool(of_right), left)
        return of_left + of_right

    def _fails(self, group: Group) -> bool:
        if not group:
            return False
        company = group + self._anchor  # which is never a part of the group
        verdict = self._ask(self._filled(company) if self._full_size else company)
        if verdict is Verdict.PASSES:
            self._good = group[:2]
        return verdict is Verdict.SAME

    def _filled(self, group: Group) -> Group:
        return list(islice(cycle(group), max(len(self._rows), len(group))))

    def _ask(self, rows: Group) -> Verdict:
        self._search.tests += 1
        return self._test(sorted(rows))  # in the order of the batch: it may mean something


def _parts(group: Group, count: int) -> Iterator[Group]:
    """Cut a group into parts of nearly equal length."""
    size, longer = divmod(len(group), count)
    start = 0
    for number in range(count):
        stop = start + size + (number < longer)
        if stop > start:
            yield group[start:stop]
        start = stop


def spread(rows: Group, count: int) -> Group:
    """Choose some rows from all over, without repeats."""
    return rows if len(rows) <= count else [rows[number * len(rows) // count] for number in range(count)]
