"""Sparse gradients, as nn.Embedding(sparse=True) makes them: what is not stored is 0, and stays so at every gate."""

from __future__ import annotations

from collections.abc import Callable

import torch

__all__ = ["on_stored_values"]


def on_stored_values(
    treat: Callable[..., torch.Tensor | None], gradient: torch.Tensor, *tensors: torch.Tensor
) -> torch.Tensor | None:
    """Treat what a gradient stores, together with the parts of the tensors that belong there; rows stay sparse."""
    if gradient.layout is torch.strided:
        return treat(gradient, *tensors)
    if gradient.layout is not torch.sparse_coo or gradient.sparse_dim() != 1:
        return treat(gradient.to_dense(), *tensors)
    gradient = gradient.coalesce()
    rows = gradient.indices()
    values = treat(gradient.values(), *(tensor.expand(gradient.shape)[rows[0]] for tensor in tensors))
    if values is None:
        return None
    return torch.sparse_coo_tensor(rows, values, gradient.shape, is_coalesced=True, check_invariants=False)
