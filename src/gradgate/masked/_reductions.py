"""Reductions that add or multiply: sum, prod, mean, count, cumsum, cumprod, var, std, norm, normalize."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from gradgate._checks import check_number, check_order
from gradgate.masked._order import amin
from gradgate.masked._slices import HALVES, Dim, Empty, Exclude, Keep, Slices, fill, slices_of, squares, sums, variance


def sum(
    x: Tensor,
    dim: Dim = None,
    *,
    keepdim: bool = False,
    dtype: torch.dtype | None = None,
    weights: Tensor | None = None,
    keep: Keep = None,
    exclude: Exclude = None,
    empty: Empty = ...,
) -> Tensor:
    """Add up the kept elements.

    Args:
        x: The values.
        dim: The dimension to reduce, several of them, or None for all.
        keepdim: Whether to keep the reduced dimensions, with size 1.
        dtype: The dtype to convert x to first; by default integers become int64, as in torch.
        weights: The weight of each element, broadcastable to x: 2 counts an element twice, 0 leaves it out, even NaN.
        keep: A boolean mask, broadcastable to x; True takes part.
        exclude: A value, or several, that do not take part; NaN matches NaN.
        empty: The result of a slice with nothing kept, instead of 0; "raise" for an error.

    Returns:
        The sum over each slice.

    Raises:
        NothingKeptError: A slice has nothing kept and `empty="raise"`.

    Gradient:
        1 (its weight) for each kept element, exactly 0 for the others; to the weights of kept
        elements, those elements.

    Examples:
        >>> gg.masked.sum(torch.tensor([1.0, float("nan"), 2.0]), exclude=float("nan"))
        tensor(3.)
    """
    slices = slices_of(x, dim, keep, exclude, function="masked.sum", keepdim=keepdim, empty=empty, dtype=dtype)
    if weights is not None:
        slices, weights = slices.weighed(weights)
        total = (slices.filled(0) * weights).sum(slices.dims, keepdim=keepdim)
        return slices.fill_empty(total.to(slices.x.dtype) if slices.x.dtype in HALVES else total, natural=0)
    if slices.whole:
        return slices.fill_empty(slices.x.sum(slices.dims, keepdim=keepdim, dtype=dtype), natural=0)
    found = sums(slices, counted=empty is not ...)
    return slices.fill_empty(found.total if dtype is None else found.total.to(dtype), 0, found.number)


def prod(
    x: Tensor,
    dim: Dim = None,
    *,
    keepdim: bool = False,
    dtype: torch.dtype | None = None,
    keep: Keep = None,
    exclude: Exclude = None,
    empty: Empty = ...,
) -> Tensor:
    """Multiply the kept elements.

    Args:
        x: The values.
        dim: The dimension to reduce, several of them, or None for all.
        keepdim: Whether to keep the reduced dimensions, with size 1.
        dtype: The dtype to convert x to first; by default integers become int64, as in torch.
        keep: A boolean mask, broadcastable to x; True takes part.
        exclude: A value, or several, that do not take part; NaN matches NaN.
        empty: The result of a slice with nothing kept, instead of 1; "raise" for an error.

    Returns:
        The product over each slice.

    Raises:
        NothingKeptError: A slice has nothing kept and `empty="raise"`.

    Gradient:
        For a kept element the product of the other kept ones, even if some are 0; exactly 0 for the others.

    Examples:
        >>> gg.masked.prod(torch.tensor([2, 0, 3]), exclude=0)
        tensor(6)
    """
    slices = slices_of(x, dim, keep, exclude, function="masked.prod", keepdim=keepdim, empty=empty, dtype=dtype)
    return slices.fill_empty(slices.reduced(slices.in_one_dim().filled(1).prod(-1, dtype=dtype)), natural=1)


def mean(
    x: Tensor,
    dim: Dim = None,
    *,
    keepdim: bool = False,
    dtype: torch.dtype | None = None,
    weights: Tensor | None = None,
    keep: Keep = None,
    exclude: Exclude = None,
    empty: Empty = ...,
) -> Tensor:
    """Return the mean of the kept elements: their sum over their number.

    Args:
        x: The values, floating or complex.
        dim: The dimension to reduce, several of them, or None for all.
        keepdim: Whether to keep the reduced dimensions, with size 1.
        dtype: The dtype to convert x to first; required for integers.
        weights: The weight of each element, broadcastable to x: 2 counts an element twice, 0 leaves it out, even NaN.
        keep: A boolean mask, broadcastable to x; True takes part.
        exclude: A value, or several, that do not take part; NaN matches NaN.
        empty: The result of a slice with nothing kept, instead of NaN; "raise" for an error.

    Returns:
        The mean over each slice.

    Raises:
        ArgumentTypeError: x is of integers and no dtype is given.
        NothingKeptError: A slice has nothing kept and `empty="raise"`.

    Gradient:
        1 / (number kept in the slice), or its share of the weights, for each kept element, exactly 0 for the
        others and for a slice with nothing kept. To each kept weight, its element's distance to
        the mean over the sum of weights.

    Examples:
        >>> x = torch.tensor([[1.0, 2.0, float("inf")], [4.0, 5.0, 6.0]], requires_grad=True)
        >>> gg.masked.mean(x, dim=1, keep=x.detach() < 5).tolist()
        [1.5, 4.0]
    """
    slices = slices_of(x, dim, keep, exclude, function="masked.mean", keepdim=keepdim, empty=empty, dtype=dtype)
    slices.refuse(integers=True)
    if weights is not None:
        slices, weights = slices.weighed(weights)
        total, amount = _weighed_sums(slices, weights, keepdim)
        number = slices.number()
        return slices.fill_empty((total / torch.where(number == 0, 1, amount)).to(slices.x.dtype), number=number)
    if slices.whole:
        return slices.fill_empty(slices.x.mean(slices.dims, keepdim=keepdim), natural=math.nan)
    found = sums(slices, mean=True, counted=empty is not ...)
    return slices.fill_empty(found.total, math.nan, found.number)


def count(
    x: Tensor, dim: Dim = None, *, keepdim: bool = False, keep: Keep = None, exclude: Exclude = None, empty: Empty = ...
) -> Tensor:
    """Return how many elements are kept.

    Args:
        x: The values.
        dim: The dimension to reduce, several of them, or None for all.
        keepdim: Whether to keep the reduced dimensions, with size 1.
        keep: A boolean mask, broadcastable to x; True takes part.
        exclude: A value, or several, that do not take part; NaN matches NaN.
        empty: The result of a slice with nothing kept, instead of 0; "raise" for an error.

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
    return slices.fill_empty(number, natural=0, number=number)


