"""Rewind: a loss that runs away costs some batches, not the run.

Words of this file: a *step* is what lies between two calls of `observe`: one batch or, under gradient accumulation,
several. The *timeline* is the sequence of steps that the current weights have seen; a rewind cuts its end off. A batch
has a *doubt* if going back beyond it cannot be exact, because something happened that is not repeated.
"""

from __future__ import annotations

import copy
import inspect
import math
import os
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import distributed

from gradgate._checks import wrong_value
from gradgate._loader_link import ids_of
from gradgate._names import listed
from gradgate._patches import to_the_end
from gradgate._state import random_state, set_random_state
from gradgate._text import log_line, user_level
from gradgate._torch_distributed import Replica, shard_group, shard_roots
from gradgate._torch_private import local_part, write_count, write_counts
from gradgate._trees import leaves_of
from gradgate.errors import ArgumentTypeError, ArgumentValueError, GradgateWarning, TooManyRewinds
from gradgate.ledger import Ledger
from gradgate.records import Incident
from gradgate.rewind._snapshots import (
    Copier,
    StateSnapshot,
    copy_of,
    options_of,
    same_values,
    set_groups,
    stateful,
    tensors_of,
    with_optimizers,
)
from gradgate.rewind._spikes import Culprits, Levels, Reading, Trials

