"""Numbers for what tensors hold, so that the flow of values can be followed without keeping the tensors alive."""

from __future__ import annotations

import weakref
from contextlib import suppress

import torch

from gradgate.doctor._trace import Root, Trace

_SMALL = 64


class Values:
    """Knows the value of each tensor that the tracer has met.

    A tensor is known by its identity. Autograd gives views a new identity on their way up, so the result of a view is
    also known by its memory, shape, strides and whether it is connected.
    """

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self._next = 0
        self._by_identity: dict[int, tuple[weakref.ref[torch.Tensor], int]] = {}
        self._by_memory: dict[tuple[int, torch.Size, tuple[int, ...], bool], int] = {}
        self._latest_write: dict[int, int] = {}
        self.unconnected: set[int] = set()

    def read(self, tensor: torch.Tensor, codes: list[int]) -> None:
        """Write down that an operation reads a tensor."""
        known = self._by_identity.get(id(tensor))
        connected = tensor.requires_grad
        value = known[1] if known is not None and known[0]() is tensor else self._adopt(tensor, connected)
        codes.append(2 * value + connected)
        if connected and value in self.unconnected:
            # Made where autograd does not look, and yet connected: a Function's result, or a leaf made of it.
            self.unconnected.discard(value)
            if tensor.grad_fn is not None:
                self.trace.rejoined[value] = tensor.grad_fn
            elif not tensor._is_view():  # a view of a leaf, made inside no_grad, only looks like a leaf
                self._add_root(tensor, value)
        if self._latest_write:
            write = self._latest_write.get(_storage_of(tensor))
            if write is not None and write > value:
                codes.append(2 * write + connected)

    def of(self, tensor: torch.Tensor) -> int:
        """Give the value that a tensor holds now."""
        codes: list[int] = []
        self.read(tensor, codes)
        return codes[-1] >> 1

    def make(self, tensor: torch.Tensor) -> int:
        """Give a new value to a tensor."""
        value = self._next
        self._next = value + 1
        self._by_identity[id(tensor)] = (weakref.ref(tensor), value)
        return value

    def make_view(self, tensor: torch.Tensor, connected: bool) -> int:
        """Give a new value to the result of a view, which will come back under another identity."""
        value = self.make(tensor)
        # A tensor without memory of this kind is known by its identity alone.
        with suppress(RuntimeError, NotImplementedError):
            self._by_memory[tensor.data_ptr(), tensor.shape, tensor.stride(), connected] = value
        return value

    def write(self, tensor: torch.Tensor) -> int:
        """Give a new value to a tensor that was written to, and let everything that shares its memory know."""
        value = self.make(tensor)
        self._latest_write[_storage_of(tensor)] = value
        return value

    def _adopt(self, tensor: torch.Tensor, connected: bool) -> int:
        try:
            value = self._by_memory.get((tensor.data_ptr(), tensor.shape, tensor.stride(), connected))
        except (RuntimeError, NotImplementedError):
            value = None
        if value is None:
            value = self._next
            self._next = value + 1
            self._add_root(tensor, value)
        self._by_identity[id(tensor)] = (weakref.ref(tensor), value)
        return value

    def _add_root(self, tensor: torch.Tensor, value: int) -> None:
        leaf, connected, inference = tensor.is_leaf, tensor.requires_grad, tensor.is_inference()
        keep = leaf and (connected or inference or tensor.numel() <= _SMALL)
        self.trace.roots[value] = Root(
            tensor if keep else None, id(tensor), leaf, connected, inference, tuple(tensor.shape)
        )


def _storage_of(tensor: torch.Tensor) -> int:
    try:
        return tensor.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):
        return 0
