"""Incidents as people read them: a table, and one line each for the log."""

from __future__ import annotations

from collections.abc import Sequence

from gradgate.records import Incident

__all__ = ["incident_line", "incident_table", "text_table"]

SHOWN = 20
WIDEST = 60


def incident_table(incidents: Sequence[Incident]) -> str:
    """Write incidents as a table.

    Args:
        incidents: What to write; after the first 20 only their number.

    Returns:
        One line for each, under a heading.

    Examples:
        >>> print(incident_table([Incident(stage="loss", cause="non-finite loss", row=3, message="inf")]))
        row  sample  stage  cause            where  what
        3    -       loss   non-finite loss  -      inf
    """
    head: tuple[str, ...] = ("row", "sample", "stage", "cause", "where", "what")
    lines = [_cells(incident) for incident in incidents[:SHOWN]]
    if any(incident.world_size > 1 for incident in incidents):
        head = ("rank", *head)
        lines = [(str(one.rank), *cells) for one, cells in zip(incidents[:SHOWN], lines, strict=True)]
    table = text_table(head, lines)
    more = len(incidents) - SHOWN
    return f"{table}\n... and {more} more" if more > 0 else table


def text_table(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """Write lines under a heading in columns.

    Args:
        head: The names of the columns.
        lines: The cells of each line.

    Returns:
        The table, without a newline at the end.
    """
    widths = [max(map(len, column)) for column in zip(head, *lines, strict=True)]
    written = (
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in [head, *lines]
    )
    return "\n".join(line.rstrip() for line in written)


def incident_line(incident: Incident) -> str:
    """Write an incident as one line for the log.

    Args:
        incident: The incident.

    Returns:
        The line.

    Examples:
        >>> incident_line(Incident(stage="loss", cause="non-finite loss", row=3, sample_id="a.png", step=7))
        'step 7: dropped sample a.png (row 3): non-finite loss in loss'
    """
    row, sample, stage, cause, where, what = _cells(incident)
    who = f"sample {sample} (row {row})" if incident.sample_id is not None else f"row {row}"
    if "refused" in incident.details:
        who = f"refused because of {who}"
    elif incident.transient:
        who = "a fault that did not come again, nothing dropped"
    else:
        who = f"dropped {who}"
    place = "" if incident.where is None else f" at {where}"
    step = "" if incident.step is None else f"step {incident.step}: "
    return f"{step}{who}: {cause} in {incident.module or stage}{place}{': ' if what else ''}{what}"


def _cells(incident: Incident) -> tuple[str, ...]:
    message = " ".join(incident.message.split())
    if incident.exception_type is not None:
        message = f"{incident.exception_type.rpartition('.')[2]}: {message}"
    return (
        "-" if incident.row is None else str(incident.row),
        incident.sample_id or "-",
        incident.stage,
        incident.cause,
        incident.where or "-",
        message if len(message) <= WIDEST else f"{message[: WIDEST - 3]}...",
    )
