"""What is asked of the file: incidents by filters, one of them, the bytes that belong to it, counts, and plain SQL."""

from __future__ import annotations

import re
import sqlite3
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from datetime import datetime
from itertools import islice
from pathlib import Path
from typing import Any, TypedDict

from gradgate._names import no_such_argument
from gradgate.errors import ArgumentTypeError, ArgumentValueError, LedgerError, NothingMatchedError
from gradgate.ledger._file import MEGABYTE, Connection, LedgerFile, TooLong, raised_in_sqlite
from gradgate.ledger._schema import COLUMNS, checked, from_row, name_text
from gradgate.records import Incident, Record

Moment = float | str | datetime  # seconds since the epoch of the clock, a datetime, ISO text, or an age such as "2h"

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


_CONDITIONS = {name: f"{name} = ?" for name in Filters.__annotations__} | {"since": "time >= ?", "until": "time < ?"}


def where(filters: Mapping[str, Any], *, by_index: bool = True) -> tuple[str, list[Any]]:
    """Write filters as a condition in SQL, and its values."""
    given = _given(filters)
    plus = "" if by_index else "+"  # SQLite uses no index for such a term: everything is counted anyway.
    return " AND ".join(f"{plus}{_CONDITIONS[name]}" for name in given) or "TRUE", list(given.values())


def matches(incident: Incident, filters: Mapping[str, Any]) -> bool:
    given = _given(filters)
    since, until = given.pop("since", float("-inf")), given.pop("until", float("inf"))
    return since <= incident.time < until and all(getattr(incident, name) == value for name, value in given.items())


