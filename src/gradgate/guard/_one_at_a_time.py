"""A guard makes one step at a time: what it remembers of the state before a step is of that step."""

from __future__ import annotations

from gradgate.errors import GradgateError

__all__ = ["OneAtATime"]


class OneAtATime:
    """A block that cannot be entered again from within, or from another thread."""

    def __init__(self) -> None:
        self._taken = False

    def __enter__(self) -> None:
        if self._taken:
            raise GradgateError(
                "Guard: a guard was used inside one of its own steps, or by two threads at once.",
                why="the gradients and buffers that it put aside for the first step would be lost.",
                fix="out, keep = guard.forward(batch, fn)   # before guard.backward; or another Guard inside",
            )
        self._taken = True

    def __exit__(self, *raised: object) -> None:
        self._taken = False
