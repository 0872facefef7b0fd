"""What the functions of the room are made of, each in two ways that give the same values and gradients.

Through blocks on the CPU, and through torch.where everywhere else: that way can be traced by torch.compile, torch.func
and FakeTensorMode, other devices take it without a host sync, and small tensors take it because it is quicker for them
(`_ways.py` says who takes which).
"""

from __future__ import annotations

import math
from typing import Any, TypeAlias

import torch

from gradgate._torch_compat import apply_function, softmax_backward
from gradgate.masked import _bits, _blocks, _exponentials
from gradgate.masked._counting import count
from gradgate.masked._valid import SMALL, Number
from gradgate.masked._ways import goes_by_blocks, may_look, may_read, recorded

__all__ = ["counts", "extreme", "fill", "logsumexp", "softmax", "squares", "sums"]

_HALVES = (torch.float16, torch.bfloat16)
_FLOATS = (torch.float32, torch.float64, *_HALVES)

Dims: TypeAlias = tuple[int, ...]


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
    if not fits or not goes_by_blocks(x, mask, "fill"):
        return torch.where(mask, x, value)
    result: torch.Tensor = apply_function(_Fill, x, mask, value) if recorded(x) else _filled(x, mask, value)
    return result


def _filled(x: torch.Tensor, mask: torch.Tensor, value: Number) -> torch.Tensor:
    if x.numel() <= 4 * _blocks.BLOCK:
        return _bits.filled(x, mask, value)
    flat = (1, x.numel(), 1)
    return _blocks.fill(x.reshape(flat), mask.expand(x.shape).reshape(flat), value).view(x.shape)


def counts(mask: torch.Tensor, shape: torch.Size, dims: Dims, keepdim: bool) -> torch.Tensor:
    """Count what is kept.

    Args:
        mask: A boolean mask.
        shape: The shape that it broadcasts to.
        dims: What is reduced.
        keepdim: Whether reduced dimensions stay with size 1.

    Returns:
        The numbers, int64.
    """
    mask = mask if mask.shape == shape else mask.expand(shape)
    if mask.numel() >= SMALL and may_look(mask, mask):
        found = count(_grouped(mask, dims)) if mask.numel() > _blocks.BLOCK else None
        if found is not None:
            return _shaped(found, mask, dims, keepdim)
        # Bytes are added much quicker than bools, and 32 bits quicker than 64.
        return mask.view(torch.uint8).sum(dims, keepdim=keepdim, dtype=torch.int32).long()
    return mask.sum(dims, keepdim=keepdim)


def sums(
    x: torch.Tensor, mask: torch.Tensor, dims: Dims, keepdim: bool, counted: bool = True
) -> tuple[torch.Tensor, torch.Tensor]:
    """Add up what is kept, and count it.

    Args:
        x: The values, floating or complex.
        mask: A boolean mask that broadcasts to x.
        dims: What is reduced.
        keepdim: Whether reduced dimensions stay with size 1.
        counted: Whether the numbers are wanted.

    Returns:
        The sums, in float32 for halves, and the numbers; without them, the sums again.
    """
    in_one_go = len(dims) == x.dim() and not keepdim and x.element_size() > 2 and not recorded(x)
    if x.dtype in _FLOATS and goes_by_blocks(x, mask, "total" if in_one_go else "few steps"):
        mask = mask if mask.shape == x.shape else mask.expand(x.shape)
        if in_one_go:
            flat = (x, mask) if len(dims) == 1 else (x.reshape(-1), mask.reshape(-1))
            return _blocks.total_of(*flat, counted)
        grouped = _grouped(x, dims), _grouped(mask, dims)
        total, number = apply_function(_Sums, *grouped, counted) if recorded(x) else _blocks.sums(*grouped, counted)
        total = _shaped(total, x, dims, keepdim)
        return total, _shaped(number, x, dims, keepdim) if counted else total
    wide = torch.float32 if x.dtype in _HALVES else None
    total = fill(x, mask, 0).sum(dims, keepdim=keepdim, dtype=wide)
    return total, counts(mask, x.shape, dims, keepdim) if counted else total


