"""In which rows is something not finite: asked of losses and the outputs of modules."""

from __future__ import annotations

from collections.abc import Iterable
from math import isfinite
from typing import Any

import torch

from gradgate._torch_compat import tree_flatten
from gradgate.guard._batches import batch_dim_of

__all__ = ["leaves_in", "non_finite_rows", "tensors_in"]


def leaves_in(tree: Any) -> list[Any]:
    """List the leaves of arguments or of an output, in most cases without the cost of looking for containers."""
    if isinstance(tree, torch.Tensor):
        return [tree]
    parts = tree.values() if type(tree) is dict else tree
    if type(tree) in (tuple, list, dict) and all(isinstance(part, torch.Tensor) for part in parts):
        return list(parts)
    return tree_flatten(tree)[0]


def tensors_in(tree: Any) -> list[torch.Tensor]:
    """List the dense floating-point tensors in the arguments or the output of a module."""
    return [
        leaf
        for leaf in leaves_in(tree)
        if isinstance(leaf, torch.Tensor)
        and leaf.layout is torch.strided
        and (leaf.is_floating_point() or leaf.is_complex())
    ]


def non_finite_rows(tensors: Iterable[torch.Tensor], size: int, batch_dim: int) -> frozenset[int]:
    """Find the rows in which any of some tensors is not finite.

    Args:
        tensors: Floating-point tensors; those that are not per sample are passed over.
        size: How many samples there are.
        batch_dim: The dimension of the samples.

    Returns:
        The rows.
    """
    rows: set[int] = set()
    for tensor in tensors:
        dim = batch_dim_of(tensor, size, batch_dim)
        # A finite sum proves that all are finite, in a fraction of the time of a look at each; a NaN proves the
        # contrary; an infinite one may have overflowed, so the elements of such rows are looked at.
        values = tensor.detach() if tensor.requires_grad else tensor
        if dim is None or isfinite(abs(values.sum().item())):
            continue
        others = [axis for axis in range(values.dim()) if axis != dim]
        totals = (values.sum(others) if others else values).tolist()
        doubtful = [row for row, total in enumerate(totals) if total - total != 0]
        if any(totals[row] == totals[row] for row in doubtful):
            values = values.movedim(dim, 0)[doubtful]
            finite = torch.isfinite(values).reshape(len(doubtful), -1).all(1).tolist()
            doubtful = [row for row, is_finite in zip(doubtful, finite, strict=True) if not is_finite]
        rows.update(doubtful)
    return frozenset(rows)
