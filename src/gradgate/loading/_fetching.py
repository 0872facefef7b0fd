"""What runs where samples are loaded, mostly in a worker: fetch, collate, and report what was left out.

A loader's dataset gives indices along with its samples, and its collation gives a report along with the batch; the
main process takes them apart again. A plain tuple of the two goes through pinning like any batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch.utils.data import Dataset, IterableDataset, default_collate, default_convert

from gradgate.loading._collating import collate_what_fits
from gradgate.loading._datasets import Around, steps
from gradgate.loading._markers import BadSample, Catch, attempt, attempt_all

__all__ = ["Fetched", "FetchingDataset", "FetchingStream", "Gather", "Report"]


@dataclass(slots=True)
class Fetched:
    """Samples, or the markers in their places, with their indices; `skipped` were passed over between them."""

    indices: list[Any]
    samples: list[Any]
    skipped: list[BadSample] = field(default_factory=list)


@dataclass(slots=True)
class Report:
    """What became of the samples of a batch: their indices, and the markers of the bad ones by row."""

    indices: list[Any]
    bad: dict[int, BadSample]
    skipped: list[BadSample]

    @property
    def kept(self) -> list[Any]:
        """The indices of the samples that are in the batch, row by row."""
        return [index for row, index in enumerate(self.indices) if row not in self.bad]


class FetchingDataset(Around, Dataset[Any]):
    """A map-style dataset that gives whole batches of samples with their indices."""

    def __getitem__(self, index: Any) -> Fetched:
        return Fetched([index], [attempt(lambda: self._dataset[index], index, self._catch)])

    def __getitems__(self, indices: Sequence[Any]) -> Fetched:
        indices = list(indices)
        together = getattr(self._dataset, "__getitems__", None)
        if together:
            samples = attempt(lambda: list(together(indices)), None, self._catch)
            if not isinstance(samples, BadSample):
                # It may give fewer or more; then nobody can say which is which, and the batch is what it gave.
                return Fetched(indices if len(samples) == len(indices) else [None] * len(samples), samples)
        return Fetched(indices, attempt_all(self._load, indices, self._catch))

    def _load(self, index: Any) -> Any:
        dataset = self._dataset
        if getattr(type(dataset), "__getitem__", None) is Dataset.__getitem__ and hasattr(dataset, "__getitems__"):
            return next(iter(dataset.__getitems__([index])))  # it knows only how to load several
        return dataset[index]


class FetchingStream(Around, IterableDataset[Any]):
    """An iterable dataset that gives each sample with its number.

    Args:
        dataset: The dataset.
        catch: What may be caught.
        pass_over: How many bad samples in a row to pass over on the way to a good one.
    """

    def __init__(self, dataset: Any, catch: Catch, pass_over: int) -> None:
        super().__init__(dataset, catch)
        self._pass_over = pass_over

    def __iter__(self) -> Iterator[Fetched]:
        skipped: list[BadSample] = []
        for number, sample in steps(self._dataset, self._catch):
            if isinstance(sample, BadSample) and len(skipped) < self._pass_over:
                skipped.append(sample)
                continue
            yield Fetched([number], [sample], skipped)
            skipped = []
        if skipped:
            yield Fetched([], [], skipped)


class Gather:
    """The collation of a resilient loader: gives the batch of the good samples and the report.

    Args:
        collate_fn: The loader's own collation.
        batched: Whether it takes lists of samples, or single ones.
        catch: What may be caught.
    """

    def __init__(self, collate_fn: Callable[[Any], Any], batched: bool, catch: Catch) -> None:
        self._collate = collate_fn
        self._batched = batched
        self._catch = catch
        self._trusted = collate_fn in (default_collate, default_convert)

    def __call__(self, fetched: Fetched | list[Fetched]) -> tuple[Any, Report]:
        if isinstance(fetched, list):
            fetched = Fetched(
                [index for one in fetched for index in one.indices],
                [sample for one in fetched for sample in one.samples],
                [bad for one in fetched for bad in one.skipped],
            )
        samples, indices = fetched.samples, fetched.indices
        bad = {row: sample for row, sample in enumerate(samples) if isinstance(sample, BadSample)}
        rows: Sequence[int] = range(len(samples))
        if bad:
            rows = [row for row in rows if row not in bad]
            samples, indices = [samples[row] for row in rows], [indices[row] for row in rows]
        batch = None
        if samples:
            batch, blamed = collate_what_fits(samples, indices, self._collated, self._catch, trusted=self._trusted)
            bad |= {rows[row]: marker for row, marker in blamed.items()}
        return batch, Report(fetched.indices, bad, fetched.skipped)

    def _collated(self, samples: list[Any]) -> Any:
        return self._collate(samples if self._batched else samples[0])
