"""Batches that can be asked for again: to fill them up, after the death of a worker, or to resume an epoch.

A batch with a bad sample is asked for again, without it and with the next one. The samples keep the order of the
sampler. So when a batch turns out to have a bad sample, everything that was asked for after it belongs to other
batches now: it is asked for again as well, and what the workers have already begun is thrown away when it arrives. That
costs on the bad batch only. What they have found out about bad samples is kept.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch.utils.data import BatchSampler, Sampler

from gradgate._names import describe
from gradgate.errors import ArgumentValueError


class Position(NamedTuple):
    """Where an epoch is: after so many batches, at this place of its order, with these bad places to come."""

    batches: int = 0
    place: int = 0
    bad: tuple[int, ...] = ()


class Order(list[Any]):
    """The indices of a batch as a worker gets them, and their places in the order of the epoch."""

    def __init__(self, indices: Iterable[Any], places: tuple[int, ...], number: int, round: int) -> None:
        super().__init__(indices)
        self.places, self.number, self.round = places, number, round


class Counted:
    """The batches of one epoch where none can be asked for again: of a stream, or in no order."""

    def __init__(self, position: Position, requests: Requests | None = None) -> None:
        self.settled = position
        self.random: Sequence[torch.Tensor] = ()  # the states of the generators that the epoch began with
        self._requests = requests

    def received(self) -> Order | None:
        """Return what the batch that has just arrived was asked for, where that is known."""
        if self._requests is not None:
            self._requests.forget(self._requests.received())  # whichever it was: none is asked for again
        return None

    def mark_bad(self, asked: Order | None, rows: Iterable[int]) -> list[int]:
        """Leave samples of a batch out of all that is still to be asked for; give the rows that are news."""
        return list(rows)

    def settles(self, asked: Order | None, has_bad: bool) -> bool:
        """Return whether a batch can be given out: its samples are not asked for again."""
        self.settled = Position(self.settled.batches + 1)
        return True


class Requests(Counted):
    """The batches to ask for in one epoch, in order; can go back."""

    def __init__(
        self,
        groups: Iterator[list[Any]],
        size: int | None = None,
        *,
        drop_last: bool = False,
        refill: bool = True,
        start: Position | None = None,
    ) -> None:
        super().__init__(start or Position())
        self._groups, self._size, self._drop_last = groups, size, drop_last
        self._refill, self._start = refill, start
        # By place, those that were drawn and may be asked for: a sampler may be endless.
        self.indices: dict[int, Any] = {}
        self._drawn = 0
        self._sizes: list[int] = []
        self._waiting: deque[int] = deque()  # places not asked for yet, in order
        self._flying: deque[Order] = deque()
        self._bad: set[int] = set()
        self._number = self._round = 0

    def __iter__(self) -> Requests:
        return self

    def begin(self) -> None:
        """Pass over what was given in an earlier run; nothing is drawn for an epoch that begins."""
        start, self._start = self._start, None
        if start is None:
            return
        more = self._pull()  # at least once: the order is drawn with the first index
        while more and self._drawn < start.place:
            more = self._pull()
        for _ in range(min(start.place, len(self._waiting))):
            del self.indices[self._waiting.popleft()]
        self._number = start.batches
        self._bad.update(start.bad)

    def __next__(self) -> Order:
        self.begin()
        places = self._take()
        if not places:
            raise StopIteration
        order = Order([self.indices[place] for place in places], tuple(places), self._number, self._round)
        self._flying.append(order)
        self._number += 1
        return order

    def received(self) -> Order:
        return self._flying.popleft()  # they arrive in order

    def settles(self, asked: Order | None, has_bad: bool) -> bool:
        assert asked is not None
        if asked.round != self._round or (has_bad and self._refill and self._go_back(asked)):
            return False
        place = asked.places[-1] + 1
        self.settled = Position(asked.number + 1, place, tuple(sorted(one for one in self._bad if one >= place)))
        self.forget(asked)
        return True

    def forget(self, order: Order) -> None:
        """Keep nothing about a batch that is not asked for again."""
        for place in order.places:
            del self.indices[place]

    def ask_again(self) -> list[Order]:
        """Ask again for all that is under way, because it is lost; give what that was."""
        under_way = list(self._flying)
        self._flying.clear()
        lost = [order for order in under_way if order.round == self._round]
        if lost:
            self._put_back(place for order in lost for place in order.places)
            self._number = lost[0].number
        return under_way

    def mark_bad(self, asked: Order | None, rows: Iterable[int]) -> list[int]:
        assert asked is not None
        news = [row for row in rows if asked.places[row] not in self._bad]
        self._bad.update(asked.places[row] for row in news)
        return news

    def more(self) -> bool:
        """Return whether there is something left to ask for."""
        places = self._take()
        self._put_back(places)
        return bool(places)

    def _go_back(self, asked: Order) -> bool:
        """Ask again for the good samples of a batch and for all after it, if there are any after it."""
        self._put_back(place for order in self._flying if order.round == self._round for place in order.places)
        while self._waiting or self._pull():
            if self._waiting[0] not in self._bad:
                self._put_back(asked.places)
                self._number = asked.number
                self._round += 1
                return True
            self._waiting.popleft()
        return False

    def _put_back(self, places: Iterable[int]) -> None:
        self._waiting.extendleft(reversed(list(places)))

    def _take(self) -> list[int]:
        """Take the places of the next batch; none if there is no batch left."""
        while len(self._sizes) <= self._number and self._pull():
            pass
        size = self._sizes[self._number] if self._number < len(self._sizes) else 1
        places: list[int] = []
        while len(places) < size and (self._waiting or self._pull()):
            taken = [self._waiting.popleft() for _ in range(min(size - len(places), len(self._waiting)))]
            places += [place for place in taken if place not in self._bad] if self._bad else taken
        if len(places) < size and self._drop_last:
            self._put_back(places)
            return []
        return places

    def _pull(self) -> bool:
        group = next(self._groups, None)
        if group is None:
            return False
        places = range(self._drawn, self._drawn + len(group))
        self._waiting.extend(places)
        self.indices.update(zip(places, group, strict=True))
        self._drawn += len(group)
        self._sizes.append(self._size or len(group))
        return True


class Asking(Sampler[list[Any]]):
    """A batch sampler, or a sampler of single indices, whose batches can be asked for again."""

    def __init__(self, batches: Any, *, refill: bool, single: bool = False) -> None:
        self._batches = batches
        self._refill = refill and not single
        self.single = single
        self.requests: Requests | None = None
        self.start: Position | None = None
        self._resume = False

    def begin(self, loader: Iterable[Any], requests: Requests | None = None) -> tuple[Iterator[Any], Requests]:
        """Iterate over the loader that has this sampler, for a new epoch or for the rest of one."""
        self.requests, self._resume = requests, requests is not None
        # Starting a loader draws a seed. In mid-epoch it is put back, so that later epochs have the order that they
        # would have had.
        generator = getattr(loader, "generator", None) or torch.default_generator
        state = generator.get_state() if self._resume else None
        try:
            batches = iter(loader)  # torch may ask the sampler more than once for an iterator
        finally:
            self._resume, self.start = False, None
            if state is not None:
                generator.set_state(state)
        assert self.requests is not None
        return batches, self.requests

    def to_the_end(self, batches: Iterator[Any], loader: Iterable[Any], requests: Requests) -> Iterator[Any]:
        """Go on where the loader came to its end before it was known that there is something to ask for again."""
        yield from batches
        while requests.more():
            yield from self.begin(loader, requests)[0]

    def __iter__(self) -> Iterator[list[Any]]:
        if not self._resume or self.requests is None:
            self.requests = self.new()
        return self.requests

    def __len__(self) -> int:
        return len(self._batches)

    def new(self) -> Requests:
        batches = self._batches
        if self._refill and type(batches) is BatchSampler:
            size = batches.batch_size
            return Requests(_chunks(batches.sampler, size), size, drop_last=batches.drop_last, start=self.start)
        groups = ([index] for index in batches) if self.single else filter(None, map(list, batches))
        drop_last = self._refill and getattr(batches, "drop_last", False)
        return Requests(groups, drop_last=drop_last, refill=self._refill, start=self.start)


def _chunks(sampler: Iterable[Any], size: int) -> Iterator[list[Any]]:
    # The sampler is not touched before the first index is needed, as in torch: its random numbers come in that order.
    indices = iter(sampler)
    while chunk := list(islice(indices, size)):
        yield chunk


def generators_of(owner: Any) -> list[torch.Generator]:
    """List the generators that the order of an epoch is drawn from: torch's own, those of a loader and its samplers."""
    found = [torch.default_generator]
    waiting = [owner]
    while waiting:
        one = waiting.pop()
        if isinstance(generator := getattr(one, "generator", None), torch.Generator) and generator not in found:
            found.append(generator)
        waiting += [inner for name in ("sampler", "batch_sampler") if (inner := getattr(one, name, None)) is not None]
    return found


def random_states(owner: Any) -> list[torch.Tensor]:
    return [generator.get_state() for generator in generators_of(owner)]


@contextmanager
def drawn_again(owner: Any, states: Sequence[torch.Tensor]) -> Iterator[None]:
    """Let a block draw what an earlier run has drawn; torch's own generator is as before afterwards."""
    now = torch.get_rng_state()
    try:
        for generator, state in zip(generators_of(owner), states, strict=True):
            generator.set_state(state)
        yield
    finally:
        torch.set_rng_state(now)


def check_state(owner: str, state: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    """Refuse a state that is not of this kind."""
    if set(state) != set(own):
        what, why = f"{owner}.load_state_dict(): the state is {describe(state)}.", f"it has the entries {sorted(own)}."
        fix = "load_state_dict(checkpoint[...])   # what state_dict() of the same kind gave"
        raise ArgumentValueError(what, why=why, fix=fix)
