"""What is kept as weights: logsumexp, softmax, log_softmax."""

from __future__ import annotations

import math

import torch

from gradgate.masked._kernels import logsumexp as kernel_of_logsumexp
from gradgate.masked._kernels import softmax as kernel_of_softmax
from gradgate.masked._slices import Dim, Empty, Slices, slices_of
from gradgate.masked._valid import Exclude

__all__ = ["log_softmax", "logsumexp", "softmax"]


def logsumexp(
    x: torch.Tensor,
    dim: Dim = None,
    *,
    keepdim: bool = False,
    keep: torch.Tensor | None = None,
    exclude: Exclude = None,
    empty: Empty = ...,
) -> torch.Tensor:
    """Give the logarithm of the sum of the exponentials of the elements that are kept.

    Args:
        x: The values.
        dim: The dimension to reduce, several of them, or None for all.
        keepdim: Whether reduced dimensions stay with size 1.
        keep: A boolean mask that broadcasts to x; True takes part.
        exclude: A value or values that do not take part; NaN matches NaN.
        empty: What a slice with nothing kept gives instead of -inf; "raise" for an error.

    Returns:
        The logsumexp of each slice.

    Raises:
        NothingKeptError: A slice has nothing kept and `empty="raise"`.

    Gradient:
        The softmax of what is kept; exactly 0 for what is not, for a slice with nothing kept, and for one that keeps
        nothing but -inf, where torch.logsumexp gives NaN.

    Examples:
        >>> gg.masked.logsumexp(torch.tensor([0.0, 0.0, 1e9]), exclude=1e9)
        tensor(0.6931)
    """
    slices = slices_of(x, dim, keep, exclude, function="masked.logsumexp", keepdim=keepdim, empty=empty)
    if slices.x.dtype is torch.bool:  # True and False cannot be -inf
        slices.x = slices.x.to(torch.get_default_dtype())
    if slices.size == 0:
        slices = slices.with_mask()
    result = kernel_of_logsumexp(slices.x, slices.full_mask(), slices.dims)
    return slices.settle(result if keepdim else result.squeeze(slices.dims), natural=-math.inf)


def softmax(
    x: torch.Tensor,
    dim: Dim = None,
    *,
    dtype: torch.dtype | None = None,
    keep: torch.Tensor | None = None,
    exclude: Exclude = None,
    empty: Empty = ...,
) -> torch.Tensor:
    """Give the elements that are kept as positive weights that add up to 1.

    Args:
        x: The values, floating.
        dim: The dimension along which the weights add up to 1, several of them, or None for all.
        dtype: What x becomes first.
        keep: A boolean mask that broadcasts to x; True takes part.
        exclude: A value or values that do not take part; NaN matches NaN.
        empty: What every place of a slice with nothing kept gives instead of 0; "raise" for an error.

    Returns:
        A tensor of the shape of x: 0 where an element is left out, and a row of zeros for a slice with nothing kept
        or nothing but -inf.

    Raises:
        ArgumentTypeError: x is of integers and no dtype is given, or complex.
        NothingKeptError: A slice has nothing kept and `empty="raise"`.

    Gradient:
        That of torch.softmax for what is kept. Exactly 0 for what is not kept and for a row of zeros; nothing comes
        back from the place of what is left out, not even NaN.

    Examples:
        >>> scores = torch.tensor([[1.0, 1.0, 5.0], [1.0, 2.0, 3.0]])
        >>> keep = torch.tensor([[True, True, False], [False, False, False]])
        >>> gg.masked.softmax(scores, dim=-1, keep=keep)
        tensor([[0.5000, 0.5000, 0.0000],
                [0.0000, 0.0000, 0.0000]])
    """
    slices = slices_of(x, dim, keep, exclude, function="masked.softmax", keepdim=True, empty=empty, dtype=dtype)
    return slices.settle(_along(slices, logarithm=False), natural=0)


def log_softmax(
    x: torch.Tensor,
    dim: Dim = None,
    *,
    dtype: torch.dtype | None = None,
    keep: torch.Tensor | None = None,
    exclude: Exclude = None,
    empty: Empty = ...,
) -> torch.Tensor:
    """Give the logarithm of the softmax of the elements that are kept.

    Args:
        x: The values, floating.
        dim: The dimension along which the weights add up to 1, several of them, or None for all.
        dtype: What x becomes first.
        keep: A boolean mask that broadcasts to x; True takes part.
        exclude: A value or values that do not take part; NaN matches NaN.
        empty: What every place of a slice with nothing kept gives instead of -inf; "raise" for an error.

    Returns:
        A tensor of the shape of x: -inf where an element is left out, and a row of -inf for a slice with nothing kept
        or nothing but -inf.

    Raises:
        ArgumentTypeError: x is of integers and no dtype is given, or complex.
        NothingKeptError: A slice has nothing kept and `empty="raise"`.

    Gradient:
        That of torch.log_softmax for what is kept. Exactly 0 for what is not kept and for a row of -inf; nothing
        comes back from the place of what is left out, not even NaN.

    Examples:
        >>> gg.masked.log_softmax(torch.tensor([0.0, 0.0, 1e9]), exclude=1e9)
        tensor([-0.6931, -0.6931,    -inf])
    """
    slices = slices_of(x, dim, keep, exclude, function="masked.log_softmax", keepdim=True, empty=empty, dtype=dtype)
    return slices.settle(_along(slices, logarithm=True), natural=-math.inf)


def _along(slices: Slices, logarithm: bool) -> torch.Tensor:
    slices.refuse(integers=True, complexes=True)
    if slices.size == 0:
        return slices.x.clone()
    one = slices.in_one_dim()
    return slices.spread(kernel_of_softmax(one.x, one.full_mask(), logarithm))
