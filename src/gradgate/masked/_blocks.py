"""The left-out elements replaced bit by bit, in pieces that stay in the cache.

torch's kernels for bool are not vectorised on the CPU: `where` with a random mask costs 30 to 50 times a sum. Those for
integers are. A mask of bytes becomes -1 (keep) or 0 (leave out) in the width of the element, and

    bits of the result = ((bits of x ^ bits of the value) & mask) ^ bits of the value

does not compute with what is left out, so that NaN cannot leak. A fresh large tensor costs more than the arithmetic on
it, so reductions go through one small buffer, piece by piece.

Tensors here are 3-D, (outer, reduced, inner), and nothing is seen by autograd: `_kernels.py` makes it differentiable.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from gradgate.masked._valid import Number

__all__ = ["LANES", "distances", "expand", "fill", "reduce"]

BLOCK = 1 << 16  # elements: x, the mask and the buffers of one piece fit into the second-level cache
COLUMNS = 1 << 13  # how much of a longer inner dimension is taken at once, so that a piece has several rows of it
LANES = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class _Buffers:
    """Room for one piece: the mask as signed bytes, the mask in the width of the element, and the result."""

    def __init__(self, lane: torch.dtype, largest: int) -> None:
        self._flat = [torch.empty(largest, dtype=dtype) for dtype in (torch.int8, lane, lane)]
        self._shaped: dict[torch.Size, list[torch.Tensor]] = {}

    def of(self, shape: torch.Size) -> list[torch.Tensor]:
        if shape not in self._shaped:
            self._shaped[shape] = [flat[: shape.numel()].view(shape) for flat in self._flat]
        return self._shaped[shape]


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
    for out, _ in _pieces(x, mask, value, into=result):
        del out
    return result


def expand(slices: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Give each kept element the value of its slice, and each left-out one 0.

    Args:
        slices: One value for each slice, of shape (outer, inner).
        mask: A boolean mask.

    Returns:
        A new tensor of the shape of the mask.
    """
    return fill(slices.unsqueeze(1).expand(mask.shape), mask, 0)


def reduce(
    x: torch.Tensor,
    mask: torch.Tensor,
    value: Number,
    function: Callable[[torch.Tensor], torch.Tensor],
    combine: Callable[[torch.Tensor], torch.Tensor],
    center: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Reduce the middle dimension, with a value for what is left out.

    Args:
        x: The values.
        mask: A boolean mask of the same shape.
        value: What stands for the left-out.
        function: Reduces dimension 1 of a piece; it may write to what it gets.
        combine: Reduces dimension 1 of what `function` gave for several pieces of a slice.
        center: What is taken from each slice before, of shape (outer, inner).

    Returns:
        The result and the number kept, both of shape (outer, inner).
    """
    _, reduced, inner = x.shape
    if inner > COLUMNS and reduced * inner > BLOCK:
        columns = [torch.split(t, COLUMNS, -1) for t in (x, mask)]
        centers = [None] * len(columns[0]) if center is None else torch.split(center, COLUMNS, -1)
        parts = [
            reduce(one, kept, value, function, combine, own) for one, kept, own in zip(*columns, centers, strict=True)
        ]
        return torch.cat([part for part, _ in parts], -1), torch.cat([number for _, number in parts], -1)
    lane = LANES[x.element_size()]
    exact = lane if x.element_size() > 2 else torch.int32  # what a sum of so many -1 fits into
    results, numbers = [], []
    for values, ones in _pieces(x, mask, value, center):
        results.append(function(values))
        numbers.append(ones.sum(1, dtype=exact))
    result, number = torch.cat(results), -torch.cat(numbers).long()
    if reduced * inner > BLOCK:  # several pieces for each slice
        result = combine(result.view(x.shape[0], -1, inner))
        number = number.view(x.shape[0], -1, inner).sum(1)
    return result, number


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
    for out, _ in _pieces(x, mask, 0, center, factor, into=result):
        del out
    return result


def _cut(*tensors: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
    """Cut tensors of one shape into pieces of whole slices, or of parts of one slice if a slice is large."""
    outer, reduced, inner = tensors[0].shape
    if reduced * inner <= BLOCK:
        yield from zip(*[torch.split(t, BLOCK // max(reduced * inner, 1)) for t in tensors], strict=True)
        return
    for i in range(outer):
        yield from zip(*[torch.split(t[i : i + 1], max(BLOCK // inner, 1), 1) for t in tensors], strict=True)


def _pieces(
    x: torch.Tensor,
    mask: torch.Tensor,
    value: Number,
    center: torch.Tensor | None = None,
    factor: torch.Tensor | None = None,
    into: torch.Tensor | None = None,
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Give the filled x piece by piece, with the mask of each piece as -1 and 0.

    Without `into`, each piece stands in a buffer that the next one uses again.
    """
    lane = LANES[x.element_size()]
    bits = torch.tensor(value, dtype=x.dtype).view(lane) if value != 0 else None
    given = [x, mask.view(torch.int8)]
    given += [t.unsqueeze(1).expand(x.shape) for t in (center, factor) if t is not None]
    given += [] if into is None else [into]
    buffers = _Buffers(lane, min(max(BLOCK, x.shape[-1]), x.numel()))
    for source, kept, *more in _cut(*given):
        signed, ones, selected = buffers.of(source.shape)
        out = selected if into is None else more[-1].view(lane)
        ones.copy_(torch.neg(kept, out=signed))
        if center is not None:
            source = torch.sub(source, more[0], out=out.view(x.dtype))
            source = source if factor is None else source.mul_(more[1])
        if bits is None:
            torch.bitwise_and(source.view(lane), ones, out=out)
        else:
            torch.bitwise_xor(source.view(lane), bits, out=out).bitwise_and_(ones).bitwise_xor_(bits)
        yield out.view(x.dtype), ones
