"""Every step of every optimizer passes here once anything was held: torch's own global step hooks.

`torch.optim.Optimizer` runs these hooks around `step` of every subclass, those of other libraries included. An
optimizer without held parameters costs one attribute lookup for each of its parameters.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from gradgate._torch_compat import OPTIMIZER_HOOKS
from gradgate.freezing._carrying import Watcher, watchers_of

__all__ = ["skips_missing_gradients", "watch_steps"]


def watch_steps() -> None:
    """Hang the hooks, unless they hang already; one that an interrupt has kept from hanging is hung the next time."""
    before, after = OPTIMIZER_HOOKS
    # They stay: torch walks over all hooks of this kind during a step, so that none may be taken away there.
    before.setdefault(__name__, _before_step)
    after.setdefault(__name__, _after_step)


def skips_missing_gradients(kind: type[torch.optim.Optimizer]) -> bool:
    """Tell whether a class of optimizers is known to leave parameters alone that have no gradient.

    All of torch's do but L-BFGS, which steps along one direction for all parameters. Of others nothing is known.
    """
    return kind.__module__.startswith("torch.optim.") and kind is not torch.optim.LBFGS


def _held(optimizer: torch.optim.Optimizer) -> list[tuple[torch.Tensor, Watcher]]:
    return [
        (parameter, watcher)
        for group in optimizer.param_groups
        for parameter in group["params"]
        for watcher in watchers_of(parameter).values()
    ]


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _before_step(
    optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    held = _held(optimizer)
    if not held:
        return None
    for parameter, watcher in held:
        watcher.before_step(parameter, optimizer)
    # Arguments are (optimizer, closure) or the closure comes by name; a step may go without.
    if len(args) > 1 and callable(args[1]):
        return (args[0], _guarded(args[1], held, optimizer), *args[2:]), kwargs
    if callable(kwargs.get("closure")):
        return args, {**kwargs, "closure": _guarded(kwargs["closure"], held, optimizer)}
    return None


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _after_step(optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    for parameter, watcher in sorted(_held(optimizer), key=lambda pair: pair[1].late):
        watcher.after_step(parameter, optimizer)


def _guarded(
    closure: Callable[[], Any], held: list[tuple[torch.Tensor, Watcher]], optimizer: torch.optim.Optimizer
) -> Callable[[], Any]:
    """Let the closure see held values as they are held, also in the middle of a step (line searches)."""

    def guarded() -> Any:
        for parameter, watcher in held:
            watcher.before_evaluation(parameter)
        try:
            result = closure()
        except BaseException:  # the step ends here, and what is loaded before the next one is meant
            for parameter, watcher in held:
                watcher.after_step(parameter, optimizer)
            raise
        for parameter, watcher in held:
            watcher.after_evaluation(parameter)
        return result

    return guarded
