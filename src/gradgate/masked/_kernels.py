"""Filling and reducing by mask: through the blocks on the CPU, through torch.where everywhere else.

A function here gives the same values and gradients on both ways. The way through `torch.where` is the one that
torch.compile, torch.func and FakeTensorMode trace, that other devices take without a host sync, and that small tensors
take because it is quicker for them.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from gradgate._torch_compat import apply_function, has_data, is_traced
from gradgate.masked import _blocks
from gradgate.masked._valid import Number

__all__ = ["counts", "extreme", "fill", "goes_by_blocks", "sums", "variances"]

SMALL = 1 << 12  # elements: beneath it, the overhead of a piece is more than what torch.where costs
_FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


def goes_by_blocks(x: torch.Tensor, mask: torch.Tensor) -> bool:
    """Tell whether tensors take the way through the blocks.

    Args:
        x: The values.
        mask: The mask, expanded to the shape of x.

    Returns:
        False while something traces, on other devices, and for small tensors.
    """
    return (
        x.numel() >= SMALL
        and x.device.type == "cpu"
        and mask.device.type == "cpu"
        and type(x) in (torch.Tensor, torch.nn.Parameter)
        and x.layout is torch.strided
        and x.element_size() in _blocks.LANES
        and not is_traced()
        and has_data(x, mask)
    )


def fill(x: torch.Tensor, mask: torch.Tensor, value: Number) -> torch.Tensor:
    """Give x where the mask is True and a value elsewhere; the gradient is exactly 0 there.

    Args:
        x: The values.
        mask: A boolean mask that broadcasts to x.
        value: What stands for the left-out.

    Returns:
        A new tensor.
    """
    if x.dtype is torch.bool:
        value = bool(value)
    fits = x.dtype.is_floating_point or x.dtype.is_complex or isinstance(value, int)
    if fits and goes_by_blocks(x, mask):
        result: torch.Tensor = apply_function(_Fill, x, mask.expand(x.shape), value)
        return result
    return torch.where(mask, x, value)


def sums(x: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Add up what is kept, and count it.

    Args:
        x: The values, 3-D: (outer, reduced, inner). Halves are added in float32.
        mask: A boolean mask of the same shape.

    Returns:
        The sums, in float32 for halves, and the numbers, both of shape (outer, inner).
    """
    if x.dtype in _FLOATS and goes_by_blocks(x, mask):
        total, number = apply_function(_Sum, x, mask)
        return total, number
    return fill(x, mask, 0).sum(1, dtype=_wide(x.dtype)), counts(mask)


def counts(mask: torch.Tensor) -> torch.Tensor:
    """Count what is kept.

    Args:
        mask: A boolean mask, 3-D: (outer, reduced, inner).

    Returns:
        The numbers, int64, of shape (outer, inner).
    """
    if mask.device.type == "cpu" and not is_traced():
        # Bytes are added much quicker than bools, and 32 bits quicker than 64.
        return mask.view(torch.uint8).sum(1, dtype=torch.int32).long()
    return mask.sum(1)


