"""Writing at the places that index tensors choose: where they are, which entries name the same one, and how to write.

An *entry* is one combination of the index tensors; it chooses one place of their dimensions, and with it a block of
the others. Several entries may name one place. Then one of them, the *speaker*, writes for all: the last that is in
range. A reduction that has the same result in any order, so on any device, finds it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from copy import copy
from functools import partial
from typing import Any, TypeVar

import torch

from gradgate import _kernels
from gradgate._names import describe
from gradgate._torch_private import has_data
from gradgate.edits._index import AdvancedIndex, as_value, fit, out_of_range
from gradgate.errors import ArgumentTypeError, ArgumentValueError

Done = TypeVar("Done")


class Scatter:
    """The places of a view that index tensors choose."""

    def __init__(self, advanced: Sequence[AdvancedIndex], view: torch.Tensor, mode: str, unique: bool) -> None:
        unique = unique or all(one.is_mask() for one in advanced)
        self.advanced = _as_index_tensors(advanced)
        dims = [one.dim for one in self.advanced]
        rest = [dim for dim in range(view.dim()) if dim not in dims]
        self.sizes = [view.shape[dim] for dim in dims]
        self.order = dims + rest
        self.block = [view.shape[dim] for dim in rest]
        self.entries = _broadcast([tuple(one.tensor.shape) for one in self.advanced])
        self.count = math.prod(self.entries)
        self.front = _front(self.advanced, view.dim())
        self.unique = (unique and mode == "raise") or self.count <= 1
        self.indices = [_flat(one.tensor, self.entries) for one in self.advanced]
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
        moved = _moved(value, self.front, 0, len(self.entries))
        return moved if len(self.entries) == 1 else moved.reshape([self.count, *self.block])

    def spread(self, rows: torch.Tensor) -> torch.Tensor:
        """Turn one row for each entry into that shape again."""
        return _moved(rows.reshape([*self.entries, *self.block]), 0, self.front, len(self.entries))

    def take(self, view: torch.Tensor) -> torch.Tensor:
        return _permuted(view, self.order)[tuple(self.indices)]

    def put(self, view: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Return a new view with the speakers' rows in their places."""
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
        """Return a new view to which each entry's row is added."""
        return self._write(view, self.elsewhere(rows, -0.0), accumulate=True)

    def elsewhere(self, rows: torch.Tensor, value: float | torch.Tensor) -> torch.Tensor:
        """Replace the rows of entries that are out of range."""
        if self.inside is None:
            return rows
        value = value if isinstance(value, torch.Tensor) else _constant(value, rows)
        return torch.where(_column(self.inside, rows), rows, value)

    def product(self, rows: torch.Tensor) -> torch.Tensor:
        """Return rows in which each speaker's is the product of the rows of its place."""
        # A prefix product within each place, by doubling: plain multiplications, so the gradient is exact at zeros too,
        # to any order, which a quotient of products is not.
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
        """Return rows in which each speaker's is the largest ("amax") or smallest of its place and the old value."""
        # The gradient is shared evenly by all that are equal to it, the old value included; the others get exactly 0.
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

    def rounds(self) -> list[Scatter]:
        """Divide the entries into as many parts as some place is named, no place twice in a part."""
        inside = self.inside
        if inside is None and self.alone():
            return [self]
        if not has_data(*self.indices):
            what = "at(x)[...].apply(): whether an index is out of range or named twice cannot be read here."
            why = "fn is applied to what is in range, as often as it is named; torch.compile and vmap hide that."
            raise ArgumentValueError(what, why=why, fix='gg.at(x)[index].apply(fn, mode="raise", unique_indices=True)')
        order = torch.argsort(self.speakers(), stable=True)
        place, number = self.speakers()[order], torch.arange(self.count, device=order.device)
        begins = torch.cat([place.new_ones(1, dtype=torch.bool), place[1:] != place[:-1]])
        turn = (number - torch.where(begins, number, 0).cummax(0).values)[torch.argsort(order)]
        if inside is None and not turn.any():
            return [self]
        turn = turn if inside is None else torch.where(inside, turn, -1)
        return [self._only(turn == now) for now in range(int(turn.max()) + 1 if self.count else 0)]

    def speakers(self) -> torch.Tensor:
        """Find for each entry the entry that writes its place: the last one in range, or the last one if none is."""
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
        """Run some work; if torch refuses an index, name it. Checking beforehand would cost on every healthy call."""
        try:
            return work()
        except (IndexError, RuntimeError):
            self._explain()
            raise

    def _explain(self) -> None:
        for (_, dim, tensor), size in zip(self.advanced, self.sizes, strict=True):
            if has_data(tensor) and (wrong := tensor[(tensor < -size) | (tensor >= size)]).numel():
                raise out_of_range("at(x)[...]", int(wrong[0]), dim, size)

    def _only(self, chosen: torch.Tensor) -> Scatter:
        """Keep some of the entries, none twice."""
        less = copy(self)
        less.indices = [i[chosen] for i in self.indices]
        less.count = len(less.indices[0])
        less.entries, less.unique, less.inside = (less.count,), True, None
        return less

    def _write(self, view: torch.Tensor, rows: torch.Tensor, accumulate: bool = False) -> torch.Tensor:
        new = _permuted(view, self.order).index_put(tuple(self.indices), rows, accumulate=accumulate)
        return _permuted(new, [self.order.index(dim) for dim in range(view.dim())])

    def alone(self) -> bool:
        """Whether surely no place is named twice; reads the index only where that waits for nothing, on the CPU."""
        if self.unique or 0 in self.sizes or not self.indices[0].is_cpu:
            return self.unique
        if _kernels.usable(*self.indices):
            key = self.indices[0] if len(self.indices) == 1 else self._key()
            self.unique = not _kernels.repeats(key, math.prod(self.sizes))
        elif has_data(*self.indices):
            key, number = self._key(), torch.arange(self.count)
            owner = key.new_empty(math.prod(self.sizes)).scatter_(0, key, number)
            self.unique = torch.equal(owner.gather(0, key), number)
        return self.unique

    def _key(self) -> torch.Tensor:
        key = self.indices[0] % self.sizes[0]
        for i, size in zip(self.indices[1:], self.sizes[1:], strict=True):
            key = key * size + i % size
        return key


