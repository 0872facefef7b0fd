"""The commonest edit of all, whole rows by one index tensor, without the questions that others need."""

from __future__ import annotations

from typing import Any

import torch

from gradgate import _kernels

__all__ = ["with_rows"]


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
    if rows.shape != (index.shape[0], *x.shape[1:]) or not _kernels.usable(index):
        return None
    if not unique and _kernels.repeats(index, x.shape[0]):
        return None
    try:
        return x.index_put((index,), rows)
    except (IndexError, RuntimeError):  # out of range, or on several devices
        return None
