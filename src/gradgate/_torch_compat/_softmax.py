"""The backward of softmax in one pass, as torch's own backward calls it."""

from __future__ import annotations

import torch

__all__ = ["softmax_backward"]


def softmax_backward(gradient: torch.Tensor, result: torch.Tensor, *, logarithm: bool) -> torch.Tensor:
    """Give the gradient of what went into a softmax of the last dimension; autograd does not follow it.

    Args:
        gradient: That of the result.
        result: What softmax gave, or log_softmax.
        logarithm: Which of the two.

    Returns:
        The gradient of the input.
    """
    backward = torch._log_softmax_backward_data if logarithm else torch._softmax_backward_data
    return backward(gradient, result, -1, result.dtype)
