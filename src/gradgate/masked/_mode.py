"""The most frequent value, with values left out."""

from __future__ import annotations

from typing import NamedTuple

import torch

from gradgate._checks import check_tensor
from gradgate._torch_compat import has_data, inside_functorch
from gradgate.masked._slices import Dim, Empty, Slices, slices_of
from gradgate.masked._valid import SMALL, Exclude, zeros_and_ones
from gradgate.masked._votes import in_bytes, vote_anywhere, vote_on_cpu

__all__ = ["mode"]


class ModeResult(NamedTuple):
    """The most frequent values, where they are, and how often they occur."""

    values: torch.Tensor
    indices: torch.Tensor
    counts: torch.Tensor


def mode(
    x: torch.Tensor,
    dim: Dim = -1,
    *,
    keepdim: bool = False,
    keep: torch.Tensor | None = None,
    exclude: Exclude = None,
    empty: Empty = ...,
) -> ModeResult:
    """Give the most frequent of the kept values, where it is, and how often it occurs.

    Of several equally frequent values it is the smallest. All NaNs that are kept count as one value, larger than all
    others; 0.0 and -0.0 count as one. The index is that of the last kept occurrence, always.

    Args:
        x: The values; anything but complex.
        dim: One dimension, several, or None for all.
        keepdim: Keep the reduced dimensions with size 1.
        keep: A boolean mask that broadcasts to x; True takes part.
        exclude: A value or values that do not take part.
        empty: The value for a slice with nothing kept: NaN for floating x; an error for others unless a number is
            given. "raise" always raises.

    Returns:
        A named tuple (values, indices, counts). With several dimensions the index counts through them in row-major
        order. A slice with nothing kept has the index -1 and the count 0.

    Raises:
        ArgumentTypeError: x is complex, or an argument is of a kind that cannot be used.
        ArgumentValueError: A mask does not fit x, or `empty` does not fit its dtype.
        NothingKeptError: A slice of integers has nothing kept and there is no `empty`, or `empty` is "raise".

    Gradient:
        Of the values, to the element at the index; every other element gets exactly 0, and so does a slice with
        nothing kept.

    Examples:
        >>> segments = torch.tensor([[255, 255, 255, 7, 7, 3], [4, 9, 9, 4, 255, 1]])
        >>> found = gg.masked.mode(segments, exclude=255)
        >>> found.values, found.indices, found.counts
        (tensor([7, 4]), tensor([4, 3]), tensor([2, 2]))
    """
    check_tensor(x, name="x", function="masked.mode")
    # The fast ways look at the data, which costs nothing on the CPU; torch.func cannot follow them.
    looks = x.is_cpu and not inside_functorch() and type(x.detach()) is torch.Tensor and has_data(x)
    small, limits = in_bytes(x) if looks else (x, None)
    slices = slices_of(small, dim, keep, exclude, function="masked.mode", keepdim=keepdim, empty=empty)
    slices.refuse(complexes=True)
    rows = (slices if slices.size else slices.with_mask()).in_one_dim()
    plain, mask = rows.x.detach(), None if rows.mask is None else rows.full_mask()
    certain, values = mask is None, None
    if looks:
        if mask is not None and plain.numel() < SMALL:  # larger ones have been looked at
            mask = zeros_and_ones(mask)
        indices, counts, values, certain = vote_on_cpu(plain, mask, limits, x.dtype)
    else:
        indices, counts = vote_anywhere(plain, mask)
    if values is None or x.is_floating_point():
        values = _picked(slices, rows, indices if certain else indices.clamp(min=0))
    values, indices, counts = (slices.reduced(result) for result in (values, indices, counts))
    if certain:
        slices.settle(values.new_empty(0), number=counts.new_ones(0))  # an `empty` that does not fit is told anyway
    else:
        values = slices.settle(values, number=counts)
    return ModeResult(values, indices, counts)


def _picked(slices: Slices, rows: Slices, indices: torch.Tensor) -> torch.Tensor:
    """Give the elements of x at the indices; without the dimension moved to the end, where that can be."""
    if len(slices.dims) == 1 and slices.size:
        dim = slices.dims[0]
        return slices.x.gather(dim, indices.unsqueeze(dim)).squeeze(dim)
    return rows.x.gather(-1, indices.unsqueeze(-1)).squeeze(-1)