def cumsum(
    x: Tensor,
    dim: Dim = None,
    *,
    dtype: torch.dtype | None = None,
    keep: Keep = None,
    exclude: Exclude = None,
    empty: Empty = ...,
) -> Tensor:
    """Add up the kept elements, one after the other.

    Args:
        x: The values.
        dim: The dimension to go along; several of them, or None for all, are gone through in row-major order.
        dtype: The dtype to convert x to first; by default integers become int64, as in torch.
        keep: A boolean mask, broadcastable to x; True takes part.
        exclude: A value, or several, that do not take part; NaN matches NaN.
        empty: The result in every place of a slice with nothing kept, instead of 0; "raise" for an error.

    Returns:
        A tensor of the shape of x: at each place the sum of the elements kept up to there. A left-out element
        repeats the sum before it.

    Raises:
        NothingKeptError: A slice has nothing kept and `empty="raise"`.

    Gradient:
        To each kept element the sum of the gradients from its place on; exactly 0 to the others.

    Examples:
        >>> gg.masked.cumsum(torch.tensor([1.0, float("nan"), 2.0]), exclude=float("nan"))
        tensor([1., 1., 3.])
    """
    slices = slices_of(x, dim, keep, exclude, function="masked.cumsum", keepdim=True, empty=empty, dtype=dtype)
    return slices.fill_empty(slices.spread(slices.in_one_dim().filled(0).cumsum(-1, dtype=dtype)), natural=0)


