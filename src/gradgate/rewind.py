"""Rewind: a loss that runs away costs some batches, not the run.

A batch can be finite and still ruin the weights; the loss shows it some steps later. `Rewind` keeps snapshots of the
training in memory. When the loss spikes it restores the last snapshot before the first suspect step, gives the innocent
batches since then once more, leaves the suspects out, and goes on.

Words of this file: a *step* is what lies between two calls of `observe`: one batch or, under gradient accumulation,
several. The *timeline* is the sequence of steps that the current weights have seen; a rewind cuts its end off.
"""

from __future__ import annotations

import copy
import logging
import math
import os
import warnings
from bisect import bisect_left, bisect_right, insort
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import distributed

from gradgate._loader_link import ids_of
from gradgate._names import describe, listed
from gradgate._state import random_state, set_random_state
from gradgate._torch_private import Replica, copy_tensors, shard_group, shard_roots, tree_flatten
from gradgate.errors import ArgumentTypeError, ArgumentValueError, GradgateWarning, TooManyRewinds
from gradgate.ledger import Ledger
from gradgate.records import Incident

__all__ = ["Rewind", "Rewound"]

LOG = logging.getLogger("gradgate")
WARM_UP = 20  # so many observations make a median and a spread; before that only a non-finite value is a spike
FLAT = 0.01  # a spread smaller than this part of the median is taken for that: a constant loss has none
SAME_SNAPSHOT = 2  # more rewinds to one snapshot than this do not help

Batch = Any


@dataclass(frozen=True, slots=True)
class Rewound:
    """What `Rewind.observe` did about a spike.

    Attributes:
        to_step: The step that the training returned to: the first one that is not in its weights any more.
        skipped: The suspects, which are not trained on again, as step numbers.
        reason: The spike, with its values.
        exact: Whether the law holds: the training is bit-identical to one on the stream without the suspects.
        incidents: What was recorded of the suspects.
    """

    to_step: int
    skipped: tuple[int, ...]
    reason: str
    exact: bool = True
    incidents: tuple[Incident, ...] = field(default=(), repr=False)


