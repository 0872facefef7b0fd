"""A cheap checksum that finds any movement, and says which element it was.

Values are read as integers. Each block of 32 gives a sum of word times weight, modulo 2**64, with odd weights of 64
bits that differ from place to place: a single word that changed always changes its sum, because an odd weight has an
inverse, and several cancel as rarely as random numbers do. If a sum differs, each word of its block is asked whether
it alone explains the difference; the one that does is named, with the value it had. Words of 32 bits are told apart by
one sum, since a change beyond 32 bits is none; words of 64 bits need two, and are mixed first, or a changed sign would
look the same at every place. For float32 it is a sixteenth of a copy.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from gradgate import _kernels

__all__ = ["Fingerprint", "Moved", "fingerprint"]

_BLOCK = 32  # words in a block
_STRETCH = 2**15  # words at a time, so that the products stay in the cache
_SIZE = 2**64
_MIX = 0x2545_F491_4F6C_DD1D  # any odd number with its bits well spread


@dataclass(frozen=True)
class Moved:
    """The first movement: the elements first to last hold it, one element where it could be told.

    Attributes:
        first: The number of the first element that may have moved.
        last: The number of the last one that belongs to the same block.
        before: The value it had, where a single element moved.
    """

    first: int
    last: int
    before: float | complex | None


@dataclass(frozen=True)
class Fingerprint:
    """The sums of each block, and what they were taken of."""

    sums: torch.Tensor
    dtype: torch.dtype
    count: int

    def moved(self, values: torch.Tensor) -> Moved | None:
        """Find the first element that is not what it was.

        Args:
            values: The values of now, as many as then and of the same dtype.

        Returns:
            Where it is; None if nothing moved.
        """
        now = fingerprint(values).sums
        then = self.sums.to(now.device)
        wrong = (now != then).any(dim=0).nonzero()
        if not len(wrong):
            return None
        block = int(wrong[0])
        words = _words(values)
        start, stop = block * _BLOCK, min((block + 1) * _BLOCK, words.numel())
        per_element = max(1, values.element_size() // 8)
        alone = _alone((now[:, block] - then[:, block]).tolist(), stop - start)
        if alone is None:
            return Moved(start // per_element, (stop - 1) // per_element, None)
        word, change = alone
        element, part = divmod(start + word, per_element)
        return Moved(element, element, _value_before(values, element, part, change))


def fingerprint(values: torch.Tensor) -> Fingerprint:
    """Take the fingerprint of values.

    Args:
        values: Any tensor; its elements are read in order.

    Returns:
        The fingerprint, on the device of the values; nothing waits for that device.
    """
    words = _words(values)
    rows = 1 if values.element_size() <= 4 else 2
    weights = _weights()[:rows]
    if _kernels.usable(words):
        return Fingerprint(_kernels.checksums(words, weights, _BLOCK), values.dtype, values.numel())
    weights = weights.to(words.device)
    sums = torch.zeros(rows, -(-words.numel() // _BLOCK), dtype=torch.int64, device=words.device)
    for start in range(0, words.numel(), _STRETCH):
        stretch = _mixed(words[start : start + _STRETCH])
        if len(stretch) % _BLOCK:
            stretch = torch.nn.functional.pad(stretch, (0, -len(stretch) % _BLOCK))
        stretch = stretch.view(-1, _BLOCK)
        for row in range(rows):
            place = sums[row, start // _BLOCK : start // _BLOCK + len(stretch)]
            torch.sum(stretch * weights[row], 1, out=place)
    return Fingerprint(sums, values.dtype, values.numel())


def _words(values: torch.Tensor) -> torch.Tensor:
    """Read values as integers as wide as they are, 64 bits at most."""
    flat = values.detach().contiguous().view(-1)
    return flat.view({1: torch.int8, 2: torch.int16, 4: torch.int32}.get(values.element_size(), torch.int64))


def _mixed(words: torch.Tensor) -> torch.Tensor:
    """Give words as 64 bits; full ones are mixed, so that their high bits show in the low ones."""
    if words.dtype is not torch.int64:
        return words.to(torch.int64)
    return _fold(words * _MIX)


def _fold(words: torch.Tensor) -> torch.Tensor:
    """Fold the high half into the low half; done twice it undoes itself."""
    return words ^ ((words >> 32) & 0xFFFF_FFFF)


def _weights() -> torch.Tensor:
    generator = torch.Generator().manual_seed(0x6761_7465)
    limits = torch.iinfo(torch.int64)
    return torch.randint(limits.min, limits.max, (2, _BLOCK), generator=generator, dtype=torch.int64) | 1


def _alone(differences: list[int], words: int) -> tuple[int, int] | None:
    """Find the one word whose change explains every difference, and that change."""
    weights = _weights().tolist()
    for word in range(words):
        changes = {d * pow(weights[row][word], -1, _SIZE) % _SIZE for row, d in enumerate(differences)}
        change = changes.pop()
        if not changes and (len(differences) > 1 or min(change, _SIZE - change) < 2**32):
            return word, change
    return None


def _value_before(values: torch.Tensor, element: int, part: int, change: int) -> float | complex:
    """Take the change of one word back from its element."""
    raw = values.detach().contiguous().view(-1)[element : element + 1].cpu().clone()
    words = _words(raw)
    old = torch.tensor([_signed(int(_mixed(words)[part]) - change)])
    words[part] = (_fold(old) * _signed(pow(_MIX, -1, _SIZE)) if words.dtype is torch.int64 else old)[0]
    return raw.item()


def _signed(number: int) -> int:
    """Give a number modulo 2**64 as torch's int64 has it."""
    return (number + _SIZE // 2) % _SIZE - _SIZE // 2
