"""What is kept, brought to one scale: logsumexp, softmax, log_softmax, layer_norm, batch_norm."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from gradgate._checks import check_number, check_shape, check_tensor, wrong_type
from gradgate._names import describe
from gradgate.errors import ArgumentValueError
from gradgate.masked import _slices
from gradgate.masked._reductions import distances
from gradgate.masked._slices import Dim, Empty, Exclude, Keep, Slices, slices_of

_EPS = "it is added to the variance, so that there is something to divide by."


def logsumexp(
    x: Tensor, dim: Dim = None, *, keepdim: bool = False, keep: Keep = None, exclude: Exclude = None, empty: Empty = ...
) -> Tensor:
    """Return the logarithm of the sum of the exponentials of the kept elements.

    Args:
        x: The values.
        dim: The dimension to reduce, several of them, or None for all.
        keepdim: Whether to keep the reduced dimensions, with size 1.
        keep: A boolean mask, broadcastable to x; True takes part.
        exclude: A value, or several, that do not take part; NaN matches NaN.
        empty: The result of a slice with nothing kept, instead of -inf; "raise" for an error.

    Returns:
        The logsumexp of each slice.

    Raises:
        NothingKeptError: A slice has nothing kept and `empty="raise"`.

    Gradient:
        The softmax of the kept elements; exactly 0 for the others, for a slice with nothing kept, and for one that
        keeps nothing but -inf, where that of torch.logsumexp is NaN.

    Examples:
        >>> gg.masked.logsumexp(torch.tensor([0.0, 0.0, 1e9]), exclude=1e9)
        tensor(0.6931)
    """
    slices = slices_of(x, dim, keep, exclude, function="masked.logsumexp", keepdim=keepdim, empty=empty)
    if slices.x.dtype is torch.bool:  # True and False cannot be -inf
        slices = slices.converted(torch.get_default_dtype())
    if slices.size == 0:
        slices = slices.with_mask()
    result = _slices.logsumexp(slices)
    return slices.fill_empty(result if keepdim else result.squeeze(slices.dims), natural=-math.inf)


def softmax(
    x: Tensor,
    dim: Dim = None,
    *,
    dtype: torch.dtype | None = None,
    keep: Keep = None,
    exclude: Exclude = None,
    empty: Empty = ...,
) -> Tensor:
    """Return the softmax of the kept elements: positive weights that add up to 1.

    Args:
        x: The values, floating.
        dim: The dimension along which the weights add up to 1, several of them, or None for all.
        dtype: The dtype to convert x to first.
        keep: A boolean mask, broadcastable to x; True takes part.
        exclude: A value, or several, that do not take part; NaN matches NaN.
        empty: The result in every place of a slice with nothing kept, instead of 0; "raise" for an error.

    Returns:
        A tensor of the shape of x: 0 where an element is left out, and a row of zeros for a slice with nothing kept
        or nothing but -inf.

    Raises:
        ArgumentTypeError: x is of integers and no dtype is given, or complex.
        NothingKeptError: A slice has nothing kept and `empty="raise"`.

    Gradient:
        That of torch.softmax for the kept elements. Exactly 0 for the others and for a row of zeros; a gradient that
        arrives at a left-out element, even NaN, goes nowhere.

    Examples:
        >>> scores = torch.tensor([[1.0, 1.0, 5.0], [1.0, 2.0, 3.0]])
        >>> keep = torch.tensor([[True, True, False], [False, False, False]])
        >>> gg.masked.softmax(scores, dim=-1, keep=keep)
        tensor([[0.5000, 0.5000, 0.0000],
                [0.0000, 0.0000, 0.0000]])
    """
    slices = slices_of(x, dim, keep, exclude, function="masked.softmax", keepdim=True, empty=empty, dtype=dtype)
    return slices.fill_empty(_along(slices, logarithm=False), natural=0)


def log_softmax(
    x: Tensor,
    dim: Dim = None,
    *,
    dtype: torch.dtype | None = None,
    keep: Keep = None,
    exclude: Exclude = None,
    empty: Empty = ...,
) -> Tensor:
    """Return the logarithm of the softmax of the kept elements.

    Args:
        x: The values, floating.
        dim: The dimension along which the weights add up to 1, several of them, or None for all.
        dtype: The dtype to convert x to first.
        keep: A boolean mask, broadcastable to x; True takes part.
        exclude: A value, or several, that do not take part; NaN matches NaN.
        empty: The result in every place of a slice with nothing kept, instead of -inf; "raise" for an error.

    Returns:
        A tensor of the shape of x: -inf where an element is left out, and a row of -inf for a slice with nothing kept
        or nothing but -inf.

    Raises:
        ArgumentTypeError: x is of integers and no dtype is given, or complex.
        NothingKeptError: A slice has nothing kept and `empty="raise"`.

    Gradient:
        That of torch.log_softmax for the kept elements. Exactly 0 for the others and for a row of -inf; a gradient
        that arrives at a left-out element, even NaN, goes nowhere.

    Examples:
        >>> gg.masked.log_softmax(torch.tensor([0.0, 0.0, 1e9]), exclude=1e9)
        tensor([-0.6931, -0.6931,    -inf])
    """
    slices = slices_of(x, dim, keep, exclude, function="masked.log_softmax", keepdim=True, empty=empty, dtype=dtype)
    return slices.fill_empty(_along(slices, logarithm=True), natural=-math.inf)


def _along(slices: Slices, logarithm: bool) -> Tensor:
    slices.refuse(integers=True, complexes=True)
    if slices.size == 0:
        return slices.x.clone()
    one = slices.in_one_dim()
    mask = None if one.excluded != one.excluded else one.full_mask()
    return slices.spread(_slices.softmax(one.x, mask, logarithm))


def layer_norm(
    x: Tensor,
    normalized_shape: int | Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    keep: Keep = None,
    exclude: Exclude = None,
) -> Tensor:
    """Normalize over the last dimensions, with the mean and the variance of the kept elements.

    Args:
        x: The values, floating.
        normalized_shape: The sizes of the last dimensions, over which is normalized; an int for the last one alone.
        weight: A factor for each place of `normalized_shape`.
        bias: What is added at each place of `normalized_shape`.
        eps: What is added to the variance.
        keep: A boolean mask, broadcastable to x; True takes part.
        exclude: A value, or several, that do not take part; NaN matches NaN.

    Returns:
        A tensor of the shape of x, 0 where an element is left out.

    Raises:
        ArgumentTypeError: x is not floating, or another argument is of the wrong kind.
        ArgumentValueError: The last dimensions of x do not have `normalized_shape`, or weight or bias have not.

    Gradient:
        That of torch.nn.functional.layer_norm of the kept elements, to x, weight and bias; exactly 0 to the others, and
        a gradient that arrives there goes nowhere.

    Examples:
        >>> gg.masked.layer_norm(torch.tensor([[1.0, 3.0, 1e9]]), [3], exclude=1e9)
        tensor([[-1.0000,  1.0000,  0.0000]])
    """
    shape = (normalized_shape,) if isinstance(normalized_shape, int) else _sizes(normalized_shape)
    check_number(eps, "eps", "masked.layer_norm", _EPS, "eps=1e-5")
    for name, scale in (("weight", weight), ("bias", bias)):
        check_shape(scale, shape, name=name, function="masked.layer_norm")
    slices = slices_of(x, tuple(range(-len(shape), 0)), keep, exclude, function="masked.layer_norm", keepdim=True)
    slices.refuse(integers=True, complexes=True)
    if tuple(x.shape[x.dim() - len(shape) :]) != shape:
        raise ArgumentValueError(
            f"masked.layer_norm(): `normalized_shape` is {shape}, x is {describe(x)}.",
            why="it says the sizes of the last dimensions of x.",
            fix=f"normalized_shape={tuple(x.shape[-1:])}",
        )
    if slices.mask is None:
        return torch.nn.functional.layer_norm(x, shape, weight, bias, eps)
    distance, _, number = distances(slices)
    variance = (distance * distance).sum(slices.dims, keepdim=True) / number.clamp(min=1)
    return _scaled(slices, distance * (variance + eps).rsqrt(), weight, bias)


def batch_norm(
    x: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
    *,
    keep: Keep = None,
    exclude: Exclude = None,
) -> Tensor:
    """Normalize each channel (dimension 1), with the mean and the variance of the kept elements.

    Args:
        x: The values, floating, of shape (samples, channels, ...).
        running_mean: The running mean of each channel, or None; written in training.
        running_var: The running variance of each channel, or None; written in training.
        weight: A factor for each channel.
        bias: What is added to each channel.
        training: Whether to use the statistics of x and move the running ones, or to use the running ones.
        momentum: How far the running statistics move.
        eps: What is added to the variance.
        keep: A boolean mask, broadcastable to x; True takes part. A mask of samples is `keep[:, None]`, one of
            places in a sequence of shape (samples, channels, length) is `keep[:, None, :]`.
        exclude: A value, or several, that do not take part; NaN matches NaN.

    Returns:
        A tensor of the shape of x, 0 where an element is left out. In a channel with nothing kept the running
        statistics stay; with one element kept that is 0 before weight and bias, and the running variance stays.

    Raises:
        ArgumentTypeError: x is not floating, or another argument is of the wrong kind.
        ArgumentValueError: x has no channels, a tensor does not have one number for each of them, or there are no
            running statistics to use.

    Gradient:
        That of torch.nn.functional.batch_norm of the kept elements, to x, weight and bias; exactly 0 to the others, and
        a gradient that arrives there goes nowhere. None to the running statistics.

    Examples:
        >>> x = torch.tensor([[1.0], [3.0], [float("nan")]])
        >>> gg.masked.batch_norm(x, None, None, training=True, exclude=float("nan")).flatten()
        tensor([-1.0000,  1.0000,  0.0000])
    """
    function = "masked.batch_norm"
    if check_tensor(x, name="x", function=function).dim() < 2:
        raise ArgumentValueError(
            f"{function}(): `x` is {describe(x)}.", why="dimension 1 is the channels.", fix="x.unsqueeze(1)"
        )
    if not training and (running_mean is None or running_var is None):
        raise ArgumentValueError(
            f"{function}(): there are no running statistics and `training` is False.",
            why="without training, the running mean and variance are what is normalized with.",
            fix="training=True   # or give running_mean and running_var",
        )
    slices = slices_of(x, (0, *range(2, x.dim())), keep, exclude, function=function, keepdim=True)
    slices.refuse(integers=True, complexes=True)
    check_number(eps, "eps", function, _EPS, "eps=1e-5")
    check_number(momentum, "momentum", function, "it says how far the running statistics move.", "momentum=0.1")
    given = {"running_mean": running_mean, "running_var": running_var, "weight": weight, "bias": bias}
    for name, each in given.items():
        check_shape(each, (x.shape[1],), name=name, function=function)
    if slices.mask is None:
        return torch.nn.functional.batch_norm(x, running_mean, running_var, weight, bias, training, momentum, eps)
    channels = (1, -1, *([1] * (x.dim() - 2)))
    if running_mean is None or running_var is None or training:
        distance, center, number = distances(slices)
        variance = (distance * distance).sum(slices.dims, keepdim=True) / number.clamp(min=1)
        _move(running_mean, center, momentum, number >= 1)
        _move(running_var, variance * (number / (number - 1).clamp(min=1)), momentum, number >= 2)
    else:
        distance = slices.filled(0) - running_mean.reshape(channels)
        variance = running_var.reshape(channels)
    weight = None if weight is None else weight.reshape(channels)
    bias = None if bias is None else bias.reshape(channels)
    return _scaled(slices, distance * (variance + eps).rsqrt(), weight, bias)


def _sizes(normalized_shape: Any) -> tuple[int, ...]:
    shape = tuple(normalized_shape) if isinstance(normalized_shape, Iterable) else (normalized_shape,)
    if shape and all(isinstance(size, int) for size in shape):
        return shape
    why = "it says the sizes of the last dimensions of x, one at least."
    raise wrong_type(normalized_shape, "normalized_shape", "masked.layer_norm", why, "normalized_shape=x.shape[-1:]")


def _move(running: Tensor | None, towards: Tensor, momentum: float, known: Tensor) -> None:
    """Move a running statistic where a new value is known."""
    if running is None:
        return
    with torch.no_grad():
        moved = torch.lerp(running, towards.reshape(running.shape).to(running.dtype), momentum)
        running.copy_(torch.where(known.reshape(running.shape), moved, running))


def _scaled(slices: Slices, normalized: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    scaled = normalized if weight is None else normalized * weight
    scaled = scaled if bias is None else scaled + bias
    return torch.where(slices.full_mask(), scaled, 0).to(slices.x.dtype)
