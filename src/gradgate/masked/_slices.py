"""What a call reads and how it is computed.

Which elements take part, which slices are reduced, the result of a slice with nothing kept; and the parts of the
reductions, each on two paths that give the same values and gradients. The native kernels run on the CPU. Elsewhere, and
where torch.compile, torch.func or FakeTensorMode traces the call, the same is composed of torch.where and torch's own
reductions. Second derivatives are those of the composition.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from types import EllipsisType
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

from gradgate import _kernels
from gradgate._checks import agreed, check_fits, check_keep, check_tensor, wrong_type
from gradgate._kernels import Layout, Sums, usable
from gradgate._names import describe
from gradgate._torch_private import assert_later, bound_apply, has_data, inside_functorch, is_compiling, is_traced
from gradgate.errors import ArgumentIndexError, ArgumentTypeError, ArgumentValueError, NothingKeptError

Number: TypeAlias = bool | int | float | complex
Dims: TypeAlias = tuple[int, ...]

HALVES = (torch.float16, torch.bfloat16)
_FLOATS = (torch.float32, torch.float64, *HALVES)


def can_sync(*tensors: Tensor) -> bool:
    """Return whether the host may look at values without making a device wait: on the CPU, while nothing traces."""
    return not is_traced() and all(x.is_cpu for x in tensors) and has_data(*tensors)


def is_recorded(x: Tensor) -> bool:
    """Return whether autograd records what is done with x; forward mode and torch.func count as recording."""
    return (x.requires_grad and torch.is_grad_enabled()) or is_traced()


# --- layouts ----------------------------------------------------------------------------------------------------------


class Group(NamedTuple):
    """How the dimensions of a tensor make (outer, reduced, inner); reduced ones that are not neighbours move last."""

    sizes: torch.Size
    dims: Dims
    shape: tuple[int, int, int]
    moved: bool
    results: tuple[Dims, Dims]  # the shape of a result, without keepdim and with it

    def arranged(self, x: Tensor) -> Tensor:
        """Return a tensor that broadcasts to the sizes as a kernel reads it, copied only if need be."""
        x = x if x.shape == self.sizes else x.expand(self.sizes)
        x = x.movedim(self.dims, self._last()) if self.moved else x
        return x if x.is_contiguous() else x.contiguous()

    def restored(self, x: Tensor) -> Tensor:
        """Undo `arranged`, for any shape with as many elements in the same order."""
        if not self.moved:
            return x if x.shape == self.sizes else x.reshape(self.sizes)
        return x.reshape(*self.results[0], *[self.sizes[d] for d in self.dims]).movedim(self._last(), self.dims)

    def _last(self) -> Dims:
        return tuple(range(len(self.sizes) - len(self.dims), len(self.sizes)))


@lru_cache(256)
def group_of(sizes: torch.Size, dims: Dims) -> Group:
    """Group the dimensions of a tensor by what is reduced."""
    kept = tuple(size for d, size in enumerate(sizes) if d not in dims)
    results = kept, tuple(1 if d in dims else size for d, size in enumerate(sizes))
    reduced = math.prod([sizes[d] for d in dims])
    first, last = (dims[0], dims[-1] + 1) if kept else (0, len(sizes))
    if last - first != len(dims):
        return Group(sizes, dims, (math.prod(kept), reduced, 1), True, results)
    return Group(sizes, dims, (math.prod(sizes[:first]), reduced, math.prod(sizes[last:])), False, results)


def takes(slices: Slices, dtypes: Collection[torch.dtype] = _FLOATS) -> bool:
    """Return whether the kernels can read what a call reads."""
    keep = slices.keep
    return slices.native and slices.x.dtype in dtypes and (keep is None or (type(keep) is Tensor and keep.is_cpu))


def _layout(slices: Slices, group: Group) -> Layout:
    """Describe slices to a kernel: by the one value that is left out if that is all, else by the mask."""
    x = slices.x if not group.moved and slices.x.is_contiguous() else group.arranged(slices.x)
    if slices.excluded is not None:
        return Layout(x, group.shape, None, slices.excluded)  # type: ignore[arg-type]  # complex dtypes come with a mask
    return Layout(x, group.shape, group.arranged(slices.full_mask() if slices.keep is None else slices.keep))


# --- copies and counts ------------------------------------------------------------------------------------------------


def fill(x: Tensor, mask: Tensor, value: Number) -> Tensor:
    """Return x where the mask is True and a value elsewhere; the gradient is exactly 0 there."""
    if x.dtype is torch.bool:
        value = bool(value)
    holds = x.dtype.is_complex or (x.dtype.is_floating_point and not isinstance(value, complex)) or type(value) is int
    if not (holds or x.dtype is torch.bool) or not usable(x, mask) or mask.device != x.device:
        return torch.where(mask, x, value)
    if is_recorded(x):
        result: Tensor = bound_apply(_Fill)(x, mask, value)
        return result
    return _filled(x, mask, value)


def _filled(x: Tensor, mask: Tensor, value: Number) -> Tensor:
    mask = mask if mask.shape == x.shape else mask.expand(x.shape)
    return _kernels.fill(x.detach().contiguous(), mask.contiguous(), value)


class _Fill(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, mask: Tensor, value: Number) -> Tensor:
        ctx.save_for_backward(mask)
        return _filled(x, mask, value)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return fill(gradients[0], ctx.saved_tensors[0], 0), None, None


def counts(mask: Tensor, sizes: torch.Size, dims: Dims, keepdim: bool) -> Tensor:
    """Count what a mask that broadcasts to the sizes keeps of each slice, as int64."""
    mask = mask if mask.shape == sizes else mask.expand(sizes)
    if not usable(mask):
        return mask.sum(dims, keepdim=keepdim)
    group = group_of(sizes, dims)
    return _kernels.count(group.arranged(mask), group.shape, group.results[keepdim])


# --- sums and means ---------------------------------------------------------------------------------------------------


def sums(slices: Slices, *, mean: bool = False, counted: bool = False, wide: bool = False) -> Sums:
    """Return the sum or the mean of the kept elements of each slice; the mean of none is NaN."""
    # Halves are added up in float32, and stay so if `wide`. Integers become int64.
    x = slices.x
    dtype = x.dtype
    to = torch.float32 if wide and dtype in HALVES else dtype
    if takes(slices, _FLOATS if mean else _kernels.DTYPES):
        group = group_of(x.shape, slices.dims)
        if x.requires_grad and torch.is_grad_enabled():
            total, found = bound_apply(_Sums)(x, slices.full_mask(), group, slices.keepdim, mean, to)
            return Sums(total, found.number, found.empty)
        found = _kernels.sums(_layout(slices, group), group.results[slices.keepdim], mean=mean, counted=counted)
        return found if dtype not in HALVES else found._replace(total=found.total.to(to))
    total = slices.filled(0).sum(slices.dims, keepdim=slices.keepdim, dtype=torch.float32 if dtype in HALVES else None)
    number = slices.number() if counted or mean else None
    if mean and number is not None:
        # Not 0 / 0: where nothing is kept, that would send NaN back to whoever differentiates twice.
        total = torch.where(number == 0, math.nan, total / number.clamp(min=1))
    return Sums(total.to(to) if dtype in HALVES else total, number, -1)


class _Sums(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, mask: Tensor, group: Group, keepdim: bool, mean: bool, dtype: torch.dtype) -> Any:
        mask = group.arranged(mask)
        found = _kernels.sums(Layout(group.arranged(x), group.shape, mask), group.results[keepdim], mean=mean)
        ctx.save_for_backward(mask, found.number if mean else None)
        ctx.group, ctx.dtype = group, x.dtype
        return found.total.to(dtype), found

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        mask, number = ctx.saved_tensors
        gradient = gradients[0]
        if number is not None:
            # Where nothing is kept, 0 / 0 goes to no element, but to whoever differentiates twice.
            number = number.clamp(min=1) if torch.is_grad_enabled() else number
            gradient = (gradient.float() if ctx.dtype in HALVES else gradient) / number
        return _spread(gradient.to(ctx.dtype), mask, ctx.group), None, None, None, None, None


def _spread(slices: Tensor, mask: Tensor, group: Group) -> Tensor:
    """Return each kept element the value of its slice, and 0 to the others, in the shape of the group."""
    outer, _, inner = group.shape
    if torch.is_grad_enabled() or not usable(slices, mask):
        return group.restored(torch.where(mask.view(group.shape), slices.reshape(outer, 1, inner), 0))
    return group.restored(_kernels.expand(slices.contiguous(), mask, group.shape))


# --- squares ----------------------------------------------------------------------------------------------------------


def squares(slices: Slices) -> tuple[Tensor, Tensor]:
    """Return the sum of squared distances of the kept elements to the mean of their slice, and their number."""
    x, dims, keepdim = slices.x, slices.dims, slices.keepdim
    if takes(slices, _FLOATS[:2]):
        group = group_of(x.shape, dims)
        if is_recorded(x):
            found, (number,) = bound_apply(_Squares)(x, slices.full_mask(), group, keepdim)
            return found, number
        found, _, number = _kernels.squares(_layout(slices, group), group.results[keepdim])
        return found, number
    mask, number = slices.full_mask(), slices.number(keepdim=True)
    kept = fill(x, mask, 0)
    # What is left out is taken away before and after: its distance to the mean is no number to build on.
    distance = fill(kept - (exact_sum(kept, dims) / number.clamp(min=1)).to(x.dtype), mask, 0)
    found = (distance * distance).sum(dims, keepdim=keepdim)
    return found, number.reshape(found.shape)


def exact_sum(x: Tensor, dims: Dims) -> Tensor:
    """Add up as float64, where the device has that: equal values then have no spread, however large they are."""
    widens = x.device.type in ("cpu", "cuda") and not x.is_complex()
    return x.sum(dims, keepdim=True, dtype=torch.float64 if widens else None)


def variance(slices: Slices, correction: float) -> Tensor | None:
    """Return the variance of the kept elements of each slice; None where the kernels cannot compute it."""
    # NaN for too few elements, as in torch. Autograd does not record it.
    x = slices.x
    if correction < 0 or not takes(slices) or (x.requires_grad and torch.is_grad_enabled()):
        return None
    group = group_of(x.shape, slices.dims)
    return _kernels.squares(_layout(slices, group), group.results[slices.keepdim], correction)[0].to(x.dtype)


class _Squares(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, mask: Tensor, group: Group, keepdim: bool) -> Any:
        layout = Layout(group.arranged(x), group.shape, group.arranged(mask))
        found, mean, number = _kernels.squares(layout, group.results[keepdim])
        ctx.save_for_backward(x, layout.keep, mean, number)
        ctx.group = group
        return found, (number,)  # in a tuple, so that autograd makes no gradient for it

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        x, mask, mean, number = ctx.saved_tensors
        group, factor = ctx.group, 2 * gradients[0]
        if not torch.is_grad_enabled() and usable(x, mask, factor):
            layout = Layout(group.arranged(x), group.shape, mask)
            return group.restored(_kernels.distances(layout, mean, factor.contiguous())), None, None, None
        outer, _, inner = group.shape
        mask, factor, number = mask.view(group.shape), factor.reshape(outer, 1, inner), number.view(outer, 1, inner)
        kept = torch.where(mask, group.arranged(x).view(group.shape), 0)
        distance = kept - (exact_sum(kept, (1,)) / number.clamp(min=1)).to(x.dtype)
        return group.restored(torch.where(mask, distance * factor, 0)), None, None, None


# --- extremes ---------------------------------------------------------------------------------------------------------


def extreme(slices: Slices, largest: bool) -> tuple[Tensor, bool]:
    """Return the largest or smallest kept element; for a slice with nothing kept, what no element is beyond."""
    # Equal elements share the gradient. The second result says whether every slice certainly keeps something. Integers
    # are for the kernels only.
    x, dims, keepdim = slices.x, slices.dims, slices.keepdim
    if takes(slices, _kernels.DTYPES):
        group = group_of(x.shape, dims)
        if is_recorded(x):
            found, empty = bound_apply(_Extreme)(x, slices.full_mask(), group, keepdim, largest)
            return found, empty == 0
        found, empty = _kernels.extreme(_layout(slices, group), group.results[keepdim], largest=largest)
        return found.to(x.dtype), empty == 0
    limit = -math.inf if largest else math.inf
    mask = slices.full_mask()
    found = (torch.amax if largest else torch.amin)(fill(x, mask, limit), dims, keepdim=keepdim)
    sure = can_sync(x, mask) and math.isfinite(found.detach().sum().item())
    if sure or not is_recorded(x):
        return found, sure
    # Where the kept ones are as infinite as what stands for the left-out, those would take a share of the gradient.
    # All of the kept are equal there, so that their mean has the same value, and shares among them alone.
    number = slices.number()
    mean = (fill(x, mask, 0).sum(dims, keepdim=keepdim) / number.clamp(min=1)).to(found.dtype)
    return torch.where((found == limit) & (number > 0), mean, found), False


class _Extreme(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, mask: Tensor, group: Group, keepdim: bool, largest: bool) -> Any:
        layout = Layout(group.arranged(x), group.shape, group.arranged(mask))
        found, empty = _kernels.extreme(layout, group.results[keepdim], largest=largest)
        ctx.save_for_backward(x, layout.keep, found)
        ctx.group = group
        return found.to(x.dtype, copy=True), empty

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        x, mask, found = ctx.saved_tensors
        group, gradient = ctx.group, gradients[0]
        outer, _, inner = group.shape
        if not torch.is_grad_enabled() and usable(x, mask, gradient):
            layout = Layout(group.arranged(x), group.shape, mask)
            share = gradient.to(found.dtype).contiguous() / _kernels.ties(layout, found)
            return group.restored(_kernels.shares(layout, found, share).to(x.dtype)), None, None, None, None
        mask, found = mask.view(group.shape), found.view(outer, 1, inner).to(x.dtype)
        tied = (group.arranged(x.detach()).view(group.shape) == found) & mask
        share = gradient.reshape(outer, 1, inner) / tied.sum(1, keepdim=True)
        # 0 times infinity is no number, so the left-out are taken away after.
        return group.restored(torch.where(mask, tied * share, 0)), None, None, None, None


def first_place(slices: Slices, largest: bool) -> tuple[Tensor, bool] | None:
    """Return the index of the first largest or smallest kept element, -1 for nothing; None without the kernels."""
    # The second result says whether every slice certainly keeps something.
    if not takes(slices):
        return None
    group = group_of(slices.x.shape, slices.dims)
    layout = _layout(slices, group)
    found, empty = _kernels.extreme(layout, group.results[slices.keepdim], largest=largest)
    return _kernels.find(layout, found), empty == 0


# --- weights ----------------------------------------------------------------------------------------------------------


def logsumexp(slices: Slices) -> Tensor:
    """Return the logarithm of the sum of exponentials of the kept elements, with reduced dimensions of size 1."""
    # It is -inf where nothing is kept, or nothing but -inf; its gradient is 0 there.
    x, dims = slices.x, slices.dims
    if takes(slices):
        group = group_of(x.shape, dims)
        if is_recorded(x):
            result: Tensor = bound_apply(_LogSumExp)(x, slices.full_mask(), group)
            return result
        return _kernels.logsumexp(_layout(slices, group), group.results[True]).to(x.dtype)
    mask = slices.full_mask()
    if can_sync(x, mask):
        found = torch.logsumexp(fill(x, mask, -math.inf), dims, keepdim=True)
        if not found.isinf().any():  # then every slice has a weight
            return found
    mask, weightless = _with_weight(x, mask, dims)
    return torch.where(weightless, -math.inf, torch.logsumexp(fill(x, mask, -math.inf), dims, keepdim=True))


class _LogSumExp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, mask: Tensor, group: Group) -> Tensor:
        layout = Layout(group.arranged(x), group.shape, group.arranged(mask))
        found = _kernels.logsumexp(layout, group.results[True])
        ctx.save_for_backward(x, layout.keep, found)
        ctx.group = group
        return found.to(x.dtype, copy=True)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        x, mask, found = ctx.saved_tensors
        group, gradient = ctx.group, gradients[0]
        outer, _, inner = group.shape
        weightless = found == -math.inf
        if not torch.is_grad_enabled() and usable(x, mask, gradient):
            layout = Layout(group.arranged(x), group.shape, mask)
            factor = gradient.to(found.dtype).masked_fill(weightless, 0).contiguous()
            weights = _kernels.weights(layout, found.masked_fill(weightless, 0), factor)
            return group.restored(weights.to(x.dtype)), None, None
        rows, mask = group.arranged(x).view(group.shape), mask.view(group.shape)
        gradient = torch.where(weightless, 0, gradient).reshape(outer, 1, inner)
        weights = composed_softmax(rows.movedim(1, -1), mask.movedim(1, -1), logarithm=False).movedim(-1, 1)
        return group.restored(weights * gradient), None, None


def softmax(x: Tensor, mask: Tensor | None, logarithm: bool) -> Tensor:
    """Return the softmax of the kept elements of the last dimension, or its logarithm; no mask leaves NaN out."""
    # It is 0, or -inf for the logarithm, where an element is left out, and for a slice with nothing but -inf.
    if mask is None:
        if x.dtype in _FLOATS and usable(x) and not is_recorded(x):
            return _kernels.softmax(_rows(x, None), logarithm=logarithm).to(x.dtype)
        mask = excluding(x.detach(), None, math.nan)
    if x.dtype not in _FLOATS or not usable(x, mask):
        return composed_softmax(x, mask, logarithm)
    mask = mask if mask.shape == x.shape else mask.expand(x.shape)
    if is_recorded(x):
        result: Tensor = bound_apply(_Softmax)(x, mask, logarithm)
        return result
    return _kernels.softmax(_rows(x, mask), logarithm=logarithm).to(x.dtype)


def _rows(x: Tensor, mask: Tensor | None) -> Layout:
    shape = (x.numel() // max(x.shape[-1], 1), x.shape[-1], 1)
    return Layout(x.detach().contiguous(), shape, None if mask is None else mask.contiguous())


def composed_softmax(x: Tensor, mask: Tensor, logarithm: bool) -> Tensor:
    """Do the same with torch.where, in a form that can be traced and differentiated any number of times."""
    function = torch.log_softmax if logarithm else torch.softmax
    if can_sync(x, mask):
        result = function(torch.where(mask, x, -math.inf), -1)
        if not result[..., 0].detach().sum().isnan():  # then every slice has a weight
            return result if not result.requires_grad else torch.where(mask, result, -math.inf if logarithm else 0.0)
    mask, _ = _with_weight(x, mask, (x.dim() - 1,))
    # exp(-inf - -inf) is NaN where nothing is kept; in the place of what is left out that is taken away again.
    return torch.where(mask, function(torch.where(mask, x, -math.inf), -1), -math.inf if logarithm else 0.0)


def _with_weight(x: Tensor, mask: Tensor, dims: Dims) -> tuple[Tensor, Tensor]:
    """Return the mask without the slices that keep nothing but -inf, and which these and the empty ones are."""
    weightless = (torch.where(mask, x.detach(), -math.inf) == -math.inf).all(dims, keepdim=True)
    return mask & ~weightless, weightless


class _Softmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, mask: Tensor, logarithm: bool) -> Tensor:
        layout = _rows(x, mask)
        result = _kernels.softmax(layout, logarithm=logarithm).to(x.dtype)
        ctx.save_for_backward(layout.keep, result)
        ctx.logarithm = logarithm
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        mask, result = ctx.saved_tensors
        arriving = gradients[0]
        if torch.is_grad_enabled() or not usable(arriving, mask):
            # A slice that keeps nothing but -inf takes nothing in.
            weightless = (result.detach() == (-math.inf if ctx.logarithm else 0)).all(-1, keepdim=True)
            arriving = torch.where(mask & ~weightless, arriving, 0)
            dtype = result.dtype
            if dtype in HALVES:  # a sum of halves need not fit into a half
                arriving, result = arriving.float(), result.float()
            if ctx.logarithm:
                gradient = arriving - result.exp() * arriving.sum(-1, keepdim=True)
            else:
                weighed = arriving * result
                gradient = weighed - result * weighed.sum(-1, keepdim=True)
            return torch.where(mask, gradient.to(dtype), 0), None, None
        wide = torch.float32 if result.dtype in HALVES else result.dtype
        shape = (result.numel() // max(result.shape[-1], 1), result.shape[-1], 1)
        gradient = _kernels.softmax_gradient(
            result.detach().to(wide), arriving.to(wide).contiguous(), mask, shape, logarithm=ctx.logarithm
        )
        return gradient.to(result.dtype), None, None


Exclude: TypeAlias = Number | Iterable[Number] | Tensor | None
Mask: TypeAlias = Tensor | Callable[..., Tensor]
Keep: TypeAlias = Mask | tuple[Mask, ...] | None
Dim: TypeAlias = int | Sequence[int] | None
Empty: TypeAlias = bool | int | float | complex | Literal["raise"] | EllipsisType


# --- which elements take part --------------------------------------------------------------------------------


def valid(x: Tensor, *, keep: Keep = None, exclude: Exclude = None, finite: bool = False) -> Tensor:
    """Return the mask that the functions of this package use: True where an element takes part.

    Args:
        x: The values.
        keep: A boolean mask that broadcasts to the shape of x; True takes part. Or a function that is called with x and
            returns one (`torch.isfinite`), or a tuple of masks and functions, which must all agree.
        exclude: A value that does not take part, or several (a list, a tuple, a set, a tensor of values). NaN
            matches NaN. A value that the dtype of x cannot hold (-1 for uint8, 0.5 for an integer) matches nothing.
        finite: Leave out NaN and infinities as well.

    Returns:
        A boolean tensor of the shape of x. It may share memory with `keep`; do not write to it.

    Raises:
        ArgumentTypeError: `keep` is not a boolean tensor, or `exclude` has something that is not a number.
        ArgumentValueError: `keep` does not broadcast to the shape of x, or is on another device.

    Examples:
        >>> labels = torch.tensor([3, 255, 7, 0])
        >>> gg.masked.valid(labels, exclude=[255, 0])
        tensor([ True, False,  True, False])
    """
    mask, _ = mask_of(x, keep, exclude, function="masked.valid")
    if finite:
        mask = torch.isfinite(x) if mask is None else mask & torch.isfinite(x)
    if mask is None:
        return torch.ones_like(x, dtype=torch.bool)
    return mask.expand(x.shape)


def mask_of(
    x: Tensor, keep: Keep, exclude: Exclude = None, *, function: str, dense: bool = False, lazy: bool = False
) -> tuple[Tensor | None, Number | None]:
    """Return the mask that `keep` and `exclude` make together, broadcastable to x; None if every element takes part."""
    # If `lazy`, a single excluded value is given as it is where the kernels may need no mask. `dense` says that x is
    # known to be a dense tensor.
    if not dense:
        check_tensor(x, name="x", function=function)
        if x.layout is not torch.strided or x.is_nested:
            raise _not_dense(x, "x", function)
    mask: Tensor | None = None
    if isinstance(keep, Tensor):
        plain = keep.dtype is torch.bool and keep.shape == x.shape and keep.device == x.device
        mask = keep if plain else check_keep(keep, x, function=function)
    elif keep is not None:
        mask = agreed(keep, (x,), x, function=function)
    if mask is not None and mask.layout is not torch.strided:
        raise _not_dense(mask, "keep", function)
    if exclude is None:
        return mask, None
    if isinstance(exclude, Tensor):
        for element in exclude.detach().reshape(-1).unbind():
            others = ~_matches_tensor(x.detach(), element)
            mask = others if mask is None else mask & others
        return mask, None
    if lazy and mask is None and type(exclude) in (float, int) and x.dtype in _kernels.DTYPES:
        return None, stored(exclude, x.dtype)  # type: ignore[arg-type]
    values = [stored(number, x.dtype) for number in _numbers(exclude, function)]
    if lazy and mask is None and len(values) == 1 and x.dtype in _kernels.DTYPES:
        return None, values[0]
    for value in values:
        if value is not None:
            mask = excluding(x.detach(), mask, value)
    return mask, None


def excluding(x: Tensor, mask: Tensor | None, value: Any) -> Tensor:
    """Return the mask without the elements that equal the value; NaN equals NaN."""
    if x.dtype in _kernels.DTYPES and (_kernels.usable(x) if mask is None else _kernels.usable(x, mask)):
        return _kernels.valid(x.contiguous(), None if mask is None else mask.expand(x.shape).contiguous(), value)
    others = x == x if value != value else x != value
    return others if mask is None else mask & others


def _not_dense(tensor: Tensor, name: str, function: str) -> ArgumentTypeError:
    kind = "nested" if tensor.is_nested else str(tensor.layout).removeprefix("torch.")
    return ArgumentTypeError(
        f"{function}(): `{name}` is a {kind} tensor.",
        why="each element takes part or does not, so each has to be there.",
        fix=f"torch.nested.to_padded_tensor({name}, float('nan'))   # exclude=float('nan')"
        if tensor.is_nested
        else f"{name}.to_dense()",
    )


def _numbers(exclude: Any, function: str) -> list[Number]:
    if type(exclude) in (float, int):
        return [exclude]
    several = isinstance(exclude, Iterable) and not isinstance(exclude, (str, bytes))
    found: list[Number] = []
    for value in exclude if several else (exclude,):
        # A numpy number is a number too, but not one of Python's.
        number = value.item() if hasattr(value, "item") and math.prod(getattr(value, "shape", ())) == 1 else value
        if not isinstance(number, (bool, int, float, complex)):
            raise ArgumentTypeError(
                f"{function}(): `exclude` has {describe(value)}.",
                why="values are compared with the elements of x, so they have to be numbers.",
                fix="exclude=255   # or [0, 255], or float('nan')",
            )
        found.append(number)
    return found


def stored(number: Number, dtype: torch.dtype) -> Number | None:
    """Return a number of the kind of a dtype, rounded no further than the dtype does; None if it cannot hold it."""
    if number != number and dtype.is_floating_point and type(number) is float:
        return number
    if dtype.is_complex:
        parts = [_stored_real(part, dtype) for part in (number.real, number.imag)]
        return None if None in parts else complex(*parts)  # type: ignore[arg-type]
    return None if number.imag else _stored_real(number.real, dtype)


def _stored_real(number: float, dtype: torch.dtype) -> float | None:
    finite = isinstance(number, int) or math.isfinite(number)  # an int may be larger than any float
    if dtype.is_floating_point or dtype.is_complex:
        if not finite:
            return number
        info = torch.finfo(dtype)
        least = info.tiny * info.eps / 2  # half of the smallest number above 0: beneath it, 0 would be stored
        return float(number) if number == 0 or least < abs(number) <= info.max else None  # torch takes no large int
    if not finite or number != int(number):
        return None
    low, high = (0, 1) if dtype is torch.bool else (torch.iinfo(dtype).min, torch.iinfo(dtype).max)
    if not low <= number <= high:
        return None
    return bool(number) if dtype is torch.bool else int(number)


def _matches_tensor(x: Tensor, value: Tensor) -> Tensor:
    """Return where a 0-dim tensor's value is in x, without asking the host for it."""
    fits = None
    if value.is_complex() and not x.is_complex():
        fits, value = value.imag == 0, value.real
    same = value.to(device=x.device, dtype=x.dtype)
    matched = x == same
    if x.is_floating_point() or x.is_complex():
        matched = matched | (torch.isnan(x) & torch.isnan(same))
        fitting = (torch.isinf(same) == torch.isinf(value)) & ((same == 0) == (value == 0))
    else:
        fitting = (same.to(value.dtype) == value) & (_is_negative(same) == _is_negative(value))
    return matched & fitting if fits is None else matched & fitting & fits