def cumprod(
    x: Tensor,
    dim: Dim = None,
    *,
    dtype: torch.dtype | None = None,
    keep: Keep = None,
    exclude: Exclude = None,
    empty: Empty = ...,
) -> Tensor:
    """Multiply the kept elements, one after the other.

    Args:
        x: The values.
        dim: The dimension to go along; several of them, or None for all, are gone through in row-major order.
        dtype: The dtype to convert x to first; by default integers become int64, as in torch.
        keep: A boolean mask, broadcastable to x; True takes part.
        exclude: A value, or several, that do not take part; NaN matches NaN.
        empty: The result in every place of a slice with nothing kept, instead of 1; "raise" for an error.

    Returns:
        A tensor of the shape of x: at each place the product of the elements kept up to there. A left-out
        element repeats the product before it.

    Raises:
        NothingKeptError: A slice has nothing kept and `empty="raise"`.

    Gradient:
        That of torch.cumprod for each kept element, exact at zeros; exactly 0 to the others.

    Examples:
        >>> gg.masked.cumprod(torch.tensor([2.0, float("nan"), 3.0]), exclude=float("nan"))
        tensor([2., 2., 6.])
    """
    slices = slices_of(x, dim, keep, exclude, function="masked.cumprod", keepdim=True, empty=empty, dtype=dtype)
    return slices.fill_empty(slices.spread(slices.in_one_dim().filled(1).cumprod(-1, dtype=dtype)), natural=1)


def var(
    x: Tensor,
    dim: Dim = None,
    *,
    correction: float = 1,
    keepdim: bool = False,
    weights: Tensor | None = None,
    keep: Keep = None,
    exclude: Exclude = None,
    empty: Empty = ...,
) -> Tensor:
    """Return the variance of the kept elements.

    Args:
        x: The values, floating or complex.
        dim: The dimension to reduce, several of them, or None for all.
        correction: What is taken from the number kept before dividing by it, as in torch: 1 for a sample, 0 for all.
            With weights it is taken from their sum, so 1 is for weights that count; 0 for any others.
        keepdim: Whether to keep the reduced dimensions, with size 1.
        weights: The weight of each element, broadcastable to x: 2 counts an element twice, 0 leaves it out, even NaN.
        keep: A boolean mask, broadcastable to x; True takes part.
        exclude: A value, or several, that do not take part; NaN matches NaN.
        empty: The result of a slice with nothing kept, instead of NaN; "raise" for an error.

    Returns:
        The variance over each slice, real. With no more elements kept than `correction` it is that of torch: NaN for
        one element.

    Raises:
        ArgumentTypeError: x is of integers.
        NothingKeptError: A slice has nothing kept and `empty="raise"`.

    Gradient:
        2 (x - mean) / (number kept - correction) for each kept element, exactly 0 for the others. It is
        exactly 0 in a slice with no more elements kept than `correction`, where that of torch.var is NaN.

    Examples:
        >>> gg.masked.var(torch.tensor([1.0, 2.0, 3.0, -999.0]), exclude=-999)
        tensor(1.)
    """
    slices = slices_of(x, dim, keep, exclude, function="masked.var", keepdim=keepdim, empty=empty)
    return _deviation(slices, correction, weights, root=False)


def std(
    x: Tensor,
    dim: Dim = None,
    *,
    correction: float = 1,
    keepdim: bool = False,
    weights: Tensor | None = None,
    keep: Keep = None,
    exclude: Exclude = None,
    empty: Empty = ...,
) -> Tensor:
    """Return the standard deviation of the kept elements.

    Args:
        x: The values, floating or complex.
        dim: The dimension to reduce, several of them, or None for all.
        correction: What is taken from the number kept before dividing by it, as in torch: 1 for a sample, 0 for all.
            With weights it is taken from their sum, so 1 is for weights that count; 0 for any others.
        keepdim: Whether to keep the reduced dimensions, with size 1.
        weights: The weight of each element, broadcastable to x: 2 counts an element twice, 0 leaves it out, even NaN.
        keep: A boolean mask, broadcastable to x; True takes part.
        exclude: A value, or several, that do not take part; NaN matches NaN.
        empty: The result of a slice with nothing kept, instead of NaN; "raise" for an error.

    Returns:
        The standard deviation over each slice, real. With no more elements kept than `correction` it is that of
        torch: NaN for one element.

    Raises:
        ArgumentTypeError: x is of integers.
        NothingKeptError: A slice has nothing kept and `empty="raise"`.

    Gradient:
        That of the variance over twice the standard deviation for each kept element, exactly 0 for
        the others. It is exactly 0 where the standard deviation is 0, as in torch, and in a slice with no more
        elements kept than `correction`, where that of torch.std is NaN.

    Examples:
        >>> gg.masked.std(torch.tensor([1.0, 2.0, 3.0, -999.0]), exclude=-999)
        tensor(1.)
    """
    slices = slices_of(x, dim, keep, exclude, function="masked.std", keepdim=keepdim, empty=empty)
    return _deviation(slices, correction, weights, root=True)


