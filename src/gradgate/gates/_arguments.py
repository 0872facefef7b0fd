"""What the gates ask of their numbers."""

from __future__ import annotations

import math
from typing import Any

import torch

from gradgate._checks import check_fits
from gradgate._names import describe
from gradgate.errors import ArgumentTypeError, ArgumentValueError
from gradgate.gates._meter import GateMeter

__all__ = ["check_factor", "check_fill_value", "check_limit", "check_meter", "check_pair"]


def is_number(value: Any) -> bool:
    """Tell whether a value is a plain real number; True and False are answers, not numbers."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def check_factor(factor: Any, x: torch.Tensor, *, name: str, function: str) -> None:
    """Make sure that a factor is a finite number, or a real tensor that fits x and wants no gradient.

    Raises:
        ArgumentTypeError: It is neither, or a mask.
        ArgumentValueError: It is not finite, requires grad, is on another device or does not broadcast to x.
    """
    if isinstance(factor, torch.Tensor):
        if factor.dtype is torch.bool or factor.is_complex():
            raise ArgumentTypeError(
                f"{function}(): `{name}` is {describe(factor)}.",
                why="a gradient is multiplied by real numbers; yes or no is the question of gg.gate.",
                fix=f"gg.gate(x, {name})" if factor.dtype is torch.bool else f"{name}={name}.real",
            )
        if factor.requires_grad:
            raise ArgumentValueError(
                f"{function}(): `{name}` requires grad.",
                why="the value of the result does not depend on it, so no gradient would ever reach it.",
                fix=f"{name}={name}.detach()",
            )
        check_fits(factor, x, name=name, function=function)
    elif not is_number(factor):
        raise ArgumentTypeError(
            f"{function}(): `{name}` is {describe(factor)}.",
            why="a gradient is multiplied by a real number or a tensor of them.",
            fix=f"gg.gate(x, {factor})" if isinstance(factor, bool) else _as_number(factor, name),
        )
    elif not -math.inf < factor < math.inf:  # torch.compile cannot ask math.isfinite of a number that changes
        raise ArgumentValueError(
            f"{function}(): `{name}` is {factor}.",
            why="it would make every gradient NaN or infinite.",
            fix=f"{name}=1.0",
        )


def _as_number(value: Any, name: str) -> str:
    """Write what was meant as a number, where that is plain."""
    try:
        number = float(value)
    except (TypeError, ValueError, RuntimeError):
        number = 1.0
    return f"{name}={number if math.isfinite(number) else 1.0}"


def check_limit(limit: Any, *, name: str, function: str = "clip_grad") -> None:
    """Make sure that a limit of clip_grad is a positive number."""
    if not is_number(limit):
        raise ArgumentTypeError(
            f"{function}(): `{name}` is {describe(limit)}.",
            why="a limit is a plain number.",
            fix=_as_number(limit, name),
        )
    if not limit > 0:
        raise ArgumentValueError(
            f"{function}(): `{name}` is {limit}.",
            why="a limit is positive; to let nothing through there is gg.gate.",
            fix="gg.gate(x, False)" if limit == 0 else f"{name}=1.0",
        )


def check_fill_value(fill_value: Any, x: torch.Tensor, *, function: str = "finite_grad") -> None:
    """Make sure that what replaces a non-finite gradient is itself finite, also in the dtype of x."""
    if not is_number(fill_value):
        raise ArgumentTypeError(
            f"{function}(): `fill_value` is {describe(fill_value)}.", why="it is a plain number.", fix="fill_value=0.0"
        )
    floating = x.is_floating_point() or x.is_complex()
    if not abs(fill_value) <= (torch.finfo(x.dtype).max if floating else math.inf) or math.isinf(fill_value):
        raise ArgumentValueError(
            f"{function}(): `fill_value` is {fill_value}, x is {str(x.dtype).removeprefix('torch.')}.",
            why="what replaces a non-finite gradient has to be finite itself.",
            fix="fill_value=0.0",
        )


def check_meter(meter: Any, *, function: str, traced: bool) -> None:
    """Make sure that a meter is one, and can count here.

    Raises:
        ArgumentTypeError: It is something else.
        ArgumentValueError: The call is inside torch.compile or torch.func.
    """
    if not isinstance(meter, GateMeter):
        raise ArgumentTypeError(
            f"{function}(): `meter` is {describe(meter)}.",
            why="what counts is a gg.GateMeter that you keep and read.",
            fix="meter=gg.GateMeter()",
        )
    if traced:
        raise ArgumentValueError(
            f"{function}(): a meter cannot count inside torch.compile or torch.func.",
            why="counting is a side effect, and a traced function has none.",
            fix="meter=None",
        )


def check_pair(hard: torch.Tensor, soft: torch.Tensor) -> None:
    """Make sure that the two sides of straight_through have one shape, dtype and device.

    Raises:
        ArgumentTypeError: Their dtypes differ, or are not floating.
        ArgumentValueError: Their shapes or devices differ.
    """
    if hard.dtype != soft.dtype or not (soft.is_floating_point() or soft.is_complex()):
        raise ArgumentTypeError(
            f"straight_through(): `hard` is {describe(hard)}, `soft` is {describe(soft)}.",
            why="the gradient of the one becomes the gradient of the other, so both have one floating dtype.",
            fix="gg.straight_through(hard.to(soft.dtype), soft)"
            if soft.is_floating_point() or soft.is_complex()
            else "",
        )
    if hard.shape != soft.shape:
        raise ArgumentValueError(
            f"straight_through(): `hard` has shape {tuple(hard.shape)}, `soft` has shape {tuple(soft.shape)}.",
            why="each element of soft takes the gradient of exactly one element of hard.",
            fix="gg.straight_through(hard.expand_as(soft), soft)" if _expands(hard, soft) else "",
        )
    if hard.device != soft.device:
        raise ArgumentValueError(
            f"straight_through(): `hard` is on {hard.device}, `soft` is on {soft.device}.",
            why="moving one here would copy in every call.",
            fix="gg.straight_through(hard.to(soft.device), soft)",
        )


def _expands(hard: torch.Tensor, soft: torch.Tensor) -> bool:
    missing = soft.dim() - hard.dim()
    return missing >= 0 and all(a in (1, b) for a, b in zip(hard.shape, soft.shape[missing:], strict=True))