def _is_negative(value: Tensor) -> Tensor:
    # torch does not compare the wide unsigned integers with 0.
    return value < 0 if value.dtype.is_signed else torch.zeros_like(value, dtype=torch.bool)


# --- slices --------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Slices:
    """What one call reduces."""

    x: Tensor
    keep: Tensor | None  # True takes part, broadcasts to x; None if all do, or all but those of one value
    excluded: Number | None  # a value that no mask has been made of yet; then `keep` is None
    dims: tuple[int, ...]  # sorted, none negative
    keepdim: bool
    empty: Empty
    function: str  # for messages
    native: bool  # whether the kernels may read x

    @property
    def whole(self) -> bool:
        """Return whether every element takes part for certain."""
        return self.keep is None and self.excluded is None

    @property
    def mask(self) -> Tensor | None:
        """Return the mask, made now if need be; None if every element takes part."""
        if self.excluded is not None:
            self.keep, self.excluded = excluding(self.x.detach(), None, self.excluded), None
        return self.keep

    @property
    def size(self) -> int:
        """Return how many elements each slice has, kept or not."""
        return math.prod([self.x.shape[d] for d in self.dims])

    def converted(self, dtype: torch.dtype) -> Slices:
        """Return the same slices of another dtype; what is excluded is compared before."""
        return replace(self, keep=self.mask, excluded=None, x=self.x.to(dtype))

    def filled(self, value: Number) -> Tensor:
        """Return x with a value in the place of what is left out; its gradient is exactly 0 there."""
        mask = self.mask
        return self.x if mask is None else fill(self.x, mask, value)

    def full_mask(self) -> Tensor:
        """Return the mask in the shape of x."""
        mask = self.mask
        if mask is None:
            return torch.ones_like(self.x, dtype=torch.bool)
        return mask if mask.shape == self.x.shape else mask.expand(self.x.shape)

    def number(self, keepdim: bool | None = None) -> Tensor:
        """Return how many elements are kept in each slice."""
        return counts(self.full_mask(), self.x.shape, self.dims, self.keepdim if keepdim is None else keepdim)

    def with_mask(self) -> Slices:
        """Return the same slices with a mask and at least one element, kept or not, in each."""
        # A slice of size 0 gets one element that is left out, so that what follows needs to know one case only.
        x, mask = self.x, self.full_mask()
        for d in self.dims:
            if x.shape[d] == 0:
                shape = [1 if i == d else size for i, size in enumerate(x.shape)]
                x = torch.cat([x, x.new_zeros(shape)], d)
                mask = torch.cat([mask, mask.new_zeros(shape)], d)
        return replace(self, x=x, keep=mask, excluded=None)

    def in_one_dim(self) -> Slices:
        """Return the same slices along one last dimension."""
        if self.dims == (self.x.dim() - 1,):
            return replace(self, keepdim=False) if self.keepdim else self
        last = tuple(range(self.x.dim() - len(self.dims), self.x.dim()))
        x = _gathered(self.x, self.dims, last)
        mask = None if self.keep is None else _gathered(self.keep.expand(self.x.shape), self.dims, last)
        return replace(self, x=x, keep=mask, dims=(x.dim() - 1,), keepdim=False)

    def spread(self, result: Tensor) -> Tensor:
        """Return a result of `in_one_dim` that still has its last dimension the shape of x."""
        if not self.dims:
            return result.squeeze(-1)
        if self.dims == (self.x.dim() - 1,):
            return result
        last = tuple(range(self.x.dim() - len(self.dims), self.x.dim()))
        sizes = [self.x.shape[d] for d in self.dims]
        return torch.unflatten(result, -1, sizes).movedim(last, self.dims)

    def reduced(self, result: Tensor, leading: int = 0) -> Tensor:
        """Return a result of `in_one_dim` without its last dimension the shape that keepdim asks for."""
        if self.keepdim:
            for d in self.dims:
                result = result.unsqueeze(d + leading)
        return result

    def weighed(self, weights: Any) -> tuple[Slices, Tensor]:
        """Return the slices without elements of weight 0, and the weights in the shape of x, 0 where left out."""
        check_fits(
            check_tensor(weights, name="weights", function=self.function),
            self.x,
            name="weights",
            function=self.function,
        )
        if weights.is_complex():
            why = "a weight says how much an element counts."
            raise wrong_type(weights, "weights", self.function, why, "weights=weights.abs()")
        if self.x.is_floating_point() or self.x.is_complex():
            weights = weights.to(torch.float32 if self.x.dtype in HALVES else self.x.real.dtype)
        mask = self.full_mask() & (weights.detach() != 0)
        return replace(self, keep=mask, excluded=None), torch.where(mask, weights, 0)

    def refuse(self, *, integers: bool = False, complexes: bool = False) -> None:
        """Raise if x is of a kind that the plain function does not take either."""
        if self.x.is_floating_point():
            return
        kind = "complex" if self.x.is_complex() else "integer"
        if kind == "complex" and complexes:
            raise wrong_type(self.x, "x", self.function, "complex numbers have no order.", "x.abs()   # or x.real")
        if kind == "integer" and integers:
            raise wrong_type(
                self.x, "x", self.function, "the result is generally not an integer.", "x.to(torch.float32)"
            )

    def fill_empty(self, result: Tensor, natural: Number | None = None, number: Tensor | None = None) -> Tensor:
        """Return slices with nothing kept their value; a gradient that arrives there goes nowhere."""
        # `natural` is what stands there already by the function's own rule; None if the rule is NaN for a result that
        # can hold it and an error for one that cannot. `number` is how many are kept, where that is known.
        if (natural is not None and self.empty is ...) or (self.whole and self.size > 0):
            return result
        if self.empty is ...:
            value: Number | None = math.nan if result.is_floating_point() or result.is_complex() else None
        else:
            value = None if self.empty == "raise" else _fitting(self.empty, result.dtype, self.function)
        number = self.number() if number is None else number
        if value is None:
            self._refuse_empty(number)
            return result
        return fill(result, number != 0, value)

    def _refuse_empty(self, number: Tensor) -> None:
        if has_data(number):
            if (number == 0).any():
                raise NothingKeptError(
                    f"{self.function}(): nothing is kept {self._named(number)}.",
                    why='empty="raise" asks for at least one element in each slice.'
                    if self.empty == "raise"
                    else "there is no value to give for it, and an integer cannot be NaN.",
                    fix="empty=0   # or another value for a slice with nothing kept",
                )
        elif inside_functorch() and not is_compiling():
            raise ArgumentValueError(
                f"{self.function}(): inside vmap it cannot be seen whether a slice has nothing kept.",
                why="the result cannot be NaN there, and an error for one sample of many cannot be raised.",
                fix="empty=0   # or another value for a slice with nothing kept",
            )
        else:
            assert_later((number != 0).all(), f"{self.function}(): nothing is kept in a slice, and no empty= is given.")

    def _named(self, number: Tensor) -> str:
        """Return which slices have nothing kept, as one would index them."""
        shape = [1 if d in self.dims else size for d, size in enumerate(self.x.shape)]
        if number.numel() != math.prod(shape):  # windows, or what comes up to each place
            bad = (number == 0).nonzero()
            return f"for {len(bad)} of {number.numel()} results; the first is result{bad[0].tolist()}"
        kept = number.reshape(shape)
        bad = (kept == 0).nonzero()
        if kept.numel() == 1:
            return "in x" if self.x.dim() == len(self.dims) else f"in the only slice, x[{self._index(bad[0])}]"
        return f"in {len(bad)} of {kept.numel()} slices; the first is x[{self._index(bad[0])}]"

    def _index(self, position: Tensor) -> str:
        return ", ".join(":" if d in self.dims else str(i) for d, i in enumerate(position.tolist()))


