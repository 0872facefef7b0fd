"""Where an edit begins: `at(x)`, for a tensor, or for one tensor of a module or a dictionary."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Generic, NoReturn, TypeVar, overload

import torch

from gradgate._names import describe, listed, nearest
from gradgate.edits._selection import Selection
from gradgate.errors import ArgumentTypeError, NothingMatchedError

__all__ = ["At", "at"]

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
    if not isinstance(x, torch.nn.Module | Mapping):
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
