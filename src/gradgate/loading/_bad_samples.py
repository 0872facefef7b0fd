"""Samples that could not be loaded: tried again, marked, named, and written down."""

from __future__ import annotations

import pickle
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from time import sleep
from typing import Any

import torch
import torch.distributed
from torch.utils.data import IterableDataset, get_worker_info

from gradgate._loader_link import LoaderIds, give_to
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

    def __repr__(self) -> str:
        incident = self.incident
        return f"BadSample({incident.sample_id!r}, {incident.exception_type or incident.cause}: {incident.message})"

    def __reduce__(self) -> tuple[Any, ...]:
        return BadSample, (self.incident, self.index, _portable(self.exception))


@dataclass(frozen=True)
class Attempts:
    """Which exceptions cost a sample, and which are tried again before that."""

    catch: Catch
    retry_on: Catch = ()
    retries: int = 0
    backoff: float = 0.0

    def load(self, load: Callable[[], Any], index: Any) -> tuple[Any, BadSample | None]:
        """Load a sample; return it or its marker, and the marker of what went wrong before a retry passed."""
        errors: list[Exception] = []
        while True:
            try:
                sample = load()
            except (MemoryError, torch.OutOfMemoryError):
                raise
            except (*self.catch, *self.retry_on) as error:
                errors.append(error)
                if isinstance(error, self.retry_on) and len(errors) <= self.retries:
                    sleep(self.backoff * 2 ** (len(errors) - 1))
                    continue
                if not isinstance(error, self.catch):
                    raise
                return mark(error, index), None
            if not errors:
                return sample, None
            cause = "exception, gone at a retry"
            return sample, mark(errors[0], index, cause, transient=True, retries=len(errors))


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


def names_for(dataset: Any, ids: Names, function: str, *, more: bool = False) -> Names:
    """Return the names of samples: those that were given, or the dataset's own; `more` allows for names to spare."""
    if isinstance(ids, Sequence) and not isinstance(dataset, IterableDataset) and hasattr(dataset, "__len__"):
        samples = len(dataset)
        if len(ids) < samples or (len(ids) > samples and not more):
            what = f"{function}(): there are {len(ids)} names in `ids`, but {samples} samples."
            fix = "ids=[name_of(index) for index in range(len(dataset))]"
            raise ArgumentValueError(what, why="each sample has one name.", fix=fix)
    return getattr(dataset, "sample_id", None) if ids is None else ids


def this_rank() -> tuple[int, int]:
    """Return the rank of this process, and how many processes there are."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    return 0, 1


class LoadingLog:
    def __init__(self, dataset: Any, ids: Names, sink: Sink | None) -> None:
        self._names = names_for(dataset, ids, "resilient", more=True)
        self.sink = sink
        self._incidents: list[Incident] = []

    @property
    def incidents(self) -> tuple[Incident, ...]:
        return tuple(self._incidents)

    def describe(self, source: object) -> str:
        left_out = sum(not incident.transient for incident in self._incidents)
        return f"<resilient {type(source).__name__}: {left_out} samples left out>"

    def ids(self, indices: Iterable[Any]) -> LoaderIds:
        """Return the ids of samples; None if it is not known which sample it is."""
        return LoaderIds(None if index is None else name_of(self._names, index) for index in indices)

    def noted(self, bad: BadSample) -> BadSample:
        """Write down one bad sample, and give it with its id."""
        self.record([bad])
        return replace(bad, incident=self._incidents[-1])

    def record(self, bad: Sequence[BadSample], rows: Sequence[int | None] = (None,), **common: Any) -> None:
        """Write down the bad samples of one batch, with what they share, such as step and epoch."""
        common["rank"], common["world_size"] = this_rank()
        incidents = []
        for marker, row, name in zip(bad, rows, self.ids(marker.index for marker in bad), strict=True):
            incident = replace(marker.incident, sample_id=name, row=row, **common)
            end = "loaded at a retry" if incident.transient else "left out while loading"
            what = f"{incident.exception_type}: {incident.message} ({incident.where or incident.cause})"
            log_line(f"sample {incident.sample_id} {end}: {what}")
            if marker.exception is not None:
                marker.exception.with_traceback(None)  # it holds the frames, and with them the samples of the batch
            incidents.append(incident)
        self._incidents += incidents
        if self.sink is not None and incidents:
            give_to(self.sink, incidents)


def _portable(error: Exception | None) -> Exception | None:
    """Return an exception that surely can be sent to another process, or None."""
    try:
        again = pickle.loads(pickle.dumps(error))
    except Exception:  # noqa: BLE001 - whatever its class does when it is pickled
        return None
    return error if type(again) is type(error) else None
