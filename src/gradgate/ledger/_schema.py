"""The tables of a ledger file, how it is recognised and upgraded, and an incident as a row.

Nothing here trusts a file. Every object of its schema is compared with those that this version makes, word for word.
A file that lacks one of them is no ledger. A file that has others - a trigger, an index, a view, a table - is never
written, because they could change what a write does; reading it runs none of them.
"""

from __future__ import annotations

import json
import math
import sqlite3
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import fields
from functools import cache
from itertools import chain
from types import NoneType
from typing import Any, TypeVar

from gradgate._text import as_text, json_text
from gradgate.errors import LedgerError
from gradgate.records import Incident, Record

R = TypeVar("R", bound=Record)

APPLICATION_ID = 0x67724764  # "grGd" in the header of the file: a ledger, not some other SQLite file
RECOVER = 'sqlite3 FILE ".recover" | sqlite3 RECOVERED   # saves what can be read'

_FIRST = (
    """CREATE TABLE run (
  name TEXT PRIMARY KEY NOT NULL, started REAL NOT NULL, ended REAL, python TEXT, torch TEXT, gradgate TEXT,
  git_commit TEXT, arguments TEXT NOT NULL DEFAULT '{}'
) WITHOUT ROWID""",
    """CREATE TABLE incident (
  number INTEGER PRIMARY KEY, id TEXT NOT NULL UNIQUE, run TEXT, step INTEGER, epoch INTEGER,
  rank INTEGER NOT NULL, world_size INTEGER NOT NULL, sample_id TEXT, row INTEGER, stage TEXT NOT NULL,
  cause TEXT NOT NULL, exception_type TEXT, message TEXT NOT NULL, place TEXT, module TEXT, loss REAL, grad_norm REAL,
  transient INTEGER NOT NULL, time REAL NOT NULL, details TEXT NOT NULL DEFAULT '{}', snapshot TEXT
)""",
    "CREATE TABLE payload (incident TEXT PRIMARY KEY NOT NULL, data BLOB NOT NULL)",
    "CREATE TABLE snapshot (digest TEXT PRIMARY KEY NOT NULL, data BLOB NOT NULL)",
    """CREATE TABLE decision (
  id TEXT PRIMARY KEY NOT NULL, kind TEXT NOT NULL, sample_id TEXT NOT NULL, run TEXT, epoch INTEGER,
  time REAL NOT NULL, reason TEXT NOT NULL
) WITHOUT ROWID""",
    # The first answers bad_ids and everything about samples without touching the table, the second all counts.
    "CREATE INDEX incident_sample ON incident (sample_id, transient, time, epoch, cause)",
    "CREATE INDEX incident_kind ON incident (run, stage, cause, exception_type, transient, time)",
    "CREATE INDEX incident_time ON incident (time)",
    "CREATE INDEX incident_run ON incident (run, time)",
    "CREATE INDEX incident_cause ON incident (cause, time)",
    "CREATE INDEX incident_stage ON incident (stage, time)",
    "CREATE INDEX decision_sample ON decision (sample_id, kind, time)",
    """CREATE VIEW incidents AS SELECT
  id, run, step, epoch, rank, world_size, sample_id, row, stage, cause, exception_type, message, place, module,
  loss, grad_norm, transient, time, datetime(time, 'unixepoch') AS at, details,
  id IN (SELECT incident FROM payload) AS has_payload, snapshot IS NOT NULL AS has_snapshot
FROM incident""",
    """CREATE VIEW samples AS SELECT
  sample_id, count(*) AS incidents, sum(transient) AS transient_incidents,
  min(time) AS first_time, max(time) AS last_time, max(epoch) AS last_epoch,
  group_concat(DISTINCT cause) AS causes, released,
  coalesce(max(CASE WHEN transient THEN NULL ELSE time END) > coalesce(released, -1e999), 0) AS bad
FROM incident LEFT JOIN (
  SELECT sample_id AS whose, max(time) AS released FROM decision WHERE kind = 'release' GROUP BY sample_id
) ON whose = sample_id
WHERE sample_id IS NOT NULL GROUP BY sample_id""",
    """CREATE VIEW runs AS SELECT
  name, started, ended, datetime(started, 'unixepoch') AS started_at, datetime(ended, 'unixepoch') AS ended_at,
  python, torch, gradgate, git_commit, arguments,
  (SELECT count(*) FROM incident WHERE incident.run = run.name) AS incidents,
  (SELECT max(time) FROM incident WHERE incident.run = run.name) AS last_incident
FROM run""",
)

