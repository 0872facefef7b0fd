"""Softmax and logsumexp without what is left out, in pieces that stay in the cache.

As in `_blocks.py`, nothing here is seen by autograd.
"""

from __future__ import annotations

import math

import torch

from gradgate.masked import _blocks

__all__ = ["logsumexp", "softmax"]


def logsumexp(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Give the logarithm of the sum of the exponentials of what is kept.

    Args:
        x: The values, (outer, reduced, inner).
        mask: A boolean mask of the same shape.

    Returns:
        A tensor of shape (outer, inner); -inf where nothing is kept.
    """
    bits, buffer = _blocks.Bits(x, -math.inf), _blocks.Buffer(x.dtype, x)
    # The exponential of less than this is nothing beside the 1 of the largest, but takes torch 20 times as long.
    least = math.log(torch.finfo(x.dtype).tiny) + 1
    results = []
    for source, kept in _blocks.cut(x, mask):
        values = bits.select(source, kept, buffer.of(source.shape))
        top = values.amax(1, keepdim=True)
        level = top.masked_fill(top.isinf(), 0)  # inf - inf is no number
        result = values.sub_(level).clamp_(min=least).exp_().sum(1).log_().add_(level.squeeze(1))
        results.append(result.masked_fill_(top.squeeze(1) == -math.inf, -math.inf))
    return _blocks.combined(results, x, torch.logsumexp)


def softmax(x: torch.Tensor, mask: torch.Tensor, logarithm: bool) -> torch.Tensor:
    """Give the softmax of what is kept in each row, or its logarithm.

    Args:
        x: The values, (rows, columns).
        mask: A boolean mask of the same shape.
        logarithm: Whether to give the logarithm.

    Returns:
        0, or -inf for the logarithm, where an element is left out, and for a row with nothing but -inf.
    """
    function = torch.log_softmax if logarithm else torch.softmax
    nothing = -math.inf if logarithm else 0.0
    result = torch.empty(x.shape, dtype=x.dtype)
    bits, buffer = _blocks.Bits(x.unsqueeze(1), -math.inf), _blocks.Buffer(x.dtype, x.unsqueeze(1))
    rows = max(_blocks.BLOCK // x.shape[1], 1)
    for source, kept, out in zip(*[torch.split(t, rows) for t in (x, mask, result)], strict=True):
        function(bits.select(source, kept, buffer.of(source.shape)), 1, out=out)
        lost = out[:, 0].isnan()  # NaN or infinity was met, or nothing has a weight: then all of the row is NaN
        if lost.any():
            weightless = torch.where(kept[lost], source[lost], -math.inf).amax(1, keepdim=True) == -math.inf
            out[lost] = torch.where(weightless | ~kept[lost], nothing, out[lost])
    return result