LOOK = 32  # so many batches lie between two looks at the random states of Python and NumPy
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

    A loss above median + `threshold` x MAD of the last `window` for `patience` observations in a row, or one that is
    not finite, is a spike. The steps from `lookback` before its first one to now are suspects. The last snapshot before
    them is restored, with every random state, `batches` yields the innocent batches since then once more, and training
    goes on: bit-identical to the same training on the stream without the suspects.

    Args:
        *parts: Modules, the optimizer, and whatever else changes from step to step and has `state_dict` and
            `load_state_dict`: schedulers, a GradScaler, an averaged model, a guard. The optimizer of a scheduler,
            and one inside another, need not be given.
        ledger: Where suspects are recorded: a path, or a `Ledger`.
        every: How many steps lie between two snapshots of all parts.
        depth: How many snapshots are kept, at least 2: one from before every suspect, the others waiting to be.
        window: How many observations the median and the MAD are taken of.
        threshold: How many MADs above the median a spike begins.
        patience: How many observations in a row must be above it.
        lookback: How many steps before the first of them are suspects, too: the loss of a step shows the update before.
        max_rewinds: After so many rewinds of a run the next one raises.
        ids: A function of a batch that returns its ids, or their key; batches of `gg.resilient(loader)` need none.

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
        given = dict(locals())
        for name in ("every", "depth", "window", "patience", "lookback", "max_rewinds"):
            value, least = given[name], 0 if name in ("lookback", "max_rewinds") else 1
            if type(value) is not int or value < least:
                fix = f"{name}={inspect.signature(Rewind).parameters[name].default}"
                raise wrong_value(value, name, "Rewind", f"it is a whole number of at least {least}.", fix)
        if not threshold > 0:
            raise wrong_value(threshold, "threshold", "Rewind", "a spike lies above the median.", "threshold=8.0")
        self._parts = with_optimizers([stateful(part) for part in parts])
        if not parts:
            raise ArgumentTypeError(
                "Rewind(): there is nothing to rewind.", fix="gg.Rewind(model, optimizer)   # and a scheduler, a scaler"
            )
        self._copier = Copier(self._parts)
        self._ranks = _Ranks([part for part in parts if isinstance(part, torch.nn.Module)])
        # While a scaler looks for its scale, gradients overflow: that is no spike.
        self._scaled = any(isinstance(part, torch.amp.GradScaler) and part.is_enabled() for part in parts)
        self.every, self.depth, self.patience, self.lookback = every, max(depth, 2), patience, lookback
        self.max_rewinds = max_rewinds
        # What makes an innocent step again, for loops that cannot be given their batches again; it returns the loss.
        self._make_step_again: Callable[[list[_Given]], torch.Tensor] | None = None
        self.rewinds: list[Rewound] = []
        """The rewinds of this run, in order."""
        self._ids = ids
        if self._ranks.rank:
            ledger = None  # the first rank records for all
        self._ledger = ledger if isinstance(ledger, Ledger | None) else Ledger(ledger)
        self._levels = Levels(window, threshold)
        self._snapshots: list[StateSnapshot] = []  # the first is from before every possible suspect
        self._spare: list[StateSnapshot] = []
        self._steps: list[_Step] = []  # the timeline since the first snapshot
        self._offset = 0  # where in the timeline the first of them stands
        self._unread: deque[tuple[int, Reading]] = deque()
        self._asked: deque[tuple[int, float, float | None, str, Callable[[], tuple[bool, bool]]]] = deque()
        self._alike = True  # whether every loss so far was one of all ranks, so that they judge alike
        self._high: int | None = None  # where in the timeline the current run of high observations began
        self._number = 0  # of the next step that is new
        self._open: list[_Given] = []  # batches since the last observation
        self._again: deque[_Given] = deque()
        self._epoch = self._pulled = 0  # calls of `batches`, and how many batches the loader yielded in this one
        self._loader: Iterable[Batch] = ()
        self._current: object = None  # the generator that yields batches now
        self._left: _Outside | None = None  # how the last epoch was left
        self._before: dict[str, Any] | None = None  # the random state after the last step, or before the next batch
        self._draws = False  # whether the loader draws for each batch
        self._doubt = ""  # of the next new batch, as is what the loop did to schedulers before it
        self._between: Changes | None = None
        self._carried: Changes | None = None  # what it did before a suspect
        self._resumed: Mapping[str, Any] | None = None
        self._healthy: list[_Step] = []  # the last one before the first snapshot
        # Of the last spike, while the snapshot before it is kept: that, the innocent steps since, and the suspects.
        self._evidence: tuple[StateSnapshot, list[_Step], list[_Step]] | None = None

    @classmethod
    def _beside(cls, guard: Any, parts: Iterable[Any], options: Mapping[str, Any]) -> Rewind:
        """Make the `Rewind` of a framework's training, which records where its guard does."""
        ledger = next((sink for sink in guard._sinks if isinstance(sink, Ledger)), None)
        return cls(*(part for part in parts if part is not None), guard, **{"ledger": ledger, **options})

    # --- the stream -----------------------------------------------------------------------------------------------

    def batches(self, loader: Iterable[Batch]) -> Iterator[Batch]:
        """Yield the batches of a loader, after a rewind the innocent ones once more, without the suspects.

        Batches are kept by reference while they may be needed again: `every` + `patience` + `lookback` + 1 steps.

        Args:
            loader: Any iterable of batches.

        Returns:
            The batches of one epoch, for a loop with one `observe` for each optimizer step.
        """
        source = self._enter(loader)
        token = self._current
        try:
            while True:
                if self._current is not token:
                    why = "batches that are given again must reach the loop that they came from."
                    fix = "for one, two in rewind.batches(zip(loader, other)): ..."
                    raise ArgumentValueError("Rewind.batches(): another call has taken over.", why=why, fix=fix)
                if not self._again and not self._pull(source):
                    if (spike := self._read(0)) is not None:
                        self._go_back(spike)
                        continue
                    self._epoch, self._pulled, self._current = self._epoch + 1, 0, None
                    self._left = _outside(self._parts)
                    return
                if self._again:
                    self._open_next()
                yield self._open[-1].batch
        finally:
            if self._current is token:
                self._leave()

    def _enter(self, loader: Iterable[Batch]) -> Iterator[Batch]:
        """Begin an epoch, or go on with a resumed one."""
        self._leave()
        self._current = object()
        self._loader, self._draws = loader, False
        if self._resumed is None:
            self._epoch, self._pulled = self._epoch + 1, 0
            source = iter(loader)
        else:
            source, self._resumed = self._resume(loader, self._resumed), None
        if self._left is not None:
            doubt, self._between = _changes(self._left, _outside(self._parts))
            self._doubt, self._left = doubt or self._doubt, None
        self._before = self._random_state()
        return source

    def _pull(self, source: Iterator[Batch]) -> bool:
        """Get a new batch from the loader; return whether there was one."""
        position = self._position() if not self._snapshots else None
        if self._before is None:
            self._before = self._random_state()
        for batch in source:
            self._add(batch, position)
            return True
        return False

    def _random_state(self) -> dict[str, Any]:
        # Python's and NumPy's states are slow to read: one look in so many batches finds a loader that draws for each.
        return random_state() if self._pulled % LOOK == 1 else {"torch": torch.get_rng_state()}

    def _add(self, batch: Batch, position: tuple[int, int, Any] | None = None) -> None:
        """Add a new batch to the step that begins or is being made, and take the first snapshot."""
        before, self._before = self._before, None  # None if the training may have drawn since
        if not self._snapshots:
            self._names(batch)  # a wrong `ids` shows now, not at the spike
            self._take(position or self._position())
        elif before is not None and not torch.equal(before["torch"], torch.get_rng_state()):
            self._doubt = _DRAWS_DOUBT
        elif before is not None and len(before) > 1 and not same_values(before, random_state()):
            self._draws = True
        if self._draws:
            self._doubt = _DRAWS_DOUBT
        given = _Given(None, self._epoch, self._pulled, self._doubt, self._between)
        given.keep(batch)
        if self._carried is not None:
            self._make_changes(self._carried)
            given.between, self._carried = self._carried, None
        self._pulled, self._doubt, self._between = self._pulled + 1, "", None
        self._open.append(given)

    def _open_next(self) -> _Given:
        given = self._again.popleft()
        self._make_changes(given.between)
        self._open.append(given)
        return given

    def _make_changes(self, changes: Changes | None) -> None:
        """Make the changes between two epochs again."""
        for part, options in zip(self._parts, changes or (), strict=changes is not None):
            if options is not None and isinstance(part, torch.optim.Optimizer):
                set_groups(part, options, {})
            elif options is not None:
                part.load_state_dict(copy.deepcopy(options))

    def _leave(self) -> None:
        """Settle a loop that was left in the middle of a step: a batch that came again does so once more."""
        if self._current is None:
            return
        self._current = None
        if self._open:
            self._doubt = "a loop was left before it observed a batch"
            self._again.extendleft(given for given in reversed(self._open) if given.number is not None)
            self._open = []
        self._left = _outside(self._parts)

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
            why = "a step is rewound by giving its batches again, so they must come from `batches`."
            fix = "for batch in rewind.batches(loader): ...   # and rewind.observe(loss) once for each step"
            raise ArgumentValueError("Rewind.observe(): `batches` gave no batch since the last call.", why=why, fix=fix)
        number = self._open[0].number
        if number is not None and (
            any(given.number != number for given in self._open) or (self._again and self._again[0].number == number)
        ):
            self._open[0].doubt = "batches that came again were divided into other steps than the first time"
            text = (
                f"Rewind.observe(): step {number} has other batches than the first time; the training is not exactly "
                "the one without the suspects. Count batches from the start of the training, not of the epoch, to "
                "decide when an accumulated step ends."
            )
            warnings.warn(text, GradgateWarning, stacklevel=user_level())
        if number is None:
            number, self._number = self._number, self._number + 1
        for given in self._open:
            given.number = number
        self._steps.append(_Step(number, self._open))
        self._open = []
        self._unread.append((self._end - 1, Reading(loss, grad_norm)))
        if (spike := self._read(0 if self._unread[-1][1].on_host else 1)) is not None:
            rewound = self._go_back(spike)
            while self._again and self._make_step_again is not None:
                step = [self._open_next()]
                while self._again and self._again[0].number == step[0].number:
                    step.append(self._open_next())
                self.observe(self._make_step_again(step))
            return rewound
        self._advance()
        self._before = self._random_state()
        return None

    def announce_change(self) -> None:
        """Say that the loss is about to change its level on purpose: another learning rate, other data.

        The median and the MAD start anew, so the next steps are no spike unless a value is not finite.
        """
        self._levels.load([[], []])
        for snapshot in self._snapshots:
            snapshot.levels = [[], []]
        self._high = None

    @property
    def _end(self) -> int:
        return self._offset + len(self._steps)

    def _read(self, late: int) -> str | None:
        """Judge all but the last few observations, which a device may still compute; return a complete spike."""
        while len(self._asked) > late:
            if (spike := self._judge(*self._asked.popleft())) is not None:
                return spike
        while len(self._unread) > late:
            where, reading = self._unread.popleft()
            loss, norm = reading.values()
            if self._scaled and norm is not None and not math.isfinite(norm):
                norm = None
            reason, broken = self._levels.judge(loss, norm)
            self._alike = self._alike and reading.ranks == self._ranks.world_size
            answer = self._ranks.ask(bool(reason), broken, known=self._alike)
            self._asked.append((where, loss, norm, reason, answer))
            if not late and (spike := self._judge(*self._asked.popleft())) is not None:
                return spike
        return None

    def _judge(
        self, where: int, loss: float, norm: float | None, reason: str, answer: Callable[[], tuple[bool, bool]]
    ) -> str | None:
        """Count an observation as usual or as high; return the spike that it completes."""
        high, broken = answer()
        self._steps[where - self._offset].loss = loss
        if not high:
            self._high = None
            self._levels.add(loss, norm)
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
            past = self._snapshots[0].where - self._offset
            self._healthy = self._steps[past - 1 : past]
            del self._steps[:past]
            self._offset, self._evidence = self._snapshots[0].where, None
        due = self._end - self._snapshots[-1].where >= self.every
        if due and len(self._snapshots) < self.depth:
            # Batches that come again lie before the loader's position: the last snapshot's is before them all.
            self._take(self._snapshots[-1].loader if self._again else self._position())

    def _position(self) -> tuple[int, int, Any]:
        """Return where in its epoch the loader is, with its state if it has one."""
        loader: Any = self._loader
        try:
            state = copy.deepcopy(loader.state_dict()) if hasattr(loader, "load_state_dict") else None
        except AttributeError:  # loaders of Accelerate have the method, and a state only in some of their settings
            state = None
        return self._epoch, self._pulled, state

    def _take(self, position: tuple[int, int, Any]) -> None:
        snapshot = self._spare.pop() if self._spare else StateSnapshot(self._copier)
        snapshot.take(self._end, self._steps[-1].number + 1 if self._steps else self._number)
        snapshot.loader, snapshot.levels = position, self._levels.values()
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
        doubts = [given.doubt for step in self._steps for given in step.batches if given.doubt]
        doubts += [_LOST_DOUBT for step in innocent for given in step.batches if given.batch is _LOST]
        if any(given.was_written for step in innocent for given in step.batches):
            doubts.append("the loop writes into its batches")
        repeats = [given for step in innocent for given in step.batches if given.batch is not _LOST]
        carried = [given.between for step in suspects for given in step.batches if given.between is not None]
        if carried and (len(carried) > 1 or suspects[0].batches[0].between is None):
            doubts.append("schedulers were stepped between epochs, after the first suspect")
        again, spare = deque([*repeats, *self._again]), self._spare + self._snapshots[1:]

        def set_back() -> None:  # can be repeated: an interrupt must not leave half of it
            snapshot.restore()
            for given in again:
                given.doubt = ""
            if carried and len(again) > len(repeats):
                again[len(repeats)].between = carried[-1]
            elif carried:
                self._carried = carried[-1]
            self._snapshots, self._spare, self._again, self._steps, self._high = [snapshot], spare, again, [], None
            self._unread.clear()
            self._asked.clear()
            self._levels.load(snapshot.levels)

        to_the_end(set_back)
        doubts += snapshot.doubts
        snapshot.rewinds += 1
        incidents = self._record(suspects, reason, snapshot.number)
        skipped = tuple(step.number for step in suspects)
        rewound = Rewound(snapshot.number, skipped, reason, not doubts, incidents)
        self._evidence = snapshot, innocent, suspects
        self._report(rewound, snapshot, doubts)
        return rewound

    def _report(self, rewound: Rewound, snapshot: StateSnapshot, doubts: Sequence[str]) -> None:
        """Write the rewind to the log; raise where it is one too many, warn at the second."""
        self.rewinds.append(rewound)
        line = f"{rewound.reason}; went back to step {rewound.to_step} without steps {listed(rewound.skipped)}"
        log_line(line + (f" (not exact: {doubts[0]})" if doubts else ""))
        if len(self.rewinds) > self.max_rewinds or snapshot.rewinds > SAME_SNAPSHOT:
            count = f"there were {self.max_rewinds} rewinds before."
            if snapshot.rewinds > SAME_SNAPSHOT:
                count = f"{snapshot.rewinds} rewinds led to step {rewound.to_step}."
            table = [f"to step {one.to_step}, without {listed(one.skipped)}: {one.reason}" for one in self.rewinds]
            raise TooManyRewinds(
                "\n".join([f"Rewind: {rewound.reason}; {count}", *table]),
                why="spikes that come again are an instability of the recipe, not of some batches; everything is as "
                f"before step {rewound.to_step}.",
                fix="a lower learning rate, a longer warm-up, or gradient clipping: gg.clip_grad, clip_grad_norm_",
                rewinds=self.rewinds,
            )
        if len(self.rewinds) == 2:
            text = (
                f"Rewind: the second loss spike of this run ({rewound.reason}). Unless the data are to blame, going "
                "back hides an instability of the recipe: look at the learning rate, the warm-up and the clipping."
            )
            warnings.warn(text, GradgateWarning, stacklevel=user_level())

    def _record(self, suspects: Sequence[_Step], reason: str, to_step: int) -> tuple[Incident, ...]:
        """Record the suspects: each sample where samples have names, else each step."""
        numbers = [step.number for step in suspects]
        incidents = tuple(
            Incident(
                run=self._ledger.run if self._ledger is not None else None,
                step=step.number,
                rank=self._ranks.rank,
                world_size=self._ranks.world_size,
                sample_id=name,
                stage="step",
                cause="loss spike",
                message=reason,
                loss=step.loss,
                details={"rewound_to": to_step, "suspects": numbers},
            )
            for step in suspects
            for name in [*(name for batch in step.data for name in self._names(batch))] or (None,)
        )
        every = [incident for part in self._ranks.gather(incidents) for incident in part]
        if self._ledger is not None:
            self._ledger.record_many(every)
        return incidents

    def _names(self, batch: Batch) -> list[str]:
        if batch is _LOST:
            return []
        if self._ids is None:
            return [name for name in ids_of(batch) or () if name is not None]
        names = self._ids(batch) if callable(self._ids) else batch[self._ids]
        return [str(name) for name in (names.tolist() if isinstance(names, torch.Tensor) else names)]

    def blame(self, step_fn: Callable[..., Any], *, rows: bool = True) -> Culprits:
        """Find out which suspects of the last spike made it, by training on them again, and release the others.

        Each trial starts from the weights before the first suspect, trains on some of the suspects and then on earlier
        batches, and asks whether the loss spikes. Afterwards everything is as it was before the call. Call it when
        `observe` has returned a `Rewound`, on every rank.

        Args:
            step_fn: `step_fn(batch)` makes one training step, without `observe`, and returns its loss, or its loss and
                gradient norm. Under gradient accumulation it gets all batches of a step: `step_fn(*batches)`.
            rows: Whether to look for the samples inside a batch as well; in a single process only.

        Returns:
            Who it was. Samples that were suspects for nothing are released from the ledger.

        Raises:
            ArgumentValueError: There was no spike, or the snapshot from before it is gone.
        """
        if self._evidence is None:
            what = "Rewind.blame(): there is no spike whose snapshot is still kept."
            why = "suspects are tried from the weights before them, which are kept until the next snapshot is safe."
            raise ArgumentValueError(what, why=why, fix="if rewind.observe(loss): print(rewind.blame(step_fn))")
        snapshot, innocent, suspects = self._evidence
        if any(batch is _LOST for step in (*innocent, *suspects) for batch in step.data):
            why = "their steps cannot be repeated."
            raise ArgumentValueError("Rewind.blame(): batches from before the resume are gone.", why=why)
        now, base = StateSnapshot(self._copier), StateSnapshot(self._copier)
        now.take(0, 0)
        probes = [step.data for step in (*self._healthy, *innocent)]
        levels = self._levels.copy(snapshot.levels)
        trials = Trials(step_fn, levels, lambda *seen: self._ranks.ask(*seen)(), probes, self.patience, base)
        try:
            snapshot.restore()
            trials.begin([step.data for step in innocent])
            rows = rows and self._ranks.world_size == 1
            found = trials.blame({step.number: step.data for step in suspects}, rows=rows)
        finally:
            to_the_end(now.restore)
        self._release(suspects, found)
        return found

    def _release(self, suspects: Sequence[_Step], found: Culprits) -> None:
        guilty: set[str] = set()
        every: set[str] = set()
        for step in suspects:
            names = [name for batch in step.data for name in self._names(batch)]
            every.update(names)
            if step.number in found.steps or not found.steps:
                bad = found.rows.get(step.number)
                guilty.update(names if bad is None else (names[row] for row in bad if row < len(names)))
        found.sample_ids.extend(sorted(guilty) if found.steps else [])
        guilty.update(*self._ranks.gather(guilty))
        innocent = set().union(*self._ranks.gather(every)) - guilty
        if self._ledger is not None:
            for name in sorted(innocent):
                self._ledger.release(name, reason="not to blame for the loss spike")

    # --- checkpoints ----------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs besides the model's own checkpoint, the last safe snapshot included.

        Returns:
            Tensors and plain values; save it after `observe`, together with the parts.
        """
        if self._open and self._current is not None:
            why, fix = "its batches would be lost or given twice.", "rewind.observe(loss); state = rewind.state_dict()"
            raise ArgumentValueError("Rewind.state_dict(): a step has begun.", why=why, fix=fix)
        return {
            "number": self._number,
            "epoch": self._epoch,
            "pulled": self._pulled,
            "loader": self._position()[2],
            "offset": self._offset,
            "high": self._high,
            "steps": [[given.state() for given in step.batches] for step in self._steps],
            "again": [given.state() for given in self._again],
            "open": [given.state() for given in self._open],
            "carried": self._carried,
            # Not judged here: ranks judge together, and perhaps only one of them saves.
            "unread": [entry[:3] for entry in self._asked]
            + [(where, *reading.values()) for where, reading in self._unread],
            "snapshot": self._snapshots[0].state() if self._snapshots else None,
            **self._history(),
        }

    def _history(self) -> dict[str, Any]:
        """Return what stays valid where loader and snapshots begin anew, as plain values."""
        rewinds = [(one.to_step, list(one.skipped), one.reason, one.exact) for one in self.rewinds]
        loss, norm = self._levels.values()
        return {"loss": loss, "norm": norm, "rewinds": rewinds, "alike": self._alike}

    def _load_history(self, state: Mapping[str, Any]) -> None:
        self._levels.load((state["loss"], state["norm"]))
        self._alike = state["alike"]
        self.rewinds = [Rewound(to, tuple(skipped), why, exact) for to, skipped, why, exact in state["rewinds"]]

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where a saved run stopped; the next `batches` skips what was used and finds what is needed again.

        A loader that has `load_state_dict` is set back to the snapshot; any other must yield the same batches again.

        Args:
            state: What `state_dict` returned.

        Raises:
            ArgumentValueError: It is something else.
        """
        expected = set(Rewind(torch.nn.Identity()).state_dict())
        if set(state) != expected:
            what = f"Rewind.load_state_dict(): the entries are {sorted(map(str, state))}."
            fix = 'rewind.load_state_dict(checkpoint["rewind"])   # saved as rewind.state_dict()'
            raise ArgumentValueError(what, why=f"the state of a Rewind has the entries {sorted(expected)}.", fix=fix)
        self._number, self._epoch, self._pulled = state["number"], state["epoch"], state["pulled"]
        self._offset, self._high = state["offset"], state["high"]
        steps = [[_Given(*given) for given in step] for step in state["steps"]]
        self._steps = [_Step(step[0].number or 0, step) for step in steps]
        self._again = deque(_Given(*given) for given in state["again"])
        self._open = [_Given(*given) for given in state["open"]]
        self._carried = state["carried"]
        self._load_history(state)
        self._unread = deque((where, Reading(loss, norm)) for where, loss, norm in state["unread"])
        self._asked.clear()
        self._snapshots, self._spare, self._current, self._left = [], [], None, None
        if state["snapshot"] is not None:
            self._snapshots.append(StateSnapshot.load(self._copier, state["snapshot"]))
        self._resumed = state

    def _resume(self, loader: Iterable[Batch], state: Mapping[str, Any]) -> Iterator[Batch]:
        """Bring a fresh loader to the place of the saved one, and collect the batches that may be needed again."""
        epoch, start, saved = self._snapshots[0].loader if self._snapshots else self._position()
        if saved is None:
            start = 0
        elif hasattr(loader, "load_state_dict"):
            if epoch != self._epoch:
                start, saved = self._pulled, state["loader"]
            loader.load_state_dict(copy.deepcopy(saved))
        chance = random_state()  # whatever the loader draws now it has drawn before
        source = iter(loader)
        wanted: dict[int, list[_Given]] = {}
        for given in (*self._again, *self._open, *(given for step in self._steps for given in step.batches)):
            if given.epoch == self._epoch:
                wanted.setdefault(given.position, []).append(given)
        before = random_state()
        for position in range(start, self._pulled):
            batch = next(source, _LOST)
            for given in wanted.get(position, ()):
                given.keep(batch)
        same = same_values(before, random_state())
        set_random_state(chance)
        lost = [given for given in self._again if given.batch is _LOST]
        if lost or not same:
            self._doubt = _LOST_DOUBT
            gone = f"{len(lost)} batches that were to come again are gone" if lost else "its batches may be others"
            text = (
                f"Rewind.batches(): the loader does not give again what it gave before the resume: {gone}. It must "
                "give the same batches for each epoch (a generator seeded by the epoch) or have a state_dict."
            )
            warnings.warn(text, GradgateWarning, stacklevel=user_level())
        self._again = deque(given for given in self._again if given.batch is not _LOST)
        return source

    def __repr__(self) -> str:
        kept = "no snapshot yet"
        if self._snapshots:
            last = self._snapshots[-1]
            kept = f"snapshots of {_bytes(last.nbytes)}, the last of step {last.number}"
        return f"Rewind(step {self._number}, {len(self.rewinds)} rewind{'s' * (len(self.rewinds) != 1)}, {kept})"