def slices_of(
    x: Tensor,
    dim: Dim,
    keep: Keep,
    exclude: Exclude,
    *,
    function: str,
    keepdim: bool = False,
    empty: Empty = ...,
    dtype: torch.dtype | None = None,
) -> Slices:
    """Read the arguments that all functions share; `exclude` is compared before x becomes another dtype."""
    native = usable(x)
    mask, excluded = mask_of(x, keep, exclude, function=function, dense=native, lazy=dtype is None)
    if not (empty is ... or isinstance(empty, (bool, int, float, complex)) or empty == "raise"):
        why = 'it is the result of a slice with nothing kept: a number, or "raise".'
        raise wrong_type(empty, "empty", function, why, 'empty=0.0   # or "raise"')
    if keepdim is not True and keepdim is not False:
        raise wrong_type(
            keepdim, "keepdim", function, "reduced dimensions either stay with size 1 or they do not.", "keepdim=True"
        )
    if dtype is not None:
        if not isinstance(dtype, torch.dtype) and dtype not in (bool, int, float, complex):
            why = "it is what the elements become first, as torch names it."
            raise wrong_type(dtype, "dtype", function, why, "dtype=torch.float32")
        x = x.to(dtype)
    return Slices(x, mask, excluded, dims_of(x, dim, function), keepdim, empty, function, native)


