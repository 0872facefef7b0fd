"""A loader that goes on: it asks a DataLoader like yours for batches and reports, and keeps the books."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import Any, Generic, TypeVar

import torch
from torch.utils.data import DataLoader, IterableDataset, IterDataPipe, MapDataPipe

from gradgate._names import describe, listed
from gradgate.errors import ArgumentTypeError, ArgumentValueError, TooManyBadSamples
from gradgate.loading._fetching import FetchingDataset, FetchingStream, Gather, Report
from gradgate.loading._markers import BadSample, Catch
from gradgate.loading._recording import Recorder
from gradgate.loading._refilling import Asked, Refilling, Requests
from gradgate.records import Incident

__all__ = ["ResilientLoader"]

Batch = TypeVar("Batch")


class ResilientLoader(Generic[Batch]):
    """The batches of a DataLoader without its bad samples; made by `resilient(loader)`.

    What it does not have itself (`dataset`, `sampler`, `batch_size`, ...) is that of the loader. `len()` is that of the
    loader too: what an epoch without bad samples has, and so the most that there can be.

    Args:
        loader: The loader.
        catch: What may be caught.
        recorder: Writes down what was left out, and names samples.
        refill: Whether batches are filled up.
        patience: How many bad samples in a row are a fault of the code.

    Attributes:
        exceptions: The exceptions themselves by the incident's id, where they could be brought out of the worker.
        skipped: How many batches were left out because none of their samples could be loaded.

    Examples:
        >>> class Images(torch.utils.data.Dataset):
        ...     def __len__(self):
        ...         return 6
        ...     def __getitem__(self, index):
        ...         if index == 4:
        ...             raise OSError("truncated image")
        ...         return torch.tensor(index)
        >>> loader = gg.resilient(torch.utils.data.DataLoader(Images(), batch_size=3))
        >>> [(batch.tolist(), loader.ids) for batch in loader]
        [([0, 1, 2], ('0', '1', '2')), ([3, 5], ('3', '5'))]
        >>> [(incident.sample_id, incident.message) for incident in loader.incidents]
        [('4', 'truncated image')]
    """

    def __init__(
        self, loader: DataLoader[Any], catch: Catch, recorder: Recorder, refill: bool, patience: int | None
    ) -> None:
        _check(loader, refill)
        self._loader = loader
        self._recorder = recorder
        self._size = loader.batch_size or getattr(loader.batch_sampler, "batch_size", None) or 1
        self._patience = max(32, 2 * self._size) if patience is None else patience
        self._refilling = Refilling(loader.batch_sampler) if refill and _has_batches(loader) else None
        self._refill = refill
        self._inner = _like(loader, catch, self._refilling, self._patience if refill else 0)
        self._epoch = -1
        self._last: list[Any] = []
        self.exceptions: dict[str, Exception] = {}
        self.skipped = 0

    @property
    def incidents(self) -> tuple[Incident, ...]:
        """What was left out, in all epochs so far."""
        return self._recorder.incidents

    @property
    def ids(self) -> tuple[str, ...]:
        """The names of the samples in the last batch, row by row: `guard.backward(batch, loss_fn, ids=loader.ids)`."""
        return tuple(self._recorder.name(index) for index in self._last)

    def __len__(self) -> int:
        return len(self._loader)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._loader, name)

    def __repr__(self) -> str:
        return f"<resilient {type(self._loader).__name__}: {len(self.incidents)} samples left out>"

    def __iter__(self) -> Iterator[Batch]:
        self._epoch += 1
        # At once, as in torch: the workers start, and their seed is drawn.
        if self._refilling is None:
            return self._epoch_of(iter(self._inner), None)
        return self._epoch_of(*self._refilling.begin(self._inner))

    def _epoch_of(self, batches: Iterator[tuple[Any, Report]], requests: Requests | None) -> Iterator[Batch]:
        tally = _Tally(self._patience)
        step = 0
        while True:
            for batch, report in batches:
                if self._is_ready(report, requests, tally, step):
                    self._last = report.kept
                    step += 1
                    yield batch
            if self._refilling is None or requests is None or not requests.more():
                break
            # The loader came to its end before we knew that there is something to ask for again. Starting it draws a
            # seed; it is put back, so that later epochs have the order that they would have had.
            generator = self._loader.generator or torch.default_generator
            state = generator.get_state()
            batches, _ = self._refilling.begin(self._inner, requests)
            generator.set_state(state)
        tally.close()

    def _is_ready(self, report: Report, requests: Requests | None, tally: _Tally, step: int) -> bool:
        """Write down what is bad about a batch; tell whether the rest of it is to be given out."""
        asked = None if requests is None else requests.received()
        if asked is not None and len(asked.places) != len(report.indices):
            requests = None  # the dataset gave another number of samples than were asked for
        if report.bad or report.skipped:
            self._write_down(report, requests, asked, tally, step)
        else:
            tally.reset()
        if requests is not None and asked is not None and not requests.settles(asked, bool(report.bad)):
            return False
        good = len(report.indices) - len(report.bad)
        if not good:
            self.skipped += 1 if report.indices else 0
            return False
        return not (self._refill and self._loader.drop_last and good < self._size)

    def _write_down(
        self, report: Report, requests: Requests | None, asked: Asked | None, tally: _Tally, step: int
    ) -> None:
        rows = list(report.bad)
        if requests is not None and asked is not None:
            rows = requests.mark_bad(asked, rows)
        bad = [*report.skipped, *(report.bad[row] for row in rows)]
        incidents = self._recorder.record(bad, [*[None] * len(report.skipped), *rows], step=step, epoch=self._epoch)
        for marker, incident in zip(bad, incidents, strict=True):
            if marker.exception is not None:
                self.exceptions[incident.id] = marker.exception
        tally.count(report, {id(marker): incident for marker, incident in zip(bad, incidents, strict=True)})


class _Tally:
    """Counts bad samples in a row, and raises when it is the code that is bad."""

    def __init__(self, patience: int) -> None:
        self._patience = patience
        self._good = False
        self._row: list[tuple[BadSample, Incident | None]] = []

    def count(self, report: Report, incidents: dict[int, Incident]) -> None:
        outcomes: list[BadSample | None] = [*report.skipped]
        outcomes += [report.bad.get(row) for row in range(len(report.indices))]
        for outcome in outcomes:
            if outcome is None:
                self.reset()
            else:
                self._row.append((outcome, incidents.get(id(outcome))))
            if len(self._row) >= self._patience:
                self._raise(f"{len(self._row)} samples in a row could not be loaded.")

    def reset(self) -> None:
        """Note a good sample."""
        self._good = True
        self._row.clear()

    def close(self) -> None:
        """Look back on the epoch."""
        if self._row and not self._good:
            self._raise(f"none of the {len(self._row)} samples could be loaded.")

    def _raise(self, what: str) -> None:
        first = self._row[0][0]
        incidents = [incident for _, incident in self._row if incident is not None]
        evidence = TooManyBadSamples(
            f"resilient(): {what} The first: sample {first.incident.sample_id}, {first.incident.exception_type}: "
            f"{first.incident.message} ({first.incident.where}).",
            why="when every sample fails the fault is in the code or the storage; leaving all out would hide it.",
            fix=f"gg.resilient(loader, patience={4 * self._patience})   # if they really are that many: "
            f"{listed([incident.sample_id for incident in incidents])}",
            incidents=incidents,
        )
        if first.exception is None:
            raise evidence
        with suppress(Exception):  # a class may let nobody set an attribute; the evidence has its place and text
            first.exception.add_note(first.incident.details["traceback"])
        raise first.exception from evidence


def _has_batches(loader: DataLoader[Any]) -> bool:
    return loader.batch_sampler is not None and not isinstance(loader.dataset, IterableDataset)


def _like(
    loader: DataLoader[Any], catch: Catch, refilling: Refilling | None, pass_over: int
) -> DataLoader[tuple[Any, Report]]:
    """Make a loader with the settings of another one, that reports."""
    batched = loader.batch_sampler is not None
    settings: dict[str, Any] = {
        "num_workers": loader.num_workers,
        "collate_fn": Gather(loader.collate_fn, batched, catch),
        "pin_memory": loader.pin_memory,
        "timeout": loader.timeout,
        "worker_init_fn": loader.worker_init_fn,
        "multiprocessing_context": loader.multiprocessing_context,
        "generator": loader.generator,
        "persistent_workers": loader.persistent_workers,
        "in_order": loader.in_order,
    }
    if loader.num_workers:
        settings["prefetch_factor"] = loader.prefetch_factor
    if isinstance(loader.dataset, IterableDataset):
        stream = FetchingStream(loader.dataset, catch, pass_over)
        return DataLoader(stream, batch_size=loader.batch_size, drop_last=loader.drop_last, **settings)
    dataset = FetchingDataset(loader.dataset, catch)
    if batched:
        return DataLoader(dataset, batch_sampler=refilling or loader.batch_sampler, **settings)
    return DataLoader(dataset, batch_size=None, sampler=loader.sampler, **settings)


def _check(loader: DataLoader[Any], refill: bool) -> None:
    if type(loader).__iter__ is not DataLoader.__iter__:
        raise ArgumentTypeError(
            f"resilient(): {type(loader).__name__} has an __iter__ of its own.",
            why="it would be lost: a resilient loader asks a plain DataLoader of the same settings.",
            fix="gg.resilient(dataset)   # with collate_fn=gg.collate",
        )
    if refill and not loader.in_order:
        raise ArgumentValueError(
            "resilient(): `refill` is True, and the loader has in_order=False.",
            why="a batch is filled up with the samples after it, so there must be an order.",
            fix="gg.resilient(loader, refill=False)",
        )
    if isinstance(loader.dataset, IterDataPipe | MapDataPipe):
        raise ArgumentTypeError(
            f"resilient(): the dataset is {describe(loader.dataset)}, a data pipe.",
            why="torch gives its random seeds to data pipes only, not to what is around them.",
            fix="a Dataset or IterableDataset",
        )
