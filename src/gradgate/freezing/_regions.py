"""Which elements of a parameter are frozen, in the form that is cheapest to hold.

A region can `read` the frozen values, `write` them back bit by bit, and `clear` the gradient there. All of a
parameter, whole rows, a few single elements and a dense mask are each held in their own way, because the cost is paid
in every step: rows and single elements cost what they are, a dense mask costs one pass over gradient and values.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from gradgate import _kernels

__all__ = ["Elements", "Everything", "Points", "Region", "Rows", "region_of", "union"]

_FEW = 32  # single elements are addressed one by one up to one in so many; beyond that a dense mask is cheaper


class Region:
    """Some elements of a parameter; `count` says how many."""

    count: int

    def read(self, values: torch.Tensor) -> torch.Tensor:
        """Copy the frozen values, in a form that `write` understands."""
        return self.gather(values)

    def write(self, values: torch.Tensor, kept: torch.Tensor) -> None:
        """Put the frozen values back, bit by bit; the others are not touched."""
        raise NotImplementedError

    def clear(self, gradient: torch.Tensor) -> None:
        """Make the gradient exactly 0 at the frozen elements, in place."""
        raise NotImplementedError

    def gather(self, values: torch.Tensor) -> torch.Tensor:
        """Give the frozen values one after the other, in the order of the elements."""
        raise NotImplementedError

    def mask(self, shape: torch.Size, device: torch.device) -> torch.Tensor:
        """Give the region as a boolean mask of the parameter's shape; True is frozen."""
        raise NotImplementedError

    def cleared(self, gradient: torch.Tensor) -> torch.Tensor:
        """Give a new gradient that is exactly 0 at the frozen elements; sparse ones, and ones with a graph."""
        if not gradient.is_sparse:
            return gradient.masked_fill(self.mask(gradient.shape, gradient.device), 0)
        gradient = gradient.coalesce()
        indices, values = gradient.indices(), gradient.values()
        frozen = self.mask(gradient.shape, gradient.device)[tuple(indices)]
        return torch.sparse_coo_tensor(
            indices, values.masked_fill(frozen, 0), gradient.shape, is_coalesced=True, check_invariants=False
        )

    def place(self, number: int, shape: torch.Size) -> tuple[int, ...]:
        """Give the index of the element that stands at this place of `gather`."""
        at = self.mask(shape, torch.device("cpu")).flatten().nonzero()[number, 0]
        return tuple(int(i) for i in torch.unravel_index(at, shape))


class Everything(Region):
    """All elements."""

    def __init__(self, count: int) -> None:
        self.count = count

    def gather(self, values: torch.Tensor) -> torch.Tensor:
        return values.clone().flatten()

    def read(self, values: torch.Tensor) -> torch.Tensor:
        return values.clone()

    def write(self, values: torch.Tensor, kept: torch.Tensor) -> None:
        values.copy_(kept)

    def clear(self, gradient: torch.Tensor) -> None:
        gradient.zero_()

    def mask(self, shape: torch.Size, device: torch.device) -> torch.Tensor:
        return torch.ones(shape, dtype=torch.bool, device=device)

    def place(self, number: int, shape: torch.Size) -> tuple[int, ...]:
        return tuple(int(i) for i in torch.unravel_index(torch.tensor(number), shape))


class Rows(Region):
    """Whole rows: places along the first dimension."""

    def __init__(self, index: torch.Tensor, shape: torch.Size) -> None:
        self.index = index
        self.count = len(index) * shape[1:].numel()
        # Where nearly all is frozen it is quicker to set the few others aside and to treat the whole.
        self.others = None
        if 4 * len(index) > 3 * shape[0]:
            free = torch.ones(shape[0], dtype=torch.bool, device=index.device)
            free[index] = False
            self.others = free.nonzero().squeeze(1)

    def _here(self, device: torch.device) -> torch.Tensor:
        if self.index.device != device:
            self.index = self.index.to(device)
            self.others = self.others.to(device) if self.others is not None else None
        return self.index

    def read(self, values: torch.Tensor) -> torch.Tensor:
        return values.index_select(0, self._here(values.device)) if self.others is None else values.clone()

    def write(self, values: torch.Tensor, kept: torch.Tensor) -> None:
        index = self._here(values.device)
        if self.others is None:
            values.index_copy_(0, index, kept)
        else:  # in this order: at no time, whatever interrupts, are the others anything but what they learned
            kept.index_copy_(0, self.others, values.index_select(0, self.others))
            values.copy_(kept)

    def clear(self, gradient: torch.Tensor) -> None:
        index = self._here(gradient.device)
        if self.others is None:
            gradient.index_fill_(0, index, 0)
        else:
            aside = gradient.index_select(0, self.others)
            gradient.zero_().index_copy_(0, self.others, aside)

    def gather(self, values: torch.Tensor) -> torch.Tensor:
        return values.index_select(0, self._here(values.device)).flatten()

    def mask(self, shape: torch.Size, device: torch.device) -> torch.Tensor:
        rows = torch.zeros(shape[0], dtype=torch.bool, device=device)
        rows[self.index.to(device)] = True
        return rows.reshape(-1, *[1] * (len(shape) - 1)).expand(shape)

    def place(self, number: int, shape: torch.Size) -> tuple[int, ...]:
        row, rest = divmod(number, shape[1:].numel())
        inner = torch.unravel_index(torch.tensor(rest), shape[1:]) if len(shape) > 1 else ()
        return (int(self.index[row]), *(int(i) for i in inner))


