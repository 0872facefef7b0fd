"""What a ledger can be asked, in Python and in SQL."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any, Unpack

from gradgate.errors import ArgumentValueError
from gradgate.ledger._exporting import export_incidents
from gradgate.ledger._file import LedgerFile
from gradgate.ledger._runs import Decision, Run, bad_samples, read_decisions, read_runs
from gradgate.ledger._select import (
    Answer,
    Filters,
    Stats,
    ask,
    blob,
    count_incidents,
    matches,
    one_incident,
    select_incidents,
)
from gradgate.ledger._writer import Writer
from gradgate.records import Incident


class Questions:
    """The half of a ledger that reads."""

    _file: LedgerFile
    _writer: Writer

    def incidents(
        self, *, limit: int | None = None, newest_first: bool = False, **filters: Unpack[Filters]
    ) -> list[Incident]:
        """Give the incidents in the order of time, those that are only in memory last."""
        if limit is not None and limit < 0:
            raise ArgumentValueError(
                f"incidents(): `limit` is {limit}.", why="it says how many to give at most.", fix="limit=50"
            )
        with self._file.reading() as connection:
            found = list(select_incidents(connection, filters, limit=limit, newest_first=newest_first))
        waiting = [incident for incident in self._writer.waiting if matches(incident, filters)]
        return (waiting[::-1] + found if newest_first else found + waiting)[:limit]

    def incident(self, incident_id: str) -> Incident:
        """Give one incident."""
        with self._file.reading() as connection:
            return one_incident(connection, incident_id)

    def payload_of(self, incident_id: str) -> bytes | None:
        """Give the stored sample of an incident."""
        with self._file.reading(whole=True) as connection:
            return blob(connection, "SELECT data FROM payload WHERE incident = ?", incident_id)

    def snapshot_of(self, incident_id: str) -> bytes | None:
        """Give the stored weights and random state of an incident."""
        question = "SELECT data FROM snapshot WHERE digest = (SELECT snapshot FROM incident WHERE id = ?)"
        with self._file.reading(whole=True) as connection:
            return blob(connection, question, incident_id)

    def bad_ids(
        self,
        min_count: int = 1,
        cause: str | None = None,
        *,
        retry_after: int | None = None,
        epoch: int | None = None,
    ) -> set[str]:
        """Give the samples that are known to be bad: with incidents that are not transient and not released since."""
        if min_count < 1:
            raise ArgumentValueError(
                f"bad_ids(): `min_count` is {min_count}.", why="a sample without incidents is good.", fix="min_count=1"
            )
        if retry_after is not None and epoch is None:
            raise ArgumentValueError(
                f"bad_ids(): `retry_after` is {retry_after}, but `epoch` is not given.",
                why="it counts epochs from the last failure to now.",
                fix=f"ledger.bad_ids(retry_after={retry_after}, epoch=epoch)",
            )
        with self._file.reading() as connection:
            found = bad_samples(connection, cause)
        for incident in self._writer.waiting:
            if incident.sample_id is not None and not incident.transient and cause in (None, incident.cause):
                count, last = found.get(incident.sample_id, (0, None))
                epochs = [value for value in (last, incident.epoch) if value is not None]
                found[incident.sample_id] = count + 1, max(epochs, default=None)
        bad = {sample for sample, (count, _) in found.items() if count >= min_count}
        if retry_after is not None and epoch is not None:
            bad = {sample for sample in bad if (last := found[sample][1]) is None or epoch <= last + retry_after}
        return bad

    def decisions(self, sample_id: object = None) -> list[Decision]:
        """Give what was decided about samples, in the order of time."""
        with self._file.reading() as connection:
            return read_decisions(connection, sample_id)

    def stats(self, **filters: Unpack[Filters]) -> Stats:
        """Count the incidents by run, stage, cause and exception, and name the worst samples."""
        with self._file.reading() as connection:
            return count_incidents(connection, filters)

    def export(
        self, path: str | os.PathLike[str] | IO[bytes], format: str | None = None, **filters: Unpack[Filters]
    ) -> int:
        """Write the incidents to a file for other programs.

        In csv, a text that a spreadsheet would take for a formula gets a `'` before it.
        """
        target = Path(path) if isinstance(path, str | os.PathLike) else path
        if isinstance(target, Path) and target.absolute() == self._file.path:
            raise ArgumentValueError(
                f"export(): {target} is the ledger itself.", why="it would be replaced.", fix='"incidents.csv"'
            )
        with self._file.reading() as connection:
            return export_incidents(select_incidents(connection, filters), target, format)

    def sql(
        self, question: str, values: Sequence[Any] = (), *, limit: int | None = None, seconds: float = 60
    ) -> Answer:
        """Ask a question in SQL about the views `incidents`, `samples` and `runs`; nothing can be changed this way."""
        return ask(self._file.path, question, values, limit, seconds)

    def runs(self) -> list[Run]:
        """Give all runs that wrote to this file, the first first."""
        with self._file.reading() as connection:
            return read_runs(connection)
