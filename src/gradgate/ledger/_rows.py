"""An incident as a row of the table, and back.

Writing is total: whatever an incident holds becomes a row, because a training must not stop over a record. Reading
is strict: a row of the wrong kinds is an error, because a damaged file must not pass as evidence.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from types import NoneType
from typing import Any

from gradgate._text import as_text, json_text
from gradgate.errors import LedgerError
from gradgate.records import Incident

MESSAGE_LIMIT = 2_000
"""How many characters of an exception's text are kept: it may quote the data."""

NAME_LIMIT = 50_000
"""How many characters the name of a sample, a run, a module or a line may have."""

DETAILS_LIMIT = 16_000
"""How many characters the details may take as JSON."""

DEEPEST = 64
"""How deeply JSON in a ledger may be nested; nothing over 9 is written."""

COLUMNS = (
    "id", "run", "step", "epoch", "rank", "world_size", "sample_id", "row", "stage", "cause", "exception_type",
    "message", "place", "module", "loss", "grad_norm", "transient", "time", "details",
)  # fmt: skip
"""The columns of an incident, in the order of its attributes; `place` is `where`, which is a word of SQL."""

_ATTRIBUTES = tuple(Incident.__dataclass_fields__)
_LARGEST = 2**63 - 1


def to_row(incident: Incident, run: str | None = None) -> tuple[Any, ...]:
    """Give an incident as a row: one value for each of COLUMNS; `run` is its run if it does not say."""
    return (
        name_text(incident.id),
        _name(incident.run if incident.run is not None else run),
        _integer(incident.step),
        _integer(incident.epoch),
        _integer(incident.rank) or 0,
        _integer(incident.world_size) or 1,
        _name(incident.sample_id),
        _integer(incident.row),
        name_text(incident.stage),
        as_text(incident.cause, MESSAGE_LIMIT),
        _name(incident.exception_type),
        as_text(incident.message, MESSAGE_LIMIT),
        _name(incident.where),
        _name(incident.module),
        _real(incident.loss),
        _real(incident.grad_norm),
        int(bool(incident.transient)),
        finite(incident.time),
        as_json(incident.details, DETAILS_LIMIT),
    )


def from_row(row: Sequence[Any]) -> Incident:
    """Give a row as an incident; a value of a kind that no ledger writes is a LedgerError."""
    wrong = _first_wrong(tuple(map(type, row)))
    if wrong is not None:
        raise damaged(f"`{COLUMNS[wrong]}` of an incident is {row[wrong]!r:.60}")
    values = dict(zip(_ATTRIBUTES, row, strict=True))
    for name in ("loss", "grad_norm"):
        number = values[name]
        if number is not None:
            if type(number) is str and number != "nan":
                raise damaged(f"`{name}` of an incident is {number!r:.60}")
            values[name] = float(number)
    values["transient"] = bool(values["transient"])
    values["details"] = read_json(values["details"])
    return Incident(**values)


def check_kinds(values: Mapping[str, Any], kinds: Mapping[str, tuple[type, ...]], of: str) -> None:
    """Make sure that what was read is of the kinds that are written."""
    for name, allowed in kinds.items():
        if name in values and not isinstance(values[name], allowed):
            raise damaged(f"`{name}` of {of} is {values[name]!r:.60}")


def name_text(value: object) -> str:
    """Give the name of something as text that a row can hold."""
    return as_text(value, NAME_LIMIT)


def as_json(value: Mapping[str, Any], limit: int) -> str:
    """Write an object as JSON, whatever is in it; what is longer than the limit is cut and becomes text."""
    if not value:
        return "{}"
    text = json_text(value, depth=9)
    return text if len(text) <= limit else json_text({"cut": text[:limit], "characters": len(text)})


def read_json(text: str) -> dict[str, Any]:
    """Read the JSON of a row, which must be an object."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise damaged(f"a JSON text cannot be read ({error})") from error
    if not isinstance(value, dict):
        raise damaged("a JSON text is not an object")
    if text.count("{") + text.count("[") > DEEPEST and _is_deep(value):
        raise damaged(f"a JSON text is nested more than {DEEPEST} deep")
    return value


def damaged(what: str) -> LedgerError:
    """Say that a ledger holds what no ledger writes."""
    return LedgerError(
        f"the ledger is damaged: {what}.", why="no ledger writes that.", fix="PRAGMA integrity_check   -- in sqlite3"
    )


_KINDS: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(("id", "stage", "cause", "message", "details"), (str,)),
    **dict.fromkeys(("run", "sample_id", "exception_type", "place", "module"), (str, NoneType)),
    **dict.fromkeys(("step", "epoch", "row"), (int, NoneType)),
    **dict.fromkeys(("rank", "world_size", "transient"), (int,)),
    **dict.fromkeys(("loss", "grad_norm"), (float, int, str, NoneType)),
    "time": (float, int),
}


@lru_cache(1024)
def _first_wrong(kinds: tuple[type, ...]) -> int | None:
    """Find the first column that is of a wrong kind; the rows of a ledger have few combinations of kinds."""
    pairs = enumerate(zip(COLUMNS, kinds, strict=True))
    return next((place for place, (name, kind) in pairs if kind not in _KINDS[name]), None)


def _is_deep(value: Any) -> bool:
    level = [value]
    for _ in range(DEEPEST):
        level = [
            item
            for one in level
            if isinstance(one, dict | list)
            for item in (one.values() if isinstance(one, dict) else one)
        ]
    return bool(level)


def _name(value: object) -> str | None:
    return None if value is None else name_text(value)


def _integer(value: Any) -> int | None:
    try:
        number = int(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        return None
    return number if -_LARGEST <= number <= _LARGEST else None


def _real(value: Any) -> float | str | None:
    """Give a number as SQLite can hold it: a NaN, which it would turn into NULL, as the text 'nan'."""
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        return None
    return "nan" if math.isnan(number) else number


def finite(value: Any) -> float:
    """Give a time as a number that a calendar may know; 0 for what is none."""
    number = _real(value)
    return number if isinstance(number, float) and math.isfinite(number) else 0.0
