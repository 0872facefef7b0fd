"""Running statistics of frozen parts stop, and stay stopped when the model is put back into training mode.

A held module is in evaluation mode and answers `train()` by staying there; it remembers what it was asked, and takes
that mode when the last hold goes. Its class, its hooks and its state-dict keys stay what they were, and a forward
costs nothing more.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

__all__ = ["all_tokens", "has_statistics", "held_statistics", "hold_statistics", "release_statistics", "statistics_of"]


class Asleep:
    """Stands in for the `train` method of one module."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.asked = module.training
        self.tokens: set[str] = set()

    def __call__(self, mode: bool = True) -> nn.Module:
        """Remember the mode, and stay in evaluation mode."""
        self.asked = mode
        self.module.training = False
        return self.module


def has_statistics(module: nn.Module) -> bool:
    """Tell whether a module keeps running statistics of its own, as the norms of torch do.

    These are buffers called `running_...`, and the two vectors of the spectral norm's power iteration (`_u` and `_v` as
    a parametrization, `weight_u` and `weight_v` beside `weight_orig` in the older form).
    """
    return any(True for _ in statistics_of(module))


def statistics_of(module: nn.Module) -> Iterator[str]:
    """Give the names of the buffers that training would move; nothing where they are switched off (None)."""
    names = [name for name, _ in module.named_buffers(recurse=False)]
    for name in names:
        spectral = name in ("_u", "_v") and "_u" in names
        spectral = spectral or (name[-2:] in ("_u", "_v") and f"{name[:-2]}_orig" in module._parameters)
        if name.startswith("running_") or name == "num_batches_tracked" or spectral:
            yield name


def held_statistics(module: nn.Module) -> bool:
    """Tell whether the statistics of a module are stopped."""
    return isinstance(module.__dict__.get("train"), Asleep)


def hold_statistics(module: nn.Module, token: str) -> None:
    """Stop the statistics of a module for the holder of this token."""
    if not held_statistics(module):
        module.__dict__["train"] = Asleep(module)
        module.training = False
    module.__dict__["train"].tokens.add(token)


def release_statistics(module: nn.Module, token: str) -> None:
    """Let the statistics run again, once nobody else stops them."""
    asleep = module.__dict__.get("train")
    if isinstance(asleep, Asleep):
        asleep.tokens.discard(token)
        if not asleep.tokens:
            del module.__dict__["train"]
            module.training = asleep.asked


def all_tokens(module: nn.Module) -> list[str]:
    """Give the tokens of everyone who stops the statistics of a module."""
    asleep = module.__dict__.get("train")
    return sorted(asleep.tokens) if isinstance(asleep, Asleep) else []