class Rewind:
    """Goes back to the weights before a loss spike, and trains on without the batches that are suspected of it.

    Every `every` steps the state is copied: parameters, buffers, optimizer, and whatever else has a `state_dict`, with
    every random state. A loss above median + `threshold` x MAD of the last `window` for `patience` observations in a
    row, or one that is not finite, is a spike. The steps from `lookback` before its first one to now are suspects.

    Then everything is as in the last snapshot before the first suspect, `batches` gives the innocent batches since then
    once more, and training goes on: bit-identical to the same training on the stream without the suspects.

    Args:
        *parts: Modules, the optimizer, and whatever else changes from step to step and has `state_dict` and
            `load_state_dict`: schedulers, a GradScaler, an averaged model.
        ledger: Where suspects are recorded: a path, or a `Ledger`.
        every: How many steps lie between two snapshots.
        depth: How many snapshots are kept, at least 2: one from before every suspect, the others waiting to be.
        window: How many observations the median and the MAD are taken of.
        threshold: How many MADs above the median a spike begins.
        patience: How many observations in a row must be above it.
        lookback: How many steps before the first of them are suspects, too: the loss of a step shows the update before.
        max_rewinds: After so many rewinds of a run the next one raises.
        ids: `ids(batch)` gives the ids of the samples of a batch, or the key that a batch has them under. Batches of
            `gg.resilient(loader)` need none.

    Raises:
        ArgumentTypeError: A part has no state.
        ArgumentValueError: A number is out of range.
        LedgerError: The ledger cannot be opened.

    Examples:
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> rewind = gg.Rewind(model, optimizer, every=5)
        >>> stream = [torch.randn(8, 2) * (1e4 if step == 30 else 1) for step in range(60)]
        >>> for batch in rewind.batches(stream):
        ...     optimizer.zero_grad()
        ...     loss = (model(batch) - 1).square().mean()
        ...     loss.backward()
        ...     optimizer.step()
        ...     rewound = rewind.observe(loss)
        ...     if rewound:
        ...         print(rewound.to_step, rewound.skipped)
        25 (29, 30, 31, 32)
        >>> rewind
        Rewind(step 60, 1 rewind, snapshots of 12 bytes, the last of step 59)
    """

    def __init__(
        self,
        *parts: Any,
        ledger: str | os.PathLike[str] | Ledger | None = None,
        every: int = 50,
        depth: int = 2,
        window: int = 200,
        threshold: float = 8.0,
        patience: int = 3,
        lookback: int = 1,
        max_rewinds: int = 5,
        ids: str | Callable[[Batch], Sequence[Any]] | None = None,
    ) -> None:
        _check_numbers(every=every, depth=depth, window=window, patience=patience)
        _check_numbers(0, lookback=lookback, max_rewinds=max_rewinds)
        if not threshold > 0:
            raise ArgumentValueError(
                f"Rewind(): `threshold` is {threshold}.", why="a spike lies above the median.", fix="threshold=8.0"
            )
        self._parts = [_stateful(part) for part in parts]
        if not parts:
            raise ArgumentTypeError(
                "Rewind(): there is nothing to rewind.", fix="gg.Rewind(model, optimizer)   # and a scheduler, a scaler"
            )
        modules = [part for part in parts if isinstance(part, torch.nn.Module)]
        self._ranks = _Ranks.of(modules)
        self.every, self.depth, self.patience, self.lookback = every, max(depth, 2), patience, lookback
        self.max_rewinds = max_rewinds
        self.rewinds: list[Rewound] = []
        """The rewinds of this run, in order."""
        self._ids = ids
        if ledger is not None and not isinstance(ledger, Ledger):
            ledger = Ledger(ledger) if self._ranks.rank == 0 else None
        self._ledger = ledger
        self._loss, self._norm = _Level(window, threshold), _Level(window, threshold)
        self._snapshots: list[_Snapshot] = []  # the first is from before every possible suspect
        self._spare: list[_Snapshot] = []
        self._steps: list[_Step] = []  # the timeline since the first snapshot
        self._offset = 0  # where in the timeline the first of them stands
        self._unread: deque[tuple[int, _Reading]] = deque()
        self._asked: deque[tuple[int, float, float | None, str, Callable[[], tuple[bool, bool]]]] = deque()
        self._high: int | None = None  # where in the timeline the current run of high observations began
        self._number = 0  # of the next step that is new
        self._open: list[_Given] = []  # batches since the last observation
        self._again: deque[_Given] = deque()
        self._pulled = 0  # batches that this epoch's loader gave
        self._resumed: dict[str, Any] | None = None
        self._inexact = ""

    # --- the stream -----------------------------------------------------------------------------------------------

    def batches(self, loader: Iterable[Batch]) -> Iterator[Batch]:
        """Give the batches of a loader, after a rewind the innocent ones once more, without the suspects.

        Batches are kept by reference while they may be needed again: `every` + `patience` + `lookback` steps at most.
        Call it once for each epoch.

        Args:
            loader: Any iterable of batches.

        Returns:
            The batches, for one loop with one `observe` for each optimizer step.
        """
        source = self._resume(loader) if self._resumed is not None else iter(loader)
        self._pulled = 0 if self._resumed is None else self._pulled
        self._resumed = None
        while True:
            if self._again:
                given = self._again.popleft()
            else:
                before = torch.get_rng_state() if self._snapshots else None
                try:
                    batch = next(source)
                except StopIteration:
                    return
                if before is not None and not torch.equal(before, torch.get_rng_state()):
                    self._inexact = "the loader draws from the global random state; give it a generator of its own"
                given = _Given(None, self._pulled, batch)
                self._pulled += 1
            if not self._snapshots:
                self._take(loader)
            self._loader = loader
            self._open.append(given)
            yield given.batch

    def observe(self, loss: torch.Tensor | float, grad_norm: torch.Tensor | float | None = None) -> Rewound | None:
        """Note the loss of the step that was just made, after `optimizer.step()`; rewind if it spikes.

        A loss on an accelerator is read one step later, so that no step waits for it.

        Args:
            loss: The loss of the step; under gradient accumulation that of all its batches.
            grad_norm: The norm of its gradient, if that shall be watched as well.

        Returns:
            None, or what was done.

        Raises:
            TooManyRewinds: There were `max_rewinds` before, or two to the same snapshot; everything is as in that one.
            ArgumentValueError: No batch of `batches` was used since the last call.
        """
        if not self._open:
            raise ArgumentValueError(
                "Rewind.observe(): `batches` gave no batch since the last call.",
                why="a step is rewound by giving its batches again, so they must come from `batches`.",
                fix="for batch in rewind.batches(loader): ...   # and rewind.observe(loss) once for each step",
            )
        number = self._open[0].number
        if number is None:
            number, self._number = self._number, self._number + 1
        for given in self._open:
            given.number = number
        self._steps.append(_Step(number, self._open))
        self._open = []
        self._unread.append((self._end - 1, _Reading(loss, grad_norm)))
        if (spike := self._read(0 if self._unread[-1][1].on_host else 1)) is not None:
            return self._go_back(spike)
        self._advance()
        return None

    def announce_change(self) -> None:
        """Say that the loss is about to change its level on purpose: another learning rate, other data.

        The median and the MAD start anew, so the next steps are no spike unless a value is not finite.
        """
        self._loss.clear()
        self._norm.clear()
        self._high = None

    @property
    def _end(self) -> int:
        return self._offset + len(self._steps)

    def _read(self, late: int) -> str | None:
        """Judge all but the last few observations, which a device may still compute; give a spike that is complete."""
        while len(self._asked) > late:
            if (spike := self._judge(*self._asked.popleft())) is not None:
                return spike
        while len(self._unread) > late:
            where, reading = self._unread.popleft()
            loss, norm = reading.values()
            reason = self._loss.above("loss", loss) or ("" if norm is None else self._norm.above("gradient norm", norm))
            broken = not math.isfinite(loss) or (norm is not None and not math.isfinite(norm))
            self._asked.append((where, loss, norm, reason, self._ranks.ask(bool(reason), broken)))
            if not late and (spike := self._judge(*self._asked.popleft())) is not None:
                return spike
        return None

    def _judge(
        self, where: int, loss: float, norm: float | None, reason: str, answer: Callable[[], tuple[bool, bool]]
    ) -> str | None:
        """Count an observation as usual or as high; give the spike that it completes."""
        high, broken = answer()
        if not high:
            self._high = None
            self._loss.add(where, loss)
            if norm is not None:
                self._norm.add(where, norm)
            return None
        if self._high is None:
            self._high = where
        if not broken and where - self._high + 1 < self.patience:
            return None
        number = self._steps[where - self._offset].number
        return f"step {number}: {reason or 'another rank saw a spike'}"

    def _advance(self) -> None:
        """Take a snapshot if one is due, and forget what no spike can lead back to any more."""
        waiting = [entry[0] for entry in self._asked] + [entry[0] for entry in self._unread]
        known = min([self._end, *waiting]) if self._high is None else self._high
        while len(self._snapshots) > 1 and self._snapshots[1].where <= known - self.lookback:
            self._spare.append(self._snapshots.pop(0))
            del self._steps[: self._snapshots[0].where - self._offset]
            self._offset = self._snapshots[0].where
        due = self._end - self._snapshots[-1].where >= self.every
        if due and len(self._snapshots) < self.depth:
            self._take(self._loader)

    def _take(self, loader: Iterable[Batch]) -> None:
        snapshot = self._spare.pop() if self._spare else _Snapshot(self._parts)
        snapshot.take(self._end, self._steps[-1].number + 1 if self._steps else self._number)
        stateful = hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")
        snapshot.loader = (self._pulled, copy.deepcopy(loader.state_dict())) if stateful else (0, None)  # type: ignore[attr-defined]
        snapshot.rewinds = 0
        self._snapshots.append(snapshot)
        if len(self._snapshots) == 1:
            self._offset = self._end

    # --- going back -----------------------------------------------------------------------------------------------

    def _go_back(self, reason: str) -> Rewound:
        assert self._high is not None
        first = max(self._high - self.lookback, self._offset)
        snapshot = self._snapshots[0]
        innocent, suspects = self._steps[: first - self._offset], self._steps[first - self._offset :]
        snapshot.restore()
        exact = not self._inexact and all(given.batch is not _LOST for step in innocent for given in step.batches)
        rewound = Rewound(
            snapshot.number,
            tuple(step.number for step in suspects),
            reason,
            exact,
            self._record(suspects, reason, snapshot.number),
        )
        self._spare += self._snapshots[1:]
        del self._snapshots[1:]
        self._steps.clear()
        self._unread.clear()
        self._asked.clear()
        self._high = None
        for level in (self._loss, self._norm):
            level.cut(snapshot.where)
        repeats = [given for step in innocent for given in step.batches if given.batch is not _LOST]
        self._again.extendleft(reversed(repeats))
        snapshot.rewinds += 1
        self._tell(rewound, snapshot)
        return rewound

    def _tell(self, rewound: Rewound, snapshot: _Snapshot) -> None:
        """Write the rewind to the log; raise where it is one too many, warn at the second."""
        self.rewinds.append(rewound)
        line = f"{rewound.reason}; went back to step {rewound.to_step} without steps {listed(rewound.skipped)}"
        LOG.warning("%s%s", line, "" if rewound.exact else f" (not exact: {self._inexact or 'batches are gone'})")
        if len(self.rewinds) > self.max_rewinds or snapshot.rewinds > SAME_SNAPSHOT:
            again = snapshot.rewinds > SAME_SNAPSHOT
            raise TooManyRewinds(
                f"Rewind: {rewound.reason}; "
                + (
                    f"{snapshot.rewinds} rewinds led to step {rewound.to_step}."
                    if again
                    else f"there were {self.max_rewinds} rewinds before."
                )
                + f"\n{_table(self.rewinds)}",
                why="spikes that come again are an instability of the recipe, not of some batches; everything is as "
                f"before step {rewound.to_step}.",
                fix="a lower learning rate, a longer warm-up, or gradient clipping: gg.clip_grad, clip_grad_norm_",
                rewinds=self.rewinds,
            )
        if len(self.rewinds) == 2:
            warnings.warn(
                f"Rewind: the second loss spike of this run ({rewound.reason}). Unless the data are to blame, going "
                "back hides an instability of the recipe: look at the learning rate, the warm-up and the clipping.",
                GradgateWarning,
                stacklevel=4,
            )

    def _record(self, suspects: Sequence[_Step], reason: str, to_step: int) -> tuple[Incident, ...]:
        """Record the suspects: each sample where samples have names, else each step."""
        incidents = []
        details = {"rewound_to": to_step, "suspects": [step.number for step in suspects]}
        for step in suspects:
            names: list[str | None] = [name for given in step.batches for name in self._names(given.batch)]
            for name in names or [None]:
                incidents.append(
                    Incident(
                        run=self._ledger.run if self._ledger is not None else None,
                        step=step.number,
                        rank=self._ranks.rank,
                        world_size=self._ranks.world_size,
                        sample_id=name,
                        stage="step",
                        cause="loss spike",
                        message=reason,
                        details=dict(details),
                    )
                )
        every = tuple(incident for part in self._ranks.gather(tuple(incidents)) for incident in part)
        if self._ledger is not None:
            self._ledger.record_many(every)
        return tuple(incidents)

    def _names(self, batch: Batch) -> list[str]:
        if batch is _LOST:
            return []
        if self._ids is None:
            return [name for name in ids_of(batch) or () if name is not None]
        names = self._ids(batch) if callable(self._ids) else batch[self._ids]
        return [str(name) for name in (names.tolist() if isinstance(names, torch.Tensor) else names)]

    # --- checkpoints ----------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Give what a resumed run needs besides the model's own checkpoint, the last safe snapshot included.

        Returns:
            Tensors and plain values; save it after `observe`, together with the parts.
        """
        if self._open:
            raise ArgumentValueError(
                "Rewind.state_dict(): a step has begun.",
                why="its batches would be lost or given twice.",
                fix="rewind.observe(loss); checkpoint = rewind.state_dict()",
            )
        self._read(0)  # a checkpoint may wait for the device
        return {
            "number": self._number,
            "pulled": self._pulled,
            "offset": self._offset,
            "high": self._high,
            "steps": [(step.number, [given.position for given in step.batches]) for step in self._steps],
            "again": [(given.number, given.position) for given in self._again],
            "loss": self._loss.state(),
            "norm": self._norm.state(),
            "rewinds": [(one.to_step, list(one.skipped), one.reason, one.exact) for one in self.rewinds],
            "snapshot": self._snapshots[0].state() if self._snapshots else None,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where a saved run stopped; the next `batches` skips what was used and finds what is needed again.

        A loader that has `load_state_dict` is set back to the snapshot; any other must give the same batches again.

        Args:
            state: What `state_dict` gave.

        Raises:
            ArgumentValueError: It is something else.
        """
        expected = {"number", "pulled", "offset", "high", "steps", "again", "loss", "norm", "rewinds", "snapshot"}
        if set(state) != expected:
            raise ArgumentValueError(
                f"Rewind.load_state_dict(): the entries are {sorted(map(str, state))}.",
                why=f"the state of a Rewind has the entries {sorted(expected)}.",
                fix='rewind.load_state_dict(checkpoint["rewind"])   # saved as rewind.state_dict()',
            )
        self._number, self._pulled, self._offset = state["number"], state["pulled"], state["offset"]
        self._high = state["high"]
        self._steps = [_Step(number, [_Given(number, at) for at in places]) for number, places in state["steps"]]
        self._again = deque(_Given(number, place) for number, place in state["again"])
        self._loss.load(state["loss"])
        self._norm.load(state["norm"])
        self.rewinds = [Rewound(to, tuple(skipped), why, exact) for to, skipped, why, exact in state["rewinds"]]
        self._unread.clear()
        self._asked.clear()
        self._open, self._snapshots, self._spare = [], [], []
        if state["snapshot"] is not None:
            self._snapshots.append(_Snapshot.load(self._parts, state["snapshot"]))
        self._resumed = dict(state)

    def _resume(self, loader: Iterable[Batch]) -> Iterator[Batch]:
        """Bring a fresh loader to the place of the saved one, and collect the batches that may be needed again."""
        start, saved = self._snapshots[0].loader if self._snapshots else (0, None)
        if saved is not None and hasattr(loader, "load_state_dict"):
            loader.load_state_dict(copy.deepcopy(saved))
        source = iter(loader)
        wanted: dict[int, list[_Given]] = {}
        for given in (*self._again, *(given for step in self._steps for given in step.batches)):
            wanted.setdefault(given.position, []).append(given)
        for position in range(start, self._pulled):
            try:
                batch = next(source)
            except StopIteration:
                break
            for given in wanted.get(position, ()):
                given.batch = batch
        self._again = deque(given for given in self._again if given.batch is not _LOST)
        return source

    def __repr__(self) -> str:
        many = f"{len(self.rewinds)} rewind{'' if len(self.rewinds) == 1 else 's'}"
        if not self._snapshots:
            return f"Rewind(step {self._number}, {many}, no snapshot yet)"
        last = self._snapshots[-1]
        return (
            f"Rewind(step {self._number}, {many}, snapshots of {_bytes(last.nbytes)}, the last of step {last.number})"
        )


