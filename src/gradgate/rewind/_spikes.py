"""What a loss spike is, and who made it: the usual level of a loss, and trials that repeat steps from a snapshot."""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import cycle, islice
from typing import Any

import torch

from gradgate._checks import wrong_type
from gradgate._names import listed
from gradgate._trees import BatchReader
from gradgate.errors import ArgumentError
from gradgate.rewind._snapshots import StateSnapshot

WARM_UP = 20  # so many observations make a median and a spread; before that only a non-finite value is a spike
FLAT = 0.01  # a spread smaller than this part of the median is taken for that: a constant loss has none


class Reading:
    """A loss and a gradient norm that are perhaps still being computed."""

    def __init__(self, loss: torch.Tensor | float, norm: torch.Tensor | float | None) -> None:
        # The loss of a guard is the mean over all ranks, the same number on each; gradient norms may differ.
        self.ranks = 1
        if norm is None and hasattr(loss, "of_all_ranks"):
            loss, self.ranks = loss.of_all_ranks
        self._values = [_number(loss, "loss"), None if norm is None else _number(norm, "grad_norm")]
        self.on_host = all(not isinstance(value, torch.Tensor) or value.is_cpu for value in self._values)

    def values(self) -> tuple[float, float | None]:
        loss, norm = (None if value is None else float(value) for value in self._values)
        assert loss is not None
        return loss, norm


def _number(value: Any, name: str) -> torch.Tensor | float:
    if isinstance(value, torch.Tensor) and value.numel() == 1 and not value.is_complex():
        return value.detach().clone()  # the caller may add to it
    if isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    raise wrong_type(value, name, "Rewind.observe", "it is one number for the step.", "rewind.observe(losses.mean())")


