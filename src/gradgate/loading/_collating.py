"""Collation without the bad samples; and, when collation itself fails, which samples are to blame."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
from torch.utils.data import default_collate

from gradgate._names import describe
from gradgate._text import text_of
from gradgate._torch_private import write_counts
from gradgate._trees import leaves_of, with_own_containers
from gradgate.errors import ArgumentTypeError, ArgumentValueError
from gradgate.loading._bad_samples import BadSample, Catch, mark

Collate = Callable[[list[Any]], Any]


def collate(samples: Sequence[Any], collate_fn: Collate | None = None) -> Any:
    """Collate the good samples of a batch, for a dataset made by `resilient(dataset)`.

    Args:
        samples: Samples and markers of bad ones.
        collate_fn: Collates the good ones; `torch.utils.data.default_collate` if None. For a DataLoader give it by
            `functools.partial(gg.collate, collate_fn=...)`.

    Returns:
        The batch of the good samples; None if there is none.

    Raises:
        ArgumentTypeError: `collate_fn` cannot be called.

    Examples:
        >>> dataset = gg.resilient([1.0, 2.0])
        >>> gg.collate([dataset[0], dataset[9], dataset[1]])
        tensor([1., 2.], dtype=torch.float64)
        >>> gg.collate([dataset[9]]) is None
        True
    """
    if collate_fn is not None and not callable(collate_fn):
        raise ArgumentTypeError(
            f"collate(): `collate_fn` is {describe(collate_fn)}.",
            why="it makes a batch of a list of samples.",
            fix="gg.collate(samples, torch.utils.data.default_collate)",
        )
    good = [sample for sample in samples if not isinstance(sample, BadSample)]
    return (collate_fn or default_collate)(good) if good else None


def collate_what_fits(
    samples: list[Any], indices: Sequence[Any], collate_fn: Collate, catch: Catch, *, trusted: bool = False
) -> tuple[Any, dict[int, BadSample]]:
    """Collate a batch; if that fails, without the samples that are to blame."""
    trial = None if trusted else _Trial(samples, collate_fn, catch)
    try:
        return collate_fn(samples), {}
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except catch as error:
        whole = error
    if trial is None:
        trial = _Trial(samples, collate_fn, catch)
    trial.refuse_if_written(whole)
    rows = list(range(len(samples)))
    kept = _fitting(trial, rows)
    batch = None
    if kept:
        assert trial.works(kept), "these were collated a moment ago"
        batch = trial.batch
    left_out = [row for row in rows if row not in kept]
    return batch, {row: mark(trial.alone.get(row, whole), indices[row], "collate", rows=len(rows)) for row in left_out}


class _Trial:
    """Collates some rows of a batch, each time in new containers: a collation may take something out of its samples."""

    def __init__(self, samples: Sequence[Any], collate_fn: Collate, catch: Catch) -> None:
        self._samples = [with_own_containers(sample) for sample in samples]
        self._writes = self._count_writes()
        self._collate = collate_fn
        self._catch = catch
        self.batch: Any = None
        self.alone: dict[int, Exception] = {}

    def works(self, rows: Sequence[int]) -> bool:
        try:
            self.batch = self._collate([with_own_containers(self._samples[row]) for row in rows])
        except (MemoryError, torch.OutOfMemoryError):
            raise
        except self._catch as error:
            self.refuse_if_written(error)
            if len(rows) == 1:
                self.alone[rows[0]] = error
            return False
        return True

    def refuse_if_written(self, error: Exception) -> None:
        """Raise what the collation raised if it has written into tensors: the next try would read what it wrote."""
        if self._count_writes() != self._writes:
            raise error from ArgumentValueError(
                "resilient(): the collation wrote into the tensors of its samples, so it cannot be tried with fewer.",
                why="what is written once cannot be distinguished from what was loaded; no sample was left out.",
                fix="x = x + 1   # in `collate_fn`, instead of x += 1",
            )

    def _count_writes(self) -> int:
        return write_counts(leaf for leaf in leaves_of(self._samples) if isinstance(leaf, torch.Tensor))


def _fitting(trial: _Trial, rows: list[int]) -> list[int]:
    """Find the rows to keep: those that can be collated, and with most of the others."""
    # A sample that cannot be collated even alone is bad. Of those that do not fit together (two shapes, say) the larger
    # group stays; of two equal ones that of the first sample.
    possible = [row for row in rows if trial.works([row])]
    if not possible:
        # A collation that needs several samples fails for each alone; then one of them may spoil the rest.
        return next((rest for row in rows if len(rest := [r for r in rows if r != row]) and trial.works(rest)), [])
    best: list[int] = []
    for first in possible:
        group = [row for row in possible if row == first or trial.works(sorted((first, row)))]
        if len(group) > len(best):
            best = group
        if 2 * len(best) > len(possible):
            break
    kept: list[int] = []
    for row in best:
        if trial.works([*kept, row]):
            kept.append(row)
    return kept


class _Discard:
    """A file that keeps nothing."""

    def write(self, data: Any) -> None:
        """Do nothing."""


class _SendablePickler(ForkingPickler):
    """Pickles as a worker's queue does, without what is in tensors."""

    def persistent_id(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return None if value.requires_grad and not value.is_leaf else "tensor"
        return "storage" if isinstance(value, torch.UntypedStorage | torch.TypedStorage) else None


def check_sendable(batch: Any) -> None:
    """Make sure that a worker can send a batch: what cannot be pickled never arrives, and the loop waits for it."""
    try:
        _SendablePickler(_Discard()).dump(batch)
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise pickle.PicklingError(f"a worker cannot send the collated sample: {text_of(error)}") from error
