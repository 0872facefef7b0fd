"""Changes that must not outlive a call, whatever interrupts it.

Ctrl-C raises between any two bytecodes: in an `__exit__`, in a `finally`, in torch's own `handle.remove()`. So an
ordinary block is not enough for what the whole process shares. Here every change is one assignment that is noted
before it is made, taking it back can be repeated, and the outermost call does so once more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any

Replaced = tuple[MutableMapping[Any, Any], Any, Any]
_ABSENT = object()
ATTEMPTS = 100  # an interrupt at each of them is no accident


class Patches:
    """Entries of shared tables (hooks, a module's `__dict__`) that were replaced, in the order of replacing."""

    def __init__(self) -> None:
        self._noted: list[Replaced] = []

    def put(self, table: MutableMapping[Any, Any], key: Any, value: Any) -> None:
        """Replace an entry of a table, or add it."""
        self._noted.append((table, key, table.get(key, _ABSENT)))
        table[key] = value

    def undo(self) -> None:
        """Take back all replacements, the last one first."""
        _take_back(self._noted, 0)
        self._noted = []  # an open block that the garbage collector closes later has its own list

    @contextmanager
    def block(self) -> Iterator[None]:
        """Take back at its end what was replaced in a block."""
        noted, before = self._noted, len(self._noted)
        try:
            yield
        finally:
            _take_back(noted, before)


def _take_back(noted: list[Replaced], down_to: int) -> None:
    while len(noted) > down_to:
        table, key, before = noted[-1]
        if before is _ABSENT:
            table.pop(key, None)
        else:
            table[key] = before
        noted.pop()


def to_the_end(clean_up: Callable[[], None]) -> None:
    """Repeat a clean-up until it has run through, then raise what interrupted it.

    Args:
        clean_up: Can be begun again after an exception at any of its lines.
    """
    interrupt: BaseException | None = None
    for _ in range(ATTEMPTS):
        try:
            clean_up()
            break
        except BaseException as error:  # noqa: BLE001 - raised when all is cleaned up
            interrupt = error
    if interrupt is not None:
        raise interrupt
