"""The entries that index tensors choose: where they are, which name the same place, and how to write them back.

An *entry* is one combination of the index tensors; it chooses one place of their dimensions, and with it a block of
the others. Several entries may name one place. Then one of them, the *speaker*, writes for all: the last that is in
range. Which one that is, is found with a reduction that has the same answer in any order, so on any device.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

from gradgate import _kernels
from gradgate._torch_compat import has_data
from gradgate.edits._reading import Chooser, out_of_range
from gradgate.errors import ArgumentValueError

__all__ = ["Places"]

Done = TypeVar("Done")


class Places:
    """The places of a view that index tensors choose.

    Args:
        choosers: The index tensors, each with its dimension of the view.
        view: The view itself.
        mode: What to do with what is out of range.
        unique: The caller knows that no place is named twice (before any clipping).
    """

    def __init__(self, choosers: Sequence[Chooser], view: torch.Tensor, mode: str, unique: bool) -> None:
        dims = [chooser.dim for chooser in choosers]
        rest = [dim for dim in range(view.dim()) if dim not in dims]
        self.choosers = choosers
        self.sizes = [view.shape[dim] for dim in dims]
        self.order = dims + rest
        self.block = [view.shape[dim] for dim in rest]
        self.entries = _broadcast(choosers)
        self.count = math.prod(self.entries)
        self.front = _front(choosers, view.dim())
        self.unique = (unique and mode == "raise") or self.count <= 1
        self.indices = [_flat(chooser.tensor, self.entries) for chooser in choosers]
        self.inside: torch.Tensor | None = None
        if mode == "drop":
            self.inside = torch.ones(self.count, dtype=torch.bool, device=view.device)
            for i, size in zip(self.indices, self.sizes, strict=True):
                self.inside = self.inside & (i >= -size) & (i < size)
        if mode != "raise":
            self.indices = [i.clamp(-size, max(size - 1, 0)) for i, size in zip(self.indices, self.sizes, strict=True)]

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of `view[index]` by torch's rule: the entries where the first index was, if all stood together."""
        return (*self.block[: self.front], *self.entries, *self.block[self.front :])

    def gather(self, value: torch.Tensor) -> torch.Tensor:
        """Turn a value of that shape into one row for each entry."""
        width = len(self.entries)
        moved = _moved(value, self.front, 0, width)
        return moved if width == 1 else moved.reshape([self.count, *self.block])

    def spread(self, rows: torch.Tensor) -> torch.Tensor:
        """Turn one row for each entry into that shape again."""
        return _moved(rows.reshape([*self.entries, *self.block]), 0, self.front, len(self.entries))

    def take(self, view: torch.Tensor) -> torch.Tensor:
        """Give one row for each entry."""
        return _permuted(view, self.order)[tuple(self.indices)]

    def put(self, view: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Give a new view in which the speakers' rows stand in their places."""
        if self.inside is None and self.alone():
            return self._write(view, rows)
        speaks = _column(self.speakers() == torch.arange(self.count, device=rows.device), rows)
        if self.inside is not None:
            rows = torch.where(_column(self.inside, rows), rows, self.take(view))
        # -0.0 is what can be added to any number, -0.0 itself too, without changing it; so each place is emptied, and
        # then gets one row and otherwise nothing. Written twice over, a place could get any of its entries' rows.
        nothing = _constant(-0.0, rows)
        return self._write(self._write(view, nothing), torch.where(speaks, rows, nothing), accumulate=True)

    def add(self, view: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Give a new view to which each entry's row is added."""
        return self._write(view, self.elsewhere(rows, -0.0), accumulate=True)

    def elsewhere(self, rows: torch.Tensor, value: float | torch.Tensor) -> torch.Tensor:
        """Give the rows with another value where the entry is out of range."""
        if self.inside is None:
            return rows
        value = value if isinstance(value, torch.Tensor) else _constant(value, rows)
        return torch.where(_column(self.inside, rows), rows, value)

    def product(self, rows: torch.Tensor) -> torch.Tensor:
        """Give rows in which each speaker's is the product of the rows of its place.

        A prefix product within each place, by doubling: plain multiplications, so the gradient is exact at zeros too,
        to any order, which a quotient of products is not.
        """
        rows = self.elsewhere(rows, 1)
        if self.alone():
            return rows
        order = torch.argsort(self.speakers(), stable=True)
        place, run = self.speakers()[order], rows[order]
        shift = 1
        while shift < self.count:
            same = _column(place[shift:] == place[:-shift], rows)
            before = torch.where(same, run[:-shift], _constant(1, rows))
            run = torch.cat([run[:shift], before * run[shift:]])
            shift *= 2
        return run[torch.argsort(order)]

    def extreme(self, old: torch.Tensor, rows: torch.Tensor, which: str) -> torch.Tensor:
        """Give rows in which each speaker's is the largest ("amax") or smallest of its place, the old value included.

        The gradient is shared evenly by all that are equal to it, the old value included; the others get exactly 0.
        """
        if not self.count:
            return rows
        place = self.speakers()
        if self.inside is not None:
            place = torch.where(self.inside, place, self.count)  # a row more, for what is out of range
            old = torch.cat([old, old[:1]])
        place = _column(place, rows).expand(rows.shape)
        best = old.detach().scatter_reduce(0, place, rows.detach(), which)
        # Cut before the reduction: after it a loser's gradient is 0 times what arrives, which may be NaN.
        old = torch.where(old == best, old, old.detach())
        rows = torch.where(rows == best.gather(0, place), rows, rows.detach())
        return old.scatter_reduce(0, place, rows, which)[: self.count]

    def rounds(self) -> list[Places]:
        """Give the entries in as many parts as some place is named, no place twice in a part."""
        inside = self.inside
        if inside is None and self.alone():
            return [self]
        if not has_data(*self.indices):
            raise ArgumentValueError(
                "at(x)[...].apply(): whether an index is out of range or named twice cannot be read here.",
                why="fn is applied to what is in range, as often as it is named; torch.compile and vmap hide that.",
                fix='gg.at(x)[index].apply(fn, mode="raise", unique_indices=True)',
            )
        order = torch.argsort(self.speakers(), stable=True)
        place, number = self.speakers()[order], torch.arange(self.count, device=order.device)
        begins = torch.cat([place.new_ones(1, dtype=torch.bool), place[1:] != place[:-1]])
        turn = (number - torch.where(begins, number, 0).cummax(0).values)[torch.argsort(order)]
        turn = turn if inside is None else torch.where(inside, turn, -1)
        return [self._only(turn == now) for now in range(int(turn.max()) + 1 if self.count else 0)]

    def speakers(self) -> torch.Tensor:
        """Give for each entry the entry that writes its place: the last one in range, or the last one if none is."""
        number = torch.arange(self.count, device=self.indices[0].device)
        if self.unique:
            return number
        rank = number if self.inside is None else number + self.inside * self.count
        key = self._key()
        # What was there before does not count, so the memory need not be cleared.
        owner = key.new_empty(math.prod(self.sizes)).scatter_reduce(0, key, rank, "amax", include_self=False)
        return owner.gather(0, key) % self.count

    @property
    def nowhere(self) -> bool:
        """Whether a dimension has no place at all, so that every entry is out of range and dropped."""
        return self.inside is not None and 0 in self.sizes

    def tried(self, work: Callable[[], Done]) -> Done:
        """Do something; if torch refuses an index, say which. Checking beforehand would cost on every healthy call."""
        try:
            return work()
        except (IndexError, RuntimeError):
            self._explain()
            raise

    def _explain(self) -> None:
        for chooser, size in zip(self.choosers, self.sizes, strict=True):
            if has_data(chooser.tensor):
                wrong = chooser.tensor[(chooser.tensor < -size) | (chooser.tensor >= size)]
                if wrong.numel():
                    raise out_of_range("at(x)[...]", int(wrong[0]), chooser.dim_of_x, size)

    def _only(self, chosen: torch.Tensor) -> Places:
        """Give the same places with some of the entries, as one row of entries, none twice."""
        less = object.__new__(Places)
        less.__dict__.update(self.__dict__)
        less.indices = [i[chosen] for i in self.indices]
        less.count = len(less.indices[0])
        less.entries, less.unique, less.inside = (less.count,), True, None
        return less

    def _write(self, view: torch.Tensor, rows: torch.Tensor, accumulate: bool = False) -> torch.Tensor:
        new = _permuted(view, self.order).index_put(tuple(self.indices), rows, accumulate=accumulate)
        return _permuted(new, [self.order.index(dim) for dim in range(view.dim())])

    def alone(self) -> bool:
        """Tell whether surely no place is named twice. Looks only where looking waits for nothing: on the CPU."""
        if not self.unique and 0 not in self.sizes and self.indices[0].device.type == "cpu":
            if _kernels.usable(*self.indices):
                single = len(self.indices) == 1
                size = self.sizes[0] if single else math.prod(self.sizes)
                self.unique = not _kernels.repeats(self.indices[0] if single else self._key(), size)
            elif has_data(*self.indices):
                key = self._key()
                number = torch.arange(self.count, dtype=torch.int32, device=key.device)
                owner = key.new_empty(math.prod(self.sizes), dtype=torch.int32).scatter_(0, key, number)
                self.unique = torch.equal(owner.gather(0, key), number)
        return self.unique

    def _key(self) -> torch.Tensor:
        """Give one number for each entry's place."""
        key = self.indices[0] % self.sizes[0]
        for i, size in zip(self.indices[1:], self.sizes[1:], strict=True):
            key = key * size + i % size
        return key


def _column(per_entry: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Give an answer for each entry the dimensions to broadcast over the entry's row."""
    return per_entry.reshape(-1, *[1] * (rows.dim() - 1))


def _constant(value: float, like: torch.Tensor) -> torch.Tensor:
    """Give a number in a dtype; a bare number would promote a bool."""
    return torch.full((), value, dtype=like.dtype, device=like.device)


def _flat(tensor: torch.Tensor, entries: tuple[int, ...]) -> torch.Tensor:
    return tensor if len(entries) == 1 and tensor.shape == entries else tensor.expand(entries).reshape(-1)


def _permuted(tensor: torch.Tensor, order: list[int]) -> torch.Tensor:
    return tensor if order == sorted(order) else tensor.permute(order)


def _moved(tensor: torch.Tensor, start: int, end: int, width: int) -> torch.Tensor:
    """Move some dimensions that stand together."""
    if start == end or not width:
        return tensor
    return tensor.movedim(tuple(range(start, start + width)), tuple(range(end, end + width)))


def _broadcast(choosers: Sequence[Chooser]) -> tuple[int, ...]:
    if len(choosers) == 1:  # torch's own function takes its time
        return tuple(choosers[0].tensor.shape)
    shapes = [tuple(chooser.tensor.shape) for chooser in choosers]
    try:
        return tuple(torch.broadcast_shapes(*shapes))  # type: ignore[no-untyped-call]
    except RuntimeError:
        raise ArgumentValueError(
            f"at(x)[...]: the index tensors have shapes {', '.join(map(str, shapes))}, which do not broadcast.",
            why="together they name one place for each entry.",
            fix="gg.at(x)[i[:, None], j]   # every i with every j",
        ) from None


def _front(choosers: Sequence[Chooser], width: int) -> int:
    """Find how many other dimensions stand before the entries in `view[index]`.

    An index tensor without dimensions chooses like an int: its dimension is gone before the question is asked.
    """
    if len(choosers) == 1:
        return choosers[0].dim
    kept = [dim for dim in range(width) if dim not in (c.dim for c in choosers if not c.tensor.dim())]
    spots = [kept.index(c.dim) for c in choosers if c.tensor.dim()]
    together = spots and spots == list(range(spots[0], spots[0] + len(spots)))
    return spots[0] if together else 0
