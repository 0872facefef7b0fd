"""Copies of buffers, taken before every step and put back after a fault.

Buffers are small and many: a BatchNorm has three. To find the right kernel for each takes torch far longer than the
copying, so what lies in the CPU's memory without gaps is copied as bytes.
"""

from __future__ import annotations

import ctypes

import torch

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
        self._lay_out()

    def take(self) -> None:
        """Copy the tensors as they are now."""
        if [tensor.data_ptr() for tensor in self._plain] != self._places:
            self._lay_out()  # somebody gave them other memory
        for copy, tensor in self._bytes:
            copy[:] = tensor
        if self._others:
            _copy_all(self._others)

    def put_back(self) -> None:
        """Write into the tensors what was copied last."""
        with torch.no_grad():
            _copy_all(list(zip(self._tensors, self._copies, strict=True)))

    def _lay_out(self) -> None:
        pairs = list(zip(self._copies, self._tensors, strict=True))
        plain = [pair for pair in pairs if _lies_plainly(pair[1])]
        self._others = [pair for pair in pairs if not _lies_plainly(pair[1])]
        self._plain = [tensor for _, tensor in plain]
        self._places = [tensor.data_ptr() for tensor in self._plain]
        self._bytes = [(_memory_of(copy), _memory_of(tensor)) for copy, tensor in plain]


def _copy_all(pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Copy to the first of each pair from the second, in one call as far as that is possible."""
    lazy = [pair for pair in pairs if any(tensor.is_conj() or tensor.is_neg() for tensor in pair)]
    for destination, source in lazy:
        destination.copy_(source)
    others = [pair for pair in pairs if not any(pair is other for other in lazy)]
    copy_tensors([destination for destination, _ in others], [source for _, source in others])


def _lies_plainly(tensor: torch.Tensor) -> bool:
    return (
        type(tensor) is torch.Tensor
        and tensor.is_cpu
        and tensor.layout is torch.strided
        and tensor.is_contiguous()
        and tensor.numel() > 0
        and not (tensor.is_conj() or tensor.is_neg())
    )


def _memory_of(tensor: torch.Tensor) -> memoryview:
    """Give the memory that a tensor lies in: good as long as the tensor lives and lies there."""
    return memoryview((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")