# --- the pieces -------------------------------------------------------------------------------------------------------

_LOST = object()  # stands for a batch that a resumed run could not get again
_LOST_DOUBT = "a resumed run cannot get batches of before again"
_DRAWS_DOUBT = "the loader draws from the global random state; give it a generator of its own"


# What a loop does between two epochs, for each part: the new options of an optimizer, the new state of a scheduler.
Changes = list[Any]
_Outside = tuple[Changes, int, dict[str, Any]]


@dataclass(slots=True)
class _Given:
    """A batch, where its loader yielded it, and the step it belongs to."""

    number: int | None
    epoch: int
    position: int
    doubt: str = ""
    between: Changes | None = None  # what the loop did to schedulers before it
    batch: Batch = _LOST
    _tensors: list[tuple[Callable[[], torch.Tensor | None], int]] = field(default_factory=list)

    def keep(self, batch: Batch) -> None:
        """Take the batch, and note how often its tensors were written."""
        self.batch = batch
        tensors = [leaf for leaf in leaves_of(batch) if isinstance(leaf, torch.Tensor)]
        self._tensors = [(weakref.ref(tensor), write_count(tensor)) for tensor in tensors]

    @property
    def was_written(self) -> bool:
        """Whether a tensor of the batch was written in place since it was given."""
        return any((t := tensor()) is not None and write_count(t) != count for tensor, count in self._tensors)

    def state(self) -> tuple[Any, ...]:
        return self.number, self.epoch, self.position, self.doubt, self.between


