"""How many are kept: the bytes of a mask added eight at a time.

A bool is a byte of 0 or 1. Eight of them are a 64-bit integer, and adding those adds all eight bytes at once, as long
as no byte goes beyond 255. That is five to twenty times faster than torch counts bools, or adds up bytes as integers.
"""

from __future__ import annotations

import torch

__all__ = ["count"]

MOST = 255  # what a byte can count to
WORD = 8


def count(mask: torch.Tensor) -> torch.Tensor | None:
    """Count what is kept, where the mask lies in memory such that eight bytes can be read at once.

    Args:
        mask: A boolean mask on the CPU, (outer, reduced, inner).

    Returns:
        The numbers, int64 of shape (outer, inner); None for a mask that has to be counted in another way.
    """
    outer, reduced, inner = mask.shape
    if mask.numel() == 0 or not mask.is_contiguous() or mask.storage_offset() % WORD:
        return None
    kept = mask.view(torch.uint8)
    if inner % WORD == 0:
        return _added(kept.view(torch.int64))
    if inner > 1 or reduced < WORD or (outer > 1 and reduced % WORD):
        return None
    rest = reduced % WORD  # only a single slice can have one: the next slice would not start at a whole word
    found = _added(kept[:, : reduced - rest].view(outer, -1, WORD).view(torch.int64)).sum(1, keepdim=True)
    return found + kept[:, reduced - rest :].sum() if rest else found


def _added(words: torch.Tensor) -> torch.Tensor:
    """Add up each byte of the words (outer, reduced, inner) over the middle dimension."""
    groups = words.shape[1] // MOST
    found = words[:, groups * MOST :].sum(1).view(torch.uint8).long()
    if groups:
        whole = words[:, : groups * MOST].reshape(len(words), groups, MOST, -1).sum(2)
        found += whole.view(torch.uint8).sum(1, dtype=torch.int32)
    return found