def extreme(x: torch.Tensor, mask: torch.Tensor, largest: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Find the largest or the smallest of what is kept, and count what is kept.

    Args:
        x: The values, floating and 3-D: (outer, reduced, inner), with nothing empty.
        mask: A boolean mask of the same shape.
        largest: Which of the two.

    Returns:
        The extremes and the numbers, both of shape (outer, inner); the gradient is shared by those that are equal.
    """
    if x.dtype in _FLOATS and goes_by_blocks(x, mask):
        found, number = apply_function(_Extreme, x, mask, largest)
        return found, number
    limit = -math.inf if largest else math.inf
    filled, number = torch.where(mask, x, limit), counts(mask)
    result = filled.amax(1) if largest else filled.amin(1)
    # Where the kept ones are as infinite as what stands for the left-out, those would take a share of the gradient.
    # All of the kept are equal there, so that their mean has the same value, and shares among them alone.
    mean = torch.where(mask, x, 0).sum(1) / number.clamp(min=1)
    return torch.where(result == limit, mean.to(result.dtype), result), number


def variances(x: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Add up the squares of the distances to the mean of what is kept.

    Args:
        x: The values, float32 or float64, 3-D: (outer, reduced, inner).
        mask: A boolean mask of the same shape.

    Returns:
        The sums of squares and the numbers, both of shape (outer, inner).
    """
    if x.dtype in _FLOATS and goes_by_blocks(x, mask):
        squares, number = apply_function(_Squares, x, mask)
        return squares, number
    kept, number = torch.where(mask, x, 0), counts(mask)
    center = (kept.sum(1) / number.clamp(min=1)).unsqueeze(1)
    # What is left out is taken away before and after: its distance to the center is no number to build on.
    distance = torch.where(mask, kept - center, 0)
    return (distance * distance).sum(1), number


def _wide(dtype: torch.dtype) -> torch.dtype | None:
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else None


def _expanded(slices: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Give each kept element the value of its slice, and each left-out one 0: what `sums` does, turned around."""
    wanted = slices.unsqueeze(1).expand(mask.shape)
    if goes_by_blocks(wanted, mask):
        result: torch.Tensor = apply_function(_Expand, slices, mask)
        return result
    return torch.where(mask, wanted, 0)


def _added(values: torch.Tensor) -> torch.Tensor:
    return values.sum(1)


def _squared(values: torch.Tensor) -> torch.Tensor:
    return values.mul_(values).sum(1)


def _largest(values: torch.Tensor) -> torch.Tensor:
    return values.amax(1)


def _smallest(values: torch.Tensor) -> torch.Tensor:
    return values.amin(1)


class _Fill(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, mask: torch.Tensor, value: Number) -> torch.Tensor:
        ctx.save_for_backward(mask)
        flat = (1, x.numel(), 1)
        return _blocks.fill(x.reshape(flat), mask.reshape(flat), value).view(x.shape)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return fill(gradients[0], ctx.saved_tensors[0], 0), None, None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, mask: torch.Tensor) -> Any:
        ctx.save_for_backward(mask)
        ctx.dtype, wide = x.dtype, _wide(x.dtype)
        total, number = _blocks.reduce(x, mask, 0, lambda values: values.sum(1, dtype=wide), _added)
        ctx.mark_non_differentiable(number)
        return total, number

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return _expanded(gradients[0].to(ctx.dtype), ctx.saved_tensors[0]), None


class _Expand(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, slices: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(mask)
        return _blocks.expand(slices, mask)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return sums(gradients[0], ctx.saved_tensors[0])[0].to(gradients[0].dtype), None


class _Extreme(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, mask: torch.Tensor, largest: bool) -> Any:
        limit = -math.inf if largest else math.inf
        function = _largest if largest else _smallest
        found, number = _blocks.reduce(x, mask, limit, function, function)
        ctx.save_for_backward(x, mask, found)
        ctx.mark_non_differentiable(number)
        return found, number

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        x, mask, found = ctx.saved_tensors
        tied = (x.detach() == found.detach().unsqueeze(1)) & mask
        share = gradients[0] / tied.sum(1)
        return fill(tied * share.unsqueeze(1), mask, 0), None, None


class _Squares(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, mask: torch.Tensor) -> Any:
        total, number = _blocks.reduce(x, mask, 0, _added, _added)
        center = total / number.clamp(min=1)
        squares, _ = _blocks.reduce(x, mask, 0, _squared, _added, center)
        ctx.save_for_backward(x, mask, center, number)
        ctx.mark_non_differentiable(number)
        return squares, number

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        x, mask, center, number = ctx.saved_tensors
        factor = 2 * gradients[0]
        if not torch.is_grad_enabled() and goes_by_blocks(x, factor):
            return _blocks.distances(x, mask, center, factor), None
        kept = fill(x, mask, 0)
        center = sums(kept, mask)[0] / number.clamp(min=1)
        return fill((kept - center.unsqueeze(1)) * factor.unsqueeze(1), mask, 0), None
