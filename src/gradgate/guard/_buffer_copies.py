"""Copies of buffers, taken before every step and put back after a fault.

Buffers are small and many: a BatchNorm has three. To find the right kernel for each takes torch far longer than the
copying, so what lies in the CPU's memory without gaps is copied as bytes.
"""

from __future__ import annotations

import ctypes

import torch
from torch.autograd.graph import increment_version

from gradgate._torch_compat import copy_tensors

__all__ = ["BufferCopies"]


class BufferCopies:
    """Copies of some tensors.

    Args:
        tensors: The tensors; no element of them lies in memory twice.
    """

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        self._tensors = tensors
        # What is sparse needs a copy with the same elements, not only of the same shape.
        self._copies = [torch.empty_like(t) if t.layout is torch.strided else t.detach().clone() for t in tensors]
        self._lay_out()

    def take(self) -> None:
        """Copy the tensors as they are now."""
        for tensor, place, seen, copied in self._plain:
            if tensor.data_ptr() != place:  # somebody gave it other memory, and perhaps another shape
                pairs = zip(self._copies, self._tensors, strict=True)
                self._copies = [copy if _alike(copy, tensor) else torch.empty_like(tensor) for copy, tensor in pairs]
                self._lay_out()
                self.take()
                return
            copied[:] = seen
        if self._others:
            copy_tensors(self._other_copies, self._others)
        for copy, tensor in self._lazy:
            copy.copy_(tensor)

    def put_back(self) -> None:
        """Write into the tensors what was copied last, and let autograd see it."""
        for tensor, place, seen, copied in self._plain:
            if tensor.data_ptr() != place:
                for copy, other in zip(self._copies, self._tensors, strict=True):
                    if not _alike(copy, other):
                        other.data = copy.clone()
                self._lay_out()
                self.put_back()
                return
            seen[:] = copied
        increment_version([tensor for tensor, *_ in self._plain])
        if self._others or self._lazy:
            with torch.no_grad():
                copy_tensors(self._others, self._other_copies)
                for copy, tensor in self._lazy:
                    tensor.copy_(copy)

    def _lay_out(self) -> None:
        plain: list[tuple[torch.Tensor, int, memoryview, memoryview]] = []
        others: list[torch.Tensor] = []
        other_copies: list[torch.Tensor] = []
        lazy: list[tuple[torch.Tensor, torch.Tensor]] = []
        for copy, tensor in zip(self._copies, self._tensors, strict=True):
            if tensor.layout is not torch.strided or tensor.is_conj() or tensor.is_neg():
                # Sparse, or only marked as such, it cannot be written to together with others.
                lazy.append((copy, tensor))
            elif _lies_plainly(tensor) and copy.dtype is tensor.dtype and copy.nbytes == tensor.nbytes:
                plain.append((tensor, tensor.data_ptr(), _memory_of(tensor), _memory_of(copy)))
            else:
                others.append(tensor)
                other_copies.append(copy)
        self._plain, self._others, self._other_copies, self._lazy = plain, others, other_copies, lazy


def _alike(copy: torch.Tensor, tensor: torch.Tensor) -> bool:
    return copy.shape == tensor.shape and copy.dtype is tensor.dtype


def _lies_plainly(tensor: torch.Tensor) -> bool:
    return (
        type(tensor) is torch.Tensor
        and tensor.is_cpu
        and tensor.layout is torch.strided
        and tensor.is_contiguous()
        and tensor.numel() > 0
    )


def _memory_of(tensor: torch.Tensor) -> memoryview:
    """Give the memory that a tensor lies in: good as long as the tensor lives and lies there."""
    return memoryview((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")
