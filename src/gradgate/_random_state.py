"""The random state of a process: python's, numpy's and torch's on every device in use, taken and put back.

Taking it must be nearly free, because it happens in every step. torch clones a generator in a microsecond, but
python's `random.getstate()` takes ten and numpy's forty, since they build objects for 624 numbers. In most programs
neither has moved since the last step. Both keep their numbers in one block of memory of which every draw changes a
known part, so that part is looked at, and the state is taken only if it has changed. Where the block does not look as
expected (checked once, against the official state), the state is taken each time.
"""

from __future__ import annotations

import ctypes
import random
import struct
import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch

__all__ = ["RandomState"]

TWISTER_WORDS = 624
Mark = tuple[Any, ...]


class RandomState:
    """Remembers all random states of the process and puts them back.

    Args:
        devices: The devices besides the CPU that draw random numbers.
    """

    def __init__(self, devices: Iterable[torch.device] = ()) -> None:
        self._torch = torch.default_generator.clone_state()
        self._taken: torch.Tensor | None = None
        self._python = _PythonState()
        self._numpy = _NumpyState()
        self._devices: list[tuple[Any, torch.device]] = []
        self._of_devices: list[torch.Tensor] = []
        self.watch(devices)

    def watch(self, devices: Iterable[torch.device]) -> None:
        """Say which devices besides the CPU draw random numbers."""
        others = dict.fromkeys(device for device in devices if device.type not in ("cpu", "meta"))
        self._devices = [(torch.get_device_module(device), device) for device in others]

    def remember(self) -> None:
        """Take the state as it is now."""
        self._torch, self._taken = torch.default_generator.clone_state(), None
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
        if self._taken is None:
            self._taken = self._torch.get_state()
        torch.default_generator.set_state(self._taken)
        for (module, device), state in zip(self._devices, self._of_devices, strict=True):
            module.set_rng_state(state, device)


class _PythonState:
    """The state of the functions in python's `random`."""

    def __init__(self) -> None:
        # random.random() and its like are methods of this one object; there is no public name for it.
        self._owner: random.Random = random.random.__self__  # type: ignore[attr-defined]
        # In CPython: an int that each draw moves on, then the words, which change when it has come round.
        self._draws = _memory(id(self._owner) + object.__basicsize__, 12)
        self._readable = self._block_is_the_state()
        self._state = self._owner.getstate()
        self._mark: Mark = ()
        self.remember()

    def _block_is_the_state(self) -> bool:
        if sys.implementation.name != "cpython" or type(self._owner) is not random.Random:
            return False
        if random.Random.__basicsize__ < object.__basicsize__ + 4 * (TWISTER_WORDS + 1):
            return False
        numbers = self._owner.getstate()[1]
        return self._draws.tobytes() == struct.pack("=i2I", numbers[-1], *numbers[:2])

    def _look(self) -> Mark:
        if not self._readable:
            return ()
        return self._draws.tobytes(), self._owner.gauss_next  # type: ignore[attr-defined]

    def remember(self) -> None:
        mark = self._look()
        if mark != self._mark or not mark:
            self._state, self._mark = self._owner.getstate(), mark

    def restore(self) -> None:
        if not self._mark or self._look() != self._mark:
            self._owner.setstate(self._state)


class _NumpyState:
    """The state of the functions in `numpy.random`, if numpy is there."""

    def __init__(self) -> None:
        self._current: Callable[[], Any] | None = None
        self._generator: Any = None
        self._draws: tuple[memoryview, ...] = ()
        self._state: dict[str, Any] = {}
        self._mark = b""
        self.remember()

    def remember(self) -> None:
        if self._current is None:
            if "numpy" not in sys.modules:
                return
            self._current = sys.modules["numpy"].random.get_bit_generator
        mark = self._look()
        # A normal draw may be answered from a stored second value, which moves nothing; while there is one, or where
        # there is nothing to look at, only the state itself can tell.
        if mark != self._mark or not mark or self._state["has_gauss"]:
            self._state, self._mark = sys.modules["numpy"].random.get_state(legacy=False), mark

    def restore(self) -> None:
        if self._current is None:
            return
        # With no second value stored, every draw moves the mark: the same mark is the same state.
        if not self._mark or self._state["has_gauss"] or self._look() != self._mark:
            sys.modules["numpy"].random.set_state(self._state)

    def _look(self) -> bytes:
        assert self._current is not None
        generator = self._current()
        if generator is not self._generator:
            known = type(generator).__name__ == "MT19937"
            # In numpy: the words, which change when all are drawn, then an int that each draw moves on.
            address = generator.ctypes.state_address if known else 0
            self._draws = (_memory(address, 8), _memory(address + 4 * TWISTER_WORDS, 4)) if known else ()
            self._generator = generator
        return b"".join(self._draws)


def _memory(address: int, size: int) -> memoryview:
    return memoryview((ctypes.c_char * size).from_address(address)).cast("B")
