"""Reductions without what is left out, in pieces that stay in the cache.

torch's kernels for bool are not vectorised on the CPU: `where` with a random mask costs 30 to 50 times a sum. And a
fresh large tensor costs more than the arithmetic on it. So a mask is read as bytes, and reductions go through small
buffers.

There are two ways to take an element away. Quick: its weight is 0, and 0 times anything finite is 0. Exact: its bits
are masked, `((bits of x ^ bits of the value) & mask) ^ bits of the value`, which does not compute with it at all. The
quick way is tried first; slices where it cannot be trusted (NaN or infinity was met) are done again in the exact way.

Tensors here are 3-D, (outer, reduced, inner), and nothing is seen by autograd: `_kernels.py` makes it differentiable.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch

from gradgate.masked._valid import Number

__all__ = ["LANES", "Bits", "Buffer", "combined", "cut", "distances", "expand", "extreme", "fill", "squares", "sums"]

BLOCK = 1 << 16  # elements: a piece of x, its mask and its buffers fit into the second-level cache
COLUMNS = 1 << 13  # how much of a longer inner dimension is taken at once, so that a piece has several rows of it
LANES = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

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
    result = torch.empty(x.shape, dtype=x.dtype)
    mask_bits = Bits(x, value)
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
    result = torch.empty(mask.shape, dtype=slices.dtype)
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
    result = torch.empty(x.shape, dtype=x.dtype)
    mask_bits = Bits(x, 0)
    for source, kept, centers, factors, out in cut(x, mask, _spread(center, x), _spread(factor, x), result):
        mask_bits.select(torch.sub(source, centers, out=out).mul_(factors), kept, out)
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
    results = _reduced(_sums_of_pieces if counted else _totals_of_pieces, x, mask)
    return results[0], results[-1]


def squares(x: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Add up the squares of the distances of what is kept to its mean.

    Args:
        x: The values, float32 or float64.
        mask: A boolean mask of the same shape.

    Returns:
        The sums of squares, the means and the numbers, all of shape (outer, inner).
    """
    result, center, number = _reduced(_squares_of_pieces, x, mask)
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
    return _reduced(_largest_of_pieces if largest else _smallest_of_pieces, x, mask)[0]


