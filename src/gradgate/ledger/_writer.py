"""Writing that never stops a training: what cannot be written now is kept in memory and written when it can be.

Also one ledger into another: the files of several ranks become one, however often it is done.
"""

from __future__ import annotations

import math
import os
import time
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from hashlib import sha256
from types import NoneType
from typing import Any

from gradgate._text import user_level
from gradgate.errors import LedgerError, LedgerWarning
from gradgate.ledger import _runs
from gradgate.ledger._file import LOCK, MEGABYTE, PATIENCE, Connection, LedgerFile
from gradgate.ledger._runs import Run
from gradgate.ledger._schema import COLUMNS, checked, finite, from_row, name_text, to_row
from gradgate.ledger._select import blob
from gradgate.records import Incident

PATIENCE_AFTER_FAILURE = 0.05  # seconds that a writer waits that has failed before: every bad step would wait
PAYLOADS_IN_MEMORY = 64 * 2**20  # bytes of samples kept while the file cannot be written; incidents are all kept
PAGE = 1_000  # incidents that a merge copies in one transaction, so that other writers get their turn

# Only an incident of the same id is in the way; anything else that keeps a row from being written is an error.
INSERT = (
    f"INSERT INTO incident ({', '.join(COLUMNS)}, snapshot) VALUES ({', '.join('?' * len(COLUMNS))}, ?) "
    "ON CONFLICT (id) DO NOTHING"
)


@dataclass(frozen=True, slots=True)
class Entry:
    """One incident with what was kept of its sample and of the state it failed in."""

    incident: Incident
    payload: bytes | None = None
    snapshot: bytes | None = None

    @property
    def weight(self) -> int:
        """How many bytes of payload it holds."""
        return len(self.payload or b"") + len(self.snapshot or b"")


class Writer:
    def __init__(self, file: LedgerFile, run: Run) -> None:
        self.file = file
        self.run = run
        self._waiting: list[Entry] = []
        self._kept = 0  # How many bytes of samples wait.
        self._failed = False
        self._runs: set[str] = set()  # Those that this process has written down.
        self._process = os.getpid()

    @property
    def waiting(self) -> list[Incident]:
        with LOCK:
            self._notice_fork()
            return [entry.incident for entry in self._waiting]

    def announce(self) -> None:
        """Write the run down now, before its first incident."""
        with self.file.writing() as connection:
            _runs.write_run(connection, self.run)
        self._runs.add(self.run.name)

    def add(self, entries: Iterable[Entry]) -> None:
        """Write incidents, or keep them; warn when an outage begins."""
        with LOCK:
            self._notice_fork()
            entries = list(entries)
            self._waiting += entries
            self._kept += sum(entry.weight for entry in entries)
            try:
                self.flush()
            except LedgerError as error:
                self._forget_payloads(len(entries))
                if not self._failed:
                    self._failed = True
                    self._warn("Incidents are kept in memory and written when it can be", error)

    def flush(self) -> None:
        # After a failure one incident goes first, then twice as many each time: while nothing can be written, a try
        # costs the same however many wait.
        with LOCK:
            self._notice_fork()
            count = 1 if self._failed else len(self._waiting)
            while self._waiting:
                self._write(self._waiting[:count])
                count *= 2
            self._failed = False

    def _write(self, entries: list[Entry]) -> None:
        weight = sum(entry.weight for entry in entries)
        with self.file.writing(self._patience, size=MEGABYTE + 4 * weight + 4000 * len(entries)) as connection:
            runs = {name_text(entry.incident.run or self.run.name) for entry in entries}
            for name in runs:  # An incident may say itself which run it is of.
                _runs.write_run(connection, replace(self.run, name=name))
            write_entries(connection, entries)
        del self._waiting[: len(entries)]  # Not all: a signal handler may have added some meanwhile.
        self._kept -= weight
        self._runs |= runs

    @property
    def _patience(self) -> float:
        return PATIENCE_AFTER_FAILURE if self._failed else PATIENCE

    def close(self) -> None:
        """Write what is left and the end of the run, and close the file; warn if something is lost."""
        with LOCK:
            self._notice_fork()
            try:
                self.flush()
                if self._runs:
                    with self.file.writing(self._patience) as connection:
                        for name in self._runs:
                            _runs.finish_run(connection, name, time.time())
            except LedgerError as error:
                if self._waiting:
                    count = len(self._waiting)
                    self._warn(f"{count} incident{'s were' if count > 1 else ' was'} never written", error)
            self.file.close()

    def _notice_fork(self) -> None:
        if self._process != os.getpid():  # What waits here was copied; the parent writes it.
            self._process = os.getpid()
            self._waiting.clear()
            self._kept = 0
            self._runs.clear()
            self._failed = False

    def _forget_payloads(self, count: int) -> None:
        """Of the last entries, keep the samples that still fit into memory."""
        for position in range(len(self._waiting) - 1, max(0, len(self._waiting) - count) - 1, -1):
            entry = self._waiting[position]
            if entry.weight and self._kept > PAYLOADS_IN_MEMORY:
                note = {"payload": f"the file could not be written, and {PAYLOADS_IN_MEMORY:,} bytes filled the memory"}
                self._waiting[position] = Entry(with_details(entry.incident, not_stored=note))
                self._kept -= entry.weight

    def _warn(self, consequence: str, error: LedgerError) -> None:
        text = LedgerError(f"{error.what} {consequence}.", why=error.why, fix=error.fix)
        warnings.warn(str(text), LedgerWarning, stacklevel=user_level())


