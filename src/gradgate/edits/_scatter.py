"""Writing at the places that index tensors choose: where they are, which entries name the same one, and how to write.

An *entry* is one combination of the index tensors; it chooses one place of their dimensions, and with it a block of
the others. Several entries may name one place. Then one of them, the *speaker*, writes for all: the last that is in
range. A reduction that has the same result in any order, so on any device, finds it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from gradgate import _kernels
from gradgate._names import describe
from gradgate._torch_private import has_data, inside_functorch
from gradgate.edits._index import AdvancedIndex, ParsedIndex, as_value, fit, out_of_range
from gradgate.errors import ArgumentTypeError, ArgumentValueError

# --- Entries of index tensors ---------------------------------------------------------------------------------------


Done = TypeVar("Done")


class Scatter:
    """The places of a view that index tensors choose."""

    def __init__(self, advanced_indices: Sequence[AdvancedIndex], view: torch.Tensor, mode: str, unique: bool) -> None:
        dims = [advanced.dim for advanced in advanced_indices]
        rest = [dim for dim in range(view.dim()) if dim not in dims]
        self.advanced_indices = advanced_indices
        self.sizes = [view.shape[dim] for dim in dims]
        self.order = dims + rest
        self.block = [view.shape[dim] for dim in rest]
        self.entries = _broadcast(advanced_indices)
        self.count = math.prod(self.entries)
        self.front = _front(advanced_indices, view.dim())
        self.unique = (unique and mode == "raise") or self.count <= 1
        self.indices = [_flat(advanced.tensor, self.entries) for advanced in advanced_indices]
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
        for advanced, size in zip(self.advanced_indices, self.sizes, strict=True):
            if has_data(advanced.tensor):
                wrong = advanced.tensor[(advanced.tensor < -size) | (advanced.tensor >= size)]
                if wrong.numel():
                    raise out_of_range("at(x)[...]", int(wrong[0]), advanced.dim_of_x, size)

    def _only(self, chosen: torch.Tensor) -> Scatter:
        """Keep some of the entries, none twice."""
        less = object.__new__(Scatter)
        less.__dict__.update(self.__dict__)
        less.indices = [i[chosen] for i in self.indices]
        less.count = len(less.indices[0])
        less.entries, less.unique, less.inside = (less.count,), True, None
        return less

    def _write(self, view: torch.Tensor, rows: torch.Tensor, accumulate: bool = False) -> torch.Tensor:
        new = _permuted(view, self.order).index_put(tuple(self.indices), rows, accumulate=accumulate)
        return _permuted(new, [self.order.index(dim) for dim in range(view.dim())])

    def alone(self) -> bool:
        """Whether surely no place is named twice; reads the index only where that waits for nothing, on the CPU."""
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
    if start == end or not width:
        return tensor
    return tensor.movedim(tuple(range(start, start + width)), tuple(range(end, end + width)))


def _broadcast(advanced_indices: Sequence[AdvancedIndex]) -> tuple[int, ...]:
    if len(advanced_indices) == 1:  # torch's own function takes its time
        return tuple(advanced_indices[0].tensor.shape)
    shapes = [tuple(advanced.tensor.shape) for advanced in advanced_indices]
    try:
        return tuple(torch.broadcast_shapes(*shapes))  # type: ignore[no-untyped-call]
    except RuntimeError:
        raise ArgumentValueError(
            f"at(x)[...]: the index tensors have shapes {', '.join(map(str, shapes))}, which do not broadcast.",
            why="together they name one place for each entry.",
            fix="gg.at(x)[i[:, None], j]   # every i with every j",
        ) from None


def _front(advanced_indices: Sequence[AdvancedIndex], width: int) -> int:
    """Count the other dimensions before the entries in `view[index]`."""
    # An index tensor without dimensions chooses like an int: its dimension is gone already.
    if len(advanced_indices) == 1:
        return advanced_indices[0].dim
    kept = [dim for dim in range(width) if dim not in (c.dim for c in advanced_indices if not c.tensor.dim())]
    spots = [kept.index(c.dim) for c in advanced_indices if c.tensor.dim()]
    together = spots and spots == list(range(spots[0], spots[0] + len(spots)))
    return spots[0] if together else 0


# --- What each edit does --------------------------------------------------------------------------------------------


Binary = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
OnEntries = Callable[[Scatter, torch.Tensor, torch.Tensor], torch.Tensor]


def second(old: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Take the value: the rule of `set`."""
    return value


