"""How much of a parameter is held still, read off the parameter itself.

What holds a parameter is attached to it, so that whoever has the parameter can ask, without knowing who holds it.
"""

from __future__ import annotations

from typing import Any

import torch

WATCHERS = "_gradgate_watchers"
"""The attribute of a parameter that has its watchers."""

HOLD = "hold"
"""The kind of the watcher that knows the freezes and pins; its `count` says how many elements they hold."""

_NONE: dict[str, Any] = {}


def watchers_of(parameter: torch.Tensor) -> dict[str, Any]:
    """Give the watchers of a parameter by their kind; empty for most parameters."""
    return getattr(parameter, WATCHERS, _NONE)


def held_elements(parameter: torch.Tensor) -> int:
    """Give how many elements of a parameter do not learn: frozen or pinned, or all if it does not require grad."""
    if not parameter.requires_grad:
        return parameter.numel()
    hold = watchers_of(parameter).get(HOLD)
    return int(hold.count) if hold is not None else 0
