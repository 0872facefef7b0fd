"""A block that is held over an `await` belongs to its asyncio task: no other task sees its mode.

A mode belongs to a thread, and all tasks of a loop share one. So a task that holds a block open becomes a strand of
its own, paused and resumed as the task is. The loop says when by `Handle._run`, which is wrapped only as long as such
a block is open. Loops that do not use asyncio's own handles (uvloop) are not covered.
"""

from __future__ import annotations

import asyncio
import threading
from typing import Any

from gradgate._torch_compat import read_grad_mode
from gradgate.modes._entries import current
from gradgate.modes._strands import Strand, running_loop

__all__ = ["bind_task", "bound_tasks", "release_task", "running_loop"]


class _TaskStrand(Strand):
    __slots__ = ("task",)

    def __init__(self, task: asyncio.Task[Any]) -> None:
        super().__init__(read_grad_mode(), [], locked=False)
        self.task = task


bound_tasks: dict[asyncio.Task[Any], _TaskStrand] = {}
"""The tasks that hold a block."""
_changing = threading.Lock()
_run_handle = asyncio.Handle._run


def bind_task() -> None:
    """Make the running task a strand of its own, unless it is in one: it is about to enter a block."""
    task = asyncio.current_task()
    if task is None or (current.strand is not None and current.strand.loop is running_loop()):
        return
    strand = _TaskStrand(task)
    strand.__enter__()
    with _changing:
        bound_tasks[task] = strand
        asyncio.Handle._run = _run_in_its_mode  # type: ignore[assignment, method-assign]


def release_task() -> None:
    """Take the running task out of its strand, if it is in one: it has left its last block."""
    strand = current.strand
    if not isinstance(strand, _TaskStrand):
        return
    strand.__exit__()
    with _changing:
        del bound_tasks[strand.task]
        if not bound_tasks:
            asyncio.Handle._run = _run_handle  # type: ignore[method-assign]


def _run_in_its_mode(handle: asyncio.Handle) -> None:
    # The step in which a task opened its first block began outside of this wrapper: nobody has paused it yet.
    _pause_task()
    # Each step of a task is a bound method of it, the first one and the wake-ups alike.
    task = getattr(handle._callback, "__self__", None)  # type: ignore[attr-defined]
    strand = bound_tasks.get(task) if isinstance(task, asyncio.Task) else None
    if strand is not None:
        strand.__enter__()
    try:
        _run_handle(handle)
    finally:
        _pause_task()


def _pause_task() -> None:
    if isinstance(current.strand, _TaskStrand):
        current.strand.__exit__()
