"""What a ledger file looks like inside, how it is recognised, and how an older one is brought up to date.

Nothing here trusts a file. Every object of its schema is compared with those that this version makes, word for word.
A file that lacks one of them is no ledger. A file that has others - a trigger, an index, a view, a table - is never
written, because they could change what a write does; reading it runs none of them.
"""

from __future__ import annotations

import sqlite3
from functools import cache

from gradgate.errors import LedgerError

APPLICATION_ID = 0x67724764
"""The four bytes "grGd" in the header of the file: this is a ledger, not some other SQLite file."""

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

HISTORY = "CREATE TABLE history (sample_id TEXT PRIMARY KEY NOT NULL, losses BLOB NOT NULL) WITHOUT ROWID"
"""The losses of samples; only in files that have any, so that others stay readable by every version."""

MIGRATIONS: tuple[tuple[str, ...], ...] = (_FIRST,)
"""The statements that lead from each version of the schema to the next; a file of version n has seen the first n."""


Definition = tuple[str, str, str, str | None]

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
    connection.execute("BEGIN IMMEDIATE")  # Only now: another process may have done it while this one waited.
    try:
        _recognise(connection)
        version = _version(connection)
        if version:
            _compare(connection, version, writing=True)
        for statement in (line for step in MIGRATIONS[version:] for line in step):
            connection.execute(statement)
        connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
        connection.execute(f"PRAGMA user_version = {len(MIGRATIONS)}")
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise


def check(connection: sqlite3.Connection, *, writing: bool) -> None:
    """Make sure that a file is a ledger of this version, and for writing that it holds no SQL but ours."""
    _recognise(connection)
    version = _version(connection)
    if version < len(MIGRATIONS):
        raise LedgerError(
            f"it is {'empty' if version == 0 else 'a ledger of an older gradgate'} "
            f"(schema {version}, this gradgate writes {len(MIGRATIONS)}).",
            why="it was opened for reading only, so it cannot be brought up to date.",
            fix="gg.Ledger(path)   # once, where the file may be written",
        )
    _compare(connection, version, writing=writing)


def _compare(connection: sqlite3.Connection, version: int, *, writing: bool) -> None:
    missing = set(_expected(version))
    foreign: list[str] = []
    pages = set()
    for kind, name, table, sql, page in connection.execute(
        "SELECT type, name, tbl_name, sql, rootpage FROM sqlite_master"
    ):
        definition = (kind, name, table, sql)
        if definition in missing:
            missing.remove(definition)
            if kind in ("table", "index"):
                if type(page) is not int or page < 2 or page in pages:
                    missing.add(definition)  # It shares its pages with another one, which no sound file does.
                pages.add(page)
        elif definition not in _OPTIONAL and len(foreign) < 4:
            foreign.append(f"{kind} {name}"[:60])
    if missing:
        raise LedgerError(
            f"its tables are not those of a ledger: {', '.join(sorted(name for _, name, _, _ in missing))}.",
            why="the file is damaged, or another program has changed it.",
            fix='sqlite3 FILE ".recover" | sqlite3 RECOVERED   # saves what can be read',
        )
    if foreign and writing:
        raise LedgerError(
            f"it holds what gradgate did not make: {', '.join(foreign[:3])}{', ...' if len(foreign) > 3 else ''}.",
            why="a trigger, an index or a view of someone else could change what is written, so it is only read.",
            fix="gradgate ledger merge NEW FILE   # copies what it holds into a new ledger",
        )


def _recognise(connection: sqlite3.Connection) -> None:
    application = connection.execute("PRAGMA application_id").fetchone()[0]
    version = _version(connection)
    if application == 0 and version == 0 and connection.execute("SELECT 1 FROM sqlite_master").fetchone() is None:
        return  # A new, empty file.
    if application != APPLICATION_ID:
        raise LedgerError(
            "it is an SQLite file, but not a ledger.",
            why="gradgate marks its files and writes to no others.",
            fix='gg.Ledger("run.ledger")   # another path',
        )
    if version > len(MIGRATIONS) or version < 1:
        raise LedgerError(
            f"it has schema {version}; this gradgate knows 1 to {len(MIGRATIONS)}.",
            why="a newer gradgate wrote it.",
            fix="pip install --upgrade gradgate",
        )


def _version(connection: sqlite3.Connection) -> int:
    return int(connection.execute("PRAGMA user_version").fetchone()[0])


@cache
def _expected(version: int) -> frozenset[Definition]:
    """Give the definitions of a schema version by making one in memory."""
    scratch = sqlite3.connect(":memory:", isolation_level=None)
    try:
        for step in MIGRATIONS[:version]:
            for statement in step:
                scratch.execute(statement)
        return frozenset(scratch.execute("SELECT type, name, tbl_name, sql FROM sqlite_master"))
    finally:
        scratch.close()
