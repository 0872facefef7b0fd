"""The one place that knows torch's versions and private names; every other file asks here.

Each name says what it promises; where torch changes, this file changes and nothing else does.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import forward_ad
from torch.compiler import is_compiling
from torch.utils._pytree import tree_flatten, tree_unflatten

__all__ = [
    "apply_function",
    "assert_later",
    "has_data",
    "inside_forward_mode",
    "inside_functorch",
    "is_compiling",
    "read_grad_mode",
    "tree_flatten",
    "tree_unflatten",
    "without_copy",
    "write_grad_mode",
]

read_grad_mode = torch.is_grad_enabled
"""Tell whether this thread records; the public name, kept beside its counterpart."""

# torch.set_grad_enabled is a class that does this and more; the bare switch costs a tenth of it.
write_grad_mode = torch._C._set_grad_enabled
"""Switch this thread's recording on or off, with nothing around it."""

inside_functorch = torch._C._are_functorch_transforms_active
"""Tell whether torch.func (grad, vmap, jvp, ...) is at work around this call."""


# torch.compile keeps it in the graph, FakeTensorMode knows it, a GPU runs it without waiting; vmap has no rule for it.
assert_later = torch._assert_async
"""Raise a RuntimeError with this message when the device finds the condition false; nothing waits for it."""


def apply_function(function: type[torch.autograd.Function], *args: Any) -> Any:
    """Call an autograd Function without the per-call signature lookup of `Function.apply`.

    `Function.apply` of a new-style Function (one with `setup_context`) looks at the signature of `forward` on
    each call, about 20 us; the C-level apply beneath it does not. Only the C-level one runs old-style Functions
    (a `forward` that takes ctx) just as `apply` does, and only outside torch.func and torch.compile.

    Args:
        function: The Function, with a forward that takes ctx.
        *args: What forward takes after ctx.

    Returns:
        What forward returns.
    """
    return super(torch.autograd.Function, function).apply(*args)  # type: ignore[misc]


def has_data(*tensors: torch.Tensor) -> bool:
    """Tell whether the host may look at the values of tensors, one by one.

    It may not while torch.compile or FakeTensorMode traces, on the meta device, or where vmap holds a whole batch
    of values in the place of each one. Inside torch.func.grad and jvp it may.

    Args:
        *tensors: Any tensors.

    Returns:
        Whether `.item()`, `nonzero()` and boolean indexing work on all of them.
    """
    if is_compiling() or torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None:
        return False
    return all(_is_concrete(tensor) for tensor in tensors)


def _is_concrete(tensor: torch.Tensor) -> bool:
    while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        if torch._C._functorch.is_batchedtensor(tensor):
            return False
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return not (tensor.is_meta or isinstance(tensor, FakeTensor))


def inside_forward_mode() -> bool:
    """Tell whether a level of forward-mode differentiation is open in this thread (torch.func.jvp opens one too)."""
    return forward_ad._current_level >= 0


def without_copy(x: torch.Tensor) -> torch.Tensor:
    """Give a tensor of its own with the values, strides and memory of x; autograd follows it.

    Activations are shared copy-on-write: whoever is written to first gets memory of its own, so that an in-place
    operation on the result leaves x as it is (and copies nothing where x is no longer held by anyone). Parameters
    are not: their memory must stay where it is, so the result is a view, and autograd refuses to overwrite a view
    that an autograd Function returns. The same for memory that torch does not own (numpy's, shared memory).

    Args:
        x: A strided tensor.

    Returns:
        The same values under another name.
    """
    owner = x if x._base is None else x._base
    if not (owner.is_leaf and owner.requires_grad):
        with suppress(RuntimeError):  # memory, layouts and subclasses that cannot be shared in this way
            return torch._lazy_clone(x)
    return x.view_as(x)
