"""Writing that never stops a training: what cannot be written now is kept in memory and written when it can be."""

from __future__ import annotations

import os
import sqlite3
import time
import warnings
from collections.abc import Iterable
from dataclasses import dataclass, replace
from hashlib import sha256

from gradgate.errors import LedgerError, LedgerWarning
from gradgate.ledger._file import LOCK, PATIENCE, LedgerFile
from gradgate.ledger._rows import COLUMNS, as_text, to_row
from gradgate.ledger._runs import Run, finish_run, write_run
from gradgate.records import Incident

__all__ = ["INSERT", "Entry", "Writer", "with_details", "write_entries"]

PATIENCE_AFTER_FAILURE = 0.05
"""How many seconds a writer waits that has failed before: every bad step of the training would wait."""

PAYLOADS_IN_MEMORY = 64 * 2**20
"""How many bytes of samples are kept in memory at most while the file cannot be written; incidents are all kept."""

INSERT = f"INSERT OR IGNORE INTO incident ({', '.join(COLUMNS)}, snapshot) VALUES ({', '.join('?' * len(COLUMNS))}, ?)"


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
    """The queue in front of the file.

    Args:
        file: Where to write.
        run: The run that incidents belong to which do not say.
    """

    def __init__(self, file: LedgerFile, run: Run) -> None:
        self.file = file
        self.run = run
        self._waiting: list[Entry] = []
        self._failed = False
        self._runs: set[str] = set()  # Those that this process has written down.
        self._process = os.getpid()

    @property
    def waiting(self) -> list[Incident]:
        """The incidents that are only in memory."""
        with LOCK:
            self._notice_fork()
            return [entry.incident for entry in self._waiting]

    def announce(self) -> None:
        """Write the run down now, before its first incident.

        Raises:
            LedgerError: The file cannot be written.
        """
        with self.file.writing() as connection:
            write_run(connection, self.run)
        self._runs.add(self.run.name)

    def add(self, entries: Iterable[Entry]) -> None:
        """Write incidents, or keep them; warn when an outage begins.

        Args:
            entries: The incidents.
        """
        with LOCK:
            self._notice_fork()
            self._waiting += entries
            try:
                self.flush()
            except LedgerError as error:
                self._forget_payloads()
                if not self._failed:
                    self._failed = True
                    self._warn("Incidents are kept in memory and written when it can be", error)

    def flush(self) -> None:
        """Write what is kept in memory.

        Raises:
            LedgerError: It still cannot be written.
        """
        with LOCK:
            self._notice_fork()
            entries = list(self._waiting)
            if not entries:
                return
            with self.file.writing(PATIENCE_AFTER_FAILURE if self._failed else PATIENCE) as connection:
                runs = {as_text(entry.incident.run or self.run.name) for entry in entries}
                for name in runs:  # An incident may say itself which run it is of.
                    write_run(connection, replace(self.run, name=name))
                write_entries(connection, entries)
            del self._waiting[: len(entries)]  # Not all: a signal handler may have added some meanwhile.
            self._failed = False
            self._runs |= runs

    def close(self) -> None:
        """Write what is left and the end of the run, and close the file; warn if something is lost."""
        with LOCK:
            self._notice_fork()
            try:
                self.flush()
                if self._runs:
                    with self.file.writing(PATIENCE_AFTER_FAILURE) as connection:
                        for name in self._runs:
                            finish_run(connection, name, time.time())
            except LedgerError as error:
                if self._waiting:
                    count = len(self._waiting)
                    self._warn(f"{count} incident{'s were' if count > 1 else ' was'} never written", error)
            self.file.close()

    def _notice_fork(self) -> None:
        if self._process != os.getpid():  # What waits here was copied; the parent writes it.
            self._process = os.getpid()
            self._waiting.clear()
            self._runs.clear()
            self._failed = False

    def _forget_payloads(self) -> None:
        total = 0
        for position, entry in enumerate(self._waiting):
            total += entry.weight
            if entry.weight and total > PAYLOADS_IN_MEMORY:
                note = {"payload": f"the file could not be written, and {PAYLOADS_IN_MEMORY:,} bytes filled the memory"}
                self._waiting[position] = Entry(with_details(entry.incident, not_stored=note))

    def _warn(self, consequence: str, error: LedgerError) -> None:
        text = f"{error.what} {consequence}.\nWhy: {error.why}\nFix: {error.fix}"
        warnings.warn(text, LedgerWarning, stacklevel=5)


def with_details(incident: Incident, **more: object) -> Incident:
    """Give an incident with further details.

    Args:
        incident: The incident.
        **more: What to add.

    Returns:
        A new incident.
    """
    return replace(incident, details={**incident.details, **more})


def write_entries(connection: sqlite3.Connection, entries: Iterable[Entry]) -> int:
    """Write incidents with their payloads; one whose id is there already is left as it is.

    Args:
        connection: In a transaction.
        entries: The incidents, each with its run.

    Returns:
        How many were new.
    """
    entries = list(entries)
    states = {id(entry.snapshot): entry.snapshot for entry in entries if entry.snapshot is not None}
    digests = {key: sha256(state).hexdigest() for key, state in states.items()}
    before = connection.total_changes
    connection.executemany(INSERT, [(*to_row(one.incident), digests.get(id(one.snapshot))) for one in entries])
    written = connection.total_changes - before
    connection.executemany(
        "INSERT OR IGNORE INTO payload (incident, data) VALUES (?, ?)",
        [(entry.incident.id, entry.payload) for entry in entries if entry.payload is not None],
    )
    connection.executemany(
        "INSERT OR IGNORE INTO snapshot (digest, data) VALUES (?, ?)",
        [(digests[key], state) for key, state in states.items()],
    )
    return written