def _reduced(
    reduction: Callable[..., tuple[torch.Tensor, ...]], x: torch.Tensor, mask: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """Reduce in the quick way, and again in the exact way where that was not good enough."""
    _, reduced, inner = x.shape
    if inner > COLUMNS and reduced * inner > BLOCK:
        columns = zip(torch.split(x, COLUMNS, -1), torch.split(mask, COLUMNS, -1), strict=True)
        parts = zip(*[_reduced(reduction, *column) for column in columns], strict=True)
        return tuple(torch.cat(part, -1) for part in parts)
    results = reduction(x, mask, exact=False)
    result = results[0]
    # Beyond half of what the dtype can hold, an extreme may be what stands for the left-out.
    most = torch.finfo(result.dtype).max / 2
    if not abs(result.item() if result.numel() == 1 else result.abs().amax().item()) < most:
        rows = (~(result.abs() < most)).any(1).nonzero().squeeze(1)
        for first, again in zip(results, reduction(x[rows], mask[rows], exact=True), strict=True):
            first[rows] = again.to(first.dtype)
    return results


def _totals_of_pieces(x: torch.Tensor, mask: torch.Tensor, exact: bool) -> tuple[torch.Tensor, ...]:
    if x.shape[0] == x.shape[2] == 1 and x.element_size() > 2:
        return _dotted(x, mask, exact, counted=False)
    results = [weights.mul_(source).sum(1, dtype=_wide(x)) for source, weights in _weighed(x, mask, exact)]
    return (combined(results, x, torch.sum),)


def _sums_of_pieces(x: torch.Tensor, mask: torch.Tensor, exact: bool) -> tuple[torch.Tensor, ...]:
    if x.shape[0] == x.shape[2] == 1 and x.element_size() > 2:
        return _dotted(x, mask, exact, counted=True)
    results, numbers = [], []
    for source, weights in _weighed(x, mask, exact):
        numbers.append(weights.sum(1, dtype=_wide(x)))
        results.append(weights.mul_(source).sum(1, dtype=_wide(x)))
    return combined(results, x, torch.sum), combined(numbers, x, torch.sum, torch.int64)


def _dotted(x: torch.Tensor, mask: torch.Tensor, exact: bool, counted: bool) -> tuple[torch.Tensor, ...]:
    """Add up one single slice: multiplied and added in one go."""
    flat, flat_mask = x.reshape(-1), mask.reshape(-1).view(torch.uint8)
    mask_bits = Bits(x, 0, pieces=2) if exact else None
    if flat.numel() <= 2 * BLOCK:  # one piece, without ceremony
        weights = flat_mask.to(x.dtype)
        source = flat if mask_bits is None else mask_bits.select(flat, flat_mask, torch.empty_like(weights))
        total = torch.dot(source, weights).view(1, 1)
        return (total, weights.sum().view(1, 1)) if counted else (total,)
    buffer, clean = (torch.empty(BLOCK, dtype=x.dtype) for _ in range(2))
    totals, numbers = [], []
    for source, kept in zip(torch.split(flat, BLOCK), torch.split(flat_mask, BLOCK), strict=True):
        weights = (buffer if len(source) == BLOCK else buffer[: len(source)]).copy_(kept)
        if mask_bits is not None:
            source = mask_bits.select(source, kept, clean[: len(source)])
        totals.append(torch.dot(source, weights))
        if counted:
            numbers.append(weights.sum())
    results = (torch.stack(totals), torch.stack(numbers).long()) if counted else (torch.stack(totals),)
    return tuple(result.sum().view(1, 1) for result in results)


def _wide(x: torch.Tensor) -> torch.dtype:
    return torch.float32 if x.element_size() == 2 else x.dtype


def _squares_of_pieces(x: torch.Tensor, mask: torch.Tensor, exact: bool) -> tuple[torch.Tensor, ...]:
    if x.shape[1] * x.shape[2] > BLOCK:  # a slice is in several pieces, so its mean has to be known before
        total, number = _sums_of_pieces(x, mask, exact)
        center = total / number.clamp(min=1)
        buffer = Buffer(x.dtype, x)
        parts = [
            _square_sum(source, weights, centers, buffer.of(source.shape))
            for source, weights, centers in _weighed(x, mask, exact, _spread(center, x))
        ]
        return combined(parts, x, torch.sum), center, number
    results: list[tuple[torch.Tensor, ...]] = []
    buffer = Buffer(x.dtype, x)
    for source, weights in _weighed(x, mask, exact):
        room = buffer.of(source.shape)
        number = weights.sum(1)
        center = torch.mul(source, weights, out=room).sum(1) / number.clamp(min=1)
        results.append((_square_sum(source, weights, center.unsqueeze(1), room), center, number))
    squares, centers, numbers = (torch.cat(parts) for parts in zip(*results, strict=True))
    return squares, centers, numbers.long()


def _square_sum(x: torch.Tensor, weights: torch.Tensor, center: torch.Tensor, room: torch.Tensor) -> torch.Tensor:
    distance = torch.sub(x, center, out=room).mul_(weights)
    return distance.mul_(distance).sum(1)


def _largest_of_pieces(x: torch.Tensor, mask: torch.Tensor, exact: bool) -> tuple[torch.Tensor, ...]:
    return _extreme_of_pieces(x, mask, exact, torch.amax, torch.minimum, -1)


def _smallest_of_pieces(x: torch.Tensor, mask: torch.Tensor, exact: bool) -> tuple[torch.Tensor, ...]:
    return _extreme_of_pieces(x, mask, exact, torch.amin, torch.maximum, 1)


def _extreme_of_pieces(
    x: torch.Tensor,
    mask: torch.Tensor,
    exact: bool,
    reduce: Callable[..., torch.Tensor],
    bound: Callable[..., torch.Tensor],
    sign: int,
) -> tuple[torch.Tensor, ...]:
    results = []
    if exact:
        mask_bits, buffer = Bits(x, sign * math.inf), Buffer(x.dtype, x)
        for source, kept in cut(x, mask):
            results.append(reduce(mask_bits.select(source, kept, buffer.of(source.shape)), 1))
    else:
        half = torch.finfo(x.dtype).max / 2
        far = torch.tensor(sign * half, dtype=x.dtype)
        for source, weights in _weighed(x, mask, exact):
            # Weight 1 bounds by half of the largest number, on the side of no harm; weight 0 on the other side.
            torch.add(far, weights, alpha=-2 * sign * half, out=weights)
            results.append(reduce(bound(source, weights, out=weights), 1))
    return (combined(results, x, reduce),)


# --- pieces ---------------------------------------------------------------------------------------------------------


def cut(*tensors: torch.Tensor) -> Pieces:
    """Cut tensors of one shape into pieces of whole slices, or of parts of one slice if a slice is large."""
    outer, reduced, inner = tensors[0].shape
    if reduced * inner <= BLOCK:
        yield from zip(*[torch.split(t, BLOCK // max(reduced * inner, 1)) for t in tensors], strict=True)
        return
    for i in range(outer):
        yield from zip(*[torch.split(t[i : i + 1], max(BLOCK // inner, 1), 1) for t in tensors], strict=True)


def combined(
    results: list[torch.Tensor], x: torch.Tensor, reduce: Callable[..., torch.Tensor], dtype: torch.dtype | None = None
) -> torch.Tensor:
    """Put the results of the pieces together; several pieces of one slice are reduced again."""
    result = torch.cat(results) if results else x.new_empty(0, x.shape[2])
    result = result if dtype is None else result.to(dtype)
    if x.shape[1] * x.shape[2] > BLOCK:
        result = reduce(result.view(x.shape[0], -1, x.shape[2]), 1)
    return result


def _spread(slices: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return slices.unsqueeze(1).expand(x.shape)


def _weighed(x: torch.Tensor, mask: torch.Tensor, exact: bool, *more: torch.Tensor) -> Pieces:
    """Give pieces of x with weights 1 and 0 that may be written to; in the exact way 0 stands for the left-out."""
    weights, clean = Buffer(x.dtype, x), Buffer(x.dtype, x)
    mask_bits = Bits(x, 0) if exact else None
    for source, kept, *others in cut(x, mask.view(torch.uint8), *more):
        if mask_bits is not None:
            source = mask_bits.select(source, kept, clean.of(source.shape))
        yield source, weights.of(source.shape).copy_(kept), *others


class Buffer:
    """Room for one piece of a tensor (or a few), used again for the next."""

    def __init__(self, dtype: torch.dtype, x: torch.Tensor, pieces: int = 1) -> None:
        self._flat = torch.empty(min(max(pieces * BLOCK, x.shape[2]), x.numel()), dtype=dtype)
        self._shaped = self._flat.view(1, -1, 1)

    def of(self, shape: torch.Size) -> torch.Tensor:
        if self._shaped.shape != shape:
            self._shaped = self._flat[: shape.numel()].view(shape)
        return self._shaped


class Bits:
    """Selects elements of a dtype by their bits, with one value for those that are left out."""

    def __init__(self, x: torch.Tensor, value: Number, pieces: int = 1) -> None:
        self._lane = LANES[x.element_size()]
        self._value = torch.tensor(value, dtype=x.dtype).view(self._lane) if value != 0 else None
        self._signed, self._ones = Buffer(torch.int8, x, pieces), Buffer(self._lane, x, pieces)

    def select(self, source: torch.Tensor, kept: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """Write what is kept of the source, and the value for the rest, to out (which may be the source)."""
        signed, ones = self._signed.of(kept.shape), self._ones.of(kept.shape)
        ones.copy_(torch.neg(kept.view(torch.int8), out=signed))  # 1 becomes -1: all bits
        bits, written = source.view(self._lane), out.view(self._lane)
        if self._value is None:
            torch.bitwise_and(bits, ones, out=written)
        else:
            torch.bitwise_xor(bits, self._value, out=written).bitwise_and_(ones).bitwise_xor_(self._value)
        return out
