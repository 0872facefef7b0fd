"""What gradgate writes down: incidents (a sample was dropped), findings (the doctor says), and where they go.

Plain frozen records of the standard library, so that a ledger or a report can be read without torch.
"""

from __future__ import annotations

import os
import time as clock
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, Protocol, runtime_checkable

__all__ = ["Finding", "Incident", "Severity", "Sink", "Stage"]

Stage = Literal["load", "forward", "loss", "backward", "step"]
"""Where a sample failed."""
Severity = Literal["error", "warning", "info"]
"""How much a finding matters."""


class Record:
    """What every record can do."""

    __slots__ = ()

    def to_dict(self) -> dict[str, Any]:
        """Return the record as a plain dictionary.

        Returns:
            One entry for each attribute.
        """
        values: dict[str, Any] = asdict(self)  # type: ignore[call-overload]
        return values


@dataclass(frozen=True, kw_only=True, slots=True)
class Incident(Record):
    """One sample (or value) that was left out, with its reason.

    Attributes:
        id: The incident's own name, unique over runs and ranks.
        run: The run it happened in.
        step: The step of the run, counted from 0.
        epoch: The epoch, where it is known.
        rank: The process it happened in.
        world_size: How many processes there were.
        sample_id: The sample's name as the user gave it, as text.
        row: The sample's place in its batch.
        stage: Where it showed: while loading, in forward, in the loss, in backward, or in the steps after it.
        cause: The kind of fault in a few words, such as "exception" or "non-finite gradient".
        exception_type: The class of the exception, with its module.
        message: What the exception or the check said.
        where: The user's line, as "path.py:12".
        module: The path of the module that was running, as in `named_modules`.
        loss: The sample's loss, where it has one.
        grad_norm: The norm of the sample's gradient, where it was computed.
        transient: True when nothing is held against the sample: it did not fail again under the same state, or so
            many failed with it that the step was refused.
        time: Seconds since the epoch of the clock.
        details: Whatever else was seen, as values that JSON can hold.

    Examples:
        >>> incident = Incident(stage="forward", cause="exception", sample_id="img_17.png", row=3)
        >>> incident.sample_id, incident.transient
        ('img_17.png', False)
    """

    id: str = field(default_factory=lambda: os.urandom(16).hex())  # as good as a UUID, in a fifth of its time
    run: str | None = None
    step: int | None = None
    epoch: int | None = None
    rank: int = 0
    world_size: int = 1
    sample_id: str | None = None
    row: int | None = None
    stage: Stage
    cause: str
    exception_type: str | None = None
    message: str = ""
    where: str | None = None
    module: str | None = None
    loss: float | None = None
    grad_norm: float | None = None
    transient: bool = False
    time: float = field(default_factory=clock.time)
    details: dict[str, Any] = field(default_factory=dict, compare=False, hash=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding(Record):
    """One thing that the doctor says, with its place and its remedy.

    Attributes:
        code: The stable code of this kind of finding, such as "GG101".
        severity: "error", "warning" or "info".
        title: The finding in one line.
        where: The user's line, as "path.py:12".
        source: The text of that line.
        module: The path of the module concerned, as in `named_modules`.
        reason: Why it is so.
        fix: The remedy, as code to paste.
        samples: The rows of the batch concerned, where there are such.
        also: Further places that belong to it, as "path.py:12".
        consequences: What follows from it, one line each: no findings of their own.

    Examples:
        >>> Finding(code="GG101", severity="error", title="encoder.weight gets no gradient").code
        'GG101'
    """

    code: str
    severity: Severity
    title: str
    where: str | None = None
    source: str | None = None
    module: str | None = None
    reason: str = ""
    fix: str = ""
    samples: tuple[int, ...] = ()
    also: tuple[str, ...] = ()
    consequences: tuple[str, ...] = ()


@runtime_checkable
class Sink(Protocol):
    """Where incidents go: a ledger, or anything else that takes them.

    Examples:
        >>> class Printer:
        ...     def record_many(self, incidents, payloads=None):
        ...         print(*(incident.sample_id for incident in incidents))
        >>> isinstance(Printer(), Sink)
        True
    """

    def record_many(self, incidents: Sequence[Incident], payloads: Mapping[str, bytes] | None = None) -> None:
        """Take the incidents of one step.

        Args:
            incidents: What was dropped.
            payloads: The samples themselves as bytes, by the incident's id, where they were asked for.
        """
