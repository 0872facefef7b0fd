"""What the functions of the room ask of numbers and tensors that they are given besides the values."""

from __future__ import annotations

from numbers import Real
from typing import Any

import torch

from gradgate._names import describe
from gradgate.errors import ArgumentTypeError, ArgumentValueError

__all__ = ["check_broadcast", "check_number", "check_order", "check_shape", "is_real"]


def is_real(value: object) -> bool:
    """Tell whether a value is a real number, one of Python's or of numpy's."""
    return isinstance(value, Real)


def check_number(value: Any, *, name: str, function: str, why: str, fix: str) -> None:
    """Make sure that an argument is a real number, and not NaN.

    Args:
        value: The argument; a tensor is taken as it is, so that nobody has to look at it.
        name: Its name in the signature.
        function: The public function that was called.
        why: What it is for, in a message.
        fix: A call that is right, in a message.

    Raises:
        ArgumentTypeError: It is no real number; True and False are answers, not numbers.
        ArgumentValueError: It is NaN.
    """
    if type(value) is int or isinstance(value, torch.Tensor):  # at once, because most of them are ints
        return
    if isinstance(value, bool) or not is_real(value):
        raise ArgumentTypeError(f"{function}(): `{name}` is {describe(value)}.", why=why, fix=fix)
    if value != value:
        raise ArgumentValueError(f"{function}(): `{name}` is {describe(value)}.", why=why, fix=fix)


def check_order(order: Any, *, function: str) -> None:
    """Make sure that `ord` is the order of a vector norm.

    Args:
        order: The argument.
        function: The public function that was called.

    Raises:
        ArgumentTypeError: It is no number, such as "fro".
        ArgumentValueError: It is NaN.
    """
    check_number(
        order,
        name="ord",
        function=function,
        why="it is the order of a vector norm, a number; names are those of norms of matrices.",
        fix="ord=2   # or 1, or float('inf')",
    )


def check_shape(value: Any, shape: tuple[int, ...], *, name: str, function: str) -> None:
    """Make sure that an argument is a tensor of one shape, or None.

    Args:
        value: The argument.
        shape: What its shape has to be.
        name: Its name in the signature.
        function: The public function that was called.

    Raises:
        ArgumentTypeError: It is neither a tensor nor None.
        ArgumentValueError: It has another shape.
    """
    if value is None:
        return
    if not isinstance(value, torch.Tensor):
        raise ArgumentTypeError(
            f"{function}(): `{name}` is {describe(value)}.",
            why=f"it is a tensor of shape {shape}, or None.",
            fix=f"{name}=torch.full({shape}, {value!r})" if isinstance(value, Real) else f"{name}=None",
        )
    if value.shape != shape:
        raise ArgumentValueError(
            f"{function}(): `{name}` is {describe(value)}.",
            why=f"there is one number in it for each place that is scaled, so its shape is {shape}.",
            fix=f"{name}={name}.expand({', '.join(map(str, shape))})   # if one number is meant for several",
        )


def check_broadcast(x: torch.Tensor, y: torch.Tensor, *, names: tuple[str, str], function: str) -> None:
    """Say it where two shapes do not broadcast; asked only after torch has refused, so that it costs nothing.

    Args:
        x: One tensor.
        y: The other one.
        names: Their names in the signature.
        function: The public function that was called.

    Raises:
        ArgumentValueError: They do not broadcast.
    """
    try:
        torch.broadcast_shapes(x.shape, y.shape)  # type: ignore[no-untyped-call]
    except RuntimeError:
        raise ArgumentValueError(
            f"{function}(): `{names[0]}` has shape {tuple(x.shape)}, `{names[1]}` has {tuple(y.shape)}.",
            why="they have to broadcast to one shape.",
            fix=f"{names[1]}.unsqueeze(-1)   # or whatever makes them fit",
        ) from None