def _outside(parts: Sequence[Any]) -> _Outside:
    """Take what a loop may change between two epochs, and marks of what it must not: weights and random state."""
    tensors = [tensors_of(part).values() for part in parts if isinstance(part, torch.nn.Module)]
    writes = write_counts(tensor for those in tensors for tensor in those if tensor is not None)
    return [copy_of(options_of(part)) for part in parts], writes, random_state()


def _changes(before: _Outside, now: _Outside) -> tuple[str, Changes | None]:
    """Return what cannot be repeated of the changes between two times, and what can."""
    doubt = ""
    if not same_values(now[2], before[2]):
        doubt = "random numbers were drawn between epochs"
    if now[1] != before[1]:
        doubt = "weights or buffers were changed between epochs"
    options = [None if same_values(new, old) else new for new, old in zip(now[0], before[0], strict=True)]
    return doubt, None if all(changed is None for changed in options) else options


@dataclass(slots=True)
class _Step:
    number: int
    batches: list[_Given]
    loss: float | None = None  # once it is read

    @property
    def data(self) -> list[Batch]:
        return [given.batch for given in self.batches]


class _Ranks:
    """The processes that train a model together, and what they decide together."""

    def __init__(self, modules: Sequence[torch.nn.Module]) -> None:
        self._group: distributed.ProcessGroup | None = None
        self._device: torch.device | None = None  # None for a single process
        self.rank, self.world_size = 0, 1
        if not (distributed.is_available() and distributed.is_initialized()):
            return
        for module in modules:
            replicas = [part for part in module.modules() if isinstance(part, Replica)]
            groups: list[distributed.ProcessGroup | None] = [replica.process_group for replica in replicas]
            groups += map(shard_group, shard_roots(module))
            if groups:
                self._group, modules = groups[0], [module]
                break
        else:  # a model inside DistributedDataParallel, or ranks that add up gradients by hand
            if distributed.get_world_size() == 1:
                return
        parameters = (local_part(p.detach()) for module in modules for p in module.parameters())
        self._device = next((p.device for p in parameters), torch.device("cpu"))
        self.rank, self.world_size = distributed.get_rank(self._group), distributed.get_world_size(self._group)

    def ask(self, high: bool, broken: bool, *, known: bool = False) -> Callable[[], tuple[bool, bool]]:
        """Ask all processes whether any sees a spike, unless all see the same; the answer may be taken later."""
        if self._device is None or known:
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
        if self._device is None:
            return [value]
        every: list[Any] = [None] * self.world_size
        distributed.all_gather_object(every, value, group=self._group)
        return every


def _bytes(count: int) -> str:
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count} bytes"
