"""A cheap checksum that finds any movement, and says which element it was.

Values are read as words of 32 bits (64 for the wider types). Each block of words gives two sums of word times weight,
modulo 2**32 (2**64), with odd weights that differ from place to place: a single word that changed always changes both
sums, because an odd weight has an inverse. Two words for 32: a sixteenth of a copy. If a sum differs, each word of its
block is asked whether it alone explains both differences; the one that does is named, with the value it had.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

__all__ = ["Fingerprint", "Moved", "fingerprint"]

_BLOCK = 32  # words in a block
_STRETCH = 2**16  # words at a time, so that the products stay in the cache


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
        differences = [int(d) for d in (now[:, block] - then[:, block]).tolist()]
        words = _words(values)
        start, stop = block * _BLOCK, min((block + 1) * _BLOCK, words.numel())
        alone = _alone(differences, stop - start, _sum_dtype(values))
        in_element = max(1, values.element_size() // 8)
        if alone is None:
            return Moved(start // in_element, (stop - 1) // in_element, None)
        word, change = alone
        element = (start + word) // in_element
        return Moved(element, element, _value_before(values, element, (start + word) % in_element, change))


def fingerprint(values: torch.Tensor) -> Fingerprint:
    """Take the fingerprint of values.

    Args:
        values: Any floating or complex tensor; its elements are read in order.

    Returns:
        The fingerprint, on the device of the values; nothing waits for that device.
    """
    words = _words(values)
    dtype = _sum_dtype(values)
    weights = _weights(dtype).to(words.device)
    blocks = -(-words.numel() // _BLOCK)
    sums = torch.zeros(2, blocks, dtype=dtype, device=words.device)
    for start in range(0, words.numel(), _STRETCH):
        stretch = words[start : start + _STRETCH].to(dtype)
        if len(stretch) % _BLOCK:
            stretch = torch.nn.functional.pad(stretch, (0, -len(stretch) % _BLOCK))
        stretch = stretch.view(-1, _BLOCK)
        for number in range(2):
            place = sums[number, start // _BLOCK : start // _BLOCK + len(stretch)]
            torch.sum(stretch * weights[number], 1, dtype=dtype, out=place)
    return Fingerprint(sums, values.dtype, values.numel())


def _words(values: torch.Tensor) -> torch.Tensor:
    """Read values as integers as wide as they are, 64 bits at most."""
    flat = values.detach().contiguous().view(-1)
    return flat.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}.get(values.element_size(), torch.int64))


def _sum_dtype(values: torch.Tensor) -> torch.dtype:
    return torch.int32 if values.element_size() <= 4 else torch.int64


def _weights(dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0x6761_7465)
    limits = torch.iinfo(dtype)
    return torch.randint(limits.min, limits.max, (2, _BLOCK), generator=generator, dtype=dtype) | 1


def _alone(differences: list[int], words: int, dtype: torch.dtype) -> tuple[int, int] | None:
    """Find the one word whose change explains both differences, and that change."""
    weights, size = _weights(dtype).tolist(), 2 ** torch.iinfo(dtype).bits
    for word in range(words):
        changes = {
            difference * pow(weights[number][word], -1, size) % size for number, difference in enumerate(differences)
        }
        if len(changes) == 1:
            return word, changes.pop()
    return None


def _value_before(values: torch.Tensor, element: int, word: int, change: int) -> float | complex:
    """Take a change of one word back from the element."""
    raw = values.detach().contiguous().view(-1)[element : element + 1].cpu().clone()
    words = _words(raw)
    bits = 8 * words.element_size()
    old = (int(words[word]) - change) % 2**bits
    if words.dtype is not torch.uint8 and old >= 2 ** (bits - 1):
        old -= 2**bits
    words[word] = old
    return raw.item()
