"""Reductions that add or multiply what is kept: sum, prod, mean, count, cumsum."""

from __future__ import annotations

import math

import torch

from gradgate.masked._kernels import sums
from gradgate.masked._slices import Dim, Empty, slices_of
from gradgate.masked._valid import Exclude
from gradgate.masked._ways import nowhere_empty

__all__ = ["count", "cumsum", "mean", "prod", "sum"]


def sum(
    x: torch.Tensor,
    dim: Dim = None,
    *,
    keepdim: bool = False,
    dtype: torch.dtype | None = None,
    keep: torch.Tensor | None = None,
    exclude: Exclude = None,
    empty: Empty = ...,
) -> torch.Tensor:
    """Add up the elements that are kept.

    Args:
        x: The values.
        dim: The dimension to reduce, several of them, or None for all.
        keepdim: Whether reduced dimensions stay with size 1.
        dtype: What x becomes before it is added; integers become int64 without it, as in torch.
        keep: A boolean mask that broadcasts to x; True takes part.
        exclude: A value or values that do not take part; NaN matches NaN.
        empty: What a slice with nothing kept gives instead of 0; "raise" for an error.

    Returns:
        The sum over each slice.

    Raises:
        NothingKeptError: A slice has nothing kept and `empty="raise"`.

    Gradient:
        1 for each element that is kept, exactly 0 for each that is not.

    Examples:
        >>> gg.masked.sum(torch.tensor([1.0, float("nan"), 2.0]), exclude=float("nan"))
        tensor(3.)
    """
    slices = slices_of(x, dim, keep, exclude, function="masked.sum", keepdim=keepdim, empty=empty, dtype=dtype)
    if slices.mask is None or not slices.x.is_floating_point():
        return slices.settle(slices.filled(0).sum(slices.dims, keepdim=keepdim, dtype=dtype), natural=0)
    result, number = sums(slices.x, slices.mask, slices.dims, keepdim, counted=empty is not ...)
    result = result if result.dtype is slices.x.dtype else result.to(slices.x.dtype)
    return slices.settle(result, natural=0, number=number)


def prod(
    x: torch.Tensor,
    dim: Dim = None,
    *,
    keepdim: bool = False,
    dtype: torch.dtype | None = None,
    keep: torch.Tensor | None = None,
    exclude: Exclude = None,
    empty: Empty = ...,
) -> torch.Tensor:
    """Multiply the elements that are kept.

    Args:
        x: The values.
        dim: The dimension to reduce, several of them, or None for all.
        keepdim: Whether reduced dimensions stay with size 1.
        dtype: What x becomes before it is multiplied; integers become int64 without it, as in torch.
        keep: A boolean mask that broadcasts to x; True takes part.
        exclude: A value or values that do not take part; NaN matches NaN.
        empty: What a slice with nothing kept gives instead of 1; "raise" for an error.

    Returns:
        The product over each slice.

    Raises:
        NothingKeptError: A slice has nothing kept and `empty="raise"`.

    Gradient:
        For an element that is kept the product of the others that are, also where some are 0; exactly 0 for each
        that is not kept.

    Examples:
        >>> gg.masked.prod(torch.tensor([2, 0, 3]), exclude=0)
        tensor(6)
    """
    slices = slices_of(x, dim, keep, exclude, function="masked.prod", keepdim=keepdim, empty=empty, dtype=dtype)
    return slices.settle(slices.reduced(slices.in_one_dim().filled(1).prod(-1, dtype=dtype)), natural=1)


