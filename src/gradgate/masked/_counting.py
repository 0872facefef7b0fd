"""How many are kept: the bytes of a mask added eight at a time.

A bool is a byte of 0 or 1. Eight of them are a 64-bit integer, and adding those adds all eight bytes at once, as long
as no byte goes beyond 255. That is five to twenty times faster than torch counts bools, or adds up bytes as integers.
"""

from __future__ import annotations

import torch

__all__ = ["count", "count_all"]

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
    if mask.numel() == 0 or not mask.is_contiguous():
        return None
    kept = mask.view(torch.uint8)
    if outer == inner == 1:
        return count_all(kept.view(-1)).view(1, 1)
    if mask.storage_offset() % WORD:
        return None
    if inner % WORD == 0:
        return _added(kept.view(torch.int64))
    if inner == 1 and reduced % WORD == 0:
        return _added(kept.view(outer, -1, WORD).view(torch.int64)).sum(1, keepdim=True)
    return None


def count_all(kept: torch.Tensor) -> torch.Tensor:
    """Count the ones among zeros and ones.

    Args:
        kept: Bytes, 1-D.

    Returns:
        Their number, int64, 0-dim.
    """
    kept = kept.contiguous()
    first = -kept.storage_offset() % WORD  # where the first whole word is
    columns = (len(kept) - first) // (MOST * WORD)
    if columns < 1:
        return kept.sum()
    last = first + columns * MOST * WORD
    # As long rows above each other: then many words are added by one instruction.
    added = kept[first:last].view(torch.int64).view(MOST, columns).sum(0)
    return added.view(torch.uint8).sum(dtype=torch.int32) + kept[:first].sum() + kept[last:].sum()


def _added(words: torch.Tensor) -> torch.Tensor:
    """Add up each byte of the words (outer, reduced, inner) over the middle dimension."""
    groups = words.shape[1] // MOST
    found = words[:, groups * MOST :].sum(1).view(torch.uint8).long()
    if groups:
        whole = words[:, : groups * MOST].reshape(len(words), groups, MOST, -1).sum(2)
        found += whole.view(torch.uint8).sum(1, dtype=torch.int32)
    return found
