"""What is to be restored: a stack of entries for whatever runs in this thread now.

An entry is made when a mode is entered and says what was in force before and whether the new mode is locked. So the
modes themselves have no state: one object can be reused, nested in itself and shared, and blocks that end out of order
still leave in the end what was there in the beginning.
"""

from __future__ import annotations

import threading
from typing import Any

__all__ = ["Entry", "current", "is_locked"]

Entry = tuple[bool, bool, object]
"""Whether autograd recorded before, whether the mode entered is locked, and that mode (None for a strand's own)."""


class _Current(threading.local):
    """The entries in force in this thread, and the strand that they belong to, if it is not the thread itself."""

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self.strand: Any = None


current = _Current()


def is_locked() -> bool:
    """Tell whether the innermost mode in force here is locked."""
    return bool(current.entries) and current.entries[-1][1]
