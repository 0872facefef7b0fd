"""From blamed rows to incidents: named, written to the log, and handed to whoever keeps them."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from gradgate._payload import LIMIT, encode
from gradgate.guard._batches import BatchReader
from gradgate.guard._faults import Fault
from gradgate.guard._places import module_paths
from gradgate.guard._recovery import Dropped
from gradgate.guard._tables import incident_line
from gradgate.ledger import Ledger
from gradgate.records import Incident, Sink

__all__ = ["Recorder"]

LOG = logging.getLogger("gradgate")


@dataclass
class Recorder:
    """Writes down the incidents of one step.

    Attributes:
        modules: The guarded modules, for the names of their parts.
        reader: Takes single samples of the batch.
        batch: The batch.
        size: How many samples it holds.
        ids: Their names.
        losses: Their losses, where they are known.
        common: What all incidents of the step share: run, step, epoch, rank, world size.
    """

    modules: Sequence[torch.nn.Module]
    reader: BatchReader
    batch: Any
    size: int
    ids: Sequence[Any] | torch.Tensor | None
    losses: torch.Tensor | None
    common: dict[str, Any] = field(default_factory=dict)
    _paths: dict[int, str] = field(default_factory=dict, init=False)

    def dropped(self, drops: Iterable[Dropped]) -> tuple[Incident, ...]:
        """Make the incidents of rows that were dropped, in the order of the rows."""
        return tuple(self._incident(drop) for drop in sorted(drops, key=lambda drop: drop.row))

    def transient(self, faults: Iterable[Fault]) -> tuple[Incident, ...]:
        """Make the incidents of faults that did not come again: nobody's, so without a row."""
        return tuple(
            Incident(
                **self.common,
                stage=fault.stage,
                cause=fault.cause,
                exception_type=fault.exception_type,
                message=fault.message,
                where=fault.where,
                module=self._path(fault.module),
                loss=fault.loss,
                transient=True,
                details={"batch": self.size, "tried": "the same batch once more under the same state"},
            )
            for fault in faults
        )

    def record(
        self, incidents: Sequence[Incident], sinks: Iterable[Sink], *, payload: bool, snapshot: bytes | None
    ) -> None:
        """Write incidents to the log and hand them to the sinks, with the samples and the state if asked."""
        if LOG.isEnabledFor(logging.WARNING):
            for incident in incidents:
                LOG.warning("%s", incident_line(incident))
        for sink in sinks:
            if isinstance(sink, Ledger):
                samples = self._samples(incidents, sink.payload_limit) if payload or sink.payload else None
                sink.record_many(incidents, samples, snapshot=snapshot if sink.snapshot else None)
            else:
                sink.record_many(incidents, self._samples(incidents, LIMIT) if payload else None)

    def _samples(self, incidents: Sequence[Incident], limit: int) -> dict[str, bytes] | None:
        """Give the samples themselves as bytes, by the incidents' ids."""
        rows = {incident.id: incident.row for incident in incidents if incident.row is not None}
        return {
            name: encode(self.reader.select(self.batch, [row], self.size), limit=limit) for name, row in rows.items()
        } or None

    def _incident(self, drop: Dropped) -> Incident:
        blame, fault = drop.blame, drop.blame.fault
        details: dict[str, Any] = {"batch": self.size, "tried": blame.method, "tests": drop.tests}
        if drop.together:
            details |= {"together_with": list(drop.together), "fault": fault.cause}
        return Incident(
            **self.common,
            sample_id=self._sample_id(drop.row),
            row=drop.row,
            stage=blame.stage,
            cause="together" if drop.together else fault.cause,
            exception_type=fault.exception_type,
            message=blame.message,
            where=blame.where,
            module=self._path(blame.module),
            loss=self._loss(drop),
            grad_norm=blame.norm,
            details=details,
        )

    def _loss(self, drop: Dropped) -> float | None:
        """Give the sample's own loss where it is known; the mean of a batch is not its own unless it is spoilt."""
        if self.losses is not None:
            return float(self.losses[drop.row])
        return drop.blame.fault.loss if drop.blame.fault.cause == "non-finite loss" else None

    def _sample_id(self, row: int) -> str | None:
        if self.ids is None:
            return None
        name = self.ids[row]
        return str(name.tolist() if isinstance(name, torch.Tensor) else name)

    def _path(self, module: torch.nn.Module | None) -> str | None:
        if module is None:
            return None
        if not self._paths:
            self._paths = module_paths(self.modules)
        return self._paths.get(id(module), type(module).__name__)
