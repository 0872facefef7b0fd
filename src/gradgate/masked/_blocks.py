"""Reductions without what is left out, in pieces that stay in the cache.

torch's kernels for bool are not vectorised on the CPU: `where` with a random mask costs 30 to 50 times a sum. And a
fresh large tensor costs more than the arithmetic on it. So a mask is read as bytes, and reductions go through small
buffers.

There are two ways to take an element away. Quick: its weight is 0, and 0 times anything finite is 0; or it is moved to
infinity by adding more than a float can hold. Exact: its bits are masked. The quick way is tried first; slices where it
cannot be trusted (NaN or infinity was met) are done again in the exact way.

Tensors here are 3-D, (outer, reduced, inner), and nothing is seen by autograd: `_kernels.py` makes it differentiable.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch

from gradgate.masked._bits import CPU, Bits, Buffer, Removal
from gradgate.masked._counting import count_all
from gradgate.masked._valid import Number

__all__ = [
    "combined",
    "cut",
    "distances",
    "expand",
    "extreme",
    "fill",
    "reduce",
    "room_for",
    "squares",
    "sums",
    "total_of",
]

BLOCK = 3 << 15  # elements: a piece of x, its mask and its buffers fit into the second-level cache
COLUMNS = 1 << 13  # how much of a longer inner dimension is taken at once, so that a piece has several rows of it

Pieces = Iterator[tuple[torch.Tensor, ...]]


# --- whole tensors --------------------------------------------------------------------------------------------------


def fill(x: torch.Tensor, mask: torch.Tensor, value: Number) -> torch.Tensor:
    """Give a new tensor with the values of x where the mask is True, and a value elsewhere.

    Args:
        x: The values.
        mask: A boolean mask of the same shape.
        value: What stands for the left-out.

    Returns:
        The filled tensor.
    """
    result = torch.empty(x.shape, dtype=x.dtype, device=CPU)
    mask_bits = Bits(x, value, room_for(x))
    for source, kept, out in cut(x, mask, result):
        mask_bits.select(source, kept, out)
    return result


def expand(slices: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Give each kept element the value of its slice, and each left-out one 0.

    Args:
        slices: One value for each slice, of shape (outer, inner).
        mask: A boolean mask, (outer, reduced, inner).

    Returns:
        A new tensor of the shape of the mask.
    """
    wanted = slices.unsqueeze(1).expand(mask.shape)
    if not math.isfinite(slices.sum().item()):
        return fill(wanted, mask, 0)
    result = torch.empty(mask.shape, dtype=slices.dtype, device=CPU)
    for kept, values, out in cut(mask.view(torch.uint8), wanted, result):
        out.copy_(kept).mul_(values)
    return result


