"""Tensors that share memory, and work on many tensors at once."""

from __future__ import annotations

from collections.abc import Iterable

import torch

__all__ = [
    "add_tensors",
    "copy_on_write",
    "copy_tensors",
    "find_non_finite",
    "memory_holders",
    "recorded_without_copy",
    "without_copy",
    "write_count",
    "write_counts",
    "write_mark",
]

copy_on_write = torch._lazy_clone
"""Share memory until one of the two is written to; `recorded_without_copy` says where that may and can be done."""


def recorded_without_copy(x: torch.Tensor) -> torch.Tensor | None:
    """Give a tensor of its own with the values, strides and memory of x, as a node of the graph behind x.

    The memory is shared copy-on-write: whoever is written to first gets memory of its own, so that an in-place
    operation on the result leaves x as it is (and copies nothing where x is no longer held by anyone).

    Args:
        x: A tensor.

    Returns:
        The same values under another name. None for a parameter (and a view of one): its memory must stay where it
        is. None also where torch cannot do it: memory that it does not own (numpy's, shared memory), layouts that are
        not strided, many subclasses, and complex dtypes while recording.
    """
    base = x._base
    owner = x if base is None else base
    if owner.is_leaf and owner.requires_grad:
        return None
    try:
        return copy_on_write(x)
    except RuntimeError:
        return None


def without_copy(x: torch.Tensor) -> torch.Tensor:
    """Do the same while nothing is recorded, for any tensor.

    Where copy-on-write is not to be had the result is a view. Autograd refuses to overwrite a view that an autograd
    Function has returned, so x is safe there too.

    Args:
        x: A strided tensor.

    Returns:
        The same values under another name.
    """
    shared = recorded_without_copy(x)
    return x.view_as(x) if shared is None else shared


def copy_tensors(destinations: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    """Copy many tensors in one call; half the time of a loop.

    Args:
        destinations: Where to; written in place.
        sources: Where from, in the same order.
    """
    if destinations:
        torch._foreach_copy_(destinations, sources)


add_tensors = torch._foreach_add_
"""Add many tensors to as many others in place, in one call that no interrupt can split."""


# A name of its own and no function around it: it is called in every step.
find_non_finite = torch._amp_foreach_non_finite_check_and_unscale_
"""Set `found`, a float32 tensor of one element, to 1 if any element of any tensor is NaN or infinite.

`find_non_finite(tensors, found, one)` is what GradScaler uses: one fused pass that does not wait for the device and
multiplies by `one` (a float32 tensor that holds 1) in place, so that the values stay as they are, bit for bit. No other
check of many tensors comes near its speed. Tensors that it does not know (sparse, complex, with overlapping memory, on
several devices) are a RuntimeError.
"""


def memory_holders(tensor: torch.Tensor) -> int:
    """Count who holds the memory of a tensor: the tensors that lie in it, whoever has them, and this look at it."""
    holders: int = torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)
    return holders


def write_count(tensor: torch.Tensor) -> int:
    """Count the in-place writes into a tensor that autograd has seen; those of an inference tensor are not counted."""
    try:
        return tensor._version
    except RuntimeError:  # asking `is_inference` first would cost more than the answer
        return 0


def write_counts(tensors: Iterable[torch.Tensor]) -> int:
    """Count the same for several tensors."""
    return sum(map(write_count, tensors))


def write_mark(tensor: torch.Tensor) -> tuple[int, int]:
    """Give a mark of a tensor's memory that changes with in-place writes that autograd sees, and with new memory."""
    return tensor.data_ptr(), write_count(tensor)
