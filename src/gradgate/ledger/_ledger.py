"""The ledger itself: one file with what was dropped, why, and enough to see it again."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Unpack
from weakref import finalize

from gradgate.errors import ArgumentTypeError, ArgumentValueError
from gradgate.ledger._file import LedgerFile
from gradgate.ledger._filters import Filters, matches
from gradgate.ledger._questions import blob, one_incident, select_incidents
from gradgate.ledger._runs import Run, read_runs, this_run
from gradgate.ledger._writer import Entry, Writer
from gradgate.records import Incident

__all__ = ["Ledger"]


class Ledger:
    """One SQLite file with every incident: which sample, when, where, why - and, if asked for, the sample itself.

    Several threads, processes, ranks and runs may write to one file at once; what has been recorded survives the
    death of the process. A path that cannot be opened is an error at once. A file that cannot be written later is
    not: there is one `LedgerWarning`, incidents are kept in memory, and they are written when it is possible again.

    A run is written down with its first incident, or at once if it is given a name or arguments.

    Args:
        path: The file; it is made if it is not there.
        payload: Store the samples themselves, where the guard gives them. Without it, no value of a sample is kept.
        snapshot: Store the weights and the random state of the step, where the guard gives them.
        run: The name of this run; give the same one on all ranks.
        arguments: What to write down about this run, as values that JSON can hold.
        payload_limit: How many bytes a sample may have to be stored.
        snapshot_limit: How many bytes the weights and the random state may have to be stored.
        read_only: Only read: the file must be there, and nothing is changed.

    Raises:
        LedgerError: The file cannot be opened, is not a ledger, or was written by a newer gradgate.

    Example:
        >>> import tempfile
        >>> ledger = gg.Ledger(tempfile.mkdtemp() + "/run.ledger")
        >>> ledger.record(gg.Incident(stage="load", cause="exception", sample_id="img_17.png", message="bad header"))
        >>> [incident.sample_id for incident in ledger.incidents(stage="load")]
        ['img_17.png']
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        payload: bool = False,
        *,
        snapshot: bool = False,
        run: str | None = None,
        arguments: Mapping[str, Any] | None = None,
        payload_limit: int = 16 * 2**20,
        snapshot_limit: int = 256 * 2**20,
        read_only: bool = False,
    ) -> None:
        if str(path) in ("", "None", ":memory:"):
            raise ArgumentValueError(
                f"Ledger(): `path` is {path!r}.", why="a ledger is a file.", fix='gg.Ledger("run.ledger")'
            )
        self.path = Path(path)
        self.payload = payload
        self.snapshot = snapshot
        self.payload_limit = payload_limit
        self.snapshot_limit = snapshot_limit
        self.read_only = read_only
        self._file = LedgerFile(self.path.absolute(), read_only=read_only)
        self._writer = Writer(self._file, this_run(run, arguments))
        if not read_only and (run is not None or arguments is not None):
            self._writer.announce()
        self._finish = finalize(self, self._writer.close)

    @property
    def run(self) -> str:
        """The name of this run, which incidents get that have none."""
        return self._writer.run.name

    @property
    def pending(self) -> tuple[Incident, ...]:
        """The incidents that are only in memory, because the file cannot be written at the moment."""
        return tuple(self._writer.waiting)

    def record(self, incident: Incident, payload: bytes | None = None) -> None:
        """Write down one incident.

        Args:
            incident: The incident.
            payload: Its sample as bytes, kept if the ledger was opened with payload=True.
        """
        self.record_many([incident], None if payload is None else {incident.id: payload})

    def record_many(
        self,
        incidents: Iterable[Incident],
        payloads: Mapping[str, bytes] | None = None,
        *,
        snapshot: bytes | None = None,
    ) -> None:
        """Write down the incidents of one step, together.

        An incident whose id is there already is not written twice. Long messages are cut; a payload over its limit
        is left out, and the incident's details say so.

        Args:
            incidents: The incidents.
            payloads: Their samples as bytes, by the incident's id; kept if the ledger was opened with payload=True.
            snapshot: The weights and the random state that all of them failed with, as bytes; kept if the ledger was
                opened with snapshot=True.

        Raises:
            ArgumentTypeError: Something is not an incident.
        """
        incidents = list(incidents)
        for incident in incidents:
            if not isinstance(incident, Incident):
                raise ArgumentTypeError(
                    f"record_many(): {incident!r:.60} is not an incident.",
                    why="a ledger holds records of one kind.",
                    fix='gg.Incident(stage="load", cause="exception", sample_id="img_17.png")',
                )
        self._writer.add([self._entry(incident, (payloads or {}).get(incident.id), snapshot) for incident in incidents])

    def flush(self) -> None:
        """Write what is only in memory, if anything is.

        Raises:
            LedgerError: The file still cannot be written.
        """
        self._writer.flush()

    def incidents(
        self, *, limit: int | None = None, newest_first: bool = False, **filters: Unpack[Filters]
    ) -> list[Incident]:
        """Give the incidents in the order of time, those that are only in memory last.

        Args:
            limit: How many at most.
            newest_first: Begin with the last one.
            **filters: Which ones: `run`, `cause`, `stage`, `sample_id`, `transient`; `since` and `until` (before) as
                seconds, a datetime, ISO text, or an age such as "2h".

        Returns:
            The incidents.

        Raises:
            LedgerError: The file cannot be read.
        """
        with self._file.reading() as connection:
            found = list(select_incidents(connection, filters, limit=limit, newest_first=newest_first))
        waiting = [incident for incident in self._writer.waiting if matches(incident, filters)]
        return (waiting[::-1] + found if newest_first else found + waiting)[:limit]

    def incident(self, incident_id: str) -> Incident:
        """Give one incident.

        Args:
            incident_id: Its id, or the beginning of it if that fits no other.

        Returns:
            The incident.

        Raises:
            NothingMatchedError: There is no such incident, or several begin so.
            LedgerError: The file cannot be read.
        """
        with self._file.reading() as connection:
            return one_incident(connection, incident_id)

    def payload_of(self, incident_id: str) -> bytes | None:
        """Give the stored sample of an incident.

        Args:
            incident_id: The incident's id.

        Returns:
            The sample as bytes, or None if it was not stored.
        """
        with self._file.reading() as connection:
            return blob(connection, "SELECT data FROM payload WHERE incident = ?", incident_id)

    def snapshot_of(self, incident_id: str) -> bytes | None:
        """Give the stored weights and random state of an incident.

        Args:
            incident_id: The incident's id.

        Returns:
            They as bytes, or None if they were not stored.
        """
        question = "SELECT data FROM snapshot WHERE digest = (SELECT snapshot FROM incident WHERE id = ?)"
        with self._file.reading() as connection:
            return blob(connection, question, incident_id)

    def runs(self) -> list[Run]:
        """Give all runs that wrote to this file, the first first.

        Returns:
            The runs.
        """
        with self._file.reading() as connection:
            return read_runs(connection)

    def close(self) -> None:
        """Write what is left and the end of the run, and close the file; done by itself when the process ends."""
        self._finish()

    def __enter__(self) -> Ledger:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Ledger({str(self.path)!r}, run={self.run!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        return _reopen, (
            self.path,
            self.payload,
            self.snapshot,
            self.payload_limit,
            self.snapshot_limit,
            self.read_only,
            self._writer.run,
        )

    def _entry(self, incident: Incident, payload: bytes | None, snapshot: bytes | None) -> Entry:
        left_out = {}
        if payload is not None and (not self.payload or len(payload) > self.payload_limit):
            left_out["payload"] = _reason(payload, self.payload, self.payload_limit)
            payload = None
        if snapshot is not None and (not self.snapshot or len(snapshot) > self.snapshot_limit):
            left_out["snapshot"] = _reason(snapshot, self.snapshot, self.snapshot_limit)
            snapshot = None
        changes: dict[str, Any] = {} if incident.run is not None else {"run": self.run}
        if left_out:
            changes["details"] = {**incident.details, "not_stored": left_out}
        return Entry(replace(incident, **changes) if changes else incident, payload, snapshot)


def _reason(data: bytes, wanted: bool, limit: int) -> str:
    if not wanted:
        return "the ledger was opened without it"
    return f"{len(data):,} bytes, over the limit of {limit:,}"


def _reopen(
    path: Path, payload: bool, snapshot: bool, payload_limit: int, snapshot_limit: int, read_only: bool, run: Run
) -> Ledger:
    """Open in another process what was pickled there; it is the same run."""
    ledger = Ledger(
        path,
        payload,
        snapshot=snapshot,
        payload_limit=payload_limit,
        snapshot_limit=snapshot_limit,
        read_only=read_only,
    )
    ledger._writer.run = run
    return ledger
