"""Cross entropy without one label, by torch's own `ignore_index` where that is exact: nothing is copied or masked."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.nn import functional

from gradgate._torch_compat import has_data

__all__ = ["with_ignore_index"]

_KEYWORDS = {"weight", "ignore_index", "reduction", "label_smoothing"}


def with_ignore_index(
    loss_fn: Any, input: torch.Tensor, target: torch.Tensor, exclude: Any, empty: float, kw: dict[str, Any]
) -> torch.Tensor | None:
    """Evaluate cross_entropy or nll_loss without one label, if torch can.

    What torch ignores has no part in the value. Its gradient is 0 times its probabilities: 0, unless those are NaN. All
    probabilities of a position have one denominator, so one finite log-probability proves that none of them is: only
    one class is looked at. Nothing else is asked that torch finds out as well.

    Args:
        loss_fn: The loss.
        input: Its first argument.
        target: Its second argument.
        exclude: The label that is left out; None for the loss's own `ignore_index` alone.
        empty: What to give when nothing is kept.
        kw: The keywords of the loss.

    Returns:
        The loss; None where torch's own is not exact, or where it is not known to be.
    """
    if loss_fn is not functional.cross_entropy and loss_fn is not functional.nll_loss:
        return None
    ignored, reduction = kw.get("ignore_index", -100), kw.get("reduction", "mean")
    label = ignored if exclude is None else exclude
    if not (
        (not kw or (kw.keys() <= _KEYWORDS and not kw.get("label_smoothing")))
        and (reduction == "mean" or (reduction == "sum" and empty == 0))
        and type(label) is int
        and -(2**63) <= label < 2**63
        and target.dtype is torch.int64
        # `ignore_index` may occur besides: on the CPU an error that is caught, elsewhere the end of the process.
        and (label == ignored or target.is_cpu)
        and has_data(input, target)
        # Autocast casts the arguments of a loss, and of nothing inside of it.
        and (input.dtype is torch.float32 or not torch.is_autocast_enabled(input.device.type))
    ):
        return None
    scores = input
    try:
        if loss_fn is functional.cross_entropy:
            classes = 1 if input.dim() > 1 else 0
            scores = torch.log_softmax(input, classes)
            if not math.isfinite(scores.detach().select(classes, 0).sum(dtype=torch.float32).item()):
                return None
        loss = functional.nll_loss(scores, target, kw.get("weight"), ignore_index=label, reduction=reduction)
    except IndexError:  # a label that is no class
        return None
    return None if math.isnan(loss.item()) else loss  # it is when nothing is kept
