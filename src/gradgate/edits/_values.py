"""What a value must be to be written into x: the rules of dtype, device and shape, with their errors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from gradgate._names import describe
from gradgate.errors import ArgumentTypeError, ArgumentValueError

__all__ = ["as_value", "fit"]


def as_value(value: Any, x: torch.Tensor, *, function: str) -> torch.Tensor:
    """Give a value as a tensor of the dtype and on the device of x.

    A value may be cast where no kind of information is lost: bool to int to float to complex, and between widths of
    one kind. The other direction (a float into an integer tensor) would round in silence.

    Args:
        value: A number, a tensor, or what `torch.as_tensor` takes.
        x: What it is written into.
        function: The call, for messages.

    Returns:
        The tensor; its gradient flows back to the value, in the value's dtype.

    Raises:
        ArgumentTypeError: It is no number or tensor, or of a kind that x cannot hold.
        ArgumentValueError: It is too large for the dtype of x, or on another device.
    """
    if type(value) in (bool, int, float, complex):
        return _number(value, x, function)
    if not isinstance(value, torch.Tensor):
        try:
            value = torch.as_tensor(value, device=x.device)
        except (TypeError, ValueError, RuntimeError):
            raise ArgumentTypeError(
                f"{function}: the value is {describe(value)}.",
                why="what is written into a tensor is a number or a tensor.",
                fix=f"{function.split('(')[0]}(torch.as_tensor(value))",
            ) from None
    if _kind(value.dtype) > _kind(x.dtype):
        raise _wrong_kind(describe(value), x, function, "v.to(x.dtype)")
    # A 0-dim CPU tensor counts as a number everywhere in torch; so it does here.
    if value.device != x.device and (value.dim() or value.device.type != "cpu"):
        raise ArgumentValueError(
            f"{function}: the value is on {value.device}, x is on {x.device}.",
            why="moving it here would copy in every call.",
            fix="v.to(x.device)",
        )
    if value.dtype is not x.dtype or value.device != x.device:
        value = value.to(x.device, x.dtype)
    written: torch.Tensor = value
    return written


def fit(
    value: torch.Tensor, shape: Sequence[int], *, function: str, spoken: Sequence[object] | None = None
) -> torch.Tensor:
    """Broadcast a value to the shape of the selection.

    Args:
        value: The value.
        shape: The shape of `x[idx]`.
        function: The call, for messages.
        spoken: How to call that shape in a message, where not all of it is known.

    Returns:
        The value, expanded.

    Raises:
        ArgumentValueError: It does not broadcast.
    """
    if value.shape == shape:
        return value
    given = tuple(value.shape)
    while value.dim() > len(shape) and value.shape[0] == 1:
        value = value[0]  # as in torch's own assignment
    if value.dim() <= len(shape) and all(
        mine in (1, wanted) for mine, wanted in zip(reversed(value.shape), reversed(shape), strict=False)
    ):
        return value.expand(tuple(shape))
    raise ArgumentValueError(
        f"{function}: the value has shape {given}, the selection has shape ({_written(spoken or shape)}).",
        why="each selected element needs exactly one value; a value broadcasts to the selection, never the reverse.",
        fix=_shape_fix(value, shape),
    )


def _written(shape: Sequence[object]) -> str:
    return f"{shape[0]}," if len(shape) == 1 else ", ".join(map(str, shape))


def _shape_fix(value: torch.Tensor, shape: Sequence[int]) -> str:
    if 0 < value.dim() < len(shape) and tuple(value.shape) == tuple(shape[: value.dim()]):
        return f"v.reshape({', '.join(map(str, value.shape))}{', 1' * (len(shape) - value.dim())})"
    return f"v.expand({', '.join(map(str, shape))})   # after making its shape fit"


def _number(value: complex, x: torch.Tensor, function: str) -> torch.Tensor:
    if [bool, int, float, complex].index(type(value)) > _kind(x.dtype):
        raise _wrong_kind(describe(value), x, function, "gg.at(x.to(torch.float32))   # or a value of the kind of x")
    try:
        if _kind(x.dtype) == 1 and value.real < torch.iinfo(x.dtype).min:  # torch itself makes 255 of -1
            raise OverflowError
        return torch.tensor(value, dtype=x.dtype, device=x.device)
    except (RuntimeError, ValueError, OverflowError):
        raise ArgumentValueError(
            f"{function}: {value} does not fit into {str(x.dtype).removeprefix('torch.')}.",
            why="it would wrap around in silence.",
            fix="gg.at(x.long())   # or a value in range",
        ) from None


def _kind(dtype: torch.dtype) -> int:
    """Order the kinds of numbers: bool, int, float, complex; each can be written as any later one."""
    return 3 if dtype.is_complex else 2 if dtype.is_floating_point else 0 if dtype is torch.bool else 1


def _wrong_kind(what: str, x: torch.Tensor, function: str, fix: str) -> ArgumentTypeError:
    return ArgumentTypeError(
        f"{function}: the value is {what}, x is {describe(x)}.",
        why="it cannot be written there without losing what kind of number it is; the result keeps the dtype of x.",
        fix=fix,
    )
