"""Modules: their hooks, their buffers, and what compiling wraps around them."""

from __future__ import annotations

import sys
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any, NamedTuple

import torch
from torch.nn.modules import module as module_hooks
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from gradgate._patches import Patches

__all__ = [
    "MODULE_HOOKS",
    "OPTIMIZER_HOOKS",
    "anything_compiled",
    "buffers_of",
    "call_with_gradient",
    "compiled_as_written",
    "innermost_call",
    "is_compiled",
    "run_as_written",
    "watched_modules",
    "without_compiled_wrappers",
    "ModuleCall",
]


def without_compiled_wrappers(module: torch.nn.Module) -> torch.nn.Module:
    """Give the module that torch.compile wrapped, which has the names that the user gave; else the module itself.

    Args:
        module: Any module.

    Returns:
        The wrapped module, or the same one.
    """
    inner = getattr(module, "_orig_mod", None)
    return inner if isinstance(inner, torch.nn.Module) else module


def is_compiled(module: torch.nn.Module) -> bool:
    """Tell whether a module, as such, was compiled: wrapped by torch.compile or by its own `compile()`.

    Args:
        module: Any module.

    Returns:
        Whether it was.
    """
    return "_orig_mod" in module._modules or getattr(module, "_compiled_call_impl", None) is not None


def anything_compiled() -> bool:
    """Tell whether torch.compile was called in this process; its machinery is loaded by optimizers, too."""
    frames = sys.modules.get("torch._dynamo.eval_frame")
    return frames is not None and any(backend is not None for backend in frames.cached_backends.values())


def buffers_of(module: torch.nn.Module) -> dict[str, torch.Tensor | None]:
    """Give a module's own table of buffers: writing an entry rebinds the buffer, whatever the module's setters do."""
    return module._buffers


MODULE_HOOKS: tuple[dict[Any, Any], dict[Any, Any], dict[Any, Any]] = (
    module_hooks._global_forward_pre_hooks,
    module_hooks._global_forward_hooks,
    module_hooks._global_forward_hooks_always_called,
)
"""Torch's tables of hooks before and after the forward of every module, and of those that are always called."""

OPTIMIZER_HOOKS: tuple[dict[Any, Any], dict[Any, Any]] = (_global_optimizer_pre_hooks, _global_optimizer_post_hooks)
"""Torch's tables of hooks before and after every step of every optimizer; a key may be anything."""


class ModuleCall(NamedTuple):
    """A call of a module, as a traceback shows it."""

    module: torch.nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


_MODULE_CALL = torch.nn.Module._call_impl.__code__


def innermost_call(traceback: TracebackType | None) -> ModuleCall | None:
    """Find the innermost call of a module that an exception came through, with its arguments.

    Args:
        traceback: The exception's traceback.

    Returns:
        The call, or None if the exception came through no module.
    """
    found = None
    while traceback is not None:
        if traceback.tb_frame.f_code is _MODULE_CALL:
            found = traceback.tb_frame
        traceback = traceback.tb_next
    if found is None:
        return None
    seen = found.f_locals
    return ModuleCall(seen["self"], seen["args"], seen["kwargs"])


@contextmanager
def watched_modules(patches: Patches, enter: Callable[..., None], leave: Callable[..., None]) -> Iterator[None]:
    """Call functions around the forward of every module, as long as the block lasts.

    Args:
        patches: Notes the hooks; removes them also where an interrupt keeps the block from doing so.
        enter: Called before, with the module and its positional arguments.
        leave: Called after, with the module, its positional and keyword arguments, and its output.
    """
    key = object()
    with patches.block():
        patches.put(module_hooks._global_forward_hooks_with_kwargs, key, True)
        patches.put(module_hooks._global_forward_hooks, key, leave)
        patches.put(module_hooks._global_forward_pre_hooks, key, enter)
        yield


def call_with_gradient(patches: Patches, leaf: torch.Tensor, hook: Callable[[torch.Tensor], None]) -> None:
    """Call a function with the gradient that reaches a leaf, until the patches are undone; it outlives its graph."""
    if leaf._backward_hooks is None:
        leaf._backward_hooks = OrderedDict()
    patches.put(leaf._backward_hooks, object(), hook)


@contextmanager
def compiled_as_written(patches: Patches) -> Iterator[None]:
    """Run compiled functions and modules as they were written, so that hooks see inside and no size is compiled for."""
    with patches.block():
        patches.put(vars(warnings), "filters", warnings.filters[:])
        warnings.filterwarnings("ignore", message="Using `torch.compile.module.` when there are global hooks")
        run_as_written(patches)
        yield


def run_as_written(patches: Patches) -> None:
    """Run compiled functions and modules as they were written, until the patches are undone."""
    from torch._dynamo import eval_frame

    patches.put(vars(eval_frame), "_stance", eval_frame.DynamoStance("force_eager"))
