"""Where what is kept lies in order: median and quantile."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, Literal, TypeAlias, get_args

import torch

from gradgate._names import describe, listed
from gradgate._torch_compat import has_data
from gradgate.errors import ArgumentTypeError, ArgumentValueError
from gradgate.masked._arguments import is_real
from gradgate.masked._kernels import counts, fill, sums
from gradgate.masked._slices import Dim, Empty, Slices, slices_of
from gradgate.masked._valid import Exclude
from gradgate.masked._ways import may_look, recorded

__all__ = ["median", "quantile"]

_SELECTED = (torch.float32, torch.float64)  # what torch finds the median of without sorting

Interpolation: TypeAlias = Literal["linear", "lower", "higher", "midpoint", "nearest"]


def median(
    x: torch.Tensor,
    dim: Dim = None,
    *,
    keepdim: bool = False,
    keep: torch.Tensor | None = None,
    exclude: Exclude = None,
    empty: Empty = ...,
    interpolation: Interpolation = "midpoint",
) -> torch.Tensor:
    """Give the median of the elements that are kept: of an even number, the mean of the two in the middle.

    Args:
        x: The values, of any real dtype.
        dim: The dimension to reduce, several of them, or None for all.
        keepdim: Whether reduced dimensions stay with size 1.
        keep: A boolean mask that broadcasts to x; True takes part.
        exclude: A value or values that do not take part; NaN matches NaN.
        empty: What a slice with nothing kept gives instead of NaN; "raise" for an error.
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
    x: torch.Tensor,
    q: float | Sequence[float] | torch.Tensor,
    dim: Dim = None,
    *,
    keepdim: bool = False,
    keep: torch.Tensor | None = None,
    exclude: Exclude = None,
    empty: Empty = ...,
    interpolation: Interpolation = "linear",
) -> torch.Tensor:
    """Give quantiles of the elements that are kept, for slices of any size.

    Args:
        x: The values, of any real dtype.
        q: Which quantile, from 0 to 1, or a sequence or 1-D tensor of them.
        dim: The dimension to reduce, several of them, or None for all.
        keepdim: Whether reduced dimensions stay with size 1.
        keep: A boolean mask that broadcasts to x; True takes part.
        exclude: A value or values that do not take part; NaN matches NaN.
        empty: What a slice with nothing kept gives instead of NaN; "raise" for an error.
        interpolation: What lies between two elements, as in torch.quantile: "linear", "lower", "higher",
            "midpoint" or "nearest".

    Returns:
        The quantile of each slice; NaN if NaN is kept. With several q, they are the first dimension. Integers become
        torch's default floating dtype unless one element is chosen ("lower", "higher", "nearest").

    Raises:
        ArgumentTypeError: x is complex.
        ArgumentValueError: q is not between 0 and 1, or the interpolation is unknown. A q that is a tensor is not
            looked at unless x is of integers; a value of it that is not between 0 and 1 gives NaN.
        NothingKeptError: A slice has nothing kept and the result is of integers, or `empty="raise"`.

    Gradient:
        To the one or two elements that the quantile lies on or between, by their weights; exactly 0 to all others,
        to what is not kept, and to a slice where NaN is kept.

    Examples:
        >>> gg.masked.quantile(torch.tensor([0.0, 1.0, 2.0, 3.0, 4.0, 1e9]), [0.25, 0.5], exclude=1e9)
        tensor([1., 2.])
    """
    slices = slices_of(x, dim, keep, exclude, function="masked.quantile", keepdim=keepdim, empty=empty)
    return _quantile(slices, q, interpolation)


def _quantile(slices: Slices, q: float | Sequence[float] | torch.Tensor, interpolation: Interpolation) -> torch.Tensor:
    slices.refuse(complexes=True)
    chooses = interpolation in ("lower", "higher", "nearest")
    if interpolation not in get_args(Interpolation):
        raise ArgumentValueError(
            f"{slices.function}(): `interpolation` is {describe(interpolation)}.",
            why=f"it is one of {listed(get_args(Interpolation))}.",
            fix='interpolation="lower"',
        )
    if not slices.x.is_floating_point() and not chooses:
        slices.x = slices.x.to(torch.get_default_dtype())
    one = slices.with_mask().in_one_dim()
    mask = one.full_mask()
    middle = isinstance(q, float) and q == 0.5 and interpolation in ("lower", "midpoint")
    if middle and one.x.dtype in _SELECTED and may_look(one.x, mask):
        found, kept = _selected(one, interpolation)
        return (
            slices.reduced(found) if kept is None else slices.settle(slices.reduced(found), None, slices.reduced(kept))
        )
    several, levels = _levels(q, slices)
    number = mask.sum(-1)
    # NaN and what is left out go to the end together; a slice with NaN in it is NaN, whatever its order.
    is_float = one.x.is_floating_point()
    ordered = one.filled(math.nan if is_float else _last(one.x.dtype)).sort(stable=True, dim=-1).values
    rank = levels * (number - 1).clamp(min=0).unsqueeze(-1)
    result = _at(ordered, rank, interpolation)
    if is_float:
        poisoned = (mask & torch.isnan(one.x)).any(-1, keepdim=True)
        result = torch.where(poisoned | ~((levels >= 0) & (levels <= 1)), math.nan, result)
    result = result.movedim(-1, 0) if several else result.squeeze(-1)
    return slices.settle(slices.reduced(result, leading=int(several)), number=slices.reduced(number))


