"""The stop-watch: candidates interleaved round by round, and the median of the per-round ratios to the base.

Machines are noisy, so nothing here is compared in seconds over time. In each round every candidate has its turn: one
call that is not timed, so that none pays for what the one before it left in the caches, and as many as it takes to be
long against the clock. A round gives one ratio for each candidate; the median of those ratios is the result and their
interquartile range is the noise. A row states its goal and is met, missed, or for information (no goal).
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch

Candidate = Callable[[], Any]

BEHIND = 1.25
"""A ratio that misses its goal by more than this factor is listed at the top of the page."""


@dataclass(frozen=True)
class Growth:
    """A place in a chart of how cost grows: rows with the same title are the points of its lines.

    Args:
        title: What the chart shows.
        along: What grows, such as "elements".
        size: How many of them this row has.
    """

    title: str
    along: str
    size: int


@dataclass(frozen=True)
class Row:
    """One benchmark: who runs, against whom, and what was promised.

    Args:
        package: The package of the library.
        title: What is done, with its size.
        candidates: Makes the things to run, by name; called once.
        ours: The name of our candidate.
        base: The name of the candidate that ratios are taken to.
        at_most: The goal for ours / base.
        at_least: The goal for base / ours (how many times faster).
        microseconds: Tell our time per call in us against this goal instead of a ratio.
        peers: The candidates that do the same job; the others are the plain operation, a limit, or ours in another way.
        growth: Where this row stands in a chart.
        counts: Candidates give a number (bytes, elements), which is compared instead of their time.
        quick: Whether a quick run may have it.
        rounds: How many rounds, at least.
        seconds: How long to go on, at most, once there are enough rounds.
    """

    package: str
    title: str
    candidates: Callable[[], dict[str, Candidate]]
    ours: str
    base: str
    at_most: float | None = None
    at_least: float | None = None
    microseconds: float | None = None
    peers: tuple[str, ...] = ()
    growth: Growth | None = None
    counts: bool = False
    quick: bool = True
    rounds: int = 15
    seconds: float = 1.5

    @property
    def name(self) -> str:
        """Give the package and the title, which no other row has."""
        return f"{self.package}: {self.title}"

    @property
    def in_a_quick_run(self) -> bool:
        """Tell whether a quick run has it: rows with a goal and points of charts, unless they take long."""
        has_goal = (self.at_most, self.at_least, self.microseconds) != (None, None, None)
        return self.quick and (has_goal or self.growth is not None)


@dataclass
class Result:
    """What a row gave.

    Attributes:
        row: The benchmark.
        ratio: For each candidate the median over rounds of its ratio to the base.
        spread: The interquartile range of those ratios.
        time: The median time per call in seconds; for rows that count, the number.
        noise: The interquartile range of our own times, as a part of their median.
        took: How long the row took in all, in seconds.
        error: Why it did not run, else empty.
    """

    row: Row
    ratio: dict[str, float] = field(default_factory=dict)
    spread: dict[str, float] = field(default_factory=dict)
    time: dict[str, float] = field(default_factory=dict)
    noise: float = 0.0
    took: float = 0.0
    error: str = ""

    @property
    def figure(self) -> float:
        """Give the number that the goal speaks of."""
        if self.row.microseconds is not None:
            return self.time[self.row.ours] * 1e6
        if self.row.at_least is not None:
            return 1 / self.ratio[self.row.ours]
        return self.ratio[self.row.ours]

    @property
    def goal(self) -> str:
        """Give the goal as text."""
        row = self.row
        if row.microseconds is not None:
            return f"<= {duration(row.microseconds * 1e-6)}"
        if row.at_least is not None:
            return f">= {row.at_least:g} x faster"
        return f"<= {row.at_most:g}" if row.at_most is not None else "info only"

    @property
    def met(self) -> bool | None:
        """Tell whether the goal is met; None where there is none, or where the row did not run."""
        row = self.row
        if self.error:
            return None
        if row.microseconds is not None:
            return self.figure <= row.microseconds
        if row.at_least is not None:
            return self.figure >= row.at_least
        return self.figure <= row.at_most if row.at_most is not None else None

    @property
    def behind(self) -> float:
        """Give the factor by which a ratio misses its goal: 1 where it is met; times of one machine are no ratios."""
        row = self.row
        if self.met is not False or row.microseconds is not None:
            return 1.0
        return row.at_least / self.figure if row.at_least is not None else self.figure / row.at_most

    @property
    def faster_peers(self) -> dict[str, float]:
        """Give the peers that are faster than ours, and how many times."""
        if self.error:
            return {}
        ours = self.ratio[self.row.ours]
        return {name: ours / self.ratio[name] for name in self.row.peers if self.ratio[name] < ours}


def duration(seconds: float) -> str:
    """Give a time in the unit that suits it.

    Args:
        seconds: The time.

    Returns:
        Three digits and a unit.
    """
    for unit, length in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= length:
            return f"{seconds / length:.3g} {unit}"
    return f"{seconds / 1e-9:.3g} ns"


def quickly(row: Row) -> Row:
    """Give the row with few rounds.

    Args:
        row: The benchmark.

    Returns:
        The same for a first look.
    """
    return replace(row, rounds=3, seconds=0.1)


def _once(candidate: Candidate, repeat: int) -> float:
    start = time.perf_counter()
    for _ in range(repeat):
        candidate()
    return (time.perf_counter() - start) / repeat


def _repeats(candidate: Candidate) -> int:
    """How often to call in one turn, so that it is long against the clock and short against the noise; 0 if slow."""
    if _once(candidate, 1) > 5e-2:
        return 0
    repeat = 1
    while repeat < 100_000:
        took = _once(candidate, repeat) * repeat
        if took > 2e-3:
            break
        repeat = max(repeat * 2, int(repeat * 2.2e-3 / max(took, 1e-7)))
    return repeat


def _turn(candidate: Candidate, repeat: int) -> float:
    if repeat == 0:  # a slow one: what it warms up is nothing against the rest
        return _once(candidate, 1)
    candidate()
    return _once(candidate, repeat)


def race(row: Row) -> Result:
    """Run a row.

    Args:
        row: The benchmark.

    Returns:
        The ratios, their spread and the times.
    """
    before, start = torch.get_num_threads(), time.perf_counter()
    torch.set_num_threads(1)
    try:
        torch.manual_seed(0)
        candidates = row.candidates()
        rounds = _count(candidates) if row.counts else _rounds(row, candidates)
    finally:
        torch.set_num_threads(before)
    result = Result(row)
    for name in candidates:
        low, middle, high = statistics.quantiles([times[name] / times[row.base] for times in rounds], n=4)
        result.ratio[name], result.spread[name] = middle, high - low
        result.time[name] = statistics.median(times[name] for times in rounds)
    low, middle, high = statistics.quantiles([times[row.ours] for times in rounds], n=4)
    result.noise = (high - low) / middle
    result.took = time.perf_counter() - start
    return result


def _count(candidates: dict[str, Candidate]) -> list[dict[str, float]]:
    """Ask for the numbers once: they have no noise."""
    return [{name: float(candidate()) for name, candidate in candidates.items()}] * 2


def _rounds(row: Row, candidates: dict[str, Candidate]) -> list[dict[str, float]]:
    repeats = {name: _repeats(candidate) for name, candidate in candidates.items()}
    rounds: list[dict[str, float]] = []
    gc.collect()
    gc.disable()
    try:
        start = time.perf_counter()
        while len(rounds) < row.rounds or (time.perf_counter() - start < row.seconds and len(rounds) < 400):
            rounds.append({name: _turn(candidate, repeats[name]) for name, candidate in candidates.items()})
            if time.perf_counter() - start > 5 * row.seconds and len(rounds) >= max(2, min(5, row.rounds - 2)):
                break
    finally:
        gc.enable()
    return rounds
