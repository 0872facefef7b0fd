"""`at(x)[idx]` and its edits: each gives a new tensor, and gradients reach x and the value."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Generic, NoReturn, TypeVar, overload

import torch

from gradgate._names import describe, listed, nearest
from gradgate.edits._index import Mode, ParsedIndex, as_value, check_mode, fit, read
from gradgate.edits._scatter import (
    Binary,
    OnEntries,
    Scatter,
    advanced_indices,
    called,
    check_kind,
    in_place,
    larger,
    second,
    smaller,
    subtracted,
    under_mask,
    with_extreme,
    with_product,
    with_rows,
)
from gradgate.errors import ArgumentTypeError, ArgumentValueError, NothingMatchedError

Result = TypeVar("Result")


class At(Generic[Result]):
    """What `at(x)` gives: it waits for an index.

    Examples:
        >>> gg.at(torch.zeros(3))[1].set(5.0)
        tensor([0., 5., 0.])
    """

    def __init__(self, x: torch.Tensor, finish: Callable[[torch.Tensor], Result]) -> None:
        self._x = x
        self._finish = finish

    def __getitem__(self, index: Any) -> Selection[Result]:
        return Selection(self._x, index, self._finish)

    def __setitem__(self, index: Any, value: Any) -> NoReturn:
        raise ArgumentTypeError(
            "at(x)[idx] = v assigns in place.",
            why="at() never touches x; an edit gives a new tensor.",
            fix="y = gg.at(x)[idx].set(v)",
        )

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("_") or not hasattr(Selection, name):
            raise AttributeError(f"'At' object has no attribute {name!r}")
        raise ArgumentTypeError(
            f"at(x).{name} has no index.",
            why="an edit speaks of some places of x; [...] are all of them.",
            fix=f"gg.at(x)[...].{name}(v)",
        )

    def __repr__(self) -> str:
        return f"at({describe(self._x)})"


@overload
def at(x: torch.Tensor) -> At[torch.Tensor]: ...
@overload
def at(x: torch.nn.Module | Mapping[str, torch.Tensor], name: str) -> At[dict[str, torch.Tensor]]: ...


def at(x: torch.Tensor | torch.nn.Module | Mapping[str, torch.Tensor], name: str | None = None) -> At[Any]:
    """Begin an edit that gives a new tensor and leaves the old one as it is.

    In `y = gg.at(x)[idx].set(v)` the index is any that torch takes, and slices with negative steps too. What follows is
    one of `set`, `add`, `subtract`, `multiply`, `divide`, `power`, `min`, `max`, `apply` and `get`, the names of
    `jax.numpy.ndarray.at`. Where torch and JAX differ, torch's rule holds (an int beside an index tensor is a view).

    Args:
        x: The tensor; or a module, or a dictionary of tensors, whose tensor `name` is edited.
        name: The name of that tensor, as in `named_parameters` and `named_buffers`.

    Returns:
        Something to index. Of a tensor the edits give a tensor. Of a module or a dictionary they give a new
        dictionary of all its tensors, the edited one replaced (under all its names, if it is tied), for
        `torch.func.functional_call`; module and dictionary stay as they are.

    Raises:
        ArgumentTypeError: x is none of these, or a name is missing or one too many.
        NothingMatchedError: There is no tensor of that name.

    Gradient:
        To x where its value is still in the result, exactly 0 where it was replaced; to the value that took its place.
        Of several values for one place `set` takes the last one, and only that one gets a gradient; `min` and `max`
        share it evenly among all that are equal to the result, x included, as in JAX. Double backward, torch.func,
        vmap and torch.compile(fullgraph=True) work; LIMITATIONS.md names the exceptions (a mask with a value of its
        own for each True).

    Examples:
        >>> w, v = torch.zeros(4, requires_grad=True), torch.tensor(5.0, requires_grad=True)
        >>> y = gg.at(w)[1].set(v)
        >>> (y * torch.arange(4.0)).sum().backward()
        >>> w.grad, v.grad
        (tensor([0., 0., 2., 3.]), tensor(1.))
        >>> model = torch.nn.Linear(2, 1)
        >>> state = gg.at(model, "weight")[0, 1].set(0.0)
        >>> torch.func.functional_call(model, state, torch.ones(1, 2)).shape
        torch.Size([1, 1])
    """
    if isinstance(x, torch.Tensor):
        if name is not None:
            raise ArgumentTypeError(
                f"at(): `name` is {describe(name)}, and x is {describe(x)}.",
                why="a name chooses one tensor of a module or a dictionary; x is a tensor already.",
                fix="gg.at(x)[idx].set(v)",
            )
        return At(_dense(x), _itself)
    if not isinstance(x, (torch.nn.Module, Mapping)):
        raise ArgumentTypeError(
            f"at(): `x` is {describe(x)}.",
            why="it edits a torch.Tensor, or one tensor of a module or a dictionary.",
            fix="gg.at(torch.as_tensor(x))[idx].set(v)",
        )
    tensors = _tensors_of(x)
    if not isinstance(name, str):
        raise ArgumentTypeError(
            f"at(): `name` is {describe(name)}, and x is {_called(x)}.",
            why="one of its tensors must be named.",
            fix=f"gg.at(model, {next(iter(tensors), 'weight')!r})[idx].set(v)",
        )
    chosen = tensors.get(name)
    if not isinstance(chosen, torch.Tensor):
        near = nearest(name, tensors)
        raise NothingMatchedError(
            f"at(): there is no tensor {name!r} in {_called(x)}.",
            why=f"the nearest names are {listed(near)}." if near else f"it has {listed(list(tensors)) or 'none'}.",
            fix=f"gg.at(model, {(near or [*tensors, 'weight'])[0]!r})[idx].set(v)",
        )
    return At(_dense(chosen), lambda new: {key: new if old is chosen else old for key, old in tensors.items()})


def _dense(x: torch.Tensor) -> torch.Tensor:
    if x.layout is torch.strided and not x.is_nested:
        return x
    raise ArgumentTypeError(
        f"at(): `x` is a {'nested' if x.is_nested else str(x.layout).removeprefix('torch.')} tensor.",
        why="the places of an edit are those of a dense tensor.",
        fix="gg.at(torch.nested.to_padded_tensor(x, 0.0))" if x.is_nested else "gg.at(x.to_dense())",
    )


def _itself(new: torch.Tensor) -> torch.Tensor:
    return new


def _tensors_of(x: torch.nn.Module | Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    if isinstance(x, torch.nn.Module):
        return {**dict(x.named_parameters(remove_duplicate=False)), **dict(x.named_buffers(remove_duplicate=False))}
    return dict(x)


def _called(x: object) -> str:
    return describe(x) if isinstance(x, torch.nn.Module) else f"this {type(x).__name__}"


# --- What can be done at the chosen places --------------------------------------------------------------------------


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

    def __repr__(self) -> str:
        index = self._index if isinstance(self._index, tuple) else (self._index,)
        return f"at({describe(self._x)})[{', '.join(map(_shown, index))}]"

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
        return self._finish(new) if new is not None else self._edit("set", value, second, Scatter.put, mode, unique)

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
        return self._edit("add", value, torch.add, Scatter.add, mode, unique_indices)

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
        x, parsed, view = self._begin(mode)
        if parsed.missed:
            return self._finish(x.clone())
        if not parsed.masks and not parsed.indices:
            return self._finish(parsed.write(x, called(fn, view, x)))
        places = Scatter(advanced_indices(parsed, view), view, mode, unique_indices or len(parsed.indices) == 0)
        if places.nowhere:
            return self._finish(x.clone())
        for part in places.tried(places.rounds):
            rows = part.tried(partial(part.take, view))
            view = part.put(view, part.gather(called(fn, part.spread(rows), x)))
        return self._finish(parsed.restore(x, view))

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
        _, parsed, view = self._begin(asked)
        if not parsed.masks and not parsed.indices:
            return view.clone() if not parsed.missed or fill is None else fill.expand(view.shape).clone()
        places = Scatter(advanced_indices(parsed, view), view, asked, unique=True)
        if fill is not None and (parsed.missed or places.nowhere):
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

    def _begin(self, mode: str) -> tuple[torch.Tensor, ParsedIndex, torch.Tensor]:
        check_mode(mode)
        parsed = read(self._index, self._x.shape, self._x.device, mode)
        return self._x, parsed, parsed.view_of(self._x)

    def _edit(self, name: str, value: Any, pair: Binary, on_places: OnEntries, mode: str, unique: bool) -> Result:
        """Do one edit in the way that its index allows: on a view, under a mask, or at the places of index tensors."""
        function = f"at(x)[...].{name}()"
        x, parsed, view = self._begin(mode)
        check_kind(name, x, function)
        value = as_value(value, x, function=function)
        if not parsed.masks and not parsed.indices:
            value = fit(value, view.shape, function=function)
            return self._finish(x.clone() if parsed.missed else parsed.write(x, pair(view, value)))
        if len(parsed.masks) == 1 and not parsed.indices and not parsed.missed:
            new = under_mask(parsed.masks[0], view, value, pair, function)
            if new is not None:
                return self._finish(parsed.restore(x, new))
        places = Scatter(advanced_indices(parsed, view), view, mode, unique or len(parsed.indices) == 0)
        value = fit(value, places.shape, function=function)
        if parsed.missed or places.nowhere:
            return self._finish(x.clone())
        return self._finish(parsed.restore(x, places.tried(partial(on_places, places, view, places.gather(value)))))


def _shown(part: object) -> str:
    """Write one part of an index as in the source."""
    if isinstance(part, slice):
        ends = ["" if end is None else str(end) for end in (part.start, part.stop, part.step)]
        return ":".join(ends if ends[2] else ends[:2])
    return "..." if part is ... else describe(part) if isinstance(part, torch.Tensor) else repr(part)
