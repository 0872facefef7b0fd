"""The data of the demonstration: handwritten digits, some of them broken in ways that happen."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import BatchSampler, Dataset, RandomSampler

from gradgate.errors import ArgumentValueError

FAULTS = {
    "corrupt record": "reading it raises an OSError",
    "NaN pixels": "a few pixels are NaN",
    "unreadable weight": 'its weight says "n/a", so the loss code raises',
    "blank image": "its loss is finite, its gradient NaN",
    "unknown label": "the label is 255",
}
"""What is wrong with a broken sample, and how that shows."""


class Digits(Dataset[dict[str, Any]]):
    """Images of 8 x 8 pixels with a label and, as text, a weight."""

    def __init__(self, images: torch.Tensor, labels: torch.Tensor, broken: dict[int, str]) -> None:
        self.images = images
        self.labels = labels
        self.broken = broken

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> dict[str, Any]:
        fault = self.broken.get(index)
        if fault == "corrupt record":
            raise OSError(f"digit {index}: the checksum does not fit")
        image = self.images[index].clone()
        if fault == "NaN pixels":
            image[2:4, 3] = float("nan")
        elif fault == "blank image":
            image.zero_()
        return {
            "image": image[None],
            "label": 255 if fault == "unknown label" else int(self.labels[index]),
            "weight": "n/a" if fault == "unreadable weight" else "1.0",
            "id": index,
        }


class WithoutBroken:
    """The same batches as the other loaders have, less the broken samples: what the training should have been."""

    def __init__(self, batches: BatchSampler, broken: dict[int, str]) -> None:
        self.batches = batches
        self.broken = broken

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[list[int]]:
        for batch in self.batches:
            whole = [index for index in batch if index not in self.broken]
            if whole:
                yield whole


def load(seed: int, bad_fraction: float) -> tuple[Digits, Digits]:
    """Load scikit-learn's digits, and break a part of the training half."""
    try:
        from sklearn.datasets import load_digits  # type: ignore[import-untyped]
    except ImportError:
        raise ArgumentValueError(
            "gradgate demo: scikit-learn is not installed.",
            why="the demonstration trains on the handwritten digits that come with it.",
            fix="pip install 'gradgate[demo]'",
        ) from None
    digits = load_digits()
    images = torch.from_numpy(digits.images).float() / 16
    labels = torch.from_numpy(digits.target).long()
    chance = random.Random(seed)
    order = list(range(len(images)))
    chance.shuffle(order)
    test, train = order[:360], order[360:]
    chosen = chance.sample(range(len(train)), round(bad_fraction * len(train)))
    kinds = list(FAULTS)
    broken = {index: kinds[number % len(kinds)] for number, index in enumerate(chosen)}
    return Digits(images[train], labels[train], broken), Digits(images[test], labels[test], {})


def batches(data: Digits, size: int, generator: torch.Generator) -> BatchSampler:
    """Shuffle the data into batches."""
    return BatchSampler(RandomSampler(data, generator=generator), size, drop_last=False)