def smaller(old: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Take the smaller of two; equal ones share the gradient, and of a NaN neither gets any, as in JAX."""
    return _chosen(torch.minimum, old, value)


def larger(old: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Take the larger of two; equal ones share the gradient, and of a NaN neither gets any, as in JAX."""
    return _chosen(torch.maximum, old, value)


def _chosen(rule: Binary, old: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    best = rule(old.detach(), value.detach())
    # torch's own gradient at a NaN is 1 for both, also for the one that is a number.
    return rule(torch.where(old == best, old, old.detach()), torch.where(value == best, value, value.detach()))


def subtracted(places: Scatter, view: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    return places.add(view, -rows)


def with_product(pair: Binary) -> OnEntries:
    """Apply a rule once, with the product of all values of a place: (x / a) / b is x / (a * b)."""

    def on_places(places: Scatter, view: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        return places.put(view, pair(places.take(view), places.product(rows)))

    return on_places


def with_extreme(which: str) -> OnEntries:
    """Take the smallest ("amin") or largest ("amax") of a place."""

    def on_places(places: Scatter, view: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        return places.put(view, places.extreme(places.take(view), rows, which))

    return on_places


def advanced_indices(parsed: ParsedIndex, view: torch.Tensor) -> Sequence[AdvancedIndex]:
    """Return all masks and index tensors as index tensors, in the order of their dimensions."""
    if not parsed.masks:
        return parsed.indices
    found = list(parsed.indices)
    for mask in parsed.masks:
        found += [
            AdvancedIndex(mask.dim + offset, mask.dim_of_x + offset, places)
            for offset, places in enumerate(mask.tensor.nonzero(as_tuple=True))
        ]
    return sorted(found, key=lambda advanced: advanced.dim)


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
    if pair is second and not value.dim() and not inside_functorch():  # vmap has no rule for masked_fill
        return view.masked_fill(here, value)
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
        raise ArgumentTypeError(
            f"{function}: `fn` is {describe(fn)}.",
            why="it is called with the chosen values.",
            fix="gg.at(x)[idx].apply(torch.relu)   # .set(v) puts a value",
        )
    return fit(as_value(fn(values.clone()), x, function=function), values.shape, function=function)


def check_kind(name: str, x: torch.Tensor, function: str) -> None:
    if name in ("min", "max") and x.is_complex():
        raise _undefined(function, x, "complex numbers have no order.", "gg.at(x.abs())")
    if name == "divide" and not (x.is_floating_point() or x.is_complex()):
        raise _undefined(
            function, x, "a quotient is no integer, and the result keeps the dtype of x.", "gg.at(x.float())"
        )
    if name in ("subtract", "power") and x.dtype is torch.bool:
        raise _undefined(function, x, "torch does not define it for booleans.", "gg.at(x.long())")


def in_place(sign: str, name: str) -> ArgumentTypeError:
    return ArgumentTypeError(
        f"at(x)[idx] {sign}= v works in place.",
        why="at() never touches x; an edit gives a new tensor.",
        fix=f"y = gg.at(x)[idx].{name}(v)",
    )


def _undefined(function: str, x: torch.Tensor, why: str, fix: str) -> ArgumentTypeError:
    return ArgumentTypeError(f"{function}: `x` is {describe(x)}.", why=why, fix=fix)
