"""Put a value in the place of what is left out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor

from gradgate._checks import wrong_type
from gradgate._names import describe
from gradgate._torch_private import has_data
from gradgate.errors import ArgumentTypeError, ArgumentValueError
from gradgate.masked._apply import dtype_holding
from gradgate.masked._order import median, mode
from gradgate.masked._reductions import mean
from gradgate.masked._slices import Dim, Empty, Exclude, Keep, Slices, slices_of

Using = Literal["mean", "median", "mode"] | complex | Tensor | Callable[[Tensor], Any]


def impute(
    x: Tensor,
    *,
    keep: Keep = None,
    exclude: Exclude = None,
    using: Using = "mean",
    dim: Dim = None,
    through_statistic: bool = False,
    empty: Empty = ...,
) -> Tensor:
    """Fill in the left-out elements with a statistic of the kept ones, or with a value.

    Args:
        x: The values.
        keep: A boolean mask that broadcasts to x; True stays as it is.
        exclude: A value or values to replace, NaN for instance.
        using: "mean", "median" or "mode" of the kept elements of a slice; or a function that is called with the kept
            elements of one slice after the other, as a 1-D tensor, and returns one number (`torch.amax`,
            `lambda kept: kept[-1]`); or a number, or a tensor that broadcasts to x.
        dim: The dimension or dimensions that a slice extends over: 0 for the statistic of each column. None for one
            statistic of everything.
        through_statistic: Let the gradient flow through the statistic as well, to the elements that it was made of.
        empty: What stands for the statistic of a slice with nothing kept, as in the function of that name.

    Returns:
        x with other values where it is not kept. Integers become floating for "mean" and "median", and for a number
        or a result that they cannot hold.

    Raises:
        ArgumentTypeError: `using` is nothing of the kind, or a function gave something else than a number.
        ArgumentValueError: `using` is another word, does not fit the shape or the dtype of x, or is a function where
            the values cannot be seen (torch.compile, vmap).
        NothingKeptError: A slice has nothing kept and its statistic cannot be NaN, or `empty` is "raise".

    Gradient:
        To every kept element, its own: 1. What is left out gets exactly 0, whatever it is. The statistic is a
        constant unless `through_statistic`; then each element that it depends on gets a share for every place that
        was filled. A tensor given as `using` gets the gradient of the places that it fills.

    Examples:
        >>> nan = float("nan")
        >>> gg.masked.impute(torch.tensor([[1.0, nan], [3.0, 8.0]]), exclude=nan, dim=0)
        tensor([[1., 8.],
                [3., 8.]])
    """
    slices = slices_of(x, dim, keep, exclude, function="masked.impute", keepdim=True, empty=empty)
    mask = slices.full_mask()
    if isinstance(using, (bool, int, float, complex)):
        dtype = dtype_holding(x, using, "using", "masked.impute")
        return torch.where(mask, x.to(dtype), torch.full((), using, dtype=dtype, device=x.device))
    if isinstance(using, Tensor):
        return torch.where(mask, x, _broadcast(using, x))
    return torch.where(mask, x, _statistic(using, slices if through_statistic else replace(slices, x=x.detach())))


def _statistic(using: Any, slices: Slices) -> Tensor:
    options: dict[str, Any] = {"keepdim": True, "keep": slices.mask, "empty": slices.empty}
    if using == "mean":
        x = slices.x
        return mean(
            x if x.is_floating_point() or x.is_complex() else x.to(torch.get_default_dtype()), slices.dims, **options
        )
    if using == "median":
        return median(slices.x, slices.dims, **options)
    if using == "mode":
        return mode(slices.x, slices.dims, **options).values
    if callable(using):
        return _of_each_slice(using, slices)
    if isinstance(using, str):
        raise ArgumentValueError(
            f"masked.impute(): `using` is {describe(using)}.",
            why='the statistics with a name are "mean", "median" and "mode".',
            fix="using=torch.amax   # any function of the kept elements of a slice",
        )
    why = "it is a name, a number, a tensor, or a function of the kept elements of a slice."
    raise wrong_type(using, "using", "masked.impute", why, 'using="median"   # or 0.0, or torch.amax')


def _of_each_slice(function: Callable[[Tensor], Any], slices: Slices) -> Tensor:
    if not has_data(slices.x, slices.full_mask()):
        raise ArgumentValueError(
            "masked.impute(): `using` is a function, and the values cannot be seen here (torch.compile, vmap).",
            why="it is called with the kept elements of one slice after the other, and their number is not known.",
            fix='using="mean"   # or "median", or "mode"',
        )
    rows = slices.with_mask().in_one_dim()
    size = rows.x.shape[-1]
    found = []
    for row, kept in zip(rows.x.reshape(-1, size), rows.full_mask().reshape(-1, size), strict=True):
        own = row[kept]
        found.append(_number(function(own), own) if own.numel() else row.new_zeros(()))
    if not found:
        return slices.x.new_zeros(slices.number().shape)
    statistic = torch.stack(found).reshape(rows.x.shape[:-1])
    return slices.fill_empty(slices.reduced(statistic))


def _number(value: Any, own: Tensor) -> Tensor:
    if isinstance(value, Tensor) and value.numel() == 1:
        return value.reshape(())
    if isinstance(value, (bool, int, float, complex)):
        return torch.full((), value, dtype=dtype_holding(own, value, "using", "masked.impute"), device=own.device)
    raise ArgumentTypeError(
        f"masked.impute(): the function `using` was called with {describe(own)} and gave {describe(value)}.",
        why="it has to give one number for each slice.",
        fix="using=lambda kept: kept.quantile(0.9)",
    )


def _broadcast(value: Tensor, x: Tensor) -> Tensor:
    # A 0-dim CPU tensor counts as a number everywhere in torch; so it does here.
    if value.device != x.device and (value.dim() or value.device.type != "cpu"):
        raise ArgumentValueError(
            f"masked.impute(): `using` is on {value.device}, x is on {x.device}.",
            why="moving it here would copy in every call.",
            fix="using=value.to(x.device)",
        )
    try:
        return value.expand(x.shape)
    except RuntimeError:
        raise ArgumentValueError(
            f"masked.impute(): `using` has shape {tuple(value.shape)}, x has {tuple(x.shape)}.",
            why="there has to be a value for each element of x.",
            fix="using=value.reshape(1, -1)   # a value for each column",
        ) from None