# --- the pieces -------------------------------------------------------------------------------------------------------

_LOST = object()  # stands for a batch that a resumed run could not get again


@dataclass(slots=True)
class _Given:
    """A batch, its position in the loader's epoch, and the step it belongs to."""

    number: int | None
    position: int
    batch: Batch = _LOST


@dataclass(slots=True)
class _Step:
    number: int
    batches: list[_Given]


class _Reading:
    """A loss and a gradient norm that are perhaps still being computed."""

    def __init__(self, loss: torch.Tensor | float, norm: torch.Tensor | float | None) -> None:
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
    raise ArgumentTypeError(
        f"Rewind.observe(): `{name}` is {describe(value)}.",
        why="it is one number for the step.",
        fix="rewind.observe(losses.mean())",
    )


class _Level:
    """The usual level of a number that is observed step by step: its median and MAD over a window."""

    def __init__(self, window: int, threshold: float) -> None:
        self._window, self._threshold = window, threshold
        self.clear()

    def clear(self) -> None:
        self._recent: deque[tuple[int, float]] = deque()
        self._sorted: list[float] = []

    def add(self, where: int, value: float) -> None:
        self._recent.append((where, value))
        insort(self._sorted, value)
        if len(self._recent) > self._window:
            self._forget(self._recent.popleft()[1])

    def cut(self, end: int) -> None:
        """Forget what was observed from a place of the timeline on."""
        while self._recent and self._recent[-1][0] >= end:
            self._forget(self._recent.pop()[1])

    def above(self, name: str, value: float) -> str:
        """Say by how much a value is above the level; nothing if it is not."""
        if not math.isfinite(value):
            return f"the {name} is {value}"
        if len(self._sorted) < min(WARM_UP, self._window):
            return ""
        middle, spread = self._median_and_mad()
        spread = max(spread, FLAT * abs(middle))
        if value <= middle + self._threshold * spread:
            return ""
        return f"the {name} is {value:.4g}, above {middle:.4g} + {self._threshold:g} x {spread:.3g}"

    def state(self) -> list[tuple[int, float]]:
        return list(self._recent)

    def load(self, recent: Iterable[tuple[int, float]]) -> None:
        self.clear()
        for where, value in recent:
            self.add(where, value)

    def _forget(self, value: float) -> None:
        del self._sorted[bisect_left(self._sorted, value)]

    def _median_and_mad(self) -> tuple[float, float]:
        values = self._sorted
        count = len(values)
        middle = (values[(count - 1) // 2] + values[count // 2]) / 2
        # Deviations to the left and to the right are sorted each; the one in the middle of both is found by halving.
        split, wanted = bisect_right(values, middle), (count - 1) // 2
        low, high = max(0, wanted + 1 - (count - split)), min(split, wanted + 1)
        while low < high:  # how many of the `wanted` + 1 smallest lie on the left
            left = (low + high) // 2
            if middle - values[split - 1 - left] < values[split + wanted - left] - middle:
                low = left + 1
            else:
                high = left
        right = wanted + 1 - low
        return middle, max(
            middle - values[split - low] if low else 0.0, values[split + right - 1] - middle if right else 0.0
        )


class _Snapshot:
    """A copy of everything that a training step writes; its memory is used again."""

    def __init__(self, parts: Sequence[Any]) -> None:
        self._parts = parts
        self._kept: list[Any] = [None] * len(parts)
        self._random: dict[str, Any] = {}
        self.where = self.number = self.rewinds = 0
        self.loader: tuple[int, Any] = (0, None)

    def take(self, where: int, number: int) -> None:
        """Copy everything as it is after the steps up to a place of the timeline."""
        self.where, self.number = where, number
        pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
        with torch.no_grad():
            kept = [_copied(_state_of(part), old, pairs) for part, old in zip(self._parts, self._kept, strict=True)]
            copy_tensors([copied for copied, _ in pairs], [source for _, source in pairs])
        self._kept, self._random = kept, random_state()

    def restore(self) -> None:
        """Write everything back; the copy stays good."""
        with torch.no_grad():
            for part, kept in zip(self._parts, self._kept, strict=True):
                _put_back(part, kept)
        set_random_state(self._random)

    @property
    def nbytes(self) -> int:
        """How much memory the copies take."""
        return sum(leaf.nbytes for leaf in tree_flatten(self._kept)[0] if isinstance(leaf, torch.Tensor))

    def state(self) -> dict[str, Any]:
        """Give the snapshot as tensors and plain values."""
        own = {"where": self.where, "number": self.number, "rewinds": self.rewinds, "loader": self.loader}
        return {**own, **copy.deepcopy({"kept": self._kept, "random": self._random})}

    @classmethod
    def load(cls, parts: Sequence[Any], state: Mapping[str, Any]) -> _Snapshot:
        """Make a snapshot again."""
        snapshot = cls(parts)
        snapshot.where, snapshot.number = state["where"], state["number"]
        snapshot.rewinds, snapshot.loader = state["rewinds"], tuple(state["loader"])
        snapshot._kept, snapshot._random = copy.deepcopy(state["kept"]), copy.deepcopy(state["random"])
        return snapshot


def _stateful(part: Any) -> Any:
    if callable(getattr(part, "state_dict", None)) and callable(getattr(part, "load_state_dict", None)):
        return part
    raise ArgumentTypeError(
        f"Rewind(): {describe(part)} has no state_dict and load_state_dict.",
        why="whatever changes from step to step must be put back.",
        fix="gg.Rewind(model, optimizer, scheduler)   # modules, optimizers, schedulers, scalers",
    )


def _state_of(part: Any) -> Any:
    """Give what a part writes from step to step, as a tree of tensors and plain values."""
    if isinstance(part, torch.nn.Module):
        tensors = dict(part.named_parameters()) | dict(part.named_buffers())
        return {"tensors": tensors, "gradients": [parameter.grad is not None for parameter in part.parameters()]}
    if isinstance(part, torch.optim.Optimizer):
        return {
            "state": {place: part.state[p] for place, p in enumerate(_parameters(part)) if p in part.state},
            "groups": [{key: group[key] for key in group if key != "params"} for group in part.param_groups],
        }
    return part.state_dict()


def _parameters(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _copied(value: Any, old: Any, pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> Any:
    """Copy a tree; tensors are paired, for one call that copies all, with the memory of an older copy where it fits."""
    if isinstance(value, torch.Tensor):
        value = _local(value.detach())
        fits = isinstance(old, torch.Tensor) and (old.shape, old.dtype) == (value.shape, value.dtype)
        pairs.append((old if fits else _memory_for(value), value))
        return pairs[-1][0]
    if isinstance(value, Mapping):
        named = old if isinstance(old, Mapping) else {}
        return {key: _copied(part, named.get(key), pairs) for key, part in value.items()}
    if type(value) in (list, tuple, deque):
        return type(value)([_copied(part, known, pairs) for part, known in zip(value, _alike(old, value), strict=True)])
    return copy.deepcopy(value)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """Give the part of a tensor that lies in this process: of a DTensor its shard."""
    local: torch.Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local


def _memory_for(tensor: torch.Tensor) -> torch.Tensor:
    """Make room for a copy: on the host, and pinned, if the tensor lies on an accelerator."""
    if tensor.is_cpu:
        return torch.empty_like(tensor)
    return torch.empty_like(tensor, device="cpu", pin_memory=True)


def _put_back(part: Any, kept: Any) -> None:
    """Write a copy into a part, in place wherever that is possible; the copy stays good."""
    if isinstance(part, torch.nn.Module):
        tensors: list[tuple[str, torch.Tensor]] = [*part.named_parameters(), *part.named_buffers()]
        for name, tensor in tensors:
            if name in kept["tensors"]:
                _written(tensor, kept["tensors"][name])
        for parameter, had_gradient in zip(part.parameters(), kept["gradients"], strict=True):
            if not had_gradient:
                parameter.grad = None
    elif isinstance(part, torch.optim.Optimizer):
        for place, trained in enumerate(_parameters(part)):
            if place in kept["state"]:
                part.state[trained] = _written(part.state.get(trained), kept["state"][place])
            else:
                part.state.pop(trained, None)
        for group, saved in zip(part.param_groups, kept["groups"], strict=True):
            for key in [key for key in group if key != "params" and key not in saved]:
                del group[key]
            group.update({key: _written(group.get(key), value) for key, value in saved.items()})
    else:
        part.load_state_dict(_written(None, kept))


def _written(value: Any, kept: Any) -> Any:
    """Give a value that equals a copy: the old value overwritten where it can be, else a new one."""
    if isinstance(kept, torch.Tensor):
        local = _local(value.detach()) if isinstance(value, torch.Tensor) else None
        if local is None or local.dtype is not kept.dtype:
            return kept.clone()
        if local.shape != kept.shape:
            value.data = kept.clone()
        else:
            local.copy_(kept, non_blocking=True)
        return value
    if isinstance(kept, Mapping):
        named = value if isinstance(value, Mapping) else {}
        return {key: _written(named.get(key), part) for key, part in kept.items()}
    if type(kept) in (list, tuple, deque):
        return type(kept)([_written(known, part) for known, part in zip(_alike(value, kept), kept, strict=True)])
    return copy.deepcopy(kept)


def _alike(value: Any, form: Sequence[Any]) -> Sequence[Any]:
    """Give a value if it has as many elements as a form, else as many of nothing."""
    return value if isinstance(value, list | tuple | deque) and len(value) == len(form) else [None] * len(form)


class _Ranks:
    """The processes that train a model together, and what they decide together."""

    def __init__(self, group: distributed.ProcessGroup | None, device: torch.device | None) -> None:
        self._group, self._device = group, device
        self.rank = 0 if device is None else distributed.get_rank(group)
        self.world_size = 1 if device is None else distributed.get_world_size(group)

    @classmethod
    def of(cls, modules: Sequence[torch.nn.Module]) -> _Ranks:
        """Find the process group of modules in DistributedDataParallel or FSDP2; without one there is one process."""
        if not (distributed.is_available() and distributed.is_initialized()):
            return cls(None, None)
        for module in modules:
            replicas = [part for part in module.modules() if isinstance(part, Replica)]
            groups: list[distributed.ProcessGroup | None] = [replica.process_group for replica in replicas]
            groups += [shard_group(root) for root in shard_roots(module)]
            if groups:
                return cls(groups[0], next(_local(p.detach()).device for p in module.parameters()))
        return cls(None, None)

    def ask(self, high: bool, broken: bool) -> Callable[[], tuple[bool, bool]]:
        """Ask all processes whether any of them sees a spike; the answer may be taken later."""
        if self._device is None:
            return lambda: (high, broken)
        flags = torch.tensor([high, broken], dtype=torch.int32, device=self._device)
        work = distributed.all_reduce(flags, distributed.ReduceOp.MAX, group=self._group, async_op=True)

        def answer() -> tuple[bool, bool]:
            assert work is not None
            work.wait()
            high, broken = flags.tolist()
            return bool(high), bool(broken)

        return answer

    def gather(self, value: Any) -> list[Any]:
        """Give what every process has, to every process."""
        if self._device is None:
            return [value]
        every: list[Any] = [None] * self.world_size
        distributed.all_gather_object(every, value, group=self._group)
        return every


def _check_numbers(least: int = 1, **numbers: Any) -> None:
    for name, value in numbers.items():
        if type(value) is not int or value < least:
            raise ArgumentValueError(
                f"Rewind(): `{name}` is {describe(value)}.",
                why=f"it is a whole number of at least {least}.",
                fix=f"{name}={_DEFAULTS[name]}",
            )


_DEFAULTS = {"every": 50, "depth": 2, "window": 200, "patience": 3, "lookback": 1, "max_rewinds": 5}


def _table(rewinds: Sequence[Rewound]) -> str:
    lines = [f"to step {one.to_step}, without {listed(one.skipped)}: {one.reason}" for one in rewinds]
    return "\n".join(lines)


def _bytes(count: int) -> str:
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count} bytes"
