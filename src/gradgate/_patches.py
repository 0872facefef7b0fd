"""Changes that must not outlive a call, whatever interrupts it.

Ctrl-C raises between any two bytecodes: in an `__exit__`, in a `finally`, in torch's own `handle.remove()`. So an
ordinary block is not enough for what the whole process shares. Here every change is noted before it
is made, taking it back can be repeated, and the outermost call does so once more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager
from functools import partial
from typing import Any

ATTEMPTS = 100  # an interrupt at each of them is no accident


class Patches:
    """What was changed (entries of tables of hooks, a module's `__dict__`, modes), in the order of changing."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], object]] = []

    def put(self, table: MutableMapping[Any, Any], key: Any, value: Any) -> None:
        self.later(partial(table.__setitem__, key, table[key]) if key in table else partial(table.pop, key, None))
        table[key] = value

    def later(self, undo: Callable[[], object]) -> None:
        """Note how a change is taken back that is about to be made."""
        self._undo.append(undo)

    def undo(self) -> None:
        _take_back(self._undo, 0)
        self._undo = []  # a block that an interrupt left open, and the garbage collector closes later, has its own list

    @contextmanager
    def block(self) -> Iterator[None]:
        """Take back at its end what was changed in a block."""
        undo, before = self._undo, len(self._undo)
        try:
            yield
        finally:
            _take_back(undo, before)


def _take_back(undo: list[Callable[[], object]], down_to: int) -> None:
    while len(undo) > down_to:
        undo[-1]()
        undo.pop()


def to_the_end(clean_up: Callable[[], None]) -> None:
    """Repeat a clean-up until it has run through, then raise what interrupted it."""
    interrupt: BaseException | None = None
    for _ in range(ATTEMPTS):
        try:
            clean_up()
            break
        except BaseException as error:  # noqa: BLE001 - raised when all is cleaned up
            interrupt = error
    if interrupt is not None:
        raise interrupt