class Level:
    """The usual level of a number that is observed step by step: its median and MAD over a window."""

    def __init__(self, window: int, threshold: float, values: Iterable[float] = ()) -> None:
        self._window, self._threshold = window, threshold
        self.recent: deque[float] = deque()
        self._sorted: list[float] = []
        for value in values:
            self.add(value)

    def add(self, value: float) -> None:
        self.recent.append(value)
        insort(self._sorted, value)
        if len(self.recent) > self._window:
            del self._sorted[bisect_left(self._sorted, self.recent.popleft())]

    def above(self, name: str, value: float) -> str:
        """Say by how much a value is above the level; nothing if it is not."""
        if not math.isfinite(value):
            return f"the {name} is {value}"
        count = len(self._sorted)
        if count < min(WARM_UP, self._window):
            return ""
        middle = (self._sorted[(count - 1) // 2] + self._sorted[count // 2]) / 2
        flat = FLAT * abs(middle)
        if value <= middle + self._threshold * flat:  # most are, and the MAD takes longer to find
            return ""
        mad = sorted(abs(value - middle) for value in self._sorted)[(count - 1) // 2]
        spread = max(mad, flat) or max(map(abs, self._sorted))  # mostly 0: the largest
        if not spread or value <= middle + self._threshold * spread:
            return ""
        return f"the {name} is {value:.4g}, above {middle:.4g} + {self._threshold:g} x {spread:.3g}"


class Levels:
    """The usual levels of the loss and of the gradient norm."""

    def __init__(self, window: int, threshold: float, values: Iterable[Iterable[float]] = ((), ())) -> None:
        self._rules = window, threshold
        self.load(values)

    def load(self, values: Iterable[Iterable[float]]) -> None:
        self._levels = [Level(*self._rules, recent) for recent in values]

    def values(self) -> list[list[float]]:
        return [list(level.recent) for level in self._levels]

    def copy(self, values: Iterable[Iterable[float]]) -> Levels:
        """Return levels with the same rules and other values."""
        return Levels(*self._rules, values)

    def judge(self, loss: float, norm: float | None) -> tuple[str, bool]:
        """Say by how much a value is above its level, nothing if none is; and whether one is not finite."""
        reason, broken = self._levels[0].above("loss", loss), not math.isfinite(loss)
        if norm is not None:
            reason, broken = reason or self._levels[1].above("gradient norm", norm), broken or not math.isfinite(norm)
        return reason, broken

    def add(self, loss: float, norm: float | None) -> None:
        for level, value in zip(self._levels, (loss, norm), strict=True):
            if value is not None and math.isfinite(value):
                level.add(value)


# --- who made it ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Culprits:
    """Who made a loss spike, as `Rewind.blame` found out.

    Attributes:
        steps: The steps that make the loss spike; none if the spike does not come again.
        together: Whether they do so only together.
        rows: For each of these steps the rows of its batch that make the spike, where they could be found.
        sample_ids: The ids of these samples, where they are known.
        trials: How often some of the suspects were trained on.
    """

    steps: tuple[int, ...]
    together: bool
    rows: Mapping[int, tuple[int, ...]]
    sample_ids: list[str] = field(default_factory=list)
    trials: int = 0

    def __str__(self) -> str:
        many = f"{self.trials} trial{'' if self.trials == 1 else 's'}"
        if not self.steps:
            return f"the spike does not come again ({many}): no batch is to blame"
        rows = {step: f" (rows {listed(rows)})" for step, rows in self.rows.items()}
        text = ("together: " if self.together else "") + ", ".join(f"step {n}{rows.get(n, '')}" for n in self.steps)
        return text + (f"; samples {listed(self.sample_ids)}" if self.sample_ids else "") + f"; {many}"


Step = list[Any]  # the batches of a step


@dataclass(slots=True)
class Trials:
    """Trains on some of the suspects, again and again from the same weights."""

    step_fn: Callable[..., Any]
    levels: Levels
    agree: Callable[[bool, bool], tuple[bool, bool]]
    probes: Sequence[Step]
    patience: int
    base: StateSnapshot
    count: int = 0

    def begin(self, innocent: Sequence[Step]) -> None:
        """Train on the innocent steps before the suspects, and keep the state after them."""
        for step in innocent:
            self.levels.add(*self._train(step))
        self.base.take(0, 0)

    def blame(self, suspects: Mapping[int, Step], *, rows: bool) -> Culprits:
        """Halve the suspects until single ones are left, and then their rows."""
        many = len(suspects)
        found = self._culprits(list(suspects), lambda numbers: self._spikes([suspects[n] for n in numbers], many))
        steps = tuple(sorted(number for group in found for number in group))
        together = any(len(group) > 1 for group in found)
        guilty = {n: self._rows(suspects[n], many) for n in steps if rows and not together and len(suspects[n]) == 1}
        return Culprits(steps, together, {n: bad for n, bad in guilty.items() if bad is not None}, trials=self.count)

    def _rows(self, step: Step, many: int) -> tuple[int, ...] | None:
        """Return the rows of a batch that make the spike alone; None where they cannot be separated."""
        batch, reader = step[0], BatchReader()
        try:
            size = reader.count(batch)
        except ArgumentError:
            return None

        def spikes(rows: list[int]) -> bool:  # rows are repeated: the batch keeps its size, which BatchNorm needs
            return self._spikes([[reader.select(batch, list(islice(cycle(rows), size)), size)]], many)

        found = self._culprits(list(range(size)), spikes, known=True)
        return tuple(sorted(row for group in found for row in group))

    def _culprits(self, some: list[int], spikes: Callable[[list[int]], bool], known: bool = False) -> list[list[int]]:
        """Return the smallest groups that spike: single ones, or some that do so only together."""
        if not known and not spikes(some):
            return []
        if len(some) == 1:
            return [some]
        half = len(some) // 2
        alone = self._culprits(some[:half], spikes) + self._culprits(some[half:], spikes)
        if alone:
            return alone
        for one in list(some):
            if spikes(rest := [other for other in some if other != one]):
                some = rest
        return [some]

    def _spikes(self, steps: Sequence[Step], many: int) -> bool:
        """Train on some steps and on the probes after them; return whether the loss spikes."""
        self.base.restore()
        self.count += 1
        run = 0
        for step in (*steps, *islice(cycle(self.probes), max(many, self.patience))):
            reason, broken = self.levels.judge(*self._train(step))
            high, broken = self.agree(bool(reason), broken)
            run = run + 1 if high else 0
            if broken or run >= self.patience:
                return True
        return False

    def _train(self, step: Step) -> tuple[float, float | None]:
        result = self.step_fn(*step)
        loss, norm = result if isinstance(result, tuple) else (result, None)
        return Reading(loss, norm).values()
