"""`check`: a tensor that must fulfil a condition, or the rows that do not are named."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, Literal

import torch

from gradgate._checks import check_tensor, wrong_type, wrong_value
from gradgate._names import describe, listed
from gradgate._torch_private import assert_later, has_data, outside_functorch, whole_tensor, without_batching
from gradgate.errors import ArgumentValueError, FailedCheckError

ENABLED = __debug__ and os.environ.get("GRADGATE_CHECKS", "1") != "0"

Condition = Literal["finite"] | Callable[[torch.Tensor], torch.Tensor | bool]


def check(x: torch.Tensor, condition: Condition, message: str = "") -> torch.Tensor:
    """Return x, or raise and name the rows (samples) of x that break a condition.

    The guard takes the error as the fault of those samples. It reads one number on the host. Under `torch.compile` it
    is torch's own assertion: a RuntimeError with the message and without rows. Under vmap the rows are those of the
    outermost batch dimension. With `python -O`, or `GRADGATE_CHECKS=0` in the environment, nothing is checked.

    Args:
        x: Any tensor; its rows are samples.
        condition: "finite", or a function of x that returns a bool, or a boolean tensor: one answer for each element,
            for each row, or for all of x. True is good.
        message: What the error says first.

    Returns:
        x itself.

    Raises:
        FailedCheckError: The condition is false somewhere. `error.rows` has the rows.
        ArgumentTypeError: x is not a tensor, or the condition is none of the above or returns something else.
        ArgumentValueError: The condition is another word than "finite", or returns a tensor that does not fit x.

    Gradient:
        That of x: the call does nothing to it. NaN and Inf that arrive go on.

    Examples:
        >>> x = torch.tensor([[1.0, 2.0], [3.0, float("nan")]])
        >>> gg.check(x, lambda x: x[:, 0] > 0) is x
        True
        >>> gg.check(x, "finite", "activations of the encoder")
        Traceback (most recent call last):
            ...
        gradgate.errors.FailedCheckError: activations of the encoder: 1 of 2 rows is not finite: 1. x[1, 1] is nan.
    """
    if not ENABLED:
        return x
    check_tensor(x, name="x", function="check")
    good = _answers(x, condition)
    named = getattr(condition, "__name__", type(condition).__name__)
    wrong = ("is not finite", "are not finite") if condition == "finite" else (f"breaks {named}", f"break {named}")
    message = message or "check()"
    if not torch.compiler.is_compiling():
        good = without_batching(whole_tensor(good).detach())  # of shards: every process calls this, and raises alike
    if torch.compiler.is_compiling() or not has_data(good):
        assert_later(good.all(), f"{message}: some rows {wrong[1]}")
    elif not bool(good.all()):
        _fail(without_batching(x.detach()), good, message, wrong)
    return x


def _answers(x: torch.Tensor, condition: Any) -> torch.Tensor:
    if condition == "finite":
        return x.isfinite()
    why = 'it is "finite", or a function of x that returns a bool or a boolean tensor.'
    fix = "gg.check(x, lambda x: x > 0)"
    if not callable(condition):
        make = wrong_value if isinstance(condition, str) else wrong_type
        raise make(condition, "condition", "check", why, fix)
    good = condition(x)
    if isinstance(good, bool):
        return torch.tensor(good)
    if not isinstance(good, torch.Tensor) or good.dtype is not torch.bool:
        raise wrong_type(good, "condition(x)", "check", why, fix)
    if good.dim() and good.shape != x.shape[: good.dim()]:
        what = f"check(): `condition(x)` is {describe(good)} for x of shape {tuple(x.shape)}."
        why = "it has one answer for each element of x, for each row, or for all of x."
        fix = "gg.check(x, lambda x: (x > 0).flatten(1).all(1))   # one for each row"
        raise ArgumentValueError(what, why=why, fix=fix)
    return good


def _fail(x: torch.Tensor, good: torch.Tensor, message: str, wrong: tuple[str, str]) -> None:
    """Raise, with the rows and the first element."""
    if not good.dim():
        raise FailedCheckError(f"{message}: x {wrong[0]}.")
    with outside_functorch():  # torch 2.8 gives no list there
        bad = (~good).nonzero().tolist()
    place, rows = tuple(bad[0]), sorted({index[0] for index in bad})
    value = whole_tensor(x)[place].item() if x.shape == good.shape else None
    first = f" x[{', '.join(map(str, place))}] is {value}." if value is not None else ""
    raise FailedCheckError(
        f"{message}: {len(rows)} of {len(good)} rows {wrong[len(rows) > 1]}: {listed(rows)}.{first}", rows=rows
    )