def distances(x: torch.Tensor, mask: torch.Tensor, center: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    """Give how far each kept element is from the center of its slice, times a factor, and 0 for each left-out one.

    Args:
        x: The values.
        mask: A boolean mask of the same shape.
        center: One value for each slice, of shape (outer, inner).
        factor: One factor for each slice, of shape (outer, inner).

    Returns:
        A new tensor of the shape of x.
    """
    result = torch.empty(x.shape, dtype=x.dtype, device=CPU)
    mask_bits, buffer = Bits(x, 0, room_for(x)), Buffer(x.dtype, room_for(x))
    for source, kept, centers, factors, out in cut(x, mask, _spread(center, x), _spread(factor, x), result):
        distance = torch.sub(source, centers, out=buffer.of(source.shape)).mul_(factors)
        mask_bits.select(distance, kept, out)
    return result


# --- reductions -----------------------------------------------------------------------------------------------------


def sums(x: torch.Tensor, mask: torch.Tensor, counted: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Add up what is kept and count it.

    Args:
        x: The values.
        mask: A boolean mask of the same shape.
        counted: Whether the numbers are wanted.

    Returns:
        The sums, in float32 for halves, and the numbers, both of shape (outer, inner); without numbers the sums twice.
    """
    if x.shape[0] == x.shape[2] == 1 and x.element_size() > 2:
        total, number = total_of(x.reshape(-1), mask.reshape(-1), counted)
        return total.view(1, 1), number.view(1, 1).long() if counted else total.view(1, 1)
    results = reduce(_sums_of_pieces if counted else _totals_of_pieces, x, mask, _infinite)
    return results[0], results[-1]


def total_of(x: torch.Tensor, mask: torch.Tensor, counted: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Add up what is kept of one single slice, and count it: multiplied and added in one go.

    Args:
        x: The values, 1-D, float32 or float64.
        mask: A boolean mask of the same shape.
        counted: Whether the number is wanted.

    Returns:
        The sum and the number, both 0-dim, the number in whatever dtype holds it; without a number the sum twice.
    """
    size = x.numel() if x.numel() <= 2 * BLOCK else BLOCK
    kept = mask.view(torch.uint8)
    buffer = torch.empty(size, dtype=x.dtype, device=CPU)
    if size == x.numel():
        total = _dot(x, kept, buffer)
        return total, buffer.sum() if counted else total
    added = 0.0  # a number of Python: quicker to add to than a tensor, and it holds more
    for source, part in zip(torch.split(x, size), torch.split(kept, size), strict=True):
        added += _dot(source, part, buffer if len(source) == size else buffer[: len(source)]).item()
    total = torch.tensor(added, dtype=x.dtype, device=CPU)
    return total, count_all(kept) if counted else total


def _dot(x: torch.Tensor, kept: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Add up what is kept, and leave the weights 1 and 0 behind."""
    total = torch.dot(x, weights.copy_(kept))
    if math.isfinite(total.item()):
        return total
    return torch.dot(Bits(x, 0, len(x)).select(x, kept, torch.empty_like(weights)), weights)


def squares(x: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Add up the squares of the distances of what is kept to its mean.

    Args:
        x: The values, float32 or float64.
        mask: A boolean mask of the same shape.

    Returns:
        The sums of squares, the means and the numbers, all of shape (outer, inner).
    """
    result, center, number = reduce(_squares_of_pieces, x, mask, _infinite)
    return result, center, number


def extreme(x: torch.Tensor, mask: torch.Tensor, largest: bool) -> torch.Tensor:
    """Find the largest or the smallest of what is kept.

    Args:
        x: The values.
        mask: A boolean mask of the same shape.
        largest: Which of the two.

    Returns:
        The extremes, of shape (outer, inner); infinite where nothing is kept.
    """
    if largest:
        return reduce(_largest_of_pieces, x, mask, lambda result: ~(result < math.inf))[0]
    return reduce(_smallest_of_pieces, x, mask, lambda result: ~(result > -math.inf))[0]


def reduce(
    reduction: Callable[..., tuple[torch.Tensor, ...]],
    x: torch.Tensor,
    mask: torch.Tensor,
    doubtful: Callable[[torch.Tensor], torch.Tensor],
) -> tuple[torch.Tensor, ...]:
    """Reduce in the quick way, and again in the exact way where the result is not to be trusted.

    Args:
        reduction: Called with x, mask and `exact`; gives results of shape (outer, inner).
        x: The values.
        mask: A boolean mask of the same shape.
        doubtful: Says which of the first results may come from what is left out.

    Returns:
        The results.
    """
    _, reduced, inner = x.shape
    if inner > COLUMNS and reduced * inner > BLOCK:
        columns = zip(torch.split(x, COLUMNS, -1), torch.split(mask, COLUMNS, -1), strict=True)
        parts = zip(*[reduce(reduction, *column, doubtful) for column in columns], strict=True)
        return tuple(torch.cat(part, -1) for part in parts)
    results = reduction(x, mask, exact=False)
    if math.isfinite(results[0].sum().item()):
        return results
    again = doubtful(results[0])
    if again.any():
        rows = again.any(1).nonzero().squeeze(1)
        for first, second in zip(results, reduction(x[rows], mask[rows], exact=True), strict=True):
            first[rows] = second.to(first.dtype)
    return results


def _infinite(result: torch.Tensor) -> torch.Tensor:
    return ~result.isfinite()


def _totals_of_pieces(x: torch.Tensor, mask: torch.Tensor, exact: bool) -> tuple[torch.Tensor, ...]:
    results = [weights.mul_(source).sum(1, dtype=_wide(x)) for source, weights in _weighed(x, mask, exact)]
    return (combined(results, x, torch.sum),)


def _sums_of_pieces(x: torch.Tensor, mask: torch.Tensor, exact: bool) -> tuple[torch.Tensor, ...]:
    results, numbers = [], []
    for source, weights in _weighed(x, mask, exact):
        numbers.append(weights.sum(1, dtype=_wide(x)))
        results.append(weights.mul_(source).sum(1, dtype=_wide(x)))
    return combined(results, x, torch.sum), combined(numbers, x, torch.sum, torch.int64)


def _wide(x: torch.Tensor) -> torch.dtype:
    return torch.float32 if x.element_size() == 2 else x.dtype


def _squares_of_pieces(x: torch.Tensor, mask: torch.Tensor, exact: bool) -> tuple[torch.Tensor, ...]:
    buffer = Buffer(x.dtype, room_for(x))
    if x.shape[1] * x.shape[2] > BLOCK:  # a slice is in several pieces, so its mean has to be known before
        total, number = _sums_of_pieces(x, mask, exact)
        center = total / number.clamp(min=1)
        parts = []
        for source, weights, centers in _weighed(x, mask, exact, _spread(center, x)):
            kept = torch.mul(source, weights, out=buffer.of(source.shape))
            parts.append(_square_sum(kept, weights, centers))
        return combined(parts, x, torch.sum), center, number
    results: list[tuple[torch.Tensor, ...]] = []
    for source, weights in _weighed(x, mask, exact):
        number = weights.sum(1)
        kept = torch.mul(source, weights, out=buffer.of(source.shape))
        center = kept.sum(1).div_(number.clamp(min=1))
        results.append((_square_sum(kept, weights, center.unsqueeze(1)), center, number))
    squares, centers, numbers = (torch.cat(parts) for parts in zip(*results, strict=True))
    return squares, centers, numbers.long()


def _square_sum(kept: torch.Tensor, weights: torch.Tensor, center: torch.Tensor) -> torch.Tensor:
    distance = kept.addcmul_(weights, center, value=-1)
    return distance.mul_(distance).sum(1)


def _largest_of_pieces(x: torch.Tensor, mask: torch.Tensor, exact: bool) -> tuple[torch.Tensor, ...]:
    return _extreme_of_pieces(x, mask, exact, torch.amax, -math.inf)


def _smallest_of_pieces(x: torch.Tensor, mask: torch.Tensor, exact: bool) -> tuple[torch.Tensor, ...]:
    return _extreme_of_pieces(x, mask, exact, torch.amin, math.inf)


def _extreme_of_pieces(
    x: torch.Tensor, mask: torch.Tensor, exact: bool, function: Callable[..., torch.Tensor], limit: float
) -> tuple[torch.Tensor, ...]:
    buffer, away = Buffer(x.dtype, room_for(x)), (Bits if exact else Removal)(x, limit, room_for(x))
    results = [
        function(away.select(source, kept, buffer.of(source.shape)), 1)
        for source, kept in cut(x, mask.view(torch.uint8))
    ]
    return (combined(results, x, function),)


# --- pieces ---------------------------------------------------------------------------------------------------------


def cut(*tensors: torch.Tensor) -> Pieces:
    """Cut tensors of one shape into pieces of whole slices, or of parts of one slice if a slice is large."""
    outer, reduced, inner = tensors[0].shape
    if outer * reduced * inner <= BLOCK:
        yield tensors
        return
    if reduced * inner <= BLOCK:
        yield from zip(*[torch.split(t, BLOCK // max(reduced * inner, 1)) for t in tensors], strict=True)
        return
    for i in range(outer):
        yield from zip(*[torch.split(t[i : i + 1], max(BLOCK // inner, 1), 1) for t in tensors], strict=True)


def combined(
    results: list[torch.Tensor], x: torch.Tensor, again: Callable[..., torch.Tensor], dtype: torch.dtype | None = None
) -> torch.Tensor:
    """Put the results of the pieces together; several pieces of one slice are reduced again."""
    result = torch.cat(results) if results else x.new_empty(0, x.shape[2])
    result = result if dtype is None else result.to(dtype)
    if x.shape[1] * x.shape[2] > BLOCK:
        result = again(result.view(x.shape[0], -1, x.shape[2]), 1)
    return result


def _spread(slices: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return slices.unsqueeze(1).expand(x.shape)


def room_for(x: torch.Tensor) -> int:
    """Give how many elements the largest piece of x has."""
    return min(max(BLOCK, x.shape[2]), x.numel())


def _weighed(x: torch.Tensor, mask: torch.Tensor, exact: bool, *more: torch.Tensor) -> Pieces:
    """Give pieces of x with weights 1 and 0 that may be written to; in the exact way 0 stands for the left-out."""
    weights = Buffer(x.dtype, room_for(x))
    clean, mask_bits = (Buffer(x.dtype, room_for(x)), Bits(x, 0, room_for(x))) if exact else (None, None)
    for source, kept, *others in cut(x, mask.view(torch.uint8), *more):
        if clean is not None and mask_bits is not None:
            source = mask_bits.select(source, kept, clean.of(source.shape))
        yield source, weights.of(source.shape).copy_(kept), *others
