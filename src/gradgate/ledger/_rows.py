"""An incident as a row of the table, and back.

Writing is total: whatever an incident holds becomes a row, because a training must not stop over a record. Reading
is strict: a row of the wrong kinds is an error, because a damaged file must not pass as evidence.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from types import NoneType
from typing import Any

from gradgate.errors import LedgerError
from gradgate.records import Incident

__all__ = [
    "COLUMNS",
    "DETAILS_LIMIT",
    "MESSAGE_LIMIT",
    "as_json",
    "as_text",
    "check_kinds",
    "from_row",
    "read_json",
    "to_row",
]

MESSAGE_LIMIT = 2_000
"""How many characters of an exception's text are kept: it may quote the data."""

DETAILS_LIMIT = 16_000
"""How many characters the details may take as JSON."""

COLUMNS = (
    "id", "run", "step", "epoch", "rank", "world_size", "sample_id", "row", "stage", "cause", "exception_type",
    "message", "place", "module", "loss", "grad_norm", "transient", "time", "details",
)  # fmt: skip
"""The columns of an incident in the order of the rows; `place` is `where`, which is a word of SQL."""

_LARGEST = 2**63 - 1


def to_row(incident: Incident, run: str | None = None) -> tuple[Any, ...]:
    """Give an incident as a row.

    Args:
        incident: The incident.
        run: The run that it belongs to if it does not say.

    Returns:
        One value for each of COLUMNS.
    """
    return (
        as_text(incident.id),
        _text_or_none(incident.run if incident.run is not None else run),
        _integer(incident.step),
        _integer(incident.epoch),
        _integer(incident.rank) or 0,
        _integer(incident.world_size) or 1,
        _text_or_none(incident.sample_id),
        _integer(incident.row),
        as_text(incident.stage),
        as_text(incident.cause, MESSAGE_LIMIT),
        _text_or_none(incident.exception_type),
        as_text(incident.message, MESSAGE_LIMIT),
        _text_or_none(incident.where),
        _text_or_none(incident.module),
        _real(incident.loss),
        _real(incident.grad_norm),
        int(bool(incident.transient)),
        _finite(incident.time),
        _details(incident.details),
    )


def from_row(row: Sequence[Any]) -> Incident:
    """Give a row as an incident.

    Args:
        row: One value for each of COLUMNS.

    Returns:
        The incident.

    Raises:
        LedgerError: A value is of a kind that no ledger writes.
    """
    values = dict(zip(COLUMNS, row, strict=True))
    check_kinds(values, _KINDS, "an incident")
    for name in ("loss", "grad_norm"):
        if isinstance(values[name], str) and values[name] != "nan":
            raise _damaged(f"`{name}` of an incident is {values[name]!r:.60}")
        values[name] = None if values[name] is None else float(values[name])
    values["where"] = values.pop("place")
    values["transient"] = bool(values["transient"])
    values["details"] = read_json(values["details"])
    return Incident(**values)


def check_kinds(values: Mapping[str, Any], kinds: Mapping[str, tuple[type, ...]], of: str) -> None:
    """Make sure that what was read is of the kinds that are written.

    Args:
        values: What was read, by name; not all need be there.
        kinds: What each may be.
        of: Whose values they are.

    Raises:
        LedgerError: One is something else.
    """
    for name, allowed in kinds.items():
        if name in values and not isinstance(values[name], allowed):
            raise _damaged(f"`{name}` of {of} is {values[name]!r:.60}")


def as_text(value: object, limit: int | None = None) -> str:
    """Give a value as text that SQLite can hold, cut to a length.

    Args:
        value: Anything with a text.
        limit: How many characters to keep, all if None.

    Returns:
        The text; what cannot be encoded (lone surrogates in file names) is written as an escape.
    """
    try:
        # A tensor of one number, as loaders make of an index, is that number.
        text = str(value.item() if getattr(value, "shape", None) == () and hasattr(value, "item") else value)
    except Exception as error:  # noqa: BLE001 - a user's own __str__ may raise anything, and a record must be made
        text = f"<{type(value).__name__} whose text cannot be had: {type(error).__name__}>"
    if limit is not None and len(text) > limit:
        text = f"{text[:limit]}... ({len(text) - limit:,} more characters)"
    return text.encode("utf-8", "backslashreplace").decode()


def as_json(value: Mapping[str, Any]) -> str:
    """Write an object as JSON, whatever is in it; a number that JSON cannot hold becomes text.

    Args:
        value: The object.

    Returns:
        The JSON.
    """
    plain = _plain(value, depth=0)
    return json.dumps(plain if isinstance(plain, dict) else {"value": plain}, ensure_ascii=False, allow_nan=False)


def read_json(text: str) -> dict[str, Any]:
    """Read the JSON of a row, which must be an object.

    Args:
        text: The JSON.

    Returns:
        The object.

    Raises:
        LedgerError: It is something else.
    """
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _damaged(f"a JSON text cannot be read ({error})") from error
    if not isinstance(value, dict):
        raise _damaged("a JSON text is not an object")
    return value


_KINDS: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(("id", "stage", "cause", "message", "details"), (str,)),
    **dict.fromkeys(("run", "sample_id", "exception_type", "place", "module"), (str, NoneType)),
    **dict.fromkeys(("step", "epoch", "row"), (int, NoneType)),
    **dict.fromkeys(("rank", "world_size", "transient"), (int,)),
    **dict.fromkeys(("loss", "grad_norm"), (float, int, str, NoneType)),
    "time": (float, int),
}


def _damaged(what: str) -> LedgerError:
    return LedgerError(
        f"the ledger is damaged: {what}.", why="no ledger writes that.", fix="PRAGMA integrity_check   -- in sqlite3"
    )


def _text_or_none(value: object) -> str | None:
    return None if value is None else as_text(value)


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


def _finite(value: Any) -> float:
    number = _real(value)
    return number if isinstance(number, float) and math.isfinite(number) else 0.0


def _details(details: Mapping[str, Any]) -> str:
    text = as_json(details).encode("utf-8", "replace").decode()
    if len(text) <= DETAILS_LIMIT:
        return text
    return as_json({"cut": text[:DETAILS_LIMIT], "characters": len(text)})


def _plain(value: Any, depth: int) -> Any:
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int):
        return value if -_LARGEST <= value <= _LARGEST else hex(value)
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if depth < 8 and isinstance(value, Mapping):
        return {str(key): _plain(item, depth + 1) for key, item in value.items()}
    if depth < 8 and isinstance(value, list | tuple | set | frozenset):
        return [_plain(item, depth + 1) for item in value]
    return as_text(value, MESSAGE_LIMIT)
