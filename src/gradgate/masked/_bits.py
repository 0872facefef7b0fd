"""Elements are taken away: by their bits, or by adding infinity.

By their bits: `((bits of x ^ bits of the value) & mask) ^ bits of the value` does not compute with an element at all,
so that it does not matter what it is. By adding: one step less, for numbers that are finite.
"""

from __future__ import annotations

import torch

from gradgate.masked._valid import Number

__all__ = ["CPU", "LANES", "Bits", "Buffer", "Removal", "filled"]

CPU = torch.device("cpu")  # said wherever memory is taken: torch.set_default_device may say otherwise
LANES = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def filled(x: torch.Tensor, mask: torch.Tensor, value: Number) -> torch.Tensor:
    """Give a new tensor with the values of x where the mask is True, and a value elsewhere.

    Args:
        x: The values, of any shape.
        mask: A boolean mask that broadcasts to it.
        value: What stands for the left-out.

    Returns:
        The filled tensor.
    """
    lane = LANES[x.element_size()]
    bits, ones = x.view(lane), torch.neg(mask.view(torch.int8)).to(lane)  # 1 becomes -1: all bits
    wanted = torch.tensor(value, dtype=x.dtype, device=CPU).view(lane) if value != 0 else None
    bits = bits if wanted is None else bits ^ wanted
    selected = ones.bitwise_and_(bits) if ones.shape == bits.shape else ones & bits
    return (selected if wanted is None else selected.bitwise_xor_(wanted)).view(x.dtype)


class Buffer:
    """Room for one piece of a tensor, used again for the next."""

    def __init__(self, dtype: torch.dtype, size: int) -> None:
        self._dtype, self._size = dtype, size
        self._shaped: torch.Tensor | None = None

    def of(self, shape: torch.Size) -> torch.Tensor:
        if self._shaped is None:
            self._flat = torch.empty(self._size, dtype=self._dtype, device=CPU)
        if self._shaped is None or self._shaped.shape != shape:
            self._shaped = self._flat[: shape.numel()].view(shape)
        return self._shaped


class Bits:
    """Selects elements of a dtype by their bits, with one value for those that are left out."""

    def __init__(self, x: torch.Tensor, value: Number, size: int) -> None:
        self._lane = LANES[x.element_size()]
        self._value = torch.tensor(value, dtype=x.dtype, device=CPU).view(self._lane) if value != 0 else None
        self._signed, self._changed = Buffer(torch.int8, size), Buffer(self._lane, size)

    def select(self, source: torch.Tensor, kept: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """Write what is kept of the source, and the value for the rest, to out (which is not the source)."""
        bits, written = source.view(self._lane), out.view(self._lane)
        written.copy_(torch.neg(kept.view(torch.int8), out=self._signed.of(kept.shape)))  # 1 becomes -1: all bits
        if self._value is None:
            written.bitwise_and_(bits)
        else:
            changed = torch.bitwise_xor(bits, self._value, out=self._changed.of(bits.shape))
            written.bitwise_and_(changed).bitwise_xor_(self._value)
        return out


class Removal:
    """Moves what is left out to infinity by one addition; what is NaN or infinite itself may stay that."""

    def __init__(self, x: torch.Tensor, limit: float, size: int) -> None:
        # 4 times the largest number is beyond all that can be held, also after any other was added to it.
        self._step, self._away = torch.finfo(x.dtype).min, 4 if limit < 0 else -4
        self._steps = torch.tensor(self._away, dtype=torch.int8, device=CPU)
        self._times = Buffer(torch.int8, size)

    def select(self, source: torch.Tensor, kept: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """Write what is kept of the source, and the limit for the rest, to out (which is not the source)."""
        times = torch.sub(self._steps, kept.view(torch.int8), alpha=self._away, out=self._times.of(kept.shape))
        # A step is negative, so that no steps are -0.0, which added to anything changes nothing.
        return torch.add(source, out.copy_(times), alpha=self._step, out=out)