class Points(Region):
    """A few single elements, each by its index."""

    def __init__(self, mask: torch.Tensor) -> None:
        self.index = mask.nonzero(as_tuple=True)
        self.count = len(self.index[0])

    def _here(self, device: torch.device) -> tuple[torch.Tensor, ...]:
        if self.index[0].device != device:
            self.index = tuple(i.to(device) for i in self.index)
        return self.index

    def gather(self, values: torch.Tensor) -> torch.Tensor:
        return values[self._here(values.device)]

    def write(self, values: torch.Tensor, kept: torch.Tensor) -> None:
        values.index_put_(self._here(values.device), kept)

    def clear(self, gradient: torch.Tensor) -> None:
        gradient.index_put_(self._here(gradient.device), gradient.new_zeros(()))

    def mask(self, shape: torch.Size, device: torch.device) -> torch.Tensor:
        mask = torch.zeros(shape, dtype=torch.bool, device=device)
        mask[tuple(i.to(device) for i in self.index)] = True
        return mask


class Elements(Region):
    """Many single elements, as a dense mask."""

    def __init__(self, mask: torch.Tensor) -> None:
        self.frozen = mask.clone()
        self.count = int(mask.sum())

    def _like(self, values: torch.Tensor) -> torch.Tensor:
        """Give the mask on the device of values, and in memory as they are."""
        if self.frozen.device != values.device or self.frozen.stride() != values.stride():
            self.frozen = torch.empty_like(values, dtype=torch.bool).copy_(self.frozen)
        return self.frozen

    def _write(self, values: torch.Tensor, kept: torch.Tensor | None) -> None:
        frozen = self._like(values)
        # A tensor without gaps is copied with its strides; then all three are one stretch of memory in the same order.
        dense = frozen.stride() == values.stride() and (kept is None or kept.stride() == values.stride())
        if dense and _kernels.usable(values, frozen, *([] if kept is None else [kept])):
            _kernels.overwrite(values, frozen, kept)
        elif kept is None:
            values.masked_fill_(frozen, 0)
        else:
            torch.where(frozen, kept, values, out=values)

    def read(self, values: torch.Tensor) -> torch.Tensor:
        return values.clone()

    def write(self, values: torch.Tensor, kept: torch.Tensor) -> None:
        self._write(values, kept)

    def clear(self, gradient: torch.Tensor) -> None:
        self._write(gradient, None)

    def gather(self, values: torch.Tensor) -> torch.Tensor:
        return values[self._like(values)]

    def mask(self, shape: torch.Size, device: torch.device) -> torch.Tensor:
        return self.frozen.to(device)


def region_of(mask: torch.Tensor) -> Region:
    """Give the cheapest region for a mask of the parameter's shape; True is frozen.

    Args:
        mask: A boolean tensor.

    Returns:
        Rows where each row is all or nothing, single elements where they are few, else the dense mask.
    """
    if mask.dim() == 0 or mask.numel() == 0:
        return Elements(mask)
    by_row = mask.reshape(len(mask), -1)
    whole = by_row.all(dim=1)
    if bool((whole == by_row.any(dim=1)).all()):
        return Rows(whole.nonzero().squeeze(1), mask.shape)
    return Points(mask) if int(mask.sum()) * _FEW <= mask.numel() else Elements(mask)


def union(regions: Iterable[Region], like: torch.Tensor) -> Region | None:
    """Give the region that holds what any of these holds.

    Args:
        regions: The regions, of one parameter.
        like: A tensor of the parameter's shape.

    Returns:
        Their union; None where there are none.
    """
    regions = list(regions)
    if len(regions) < 2:
        return regions[0] if regions else None
    together = regions[0].mask(like.shape, like.device).clone()
    for region in regions[1:]:
        together |= region.mask(like.shape, like.device)
    return region_of(together)
