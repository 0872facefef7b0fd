"""Functions of the order of the kept elements: amax, amin, argmax, argmin, cummax, cummin, median, quantile, mode."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from numbers import Real
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

import torch
from torch import Tensor

from gradgate import _kernels
from gradgate._checks import wrong_value
from gradgate._kernels import Layout
from gradgate._names import describe, listed
from gradgate._torch_private import has_data
from gradgate.errors import ArgumentTypeError, ArgumentValueError
from gradgate.masked._slices import (
    HALVES,
    Dim,
    Empty,
    Exclude,
    Keep,
    Number,
    Slices,
    can_sync,
    counts,
    extreme,
    fill,
    first_place,
    group_of,
    is_recorded,
    slices_of,
    sums,
    takes,
)

_SELECTED = (torch.float32, torch.float64)  # what torch finds the median of without sorting

Interpolation: TypeAlias = Literal["linear", "lower", "higher", "midpoint", "nearest"]


def amax(
    x: Tensor, dim: Dim = None, *, keepdim: bool = False, keep: Keep = None, exclude: Exclude = None, empty: Empty = ...
) -> Tensor:
    """Return the largest of the kept elements.

    Args:
        x: The values, of any real dtype.
        dim: The dimension to reduce, several of them, or None for all.
        keepdim: Whether to keep the reduced dimensions, with size 1.
        keep: A boolean mask, broadcastable to x; True takes part.
        exclude: A value, or several, that do not take part; NaN matches NaN.
        empty: The result of a slice with nothing kept, instead of NaN; "raise" for an error.

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
    x: Tensor, dim: Dim = None, *, keepdim: bool = False, keep: Keep = None, exclude: Exclude = None, empty: Empty = ...
) -> Tensor:
    """Return the smallest of the kept elements.

    Args:
        x: The values, of any real dtype.
        dim: The dimension to reduce, several of them, or None for all.
        keepdim: Whether to keep the reduced dimensions, with size 1.
        keep: A boolean mask, broadcastable to x; True takes part.
        exclude: A value, or several, that do not take part; NaN matches NaN.
        empty: The result of a slice with nothing kept, instead of NaN; "raise" for an error.

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
    x: Tensor, dim: Dim = None, *, keepdim: bool = False, keep: Keep = None, exclude: Exclude = None, empty: Empty = ...
) -> Tensor:
    """Return where the largest of the kept elements is.

    Args:
        x: The values, of any real dtype.
        dim: The dimension to reduce; with several of them, or None for all, the index counts through them in
            row-major order.
        keepdim: Whether to keep the reduced dimensions, with size 1.
        keep: A boolean mask, broadcastable to x; True takes part.
        exclude: A value, or several, that do not take part; NaN matches NaN.
        empty: The index for a slice with nothing kept; by default, and for "raise", that is an error.

    Returns:
        The index in each slice, int64: the first of the largest, or of NaN if NaN is kept.

    Raises:
        ArgumentTypeError: x is complex.
        NothingKeptError: A slice has nothing kept, and `empty` is not an index.

    Examples:
        >>> gg.masked.argmax(torch.tensor([3, 255, 9]), exclude=255)
        tensor(2)
    """
    slices = slices_of(x, dim, keep, exclude, function="masked.argmax", keepdim=keepdim, empty=empty)
    return _position(slices, torch.argmax, _lowest)


def argmin(
    x: Tensor, dim: Dim = None, *, keepdim: bool = False, keep: Keep = None, exclude: Exclude = None, empty: Empty = ...
) -> Tensor:
    """Return where the smallest of the kept elements is.

    Args:
        x: The values, of any real dtype.
        dim: The dimension to reduce; with several of them, or None for all, the index counts through them in
            row-major order.
        keepdim: Whether to keep the reduced dimensions, with size 1.
        keep: A boolean mask, broadcastable to x; True takes part.
        exclude: A value, or several, that do not take part; NaN matches NaN.
        empty: The index for a slice with nothing kept; by default, and for "raise", that is an error.

    Returns:
        The index in each slice, int64: the first of the smallest, or of NaN if NaN is kept.

    Raises:
        ArgumentTypeError: x is complex.
        NothingKeptError: A slice has nothing kept, and `empty` is not an index.

    Examples:
        >>> gg.masked.argmin(torch.tensor([3, 0, 9]), exclude=0)
        tensor(0)
    """
    slices = slices_of(x, dim, keep, exclude, function="masked.argmin", keepdim=keepdim, empty=empty)
    return _position(slices, torch.argmin, _highest)


def _extreme(slices: Slices, reduce: Callable[..., Tensor], limit: Callable[[torch.dtype], Number]) -> Tensor:
    slices.refuse(complexes=True)
    if slices.whole and slices.size > 0:
        return reduce(slices.x, slices.dims, keepdim=slices.keepdim)
    slices = slices if slices.size else slices.with_mask()
    if slices.x.is_floating_point() or takes(slices, _kernels.DTYPES):
        found, sure = extreme(slices, largest=reduce is torch.amax)
        return found if sure else slices.fill_empty(found)
    return slices.fill_empty(reduce(slices.filled(limit(slices.x.dtype)), slices.dims, keepdim=slices.keepdim))


def _position(slices: Slices, find: Callable[..., Tensor], limit: Callable[[torch.dtype], Number]) -> Tensor:
    slices.refuse(complexes=True)
    one = (slices if slices.size else slices.with_mask()).in_one_dim()
    if (first := first_place(one, largest=find is torch.argmax)) is not None:
        place, sure = slices.reduced(first[0]), first[1]
        # An `empty` that does not fit is refused anyway.
        return place if sure and slices.empty is ... else slices.fill_empty(place, number=place >= 0)
    mask = one.full_mask()
    x = one.x.detach().to(torch.uint8) if one.x.dtype is torch.bool else one.x.detach()
    last = limit(x.dtype)
    filled = fill(x, mask, last)
    index = find(filled, -1)
    # Only if all kept elements equal the fill value can the search have found a left-out one.
    tied = filled.gather(-1, index.unsqueeze(-1)).squeeze(-1) == last
    if slices.empty is ... and can_sync(x, mask) and not tied.any():
        return slices.reduced(index)  # nothing is empty either: all of it would equal what stands for the left-out
    index = torch.where(tied, mask.to(torch.uint8).argmax(-1), index)
    return slices.fill_empty(slices.reduced(index), number=slices.reduced(one.number()))


class CumulativeResult(NamedTuple):
    """The largest or smallest values up to each place, and where they are."""

    values: Tensor
    indices: Tensor


def cummax(
    x: Tensor, dim: Dim = None, *, keep: Keep = None, exclude: Exclude = None, empty: Empty = ...
) -> CumulativeResult:
    """Return the largest of the kept elements up to each place, and where it is.

    Args:
        x: The values, of any real dtype.
        dim: The dimension to go along; several of them, or None for all, are gone through in row-major order.
        keep: A boolean mask, broadcastable to x; True takes part.
        exclude: A value, or several, that do not take part; NaN matches NaN.
        empty: The result where nothing is kept up to a place, instead of NaN; "raise" for an error.

    Returns:
        A named tuple (values, indices), both of the shape of x. The index is that of the last of equal elements, as in
        torch; -1 where nothing is kept up to there. A kept NaN is larger than all others.

    Raises:
        ArgumentTypeError: x is complex.
        NothingKeptError: Up to a place nothing is kept, and x is of integers, or `empty="raise"`.

    Gradient:
        To the element at the index, from all places that it stands for; exactly 0 to the others.

    Examples:
        >>> gg.masked.cummax(torch.tensor([3, 0, 1, 5]), exclude=0).values
        tensor([3, 3, 3, 5])
    """
    slices = slices_of(x, dim, keep, exclude, function="masked.cummax", keepdim=True, empty=empty)
    return _cumulative(slices, torch.cummax, _lowest)


def cummin(
    x: Tensor, dim: Dim = None, *, keep: Keep = None, exclude: Exclude = None, empty: Empty = ...
) -> CumulativeResult:
    """Return the smallest of the kept elements up to each place, and where it is.

    Args:
        x: The values, of any real dtype.
        dim: The dimension to go along; several of them, or None for all, are gone through in row-major order.
        keep: A boolean mask, broadcastable to x; True takes part.
        exclude: A value, or several, that do not take part; NaN matches NaN.
        empty: The result where nothing is kept up to a place, instead of NaN; "raise" for an error.

    Returns:
        A named tuple (values, indices), both of the shape of x. The index is that of the last of equal elements, as in
        torch; -1 where nothing is kept up to there. A kept NaN is smaller than all others.

    Raises:
        ArgumentTypeError: x is complex.
        NothingKeptError: Up to a place nothing is kept, and x is of integers, or `empty="raise"`.

    Gradient:
        To the element at the index, from all places that it stands for; exactly 0 to the others.

    Examples:
        >>> gg.masked.cummin(torch.tensor([3, 0, 1, 5]), exclude=0).values
        tensor([3, 3, 1, 1])
    """
    slices = slices_of(x, dim, keep, exclude, function="masked.cummin", keepdim=True, empty=empty)
    return _cumulative(slices, torch.cummin, _highest)


def _cumulative(slices: Slices, find: Callable[..., Any], limit: Callable[[torch.dtype], Number]) -> CumulativeResult:
    slices.refuse(complexes=True)
    one = slices.in_one_dim()
    mask = one.full_mask()
    x = one.x.detach().to(torch.uint8) if one.x.dtype is torch.bool else one.x.detach()
    last = limit(x.dtype)
    found = find(fill(x, mask, last), -1)
    # Where all elements kept up to a place equal the fill value, the last of them is meant.
    places = torch.arange(x.shape[-1], device=x.device).expand(x.shape)
    latest = torch.where(mask, places, -1).cummax(-1).values
    indices = torch.where(found.values == last, latest, found.indices)
    values = slices.spread(one.x.gather(-1, indices.clamp(min=0)))
    indices = slices.spread(indices)
    return CumulativeResult(slices.fill_empty(values, number=indices + 1), indices)


def _lowest(dtype: torch.dtype) -> Number:
    """Return what no element of the dtype is beneath."""
    if dtype is torch.bool:
        return False
    return -math.inf if dtype.is_floating_point else torch.iinfo(dtype).min


def _highest(dtype: torch.dtype) -> Number:
    if dtype is torch.bool:
        return True
    return math.inf if dtype.is_floating_point else torch.iinfo(dtype).max


def median(
    x: Tensor,
    dim: Dim = None,
    *,
    keepdim: bool = False,
    keep: Keep = None,
    exclude: Exclude = None,
    empty: Empty = ...,
    interpolation: Interpolation = "midpoint",
) -> Tensor:
    """Return the median of the kept elements: of an even number, the mean of the two in the middle.

    Args:
        x: The values, of any real dtype.
        dim: The dimension to reduce, several of them, or None for all.
        keepdim: Whether to keep the reduced dimensions, with size 1.
        keep: A boolean mask, broadcastable to x; True takes part.
        exclude: A value, or several, that do not take part; NaN matches NaN.
        empty: The result of a slice with nothing kept, instead of NaN; "raise" for an error.
        interpolation: Which of the two in the middle: "midpoint" for their mean as in numpy, "lower" as in
            torch.median, "higher", ...

    Returns:
        The median of each slice; NaN if NaN is kept. Integers become torch's default floating dtype unless one of
        the two is chosen ("lower", "higher", "nearest").

    Raises:
        ArgumentTypeError: x is complex.
        ArgumentValueError: The interpolation is unknown.
        NothingKeptError: A slice has nothing kept and the result is of integers, or `empty="raise"`.

    Gradient:
        1 to the element in the middle, or 1/2 to each of the two; exactly 0 to all others, to what is not kept, and
        to a slice where NaN is kept.

    Examples:
        >>> x = torch.tensor([1.0, 2.0, 3.0, 4.0, -999.0])
        >>> gg.masked.median(x, exclude=-999), gg.masked.median(x, exclude=-999, interpolation="lower")
        (tensor(2.5000), tensor(2.))
    """
    slices = slices_of(x, dim, keep, exclude, function="masked.median", keepdim=keepdim, empty=empty)
    return _quantile(slices, 0.5, interpolation)


def quantile(
    x: Tensor,
    q: float | Sequence[float] | Tensor,
    dim: Dim = None,
    *,
    keepdim: bool = False,
    weights: Tensor | None = None,
    keep: Keep = None,
    exclude: Exclude = None,
    empty: Empty = ...,
    interpolation: Interpolation = "linear",
) -> Tensor:
    """Return quantiles of the kept elements, for slices of any size.

    Args:
        x: The values, of any real dtype.
        q: Which quantile, from 0 to 1, or a sequence or 1-D tensor of them.
        dim: The dimension to reduce, several of them, or None for all.
        keepdim: Whether to keep the reduced dimensions, with size 1.
        weights: How often each element counts, of a shape that broadcasts to x: 2 is the element twice, 0 leaves it
            out, also NaN. The rank is q x (sum of weights - 1), so a sum of 1 has room for one element only: weights
            that are shares have to be multiplied by the number of elements.
        keep: A boolean mask, broadcastable to x; True takes part.
        exclude: A value, or several, that do not take part; NaN matches NaN.
        empty: The result of a slice with nothing kept, instead of NaN; "raise" for an error.
        interpolation: What lies between two elements, as in torch.quantile: "linear", "lower", "higher",
            "midpoint" or "nearest".

    Returns:
        The quantile of each slice; NaN if NaN is kept, and for several elements whose weights add up to 1 or less.
        With several q, they are the first dimension. Integers become torch's default floating dtype unless one element
        is chosen ("lower", "higher", "nearest") without weights.

    Raises:
        ArgumentTypeError: x is complex.
        ArgumentValueError: q is not between 0 and 1, or the interpolation is unknown. A q that is a tensor is not
            looked at unless x is of integers; for a value that is not between 0 and 1 the result is NaN.
        NothingKeptError: A slice has nothing kept and the result is of integers, or `empty="raise"`.

    Gradient:
        To the one or two elements that the quantile lies on or between, by their weights; exactly 0 to all others,
        to what is not kept, to a slice where NaN is kept, and to the weights.

    Examples:
        >>> gg.masked.quantile(torch.tensor([0.0, 1.0, 2.0, 3.0, 4.0, 1e9]), [0.25, 0.5], exclude=1e9)
        tensor([1., 2.])
    """
    slices = slices_of(x, dim, keep, exclude, function="masked.quantile", keepdim=keepdim, empty=empty)
    return _quantile(slices, q, interpolation, weights)


def _quantile(
    slices: Slices, q: float | Sequence[float] | Tensor, interpolation: Interpolation, weights: Tensor | None = None
) -> Tensor:
    slices.refuse(complexes=True)
    chooses = interpolation in ("lower", "higher", "nearest")
    if interpolation not in get_args(Interpolation):
        why = f"it is one of {listed(get_args(Interpolation))}."
        raise wrong_value(interpolation, "interpolation", slices.function, why, 'interpolation="lower"')
    if not slices.x.is_floating_point() and (weights is not None or not chooses):
        slices = slices.converted(torch.get_default_dtype())
    if weights is not None:
        slices, weights = slices.weighed(weights)
        weights = replace(slices, x=weights.detach().double(), keep=None).with_mask().in_one_dim().x
    one = slices.with_mask().in_one_dim()
    mask = one.full_mask()
    middle = isinstance(q, float) and q == 0.5 and interpolation in ("lower", "midpoint")
    if middle and weights is None and one.x.dtype in _SELECTED and can_sync(one.x, mask):
        found, kept = _selected(one, interpolation)
        return (
            slices.reduced(found)
            if kept is None
            else slices.fill_empty(slices.reduced(found), None, slices.reduced(kept))
        )
    several, levels = _levels(q, slices)
    number = mask.sum(-1)
    # NaN and what is left out go to the end together; a slice with NaN in it is NaN, whatever its order.
    is_float = one.x.is_floating_point()
    ordered, order = one.filled(math.nan if is_float else _highest(one.x.dtype)).sort(stable=True, dim=-1)
    amount, reached = number.unsqueeze(-1), None
    if weights is not None:
        reached = weights.gather(-1, order).cumsum(-1)
        amount = reached[..., -1:]
    result = _at(ordered, levels * (amount - 1).clamp(min=0), interpolation, reached)
    if is_float:
        poisoned = (mask & torch.isnan(one.x)).any(-1, keepdim=True)
        if weights is not None:  # shares add up to 1 but for rounding
            poisoned = poisoned | ((amount < 1.001) & (number.unsqueeze(-1) > 1))
        result = torch.where(poisoned | ~((levels >= 0) & (levels <= 1)), math.nan, result)
    result = result.movedim(-1, 0) if several else result.squeeze(-1)
    return slices.fill_empty(slices.reduced(result, leading=int(several)), number=slices.reduced(number))


def _selected(slices: Slices, interpolation: Interpolation) -> tuple[Tensor, Tensor | None]:
    """Return medians along the last dimension and the numbers kept, without putting everything in order."""
    # The numbers are None where it was seen that nothing is empty.
    x, mask = slices.x, slices.full_mask()
    filled = fill(x.detach(), mask, math.nan)
    low, index = filled.nanmedian(-1, keepdim=True)
    result = x.gather(-1, index) if is_recorded(x) else low
    # A sum that is finite says that nothing is NaN ten times sooner than torch.isnan.
    if (
        interpolation == "lower"
        and not low.isnan().any()
        and (math.isfinite(x.detach().sum().item()) or not x.isnan().any())
    ):
        return result.squeeze(-1), None
    total, number, _ = sums(replace(slices, x=x.detach(), keepdim=True), counted=True)
    assert number is not None
    finite = math.isfinite(total.sum().item())
    if interpolation == "midpoint":
        # The other one in the middle is the next larger one, unless there are so many equal to the lower one.
        above = filled > low
        alone = (number % 2 == 1) | (2 * (number - counts(above, x.shape, slices.dims, True)) > number)
        higher = fill(filled, above, math.inf).argmin(-1, keepdim=True)
        if not finite:  # where the next larger one is infinite, so is what stands for all others
            higher = torch.where(above.gather(-1, higher), higher, above.to(torch.uint8).argmax(-1, keepdim=True))
        other = torch.where(alone, index, higher)
        result = result * 0.5 + x.gather(-1, other) * 0.5
    if not finite:  # NaN may be kept
        result = torch.where((x.detach().isnan() & mask).any(-1, keepdim=True), math.nan, result)
    return result.squeeze(-1), number.squeeze(-1)


def _levels(q: float | Sequence[float] | Tensor, slices: Slices) -> tuple[bool, Tensor]:
    """Return whether there are several quantiles, and all of them in a 1-D float64 tensor."""
    if isinstance(q, Tensor):
        if q.is_complex():
            _check_levels([q], slices.function)
        if q.dim() > 1:
            why = "quantiles become the first dimension of the result, so they have at most one dimension."
            raise wrong_value(q, "q", slices.function, why, "q=q.flatten()")
        levels = q.to(slices.x.device, torch.float64).reshape(-1)
        if not slices.x.is_floating_point() and has_data(levels):  # an integer cannot say NaN
            _check_levels(levels.tolist(), slices.function)
        return q.dim() == 1, levels
    several = isinstance(q, Iterable) and not isinstance(q, (str, bytes))
    wanted = list(q) if several else [q]  # type: ignore[arg-type]
    _check_levels(wanted, slices.function)
    return several, torch.tensor(wanted, dtype=torch.float64, device=slices.x.device)


def _check_levels(levels: list[Any], function: str) -> None:
    for level in levels:
        if not isinstance(level, Real):
            raise ArgumentTypeError(
                f"{function}(): `q` has {describe(level)}.",
                why="a quantile is a number from 0 to 1, or several of them.",
                fix="q=0.5   # or [0.25, 0.75]",
            )
        if not 0 <= float(level) <= 1:
            raise ArgumentValueError(
                f"{function}(): `q` has {level!r}.",
                why="a quantile is a share of the elements, from 0 (the smallest) to 1 (the largest).",
                fix=f"q={float(level) / 100 if 1 < float(level) <= 100 else 0.5}",
            )


def _at(ordered: Tensor, rank: Tensor, interpolation: Interpolation, reached: Tensor | None) -> Tensor:
    """Read values in order at ranks that may lie between two of them, by the sums of weights reached if given."""

    def value(rank: Tensor) -> Tensor:
        place = rank.long() if reached is None else torch.searchsorted(reached, rank.contiguous(), right=True)
        return ordered.gather(-1, place.clamp(0, ordered.shape[-1] - 1))

    if interpolation == "nearest":
        rank = rank.round()
    below, above = rank.detach().floor(), rank.detach().ceil()
    low = value(below)
    if interpolation in ("lower", "nearest"):
        return low
    high = value(above)
    if interpolation == "higher":
        return high
    weight = torch.full_like(rank, 0.5) if interpolation == "midpoint" else rank - below
    weight = weight.to(ordered.dtype)
    # Between infinities there is no distance to go along, but there may be a mean.
    finite = torch.isfinite(low) & torch.isfinite(high)
    between = torch.where(weight == 0, low, low * (1 - weight) + high * weight)
    return torch.where(finite, torch.lerp(low, high, weight), between)


class ModeResult(NamedTuple):
    """The most frequent values, where they are, and how often they occur."""

    values: Tensor
    indices: Tensor
    counts: Tensor


def mode(
    x: Tensor, dim: Dim = -1, *, keepdim: bool = False, keep: Keep = None, exclude: Exclude = None, empty: Empty = ...
) -> ModeResult:
    """Return the most frequent of the kept values, where it is, and how often it occurs.

    Of several equally frequent values it is the smallest. All kept NaNs count as one value, larger than all
    others; 0.0 and -0.0 count as one. The index is that of the last kept occurrence, always.

    Args:
        x: The values; anything but complex.
        dim: One dimension, several, or None for all.
        keepdim: Keep the reduced dimensions with size 1.
        keep: A boolean mask, broadcastable to x; True takes part.
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
    slices = slices_of(x, dim, keep, exclude, function="masked.mode", keepdim=keepdim, empty=empty)
    slices.refuse(complexes=True)
    rows = slices if slices.size else slices.with_mask()
    found, indices, counts, certain = _native(rows) if _counts(rows) else _composed(rows)
    values = _picked(slices, rows, indices if certain else indices.clamp(min=0)) if found is None else found
    values, indices, counts = (slices.reduced(result) for result in (values, indices, counts))
    if certain:
        slices.fill_empty(
            values.new_empty(0), number=counts.new_ones(0)
        )  # an `empty` that does not fit is refused anyway
    else:
        values = slices.fill_empty(values, number=counts)
    return ModeResult(values, indices, counts)


