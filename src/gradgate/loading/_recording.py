"""From markers to incidents: named, written to the log, and handed to whoever keeps them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch.distributed

from gradgate.loading._markers import BadSample
from gradgate.loading._quarantine import Names
from gradgate.records import Incident, Sink

__all__ = ["Recorder"]

LOG = logging.getLogger("gradgate")


class Recorder:
    """Writes down what was left out.

    Args:
        dataset: The dataset; if it has a `sample_id(index)`, that names its samples.
        ids: What the samples are called: names by index, or a function of the index.
        sink: Where incidents go.
    """

    def __init__(self, dataset: Any, ids: Names, sink: Sink | None) -> None:
        self._names: Names | Callable[[Any], object] = getattr(dataset, "sample_id", None) if ids is None else ids
        self._sink = sink
        self._incidents: list[Incident] = []

    @property
    def incidents(self) -> tuple[Incident, ...]:
        """All of them, in the order in which they were met."""
        return tuple(self._incidents)

    def name(self, index: Any) -> str:
        """Give the name of a sample."""
        if self._names is None or index is None:
            return str(index)
        return str(self._names(index) if callable(self._names) else self._names[index])

    def noted(self, bad: BadSample) -> BadSample:
        """Write down one bad sample, and give it with its name."""
        (incident,) = self.record([bad])
        return replace(bad, incident=incident)

    def record(self, bad: Sequence[BadSample], rows: Sequence[int | None] = (None,), **common: Any) -> list[Incident]:
        """Write down the bad samples of one batch.

        Args:
            bad: Their markers.
            rows: Their places in the batch.
            **common: What all of them share, such as step and epoch.

        Returns:
            Their incidents.
        """
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            common |= {"rank": torch.distributed.get_rank(), "world_size": torch.distributed.get_world_size()}
        incidents = [
            replace(marker.incident, sample_id=self.name(marker.index), row=row, **common)
            for marker, row in zip(bad, rows, strict=True)
        ]
        for incident in incidents:
            LOG.warning(
                "sample %s left out while loading: %s: %s (%s)",
                incident.sample_id,
                incident.exception_type,
                incident.message,
                incident.where or incident.cause,
            )
        for marker in bad:
            if marker.exception is not None:
                marker.exception.with_traceback(None)  # it holds the frames, and with them the samples of the batch
        self._incidents += incidents
        if self._sink is not None and incidents:
            self._sink.record_many(incidents)
        return incidents
