"""The kept elements under a window or a key: avg_pool, max_pool, conv, attention."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from gradgate._checks import check_tensor, wrong_value
from gradgate.masked._slices import HALVES, Empty, Exclude, Keep, Slices, fill, mask_of, slices_of, softmax

Sizes: TypeAlias = int | Sequence[int]


def avg_pool(
    x: Tensor,
    kernel_size: Sizes,
    stride: Sizes | None = None,
    padding: Sizes = 0,
    *,
    keep: Keep = None,
    exclude: Exclude = None,
    empty: Empty = ...,
) -> Tensor:
    """Return the mean of the kept elements under each window.

    Args:
        x: The values, floating, of shape (samples, channels, ...) with one to three more dimensions.
        kernel_size: The size of the window.
        stride: How far the window moves; its own size without it.
        padding: How far the window reaches beyond x; there is nothing there that could take part.
        keep: A boolean mask, broadcastable to x; True takes part.
        exclude: A value, or several, that do not take part; NaN matches NaN.
        empty: The result of a window with nothing kept, instead of NaN; "raise" for an error.

    Returns:
        The mean under each window; with everything kept that of torch with `count_include_pad=False`.

    Raises:
        ArgumentTypeError: x is not floating.
        ArgumentValueError: x does not have three to five dimensions.
        NothingKeptError: A window has nothing kept and `empty="raise"`.

    Gradient:
        1 / (number kept) from each window to each of its kept elements, exactly 0 to the others, and from a window
        with nothing kept.

    Examples:
        >>> gg.masked.avg_pool(torch.tensor([[[1.0, 3.0, float("nan"), 5.0]]]), 2, keep=torch.isfinite)
        tensor([[[2., 5.]]])
    """
    slices = _windowed(x, keep, exclude, empty, "masked.avg_pool")
    pool: Any = (F.avg_pool1d, F.avg_pool2d, F.avg_pool3d)[x.dim() - 3]
    if slices.whole:
        return pool(x, kernel_size, stride, padding, count_include_pad=False)  # type: ignore[no-any-return]
    wide = torch.float32 if x.dtype in HALVES else x.dtype
    total, number = slices.filled(0).to(wide), slices.full_mask().to(wide)
    options: list[Any] = [kernel_size, kernel_size if stride is None else stride, padding]
    if x.dim() == 3:  # torch adds up, without dividing, in two dimensions and three
        options = [[own, *([e] if isinstance(e, int) else e)] for own, e in zip((1, 1, 0), options, strict=True)]
        total, number, pool = total.unsqueeze(2), number.unsqueeze(2), F.avg_pool2d
    total, number = (pool(each, *options, divisor_override=1) for each in (total, number))
    total, number = (total.squeeze(2), number.squeeze(2)) if x.dim() == 3 else (total, number)
    return slices.fill_empty((total / number.clamp(min=1)).to(x.dtype), number=number)


def max_pool(
    x: Tensor,
    kernel_size: Sizes,
    stride: Sizes | None = None,
    padding: Sizes = 0,
    dilation: Sizes = 1,
    *,
    keep: Keep = None,
    exclude: Exclude = None,
    empty: Empty = ...,
) -> Tensor:
    """Return the largest of the kept elements under each window.

    Args:
        x: The values, floating, of shape (samples, channels, ...) with one to three more dimensions.
        kernel_size: The size of the window.
        stride: How far the window moves; its own size without it.
        padding: How far the window reaches beyond x; there is nothing there that could take part.
        dilation: How far apart the elements of a window are.
        keep: A boolean mask, broadcastable to x; True takes part.
        exclude: A value, or several, that do not take part; NaN matches NaN.
        empty: The result of a window with nothing kept, instead of NaN; "raise" for an error.

    Returns:
        The largest element under each window; NaN if NaN is kept.

    Raises:
        ArgumentTypeError: x is not floating.
        ArgumentValueError: x does not have three to five dimensions.
        NothingKeptError: A window has nothing kept and `empty="raise"`.

    Gradient:
        To the first of the largest kept elements of each window, as in torch; exactly 0 to all others.

    Examples:
        >>> gg.masked.max_pool(torch.tensor([[[1.0, 255.0, 7.0, 5.0]]]), 2, exclude=255)
        tensor([[[1., 7.]]])
    """
    slices = _windowed(x, keep, exclude, empty, "masked.max_pool")
    pool: Any = (F.max_pool1d, F.max_pool2d, F.max_pool3d)[x.dim() - 3]
    if slices.whole:
        return pool(x, kernel_size, stride, padding, dilation)  # type: ignore[no-any-return]
    mask = slices.full_mask()
    options = (kernel_size, stride, padding, dilation, False, True)  # with the indices
    best, index = pool(fill(x.detach(), mask, -math.inf), *options)
    kept, first = pool(mask.to(x.dtype), *options)
    # A window of nothing but -inf finds what stands for the left-out.
    index = torch.where(best == -math.inf, first, index)
    found = x.flatten(2).gather(-1, index.flatten(2)).reshape(index.shape)
    return slices.fill_empty(found, number=kept)


def conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Sizes = 1,
    padding: Sizes | str = 0,
    dilation: Sizes = 1,
    groups: int = 1,
    *,
    keep: Keep = None,
    exclude: Exclude = None,
    empty: Empty = ...,
) -> Tensor:
    """Convolve the kept elements, scaled up by the share of each window that is kept: a partial convolution.

    Args:
        x: The values, floating, of shape (samples, channels, ...) with one to three more dimensions.
        weight: The kernel, as in torch.nn.functional.conv2d.
        bias: What is added to each output channel.
        stride: As in torch.nn.functional.conv2d; so are `padding`, `dilation` and `groups`.
        padding: Zeros around x, which count neither as kept nor as left out.
        dilation: How far apart the elements of a window are.
        groups: How many groups of channels are convolved each on its own.
        keep: A boolean mask that broadcasts to x, `(samples, 1, height, width)` for one of places; True takes part.
        exclude: A value, or several, that do not take part; NaN matches NaN.
        empty: The result of a window with nothing kept, instead of 0; "raise" for an error.

    Returns:
        The convolution of x with 0 for what is left out, times the number of elements of x under the window divided by
        the number of those that are kept, plus the bias; 0 for a window with nothing kept. Which those are says
        `masked.max_pool(keep.float(), ...) == 0`.

    Raises:
        ArgumentTypeError: x is not floating.
        ArgumentValueError: x does not have three to five dimensions.
        NothingKeptError: A window has nothing kept and `empty="raise"`.

    Gradient:
        That of the convolution, times the same number, to what is kept, to the kernel and to the bias. Exactly 0 to
        what is left out; nothing comes back from a window with nothing kept.

    Examples:
        >>> x = torch.tensor([[[1.0, 2.0, float("nan"), 4.0]]])
        >>> gg.masked.conv(x, torch.ones(1, 1, 2), keep=torch.isfinite)
        tensor([[[3., 4., 8.]]])
    """
    slices = _windowed(x, keep, exclude, empty, "masked.conv")
    check_tensor(weight, name="weight", function="masked.conv")
    convolve: Any = (F.conv1d, F.conv2d, F.conv3d)[x.dim() - 3]
    options = (stride, padding, dilation, groups)
    if slices.whole:
        return convolve(x, weight, bias, *options)  # type: ignore[no-any-return]
    wide = torch.float32 if x.dtype in HALVES else x.dtype
    with torch.autocast(x.device.type, enabled=False):  # halves cannot count
        ones = torch.ones((groups, *weight.shape[1:]), dtype=wide, device=x.device)
        number, whole = (
            convolve(each.to(wide), ones, None, *options).round().unsqueeze(2)
            for each in (slices.full_mask(), torch.ones_like(x[:1]))
        )
    total = convolve(slices.filled(0), weight, None, *options).unflatten(1, (groups, -1))
    scaled = (total * (whole / number.clamp(min=1)).to(total.dtype)).flatten(1, 2)
    scaled = scaled if bias is None else scaled + bias.reshape(-1, *[1] * (x.dim() - 2))
    number = number.expand(total.shape).flatten(1, 2)
    return slices.fill_empty(torch.where(number == 0, 0, scaled), natural=0, number=number)


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    keep: Keep = None,
    is_causal: bool = False,
    scale: float | None = None,
) -> Tensor:
    """Return the attention of each query to the keys that are kept for it; 0 for a query that has none.

    Args:
        query: Of shape (..., queries, features).
        key: Of shape (..., keys, features).
        value: Of shape (..., keys, values).
        keep: A boolean mask that broadcasts to (..., queries, keys); True takes part. Padding of (samples, keys) in
            four dimensions is `keep[:, None, None, :]`. A function is called with the scores.
        is_causal: Leave out the keys that come after the query, besides.
        scale: What the products of queries and keys are multiplied with; 1 / sqrt(features) without it.

    Returns:
        That of torch.nn.functional.scaled_dot_product_attention for each query with its own keys alone; a row of 0
        for a query that keeps none. A query that keeps a key with NaN or an infinity in it gets a row of NaN, and no
        other does.

    Raises:
        ArgumentTypeError: `keep` is not boolean.
        ArgumentValueError: `keep` does not broadcast to the scores.

    Gradient:
        That of torch for the kept keys. Exactly 0 to a query without keys, and to a key, and its value, that no query
        keeps, even when it is NaN.

    Examples:
        >>> x = torch.randn(2, 3, 4)
        >>> x[1] = float("nan")   # a sample that is nothing but padding
        >>> gg.masked.attention(x, x, x, keep=torch.tensor([True, False])[:, None, None])[1].abs().sum()
        tensor(0.)
    """
    for name, each in (("query", query), ("key", key), ("value", value)):
        check_tensor(each, name=name, function="masked.attention")
    if keep is None:
        return F.scaled_dot_product_attention(query, key, value, is_causal=is_causal, scale=scale)
    places = (*torch.broadcast_shapes(query.shape[:-2], key.shape[:-2]), query.shape[-2], key.shape[-2])  # type: ignore[no-untyped-call]
    factor = query.shape[-1] ** -0.5 if scale is None else scale
    shown = query.detach() @ key.detach().mT * factor if callable(keep) or isinstance(keep, tuple) else None
    mask, _ = mask_of(query.new_empty(()).expand(places) if shown is None else shown, keep, function="masked.attention")
    mask = torch.ones(places, dtype=torch.bool, device=query.device) if mask is None else mask.expand(places)
    if is_causal:
        mask = mask & torch.ones(places[-2:], dtype=torch.bool, device=query.device).tril()
    # 0 times NaN must not happen, in the products and in their gradients: what is not finite goes before, and comes
    # back as NaN to the queries that keep it.
    finite = torch.isfinite(key.detach()).all(-1) & torch.isfinite(value.detach()).all(-1)
    used = finite & _any_of(mask, -2, finite)
    key, value = (torch.where(used.unsqueeze(-1), each, 0) for each in (key, value))
    query = torch.where(_any_of(mask, -1, query[..., 0]).unsqueeze(-1), query, 0)
    scores = query @ key.mT * factor
    found = (softmax(scores, mask, False) if places[-1] else scores) @ value
    return torch.where((mask & ~finite.unsqueeze(-2)).any(-1, keepdim=True), math.nan, found)


def _any_of(mask: Tensor, dim: int, like: Tensor) -> Tensor:
    """Return whether any of a dimension is kept, in the shape of a tensor with fewer batch dimensions."""
    return mask.any(dim).long().sum_to_size(like.shape) > 0


def _windowed(x: Tensor, keep: Keep, exclude: Exclude, empty: Empty, function: str) -> Slices:
    rank = check_tensor(x, name="x", function=function).dim()
    if not 3 <= rank <= 5:
        why = "a window moves over one to three dimensions after samples and channels."
        raise wrong_value(x, "x", function, why, "x.unsqueeze(0)")
    dims = tuple(range(2, rank))
    slices = slices_of(x, dims, keep, exclude, function=function, keepdim=True, empty=empty)
    slices.refuse(integers=True, complexes=True)
    return slices
