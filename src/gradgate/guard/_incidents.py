"""From blamed rows to incidents: named, logged and handed over; and refusals, where there are too many of them."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

import torch

from gradgate._batches import BatchReader
from gradgate._payload import LIMIT, encode
from gradgate._text import visible
from gradgate._torch_private import as_written
from gradgate.errors import TooManyBadSamples
from gradgate.guard._faults import StepFault
from gradgate.guard._recovery import Dropped
from gradgate.guard._result import incident_line, incident_table
from gradgate.ledger import Ledger
from gradgate.records import Incident, Sink

# --- Records --------------------------------------------------------------------------------------------------------


LOG = logging.getLogger("gradgate")


@dataclass(frozen=True, slots=True)
class Wishes:
    """What those who keep incidents want besides."""

    payload: int | None
    snapshot: int | None

    @classmethod
    def of(cls, sinks: Sequence[Sink], payload: bool) -> Wishes:
        """Ask those who keep incidents."""
        ledgers = [sink for sink in sinks if isinstance(sink, Ledger)]
        samples = [ledger.payload_limit for ledger in ledgers if payload or ledger.payload]
        if payload and len(ledgers) < len(sinks):
            samples.append(LIMIT)
        weights = [ledger.snapshot_limit for ledger in ledgers if ledger.snapshot]
        return cls(max(samples, default=None), max(weights, default=None))


def log(incidents: Iterable[Incident]) -> None:
    """Write incidents to the log, one line each."""
    if LOG.isEnabledFor(logging.WARNING):
        for incident in incidents:
            LOG.warning("%s", visible(incident_line(incident)))


def hand_over(
    incidents: Sequence[Incident],
    sinks: Iterable[Sink],
    samples: dict[str, bytes] | None,
    snapshot: bytes | None,
    *,
    payload: bool,
) -> None:
    """Hand incidents to those who keep them."""
    for sink in sinks:
        if isinstance(sink, Ledger):
            wanted = samples if payload or sink.payload else None
            sink.record_many(incidents, wanted, snapshot=snapshot if sink.snapshot else None)
        else:
            sink.record_many(incidents, samples if payload else None)


@dataclass
class IncidentRecorder:
    """Writes down the incidents of one step."""

    modules: Sequence[torch.nn.Module]
    reader: BatchReader
    batch: Any
    size: int
    ids: Sequence[Any] | torch.Tensor | None
    losses: torch.Tensor | None
    common: dict[str, Any] = field(default_factory=dict)
    _paths: dict[torch.nn.Module, str] = field(default_factory=dict, init=False)

    def dropped(self, drops: Iterable[Dropped]) -> tuple[Incident, ...]:
        """Make the incidents of rows that were dropped, in the order of the rows."""
        return tuple(self._incident(drop) for drop in sorted(drops, key=lambda drop: drop.row))

    def transient(self, faults: Iterable[StepFault]) -> tuple[Incident, ...]:
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

    def samples(self, incidents: Sequence[Incident], limit: int) -> dict[str, bytes] | None:
        """Give the samples themselves as bytes."""
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
        name = None if self.ids is None else self.ids[row]
        return None if name is None else str(name.tolist() if isinstance(name, torch.Tensor) else name)

    def _path(self, module: torch.nn.Module | None) -> str | None:
        if module is None:
            return None
        if module not in self._paths:
            self._paths[module] = _module_path(module, self.modules)
        return self._paths[module]


# --- Refusals -------------------------------------------------------------------------------------------------------


def refused(incidents: Sequence[Incident], *, too_many: bool) -> tuple[Incident, ...]:
    """Mark the incidents of a step that was not made."""
    return tuple(
        replace(incident, transient=too_many, details={**incident.details, "refused": True}) for incident in incidents
    )


def refuse_share(incidents: Sequence[Incident], bad: int, total: int, max_bad: float) -> NoReturn:
    """Refuse a step with too many bad samples."""
    raise TooManyBadSamples(
        f"Guard: {bad} of {total} samples are bad:\n{incident_table(incidents)}",
        why=f"more than max_bad={max_bad:g} of a batch points to the code or the weights.",
        fix="gg.Guard(model, max_bad=...)   # if so many bad samples are to be expected",
        incidents=incidents,
    )


def refuse_row(incidents: Sequence[Incident], in_a_row: int, patience: int) -> NoReturn:
    """Refuse one bad step too many."""
    raise TooManyBadSamples(
        f"Guard: {in_a_row} steps in a row had bad samples, lastly:\n{incident_table(incidents)}",
        why=f"patience={patience} bad steps in a row point to something that does not pass by itself.",
        fix="gg.Guard(model, patience=...)   # if bad samples are to be expected in every step",
        incidents=incidents,
    )


def _module_path(sought: torch.nn.Module, roots: Sequence[torch.nn.Module]) -> str:
    """Name a module by its path below one of the roots; by its class if it is a root, or in none."""
    for number, root in enumerate(roots):
        for path, module in root.named_modules():
            if module is sought:
                path = as_written(path)
                return f"{number}.{path}" if path and len(roots) > 1 else path or type(module).__name__
    return type(sought).__name__
