"""What leaving out costs a loss, and how fast outliers are found."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

from benchmarks.harness import Candidate, Row
from gradgate import losses


def _cross_entropy(batch: int, classes: int, *places: int, ignored: float) -> Callable[[], dict[str, Candidate]]:
    def candidates() -> dict[str, Candidate]:
        logits = torch.randn(batch, classes, *places, requires_grad=True)
        target = torch.randint(0, classes, (batch, *places))
        target[torch.rand(batch, *places) < ignored] = 255

        def torch_ignores() -> None:
            logits.grad = None
            functional.cross_entropy(logits, target, ignore_index=255).backward()

        def ours() -> None:
            logits.grad = None
            losses.masked_loss(functional.cross_entropy, logits, target, exclude=255).backward()

        return {"cross_entropy(ignore_index)": torch_ignores, "masked_loss(cross_entropy)": ours}

    return candidates


def _mad() -> dict[str, Candidate]:
    x = torch.randn(10_000_000)
    return {"torch.median": x.median, "inliers(mad)": lambda: losses.inliers(x)}


def _row(title: str, *shape: int, ignored: float, **options: Any) -> Row:
    return Row(
        "losses",
        f"{title} ignored, forward and backward",
        _cross_entropy(*shape, ignored=ignored),
        ours="masked_loss(cross_entropy)",
        base="cross_entropy(ignore_index)",
        peers=("cross_entropy(ignore_index)",),
        **options,
    )


ROWS = [
    _row("cross_entropy, 4096 x 256, a fifth", 4096, 256, ignored=0.2, at_most=1.1, rounds=100, seconds=6.0),
    _row("cross_entropy, 1024 x 32000, half", 1024, 32000, ignored=0.5),
    _row("cross_entropy of a segmentation, 4 x 21 x 96 x 96, a tenth", 4, 21, 96, 96, ignored=0.1),
    Row("losses", "inliers(mad) of 1e7", _mad, ours="inliers(mad)", base="torch.median", at_most=1.5, rounds=7),
]