def _deviation(slices: Slices, correction: float, weights: Tensor | None, *, root: bool) -> Tensor:
    """Return the variance of the kept elements of each slice, or its root."""
    slices.refuse(integers=True)
    why = "it is taken from the number of elements: 1 for a sample, 0 for all there are."
    check_number(correction, "correction", slices.function, why, "correction=1")
    if weights is None:
        if slices.whole and slices.size > correction and slices.x.numel():
            plain = torch.std if root else torch.var
            return plain(slices.x, slices.dims, correction=correction, keepdim=slices.keepdim)
        if (found := variance(slices, correction)) is not None:
            return slices.fill_empty(found.sqrt_() if root else found, natural=math.nan)
    spread, undefined, number = _variance(slices, correction, weights)
    if root:
        flat = spread == 0
        spread = torch.where(flat, 0.0, torch.where(flat, 1.0, spread).sqrt())
    settled = torch.where(number > correction, spread, undefined)
    return slices.fill_empty(settled.to(undefined.dtype), natural=math.nan, number=number)


def _weighed_sums(slices: Slices, weights: Tensor, keepdim: bool) -> tuple[Tensor, Tensor]:
    total = (slices.filled(0) * weights).sum(slices.dims, keepdim=keepdim)
    return total, weights.sum(slices.dims, keepdim=keepdim)


