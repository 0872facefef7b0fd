"""The arguments of a guard, checked before anything runs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from gradgate._names import describe
from gradgate.errors import ArgumentTypeError, ArgumentValueError
from gradgate.guard._trial import Catch
from gradgate.records import Sink

__all__ = ["checked_catch", "checked_modules", "check_numbers", "check_sink"]


def checked_modules(model: Any) -> list[torch.nn.Module]:
    """Give the modules to guard as a list."""
    modules = [model] if isinstance(model, torch.nn.Module) else list(model) if isinstance(model, Iterable) else []
    if modules and all(isinstance(module, torch.nn.Module) for module in modules):
        return modules
    raise ArgumentTypeError(
        f"Guard(): `model` is {describe(model)}.",
        why="the guard puts back the buffers and gradients of the modules that a step runs.",
        fix="gg.Guard(model)   # or gg.Guard([encoder, head])",
    )


def checked_catch(catch: Any) -> Catch:
    """Give the exceptions to catch as a tuple."""
    kinds = catch if isinstance(catch, tuple) else (catch,)
    if kinds and all(isinstance(kind, type) and issubclass(kind, BaseException) for kind in kinds):
        return kinds
    raise ArgumentTypeError(
        f"Guard(): `catch` is {describe(catch)}.",
        why="it lists the exceptions that may be blamed on a sample.",
        fix="gg.Guard(model, catch=(ValueError, RuntimeError))",
    )


def check_numbers(*, max_bad: float, patience: int, batch_dim: int, min_kept: int) -> None:
    """Make sure that the numbers are in range."""
    for name, value, good, range_, fix in (
        ("max_bad", max_bad, 0 <= max_bad <= 1, "a share of the batch, from 0 to 1", "max_bad=0.5"),
        ("patience", patience, patience >= 1, "a number of steps, 1 or more", "patience=20"),
        ("batch_dim", batch_dim, batch_dim >= 0, "a dimension counted from the front", "batch_dim=0"),
        ("min_kept", min_kept, min_kept >= 1, "a number of samples, 1 or more", "min_kept=1"),
    ):
        if not good:
            raise ArgumentValueError(
                f"Guard(): `{name}` is {value}.", why=f"it is {range_}.", fix=f"Guard(model, {fix})"
            )


def check_sink(sink: Any) -> None:
    """Make sure that a sink can take incidents."""
    if sink is not None and not isinstance(sink, Sink):
        raise ArgumentTypeError(
            f"Guard(): `sink` is {describe(sink)}.",
            why="a sink takes incidents with `record_many(incidents, payloads=None)`.",
            fix='gg.Guard(model, ledger="run.ledger")',
        )