def _given(filters: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of the filters that count, as they are in the file."""
    unknown = sorted(set(filters) - set(_CONDITIONS))
    if unknown:
        raise no_such_argument("Ledger.incidents", unknown[0], ["limit", "newest_first", *_CONDITIONS])
    kinds: dict[str, Callable[[Any], Any]] = {"since": moment, "until": moment, "transient": int}
    return {name: kinds.get(name, name_text)(value) for name, value in filters.items() if value is not None}


def moment(value: Moment) -> float:
    """Return a time as seconds since the epoch of the clock; text without a zone is local time."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    try:
        if isinstance(value, str):
            if age := _AGE.fullmatch(value.strip()):
                return time.time() - float(age[1]) * _SECONDS[age[2]]
            value = datetime.fromisoformat(value.strip())
        if isinstance(value, datetime):
            return value.timestamp()
    except (ValueError, OverflowError, OSError) as error:
        raise ArgumentValueError(
            f"the time {str(value)!r} cannot be read.",
            why="a time is a date, a date with a time of day, or an age.",
            fix='since="2026-11-15" or since="2026-11-15T21:30" or since="2h"',
        ) from error
    raise ArgumentTypeError(
        f"the time is of type {type(value).__name__}.",
        why="a time is a number of seconds, a datetime, or text.",
        fix='since="2h"',
    )


_SELECT = f"SELECT {', '.join(COLUMNS)} FROM incident"
PREFIX = 4  # how many characters of an incident's id are enough to ask for it, if they fit only one


def select_incidents(
    connection: Connection, filters: Mapping[str, Any], *, limit: int | None = None, newest_first: bool = False
) -> Iterator[Incident]:
    condition, values = where(filters)
    order = "DESC" if newest_first else "ASC"
    question = f"{_SELECT} WHERE {condition} ORDER BY time {order}, number {order} LIMIT ?"
    return map(from_row, connection.rows(question, [*values, -1 if limit is None else limit]))


def one_incident(connection: Connection, incident_id: str) -> Incident:
    """Read one incident by its id, or by the beginning of it if that fits no other."""
    wanted = name_text(incident_id)
    found = list(connection.rows(f"{_SELECT} WHERE id = ?", (wanted,)))
    if not found and len(wanted) >= PREFIX:
        code = ord(wanted[-1])
        after = chr(0xE000 if code == 0xD7FF else min(code + 1, 0x10FFFF))  # without surrogates, which are not stored
        values = wanted, wanted[:-1] + after
        found = list(connection.rows(f"{_SELECT} WHERE id >= ? AND id < ? LIMIT 4", values))
    if len(found) == 1:
        return from_row(found[0])
    raise NothingMatchedError(
        f"several incidents begin with {wanted!r}." if found else f"there is no incident {wanted!r}.",
        why=f"among them {', '.join(str(row[0]) for row in found)}."
        if found
        else f"an incident is asked for by its id, or by at least {PREFIX} characters of its beginning.",
        fix="gradgate ledger list LEDGER",
    )


def blob(connection: Connection, question: str, key: str) -> bytes | None:
    """Read the bytes that a question with one question mark gives, if there are any."""
    row = connection.execute(question, (name_text(key),)).fetchone()
    return None if row is None else bytes(checked(row[0], "data", "a payload", bytes))


@dataclass(frozen=True, kw_only=True, slots=True)
class Stats(Record):
    """What there is in a ledger, counted.

    Attributes:
        incidents: How many incidents.
        transient: How many of them did not come again under the same state.
        samples: How many different samples.
        first: The time of the first one.
        last: The time of the last one.
        by_run: How many in each run, most first; likewise the next three.
        by_stage: How many in each stage.
        by_cause: How many of each cause.
        by_exception: How many of each class of exception.
        worst: The samples with most incidents, and how many those are.
    """

    incidents: int = 0
    transient: int = 0
    samples: int = 0
    first: float | None = None
    last: float | None = None
    by_run: dict[str, int] = field(default_factory=dict)
    by_stage: dict[str, int] = field(default_factory=dict)
    by_cause: dict[str, int] = field(default_factory=dict)
    by_exception: dict[str, int] = field(default_factory=dict)
    worst: dict[str, int] = field(default_factory=dict)


def count_incidents(connection: Connection, filters: Mapping[str, Any], worst: int = 10) -> Stats:
    """Count everything in one pass over one index, and name the worst samples."""
    condition, values = where(filters, by_index=filters.get("sample_id") is not None)
    groups = connection.rows(
        "SELECT run, stage, cause, exception_type, transient, count(*), min(time), max(time) FROM incident "
        f"WHERE {condition} GROUP BY run, stage, cause, exception_type, transient",
        values,
    )
    counts = {name: Counter[str]() for name in ("by_run", "by_stage", "by_cause", "by_exception")}
    total, passing, times = 0, 0, list[float]()
    for *names, transient, count, first, last in groups:
        total, passing = total + count, passing + (count if transient else 0)
        times += [checked(time, "time", "incidents", int, float) for time in (first, last)]
        for counter, name in zip(counts.values(), names, strict=True):
            if name is not None:
                counter[str(name)] += count
    samples = list(
        connection.rows(
            "SELECT sample_id, count(*), count(*) OVER () FROM incident "
            f"WHERE sample_id IS NOT NULL AND {condition} GROUP BY sample_id ORDER BY count(*) DESC, sample_id LIMIT ?",
            [*values, worst],
        )
    )
    return Stats(
        incidents=total,
        transient=passing,
        samples=samples[0][2] if samples else 0,
        first=min(times, default=None),
        last=max(times, default=None),
        worst={str(sample): count for sample, count, _ in samples},
        **{name: dict(counter.most_common()) for name, counter in counts.items()},
    )


_ALLOWED = {sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_FUNCTION, sqlite3.SQLITE_RECURSIVE}


@dataclass(frozen=True, slots=True)
class Answer:
    """What a question in SQL gave.

    Attributes:
        columns: The names of the columns.
        rows: The rows.
    """

    columns: tuple[str, ...]
    rows: list[tuple[Any, ...]]


def ask(path: Path, question: str, values: Sequence[Any], limit: int | None, seconds: float) -> Answer:
    """Ask a question in SQL, for a limited time; nothing is changed, no other file is touched."""
    with closing(LedgerFile(path, read_only=True)) as file, file.reading(whole=True) as connection:
        connection.execute("PRAGMA query_only = ON")
        connection.set_authorizer(_only_reading)
        meter = connection.meter
        meter.clock, meter.until, meter.steps = time.monotonic, time.monotonic() + seconds, sys.maxsize
        meter.characters = longest = 64 * MEGABYTE + 16 * file.size()
        try:
            cursor = connection.execute(question, values)
            rows = list(connection.counted(islice(cursor, limit)))
        except TooLong as error:
            raise LedgerError(
                f"the answer is longer than {longest:,} characters.",
                why="it is kept in memory, and the file itself is far shorter.",
                fix="ledger.sql(..., limit=100)   # or ask for less",
            ) from error
        except (sqlite3.Error, sqlite3.Warning, TypeError, OverflowError, UnicodeEncodeError) as error:
            code = getattr(error, "sqlite_errorname", "")
            if code == "SQLITE_INTERRUPT" and not raised_in_sqlite:
                raise LedgerError(
                    f"the question took longer than {seconds:g} seconds.",
                    why="a question without an end must not hold up everything.",
                    fix=f"ledger.sql(..., seconds={10 * seconds:g})   # or ask for less",
                ) from error
            wrong = not isinstance(error, sqlite3.DatabaseError) or isinstance(error, sqlite3.ProgrammingError)
            if not wrong and code not in ("SQLITE_ERROR", "SQLITE_AUTH", "SQLITE_TOOBIG"):
                raise
            raise ArgumentValueError(
                f"the question cannot be asked: {error}.",
                why="it must be one SELECT on the views incidents, samples and runs (or the tables behind them).",
                fix="SELECT cause, count(*) FROM incidents GROUP BY cause",
            ) from error
        return Answer(tuple(column[0] for column in cursor.description or ()), rows)


def _only_reading(action: int, *_: str | None) -> int:
    return sqlite3.SQLITE_OK if action in _ALLOWED else sqlite3.SQLITE_DENY
