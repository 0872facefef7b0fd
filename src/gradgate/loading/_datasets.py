"""Datasets that answer for a bad sample with a marker instead of an exception."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from torch.utils.data import Dataset, IterableDataset, get_worker_info

from gradgate.loading._markers import BadSample, Catch, attempt
from gradgate.loading._recording import Recorder
from gradgate.records import Incident

__all__ = ["Around", "ResilientDataset", "ResilientStream", "steps"]


class Around:
    """Stands before a dataset: what it does not have itself is read from, and written to, the dataset."""

    _own = frozenset({"_dataset", "_catch", "_recorder", "_pass_over"})

    def __init__(self, dataset: Any, catch: Catch) -> None:
        self._dataset = dataset
        self._catch = catch

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
    """Writes down what was left out."""

    def __init__(self, dataset: Any, catch: Catch, recorder: Recorder) -> None:
        super().__init__(dataset, catch)
        self._recorder = recorder

    @property
    def incidents(self) -> tuple[Incident, ...]:
        """What was left out in this process; a worker's incidents are in the worker, and in the sink."""
        return self._recorder.incidents

    def _noted(self, sample: Any) -> Any:
        return self._recorder.noted(sample) if isinstance(sample, BadSample) else sample


class ResilientDataset(_Noting, Dataset[Any]):
    """A map-style dataset that gives a `BadSample` where the one within raises; made by `resilient(dataset)`.

    Args:
        dataset: The dataset.
        catch: What may be caught.
        recorder: Is told of each bad sample.

    Examples:
        >>> dataset = gg.resilient([1.0, 2.0])
        >>> dataset[0], type(dataset[7]).__name__
        (1.0, 'BadSample')
        >>> [incident.sample_id for incident in dataset.incidents]
        ['7']
    """

    def __getitem__(self, index: Any) -> Any:
        return self._noted(attempt(lambda: self._dataset[index], index, self._catch))


class ResilientStream(_Noting, IterableDataset[Any]):
    """An iterable dataset that gives a `BadSample` where `next` of the one within raises; made by `resilient(dataset)`.

    An iterator that is a class goes on after it. A generator that raised is finished, and the incident says so.

    Args:
        dataset: The dataset.
        catch: What may be caught.
        recorder: Is told of each bad sample.

    Examples:
        >>> class Broken(torch.utils.data.IterableDataset):
        ...     def __iter__(self):
        ...         yield 1.0
        ...         raise OSError("truncated")
        >>> [getattr(sample, "incident", sample) for sample in gg.resilient(Broken())][1].cause
        'exception, and the generator is finished'
    """

    def __iter__(self) -> Iterator[Any]:
        for _, sample in steps(self._dataset, self._catch):
            yield self._noted(sample)


_END = object()


def steps(stream: Any, catch: Catch) -> Iterator[tuple[Any, Any]]:
    """Go through a stream.

    Args:
        stream: What is iterated over.
        catch: What may be caught.

    Yields:
        Each sample, or the marker in its place, with its number in the stream; in a worker after the worker's own.
    """
    within = iter(stream)
    worker = get_worker_info()
    number = 0
    while True:
        name = number if worker is None else f"{worker.id}:{number}"
        sample = attempt(lambda: next(within, _END), name, catch)
        if sample is _END:
            return
        if isinstance(sample, BadSample) and inspect.isgenerator(within):
            incident = replace(sample.incident, cause="exception, and the generator is finished")
            sample = replace(sample, incident=incident)
        yield name, sample
        number += 1