# Only in files that have losses, so that others stay readable by every version.
HISTORY = "CREATE TABLE history (sample_id TEXT PRIMARY KEY NOT NULL, losses BLOB NOT NULL) WITHOUT ROWID"

# The statements that lead from each version of the schema to the next; a file of version n has had the first n.
MIGRATIONS: tuple[tuple[str, ...], ...] = (_FIRST,)

# What a file may have besides: losses of samples, and what ANALYZE adds, counts for the planner of queries.
_OPTIONAL = {
    ("table", "history", "history", HISTORY),
    ("table", "sqlite_stat1", "sqlite_stat1", "CREATE TABLE sqlite_stat1(tbl,idx,stat)"),
    ("table", "sqlite_stat4", "sqlite_stat4", "CREATE TABLE sqlite_stat4(tbl,idx,neq,nlt,ndlt,sample)"),
}


def upgrade(connection: sqlite3.Connection) -> None:
    """Make a new file a ledger and an old ledger a current one, all of it or nothing."""
    if _version(connection) == len(MIGRATIONS):
        return
    connection.execute("BEGIN IMMEDIATE")
    with connection:
        version = _recognise(connection)  # Only now: another process may have done it while this one waited.
        if version:
            _compare(connection, version, writing=True)
        for statement in chain(*MIGRATIONS[version:]):
            connection.execute(statement)
        connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
        connection.execute(f"PRAGMA user_version = {len(MIGRATIONS)}")


def check(connection: sqlite3.Connection, *, writing: bool) -> None:
    """Make sure that a file is a ledger of this version, and for writing that it holds no SQL but ours."""
    version = _recognise(connection)
    if version < len(MIGRATIONS):
        raise LedgerError(
            f"it is {'a ledger of an older gradgate' if version else 'empty'} "
            f"(schema {version}, this gradgate writes {len(MIGRATIONS)}).",
            why="it was opened for reading only, so it cannot be brought up to date.",
            fix="gg.Ledger(path)   # once, where the file may be written",
        )
    _compare(connection, version, writing=writing)


def _compare(connection: sqlite3.Connection, version: int, *, writing: bool) -> None:
    missing = set(_expected(version))
    foreign: list[str] = []
    pages = set()
    for *parts, page in connection.execute("SELECT type, name, tbl_name, sql, rootpage FROM sqlite_master"):
        definition = tuple(parts)
        if definition in missing:
            has_pages = definition[0] in ("table", "index")
            if not has_pages or (type(page) is int and page >= 2 and page not in pages):
                missing.remove(definition)  # Otherwise it shares its pages with another, which no sound file does.
            pages.add(page)
        elif definition not in _OPTIONAL and len(foreign) < 4:
            foreign.append(f"{definition[0]} {definition[1]}"[:60])
    if missing:
        raise LedgerError(
            f"its tables are not those of a ledger: {', '.join(sorted(name for _, name, _, _ in missing))}.",
            why="the file is damaged, or another program has changed it.",
            fix=RECOVER,
        )
    if foreign and writing:
        raise LedgerError(
            f"it holds what gradgate did not make: {', '.join(foreign[:3])}{', ...' if len(foreign) > 3 else ''}.",
            why="a trigger, an index or a view of someone else could change what is written, so it is only read.",
            fix="gradgate ledger merge NEW FILE   # copies what it holds into a new ledger",
        )


def _recognise(connection: sqlite3.Connection) -> int:
    """Return the version of a ledger, 0 for a new, empty file."""
    application = connection.execute("PRAGMA application_id").fetchone()[0]
    version = _version(connection)
    if application == version == 0 and connection.execute("SELECT 1 FROM sqlite_master").fetchone() is None:
        return 0
    if application != APPLICATION_ID:
        raise LedgerError(
            "it is an SQLite file, but not a ledger.",
            why="gradgate marks its files and writes to no others.",
            fix='gg.Ledger("run.ledger")   # another path',
        )
    if not 1 <= version <= len(MIGRATIONS):
        raise LedgerError(
            f"it has schema {version}; this gradgate knows 1 to {len(MIGRATIONS)}.",
            why="a newer gradgate wrote it.",
            fix="pip install --upgrade gradgate",
        )
    return version


def _version(connection: sqlite3.Connection) -> int:
    return int(connection.execute("PRAGMA user_version").fetchone()[0])


@cache
def _expected(version: int) -> frozenset[tuple[str, ...]]:
    """Return the definitions of a version, as a file in memory has them."""
    with closing(sqlite3.connect(":memory:")) as scratch:
        for statement in chain(*MIGRATIONS[:version]):
            scratch.execute(statement)
        return frozenset(scratch.execute("SELECT type, name, tbl_name, sql FROM sqlite_master"))