def _weighed_squares(slices: Slices, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Add up the weighed squares of the distances to the weighed mean, and the weights."""
    slices, weights = slices.weighed(weights)
    total, amount = _weighed_sums(slices, weights, True)
    distance = slices.filled(0) - total / torch.where(amount == 0, 1, amount)
    distance = fill(distance, slices.full_mask(), 0)
    found = ((distance * distance.conj()).real * weights).sum(slices.dims, keepdim=slices.keepdim)
    return found, amount.reshape(found.shape)


def distances(slices: Slices) -> tuple[Tensor, Tensor, Tensor]:
    """Return the distances to the mean of the slice, 0 for what is left out, the means, and the numbers; keeps dims."""
    # Halves become float32.
    mask = slices.full_mask()
    found = sums(replace(slices, keepdim=True), counted=True, wide=True)
    assert found.number is not None
    center = found.total / found.number.clamp(min=1)
    # What is left out is taken away before and after: its distance to the center is no number to build on.
    return fill(slices.filled(0) - center, mask, 0), center, found.number


def _variance(slices: Slices, correction: float, weights: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Return the variance where it is defined, what stands in its place elsewhere, and the number kept."""
    x, dtype = slices.x, slices.x.dtype
    if weights is not None:
        found, number = _weighed_squares(slices, weights)
        dtype = x.real.dtype
        if correction > 0:  # shares add up to 1 but for rounding, which must not be divided by
            number = torch.where((number - correction).abs() < 1e-3, correction, number)
    elif x.is_complex():
        mask = slices.full_mask()
        (found, number), (more, _) = (squares(replace(slices, x=part, keep=mask)) for part in (x.real, x.imag))
        found, dtype = found + more, found.dtype
    else:
        found, number = squares(slices.converted(torch.float32) if dtype in HALVES else slices)
    freedom = (number - correction).clamp(min=0)
    # torch divides by 0 here: NaN for one element, infinity for a correction that is larger than the number.
    undefined = (found.detach() / freedom).to(dtype)
    return found / torch.where(freedom > 0, freedom, 1), undefined, number


def norm(
    x: Tensor,
    dim: Dim = None,
    *,
    ord: float = 2,
    keepdim: bool = False,
    dtype: torch.dtype | None = None,
    keep: Keep = None,
    exclude: Exclude = None,
    empty: Empty = ...,
) -> Tensor:
    """Return the vector norm of the kept elements.

    Args:
        x: The values, floating or complex.
        dim: The dimension to reduce, several of them, or None for all.
        ord: Which norm, as in torch.linalg.vector_norm: 2, 1, 0, infinity, or any other number.
        keepdim: Whether to keep the reduced dimensions, with size 1.
        dtype: The dtype to convert x to first.
        keep: A boolean mask, broadcastable to x; True takes part.
        exclude: A value, or several, that do not take part; NaN matches NaN.
        empty: The result of a slice with nothing kept, instead of 0; "raise" for an error.

    Returns:
        The norm of each slice, real.

    Raises:
        ArgumentTypeError: x is of integers and no dtype is given.
        NothingKeptError: A slice has nothing kept and `empty="raise"`.

    Gradient:
        That of torch.linalg.vector_norm for each kept element, exactly 0 for the others; exactly 0
        where the norm is 0.

    Examples:
        >>> gg.masked.norm(torch.tensor([3.0, float("nan"), 4.0]), exclude=float("nan"))
        tensor(5.)
    """
    slices = slices_of(x, dim, keep, exclude, function="masked.norm", keepdim=keepdim, empty=empty, dtype=dtype)
    slices.refuse(integers=True)
    return slices.fill_empty(_norm(slices, ord, slices.filled(0)), natural=0)


def normalize(
    x: Tensor,
    dim: Dim = None,
    *,
    ord: float = 2,
    eps: float = 1e-12,
    keep: Keep = None,
    exclude: Exclude = None,
    empty: Empty = ...,
) -> Tensor:
    """Divide the kept elements by their norm.

    Args:
        x: The values, floating or complex.
        dim: The dimension to take the norm over, several of them, or None for all.
        ord: Which norm, as in torch.linalg.vector_norm.
        eps: A smaller norm counts as this, so that 0 stays 0. The gradient there is 1 / eps, as in
            torch.nn.functional.normalize; `masked.safe_normalize` has none. No less than the dtype can hold.
        keep: A boolean mask, broadcastable to x; True takes part.
        exclude: A value, or several, that do not take part; NaN matches NaN.
        empty: The result in every place of a slice with nothing kept, instead of 0; "raise" for an error.

    Returns:
        A tensor of the shape of x, 0 where an element is left out.

    Raises:
        ArgumentTypeError: x is of integers.
        NothingKeptError: A slice has nothing kept and `empty="raise"`.

    Gradient:
        That of x / max(norm, eps) for the kept elements; exactly 0 for the others, and nothing comes back from there.

    Examples:
        >>> gg.masked.normalize(torch.tensor([3.0, 1e9, 4.0]), exclude=1e9)
        tensor([0.6000, 0.0000, 0.8000])
    """
    slices = slices_of(x, dim, keep, exclude, function="masked.normalize", keepdim=True, empty=empty)
    slices.refuse(integers=True)
    check_number(eps, "eps", "masked.normalize", "no norm counts as less than this number.", "eps=1e-12")
    # 1e-12 is 0 for a float16, and 0 / 0 would not stay 0.
    least = max(eps, torch.finfo(slices.x.dtype).tiny)
    filled = slices.filled(0)
    divided = filled / _norm(slices, ord, filled).clamp_min(least)
    return slices.fill_empty(divided if slices.mask is None else fill(divided, slices.mask, 0), natural=0)


def _norm(slices: Slices, order: float, filled: Tensor) -> Tensor:
    """Return the norm of each slice, 0 for one with nothing kept; filled has 0 in the place of what is left out."""
    check_order(order, function=slices.function)
    if slices.size == 0:
        slices = slices.with_mask()
        filled = slices.filled(0)
    if order == -math.inf:
        return amin(slices.filled(1).abs(), slices.dims, keepdim=slices.keepdim, keep=slices.mask, empty=0.0)
    if order < 0 and slices.mask is not None:
        # A negative power makes nothing of infinity, as it makes infinity of 0.
        filled = fill(slices.filled(1).abs(), slices.mask, math.inf)
    length: Tensor = torch.linalg.vector_norm(filled, order, slices.dims, keepdim=slices.keepdim)
    if order < 0:
        return length if slices.mask is None else torch.where(slices.number() == 0, 0.0, length)
    # torch's own gradient is 0 here, but not its second one.
    return torch.where(length == 0, 0.0, length)