def _counts(slices: Slices) -> bool:
    """Return whether the kernels can find the mode."""
    return takes(slices, {*_kernels.DTYPES, torch.bool}) and slices.size < 1 << 31


def _native(slices: Slices) -> tuple[Tensor | None, Tensor, Tensor, bool]:
    """Return the modes, None if autograd has to pick them, the indices, the counts, and if no slice is empty."""
    group = group_of(slices.x.shape, slices.dims)
    x = group.arranged(slices.x.detach())
    if x.dtype is torch.bool:
        x = (x.view(torch.uint8) != 0).view(torch.uint8)  # the byte of True may be any but 0
    excluded = None if x.dtype in HALVES else slices.excluded
    if excluded is not None:
        layout = Layout(x, group.shape, None, excluded)  # type: ignore[arg-type]  # complex dtypes are refused
    else:
        layout = Layout(x, group.shape, None if slices.mask is None else group.arranged(slices.mask))
    values, indices, counts, empty = _kernels.mode(layout, group.results[False], excluding=excluded is not None)
    return None if is_recorded(slices.x) else values.to(slices.x.dtype), indices, counts, empty == 0


def _composed(slices: Slices) -> tuple[Tensor | None, Tensor, Tensor, bool]:
    """Find the mode by sorting, without a look at the data, so that it can be traced and batched."""
    rows = slices.in_one_dim()
    x, mask = rows.x.detach(), rows.mask
    ordered, order = x.sort(dim=-1, stable=True)
    kept = (torch.ones_like(order, dtype=torch.bool) if mask is None else rows.full_mask().gather(-1, order)).long()
    differs = ordered[..., 1:] != ordered[..., :-1]
    if x.is_floating_point():
        differs = differs & ~(ordered[..., 1:].isnan() & ordered[..., :-1].isnan())
    starts = torch.cat([torch.ones_like(kept[..., :1], dtype=torch.bool), differs], -1)
    total = kept.cumsum(-1)
    before = torch.where(starts, total - kept, 0).cummax(-1).values
    # How many kept equals each element has, itself included, up to its place: the first maximum is the last kept
    # occurrence of the smallest of the most frequent values.
    counts, place = (total - before).max(-1)
    indices = torch.where(counts == 0, -1, order.gather(-1, place.unsqueeze(-1)).squeeze(-1))
    return None, indices, counts, mask is None


def _picked(slices: Slices, rows: Slices, indices: Tensor) -> Tensor:
    """Return the elements of x at the indices; without the dimension moved to the end, where that can be."""
    if len(slices.dims) == 1 and slices.size:
        dim = slices.dims[0]
        return slices.x.gather(dim, indices.unsqueeze(dim)).squeeze(dim)
    return rows.in_one_dim().x.gather(-1, indices.unsqueeze(-1)).squeeze(-1)
