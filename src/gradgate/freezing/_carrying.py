"""What is held of a parameter travels with it: into deep copies, into pickles, and to the optimizer's step.

A *watcher* is attached to the parameter itself, as an attribute, and not kept in a table of the library. Whoever has
the parameter has the watcher: an optimizer built later, a copy of the model, another process that unpickles it.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from gradgate._held import WATCHERS, watchers_of

__all__ = ["Watcher", "attach", "detach", "watchers_of"]

_ATTRIBUTES = (WATCHERS, "__deepcopy__", "__reduce_ex__")


class Watcher:
    """What wants to be asked around an optimizer's step. It must not refer to its parameter.

    Attributes:
        late: Whether it acts after a step only when all others have.
    """

    late = False

    def awake(self, parameter: torch.Tensor) -> None:
        """Begin, on a parameter that has just been given this watcher or has just been copied or unpickled."""

    def before_step(self, parameter: torch.Tensor, optimizer: torch.optim.Optimizer) -> None:
        """Look at the parameter before an optimizer's step."""

    def before_evaluation(self, parameter: torch.Tensor) -> None:
        """Look at the parameter before the optimizer evaluates its closure in the middle of a step."""

    def after_evaluation(self, parameter: torch.Tensor) -> None:
        """Look at the parameter after the closure."""

    def after_step(self, parameter: torch.Tensor, optimizer: torch.optim.Optimizer) -> None:
        """Look at the parameter after the step."""


def attach(parameter: torch.Tensor, kind: str, watcher: Watcher) -> None:
    """Give a parameter a watcher, which from now on goes where the parameter goes."""
    if not hasattr(parameter, WATCHERS):
        # copy and pickle ask the object itself before its class, so this reaches one parameter and no other.
        reference = weakref.ref(parameter)
        setattr(parameter, WATCHERS, {})
        parameter.__dict__["__deepcopy__"] = partial(_copied, reference)
        parameter.__dict__["__reduce_ex__"] = partial(_reduced, reference)
    watchers_of(parameter)[kind] = watcher
    watcher.awake(parameter)


def detach(parameter: torch.Tensor, kind: str) -> None:
    """Take a watcher away; with the last one the parameter is plain again."""
    watchers_of(parameter).pop(kind)
    if not watchers_of(parameter):
        for name in _ATTRIBUTES:
            del parameter.__dict__[name]


def _copied(reference: weakref.ref[torch.Tensor], memo: dict[int, Any]) -> torch.Tensor:
    parameter = _alive_parameter(reference)
    if id(parameter) in memo:
        return memo[id(parameter)]  # type: ignore[no-any-return]
    with _bare(parameter):
        result: torch.Tensor = type(parameter).__deepcopy__(parameter, memo)  # type: ignore[no-untyped-call]
    for kind, watcher in watchers_of(parameter).items():
        attach(result, kind, copy.deepcopy(watcher, memo))
    return result


def _reduced(reference: weakref.ref[torch.Tensor], protocol: int) -> tuple[Any, ...]:
    parameter = _alive_parameter(reference)
    with _bare(parameter):
        function, arguments = type(parameter).__reduce_ex__(parameter, protocol)  # type: ignore[no-untyped-call]
        # Attributes of the user come as the living dictionary, to which ours go back in a moment.
        arguments = tuple(dict(part) if type(part) is dict else part for part in arguments)
    return _rebuilt, (function, arguments, watchers_of(parameter))


@contextmanager
def _bare(parameter: torch.Tensor) -> Iterator[None]:
    """Take our attributes off, so that the class copies the parameter as it always does."""
    ours = {name: parameter.__dict__.pop(name) for name in _ATTRIBUTES}
    try:
        yield
    finally:
        parameter.__dict__.update(ours)


def _rebuilt(
    function: Callable[..., torch.Tensor], arguments: tuple[Any, ...], watchers: dict[str, Watcher]
) -> torch.Tensor:
    parameter = function(*arguments)
    for kind, watcher in watchers.items():
        attach(parameter, kind, watcher)
    return parameter


def _alive_parameter(reference: weakref.ref[torch.Tensor]) -> torch.Tensor:
    parameter = reference()
    assert parameter is not None, "a method of a tensor was called after the tensor was gone"
    return parameter
