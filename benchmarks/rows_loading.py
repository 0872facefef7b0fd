"""gradgate.loading against the plain DataLoader, where nothing is wrong, and what a bad sample costs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset

import gradgate as gg
from benchmarks.harness import Candidate, Row


class Images(Dataset[tuple[torch.Tensor, int]]):
    """Small images that are made, turned and normalised: some 100 us of work for each sample."""

    def __init__(self, size: int, bad: frozenset[int] = frozenset()) -> None:
        self.raw = torch.randint(0, 256, (size, 3, 64, 64), dtype=torch.uint8)
        self.bad = bad

    def __len__(self) -> int:
        return len(self.raw)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        if index in self.bad:
            raise OSError("truncated image")
        return (self.raw[index].flip(-1).float() / 255 - 0.5) / 0.25, index % 10


def epochs(dataset: Dataset[Any], **settings: Any) -> Callable[[], dict[str, Candidate]]:
    """Iterate over all batches, with each loader."""

    def candidates() -> dict[str, Candidate]:
        def run(loader: Any) -> Candidate:
            return lambda: sum(1 for _ in loader)

        return {
            "plain": run(DataLoader(dataset, **settings)),
            "gg.resilient": run(gg.resilient(DataLoader(dataset, **settings))),
            "gg.resilient, refill": run(gg.resilient(DataLoader(dataset, **settings), refill=True)),
        }

    return candidates


def with_a_fault(**settings: Any) -> Callable[[], dict[str, Candidate]]:
    """Iterate over images of which one is bad; the plain loader has none."""

    def candidates() -> dict[str, Candidate]:
        bad = Images(512, frozenset({100}))

        def run(loader: Any) -> Candidate:
            return lambda: sum(1 for _ in loader)

        return {
            "plain, none bad": run(DataLoader(Images(512), **settings)),
            "gg.resilient": run(gg.resilient(DataLoader(bad, **settings))),
            "gg.resilient, refill": run(gg.resilient(DataLoader(bad, **settings), refill=True)),
        }

    return candidates


def row(title: str, candidates: Callable[[], dict[str, Candidate]], base: str, at_most: float | None) -> Row:
    """Compare with the plain loader."""
    return Row("loading", title, candidates, ours="gg.resilient", base=base, at_most=at_most, seconds=6.0)


WORKERS = {"num_workers": 2, "persistent_workers": True}

ROWS = [
    row("healthy epoch, 512 images, batch 64", epochs(Images(512), batch_size=64), "plain", 1.05),
    row("healthy epoch, 512 images, batch 64, 2 workers", epochs(Images(512), batch_size=64, **WORKERS), "plain", 1.05),
    row("healthy epoch, 512 images, batch 8", epochs(Images(512), batch_size=8), "plain", 1.05),
    row(
        "healthy epoch, 4096 numbers, batch 64 (nothing but overhead)",
        epochs(TensorDataset(torch.arange(4096.0)), batch_size=64),
        "plain",
        None,
    ),
    row("one bad of 512 images, batch 64", with_a_fault(batch_size=64), "plain, none bad", None),
    row("one bad of 512 images, batch 64, 2 workers", with_a_fault(batch_size=64, **WORKERS), "plain, none bad", None),
]
