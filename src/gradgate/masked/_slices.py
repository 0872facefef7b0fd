"""The slices that a reduction looks at: which dimensions, what is kept in each, what one with nothing kept gives."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from types import EllipsisType
from typing import Literal, TypeAlias

import torch

from gradgate._names import describe
from gradgate._torch_compat import assert_later, has_data, inside_functorch, is_compiling
from gradgate.errors import ArgumentIndexError, ArgumentTypeError, ArgumentValueError, NothingKeptError
from gradgate.masked._kernels import counts, fill
from gradgate.masked._valid import Exclude, Number, mask_of, stored

__all__ = ["Dim", "Empty", "Slices", "dims_of", "slices_of"]

Dim: TypeAlias = int | Sequence[int] | None
Empty: TypeAlias = bool | int | float | complex | Literal["raise"] | EllipsisType


@dataclass(slots=True)
class Slices:
    """What one call reduces.

    Args:
        x: The values.
        mask: True where an element takes part, broadcasts to x; None if all do.
        dims: The dimensions that are reduced, sorted, none negative.
        keepdim: Whether they stay in the result with size 1.
        empty: What a slice with nothing kept gives; `...` for the function's own rule.
        function: The public function that was called, for messages.
    """

    x: torch.Tensor
    mask: torch.Tensor | None
    dims: tuple[int, ...]
    keepdim: bool
    empty: Empty
    function: str

    @property
    def size(self) -> int:
        """Give how many elements each slice has, kept or not."""
        return math.prod([self.x.shape[d] for d in self.dims])

    def filled(self, value: Number) -> torch.Tensor:
        """Give x with a value in the place of what is left out; its gradient is exactly 0 there."""
        return self.x if self.mask is None else fill(self.x, self.mask, value)

    def full_mask(self) -> torch.Tensor:
        """Give the mask in the shape of x."""
        if self.mask is None:
            return torch.ones_like(self.x, dtype=torch.bool)
        return self.mask if self.mask.shape == self.x.shape else self.mask.expand(self.x.shape)

    def number(self, keepdim: bool | None = None) -> torch.Tensor:
        """Give how many elements are kept in each slice."""
        mask = self.full_mask() if self.mask is None else self.mask
        return counts(mask, self.x.shape, self.dims, self.keepdim if keepdim is None else keepdim)

    def with_mask(self) -> Slices:
        """Give the same slices with a mask and at least one element, kept or not, in each.

        A slice of size 0 gets one element that is left out, so that what follows needs to know one case only.
        """
        x, mask = self.x, self.full_mask()
        for d in self.dims:
            if x.shape[d] == 0:
                shape = [1 if i == d else size for i, size in enumerate(x.shape)]
                x = torch.cat([x, x.new_zeros(shape)], d)
                mask = torch.cat([mask, mask.new_zeros(shape)], d)
        return Slices(x, mask, self.dims, self.keepdim, self.empty, self.function)

    def in_one_dim(self) -> Slices:
        """Give the same slices along one last dimension."""
        if self.dims == (self.x.dim() - 1,):
            return Slices(self.x, self.mask, self.dims, False, self.empty, self.function)
        last = tuple(range(self.x.dim() - len(self.dims), self.x.dim()))
        x = _gathered(self.x, self.dims, last)
        mask = None if self.mask is None else _gathered(self.mask.expand(self.x.shape), self.dims, last)
        return Slices(x, mask, (x.dim() - 1,), False, self.empty, self.function)

    def spread(self, result: torch.Tensor) -> torch.Tensor:
        """Give a result of `in_one_dim` that still has its last dimension the shape of x."""
        if not self.dims:
            return result.squeeze(-1)
        if self.dims == (self.x.dim() - 1,):
            return result
        last = tuple(range(self.x.dim() - len(self.dims), self.x.dim()))
        sizes = [self.x.shape[d] for d in self.dims]
        return torch.unflatten(result, -1, sizes).movedim(last, self.dims)

    def reduced(self, result: torch.Tensor, leading: int = 0) -> torch.Tensor:
        """Give a result of `in_one_dim` without its last dimension the shape that keepdim asks for."""
        if self.keepdim:
            for d in self.dims:
                result = result.unsqueeze(d + leading)
        return result

    def refuse(self, *, integers: bool = False, complexes: bool = False) -> None:
        """Raise if x is of a kind that the plain function does not take either."""
        kind = "" if self.x.is_floating_point() else "complex" if self.x.is_complex() else "integer"
        if kind == "complex" and complexes:
            raise ArgumentTypeError(
                f"{self.function}(): `x` is {describe(self.x)}.",
                why="complex numbers have no order.",
                fix="x.abs()   # or x.real",
            )
        if kind == "integer" and integers:
            raise ArgumentTypeError(
                f"{self.function}(): `x` is {describe(self.x)}.",
                why="the result is no integer in general.",
                fix="x.to(torch.float32)",
            )

    def settle(
        self, result: torch.Tensor, natural: Number | None = None, number: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Give slices with nothing kept their value, whatever stands there in the result.

        Args:
            result: The result, reduced over the dimensions.
            natural: What stands there already by the function's own rule; None if the rule is NaN for a result that
                can hold it and an error for one that cannot.
            number: How many elements are kept in each slice, where that is known already.

        Returns:
            The result; a gradient that arrives at a slice with nothing kept goes nowhere.
        """
        if self.mask is None and self.size > 0:
            return result
        if self.empty is ...:
            if natural is not None:
                return result
            value: Number | None = math.nan if result.is_floating_point() or result.is_complex() else None
        else:
            value = None if self.empty == "raise" else _fitting(self.empty, result.dtype, self.function)
        number = self.number() if number is None else number
        if value is None:
            self._refuse_empty(number)
            return result
        return torch.where(number == 0, value, result)

    def _refuse_empty(self, number: torch.Tensor) -> None:
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

    def _named(self, number: torch.Tensor) -> str:
        """Say which slices have nothing kept, as one would index them."""
        kept = number.reshape([1 if d in self.dims else size for d, size in enumerate(self.x.shape)])
        bad = (kept == 0).nonzero()
        if kept.numel() == 1:
            return "x" if self.x.dim() == len(self.dims) else f"the only slice, x[{self._index(bad[0])}]"
        return f"{len(bad)} of {kept.numel()} slices; the first is x[{self._index(bad[0])}]"

    def _index(self, position: torch.Tensor) -> str:
        return ", ".join(":" if d in self.dims else str(i) for d, i in enumerate(position.tolist()))


def slices_of(
    x: torch.Tensor,
    dim: Dim,
    keep: torch.Tensor | None,
    exclude: Exclude,
    *,
    function: str,
    keepdim: bool = False,
    empty: Empty = ...,
    dtype: torch.dtype | None = None,
) -> Slices:
    """Read the arguments that all functions of the room share.

    Args:
        x: The values.
        dim: One dimension, several, or None for all.
        keep: The mask.
        exclude: The values that do not take part; they are compared before x becomes another dtype.
        function: The public function that was called.
        keepdim: Whether reduced dimensions stay with size 1.
        empty: What a slice with nothing kept gives.
        dtype: What x becomes first.

    Returns:
        The slices.
    """
    mask = mask_of(x, keep, exclude, function=function)
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
    return Slices(x, mask, dims_of(x, dim, function), keepdim, empty, function)


def dims_of(x: torch.Tensor, dim: Dim, function: str) -> tuple[int, ...]:
    """Read `dim`.

    Args:
        x: The values.
        dim: One dimension, several, or None for all.
        function: The public function that was called.

    Returns:
        The dimensions, sorted, none negative.
    """
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


def _gathered(x: torch.Tensor, dims: tuple[int, ...], last: tuple[int, ...]) -> torch.Tensor:
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
