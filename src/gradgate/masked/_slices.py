"""What a call reads: which elements take part, which slices are reduced, what one with nothing kept gives."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from types import EllipsisType
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from gradgate import _kernels
from gradgate._checks import check_keep, check_tensor, wrong_type
from gradgate._names import describe
from gradgate._torch_private import assert_later, has_data, inside_functorch, is_compiling
from gradgate.errors import ArgumentIndexError, ArgumentTypeError, ArgumentValueError, NothingKeptError
from gradgate.masked._dispatch import Number, counts, fill

Exclude: TypeAlias = Number | Iterable[Number] | Tensor | None
Keep: TypeAlias = Tensor | None
Dim: TypeAlias = int | Sequence[int] | None
Empty: TypeAlias = bool | int | float | complex | Literal["raise"] | EllipsisType


# --- which elements take part --------------------------------------------------------------------------------


def valid(x: Tensor, *, keep: Keep = None, exclude: Exclude = None, finite: bool = False) -> Tensor:
    """Give the mask that the functions of this package use: True where an element takes part.

    Args:
        x: The values.
        keep: A boolean mask that broadcasts to the shape of x; True takes part.
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
    x: Tensor, keep: Tensor | None, exclude: Exclude = None, *, function: str, lazy: bool = False
) -> tuple[Tensor | None, Number | None]:
    """Give the mask that `keep` and `exclude` make together, of a shape that broadcasts to x; None if all take part."""
    # If `lazy`, a single excluded value is given as it is where the kernels may need no mask.
    check_tensor(x, name="x", function=function)
    if x.layout is not torch.strided or x.is_nested:
        raise _not_dense(x, "x", function)
    mask = None if keep is None else check_keep(keep, x, function=function)
    if mask is not None and mask.layout is not torch.strided:
        raise _not_dense(mask, "keep", function)
    if exclude is None:
        return mask, None
    if isinstance(exclude, Tensor):
        for element in exclude.detach().reshape(-1).unbind():
            others = ~_matches_tensor(x.detach(), element)
            mask = others if mask is None else mask & others
        return mask, None
    values = [stored(number, x.dtype) for number in _numbers(exclude, function)]
    if lazy and mask is None and len(values) == 1 and x.dtype in _kernels.DTYPES:
        return None, values[0]
    for value in values:
        if value is not None:
            mask = excluding(x.detach(), mask, value)
    return mask, None


def excluding(x: Tensor, mask: Tensor | None, value: Any) -> Tensor:
    """Give the mask of what is kept by a mask and is not the value; NaN is NaN."""
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
    several = isinstance(exclude, Iterable) and not isinstance(exclude, str | bytes)
    found: list[Number] = []
    for value in exclude if several else (exclude,):
        # A numpy number is a number too, but not one of Python's.
        number = value.item() if hasattr(value, "item") and math.prod(getattr(value, "shape", ())) == 1 else value
        if not isinstance(number, bool | int | float | complex):
            raise ArgumentTypeError(
                f"{function}(): `exclude` has {describe(value)}.",
                why="values are compared with the elements of x, so they have to be numbers.",
                fix="exclude=255   # or [0, 255], or float('nan')",
            )
        found.append(number)
    return found


