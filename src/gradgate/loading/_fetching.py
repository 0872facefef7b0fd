"""What runs where samples are loaded, mostly in a worker: fetch, collate, and report what was left out.

A loader's dataset gives indices along with its samples, and its collation gives a report along with the batch; the
main process takes them apart again. A plain tuple of the two goes through pinning like any batch.
"""

from __future__ import annotations

import inspect
import os
import pickle
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
from torch.utils.data import Dataset, IterableDataset, default_collate, default_convert, get_worker_info

from gradgate._checks import wrong_type
from gradgate._names import listed
from gradgate._text import text_of
from gradgate._torch_private import write_counts
from gradgate._trees import leaves_of, with_own_containers
from gradgate.errors import ArgumentValueError
from gradgate.loading._bad_samples import Attempts, BadSample, Catch, LoadingLog, mark
from gradgate.loading._refilling import Order
from gradgate.loading._workers import NOTHING, ONE_SAMPLE, WHOLE_BATCH, Board
from gradgate.records import Incident

_END = object()


class Around:
    """Stands before a dataset: what it does not have itself is read from, and written to, the dataset."""

    _own = frozenset({"_dataset", "_attempts", "_log", "_pass_over", "_board"})

    def __init__(self, dataset: Any, attempts: Attempts) -> None:
        self._dataset = dataset
        self._attempts = attempts

    def __getattr__(self, name: str) -> Any:
        if name in self._own or name.startswith("__"):
            raise AttributeError(name)  # while it is being unpickled
        return getattr(self._dataset, name)

    def __setattr__(self, name: str, value: Any) -> None:
        # A worker_init_fn sets up `get_worker_info().dataset`, and means the dataset within.
        if name in self._own:
            object.__setattr__(self, name, value)
        else:
            setattr(self._dataset, name, value)

    def __len__(self) -> int:
        return len(self._dataset)


class _Noting(Around):
    def __init__(self, dataset: Any, attempts: Attempts, log: LoadingLog) -> None:
        super().__init__(dataset, attempts)
        self._log = log

    @property
    def incidents(self) -> tuple[Incident, ...]:
        """What was left out in this process; a worker's incidents are in the worker, and in the sink."""
        return self._log.incidents

    def __repr__(self) -> str:
        return self._log.describe(self._dataset)

    def _noted(self, sample: Any) -> Any:
        return self._log.noted(sample) if isinstance(sample, BadSample) else sample


class ResilientDataset(_Noting, Dataset[Any]):
    """A map-style dataset that gives a `BadSample` where the one within raises; made by `resilient(dataset)`.

    Args:
        dataset: The dataset.
        attempts: What is caught, and what is tried again.
        log: Is called with each bad sample.

    Examples:
        >>> dataset = gg.resilient([1.0, 2.0])
        >>> dataset[0], type(dataset[7]).__name__
        (1.0, 'BadSample')
        >>> [incident.sample_id for incident in dataset.incidents]
        ['7']
    """

    def __getitem__(self, index: Any) -> Any:
        sample, retried = self._attempts.load(lambda: self._dataset[index], index)
        self._noted(retried)
        return self._noted(sample)


class ResilientStream(_Noting, IterableDataset[Any]):
    """An iterable dataset that gives a `BadSample` where `next` of the one within raises; made by `resilient(dataset)`.

    An iterator that is a class goes on after it. A generator that raised is finished, and the incident says so.

    Args:
        dataset: The dataset.
        attempts: What is caught.
        log: Is called with each bad sample.

    Examples:
        >>> class Broken(torch.utils.data.IterableDataset):
        ...     def __iter__(self):
        ...         yield 1.0
        ...         raise OSError("truncated")
        >>> [getattr(sample, "incident", sample) for sample in gg.resilient(Broken())][1].cause
        'exception, and the generator is finished'
    """

    def __iter__(self) -> Iterator[Any]:
        for _, sample in _steps(self._dataset, self._attempts):
            yield self._noted(sample)


def _steps(stream: Any, attempts: Attempts) -> Iterator[tuple[Any, Any]]:
    """Return each sample of a stream, or its marker, with its number; in a worker as "worker:number"."""
    # Nothing is tried again: a second `next` would give the next sample.
    once = Attempts(attempts.catch)
    within = iter(stream)
    worker = get_worker_info()
    number = 0
    while True:
        name = number if worker is None else f"{worker.id}:{number}"
        sample, _ = once.load(lambda: next(within, _END), name)
        if sample is _END:
            return
        if isinstance(sample, BadSample) and inspect.isgenerator(within):
            incident = replace(sample.incident, cause="exception, and the generator is finished")
            sample = replace(sample, incident=incident)
        yield name, sample
        number += 1


@dataclass(slots=True)
class Report:
    """What became of the samples of a batch; `samples` and their markers are in it until the batch is collated.

    By row, `bad` has the markers of those that are not in the batch. `skipped` were passed over before it, and
    `retried` passed at a retry.
    """

    indices: list[Any]
    samples: list[Any]
    skipped: list[BadSample] = field(default_factory=list)
    retried: Sequence[tuple[int | None, BadSample]] = ()
    bad: dict[int, BadSample] = field(default_factory=dict)

    @property
    def kept(self) -> list[Any]:
        """The indices of the samples that are in the batch, row by row."""
        return [index for row, index in enumerate(self.indices) if row not in self.bad]