def _column(per_entry: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Return a tensor of one value per entry the dimensions to broadcast over the entry's row."""
    return per_entry.reshape(-1, *[1] * (rows.dim() - 1))


def _constant(value: float, like: torch.Tensor) -> torch.Tensor:
    # A bare number would promote a bool.
    return torch.full((), value, dtype=like.dtype, device=like.device)


def _flat(tensor: torch.Tensor, entries: tuple[int, ...]) -> torch.Tensor:
    return tensor if len(entries) == 1 and tensor.shape == entries else tensor.expand(entries).reshape(-1)


def _permuted(tensor: torch.Tensor, order: list[int]) -> torch.Tensor:
    return tensor if order == sorted(order) else tensor.permute(order)


def _moved(tensor: torch.Tensor, start: int, end: int, width: int) -> torch.Tensor:
    if start == end:
        return tensor
    return tensor.movedim(tuple(range(start, start + width)), tuple(range(end, end + width)))


def _as_index_tensors(advanced: Sequence[AdvancedIndex]) -> list[AdvancedIndex]:
    """Return masks as index tensors, one for each of their dimensions."""
    if not any(one.is_mask() for one in advanced):
        return list(advanced)
    found = []
    for one in advanced:
        tensors = one.tensor.nonzero(as_tuple=True) if one.is_mask() else [one.tensor]
        found += [AdvancedIndex(one.dim + i, one.dim_of_x + i, tensor) for i, tensor in enumerate(tensors)]
    return found


def _broadcast(shapes: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    if len(shapes) == 1:  # torch's own function takes its time
        return shapes[0]
    try:
        return tuple(torch.broadcast_shapes(*shapes))  # type: ignore[no-untyped-call]
    except RuntimeError:
        what = f"at(x)[...]: the index tensors have shapes {', '.join(map(str, shapes))}, which do not broadcast."
        why = "together they name one place for each entry."
        raise ArgumentValueError(what, why=why, fix="gg.at(x)[i[:, None], j]   # every i with every j") from None


def _front(advanced: Sequence[AdvancedIndex], width: int) -> int:
    """Count the other dimensions before the entries in `view[index]`."""
    if len(advanced) == 1:
        return advanced[0].dim
    # An index tensor without dimensions chooses like an int: its dimension is gone already.
    kept = [dim for dim in range(width) if dim not in (one.dim for one in advanced if not one.tensor.dim())]
    spots = [kept.index(one.dim) for one in advanced if one.tensor.dim()]
    together = spots and spots == list(range(spots[0], spots[0] + len(spots)))
    return spots[0] if together else 0


# --- What each edit does --------------------------------------------------------------------------------------------


Binary = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
OnEntries = Callable[[Scatter, torch.Tensor, torch.Tensor], torch.Tensor]


def second(old: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Take the value: the rule of `set`."""
    return value


def _better(better: Binary, old: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Take the smaller or larger of two; equal ones share the gradient, and of a NaN neither gets any, as in JAX."""
    best = better(old.detach(), value.detach())
    # torch's own gradient at a NaN is 1 for both, also for the one that is a number.
    return better(torch.where(old == best, old, old.detach()), torch.where(value == best, value, value.detach()))


def _with_product(pair: Binary) -> OnEntries:
    """Apply a rule once, with the product of all values of a place: (x / a) / b is x / (a * b)."""
    return lambda places, view, rows: places.put(view, pair(places.take(view), places.product(rows)))


def _with_extreme(which: str) -> OnEntries:
    return lambda places, view, rows: places.put(view, places.extreme(places.take(view), rows, which))


RULES: dict[str, tuple[Binary, OnEntries]] = {
    "set": (second, Scatter.put),
    "add": (torch.add, Scatter.add),
    "subtract": (torch.sub, lambda places, view, rows: places.add(view, -rows)),
    "multiply": (torch.mul, _with_product(torch.mul)),
    "divide": (torch.div, _with_product(torch.div)),
    "power": (torch.pow, _with_product(torch.pow)),
    "min": (partial(_better, torch.minimum), _with_extreme("amin")),
    "max": (partial(_better, torch.maximum), _with_extreme("amax")),
}
"""What each edit does: with a value of the shape of the old one, and with one row for each entry."""


def under_mask(mask: AdvancedIndex, view: torch.Tensor, value: torch.Tensor, pair: Binary, function: str) -> Any:
    """Edit under one mask without counting its True elements, if none has a value of its own; else return None."""
    width = mask.tensor.dim()
    after = view.dim() - mask.dim - width
    lead = value.shape[: max(value.dim() - after - 1, 0)]
    if value.dim() > after and value.shape[len(lead)] != 1:
        return None
    if value.dim() > after:
        value = value.reshape([*lead, *[1] * width, *value.shape[len(lead) + 1 :]])
    here = mask.tensor.reshape([*mask.tensor.shape, *[1] * after]) if after else mask.tensor
    known = [*view.shape[: mask.dim], "number of True", *view.shape[mask.dim + width :]]
    value = fit(value, view.shape, function=function, spoken=known)
    if pair is second:
        return torch.where(here, value, view)
    # Elsewhere the rule sees 1 and 1, so that no value there can make a NaN of a gradient that is 0.
    one = torch.ones((), dtype=view.dtype, device=view.device)
    return torch.where(here, pair(torch.where(here, view, one), torch.where(here, value, one)), view)


def called(fn: Callable[[torch.Tensor], torch.Tensor], values: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Call the function of `apply` on a copy, which it may overwrite, and make its result fit."""
    function = "at(x)[...].apply()"
    if not callable(fn):
        what, why = f"{function}: `fn` is {describe(fn)}.", "it is called with the chosen values."
        raise ArgumentTypeError(what, why=why, fix="gg.at(x)[idx].apply(torch.relu)   # .set(v) puts a value")
    return fit(as_value(fn(values.clone()), x, function=function), values.shape, function=function)


def check_kind(name: str, x: torch.Tensor, function: str) -> None:
    if name in ("min", "max") and x.is_complex():
        why, fix = "complex numbers have no order.", "abs"
    elif name == "divide" and not (x.is_floating_point() or x.is_complex()):
        why, fix = "a quotient is no integer, and the result keeps the dtype of x.", "float"
    elif name in ("subtract", "power") and x.dtype is torch.bool:
        why, fix = "torch does not define it for booleans.", "long"
    else:
        return
    raise ArgumentTypeError(f"{function}: `x` is {describe(x)}.", why=why, fix=f"gg.at(x.{fix}())")