def squares(x: torch.Tensor, mask: torch.Tensor, dims: Dims, keepdim: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Add up the squares of the distances to the mean of what is kept, and count it.

    Args:
        x: The values, float32 or float64.
        mask: A boolean mask that broadcasts to x.
        dims: What is reduced.
        keepdim: Whether reduced dimensions stay with size 1.

    Returns:
        The sums of squares and the numbers.
    """
    if goes_by_blocks(x, mask, "many steps"):
        found, number = apply_function(_Squares, _grouped(x, dims), _grouped(mask.expand(x.shape), dims))
        return _shaped(found, x, dims, keepdim), _shaped(number, x, dims, keepdim)
    total, number = sums(x, mask, dims, True)
    # What is left out is taken away before and after: its distance to the mean is no number to build on.
    distance = torch.where(mask, torch.where(mask, x, 0) - total / number.clamp(min=1), 0)
    found = (distance * distance).sum(dims, keepdim=keepdim)
    return found, number.reshape(found.shape)


def extreme(x: torch.Tensor, mask: torch.Tensor, dims: Dims, keepdim: bool, largest: bool) -> torch.Tensor:
    """Find the largest or the smallest of what is kept.

    Args:
        x: The values, floating, with at least one element in each slice.
        mask: A boolean mask that broadcasts to x.
        dims: What is reduced.
        keepdim: Whether reduced dimensions stay with size 1.
        largest: Which of the two.

    Returns:
        The extremes, infinite where nothing is kept; the gradient is shared by those that are equal.
    """
    if x.dtype in _FLOATS and goes_by_blocks(x, mask):
        grouped = _grouped(x, dims), _grouped(mask if mask.shape == x.shape else mask.expand(x.shape), dims)
        found = apply_function(_Extreme, *grouped, largest) if recorded(x) else _blocks.extreme(*grouped, largest)
        return _shaped(found, x, dims, keepdim)
    limit = -math.inf if largest else math.inf
    filled = fill(x, mask, limit)
    found = (torch.amax if largest else torch.amin)(filled, dims, keepdim=keepdim)
    if not recorded(x) or (may_look(x, mask) and math.isfinite(found.detach().sum().item())):
        return found
    # Where the kept ones are as infinite as what stands for the left-out, those would take a share of the gradient.
    # All of the kept are equal there, so that their mean has the same value, and shares among them alone.
    total, number = sums(x, mask, dims, keepdim)
    mean = (total / number.clamp(min=1)).to(found.dtype)
    return torch.where((found == limit) & (number > 0), mean, found)


def logsumexp(x: torch.Tensor, mask: torch.Tensor, dims: Dims) -> torch.Tensor:
    """Give the logarithm of the sum of the exponentials of what is kept, with reduced dimensions of size 1.

    Args:
        x: The values, with at least one element in each slice.
        mask: A boolean mask that broadcasts to x.
        dims: What is reduced.

    Returns:
        -inf where nothing is kept, or nothing but -inf; its gradient is 0 there.
    """
    if x.dtype in _FLOATS[:2] and goes_by_blocks(x, mask, "many steps"):
        found = apply_function(_LogSumExp, _grouped(x, dims), _grouped(mask.expand(x.shape), dims))
        return _shaped(found, x, dims, True)
    if may_look(x, mask):
        found = torch.logsumexp(fill(x, mask, -math.inf), dims, keepdim=True)
        if not found.isinf().any():  # then every slice has a weight
            return found
    mask, weightless = _with_weight(x, mask, dims)
    result = torch.logsumexp(fill(x, mask, -math.inf), dims, keepdim=True)
    return torch.where(weightless, -math.inf, result)


def softmax(x: torch.Tensor, mask: torch.Tensor, logarithm: bool) -> torch.Tensor:
    """Give the softmax of what is kept along the last dimension, or its logarithm.

    Args:
        x: The values, with at least one element in each slice.
        mask: A boolean mask that broadcasts to x.
        logarithm: Whether to give the logarithm.

    Returns:
        0, or -inf for the logarithm, where an element is left out, and for a slice with nothing but -inf.
    """
    if x.dtype in _FLOATS and may_read(x, mask):
        shape = (x.numel() // x.shape[-1], x.shape[-1])
        mask = mask if mask.shape == x.shape else mask.expand(x.shape)
        rows = (x, mask) if x.dim() == 2 else (x.reshape(shape), mask.reshape(shape))
        found = apply_function(_Softmax, *rows, logarithm) if recorded(x) else _softmax(*rows, logarithm)[0]
        result: torch.Tensor = found.view(x.shape)
        return result
    function = torch.log_softmax if logarithm else torch.softmax
    mask, _ = _with_weight(x, mask, (x.dim() - 1,))
    # exp(-inf - -inf) is NaN where nothing is kept; in the place of what is left out that is taken away again.
    return fill(function(fill(x, mask, -math.inf), -1), mask, -math.inf if logarithm else 0.0)


def _softmax(x: torch.Tensor, mask: torch.Tensor, logarithm: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Give the softmax of rows, unseen by autograd, and which rows have nothing but -inf; None if none has."""
    function = torch.log_softmax if logarithm else torch.softmax
    in_pieces = goes_by_blocks(x, mask)
    result = _exponentials.softmax(x, mask, function) if in_pieces else function(fill(x, mask, -math.inf), 1)
    first = result[:, 0]
    if not math.isnan(first.sum().item()):
        return result, None
    lost = first.isnan()
    again, kept = fill(x[lost], mask[lost], -math.inf), mask[lost]
    weightless = again.amax(1, keepdim=True) == -math.inf
    result[lost] = torch.where(weightless | ~kept, -math.inf if logarithm else 0.0, function(again, 1))
    return result, torch.zeros_like(lost).masked_scatter_(lost, weightless).unsqueeze(1)


def _with_weight(x: torch.Tensor, mask: torch.Tensor, dims: Dims) -> tuple[torch.Tensor, torch.Tensor]:
    """Give the mask without the slices that keep nothing but -inf, and which these and the empty ones are."""
    weightless = (torch.where(mask, x.detach(), -math.inf) == -math.inf).all(dims, keepdim=True)
    return mask & ~weightless, weightless


def _grouped(x: torch.Tensor, dims: Dims) -> torch.Tensor:
    """Give x as (outer, reduced, inner)."""
    if len(dims) == x.dim():
        return x.reshape(1, x.numel(), 1)
    first, last = (dims[0], dims[-1] + 1) if dims else (0, 0)
    if dims != tuple(range(first, last)):  # not side by side
        first, last = x.dim() - len(dims), x.dim()
        x = x.movedim(dims, tuple(range(first, last)))
    return x.reshape(math.prod(x.shape[:first]), math.prod(x.shape[first:last]), math.prod(x.shape[last:]))


def _shaped(result: torch.Tensor, x: torch.Tensor, dims: Dims, keepdim: bool) -> torch.Tensor:
    """Give a result of shape (outer, inner) the shape that keepdim asks for."""
    if len(dims) == x.dim() and not keepdim:
        return result.view(())
    kept = [1 if d in dims else size for d, size in enumerate(x.shape) if keepdim or d not in dims]
    return result.reshape(kept)


def _expanded(slices: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Give each kept element the value of its slice, and each left-out one 0: what `sums` does, turned around."""
    wanted = slices.unsqueeze(1).expand(mask.shape)
    if not goes_by_blocks(wanted, mask):
        return torch.where(mask, wanted, 0)
    result: torch.Tensor = apply_function(_Expand, slices, mask) if recorded(slices) else _blocks.expand(slices, mask)
    return result


class _Fill(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, mask: torch.Tensor, value: Number) -> torch.Tensor:
        ctx.save_for_backward(mask)
        return _filled(x, mask, value)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return fill(gradients[0], ctx.saved_tensors[0], 0), None, None


class _Sums(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, mask: torch.Tensor, counted: bool) -> Any:
        ctx.save_for_backward(mask)
        ctx.dtype = x.dtype
        total, number = _blocks.sums(x, mask, counted)
        number = number if counted else number.detach().clone()
        ctx.mark_non_differentiable(number)
        return total, number

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return _expanded(gradients[0].to(ctx.dtype), ctx.saved_tensors[0]), None, None


class _Expand(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, slices: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(mask)
        return _blocks.expand(slices, mask)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        total, _ = sums(gradients[0], ctx.saved_tensors[0], (1,), False, counted=False)
        return total.to(gradients[0].dtype), None


class _Squares(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, mask: torch.Tensor) -> Any:
        found, center, number = _blocks.squares(x, mask)
        ctx.save_for_backward(x, mask, center, number)
        ctx.mark_non_differentiable(number)
        return found, number

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        x, mask, center, number = ctx.saved_tensors
        factor = 2 * gradients[0]
        if not torch.is_grad_enabled() and goes_by_blocks(x, factor, "many steps"):
            return _blocks.distances(x, mask, center, factor), None
        kept = fill(x, mask, 0)
        center = sums(kept, mask, (1,), False, counted=False)[0] / number.clamp(min=1)
        return fill((kept - center.unsqueeze(1)) * factor.unsqueeze(1), mask, 0), None


class _Extreme(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, mask: torch.Tensor, largest: bool) -> torch.Tensor:
        found = _blocks.extreme(x, mask, largest)
        ctx.save_for_backward(x, mask, found)
        return found

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        x, mask, found = ctx.saved_tensors
        tied = (x.detach() == found.detach().unsqueeze(1)) & mask
        share = (gradients[0] / tied.sum(1)).unsqueeze(1)
        if not torch.is_grad_enabled() and may_look(share, mask) and math.isfinite(share.sum().item()):
            return (tied * share).add_(0.0), None, None  # -0.0 becomes 0.0
        return fill(tied * share, mask, 0), None, None  # 0 times infinity is no number


class _LogSumExp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        found = _exponentials.logsumexp(x, mask)
        ctx.save_for_backward(x, mask, found == -math.inf)
        return found

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        x, mask, weightless = ctx.saved_tensors
        arriving = torch.where(weightless, 0, gradients[0]).unsqueeze(-1)
        weights = softmax(x.movedim(1, -1), mask.movedim(1, -1), logarithm=False)
        return (arriving * weights).movedim(-1, 1), None


class _Softmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, mask: torch.Tensor, logarithm: bool) -> torch.Tensor:
        result, weightless = _softmax(x, mask, logarithm)
        ctx.save_for_backward(result, mask, weightless)
        ctx.logarithm = logarithm
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        result, mask, weightless = ctx.saved_tensors
        # Left-out results are 0, and 0 times anything finite is 0; their logarithms would take in what arrives.
        arriving = fill(gradients[0], mask, 0) if ctx.logarithm else gradients[0]
        in_one_go = not torch.is_grad_enabled() and may_look(arriving, mask)
        if in_one_go and not (ctx.logarithm and weightless is not None):
            gradient = softmax_backward(arriving, result, logarithm=ctx.logarithm)
            if math.isfinite(gradient.sum().item()):
                return gradient.add_(0.0), None, None  # -0.0 becomes 0.0
        arriving = arriving if ctx.logarithm else fill(arriving, mask, 0)
        if weightless is not None:  # a slice that keeps nothing but -inf takes nothing in
            arriving = torch.where(weightless, 0, arriving)
        dtype = result.dtype
        if dtype in _HALVES:  # a sum of halves need not fit into a half
            arriving, result = arriving.float(), result.float()
        if ctx.logarithm:
            gradient = arriving - result.exp() * arriving.sum(-1, keepdim=True)
        else:
            weighed = arriving * result
            gradient = weighed - result * weighed.sum(-1, keepdim=True)
        return fill(gradient.to(dtype), mask, 0), None, None
