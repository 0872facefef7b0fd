"""Which incidents are asked for: by run, cause, stage, sample and time, as a condition in SQL."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from datetime import datetime
from typing import Any, TypedDict

from gradgate.errors import ArgumentTypeError, ArgumentValueError
from gradgate.ledger._rows import as_text
from gradgate.records import Incident

__all__ = ["Filters", "Moment", "matches", "moment", "where"]

Moment = float | str | datetime
"""A time: seconds since the epoch of the clock, a datetime, ISO text, or an age such as "2h" or "3d"."""

_AGE = re.compile(r"(\d+(?:\.\d+)?)\s*([smhdw])")
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}


class Filters(TypedDict, total=False):
    """The conditions that all hold for what is given; one that is None does not count."""

    run: str | None
    cause: str | None
    stage: str | None
    sample_id: object
    since: Moment | None
    until: Moment | None
    transient: bool | None


_CONDITIONS = {
    "run": "run = ?",
    "cause": "cause = ?",
    "stage": "stage = ?",
    "sample_id": "sample_id = ?",
    "since": "time >= ?",
    "until": "time < ?",
    "transient": "transient = ?",
}


def where(filters: Mapping[str, Any], *, by_index: bool = True) -> tuple[str, list[Any]]:
    """Write filters as a condition.

    Args:
        filters: The filters by name.
        by_index: Whether SQLite may look for them in an index of their own; not where everything is counted anyway.

    Returns:
        The text after WHERE, and the values for its question marks.

    Raises:
        ArgumentTypeError: There is no such filter.

    Examples:
        >>> where({"cause": "exception", "run": None})
        ('cause = ?', ['exception'])
    """
    given = _given(filters)
    plus = "" if by_index else "+"
    return " AND ".join(f"{plus}{_CONDITIONS[name]}" for name in given) or "TRUE", list(given.values())


def matches(incident: Incident, filters: Mapping[str, Any]) -> bool:
    """Tell whether an incident that is not in the file fits the filters.

    Args:
        incident: The incident.
        filters: The filters by name.

    Returns:
        What SQLite would say.
    """
    given = _given(filters)
    since, until = given.pop("since", float("-inf")), given.pop("until", float("inf"))
    return since <= incident.time < until and all(getattr(incident, name) == value for name, value in given.items())


def _given(filters: Mapping[str, Any]) -> dict[str, Any]:
    """Give the values of the filters that count, as they are in the file."""
    unknown = sorted(set(filters) - set(_CONDITIONS))
    if unknown:
        raise ArgumentTypeError(
            f"incidents(): there is no filter `{unknown[0]}`.",
            why=f"the filters are {', '.join(_CONDITIONS)}.",
            fix='ledger.incidents(cause="exception", since="2h")',
        )
    return {name: _value(name, value) for name, value in filters.items() if value is not None}


def _value(name: str, value: Any) -> Any:
    if name in ("since", "until"):
        return moment(value)
    return int(value) if name == "transient" else as_text(value)


def moment(value: Moment) -> float:
    """Read a time.

    Args:
        value: Seconds, a datetime, ISO text, or an age.

    Returns:
        Seconds since the epoch of the clock; text without a zone is local time.

    Raises:
        ArgumentValueError: The text is neither.
        ArgumentTypeError: It is something else.

    Examples:
        >>> moment("1970-01-01T00:01:00+00:00"), moment(5)
        (60.0, 5.0)
    """
    if isinstance(value, datetime):
        return value.timestamp()
    if isinstance(value, str):
        if age := _AGE.fullmatch(value.strip()):
            return time.time() - float(age[1]) * _SECONDS[age[2]]
        try:
            return datetime.fromisoformat(value.strip()).timestamp()
        except (ValueError, OverflowError, OSError) as error:
            raise ArgumentValueError(
                f"the time {value!r} cannot be read.",
                why="a time is a date, a date with a time of day, or an age.",
                fix='since="2026-11-15" or since="2026-11-15T21:30" or since="2h"',
            ) from error
    if type(value) in (int, float):
        return float(value)
    raise ArgumentTypeError(
        f"the time is of type {type(value).__name__}.",
        why="a time is a number of seconds, a datetime, or text.",
        fix='since="2h"',
    )
