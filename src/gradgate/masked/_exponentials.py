"""Softmax and logsumexp without what is left out, in pieces that stay in the cache.

As in `_blocks.py`, nothing here is seen by autograd.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from gradgate.masked import _blocks
from gradgate.masked._bits import CPU, Bits, Buffer, Removal

__all__ = ["logsumexp", "softmax"]


def logsumexp(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Give the logarithm of the sum of the exponentials of what is kept.

    Args:
        x: The values, (outer, reduced, inner).
        mask: A boolean mask of the same shape.

    Returns:
        A tensor of shape (outer, inner); -inf where nothing is kept.
    """
    return _blocks.reduce(_logsumexp_of_pieces, x, mask, lambda result: ~(result < math.inf))[0]


def _logsumexp_of_pieces(x: torch.Tensor, mask: torch.Tensor, exact: bool) -> tuple[torch.Tensor, ...]:
    size, info = _blocks.room_for(x), torch.finfo(x.dtype)
    away, buffer = (Bits if exact else Removal)(x, -math.inf, size), Buffer(x.dtype, size)
    # The exponential of less than this is nothing beside the 1 of the largest, but takes torch 20 times as long.
    least = math.log(info.tiny) + 1
    tops, totals = [], []
    for source, kept in _blocks.cut(x, mask.view(torch.uint8)):
        values = away.select(source, kept, buffer.of(source.shape))
        top = values.amax(1, keepdim=True)
        values.sub_(top.clamp(info.min, info.max)).clamp_(min=least).exp_()  # inf - inf is no number
        tops.append(top.squeeze(1))
        totals.append(values.sum(1))
    top = torch.cat(tops)
    result = torch.cat(totals).log_().add_(top.clamp(info.min, info.max)).masked_fill_(top == -math.inf, -math.inf)
    return (_blocks.combined([result], x, torch.logsumexp),)


def softmax(x: torch.Tensor, mask: torch.Tensor, function: Callable[..., torch.Tensor]) -> torch.Tensor:
    """Give the softmax of what is kept in each row, or its logarithm.

    Args:
        x: The values, (rows, columns).
        mask: A boolean mask of the same shape.
        function: torch.softmax or torch.log_softmax.

    Returns:
        0, or -inf for the logarithm, where an element is left out. All of a row is NaN where NaN or infinity was met,
        be it left out, and where nothing but -inf is kept.
    """
    result = torch.empty(x.shape, dtype=x.dtype, device=CPU)
    rows = max(_blocks.BLOCK // x.shape[1], 1)
    size = min(rows * x.shape[1], x.numel())
    away, buffer = Removal(x, -math.inf, size), Buffer(x.dtype, size)
    kept = mask.view(torch.uint8)
    for source, part, out in zip(*[torch.split(t, rows) for t in (x, kept, result)], strict=True):
        function(away.select(source, part, buffer.of(source.shape)), 1, out=out)
    return result
