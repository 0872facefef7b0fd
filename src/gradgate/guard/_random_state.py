"""The random state of a process: python's, numpy's and torch's on every device in use, taken and put back.

Taking it must be nearly free, because it happens in every step. torch's own state costs a microsecond; python's
`random.getstate()` costs ten and numpy's forty, since they build objects for 624 numbers. Both keep these numbers in
one block of memory, so that block is copied instead and turned into objects only when it has to be put back. Where
the block does not look as expected (checked once, against the official state), the official way is used.
"""

from __future__ import annotations

import ctypes
import random
import struct
import sys
from collections.abc import Iterable
from typing import Any

import torch

__all__ = ["RandomState"]

TWISTER_WORDS = 624
PYTHON_BLOCK = struct.Struct(f"i{TWISTER_WORDS}I")  # place, then words
NUMPY_BLOCK = struct.Struct(f"{TWISTER_WORDS}Ii")  # words, then place


class RandomState:
    """Remembers all random states of the process and puts them back.

    Args:
        devices: The devices besides the CPU that draw random numbers.
    """

    def __init__(self, devices: Iterable[torch.device] = ()) -> None:
        self._python = _PythonState()
        self._numpy = _NumpyState()
        self._devices: list[tuple[Any, torch.device]] = []
        self._of_devices: list[torch.Tensor] = []
        self._torch = torch.default_generator.get_state()
        self.watch(devices)

    def watch(self, devices: Iterable[torch.device]) -> None:
        """Say which devices besides the CPU draw random numbers."""
        others = dict.fromkeys(device for device in devices if device.type not in ("cpu", "meta"))
        self._devices = [(torch.get_device_module(device), device) for device in others]

    def remember(self) -> None:
        """Take the state as it is now."""
        self._torch = torch.default_generator.get_state()
        self._python.remember()
        self._numpy.remember()
        if self._devices:
            self._of_devices = [module.get_rng_state(device) for module, device in self._devices]

    def restore(self) -> None:
        """Put back the state that was remembered, as often as wanted."""
        self.restore_torch()
        self._python.restore()
        self._numpy.restore()

    def restore_torch(self) -> None:
        """Put back torch's own part of it."""
        torch.default_generator.set_state(self._torch)
        for (module, device), state in zip(self._devices, self._of_devices, strict=True):
            module.set_rng_state(state, device)


class _PythonState:
    """The state of the functions in python's `random`."""

    def __init__(self) -> None:
        # random.random() and its like are methods of this one object; there is no public name for it.
        self._owner: random.Random = random.random.__self__  # type: ignore[attr-defined]
        self._address = id(self._owner) + object.__basicsize__
        self._readable = self._block_is_the_state()
        self._state: tuple[Any, ...] | None = None
        self._block = b""
        self._gauss: float | None = None
        self.remember()

    def _block_is_the_state(self) -> bool:
        if sys.implementation.name != "cpython" or type(self._owner) is not random.Random:
            return False
        if random.Random.__basicsize__ < object.__basicsize__ + PYTHON_BLOCK.size:
            return False
        return bool(_python_numbers(self._read()) == self._owner.getstate()[1])

    def _read(self) -> bytes:
        return ctypes.string_at(self._address, PYTHON_BLOCK.size)

    def remember(self) -> None:
        if self._readable:
            self._block = self._read()
            self._gauss = self._owner.gauss_next  # type: ignore[attr-defined]
        else:
            self._state = self._owner.getstate()

    def restore(self) -> None:
        if not self._readable:
            assert self._state is not None
            self._owner.setstate(self._state)
        elif self._read() != self._block or self._owner.gauss_next != self._gauss:  # type: ignore[attr-defined]
            self._owner.setstate((self._owner.VERSION, _python_numbers(self._block), self._gauss))


class _NumpyState:
    """The state of the functions in `numpy.random`, if numpy is there."""

    def __init__(self) -> None:
        self._block = b""
        self._state: dict[str, Any] | None = None
        self.remember()

    def remember(self) -> None:
        if "numpy" not in sys.modules:
            return
        block = _numpy_block()
        # A normal draw may be answered from a stored second value without touching the block; while there is one,
        # or where there is no block to compare, only the full state can tell.
        if self._state is None or not block or block != self._block or self._state.get("has_gauss"):
            self._state = sys.modules["numpy"].random.get_state(legacy=False)
            self._block = block

    def restore(self) -> None:
        if self._state is None:
            return
        # With no second value stored, every draw moves the block: the same block is the same state.
        if not self._block or self._state["has_gauss"] or _numpy_block() != self._block:
            sys.modules["numpy"].random.set_state(self._state)


def _python_numbers(block: bytes) -> tuple[int, ...]:
    place, *words = PYTHON_BLOCK.unpack(block)
    return (*words, place)


def _numpy_block() -> bytes:
    """Copy the numbers of numpy's global generator; nothing where it is not the usual one."""
    generator = sys.modules["numpy"].random.get_bit_generator()
    if type(generator).__name__ != "MT19937":
        return b""
    return ctypes.string_at(generator.ctypes.state_address, NUMPY_BLOCK.size)