def _selected(slices: Slices, interpolation: Interpolation) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Give medians along the last dimension and the numbers kept, without putting everything in order.

    The numbers are None where it was seen that nothing is empty.
    """
    x, mask = slices.x, slices.full_mask()
    filled = fill(x.detach(), mask, math.nan)
    low, index = filled.nanmedian(-1, keepdim=True)
    result = x.gather(-1, index) if recorded(x) else low
    # A sum that is finite says that nothing is NaN ten times sooner than torch.isnan.
    if interpolation == "lower" and not low.isnan().any() and (_is_finite(x.detach().sum()) or not x.isnan().any()):
        return result.squeeze(-1), None
    total, number = sums(x.detach(), mask, slices.dims, keepdim=True)
    finite = _is_finite(total.sum())
    if interpolation == "midpoint":
        # The other one in the middle is the next larger one, unless there are so many equal to the lower one.
        above = filled > low
        alone = (number % 2 == 1) | (2 * (number - counts(above, x.shape, slices.dims, True)) > number)
        higher = fill(filled, above, math.inf).argmin(-1, keepdim=True)
        if not finite:  # where the next larger one is infinite, so is what stands for all others
            higher = torch.where(above.gather(-1, higher), higher, above.to(torch.uint8).argmax(-1, keepdim=True))
        other = torch.where(alone, index, higher)
        result = result * 0.5 + x.gather(-1, other) * 0.5
    if not finite:  # NaN may be among what is kept, but need not
        result = torch.where((x.detach().isnan() & mask).any(-1, keepdim=True), math.nan, result)
    return result.squeeze(-1), number.squeeze(-1)


def _is_finite(number: torch.Tensor) -> bool:
    return math.isfinite(number.item())


def _levels(q: float | Sequence[float] | torch.Tensor, slices: Slices) -> tuple[bool, torch.Tensor]:
    """Give whether there are several quantiles, and all of them in a 1-D float64 tensor."""
    if isinstance(q, torch.Tensor):
        if q.is_complex():
            _check_levels([q], slices.function)
        if q.dim() > 1:
            raise ArgumentValueError(
                f"{slices.function}(): `q` is {describe(q)}.",
                why="quantiles become the first dimension of the result, so there is room for one dimension of them.",
                fix="q=q.flatten()",
            )
        levels = q.to(slices.x.device, torch.float64).reshape(-1)
        if not slices.x.is_floating_point() and has_data(levels):  # an integer cannot say NaN
            _check_levels(levels.tolist(), slices.function)
        return q.dim() == 1, levels
    several = isinstance(q, Iterable) and not isinstance(q, str | bytes)
    wanted = list(q) if several else [q]  # type: ignore[arg-type]
    _check_levels(wanted, slices.function)
    return several, torch.tensor(wanted, dtype=torch.float64, device=slices.x.device)


def _check_levels(levels: list[Any], function: str) -> None:
    for level in levels:
        if not is_real(level):
            raise ArgumentTypeError(
                f"{function}(): `q` has {describe(level)}.",
                why="a quantile is a number from 0 to 1, or several of them.",
                fix="q=0.5   # or [0.25, 0.75]",
            )
        if not 0 <= level <= 1:
            raise ArgumentValueError(
                f"{function}(): `q` has {level!r}.",
                why="a quantile is a share of the elements, from 0 (the smallest) to 1 (the largest).",
                fix=f"q={level / 100 if 1 < level <= 100 else 0.5}",
            )


def _at(ordered: torch.Tensor, rank: torch.Tensor, interpolation: Interpolation) -> torch.Tensor:
    """Read values in order at ranks that may lie between two of them."""
    last = ordered.shape[-1] - 1
    if interpolation == "nearest":
        rank = rank.round()
    below, above = rank.detach().floor(), rank.detach().ceil()
    low = ordered.gather(-1, below.clamp(0, last).long())
    if interpolation in ("lower", "nearest"):
        return low
    high = ordered.gather(-1, above.clamp(0, last).long())
    if interpolation == "higher":
        return high
    weight = torch.full_like(rank, 0.5) if interpolation == "midpoint" else rank - below
    weight = weight.to(ordered.dtype)
    # Between infinities there is no distance to go along, but there may be a mean.
    finite = torch.isfinite(low) & torch.isfinite(high)
    between = torch.where(weight == 0, low, low * (1 - weight) + high * weight)
    return torch.where(finite, torch.lerp(low, high, weight), between)


def _last(dtype: torch.dtype) -> int:
    return 1 if dtype is torch.bool else torch.iinfo(dtype).max