_EACH = [tuple(range(rank)) for rank in range(9)]


def dims_of(x: Tensor, dim: Dim, function: str) -> tuple[int, ...]:
    """Read `dim`: give the dimensions, sorted, none negative."""
    rank = x.dim()
    if dim is None:
        return _EACH[rank] if rank < len(_EACH) else tuple(range(rank))
    if type(dim) is int and -rank <= dim < rank:
        return (dim % rank,)
    wanted = tuple(dim) if isinstance(dim, (list, tuple, torch.Size, range)) else (dim,)
    found = []
    for d in wanted:
        if not isinstance(d, int):
            raise ArgumentTypeError(
                f"{function}(): `dim` has {describe(d)}.",
                why="dimensions are counted: an int, several of them, or None for all.",
                fix="dim=-1   # or (0, 1), or None",
            )
        # torch lets a 0-dim tensor be reduced along dim 0 or -1, as if it had one.
        if not -max(rank, 1) <= d < max(rank, 1):
            raise ArgumentIndexError(
                f"{function}(): `dim` has {d}, x of shape {tuple(x.shape)} has {rank} dimensions.",
                why=f"dimensions go from {-max(rank, 1)} to {max(rank, 1) - 1}.",
                fix="dim=-1   # the last one",
            )
        found.append(d % max(rank, 1))
    if len(set(found)) != len(found):
        raise ArgumentValueError(
            f"{function}(): `dim` {tuple(wanted)} names a dimension twice.",
            why="each dimension can be reduced once.",
            fix=f"dim={tuple(sorted(set(found)))}",
        )
    if rank == 0 or not found:  # an empty tuple means all of them in torch's reductions, so it does here
        return tuple(range(rank))
    return tuple(sorted(found))


def _gathered(x: Tensor, dims: tuple[int, ...], last: tuple[int, ...]) -> Tensor:
    return x.movedim(dims, last).flatten(last[0]) if dims else x.unsqueeze(-1)


def _fitting(empty: Number, dtype: torch.dtype, function: str) -> Number:
    """Make sure that the result can hold the value for a slice with nothing kept."""
    value = stored(empty, dtype)
    if value is not None:
        return value
    name = str(dtype).removeprefix("torch.")
    raise ArgumentValueError(
        f"{function}(): `empty` is {empty!r}, the result is {name}.",
        why=f"{name} cannot hold that value.",
        fix="x.to(torch.float32)   # or an `empty` that fits",
    )
