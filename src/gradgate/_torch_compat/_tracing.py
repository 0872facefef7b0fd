"""What is traced, and by whom: may the host look at values here?"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import forward_ad
from torch.compiler import is_compiling

__all__ = [
    "are_plain",
    "assert_later",
    "has_data",
    "holds_its_values",
    "inside_forward_mode",
    "inside_functorch",
    "is_compiling",
    "is_traced",
    "storage_address",
]

# Bound once: these are asked in every call of a small function, and each dot takes its time.
_dispatch_mode, _FAKE = torch._C._get_dispatch_mode, torch._C._TorchDispatchModeKey.FAKE
_is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor
_is_batched_in_the_old_way = torch._C._functorch.is_legacy_batchedtensor

inside_functorch = torch._C._are_functorch_transforms_active
"""Tell whether torch.func (grad, vmap, jvp, ...) is at work around this call."""


# torch.compile keeps it in the graph, FakeTensorMode knows it, a GPU runs it without waiting; vmap has no rule for it.
assert_later = torch._assert_async
"""Raise a RuntimeError with this message when the device finds the condition false; nothing waits for it."""


def inside_forward_mode() -> bool:
    """Tell whether a level of forward-mode differentiation is open in this thread (torch.func.jvp opens one too)."""
    return forward_ad._current_level >= 0


def is_traced() -> bool:
    """Tell whether torch.compile, torch.func or forward-mode differentiation looks at this call."""
    return is_compiling() or inside_functorch() or forward_ad._current_level >= 0


def has_data(*tensors: torch.Tensor) -> bool:
    """Tell whether the host may look at the values of tensors, one by one.

    It may not while torch.compile or FakeTensorMode traces, on the meta device, or where vmap holds a whole batch
    of values in the place of each one. Inside torch.func.grad and jvp it may.

    Args:
        *tensors: Any tensors.

    Returns:
        Whether `.item()`, `nonzero()` and boolean indexing work on all of them.
    """
    if is_compiling() or _dispatch_mode(_FAKE) is not None:
        return False
    for tensor in tensors:  # noqa: SIM110 - `all` and a generator take longer than the answer
        if not _is_concrete(tensor):
            return False
    return True


def _is_concrete(tensor: torch.Tensor) -> bool:
    while _is_wrapped(tensor):
        if torch._C._functorch.is_batchedtensor(tensor):
            return False
        tensor = torch._C._functorch.get_unwrapped(tensor)
    # torch.autograd.grad(is_grads_batched=True) still runs backward under the older vmap, which nothing above sees.
    return not (_is_batched_in_the_old_way(tensor) or tensor.is_meta or isinstance(tensor, FakeTensor))


_keys_of = torch._C._dispatch_keys
_PLAIN_TYPES = (torch.Tensor, torch.nn.Parameter)
_PLAIN_KEYS = {_keys_of(torch.empty(0, device="cpu")).raw_repr()}
with torch.inference_mode():
    _PLAIN_KEYS.add(_keys_of(torch.empty(0, device="cpu")).raw_repr())


def are_plain(tensors: Iterable[torch.Tensor]) -> bool:
    """Tell whether tensors are nothing but values in the memory of the CPU, and no dispatch mode sees operations.

    False for subclasses, other devices and layouts, what vmap batches, conjugate views, and autograd's zeros.
    """
    if torch._C._len_torch_dispatch_stack():
        return False
    for x in tensors:  # noqa: SIM110 - `all` and a generator take longer than the answer
        if type(x) not in _PLAIN_TYPES or _keys_of(x).raw_repr() not in _PLAIN_KEYS:
            return False
    return True


storage_address: Callable[[torch.Tensor], int] = torch._C._data_address  # type: ignore[attr-defined]
"""Give the address of a tensor's storage; unlike `data_ptr()`, it leaves memory shared copy-on-write shared."""


def holds_its_values(tensor: torch.Tensor) -> bool:
    """Tell whether a tensor has its values in memory of its own, and does not wrap or only imitate others.

    Args:
        tensor: Any tensor.

    Returns:
        False for fake tensors, distributed tensors and other subclasses that dispatch by themselves.
    """
    return type(tensor).__torch_dispatch__ is torch.Tensor.__torch_dispatch__