def stored(number: Number, dtype: torch.dtype) -> Number | None:
    """Give a number of the kind of a dtype, rounded no further than the dtype does; None if it cannot hold it."""
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
    """Say where a 0-dim tensor's value is in x, without asking the host for it."""
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

    @property
    def whole(self) -> bool:
        """Tell whether every element takes part for certain."""
        return self.keep is None and self.excluded is None

    @property
    def mask(self) -> Tensor | None:
        """Give the mask, made now if need be; None if every element takes part."""
        if self.excluded is not None:
            self.keep, self.excluded = excluding(self.x.detach(), None, self.excluded), None
        return self.keep

    @property
    def size(self) -> int:
        """Give how many elements each slice has, kept or not."""
        return math.prod([self.x.shape[d] for d in self.dims])

    def converted(self, dtype: torch.dtype) -> Slices:
        """Give the same slices of another dtype; what is excluded is compared before."""
        return replace(self, keep=self.mask, excluded=None, x=self.x.to(dtype))

    def filled(self, value: Number) -> Tensor:
        """Give x with a value in the place of what is left out; its gradient is exactly 0 there."""
        mask = self.mask
        return self.x if mask is None else fill(self.x, mask, value)

    def full_mask(self) -> Tensor:
        """Give the mask in the shape of x."""
        mask = self.mask
        if mask is None:
            return torch.ones_like(self.x, dtype=torch.bool)
        return mask if mask.shape == self.x.shape else mask.expand(self.x.shape)

    def number(self, keepdim: bool | None = None) -> Tensor:
        """Give how many elements are kept in each slice."""
        return counts(self.full_mask(), self.x.shape, self.dims, self.keepdim if keepdim is None else keepdim)

    def with_mask(self) -> Slices:
        """Give the same slices with a mask and at least one element, kept or not, in each."""
        # A slice of size 0 gets one element that is left out, so that what follows needs to know one case only.
        x, mask = self.x, self.full_mask()
        for d in self.dims:
            if x.shape[d] == 0:
                shape = [1 if i == d else size for i, size in enumerate(x.shape)]
                x = torch.cat([x, x.new_zeros(shape)], d)
                mask = torch.cat([mask, mask.new_zeros(shape)], d)
        return Slices(x, mask, None, self.dims, self.keepdim, self.empty, self.function)

    def in_one_dim(self) -> Slices:
        """Give the same slices along one last dimension."""
        if self.dims == (self.x.dim() - 1,):
            return Slices(self.x, self.keep, self.excluded, self.dims, False, self.empty, self.function)
        last = tuple(range(self.x.dim() - len(self.dims), self.x.dim()))
        x = _gathered(self.x, self.dims, last)
        mask = None if self.keep is None else _gathered(self.keep.expand(self.x.shape), self.dims, last)
        return Slices(x, mask, self.excluded, (x.dim() - 1,), False, self.empty, self.function)

    def spread(self, result: Tensor) -> Tensor:
        """Give a result of `in_one_dim` that still has its last dimension the shape of x."""
        if not self.dims:
            return result.squeeze(-1)
        if self.dims == (self.x.dim() - 1,):
            return result
        last = tuple(range(self.x.dim() - len(self.dims), self.x.dim()))
        sizes = [self.x.shape[d] for d in self.dims]
        return torch.unflatten(result, -1, sizes).movedim(last, self.dims)

    def reduced(self, result: Tensor, leading: int = 0) -> Tensor:
        """Give a result of `in_one_dim` without its last dimension the shape that keepdim asks for."""
        if self.keepdim:
            for d in self.dims:
                result = result.unsqueeze(d + leading)
        return result

    def refuse(self, *, integers: bool = False, complexes: bool = False) -> None:
        """Raise if x is of a kind that the plain function does not take either."""
        if self.x.is_floating_point():
            return
        kind = "complex" if self.x.is_complex() else "integer"
        if kind == "complex" and complexes:
            raise wrong_type(self.x, "x", self.function, "complex numbers have no order.", "x.abs()   # or x.real")
        if kind == "integer" and integers:
            raise wrong_type(self.x, "x", self.function, "the result is no integer in general.", "x.to(torch.float32)")

    def fill_empty(self, result: Tensor, natural: Number | None = None, number: Tensor | None = None) -> Tensor:
        """Give slices with nothing kept their value; a gradient that arrives there goes nowhere."""
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
        return torch.where(number == 0, value, result)

    def _refuse_empty(self, number: Tensor) -> None:
        if has_data(number):
            if (number == 0).any():
                raise NothingKeptError(
                    f"{self.function}(): nothing is kept in {self._named(number)}.",
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
        """Say which slices have nothing kept, as one would index them."""
        kept = number.reshape([1 if d in self.dims else size for d, size in enumerate(self.x.shape)])
        bad = (kept == 0).nonzero()
        if kept.numel() == 1:
            return "x" if self.x.dim() == len(self.dims) else f"the only slice, x[{self._index(bad[0])}]"
        return f"{len(bad)} of {kept.numel()} slices; the first is x[{self._index(bad[0])}]"

    def _index(self, position: Tensor) -> str:
        return ", ".join(":" if d in self.dims else str(i) for d, i in enumerate(position.tolist()))


def slices_of(
    x: Tensor,
    dim: Dim,
    keep: Tensor | None,
    exclude: Exclude,
    *,
    function: str,
    keepdim: bool = False,
    empty: Empty = ...,
    dtype: torch.dtype | None = None,
) -> Slices:
    """Read the arguments that all functions share; `exclude` is compared before x becomes another dtype."""
    mask, excluded = mask_of(x, keep, exclude, function=function, lazy=dtype is None)
    if not (empty is ... or isinstance(empty, bool | int | float | complex) or empty == "raise"):
        raise ArgumentTypeError(
            f"{function}(): `empty` is {describe(empty)}.",
            why='it is what a slice with nothing kept gives: a number, or "raise".',
            fix='empty=0.0   # or "raise"',
        )
    if keepdim is not True and keepdim is not False:
        raise ArgumentTypeError(
            f"{function}(): `keepdim` is {describe(keepdim)}.",
            why="reduced dimensions either stay with size 1 or they do not.",
            fix="keepdim=True",
        )
    if dtype is not None:
        if not isinstance(dtype, torch.dtype) and dtype not in (bool, int, float, complex):
            raise ArgumentTypeError(
                f"{function}(): `dtype` is {describe(dtype)}.",
                why="it is what the elements become first, as torch names it.",
                fix="dtype=torch.float32",
            )
        x = x.to(dtype)
    return Slices(x, mask, excluded, dims_of(x, dim, function), keepdim, empty, function)


def dims_of(x: Tensor, dim: Dim, function: str) -> tuple[int, ...]:
    """Read `dim`: give the dimensions, sorted, none negative."""
    rank = x.dim()
    if dim is None:
        return tuple(range(rank))
    wanted = tuple(dim) if isinstance(dim, list | tuple | torch.Size | range) else (dim,)
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
