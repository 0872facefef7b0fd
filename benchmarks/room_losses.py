"""What leaving out costs a loss, and how fast outliers are found."""

from __future__ import annotations

import torch
from torch.nn import functional

from benchmarks.harness import Candidate, Row
from gradgate import losses


def _cross_entropy() -> dict[str, Candidate]:
    logits = torch.randn(4096, 256, requires_grad=True)
    target = torch.randint(0, 256, (4096,))
    target[torch.rand(4096) < 0.2] = 255

    def torch_ignores() -> None:
        logits.grad = None
        functional.cross_entropy(logits, target, ignore_index=255).backward()

    def ours() -> None:
        logits.grad = None
        losses.masked_loss(functional.cross_entropy, logits, target, exclude=255).backward()

    return {"cross_entropy(ignore_index)": torch_ignores, "masked_loss(cross_entropy)": ours}


def _segmentation() -> dict[str, Candidate]:
    logits = torch.randn(4, 21, 96, 96, requires_grad=True)
    target = torch.randint(0, 21, (4, 96, 96))
    target[torch.rand(4, 96, 96) < 0.1] = 255

    def torch_ignores() -> None:
        logits.grad = None
        functional.cross_entropy(logits, target, ignore_index=255).backward()

    def ours() -> None:
        logits.grad = None
        losses.masked_loss(functional.cross_entropy, logits, target, exclude=255).backward()

    return {"cross_entropy(ignore_index)": torch_ignores, "masked_loss(cross_entropy)": ours}


def _mad() -> dict[str, Candidate]:
    x = torch.randn(10_000_000)
    return {"torch.median": x.median, "inliers(mad)": lambda: losses.inliers(x)}


ROWS = [
    Row(
        "losses",
        "cross_entropy, 4096 x 256, a fifth ignored, forward and backward",
        _cross_entropy,
        ours="masked_loss(cross_entropy)",
        base="cross_entropy(ignore_index)",
        at_most=1.1,
    ),
    Row(
        "losses",
        "cross_entropy of a segmentation, 4 x 21 x 96 x 96, a tenth ignored, forward and backward",
        _segmentation,
        ours="masked_loss(cross_entropy)",
        base="cross_entropy(ignore_index)",
    ),
    Row("losses", "inliers(mad) of 1e7", _mad, ours="inliers(mad)", base="torch.median", at_most=1.5, rounds=7),
]
