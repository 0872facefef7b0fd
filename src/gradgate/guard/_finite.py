"""Is everything finite, and if not, in which rows: asked of gradients, losses and the outputs of modules."""

from __future__ import annotations

from collections.abc import Iterable
from math import isfinite
from typing import Any

import torch

from gradgate._torch_compat import find_non_finite, tree_flatten
from gradgate.guard._batches import batch_dim_of

__all__ = ["FiniteCheck", "leaves_in", "non_finite_rows", "tensors_in"]


class FiniteCheck:
    """Looks for NaN and Inf in a loss and in many gradients at once, with one read by the host."""

    def __init__(self) -> None:
        self._flags: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # by the device's number, which is read fastest

    def alarm(self, gradients: list[torch.Tensor], loss: torch.Tensor | None = None) -> bool:
        """Tell whether anything is not finite.

        Args:
            gradients: The gradients.
            loss: The loss, where it has not been looked at yet.

        Returns:
            True if there is a NaN or an Inf.
        """
        answer = self._found(gradients)
        if loss is not None:
            # 0 if the loss is finite and NaN if not: it travels with the flag in the same read.
            nothing = loss - loss
            answer = nothing if answer is None else answer + nothing.to(answer.device)
        alarm = answer is not None and answer.item() != 0
        if alarm:
            self._flags.clear()
        return alarm

    def _found(self, gradients: list[torch.Tensor]) -> torch.Tensor | None:
        if not gradients:
            return None
        first = gradients[0]
        flags = self._flags.get(first.get_device())
        if flags is None:
            flags = self._flags[first.get_device()] = (
                torch.zeros(1, device=first.device),
                torch.ones(1, device=first.device),
            )
        try:
            find_non_finite(gradients, *flags)
        except RuntimeError:  # several devices; sparse, complex or overlapping gradients; a device without this pass
            return torch.stack([_any_non_finite(gradient).to(first.device) for gradient in gradients]).any().float()
        return flags[0]


def _any_non_finite(tensor: torch.Tensor) -> torch.Tensor:
    values = tensor.coalesce().values() if tensor.is_sparse else tensor
    return ~torch.isfinite(values).all()


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
        if dim is None or isfinite(abs(tensor.detach().sum().item())):
            continue
        values = tensor.detach().movedim(dim, 0)
        totals = (values.flatten(1).sum(1) if values.dim() > 1 else values).tolist()
        doubtful = [row for row, total in enumerate(totals) if total - total != 0]
        if any(totals[row] == totals[row] for row in doubtful):
            finite = torch.isfinite(values[doubtful]).reshape(len(doubtful), -1).all(1).tolist()
            doubtful = [row for row, is_finite in zip(doubtful, finite, strict=True) if not is_finite]
        rows.update(doubtful)
    return frozenset(rows)