# --- Records as rows -------------------------------------------------------------------------------------------------


MESSAGE_LIMIT = 2_000  # characters of an exception's text, which may quote the data
NAME_LIMIT = 50_000  # characters of the name of a sample, a run, a module or a line
DETAILS_LIMIT = 16_000  # characters of JSON
DEEPEST = 64  # levels of JSON that are read; 9 are written

_LARGEST = 2**63 - 1
_KINDS: dict[str, tuple[type, ...]] = {"int": (int,), "bool": (int,), "float": (float, int)}  # others are text


def columns(record: Any) -> tuple[str, ...]:
    """Return the columns of a record, in the order of its attributes; `place` is `where`, which is a word of SQL."""
    return tuple("place" if name == "where" else name for name in record.__dataclass_fields__)


COLUMNS = columns(Incident)


def to_row(incident: Incident) -> tuple[Any, ...]:
    """Write an incident as one value for each of COLUMNS, whatever it holds: a record must not stop a training."""
    return (
        name_text(incident.id),
        _name(incident.run),
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


def from_row(row: Sequence[Any], record: type[R] = Incident) -> R:  # type: ignore[assignment]
    """Read a row; a value of a kind that no ledger writes is a LedgerError, because it must not pass as evidence."""
    kind: Any = record
    values = {}
    for (name, kinds), value in zip(_kinds_of(kind), row, strict=True):
        if type(value) in kinds:
            values[name] = value
        elif name in ("loss", "grad_norm") and value == "nan":
            values[name] = math.nan
        else:
            of = "an incident" if record is Incident else f"a {record.__name__.lower()}"
            raise damaged(f"`{'place' if name == 'where' else name}` of {of} is {value!r:.60}")
    if record is Incident:
        values["transient"] = bool(values["transient"])
    for name in ("details", "arguments"):
        if name in values:
            values[name] = read_json(values[name])
    return record(**values)


@cache
def _kinds_of(record: Any) -> list[tuple[str, tuple[type, ...]]]:
    """Return the attributes of a record, each with the types that its column may have."""
    declared = [(field.name, *str(field.type).partition(" | ")) for field in fields(record)]
    return [(name, _KINDS.get(kind, (str,)) + (NoneType,) * bool(none)) for name, kind, _, none in declared]


def checked(value: Any, name: str, of: str, *kinds: type) -> Any:
    """Return a value of a file that is of the right kind."""
    if not isinstance(value, kinds):
        raise damaged(f"`{name}` of {of} is {value!r:.60}")
    return value


def name_text(value: object) -> str:
    return as_text(value, NAME_LIMIT)


def as_json(value: Mapping[str, Any], limit: int) -> str:
    """Write an object as JSON, whatever is in it; what is longer than the limit is cut and becomes text."""
    text = json_text(value, depth=9) if value else "{}"
    return text if len(text) <= limit else json_text({"cut": text[:limit], "characters": len(text)})


def read_json(text: str) -> dict[str, Any]:
    """Read the JSON of a row, which must be an object."""
    try:
        value = json.loads(text)
        deep = text.count("{") + text.count("[") > DEEPEST and _depth(value) > DEEPEST
    except (ValueError, RecursionError) as error:
        raise damaged(f"a JSON text cannot be read ({error})") from error
    if not isinstance(value, dict):
        raise damaged("a JSON text is not an object")
    if deep:
        raise damaged(f"a JSON text is nested more than {DEEPEST} deep")
    return value


def _depth(value: Any) -> int:
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return 1 + max(map(_depth, items)) if items else 0


def damaged(what: str) -> LedgerError:
    return LedgerError(
        f"the ledger is damaged: {what}.", why="no ledger writes that.", fix="PRAGMA integrity_check   -- in sqlite3"
    )


def _name(value: object) -> str | None:
    return None if value is None else name_text(value)


def _integer(value: Any) -> int | None:
    try:
        number = int(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        return None
    return number if -_LARGEST <= number <= _LARGEST else None


def _real(value: Any) -> float | str | None:
    """Return a number as SQLite can hold it: a NaN, which it would turn into NULL, as the text 'nan'."""
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        return None
    return "nan" if math.isnan(number) else number


def finite(value: Any) -> float:
    """Return a time as a number that a calendar may know; 0 for what is none."""
    number = _real(value)
    return number if isinstance(number, float) and math.isfinite(number) else 0.0
