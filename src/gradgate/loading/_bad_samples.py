"""Samples that could not be loaded: tried again, marked, named, and written down."""

from __future__ import annotations

import pickle
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from time import sleep
from typing import Any

import torch
import torch.distributed
from torch.utils.data import IterableDataset, get_worker_info

from gradgate._source import raising_line
from gradgate._text import as_text, class_name, log_line, text_of
from gradgate.errors import ArgumentValueError
from gradgate.records import Incident, Sink

Catch = tuple[type[Exception], ...]

Names = Sequence[object] | Callable[[int], object] | None
"""The ids of the samples of a dataset: a sequence by index, a function of the index, or None for the index itself."""


@dataclass(frozen=True)
class BadSample:
    """What stands in the place of a sample that could not be loaded.

    It can be pickled, whatever the exception: one that cannot be is left behind, its type and text are in the incident.

    Attributes:
        incident: What happened.
        index: The index that was asked for; for a stream, the sample's number.
        exception: The exception itself, where it could be kept.

    Examples:
        >>> bad = gg.resilient([1.0, 2.0])[7]
        >>> bad.incident.sample_id, bad.exception
        ('7', IndexError('list index out of range'))
    """

    incident: Incident
    index: Any = None
    exception: Exception | None = field(default=None, compare=False)

    def __reduce__(self) -> tuple[Any, ...]:
        return BadSample, (self.incident, self.index, _portable(self.exception))


@dataclass(frozen=True)
class Attempts:
    """Which exceptions cost a sample, and which are tried again before that."""

    catch: Catch
    retry_on: Catch = ()
    retries: int = 0
    backoff: float = 0.0

    def load(self, load: Callable[[Any], Any], index: Any) -> tuple[Any, BadSample | None]:
        """Load one sample; give it or its marker, and the marker of what went wrong before a retry passed."""
        samples, retried = self.load_all(load, [index])
        return samples[0], retried.get(0)

    def load_all(self, load: Callable[[Any], Any], indices: Sequence[Any]) -> tuple[list[Any], dict[int, BadSample]]:
        """Load samples one by one; give samples or markers, and by row the markers of what passed at a retry."""
        samples: list[Any] = []
        retried: dict[int, BadSample] = {}
        while len(samples) < len(indices):
            try:
                # The loop is inside: on the healthy path it costs what the plain loader's does.
                for index in indices[len(samples) :]:
                    samples.append(load(index))
            except (MemoryError, torch.OutOfMemoryError):
                raise
            except (*self.catch, *self.retry_on) as error:
                row = len(samples)
                sample, before = self._again(load, indices[row], error)
                samples.append(sample)
                if before is not None:
                    retried[row] = before
        return samples, retried

    def _again(self, load: Callable[[Any], Any], index: Any, error: Exception) -> tuple[Any, BadSample | None]:
        first = error
        for number in range(self.retries):
            if not isinstance(error, self.retry_on):
                break
            sleep(self.backoff * 2**number)
            try:
                sample = load(index)
            except (MemoryError, torch.OutOfMemoryError):
                raise
            except (*self.catch, *self.retry_on) as again:
                error = again
            else:
                return sample, mark(first, index, "exception, gone at a retry", transient=True, retries=number + 1)
        if not isinstance(error, self.catch):
            raise error
        return mark(error, index), None


def mark(
    error: Exception, index: Any, cause: str = "exception", *, transient: bool = False, **details: Any
) -> BadSample:
    worker = get_worker_info()
    incident = Incident(
        sample_id=None if index is None else str(index),
        stage="load",
        cause=cause,
        exception_type=class_name(type(error)),
        message=text_of(error),
        where=raising_line(error.__traceback__),
        transient=transient,
        details={
            "traceback": "".join(traceback.format_exception(error)),
            "arguments": [text_of(argument, repr) for argument in error.args],
            **({} if worker is None else {"worker": worker.id}),
            **details,
        },
    )
    return BadSample(incident, index, error)


def name_of(names: Names, index: Any) -> str:
    if names is None:
        return str(index)
    return as_text(names(index) if callable(names) else names[index])  # as the ledger writes it: 3 for tensor(3)


def check_names(names: Sequence[object], samples: int, function: str, *, right: bool) -> None:
    """Refuse names that are not those of the samples, before the first one is asked for."""
    if not right:
        raise ArgumentValueError(
            f"{function}(): there are {len(names)} names in `ids`, but {samples} samples.",
            why="each sample has one name.",
            fix="ids=[name_of(index) for index in range(len(dataset))]",
        )


class LoadingLog:
    def __init__(self, dataset: Any, ids: Names, sink: Sink | None) -> None:
        if isinstance(ids, Sequence) and not isinstance(dataset, IterableDataset) and hasattr(dataset, "__len__"):
            check_names(ids, len(dataset), "resilient", right=len(ids) >= len(dataset))
        self._names: Names = getattr(dataset, "sample_id", None) if ids is None else ids
        self.sink = sink
        self._incidents: list[Incident] = []

    @property
    def incidents(self) -> tuple[Incident, ...]:
        return tuple(self._incidents)

    def name(self, index: Any) -> str | None:
        """Return the id of a sample; None if it is not known which sample it is."""
        return None if index is None else name_of(self._names, index)

    def noted(self, bad: BadSample) -> BadSample:
        """Write down one bad sample, and give it with its id."""
        (incident,) = self.record([bad])
        return replace(bad, incident=incident)

    def record(self, bad: Sequence[BadSample], rows: Sequence[int | None] = (None,), **common: Any) -> list[Incident]:
        """Write down the bad samples of one batch, with what they share, such as step and epoch."""
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            common |= {"rank": torch.distributed.get_rank(), "world_size": torch.distributed.get_world_size()}
        incidents = [
            replace(marker.incident, sample_id=self.name(marker.index), row=row, **common)
            for marker, row in zip(bad, rows, strict=True)
        ]
        for incident in incidents:
            end = "loaded at a retry" if incident.transient else "left out while loading"
            what = f"{incident.exception_type}: {incident.message} ({incident.where or incident.cause})"
            log_line(f"sample {incident.sample_id} {end}: {what}")
        for marker in bad:
            if marker.exception is not None:
                marker.exception.with_traceback(None)  # it holds the frames, and with them the samples of the batch
        self._incidents += incidents
        if self.sink is not None and incidents:
            self.sink.record_many(incidents)
        return incidents


def _portable(error: Exception | None) -> Exception | None:
    """Return an exception that surely can be sent to another process, or None."""
    try:
        again = pickle.loads(pickle.dumps(error))
    except Exception:  # noqa: BLE001 - whatever its class does when it is pickled
        return None
    return error if type(again) is type(error) else None
