"""`at(x)[idx]` and its edits: each gives a new tensor, or a new tree, and gradients reach x and the value."""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Generic, NamedTuple, NoReturn, TypeVar, overload

import torch

from gradgate._checks import wrong_type
from gradgate._names import describe, listed, nearest
from gradgate._torch_private import is_sharded
from gradgate._trees import children_of, leaves_of, rebuilt
from gradgate.edits._in_place import State
from gradgate.edits._index import Mode, ParsedIndex, as_value, check_mode, fit, read
from gradgate.edits._scatter import RULES, Scatter, called, check_kind, under_mask
from gradgate.errors import ArgumentTypeError, ArgumentValueError, NothingMatchedError

Result = TypeVar("Result")


def _itself(new: Any) -> Any:
    return new


class At(Generic[Result]):
    """What `at(x)` returns: something to index.

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
        raise _in_place("at(x)[idx] = v assigns in place.", "set")

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("_") or not hasattr(Selection, name):
            raise AttributeError(f"'At' object has no attribute {name!r}")
        why = "an edit speaks of some places of x; [...] are all of them."
        raise ArgumentTypeError(f"at(x).{name} has no index.", why=why, fix=f"gg.at(x)[...].{name}(v)")

    def __repr__(self) -> str:
        return f"at({describe(self._x)})"


class Tree:
    """What `at(tree)` returns: something to index with the path of a tensor.

    Examples:
        >>> batch = {"image": [torch.zeros(2), torch.zeros(3)], "label": torch.tensor(1)}
        >>> gg.at(batch)["image.1"][0].set(5.0)["image"]
        [tensor([0., 0.]), tensor([5., 0., 0.])]
    """

    def __init__(self, tree: Any, prefix: str = "") -> None:
        self._tree = tree
        self._prefix = prefix

    def __getitem__(self, path: str | int) -> Any:
        """Return what is at the path: an `At` for a tensor, a `Tree` for what contains some."""
        full = f"{self._prefix}.{path}" if self._prefix else str(path)
        near = list(_tensors(self._tree, near=full))
        if found := [one for one in near if one.name == full]:
            # A key may have dots itself: the path of the fewest keys is the one that is meant.
            chosen = sorted(found, key=lambda one: one.keys)[0]  # Dynamo does not trace min(key=)
            return At(_dense(chosen.tensor), chosen.replaced)
        if any(one.name.startswith(f"{full}.") for one in near):
            return Tree(self._tree, full)
        names = [one.name for one in _tensors(self._tree)]
        if isinstance(path, str):
            raise _not_there(full, self._tree, names)
        what, why = f"at(): `name` is None, and x is {_called(self._tree)}.", "one of its tensors must be named."
        raise ArgumentTypeError(what, why=why, fix=f"gg.at(model, {next(iter(names), 'weight')!r})[idx].set(v)")

    def __repr__(self) -> str:
        return f"at({type(self._tree).__name__})" + (f"[{self._prefix!r}]" if self._prefix else "")


def _not_there(name: str, tree: Any, names: list[str]) -> NothingMatchedError:
    near = nearest(name, names)
    what = f"at(): there is no tensor {name!r} in {_called(tree)}."
    why = f"the nearest names are {listed(near)}." if near else f"it has {listed(names) or 'none'}."
    return NothingMatchedError(what, why=why, fix=f"gg.at(model, {(near or [*names, 'weight'])[0]!r})[idx].set(v)")


class _InTree(NamedTuple):
    """A tensor of a tree, its name of so many keys, and how to rebuild the tree with another one in its place."""

    name: str
    keys: int
    tensor: torch.Tensor
    replaced: Callable[[Any], Any]


def _tensors(
    tree: Any, name: str = "", keys: int = 0, replaced: Callable[[Any], Any] = _itself, near: str = ""
) -> Iterator[_InTree]:
    """Find the tensors; only those on the way to a name and beneath it, if one is given."""
    if isinstance(tree, torch.Tensor):
        yield _InTree(name, keys, tree, replaced)
        return
    if isinstance(tree, torch.nn.Module):
        tree = State.of(tree)
    children = {} if isinstance(tree, (str, bytes, type)) else children_of(tree) or {}
    for key, child in children.items():
        own = f"{name}.{key}" if keys else str(key)
        if near and not (own == near or near.startswith(f"{own}.") or own.startswith(f"{near}.")):
            continue

        def with_other(new: Any, child: Any = child) -> Any:
            parts = {name: new if old is child else old for name, old in children.items()}
            if isinstance(tree, State):
                return replaced(State(parts, tree.module))
            return replaced(parts if type(tree) is dict else rebuilt(tree, parts))

        yield from _tensors(child, own, keys + 1, with_other, near)


@overload
def at(x: torch.Tensor) -> At[torch.Tensor]: ...
@overload
def at(x: torch.nn.Module, name: str) -> At[State]: ...
@overload
def at(x: Mapping[str, torch.Tensor], name: str) -> At[dict[str, torch.Tensor]]: ...
@overload
def at(x: torch.nn.Module | Mapping[str, Any] | Sequence[Any]) -> Tree: ...


def at(x: Any, name: str | None = None) -> At[Any] | Tree:
    """Begin an edit that returns a new tensor and leaves the old one as it is.

    In `y = gg.at(x)[idx].set(v)` the index is any that torch takes, and slices with negative steps too. What follows is
    one of `set`, `add`, `subtract`, `multiply`, `divide`, `power`, `min`, `max`, `apply` and `get`, the names of
    `jax.numpy.ndarray.at`. Where torch and JAX differ, torch's rule holds (an int beside an index tensor is a view).

    Args:
        x: The tensor; or a module, or a tree of dictionaries, lists, tuples, dataclasses and modules with tensors.
        name: The path of a tensor in it; `gg.at(tree)["a.b"]` is `gg.at(tree, "a.b")`. In a module these are the names
            of `named_parameters` and `named_buffers`.

    Returns:
        Something to index. Of a tensor the edits return a tensor; of a tree they return a new tree, with that tensor
        replaced and all others shared. Of a module they return its `State`: a dictionary of all its tensors for
        `torch.func.functional_call`, with `write_back()` and `undo()`; the edited one is replaced under all its names,
        if it is tied. Module and tree stay as they are.

    Raises:
        ArgumentTypeError: x is none of these, is sharded, sparse or nested, or a name is missing or one too many.
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
        >>> state = gg.at(model)["weight"][0, 1].set(0.0)
        >>> torch.func.functional_call(model, state, torch.ones(1, 2)).shape
        torch.Size([1, 1])
    """
    if isinstance(x, torch.Tensor):
        if name is not None:
            what = f"at(): `name` is {describe(name)}, and x is {describe(x)}."
            why = "a name chooses one tensor of a module or a dictionary; x is a tensor already."
            raise ArgumentTypeError(what, why=why, fix="gg.at(x)[idx].set(v)")
        return At(_dense(x), _itself)
    if not isinstance(x, (torch.nn.Module, Mapping)) and not any(
        isinstance(leaf, (torch.Tensor, torch.nn.Module)) for leaf in leaves_of(x)
    ):
        why = "it edits a torch.Tensor, or one tensor of a module or of a tree of dictionaries and lists."
        raise wrong_type(x, "x", "at", why, "gg.at(torch.as_tensor(x))[idx].set(v)")
    chosen: At[Any] | Tree = Tree(x) if name is None else Tree(x)[name]
    if name is not None and isinstance(chosen, Tree):
        raise _not_there(name, x, [one.name for one in _tensors(x)])
    return chosen


def _dense(x: torch.Tensor) -> torch.Tensor:
    if is_sharded(x):
        what = f"at(): `x` is sharded over processes, {describe(x)}."
        why = "an edit of one process's part would be lost, or be made at other places."
        raise ArgumentTypeError(what, why=why, fix="gg.at(x.full_tensor())   # the whole of it, on every process")
    if x.layout is torch.strided and not x.is_nested:
        return x
    what = f"at(): `x` is a {'nested' if x.is_nested else str(x.layout).removeprefix('torch.')} tensor."
    why = "the places of an edit are those of a dense tensor."
    fix = "gg.at(torch.nested.to_padded_tensor(x, 0.0))" if x.is_nested else "gg.at(x.to_dense())"
    raise ArgumentTypeError(what, why=why, fix=fix)


def _called(x: object) -> str:
    return describe(x) if isinstance(x, torch.nn.Module) else f"this {type(x).__name__}"


# --- What can be done at the chosen places --------------------------------------------------------------------------


class Selection(Generic[Result]):
    """The chosen places of a tensor, `at(x)[idx]`, and what can be done there.

    Every edit returns the new tensor, or the new tree, and takes these arguments:

    - `value`: a number or a tensor. It broadcasts to the shape of `x[idx]`, and is cast to the dtype of x where that
      loses no kind of information (int to float, not float to int).
    - `mode`, for an index that is out of range: "raise" refuses it, "drop" ignores it (and its value), "clip" takes
      the nearest place there is.
    - `unique_indices`: the promise that no place is named twice. It saves the search for such places; if the promise
      is broken, which of the values is taken is not defined.

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
            The new tensor, or the new tree.

        Gradient:
            To x elsewhere, exactly 0 there; to the value that was taken, exactly 0 to the others.

        Examples:
            >>> gg.at(torch.zeros(3))[[0, 2, 0]].set(torch.tensor([1.0, 2.0, 3.0]))
            tensor([3., 0., 2.])
        """
        # A number is the same for all entries, so it does not matter which of them writes.
        unique = unique_indices or (isinstance(value, (int, float, complex)) and mode != "drop")
        return self._edit("set", value, mode, unique)

    def add(self, value: Any, *, mode: Mode = "raise", unique_indices: bool = False) -> Result:
        """Add a value there, all of them where a place is named several times.

        Gradient:
            To x unchanged; to each value that of its place.

        Examples:
            >>> gg.at(torch.zeros(3))[[0, 0]].add(1.0)
            tensor([2., 0., 0.])
        """
        return self._edit("add", value, mode, unique_indices)

    def subtract(self, value: Any, *, mode: Mode = "raise", unique_indices: bool = False) -> Result:
        """Subtract a value there, all of them where a place is named several times.

        Gradient:
            To x unchanged; to each value the negative of that of its place.

        Examples:
            >>> gg.at(torch.ones(3))[1:].subtract(torch.tensor([1.0, 2.0]))
            tensor([ 1.,  0., -1.])
        """
        return self._edit("subtract", value, mode, unique_indices)

    def multiply(self, value: Any, *, mode: Mode = "raise", unique_indices: bool = False) -> Result:
        """Multiply by a value there, by all of them where a place is named several times.

        Gradient:
            That of the product, exact where factors are 0 too.

        Examples:
            >>> gg.at(torch.ones(3))[[0, 0, 1]].multiply(torch.tensor([2.0, 3.0, 4.0]))
            tensor([6., 4., 1.])
        """
        return self._edit("multiply", value, mode, unique_indices)

    def divide(self, value: Any, *, mode: Mode = "raise", unique_indices: bool = False) -> Result:
        """Divide by a value there, by the product of all of them where a place is named several times.

        Raises:
            ArgumentTypeError: x has integers.

        Gradient:
            That of the quotient.

        Examples:
            >>> gg.at(torch.ones(3))[0].divide(4)
            tensor([0.2500, 1.0000, 1.0000])
        """
        return self._edit("divide", value, mode, unique_indices)

    def power(self, value: Any, *, mode: Mode = "raise", unique_indices: bool = False) -> Result:
        """Raise to a power there, to the product of all of them where a place is named several times.

        Gradient:
            That of `torch.pow`, to x and to the exponents.

        Examples:
            >>> gg.at(torch.tensor([2.0, 3.0]))[[0, 0]].power(torch.tensor([2.0, 3.0]))
            tensor([64.,  3.])
        """
        return self._edit("power", value, mode, unique_indices)

    def min(self, value: Any, *, mode: Mode = "raise", unique_indices: bool = False) -> Result:
        """Take the smaller of x and a value there, the smallest where a place is named several times.

        Gradient:
            Shared evenly by all that are equal to the result, x included; the others get exactly 0, and so do all
            where the result is NaN.

        Examples:
            >>> gg.at(torch.tensor([1.0, 5.0]))[[1, 1]].min(torch.tensor([3.0, 4.0]))
            tensor([1., 3.])
        """
        return self._edit("min", value, mode, unique_indices)

    def max(self, value: Any, *, mode: Mode = "raise", unique_indices: bool = False) -> Result:
        """Take the larger of x and a value there, the largest where a place is named several times.

        Gradient:
            Shared evenly by all that are equal to the result, x included; the others get exactly 0, and so do all
            where the result is NaN.

        Examples:
            >>> gg.at(torch.tensor([1.0, 5.0]))[...].max(2.0)
            tensor([2., 5.])
        """
        return self._edit("max", value, mode, unique_indices)

    def apply(
        self, fn: Callable[[torch.Tensor], torch.Tensor], *, mode: Mode = "raise", unique_indices: bool = False
    ) -> Result:
        """Apply a function of single elements there, as often as a place is named.

        Args:
            fn: Takes a copy of `x[idx]` and returns a tensor of that shape. Where places are named several times it is
                called once for each time, with the entries of that turn.
            mode: What to do with an index that is out of range.
            unique_indices: No place is named twice. Under torch.compile and vmap an index tensor needs this promise.

        Returns:
            The new tensor, or the new tree.

        Gradient:
            That of fn there, 1 elsewhere. fn never sees the other elements.

        Examples:
            >>> gg.at(torch.tensor([-1.0, 4.0]))[1:].apply(torch.sqrt)
            tensor([-1.,  2.])
        """
        x, parsed, view = self._begin(mode)
        if parsed.missed:
            return self._finish(x.clone())
        if not parsed.advanced:
            return self._finish(parsed.write(x, called(fn, view, x)))
        places = Scatter(parsed.advanced, view, mode, unique_indices)
        if places.nowhere:
            return self._finish(x.clone())
        for part in places.tried(places.rounds):
            rows = part.tried(partial(part.take, view))
            view = part.put(view, part.gather(called(fn, part.spread(rows), x)))
        return self._finish(parsed.restore(x, view))

    def get(self, *, mode: Mode = "raise", fill_value: Any = None) -> torch.Tensor:
        """Return what is there, `x[idx]`, as a tensor of its own.

        Args:
            mode: What to do with an index that is out of range: "raise" or "clip".
            fill_value: What to return for an index that is out of range.

        Returns:
            The values; they share no memory with x.

        Raises:
            ArgumentValueError: `mode="drop"` without a fill value, or "clip" with one.

        Gradient:
            To x from each of its copies, and none from a filled one.

        Examples:
            >>> gg.at(torch.tensor([1.0, 2.0]))[[0, 7]].get(fill_value=0)
            tensor([1., 0.])
        """
        check_mode(mode)
        if (mode == "drop" and fill_value is None) or (mode == "clip" and fill_value is not None):
            what = f"at(x)[...].get(): `mode` is {mode!r} and `fill_value` is {describe(fill_value)}."
            raise ArgumentValueError(what, why="what is out of range is either filled or clipped.", fix="fill_value=0")
        fill = None if fill_value is None else as_value(fill_value, self._x, function="at(x)[...].get()")
        asked = mode if fill is None else "drop"
        _, parsed, view = self._begin(asked)
        if not parsed.advanced:
            return view.clone() if not parsed.missed or fill is None else fill.expand(view.shape).clone()
        places = Scatter(parsed.advanced, view, asked, unique=True)
        if fill is not None and (parsed.missed or places.nowhere):
            return fill.expand(places.shape).clone()
        rows = places.tried(partial(places.take, view))
        return places.spread(rows if fill is None else places.elsewhere(rows, fill))

    def __iadd__(self, value: Any) -> NoReturn:
        raise _in_place("at(x)[idx] += v works in place.", "add")

    def __isub__(self, value: Any) -> NoReturn:
        raise _in_place("at(x)[idx] -= v works in place.", "subtract")

    def __imul__(self, value: Any) -> NoReturn:
        raise _in_place("at(x)[idx] *= v works in place.", "multiply")

    def __itruediv__(self, value: Any) -> NoReturn:
        raise _in_place("at(x)[idx] /= v works in place.", "divide")

    def _begin(self, mode: str) -> tuple[torch.Tensor, ParsedIndex, torch.Tensor]:
        check_mode(mode)
        parsed = read(self._index, self._x.shape, self._x.device, mode)
        return self._x, parsed, parsed.view_of(self._x)

    def _edit(self, name: str, value: Any, mode: str, unique: bool) -> Result:
        function = f"at(x)[...].{name}()"
        x, parsed, view = self._begin(mode)
        check_kind(name, x, function)
        value = as_value(value, x, function=function)
        pair, on_places = RULES[name]
        if not parsed.advanced:
            value = fit(value, view.shape, function=function)
            return self._finish(x.clone() if parsed.missed else parsed.write(x, pair(view, value)))
        if len(parsed.advanced) == 1 and parsed.advanced[0].is_mask() and not parsed.missed:
            new = under_mask(parsed.advanced[0], view, value, pair, function)
            if new is not None:
                return self._finish(parsed.restore(x, new))
        places = Scatter(parsed.advanced, view, mode, unique)
        value = fit(value, places.shape, function=function)
        if parsed.missed or places.nowhere:
            return self._finish(x.clone())
        return self._finish(parsed.restore(x, places.tried(partial(on_places, places, view, places.gather(value)))))


def _in_place(what: str, name: str) -> ArgumentTypeError:
    why = "at() never touches x; an edit gives a new tensor."
    return ArgumentTypeError(what, why=why, fix=f"y = gg.at(x)[idx].{name}(v)")


def _shown(part: object) -> str:
    if isinstance(part, slice):
        ends = ["" if end is None else str(end) for end in (part.start, part.stop, part.step)]
        return ":".join(ends if ends[2] else ends[:2])
    return "..." if part is ... else describe(part) if isinstance(part, torch.Tensor) else reprlib.repr(part)