class FetchingDataset(Around, Dataset[Any]):
    """A map-style dataset that gives whole batches of samples with their indices."""

    def __init__(self, dataset: Any, attempts: Attempts, board: Board | None = None) -> None:
        super().__init__(dataset, attempts)
        self._board = board

    def __getitem__(self, order: Order) -> Report:
        indices = [index.index if isinstance(index, BadSample) else index for index in order]
        loaded = [self._attempts.load(partial(self._load, order, row), index) for row, index in enumerate(indices)]
        retried = [(row, marker) for row, (_, marker) in enumerate(loaded) if marker is not None]
        return Report(indices, [sample for sample, _ in loaded], retried=retried)

    def __getitems__(self, order: Order) -> Report:
        together = getattr(self._dataset, "__getitems__", None)
        if together is None or any(isinstance(index, BadSample) for index in order):
            return self[order]
        if self._board is not None:
            self._board.note(WHOLE_BATCH, order.places[0])
        indices = list(order)
        once = Attempts((*self._attempts.catch, *self._attempts.retry_on))
        samples, _ = once.load(lambda: list(together(indices)), None)
        if not isinstance(samples, BadSample):
            # It may give fewer or more; then which is which is unknown, and the batch is what it returned.
            return Report(indices if len(samples) == len(indices) else [None] * len(samples), samples)
        fetched = self[order]
        if not fetched.retried and not any(isinstance(sample, BadSample) for sample in fetched.samples):
            incident = replace(samples.incident, cause="exception, gone at a retry", transient=True)
            fetched.retried = [(None, replace(samples, incident=incident))]
        return fetched

    def _load(self, order: Order, row: int) -> Any:
        dataset, index = self._dataset, order[row]
        if isinstance(index, BadSample):
            return index  # It is known to kill its worker.
        if self._board is not None:
            self._board.note(ONE_SAMPLE, order.places[row])
        if getattr(type(dataset), "__getitem__", None) is Dataset.__getitem__ and hasattr(dataset, "__getitems__"):
            return next(iter(dataset.__getitems__([index])))  # it knows only how to load several
        return dataset[index]


class FetchingStream(Around, IterableDataset[Any]):
    """An iterable dataset that gives each sample with its number."""

    def __init__(self, dataset: Any, attempts: Attempts, pass_over: int) -> None:
        super().__init__(dataset, attempts)
        self._pass_over = pass_over

    def __repr__(self) -> str:
        return repr(self._dataset)  # torch names the dataset when it warns of its length

    def __iter__(self) -> Iterator[Report]:
        skipped: list[BadSample] = []
        for number, sample in _steps(self._dataset, self._attempts):
            if isinstance(sample, BadSample) and len(skipped) < self._pass_over:
                skipped.append(sample)
                continue
            yield Report([number], [sample], skipped)
            skipped = []
        if skipped:
            yield Report([], [], skipped)


# --- Collation ------------------------------------------------------------------------------------------------------


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
        why, fix = "it makes a batch of a list of samples.", "gg.collate(samples, torch.utils.data.default_collate)"
        raise wrong_type(collate_fn, "collate_fn", "collate", why, fix)
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
    trial = trial or _Trial(samples, collate_fn, catch)
    trial.refuse_if_written(whole)
    rows = list(range(len(samples)))
    kept = _fitting(trial, rows)
    batch = trial.batch if kept and trial.works(kept) else None
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


class _SendablePickler(ForkingPickler):
    """Pickles as a worker's queue does, without what is in tensors."""

    def persistent_id(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return None if value.requires_grad and not value.is_leaf else "tensor"
        return "storage" if isinstance(value, torch.UntypedStorage | torch.TypedStorage) else None


def check_sendable(batch: Any) -> None:
    """Make sure that a worker can send a batch: what cannot be pickled never arrives, and the loop waits for it."""
    try:
        with open(os.devnull, "wb") as nowhere:
            _SendablePickler(nowhere).dump(batch)
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise pickle.PicklingError(f"a worker cannot send the collated sample: {text_of(error)}") from error


class Gather:
    """The collation of a resilient loader: gives the batch of the good samples and the report."""

    def __init__(
        self, collate_fn: Callable[[Any], Any], batched: bool, catch: Catch, board: Board | None = None
    ) -> None:
        self._collate = collate_fn
        self.board = board
        self._batched = batched
        self._catch = catch
        self._trusted = collate_fn in (default_collate, default_convert)

    def __call__(self, fetched: Report | list[Report]) -> tuple[Any, Report]:
        if self.board is not None:
            self.board.note(WHOLE_BATCH)
        if isinstance(fetched, list):
            fetched = Report(
                [index for one in fetched for index in one.indices],
                [sample for one in fetched for sample in one.samples],
                [bad for one in fetched for bad in one.skipped],
            )
        bad = {row: sample for row, sample in enumerate(fetched.samples) if isinstance(sample, BadSample)}
        rows = [row for row in range(len(fetched.samples)) if row not in bad]
        batch = None
        if rows:
            samples, indices = [fetched.samples[row] for row in rows], [fetched.indices[row] for row in rows]
            try:
                batch, blamed = collate_what_fits(samples, indices, self._collated, self._catch, trusted=self._trusted)
            except pickle.PicklingError as error:
                raise pickle.PicklingError(f"samples {listed(indices)}: {text_of(error)}") from error
            bad |= {rows[row]: marker for row, marker in blamed.items()}
        if self.board is not None:
            self.board.note(NOTHING)
        return batch, replace(fetched, samples=[], bad=bad)

    def _collated(self, samples: list[Any]) -> Any:
        batch = self._collate(samples if self._batched else samples[0])
        if get_worker_info() is not None:
            check_sendable(batch)
        return batch
