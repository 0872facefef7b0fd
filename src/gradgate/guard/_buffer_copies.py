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
        self._copies = [torch.empty_like(tensor) for tensor in tensors]
        self._plain: list[torch.Tensor]
        self._plain_copies: list[torch.Tensor]
        self._others: list[torch.Tensor]
        self._other_copies: list[torch.Tensor]
        self._lay_out()

    def take(self) -> None:
        """Copy the tensors as they are now."""
        if self._have_moved():
            self._lay_out()
        for copied, seen in self._bytes:
            copied[:] = seen
        if self._others:
            copy_tensors(self._other_copies, self._others)
        for copy, tensor in self._lazy:
            copy.copy_(tensor)

    def put_back(self) -> None:
        """Write into the tensors what was copied last, and let autograd see it."""
        if self._have_moved():
            self._lay_out()
        for copied, seen in self._bytes:
            seen[:] = copied
        increment_version(self._plain)
        if self._others or self._lazy:
            with torch.no_grad():
                copy_tensors(self._others, self._other_copies)
                for copy, tensor in self._lazy:
                    tensor.copy_(copy)

    def _have_moved(self) -> bool:
        """Tell whether somebody gave one of them other memory than it had when they were laid out."""
        return [tensor.data_ptr() for tensor in self._plain] != self._places

    def _lay_out(self) -> None:
        pairs = list(zip(self._copies, self._tensors, strict=True))
        # A conjugate or a negative that is only marked as such cannot be written to together with others.
        self._lazy = [(copy, tensor) for copy, tensor in pairs if tensor.is_conj() or tensor.is_neg()]
        eager = [(copy, tensor) for copy, tensor in pairs if not (tensor.is_conj() or tensor.is_neg())]
        self._plain, self._plain_copies, self._others, self._other_copies = [], [], [], []
        for copy, tensor in eager:
            plain = _lies_plainly(tensor) and copy.dtype is tensor.dtype and copy.nbytes == tensor.nbytes
            (self._plain if plain else self._others).append(tensor)
            (self._plain_copies if plain else self._other_copies).append(copy)
        self._places = [tensor.data_ptr() for tensor in self._plain]
        self._bytes = list(zip(map(_memory_of, self._plain_copies), map(_memory_of, self._plain), strict=True))


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
