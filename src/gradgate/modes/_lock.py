"""The lock: while a mode is in force, a bare `torch.set_grad_enabled(...)` call does not change it.

`set_grad_enabled` switches in its constructor, before anybody can say whether it is a block or a bare call. While at
least one lock is alive anywhere, its constructor is replaced by one that, in a locked thread, only notes what was
asked for. Blocks and decorators still work, because they switch in `__enter__`. The class itself stays what it was, so
that a `from torch import set_grad_enabled` of earlier is covered too. torch's own bare calls (`optimizer.step()`,
`no_grad.__enter__`) are let through: they come in pairs that restore.
"""

from __future__ import annotations

import sys

from torch import set_grad_enabled

from gradgate._torch_compat import read_grad_mode
from gradgate.modes._entries import is_locked

__all__ = ["close_lock", "locks", "open_lock"]

locks: list[None] = []
"""One item for each lock that is alive in any thread."""
_switch_at_once = set_grad_enabled.__init__


def _note_only_when_locked(self: set_grad_enabled, mode: bool) -> None:
    if is_locked() and not _is_torch(sys._getframe(1).f_globals.get("__name__", "")):
        self.prev = read_grad_mode()
        self.mode = mode
    else:
        _switch_at_once(self, mode)


def _is_torch(module: str) -> bool:
    return module == "torch" or module.startswith("torch.")


def open_lock() -> None:
    """Count one more lock; with the first, torch's constructor is replaced."""
    locks.append(None)
    _follow_locks()


def close_lock() -> None:
    """Count one lock less; with the last one anywhere, torch is as it was."""
    locks.pop()
    _follow_locks()


def _follow_locks() -> None:
    # Without a mutex, which an interrupt could leave locked for ever. Whoever writes looks again afterwards, so that
    # the last one to write, whatever threads did in between, has seen that it fits.
    while (set_grad_enabled.__init__ is _note_only_when_locked) is not bool(locks):
        set_grad_enabled.__init__ = _note_only_when_locked if locks else _switch_at_once  # type: ignore[method-assign]