def mean(
    x: torch.Tensor,
    dim: Dim = None,
    *,
    keepdim: bool = False,
    dtype: torch.dtype | None = None,
    keep: torch.Tensor | None = None,
    exclude: Exclude = None,
    empty: Empty = ...,
) -> torch.Tensor:
    """Give the mean of the elements that are kept: their sum over their number.

    Args:
        x: The values, floating or complex.
        dim: The dimension to reduce, several of them, or None for all.
        keepdim: Whether reduced dimensions stay with size 1.
        dtype: What x becomes first; needed for integers.
        keep: A boolean mask that broadcasts to x; True takes part.
        exclude: A value or values that do not take part; NaN matches NaN.
        empty: What a slice with nothing kept gives instead of NaN; "raise" for an error.

    Returns:
        The mean over each slice.

    Raises:
        ArgumentTypeError: x is of integers and no dtype is given.
        NothingKeptError: A slice has nothing kept and `empty="raise"`.

    Gradient:
        1 / (number kept in the slice) for each element that is kept, exactly 0 for each that is not; a slice with
        nothing kept gives exactly 0 as well.

    Examples:
        >>> x = torch.tensor([[1.0, 2.0, float("inf")], [4.0, 5.0, 6.0]], requires_grad=True)
        >>> gg.masked.mean(x, dim=1, keep=x.detach() < 5).tolist()
        [1.5, 4.0]
    """
    slices = slices_of(x, dim, keep, exclude, function="masked.mean", keepdim=keepdim, empty=empty, dtype=dtype)
    slices.refuse(integers=True)
    if slices.mask is None:
        return slices.settle(slices.x.mean(slices.dims, keepdim=keepdim), natural=math.nan)
    total, number = sums(slices.x, slices.mask, slices.dims, keepdim)
    settled = nowhere_empty(number)
    # Not 0 / 0: where nothing is kept, that would send NaN back to whoever differentiates twice.
    result = total / (number if settled else number.clamp(min=1))
    result = result if result.dtype is slices.x.dtype else result.to(slices.x.dtype)
    return slices.settle(result, natural=math.nan if settled else None, number=number)


def count(
    x: torch.Tensor,
    dim: Dim = None,
    *,
    keepdim: bool = False,
    keep: torch.Tensor | None = None,
    exclude: Exclude = None,
    empty: Empty = ...,
) -> torch.Tensor:
    """Give how many elements are kept.

    Args:
        x: The values.
        dim: The dimension to reduce, several of them, or None for all.
        keepdim: Whether reduced dimensions stay with size 1.
        keep: A boolean mask that broadcasts to x; True takes part.
        exclude: A value or values that do not take part; NaN matches NaN.
        empty: What a slice with nothing kept gives instead of 0; "raise" for an error.

    Returns:
        The number for each slice, as int64.

    Raises:
        NothingKeptError: A slice has nothing kept and `empty="raise"`.

    Examples:
        >>> gg.masked.count(torch.tensor([[7, 255], [255, 255]]), dim=1, exclude=255)
        tensor([1, 0])
    """
    slices = slices_of(x, dim, keep, exclude, function="masked.count", keepdim=keepdim, empty=empty)
    number = slices.number()
    return slices.settle(number, natural=0, number=number)


def cumsum(
    x: torch.Tensor,
    dim: Dim = None,
    *,
    dtype: torch.dtype | None = None,
    keep: torch.Tensor | None = None,
    exclude: Exclude = None,
    empty: Empty = ...,
) -> torch.Tensor:
    """Add up the elements that are kept, one after the other.

    Args:
        x: The values.
        dim: The dimension to go along; several of them, or None for all, are gone through in row-major order.
        dtype: What x becomes before it is added; integers become int64 without it, as in torch.
        keep: A boolean mask that broadcasts to x; True takes part.
        exclude: A value or values that do not take part; NaN matches NaN.
        empty: What every place of a slice with nothing kept gives instead of 0; "raise" for an error.

    Returns:
        A tensor of the shape of x: at each place the sum of what is kept up to there. The place of an element that
        is left out repeats the sum before it.

    Raises:
        NothingKeptError: A slice has nothing kept and `empty="raise"`.

    Gradient:
        To each element that is kept the sum of the gradients from its place on; exactly 0 to each that is not.

    Examples:
        >>> gg.masked.cumsum(torch.tensor([1.0, float("nan"), 2.0]), exclude=float("nan"))
        tensor([1., 1., 3.])
    """
    slices = slices_of(x, dim, keep, exclude, function="masked.cumsum", keepdim=True, empty=empty, dtype=dtype)
    return slices.settle(slices.spread(slices.in_one_dim().filled(0).cumsum(-1, dtype=dtype)), natural=0)
