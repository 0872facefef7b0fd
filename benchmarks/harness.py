"""The stop-watch: candidates interleaved round by round, and the median of the per-round ratios to the base.

Machines are noisy, so nothing here is compared in seconds over time. In each round every candidate runs once, in
turn; a round gives one ratio for each candidate; the median of those ratios is the result and their interquartile
range is the noise. A row states its goal and is met, missed, or only told (no goal).
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

Candidate = Callable[[], object]


@dataclass(frozen=True)
class Row:
    """One benchmark: who runs, against whom, and what was promised.

    Args:
        room: The room of the library.
        title: What is done, with its size.
        candidates: Makes the things to run, by name; called once.
        ours: The name of our candidate.
        base: The name of the candidate that ratios are taken to.
        at_most: The goal for ours / base.
        at_least: The goal for base / ours (how many times faster).
        microseconds: Tell our time per call in us against this goal instead of a ratio.
        threads: How many threads torch may use.
        rounds: How many rounds, at least.
        seconds: How long to go on, at most, once there are enough rounds.
    """

    room: str
    title: str
    candidates: Callable[[], dict[str, Candidate]]
    ours: str
    base: str
    at_most: float | None = None
    at_least: float | None = None
    microseconds: float | None = None
    threads: int = 1
    rounds: int = 15
    seconds: float = 3.0


@dataclass
class Result:
    """What a row gave: for each candidate the median ratio to the base, its noise, and the time per call."""

    row: Row
    ratio: dict[str, float] = field(default_factory=dict)
    spread: dict[str, float] = field(default_factory=dict)
    time: dict[str, float] = field(default_factory=dict)

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
            return f"<= {row.microseconds:g} us"
        if row.at_least is not None:
            return f">= {row.at_least:g} x faster"
        return f"<= {row.at_most:g}" if row.at_most is not None else "told"

    @property
    def met(self) -> bool | None:
        """Tell whether the goal is met; None where there is none."""
        row = self.row
        if row.microseconds is not None:
            return self.figure <= row.microseconds
        if row.at_least is not None:
            return self.figure >= row.at_least
        return self.figure <= row.at_most if row.at_most is not None else None


def _once(candidate: Candidate, repeat: int) -> float:
    start = time.perf_counter()
    for _ in range(repeat):
        candidate()
    return (time.perf_counter() - start) / repeat


def _repeats(candidate: Candidate) -> int:
    """How often to call in one round, so that a round is long against the clock and short against the noise."""
    candidate()
    repeat = 1
    while repeat < 100_000:
        took = _once(candidate, repeat) * repeat
        if took > 2e-3:
            break
        repeat = max(repeat * 2, int(repeat * 2.2e-3 / max(took, 1e-7)))
    return repeat


def race(row: Row) -> Result:
    """Run a row.

    Args:
        row: The benchmark.

    Returns:
        The ratios, their spread and the times.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(row.threads)
    try:
        torch.manual_seed(0)
        candidates = row.candidates()
        repeats = {name: _repeats(candidate) for name, candidate in candidates.items()}
        rounds: list[dict[str, float]] = []
        gc.collect()
        gc.disable()
        start = time.perf_counter()
        while len(rounds) < row.rounds or (time.perf_counter() - start < row.seconds and len(rounds) < 400):
            rounds.append({name: _once(candidate, repeats[name]) for name, candidate in candidates.items()})
            if time.perf_counter() - start > 20 * row.seconds and len(rounds) >= 5:
                break
    finally:
        gc.enable()
        torch.set_num_threads(before)
    result = Result(row)
    for name in candidates:
        ratios = [times[name] / times[row.base] for times in rounds]
        low, middle, high = statistics.quantiles(ratios, n=4)
        result.ratio[name] = middle
        result.spread[name] = high - low
        result.time[name] = statistics.median(times[name] for times in rounds)
    return result
