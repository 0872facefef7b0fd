"""A bad sample as an object: what stands in its place between the dataset and the collation, and why."""

from __future__ import annotations

import pickle
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils.data import get_worker_info

from gradgate._names import class_name, text_of
from gradgate._source import raising_line
from gradgate.errors import ArgumentTypeError
from gradgate.records import Incident

__all__ = ["BadSample", "Catch", "attempt", "attempt_all", "check_catch", "mark"]

Catch = tuple[type[Exception], ...]


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


def check_catch(catch: Any) -> Catch:
    """Make sure that what is caught are classes of ordinary exceptions.

    Args:
        catch: One class or several.

    Returns:
        The classes as a tuple.

    Raises:
        ArgumentTypeError: Something else is among them.
    """
    classes = catch if isinstance(catch, tuple) else (catch,)
    for one in classes:
        if not (isinstance(one, type) and issubclass(one, Exception)):
            raise ArgumentTypeError(
                f"resilient(): `catch` has {one!r}.",
                why="only classes of exceptions can be caught; KeyboardInterrupt and SystemExit always pass.",
                fix="catch=(OSError, ValueError)",
            )
    return classes


def attempt(load: Callable[[], Any], index: Any, catch: Catch) -> Any:
    """Load a sample, or give what stands in its place.

    Args:
        load: Loads it.
        index: Its index.
        catch: What may be caught. Running out of memory is no fault of a sample and always passes.

    Returns:
        The sample or a BadSample.
    """
    try:
        return load()
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except catch as error:
        return mark(error, index)


def attempt_all(load: Callable[[Any], Any], indices: Sequence[Any], catch: Catch) -> list[Any]:
    """Load samples one by one, each at most once; a marker stands in the place of a bad one.

    Args:
        load: Loads the sample of an index.
        indices: The indices.
        catch: What may be caught.

    Returns:
        As many samples and markers as there are indices.
    """
    samples: list[Any] = []
    while len(samples) < len(indices):
        try:
            # The loop is inside: on the healthy path it costs what the plain loader's does.
            for index in indices[len(samples) :]:
                samples.append(load(index))
        except (MemoryError, torch.OutOfMemoryError):
            raise
        except catch as error:
            samples.append(mark(error, indices[len(samples)]))
    return samples


def mark(error: Exception, index: Any, cause: str = "exception", **details: Any) -> BadSample:
    """Make the marker of a sample from the exception that it raised.

    Args:
        error: The exception.
        index: The index of the sample.
        cause: The kind of fault.
        **details: What else is known.

    Returns:
        The marker.
    """
    worker = get_worker_info()
    kind = type(error)
    incident = Incident(
        sample_id=None if index is None else str(index),
        stage="load",
        cause=cause,
        exception_type=class_name(kind),
        message=text_of(error),
        where=raising_line(error.__traceback__),
        details={
            "traceback": "".join(traceback.format_exception(error)),
            "arguments": [text_of(argument, repr) for argument in error.args],
            **({} if worker is None else {"worker": worker.id}),
            **details,
        },
    )
    return BadSample(incident, index, error)


def _portable(error: Exception | None) -> Exception | None:
    """Give an exception that surely can be sent to another process, or None."""
    try:
        again = pickle.loads(pickle.dumps(error))
    except Exception:  # noqa: BLE001 - whatever its class does when it is pickled
        return None
    return error if type(again) is type(error) else None
