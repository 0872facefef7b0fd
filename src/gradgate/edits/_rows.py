"""The commonest edit of all, whole rows by one index tensor, without the questions that others need."""

from __future__ import annotations

from typing import Any

import torch

from gradgate._torch_compat import is_compiling

__all__ = ["FEW", "named_once", "with_rows"]

FEW = 1024
"""Up to so many entries a Python set is faster than the calls of torch that do the same."""


def with_rows(x: torch.Tensor, index: Any, rows: Any, unique: bool) -> torch.Tensor | None:
    """Give x with other rows, if all is plain and well.

    Args:
        x: The tensor.
        index: Which rows, perhaps.
        rows: What they become, perhaps.
        unique: No row is named twice.

    Returns:
        The new tensor; None if something is wrong or not as usual, so that a closer look is needed.
    """
    if not (isinstance(index, torch.Tensor) and isinstance(rows, torch.Tensor)):
        return None
    if index.dtype is not torch.int64 or index.dim() != 1 or not x.dim() or rows.dtype is not x.dtype:
        return None
    if is_compiling() or not (index.is_cpu and x.is_cpu and rows.is_cpu):
        return None
    count = index.shape[0]
    if rows.shape != (count, *x.shape[1:]):
        return None
    try:
        if not unique and (count > FEW or not named_once(index, x.shape[0])):
            return None
        return x.index_put((index,), rows)
    except (IndexError, RuntimeError):  # out of range; or vmap and FakeTensorMode, which do not give the numbers
        return None


def named_once(index: torch.Tensor, size: int) -> bool:
    """Tell whether few indices of one dimension are of as many places.

    Args:
        index: The indices; in range, or it does not matter what is answered.
        size: The size of the dimension; it matters for negative ones only.

    Returns:
        Whether no place is named twice; -1 and the last are the same.
    """
    named = index.tolist()
    places = set(named)
    if min(places, default=0) < 0:
        places = {place % max(size, 1) for place in places}
    return len(places) == len(named)
