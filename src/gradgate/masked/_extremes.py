"""The largest and the smallest of what is kept, and where it is: amax, amin, argmax, argmin."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from gradgate.masked._kernels import extreme, fill
from gradgate.masked._slices import Dim, Empty, Slices, slices_of
from gradgate.masked._valid import Exclude, Number
from gradgate.masked._ways import may_look

__all__ = ["amax", "amin", "argmax", "argmin"]


def amax(
    x: torch.Tensor,
    dim: Dim = None,
    *,
    keepdim: bool = False,
    keep: torch.Tensor | None = None,
    exclude: Exclude = None,
    empty: Empty = ...,
) -> torch.Tensor:
    """Give the largest of the elements that are kept.

    Args:
        x: The values, of any real dtype.
        dim: The dimension to reduce, several of them, or None for all.
        keepdim: Whether reduced dimensions stay with size 1.
        keep: A boolean mask that broadcasts to x; True takes part.
        exclude: A value or values that do not take part; NaN matches NaN.
        empty: What a slice with nothing kept gives instead of NaN; "raise" for an error.

    Returns:
        The largest element of each slice; NaN if NaN is kept.

    Raises:
        ArgumentTypeError: x is complex.
        NothingKeptError: A slice has nothing kept and x is of integers, or `empty="raise"`.

    Gradient:
        Shared evenly by the kept elements that are the largest, as torch.amax shares it; exactly 0 for what is not
        kept.

    Examples:
        >>> gg.masked.amax(torch.tensor([[3, 255], [9, 4]]), dim=1, exclude=255)
        tensor([3, 9])
    """
    slices = slices_of(x, dim, keep, exclude, function="masked.amax", keepdim=keepdim, empty=empty)
    return _extreme(slices, torch.amax, _lowest)


def amin(
    x: torch.Tensor,
    dim: Dim = None,
    *,
    keepdim: bool = False,
    keep: torch.Tensor | None = None,
    exclude: Exclude = None,
    empty: Empty = ...,
) -> torch.Tensor:
    """Give the smallest of the elements that are kept.

    Args:
        x: The values, of any real dtype.
        dim: The dimension to reduce, several of them, or None for all.
        keepdim: Whether reduced dimensions stay with size 1.
        keep: A boolean mask that broadcasts to x; True takes part.
        exclude: A value or values that do not take part; NaN matches NaN.
        empty: What a slice with nothing kept gives instead of NaN; "raise" for an error.

    Returns:
        The smallest element of each slice; NaN if NaN is kept.

    Raises:
        ArgumentTypeError: x is complex.
        NothingKeptError: A slice has nothing kept and x is of integers, or `empty="raise"`.

    Gradient:
        Shared evenly by the kept elements that are the smallest, as torch.amin shares it; exactly 0 for what is not
        kept.

    Examples:
        >>> gg.masked.amin(torch.tensor([[3, 0], [9, 4]]), dim=1, exclude=0)
        tensor([3, 4])
    """
    slices = slices_of(x, dim, keep, exclude, function="masked.amin", keepdim=keepdim, empty=empty)
    return _extreme(slices, torch.amin, _highest)


def argmax(
    x: torch.Tensor,
    dim: Dim = None,
    *,
    keepdim: bool = False,
    keep: torch.Tensor | None = None,
    exclude: Exclude = None,
    empty: Empty = ...,
) -> torch.Tensor:
    """Give where the largest of the elements that are kept is.

    Args:
        x: The values, of any real dtype.
        dim: The dimension to reduce; with several of them, or None for all, the index counts through them in
            row-major order.
        keepdim: Whether reduced dimensions stay with size 1.
        keep: A boolean mask that broadcasts to x; True takes part.
        exclude: A value or values that do not take part; NaN matches NaN.
        empty: The index that a slice with nothing kept gives; without it, and for "raise", that is an error.

    Returns:
        The index in each slice, int64: the first of the largest, or of NaN if NaN is kept.

    Raises:
        ArgumentTypeError: x is complex.
        NothingKeptError: A slice has nothing kept and `empty` gives no index for it.

    Examples:
        >>> gg.masked.argmax(torch.tensor([3, 255, 9]), exclude=255)
        tensor(2)
    """
    slices = slices_of(x, dim, keep, exclude, function="masked.argmax", keepdim=keepdim, empty=empty)
    return _position(slices, torch.argmax, _lowest)


def argmin(
    x: torch.Tensor,
    dim: Dim = None,
    *,
    keepdim: bool = False,
    keep: torch.Tensor | None = None,
    exclude: Exclude = None,
    empty: Empty = ...,
) -> torch.Tensor:
    """Give where the smallest of the elements that are kept is.

    Args:
        x: The values, of any real dtype.
        dim: The dimension to reduce; with several of them, or None for all, the index counts through them in
            row-major order.
        keepdim: Whether reduced dimensions stay with size 1.
        keep: A boolean mask that broadcasts to x; True takes part.
        exclude: A value or values that do not take part; NaN matches NaN.
        empty: The index that a slice with nothing kept gives; without it, and for "raise", that is an error.

    Returns:
        The index in each slice, int64: the first of the smallest, or of NaN if NaN is kept.

    Raises:
        ArgumentTypeError: x is complex.
        NothingKeptError: A slice has nothing kept and `empty` gives no index for it.

    Examples:
        >>> gg.masked.argmin(torch.tensor([3, 0, 9]), exclude=0)
        tensor(0)
    """
    slices = slices_of(x, dim, keep, exclude, function="masked.argmin", keepdim=keepdim, empty=empty)
    return _position(slices, torch.argmin, _highest)


def _extreme(
    slices: Slices, reduce: Callable[..., torch.Tensor], limit: Callable[[torch.dtype], Number]
) -> torch.Tensor:
    slices.refuse(complexes=True)
    if slices.mask is None and slices.size > 0:
        return reduce(slices.x, slices.dims, keepdim=slices.keepdim)
    slices = slices.with_mask()
    if slices.x.is_floating_point():
        found = extreme(slices.x, slices.full_mask(), slices.dims, slices.keepdim, largest=reduce is torch.amax)
        if may_look(slices.x, slices.full_mask()) and math.isfinite(found.detach().sum().item()):
            return found  # so nothing is empty, and there is no need to count
        return slices.settle(found)
    return slices.settle(reduce(slices.filled(limit(slices.x.dtype)), slices.dims, keepdim=slices.keepdim))


def _position(
    slices: Slices, find: Callable[..., torch.Tensor], limit: Callable[[torch.dtype], Number]
) -> torch.Tensor:
    slices.refuse(complexes=True)
    one = slices.with_mask().in_one_dim()
    mask = one.full_mask()
    x = one.x.detach().to(torch.uint8) if one.x.dtype is torch.bool else one.x.detach()
    last = limit(x.dtype)
    filled = fill(x, mask, last)
    index = find(filled, -1)
    # Only where all that is kept equals what stands for the left-out can the search have found one of those.
    tied = filled.gather(-1, index.unsqueeze(-1)).squeeze(-1) == last
    if may_look(x, mask) and not tied.any():
        return slices.reduced(index)  # nothing is empty either: all of it would equal what stands for the left-out
    index = torch.where(tied, mask.to(torch.uint8).argmax(-1), index)
    return slices.settle(slices.reduced(index), number=slices.reduced(one.number()))


def _lowest(dtype: torch.dtype) -> Number:
    """Give what no element of the dtype is beneath."""
    if dtype is torch.bool:
        return False
    return -math.inf if dtype.is_floating_point else torch.iinfo(dtype).min


def _highest(dtype: torch.dtype) -> Number:
    if dtype is torch.bool:
        return True
    return math.inf if dtype.is_floating_point else torch.iinfo(dtype).max
