"""Ranks that each have a part of every parameter, in FSDP2 (`fully_shard`).

A healthy step is FSDP2's own, with a record of its collectives: which unit of parameters was gathered or reduced, in
which order. A rank that raises in the middle of a step knows from the last steps what the others still wait for, and
takes part in it: with its shards in gathers, with zeros in reductions.

Where that order is not known - in the first step, and in a search, in which ranks run different things - each
collective is announced: one small sum says which units are needed, and all ranks take part in the gather of each. A
rank that needs none follows until no rank needs any, so each can run the model as often as it needs to.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import Enum
from functools import partial
from time import perf_counter
from typing import Any

import torch
from torch import distributed

from gradgate._state import TrainingState
from gradgate._text import user_level
from gradgate._torch_distributed import adds_gradients, collectives_made, reset_shards, shard_units, start_shards
from gradgate._torch_private import local_part
from gradgate.errors import ArgumentTypeError, GradgateWarning, OtherRankError
from gradgate.guard.distributed._ranks import Ranks, Share


class _Mode(Enum):
    """What the collectives of a pass through the model are for."""

    KNOWN = "a step whose order of collectives is known"
    ANNOUNCED = "a step that announces each collective"
    SEARCH = "passes of single ranks: announced gathers, no reductions"


class Shards(Ranks):
    """The agreement of ranks that have shards of a model."""

    # A collective is a number: 2 * unit for a gather, 2 * unit + 1 for a reduction.

    has_whole_weights = False

    def __init__(self, roots: Sequence[Any], group: distributed.ProcessGroup | None, state: TrainingState) -> None:
        self._roots = list(roots)
        super().__init__(group, next(iter(roots[0].parameters())).device)
        if adds_gradients(group):
            text = (
                "Guard(): FSDP2 before torch 2.9 adds the gradients of ranks over Gloo and does not divide them.\n"
                "Why: Gloo averages from torch 2.9 on; until then float32 gradients are "
                f"{self.world_size} times too large, with the guard and without it.\nFix: pip install 'torch>=2.9'"
            )
            warnings.warn(text, GradgateWarning, stacklevel=user_level())
        self._units = shard_units(self._roots)
        self._state = state
        state.reset_model = self._reset
        self._orders: dict[tuple[object, ...], list[int] | None] = {}
        self._settings: tuple[object, ...] = ()
        self._mode = _Mode.SEARCH
        self._made: list[int] = []
        self._has_earlier = False
        self._nonfinite = False  # whether the last pass of a search has made a gradient that is not finite
        self.longest_pause = self._since = 0.0
        """The longest time between two gathers of the last pass, in seconds."""
        self._counts = self._learns = self._changed = self._played = False

    @contextmanager
    def apart(self, *, training: bool) -> Iterator[None]:
        """Watch every collective of the model, as long as the block lasts."""
        start_shards(self._roots)
        if not self._expected:
            self._state.refresh()  # FSDP2 may just have replaced a parameter
        for unit in self._units:
            if obstacle := unit.obstacle:
                why = "a rank that raises must take part in what the others do, and the guard does not know how."
                fix = "fully_shard(module, reshard_after_forward=True)   # or False; all-reduce in every backward"
                raise ArgumentTypeError(f"Guard: the model has {obstacle}.", why=why, fix=fix)
        self._settings = tuple(unit.settings for unit in self._units)
        self._has_earlier = sum(unit.lay_aside() for unit in self._units) > 0
        self._mode, self.broken = _Mode.SEARCH, False
        for number, unit in enumerate(self._units):
            unit.watch(partial(self._gather, 2 * number), partial(self._reduce, 2 * number + 1))
        try:
            yield
            if not training:
                self._reset()
                self.follow()
        except BaseException as error:
            if not training and not self.broken:
                self._reset()
                self.follow(failed=not isinstance(error, OtherRankError))
            raise
        finally:
            for unit in self._units:
                unit.unwatch()
                unit.put_back()

    def gathered(self) -> set[torch.Tensor]:
        """Return the whole parameters that FSDP2 has in place of the shards while the model runs."""
        return {parameter for unit in self._units for parameter in unit.gathered}

    def _reset(self) -> None:
        reset_shards(self._roots, self._units, broken=self.broken)
        self._nonfinite = False

    def trained(self) -> list[torch.Tensor]:
        return [parameter for unit in self._units for parameter in unit.trained]

    # --- One pass of all ranks, and its result

    def begin(self, *, known: bool, counts: bool) -> None:
        """Start a step of all ranks; its order of collectives may be known, and they may be counted."""
        self.made, self._counts = 0, counts
        self.longest_pause, self._since = 0.0, perf_counter()
        self._made, self._learns, self._changed, self._played = [], known, False, False
        self._mode = _Mode.KNOWN if known and self._orders.get(self._settings) else _Mode.ANNOUNCED

    def complete(self, *, failed: bool) -> None:
        """Take part in what is left of the others' step, after this rank's own has ended or failed."""
        self._end_pause()
        if self._mode is _Mode.KNOWN:
            order = self._orders[self._settings]
            assert order is not None
            count = len(self._made)
            if self._made != order[:count]:
                self._changed = True
                if failed:
                    self.broken = True
                    what = f"rank {self.rank} raised in a step that gathers its parameters in another order"
                    why = "it cannot know what the other ranks still do; they wait for it until their timeout."
                    fix = "# see the exception before this one; then start all ranks again from a checkpoint"
                    raise OtherRankError(f"Guard: {what} than before.", why=why, fix=fix)
            for code in order[count:]:
                self._played, self._changed = True, not failed
                self._take_part(code)
        else:
            self._played = failed
            self.follow()

    def search(self) -> None:
        """Let every rank run the model as it likes, until it follows."""
        self._mode = _Mode.SEARCH

    def weight(self, size: int, *, by_total: bool) -> float:
        """Return what this rank's loss is multiplied with, so that the mean over ranks is that over samples."""
        return 1.0 if by_total else size * self.world_size / self._expected

    def has_nonfinite(self, gradients: list[torch.Tensor], loss: torch.Tensor | None = None) -> bool:
        """Look at shards, at gradients that wait to be reduced, and at what a search has noted."""
        local = [local_part(gradient) for gradient in gradients] + self._whole_gradients()
        return super().has_nonfinite(local, loss) or self._nonfinite

    def _whole_gradients(self) -> list[torch.Tensor]:
        """Return this rank's own gradients, which wait for a later step to be reduced."""
        return [gradient for unit in self._units for gradient in unit.whole_gradients()]

    def exchange(self, share: Share, state: TrainingState, *, in_haste: bool = False) -> Share:
        """Add the shares of all ranks, and learn the order of collectives."""
        share.earlier, share.changed, share.played = self._has_earlier, self._changed, self._played
        present = [there for unit in self._units for there in unit.present()]
        totals = self.add_up(share, present, in_haste=in_haste)
        if not totals.failed and not totals.stale:
            if totals.changed:
                self._orders[self._settings] = None  # never the same: announced from now on
            elif self._mode is _Mode.ANNOUNCED and self._learns:
                self._orders.setdefault(self._settings, self._made)
        return totals

    def settle(self, share: Share, totals: Share, state: TrainingState) -> None:
        """Correct the means of all ranks by their samples; while accumulating, keep this rank's part in them."""
        factor = self.world_size if totals.by_total else self._expected / totals.kept
        self._expected = totals.kept
        if factor != 1:
            reduced = [local_part(parameter.grad) for parameter in self.trained() if parameter.grad is not None]
            for gradient in self._whole_gradients() + reduced:
                gradient.mul_(factor)
        reduces = totals.earlier and any(unit.reduces for unit in self._units)
        for unit in self._units:
            unit.put_back()
            if reduces:
                with self._unbroken():
                    unit.reduce()
        if reduces or totals.played:
            reset_shards(self._roots, self._units, drop=False)
        if totals.present is not None:
            for parameter, there in zip(self.trained(), totals.present, strict=True):
                parameter.grad = parameter.grad if there else None  # zeros, if no rank has any
        state.add_earlier_gradients()

    # --- Collectives

    def _gather(self, code: int, gather: Callable[[], None]) -> None:
        """Gather a unit that this rank's pass needs now."""
        before = collectives_made() if self._counts else 0
        self._end_pause()
        with self._unbroken():
            if self._mode is _Mode.KNOWN:
                self._made.append(code)
                gather()
            else:
                self._announce(code, gather)
        self._since = perf_counter()
        if self._counts:
            self.made += collectives_made() - before

    def _end_pause(self) -> None:
        self.longest_pause = max(self.longest_pause, perf_counter() - self._since)

    def _reduce(self, code: int) -> None:
        """Prepare the gradients of a unit, which FSDP2 reduces next."""
        unit = self._units[code // 2]
        if self._mode is _Mode.SEARCH:
            self._nonfinite = self._nonfinite or super().has_nonfinite(unit.whole_gradients())
            unit.drop()
            return
        unit.note_present()
        if unit.reduces:
            unit.fill()
            with self._unbroken():
                if self._mode is _Mode.KNOWN:
                    self._made.append(code)
                else:
                    self._announce(code, None)

    def follow(self, *, failed: bool = False) -> bool:
        """Take part in what others announce until nobody does any more; return whether somebody has failed."""
        with self._unbroken():
            return self._announce(None, None, failed=failed)

    def _announce(self, wanted: int | None, gather: Callable[[], None] | None, *, failed: bool = False) -> bool:
        """Announce what this rank needs, and take part in what others need, until it has that."""
        following = 2 * len(self._units)
        while True:
            numbers = torch.zeros(following + 2, dtype=torch.int64)
            numbers[following if wanted is None else wanted] = 1
            numbers[following + 1] = int(failed)
            self.add(numbers := numbers.to(self.device))
            counts = numbers.tolist()
            if counts[following] == self.world_size:
                return bool(counts[following + 1])
            codes = [code for code in range(following) if counts[code]]
            gathers = [code for code in codes if code % 2 == 0]
            if not gathers and (len(codes) > 1 or counts[codes[0]] + counts[following] < self.world_size):
                what = "Guard: the ranks reduce the gradients of different parts of the model."
                why = "FSDP2 needs the same parts in the same order on every rank."
                raise OtherRankError(what, why=why, fix="# run the same modules on every rank")
            for code in gathers or codes:
                self._made.append(code)
                if code != wanted:
                    self._take_part(code)
                elif gather is not None:
                    gather()
            if wanted in (gathers or codes):
                return False

    def _take_part(self, code: int) -> None:
        """Take part in a collective of which this rank needs nothing."""
        unit = self._units[code // 2]
        with self._unbroken():
            if code % 2:
                unit.reduce()
            else:
                unit.lend()

    @contextmanager
    def _unbroken(self) -> Iterator[None]:
        """Remember that a collective has failed."""
        try:
            with self.talking():
                yield
        except BaseException:
            self.broken = True
            raise
