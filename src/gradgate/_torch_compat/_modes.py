"""Modes of this thread: recording, and what stands between a call and the kernels."""

from __future__ import annotations

from collections.abc import Callable
from operator import call
from typing import Any

import torch
from torch.overrides import _get_current_function_mode
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode

__all__ = [
    "DispatchMode",
    "ThreadModes",
    "enter_mode",
    "leave_mode",
    "on_top",
    "pop_saved_tensors_hooks",
    "push_saved_tensors_hooks",
    "read_grad_mode",
    "undispatched",
    "write_grad_mode",
]

read_grad_mode = torch.is_grad_enabled
"""Tell whether this thread records; the public name, kept beside its counterpart."""


# torch.set_grad_enabled is a class that does this and more; the bare switch costs a tenth of it.
write_grad_mode = torch._C._set_grad_enabled
"""Switch this thread's recording on or off, with nothing around it."""


class DispatchMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A mode that sees every operation; it runs while nothing is compiled, and so without Dynamo's wrapper."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


undispatched = torch._C._DisableTorchDispatch
"""A block whose operations go past every dispatch mode: the tracer's own look at a tensor is not traced."""


def enter_mode(mode: torch.overrides.TorchFunctionMode | DispatchMode) -> None:
    """Put a mode in force in this thread.

    Args:
        mode: A mode.
    """
    mode.__enter__()  # type: ignore[no-untyped-call]


def leave_mode(mode: torch.overrides.TorchFunctionMode | DispatchMode) -> None:
    """Take a mode that is on top out of force.

    Args:
        mode: A mode.
    """
    mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]


def on_top(mode: torch.overrides.TorchFunctionMode | DispatchMode) -> bool:
    """Tell whether a mode was entered last in this thread, so that it can be left.

    Args:
        mode: A mode.

    Returns:
        Whether it lies on top of the modes of its kind.
    """
    if isinstance(mode, DispatchMode):
        return _get_current_dispatch_mode() is mode
    top: object = _get_current_function_mode()  # type: ignore[no-untyped-call]
    return top is mode


push_saved_tensors_hooks = torch._C._autograd._push_saved_tensors_default_hooks
"""Call `pack` with every tensor that is saved for backward in this thread, and `unpack` when it is needed."""


def pop_saved_tensors_hooks(pack: Callable[[torch.Tensor], Any]) -> None:
    """Take these hooks away, if they were pushed last."""
    top: tuple[Any, Any] | None = torch._C._autograd._top_saved_tensors_default_hooks(True)
    if top is not None and top[0] == pack:
        torch._C._autograd._pop_saved_tensors_default_hooks()


class ThreadModes:
    """Recording and autocast of this thread, to be put back where an interrupt has torn a block of torch's apart."""

    def __init__(self) -> None:
        accelerator = torch.accelerator.current_accelerator()
        self._kinds = ("cpu",) if accelerator is None else ("cpu", accelerator.type)
        self.remember()

    def remember(self) -> None:
        """Take the modes as they are now."""
        self._recording = torch.is_grad_enabled()
        self._autocast = [
            (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in self._kinds
        ]
        self._caching = torch.is_autocast_cache_enabled()
        self._nesting = _autocast_nesting()

    def restore(self) -> None:
        """Put them back, as often as wanted."""
        write_grad_mode(self._recording)
        for kind, enabled, dtype in self._autocast:
            torch.set_autocast_enabled(kind, enabled)
            torch.set_autocast_dtype(kind, dtype)
        torch.set_autocast_cache_enabled(self._caching)
        while (nesting := _autocast_nesting()) != self._nesting:
            _DEEPER() if nesting < self._nesting else _HIGHER()
        # A cast of a weight that was cached without recording would cut the weight off in the next try.
        torch.clear_autocast_cache()


# Torch counts the blocks of autocast that are open: while one seems to be, casts of old weights are kept.
_DEEPER, _HIGHER = torch.autocast_increment_nesting, torch.autocast_decrement_nesting


def _autocast_nesting() -> int:
    """Read the count, which only writing returns; unpacking makes both calls in one bytecode: nothing comes between."""
    _, nesting = map(call, (_DEEPER, _HIGHER))
    return nesting
