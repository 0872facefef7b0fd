"""The length of what is kept, and what is kept brought to length 1: norm and normalize."""

from __future__ import annotations

import math

import torch

from gradgate.masked._arguments import check_number, check_order
from gradgate.masked._extremes import amin
from gradgate.masked._kernels import fill
from gradgate.masked._slices import Dim, Empty, Slices, slices_of
from gradgate.masked._valid import Exclude

__all__ = ["norm", "normalize"]


def norm(
    x: torch.Tensor,
    dim: Dim = None,
    *,
    ord: float = 2,
    keepdim: bool = False,
    dtype: torch.dtype | None = None,
    keep: torch.Tensor | None = None,
    exclude: Exclude = None,
    empty: Empty = ...,
) -> torch.Tensor:
    """Give the vector norm of the elements that are kept.

    Args:
        x: The values, floating or complex.
        dim: The dimension to reduce, several of them, or None for all.
        ord: Which norm, as in torch.linalg.vector_norm: 2, 1, 0, infinity, or any other number.
        keepdim: Whether reduced dimensions stay with size 1.
        dtype: What x becomes first.
        keep: A boolean mask that broadcasts to x; True takes part.
        exclude: A value or values that do not take part; NaN matches NaN.
        empty: What a slice with nothing kept gives instead of 0; "raise" for an error.

    Returns:
        The norm of each slice, real.

    Raises:
        ArgumentTypeError: x is of integers and no dtype is given.
        NothingKeptError: A slice has nothing kept and `empty="raise"`.

    Gradient:
        That of torch.linalg.vector_norm for each element that is kept, exactly 0 for each that is not; exactly 0
        where the norm is 0.

    Examples:
        >>> gg.masked.norm(torch.tensor([3.0, float("nan"), 4.0]), exclude=float("nan"))
        tensor(5.)
    """
    slices = slices_of(x, dim, keep, exclude, function="masked.norm", keepdim=keepdim, empty=empty, dtype=dtype)
    slices.refuse(integers=True)
    return slices.settle(_norm(slices, ord, slices.filled(0)), natural=0)


def normalize(
    x: torch.Tensor,
    dim: Dim = None,
    *,
    ord: float = 2,
    eps: float = 1e-12,
    keep: torch.Tensor | None = None,
    exclude: Exclude = None,
    empty: Empty = ...,
) -> torch.Tensor:
    """Divide the elements that are kept by their norm.

    Args:
        x: The values, floating or complex.
        dim: The dimension to take the norm over, several of them, or None for all.
        ord: Which norm, as in torch.linalg.vector_norm.
        eps: A smaller norm counts as this, so that 0 stays 0. The gradient there is 1 / eps, as in
            torch.nn.functional.normalize; `masked.safe_normalize` has none. No less than the dtype can hold.
        keep: A boolean mask that broadcasts to x; True takes part.
        exclude: A value or values that do not take part; NaN matches NaN.
        empty: What every place of a slice with nothing kept gives instead of 0; "raise" for an error.

    Returns:
        A tensor of the shape of x, 0 where an element is left out.

    Raises:
        ArgumentTypeError: x is of integers.
        NothingKeptError: A slice has nothing kept and `empty="raise"`.

    Gradient:
        That of x / max(norm, eps) for what is kept; exactly 0 for what is not, and nothing comes back from its place.

    Examples:
        >>> gg.masked.normalize(torch.tensor([3.0, 1e9, 4.0]), exclude=1e9)
        tensor([0.6000, 0.0000, 0.8000])
    """
    slices = slices_of(x, dim, keep, exclude, function="masked.normalize", keepdim=True, empty=empty)
    slices.refuse(integers=True)
    check_number(
        eps, name="eps", function="masked.normalize", why="no norm counts as less than this number.", fix="eps=1e-12"
    )
    # 1e-12 is 0 for a float16, and 0 / 0 would not stay 0.
    least = max(eps, torch.finfo(slices.x.dtype).tiny)
    filled = slices.filled(0)
    divided = filled / _norm(slices, ord, filled).clamp_min(least)
    return slices.settle(divided if slices.mask is None else fill(divided, slices.mask, 0), natural=0)


def _norm(slices: Slices, order: float, filled: torch.Tensor) -> torch.Tensor:
    """Give the norm of each slice, 0 for one with nothing kept; filled has 0 in the place of what is left out."""
    check_order(order, function=slices.function)
    if slices.size == 0:
        slices = slices.with_mask()
        filled = slices.filled(0)
    if order == -math.inf:
        return amin(slices.filled(1).abs(), slices.dims, keepdim=slices.keepdim, keep=slices.mask, empty=0.0)
    if order < 0 and slices.mask is not None:
        # A negative power makes nothing of infinity, as it makes infinity of 0.
        filled = fill(slices.filled(1).abs(), slices.mask, math.inf)
    length: torch.Tensor = torch.linalg.vector_norm(filled, order, slices.dims, keepdim=slices.keepdim)
    if order < 0:
        return length if slices.mask is None else torch.where(slices.number() == 0, 0.0, length)
    # torch's own gradient is 0 here, but not its second one.
    return torch.where(length == 0, 0.0, length)