def with_details(incident: Incident, **more: object) -> Incident:
    return replace(incident, details={**incident.details, **more})


def write_entries(connection: Connection, entries: Iterable[Entry]) -> int:
    """Write incidents with their payloads, and give how many were new; one whose id is there is left as it is."""
    entries = [_after_release(connection, entry) for entry in entries]
    states = {id(entry.snapshot): entry.snapshot for entry in entries if entry.snapshot is not None}
    digests = {key: sha256(state).hexdigest() for key, state in states.items()}
    written = _insert(connection, [(*to_row(one.incident), digests.get(id(one.snapshot))) for one in entries])
    connection.executemany(
        "INSERT INTO payload (incident, data) VALUES (?, ?) ON CONFLICT (incident) DO NOTHING",
        [(name_text(entry.incident.id), entry.payload) for entry in entries if entry.payload is not None],
    )
    connection.executemany(
        "INSERT INTO snapshot (digest, data) VALUES (?, ?) ON CONFLICT (digest) DO NOTHING",
        [(digests[key], state) for key, state in states.items()],
    )
    return written


def _insert(connection: Connection, rows: list[tuple[Any, ...]]) -> int:
    """Insert incidents, and make sure that each of them is in the table afterwards."""
    before = connection.total_changes
    connection.executemany(INSERT, rows)
    written = connection.total_changes - before
    if written < len(rows):
        for row in rows:
            if connection.execute("SELECT message FROM incident WHERE id = ?", row[:1]).fetchone() is None:
                raise LedgerError(
                    f"the ledger did not take the incident {row[0]!r}.",
                    why="SQLite reported no error, but the row is not there: the file is damaged.",
                    fix="PRAGMA integrity_check   -- in sqlite3",
                )
    return written


def _after_release(connection: Connection, entry: Entry) -> Entry:
    """Date an incident after the release of its sample where that lies in the future: the clock was set back."""
    incident = entry.incident
    if incident.sample_id is None:
        return entry
    released = _runs.last_release(connection, name_text(incident.sample_id))
    failed = finite(incident.time)
    if released is None or not max(failed, time.time()) <= released < math.inf:
        return entry
    incident = with_details(incident, clock=failed)
    return replace(entry, incident=replace(incident, time=math.nextafter(released, math.inf)))


def merge_files(source: LedgerFile, target: LedgerFile) -> int:
    """Copy what the target does not have: runs, incidents with their payloads, and decisions; count the incidents."""
    size = 2 * source.size()
    with source.reading() as connection:
        runs, decisions = _runs.read_runs(connection), _runs.read_decisions(connection)
        histories = _runs.read_histories(connection)
    with target.writing(size=size) as connection:
        for run in runs:
            _runs.write_run(connection, run)
            if run.ended is not None:
                _runs.finish_run(connection, run.name, run.ended)
        _runs.write_decisions(connection, decisions)
        _runs.merge_histories(histories, connection)
    return sum(_copy_page(source, target, rows, size) for rows in _pages(source))


def _pages(source: LedgerFile) -> Iterator[list[tuple[Any, ...]]]:
    last = -(2**63)
    question = f"SELECT number, {', '.join(COLUMNS)}, snapshot FROM incident WHERE number > ? ORDER BY number LIMIT ?"
    while True:
        with source.reading() as connection:
            rows = list(connection.rows(question, (last, PAGE)))
        if not rows:
            return
        yield [row[1:] for row in rows]
        last = rows[-1][0]


def _copy_page(source: LedgerFile, target: LedgerFile, rows: list[tuple[Any, ...]], size: int) -> int:
    for row in rows:
        from_row(row[:-1])  # What is damaged in the source does not get into the target.
        checked(row[-1], "snapshot", "an incident", str, NoneType)
    with source.reading(whole=True) as there, target.writing(size=size) as here:
        written = _insert(here, rows)
        # One at a time: together they may be larger than the memory.
        for table, key, wanted in (
            ("payload", "incident", [row[0] for row in rows]),
            ("snapshot", "digest", {row[-1] for row in rows if row[-1] is not None}),
        ):
            for name in wanted:
                if here.execute(f"SELECT 1 FROM {table} WHERE {key} = ?", (name,)).fetchone() is None:
                    data = blob(there, f"SELECT data FROM {table} WHERE {key} = ?", name)
                    if data is not None:
                        here.execute(f"INSERT INTO {table} ({key}, data) VALUES (?, ?)", (name, data))
    return written
