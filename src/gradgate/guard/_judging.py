"""When bad samples are too many: the refusals, in words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NoReturn

from gradgate.errors import TooManyBadSamples
from gradgate.guard._tables import incident_table
from gradgate.records import Incident

__all__ = ["refuse_row", "refuse_share", "refused"]


def refused(incidents: Sequence[Incident], *, too_many: bool) -> tuple[Incident, ...]:
    """Mark the incidents of a step that was not made.

    Args:
        incidents: What was found.
        too_many: Whether so much of the batch was bad that the code or the weights are to blame: then nothing is held
            against the samples, and a later epoch does not leave them out.

    Returns:
        The same incidents, marked.
    """
    return tuple(
        replace(incident, transient=too_many, details={**incident.details, "refused": True}) for incident in incidents
    )


def refuse_share(incidents: Sequence[Incident], bad: int, total: int, max_bad: float) -> NoReturn:
    """Refuse a step with too many bad samples.

    Args:
        incidents: The bad samples.
        bad: How many there are.
        total: Of how many.
        max_bad: The share that is allowed.

    Raises:
        TooManyBadSamples: Always.
    """
    raise TooManyBadSamples(
        f"Guard: {bad} of {total} samples are bad:\n{incident_table(incidents)}",
        why=f"more than max_bad={max_bad:g} of a batch points to the code or the weights.",
        fix="gg.Guard(model, max_bad=...)   # if so many bad samples are to be expected",
        incidents=incidents,
    )


def refuse_row(incidents: Sequence[Incident], in_a_row: int, patience: int) -> NoReturn:
    """Refuse one bad step too many.

    Args:
        incidents: The bad samples of the last one.
        in_a_row: How many there were.
        patience: How many are too many.

    Raises:
        TooManyBadSamples: Always.
    """
    raise TooManyBadSamples(
        f"Guard: {in_a_row} steps in a row had bad samples, lastly:\n{incident_table(incidents)}",
        why=f"patience={patience} bad steps in a row point to something that does not pass by itself.",
        fix="gg.Guard(model, patience=...)   # if bad samples are to be expected in every step",
        incidents=incidents,
    )
