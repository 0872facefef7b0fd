"""What can be done at the chosen places, each time with a new tensor as the result."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Generic, NoReturn, TypeVar

import torch

from gradgate._names import describe
from gradgate.edits._places import Places
from gradgate.edits._reading import Mode, Reading, check_mode, read
from gradgate.edits._rows import with_rows
from gradgate.edits._rules import (
    Binary,
    OnPlaces,
    called,
    check_kind,
    choosers,
    in_place,
    larger,
    second,
    smaller,
    subtracted,
    under_mask,
    with_extreme,
    with_product,
)
from gradgate.edits._values import as_value, fit
from gradgate.errors import ArgumentValueError

__all__ = ["Selection"]

Result = TypeVar("Result")


class Selection(Generic[Result]):
    """The chosen places of a tensor, `at(x)[idx]`, and what can be done there.

    Every edit takes these two keywords:

    - `mode`, for an index that is out of range: "raise" refuses it, "drop" ignores it (and its value), "clip" takes
      the nearest place there is.
    - `unique_indices`: the promise that no place is named twice. It saves the search for such places; if the promise
      is broken, which of the values is taken is not defined.

    A value is a number or a tensor. It broadcasts to the shape of `x[idx]`, and is cast to the dtype of x where that
    loses no kind of information (int to float, not float to int).

    Examples:
        >>> x = torch.tensor([1.0, 2.0, 3.0])
        >>> gg.at(x)[[0, 0, 2]].add(torch.tensor([10.0, 20.0, 30.0]))
        tensor([31.,  2., 33.])
    """

    def __init__(self, x: torch.Tensor, index: Any, finish: Callable[[torch.Tensor], Result]) -> None:
        self._x = x
        self._index = index
        self._finish = finish

    def set(self, value: Any, *, mode: Mode = "raise", unique_indices: bool = False) -> Result:
        """Put a value there; of several values for one place the last one, in the order of the index.

        Args:
            value: The value.
            mode: What to do with an index that is out of range.
            unique_indices: No place is named twice.

        Returns:
            The new tensor, or the new dictionary.

        Gradient:
            To x elsewhere, exactly 0 there; to the value that was taken, exactly 0 to the others.

        Examples:
            >>> gg.at(torch.zeros(3))[[0, 2, 0]].set(torch.tensor([1.0, 2.0, 3.0]))
            tensor([3., 0., 2.])
        """
        # A number is the same for all entries, so it does not matter which of them writes.
        unique = unique_indices or (isinstance(value, (int, float, complex)) and mode != "drop")
        new = with_rows(self._x, self._index, value, unique) if mode == "raise" else None
        return self._finish(new) if new is not None else self._edit("set", value, second, Places.put, mode, unique)

    def add(self, value: Any, *, mode: Mode = "raise", unique_indices: bool = False) -> Result:
        """Add a value there, all of them where a place is named several times.

        Args:
            value: The value.
            mode: What to do with an index that is out of range.
            unique_indices: No place is named twice.

        Returns:
            The new tensor, or the new dictionary.

        Gradient:
            To x unchanged; to each value that of its place.

        Examples:
            >>> gg.at(torch.zeros(3))[[0, 0]].add(1.0)
            tensor([2., 0., 0.])
        """
        return self._edit("add", value, torch.add, Places.add, mode, unique_indices)

    def subtract(self, value: Any, *, mode: Mode = "raise", unique_indices: bool = False) -> Result:
        """Subtract a value there, all of them where a place is named several times.

        Args:
            value: The value.
            mode: What to do with an index that is out of range.
            unique_indices: No place is named twice.

        Returns:
            The new tensor, or the new dictionary.

        Gradient:
            To x unchanged; to each value the negative of that of its place.

        Examples:
            >>> gg.at(torch.ones(3))[1:].subtract(torch.tensor([1.0, 2.0]))
            tensor([ 1.,  0., -1.])
        """
        return self._edit("subtract", value, torch.sub, subtracted, mode, unique_indices)

    def multiply(self, value: Any, *, mode: Mode = "raise", unique_indices: bool = False) -> Result:
        """Multiply by a value there, by all of them where a place is named several times.

        Args:
            value: The value.
            mode: What to do with an index that is out of range.
            unique_indices: No place is named twice.

        Returns:
            The new tensor, or the new dictionary.

        Gradient:
            That of the product, exact where factors are 0 too.

        Examples:
            >>> gg.at(torch.ones(3))[[0, 0, 1]].multiply(torch.tensor([2.0, 3.0, 4.0]))
            tensor([6., 4., 1.])
        """
        return self._edit("multiply", value, torch.mul, with_product(torch.mul), mode, unique_indices)

    def divide(self, value: Any, *, mode: Mode = "raise", unique_indices: bool = False) -> Result:
        """Divide by a value there, by the product of all of them where a place is named several times.

        Args:
            value: The value.
            mode: What to do with an index that is out of range.
            unique_indices: No place is named twice.

        Returns:
            The new tensor, or the new dictionary.

        Raises:
            ArgumentTypeError: x has integers.

        Gradient:
            That of the quotient.

        Examples:
            >>> gg.at(torch.ones(3))[0].divide(4)
            tensor([0.2500, 1.0000, 1.0000])
        """
        return self._edit("divide", value, torch.div, with_product(torch.div), mode, unique_indices)

    def power(self, value: Any, *, mode: Mode = "raise", unique_indices: bool = False) -> Result:
        """Raise to a power there, to the product of all of them where a place is named several times.

        Args:
            value: The exponent.
            mode: What to do with an index that is out of range.
            unique_indices: No place is named twice.

        Returns:
            The new tensor, or the new dictionary.

        Gradient:
            That of `torch.pow`, to x and to the exponents.

        Examples:
            >>> gg.at(torch.tensor([2.0, 3.0]))[[0, 0]].power(torch.tensor([2.0, 3.0]))
            tensor([64.,  3.])
        """
        return self._edit("power", value, torch.pow, with_product(torch.pow), mode, unique_indices)

    def min(self, value: Any, *, mode: Mode = "raise", unique_indices: bool = False) -> Result:
        """Take the smaller of x and a value there, the smallest where a place is named several times.

        Args:
            value: The value.
            mode: What to do with an index that is out of range.
            unique_indices: No place is named twice.

        Returns:
            The new tensor, or the new dictionary.

        Gradient:
            Shared evenly by all that are equal to the result, x included; the others get exactly 0, and so do all
            where the result is NaN.

        Examples:
            >>> gg.at(torch.tensor([1.0, 5.0]))[[1, 1]].min(torch.tensor([3.0, 4.0]))
            tensor([1., 3.])
        """
        return self._edit("min", value, smaller, with_extreme("amin"), mode, unique_indices)

    def max(self, value: Any, *, mode: Mode = "raise", unique_indices: bool = False) -> Result:
        """Take the larger of x and a value there, the largest where a place is named several times.

        Args:
            value: The value.
            mode: What to do with an index that is out of range.
            unique_indices: No place is named twice.

        Returns:
            The new tensor, or the new dictionary.

        Gradient:
            Shared evenly by all that are equal to the result, x included; the others get exactly 0, and so do all
            where the result is NaN.

        Examples:
            >>> gg.at(torch.tensor([1.0, 5.0]))[...].max(2.0)
            tensor([2., 5.])
        """
        return self._edit("max", value, larger, with_extreme("amax"), mode, unique_indices)

    def apply(
        self,
        fn: Callable[[torch.Tensor], torch.Tensor],
        *,
        mode: Mode = "raise",
        unique_indices: bool = False,
    ) -> Result:
        """Apply a function of single elements there, as often as a place is named.

        Args:
            fn: Gets a copy of `x[idx]` and gives a tensor of that shape. Where places are named several times it is
                called once for each time, with the entries of that turn.
            mode: What to do with an index that is out of range.
            unique_indices: No place is named twice. Under torch.compile and vmap an index tensor needs this promise.

        Returns:
            The new tensor, or the new dictionary.

        Gradient:
            That of fn there, 1 elsewhere. fn never sees the other elements.

        Examples:
            >>> gg.at(torch.tensor([-1.0, 4.0]))[1:].apply(torch.sqrt)
            tensor([-1.,  2.])
        """
        x, reading, view = self._begin(mode)
        if reading.missed:
            return self._finish(x.clone())
        if not reading.masks and not reading.indices:
            return self._finish(reading.write(x, called(fn, view, x)))
        places = Places(choosers(reading, view), view, mode, unique_indices or len(reading.indices) == 0)
        if places.nowhere:
            return self._finish(x.clone())
        for part in places.tried(places.rounds):
            rows = part.tried(partial(part.take, view))
            view = part.put(view, part.gather(called(fn, part.spread(rows), x)))
        return self._finish(reading.restore(x, view))

    def get(self, *, mode: Mode = "raise", fill_value: Any = None) -> torch.Tensor:
        """Give what is there, `x[idx]`, as a tensor of its own.

        Args:
            mode: What to do with an index that is out of range: "raise" or "clip".
            fill_value: What to give for an index that is out of range.

        Returns:
            The values; they share no memory with x.

        Raises:
            ArgumentValueError: `mode="drop"` without a fill value, or "clip" with one.

        Gradient:
            To x from each of its copies; a filled one gives none.

        Examples:
            >>> gg.at(torch.tensor([1.0, 2.0]))[[0, 7]].get(fill_value=0)
            tensor([1., 0.])
        """
        check_mode(mode)
        if (mode == "drop" and fill_value is None) or (mode == "clip" and fill_value is not None):
            raise ArgumentValueError(
                f"at(x)[...].get(): `mode` is {mode!r} and `fill_value` is {describe(fill_value)}.",
                why="what is out of range is either filled or clipped.",
                fix="fill_value=0",
            )
        fill = None if fill_value is None else as_value(fill_value, self._x, function="at(x)[...].get()")
        asked = mode if fill is None else "drop"
        _, reading, view = self._begin(asked)
        if not reading.masks and not reading.indices:
            return view.clone() if not reading.missed or fill is None else fill.expand(view.shape).clone()
        places = Places(choosers(reading, view), view, asked, unique=True)
        if fill is not None and (reading.missed or places.nowhere):
            return fill.expand(places.shape).clone()
        rows = places.tried(partial(places.take, view))
        return places.spread(rows if fill is None else places.elsewhere(rows, fill))

    def __iadd__(self, value: Any) -> NoReturn:
        raise in_place("+", "add")

    def __isub__(self, value: Any) -> NoReturn:
        raise in_place("-", "subtract")

    def __imul__(self, value: Any) -> NoReturn:
        raise in_place("*", "multiply")

    def __itruediv__(self, value: Any) -> NoReturn:
        raise in_place("/", "divide")

    def _begin(self, mode: str) -> tuple[torch.Tensor, Reading, torch.Tensor]:
        check_mode(mode)
        reading = read(self._index, self._x.shape, self._x.device, mode)
        return self._x, reading, reading.view_of(self._x)

    def _edit(self, name: str, value: Any, pair: Binary, on_places: OnPlaces, mode: str, unique: bool) -> Result:
        """Do one edit in the way that its index allows: on a view, under a mask, or at the places of index tensors."""
        function = f"at(x)[...].{name}()"
        x, reading, view = self._begin(mode)
        check_kind(name, x, function)
        value = as_value(value, x, function=function)
        if not reading.masks and not reading.indices:
            value = fit(value, view.shape, function=function)
            return self._finish(x.clone() if reading.missed else reading.write(x, pair(view, value)))
        if len(reading.masks) == 1 and not reading.indices and not reading.missed:
            new = under_mask(reading.masks[0], view, value, pair, function)
            if new is not None:
                return self._finish(reading.restore(x, new))
        places = Places(choosers(reading, view), view, mode, unique or len(reading.indices) == 0)
        value = fit(value, places.shape, function=function)
        if reading.missed or places.nowhere:
            return self._finish(x.clone())
        return self._finish(reading.restore(x, places.tried(partial(on_places, places, view, places.gather(value)))))
