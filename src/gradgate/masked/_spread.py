"""How far what is kept lies apart: var and std."""

from __future__ import annotations

import math

import torch

from gradgate.masked._arguments import check_number
from gradgate.masked._kernels import fill, squares, sums
from gradgate.masked._slices import Dim, Empty, Slices, slices_of
from gradgate.masked._valid import Exclude

__all__ = ["distances", "std", "var"]


def var(
    x: torch.Tensor,
    dim: Dim = None,
    *,
    correction: float = 1,
    keepdim: bool = False,
    keep: torch.Tensor | None = None,
    exclude: Exclude = None,
    empty: Empty = ...,
) -> torch.Tensor:
    """Give the variance of the elements that are kept.

    Args:
        x: The values, floating or complex.
        dim: The dimension to reduce, several of them, or None for all.
        correction: What is taken from the number kept before dividing by it, as in torch: 1 for a sample, 0 for all.
        keepdim: Whether reduced dimensions stay with size 1.
        keep: A boolean mask that broadcasts to x; True takes part.
        exclude: A value or values that do not take part; NaN matches NaN.
        empty: What a slice with nothing kept gives instead of NaN; "raise" for an error.

    Returns:
        The variance over each slice, real. With no more elements kept than `correction` it is what torch gives for
        so few: NaN for one element.

    Raises:
        ArgumentTypeError: x is of integers.
        NothingKeptError: A slice has nothing kept and `empty="raise"`.

    Gradient:
        2 (x - mean) / (number kept - correction) for each element that is kept, exactly 0 for each that is not. A
        slice with no more elements kept than `correction` gives exactly 0; torch.var gives NaN there.

    Examples:
        >>> gg.masked.var(torch.tensor([1.0, 2.0, 3.0, -999.0]), exclude=-999)
        tensor(1.)
    """
    slices = slices_of(x, dim, keep, exclude, function="masked.var", keepdim=keepdim, empty=empty)
    slices.refuse(integers=True)
    _check_correction(correction, slices.function)
    if slices.mask is None and slices.size > correction and slices.x.numel():
        return slices.x.var(slices.dims, correction=correction, keepdim=keepdim)
    variance, undefined, number = _variance(slices, correction)
    settled = torch.where(number > correction, variance, undefined)
    return slices.settle(settled.to(undefined.dtype), natural=math.nan, number=number)


def std(
    x: torch.Tensor,
    dim: Dim = None,
    *,
    correction: float = 1,
    keepdim: bool = False,
    keep: torch.Tensor | None = None,
    exclude: Exclude = None,
    empty: Empty = ...,
) -> torch.Tensor:
    """Give the standard deviation of the elements that are kept.

    Args:
        x: The values, floating or complex.
        dim: The dimension to reduce, several of them, or None for all.
        correction: What is taken from the number kept before dividing by it, as in torch: 1 for a sample, 0 for all.
        keepdim: Whether reduced dimensions stay with size 1.
        keep: A boolean mask that broadcasts to x; True takes part.
        exclude: A value or values that do not take part; NaN matches NaN.
        empty: What a slice with nothing kept gives instead of NaN; "raise" for an error.

    Returns:
        The standard deviation over each slice, real. With no more elements kept than `correction` it is what torch
        gives for so few: NaN for one element.

    Raises:
        ArgumentTypeError: x is of integers.
        NothingKeptError: A slice has nothing kept and `empty="raise"`.

    Gradient:
        That of the variance over twice the standard deviation for each element that is kept, exactly 0 for each
        that is not. It is exactly 0 where the standard deviation is 0, as in torch, and in a slice with no more
        elements kept than `correction`, where torch.std gives NaN.

    Examples:
        >>> gg.masked.std(torch.tensor([1.0, 2.0, 3.0, -999.0]), exclude=-999)
        tensor(1.)
    """
    slices = slices_of(x, dim, keep, exclude, function="masked.std", keepdim=keepdim, empty=empty)
    slices.refuse(integers=True)
    _check_correction(correction, slices.function)
    if slices.mask is None and slices.size > correction and slices.x.numel():
        return slices.x.std(slices.dims, correction=correction, keepdim=keepdim)
    variance, undefined, number = _variance(slices, correction)
    flat = variance == 0
    root = torch.where(flat, 0.0, torch.where(flat, 1.0, variance).sqrt())
    settled = torch.where(number > correction, root, undefined)
    return slices.settle(settled.to(undefined.dtype), natural=math.nan, number=number)


def _check_correction(correction: float, function: str) -> None:
    check_number(
        correction,
        name="correction",
        function=function,
        why="it is taken from the number of elements: 1 for a sample, 0 for all there are.",
        fix="correction=1",
    )


def distances(slices: Slices) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Give how far each kept element is from the mean of the kept ones of its slice.

    Args:
        slices: What is looked at.

    Returns:
        The distances, 0 where an element is left out, the means, and the numbers kept; halves become float32.
    """
    mask = slices.full_mask()
    total, number = sums(slices.x, mask, slices.dims, True)
    center = total / number.clamp(min=1)
    # What is left out is taken away before and after: its distance to the center is no number to build on.
    return fill(slices.filled(0) - center, mask, 0), center, number


def _variance(slices: Slices, correction: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Give the variance where it is defined, what stands in its place elsewhere, and the number kept."""
    x, mask, dtype = slices.x, slices.full_mask(), slices.x.dtype
    if x.is_complex():
        found, number = squares(x.real, mask, slices.dims, slices.keepdim)
        found, dtype = found + squares(x.imag, mask, slices.dims, slices.keepdim)[0], found.dtype
    else:
        wide = x.float() if dtype in (torch.float16, torch.bfloat16) else x
        found, number = squares(wide, mask, slices.dims, slices.keepdim)
    freedom = (number - correction).clamp(min=0)
    # torch divides by 0 here: NaN for one element, infinity for a correction that is larger than the number.
    undefined = (found.detach() / freedom).to(dtype)
    return found / torch.where(freedom > 0, freedom, 1), undefined, number
