"""Sparse gradients, as nn.Embedding(sparse=True) makes them: what is not stored is 0, and stays so at every gate."""

from __future__ import annotations

from collections.abc import Callable

import torch

from gradgate.gates._rules import Rule

__all__ = ["on_stored_values"]


def on_stored_values(
    treat: Callable[[torch.Tensor, Rule], torch.Tensor | None], gradient: torch.Tensor, rule: Rule
) -> torch.Tensor | None:
    """Treat what a gradient stores by the part of the rule that belongs there; rows stay sparse."""
    if gradient.layout is not torch.sparse_coo:
        return treat(gradient, rule)
    if gradient.sparse_dim() != 1:
        return treat(gradient.to_dense(), rule)
    gradient = gradient.coalesce()
    rows = gradient.indices()
    values = treat(gradient.values(), rule.at(rows[0], gradient.shape))
    if values is None:
        return None
    return torch.sparse_coo_tensor(rows, values, gradient.shape, is_coalesced=True, check_invariants=False)
