"""What pauses in the middle of a thread - a generator, a coroutine, a task - has a mode and entries of its own.

They are the thread's only while it runs; while it is paused, the others have theirs.
"""

from __future__ import annotations

from asyncio import _get_running_loop as running_loop

from gradgate._torch_compat import read_grad_mode, write_grad_mode
from gradgate.modes._entries import Entry, current
from gradgate.modes._lock import close_lock, open_lock

__all__ = ["Strand", "running_loop"]


class Strand:
    """One flow of execution: entered when it goes on, left when it pauses.

    `loop` is the event loop that it last went on in, if any: a task of a loop further in is not inside this strand.

    Args:
        recording: Whether autograd records when it first runs.
        entries: The entries that it starts with.
        locked: Whether it is in a lock whenever it runs.
    """

    __slots__ = ("_around", "_locked", "_outer", "_own", "loop")

    def __init__(self, recording: bool, entries: list[Entry], *, locked: bool) -> None:
        self._own = recording, entries
        self._locked = locked

    def __enter__(self) -> None:
        if self._locked:
            open_lock()
        self.loop = running_loop()
        self._around = current.strand
        self._outer = read_grad_mode(), current.entries
        current.strand = self
        write_grad_mode(self._own[0])
        current.entries = self._own[1]

    def __exit__(self, *_: object) -> None:
        self._own = read_grad_mode(), current.entries
        current.strand = self._around
        write_grad_mode(self._outer[0])
        current.entries = self._outer[1]
        if self._locked:
            close_lock()
