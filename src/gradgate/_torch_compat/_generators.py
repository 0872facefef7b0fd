"""Where torch's generators of the CPU count their draws, so that a look tells whether there was one."""

from __future__ import annotations

import ctypes
import struct
from functools import cache

import torch

from gradgate._torch_compat._modes import undispatched

__all__ = ["draws_of"]

# The seed, how many draws are left of this round, whether there is a seed, the next word, and the first two words.
COUNT = struct.Struct("=Qi?3xI2I")
PUBLIC_COUNT = struct.Struct("=QiiQ2Q")  # the same in the state that torch gives
WORDS = 624
# Behind the words: a second normal number that waits to be drawn, as a float and as a double.
WAITING = struct.Struct("=4xf?3xd?")
PUBLIC_WAITING = struct.Struct("=8xd8xi4xf?")


def draws_of(generator: torch.Generator) -> tuple[memoryview, memoryview] | None:
    """Give the memory of a generator of the CPU that every draw changes, and every seed that is not the same state.

    Args:
        generator: The generator, which must live as long as its memory is looked at.

    Returns:
        The count with the first words (which are others in each round), and the normal number that waits; None where
        torch does not keep them as expected.
    """
    start = _start()
    return None if start is None else _memory(generator, start)


def _memory(generator: torch.Generator, start: int) -> tuple[memoryview, memoryview]:
    count = _address(generator) + start
    return _view(count, COUNT.size), _view(count + COUNT.size + 4 * (WORDS - 2), WAITING.size)


def _address(generator: torch.Generator) -> int:
    address: int = generator._cdata  # type: ignore[attr-defined]
    return address


def _view(address: int, size: int) -> memoryview:
    return memoryview((ctypes.c_char * size).from_address(address)).cast("B")


@cache
def _start() -> int | None:
    """Find where the count begins, in a generator of its own, and make sure that it moves as the public state does."""
    generator = torch.Generator("cpu").manual_seed(2**40 + 1)
    start = _view(_address(generator), 256).tobytes().find(struct.pack("=Q", generator.initial_seed()))
    if start < 0:
        return None
    count, waiting = _memory(generator, start)
    with undispatched():
        for drawn in (0, 1, 1, 700, 1):  # one normal number makes another wait, which is drawn next
            torch.empty(drawn, dtype=torch.float64, device="cpu").normal_(generator=generator)
            single, single_waits, double, double_waits = WAITING.unpack(waiting)
            if _told(generator) != (*COUNT.unpack(count), single_waits and single, double_waits and double):
                return None
    return start


def _told(generator: torch.Generator) -> tuple[float, ...]:
    """Read the count and what waits off the public state."""
    state = bytes(generator.get_state().tolist())
    double, double_waits, single, single_waits = PUBLIC_WAITING.unpack_from(state, PUBLIC_COUNT.size + 8 * (WORDS - 2))
    return (*PUBLIC_COUNT.unpack_from(state), single_waits and single, double_waits and double)
