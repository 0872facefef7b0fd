"""The ledger itself: one file with what was dropped, why, and enough to see it again."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import IO, Any, Literal, Unpack
from weakref import finalize

from gradgate._text import IncidentList, incident_html
from gradgate.errors import ArgumentTypeError, ArgumentValueError
from gradgate.ledger import _runs, _select
from gradgate.ledger._exporting import export_incidents, pandas_frame, polars_frame
from gradgate.ledger._file import LedgerFile
from gradgate.ledger._runs import Decision, Run, SampleHistory, decide, this_run
from gradgate.ledger._schema import name_text
from gradgate.ledger._select import Answer, Filters, Stats
from gradgate.ledger._writer import Entry, Writer, merge_files, with_details
from gradgate.records import Incident


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
        LedgerError: The file cannot be opened, is not a ledger, or was written by a newer gradgate. Methods raise it
            where the file cannot be read, or a decision or a merge cannot be written.

    Examples:
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
        try:
            self.path = Path(path)
        except TypeError:
            self.path = Path()
        if self.path.name in ("", ":memory:"):
            what = f"Ledger(): `path` is {path!r}."
            raise ArgumentValueError(what, why="a ledger is a file.", fix='gg.Ledger("run.ledger")')
        self.payload, self.payload_limit = payload, payload_limit
        self.snapshot, self.snapshot_limit = snapshot, snapshot_limit
        self.read_only = read_only
        self._file = LedgerFile(self.path.absolute(), read_only=read_only)
        # A reader is no run, and is not made to wait for the questions that describe one.
        self._writer = Writer(self._file, Run(name="", started=0) if read_only else this_run(run, arguments))
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
            ArgumentTypeError: Something is not an incident, or a payload is not bytes.
        """
        incidents = list(incidents)
        for incident in incidents:
            if not isinstance(incident, Incident):
                raise ArgumentTypeError(
                    f"record_many(): {incident!r:.60} is not an incident.",
                    why="a ledger holds records of one kind.",
                    fix='gg.Incident(stage="load", cause="exception", sample_id="img_17.png")',
                )
        for data in (*(payloads or {}).values(), snapshot):
            if data is not None and not isinstance(data, bytes):
                raise ArgumentTypeError(
                    f"record_many(): a payload or the snapshot is of type {type(data).__name__}.",
                    why="a ledger stores bytes; `gg.Guard(payload=True)` encodes samples itself.",
                    fix="ledger.record(incident, payload=bytes(data))",
                )
        self._writer.add([self._entry(incident, (payloads or {}).get(incident.id), snapshot) for incident in incidents])

    def flush(self) -> None:
        """Write what is only in memory, if anything is."""
        self._writer.flush()

    def release(self, sample_id: object, reason: str = "") -> bool:
        """Take a sample out of quarantine: what it did until now does not count any more, what it does later does.

        Args:
            sample_id: The sample.
            reason: Why, for the record.

        Returns:
            Whether it was known to be bad.
        """
        sample = name_text(sample_id)
        self._writer.flush()
        with self._file.writing() as connection:
            was_bad = bool(_runs.bad_samples(connection, sample=sample))
            release = decide("release", sample, self.run, reason=reason)
            _runs.write_decisions(connection, [replace(release, time=_runs.time_of_release(connection, sample))])
        return was_bad

    def record_decisions(self, kind: Literal["skip", "retry"], sample_ids: Iterable[object], epoch: int) -> None:
        """Write down that samples were left out of an epoch, or given another chance in it.

        Args:
            kind: "skip" or "retry".
            sample_ids: The samples.
            epoch: The epoch.
        """
        decisions = [decide(kind, name_text(sample), self.run, epoch) for sample in sample_ids]
        if decisions:
            with self._file.writing() as connection:
                _runs.write_decisions(connection, decisions)

    def merge(self, other: Ledger | str | os.PathLike[str]) -> int:
        """Copy everything from another ledger that this one does not have; doing it again changes nothing.

        Args:
            other: The other ledger, or its path. It is only read.

        Returns:
            How many incidents were new.

        Raises:
            ArgumentTypeError: `other` is neither.
        """
        if not isinstance(other, Ledger | str | os.PathLike):
            what, why = f"merge(): `other` is {other!r}.", "it is another ledger, or the path of one."
            raise ArgumentTypeError(what, why=why, fix='ledger.merge("rank1.ledger")')
        self._writer.flush()
        path = (other.path if isinstance(other, Ledger) else Path(other)).absolute()
        with closing(LedgerFile(path, read_only=True)) as source:
            return merge_files(source, self._file)

    def incidents(
        self, *, limit: int | None = None, newest_first: bool = False, **filters: Unpack[Filters]
    ) -> list[Incident]:
        """Return the incidents in the order of time, those that are only in memory last.

        Args:
            limit: How many at most.
            newest_first: Begin with the last one.
            **filters: Which ones: `run`, `cause`, `stage`, `sample_id`, `transient`; `since` and `until` (before) as
                seconds, a datetime, ISO text, or an age such as "2h".

        Raises:
            ArgumentValueError: `limit` is negative.
        """
        if limit is not None and limit < 0:
            what = f"incidents(): `limit` is {limit}."
            raise ArgumentValueError(what, why="it is the largest number to return.", fix="limit=50")
        with self._file.reading() as connection:
            found = list(_select.select_incidents(connection, filters, limit=limit, newest_first=newest_first))
        waiting = [incident for incident in self._writer.waiting if _select.matches(incident, filters)]
        return IncidentList((waiting[::-1] + found if newest_first else found + waiting)[:limit])

    def incident(self, incident_id: str) -> Incident:
        """Return one incident.

        Args:
            incident_id: Its id, or the beginning of it if that fits no other.

        Raises:
            NothingMatchedError: There is no such incident, or several begin so.
        """
        with self._file.reading() as connection:
            return _select.one_incident(connection, incident_id)

    def payload_of(self, incident_id: str) -> bytes | None:
        """Return the stored sample of an incident as bytes, or None if it was not stored.

        Args:
            incident_id: The incident's id.
        """
        with self._file.reading(whole=True) as connection:
            return _select.blob(connection, "SELECT data FROM payload WHERE incident = ?", incident_id)

    def snapshot_of(self, incident_id: str) -> bytes | None:
        """Return the stored weights and random state of an incident as bytes, or None if they were not stored.

        Args:
            incident_id: The incident's id.
        """
        question = "SELECT data FROM snapshot WHERE digest = (SELECT snapshot FROM incident WHERE id = ?)"
        with self._file.reading(whole=True) as connection:
            return _select.blob(connection, question, incident_id)

    def bad_ids(
        self, min_count: int = 1, cause: str | None = None, *, retry_after: int | None = None, epoch: int | None = None
    ) -> set[str]:
        """Return the ids of bad samples, as text: those with incidents that are not transient and not released since.

        Args:
            min_count: How many such incidents make a sample bad.
            cause: Count only incidents of this cause.
            retry_after: Give a sample another chance when it has sat out this many epochs since it last failed;
                one whose epoch was not recorded gets none.
            epoch: The epoch that begins now, for `retry_after`.

        Raises:
            ArgumentValueError: `min_count` is not positive, or `retry_after` is given without `epoch`.
        """
        if min_count < 1:
            what = f"bad_ids(): `min_count` is {min_count}."
            raise ArgumentValueError(what, why="a sample without incidents is good.", fix="min_count=1")
        if retry_after is not None and epoch is None:
            raise ArgumentValueError(
                f"bad_ids(): `retry_after` is {retry_after}, but `epoch` is not given.",
                why="it counts epochs from the last failure to now.",
                fix=f"ledger.bad_ids(retry_after={retry_after}, epoch=epoch)",
            )
        with self._file.reading() as connection:
            found = _runs.bad_samples(connection, cause)
        for incident in self._writer.waiting:
            if incident.sample_id is not None and not incident.transient and cause in (None, incident.cause):
                count, last = found.get(incident.sample_id, (0, None))
                epochs = [value for value in (last, incident.epoch) if value is not None]
                found[incident.sample_id] = count + 1, max(epochs, default=None)
        return {
            sample
            for sample, (count, last) in found.items()
            if count >= min_count
            and (retry_after is None or epoch is None or last is None or epoch <= last + retry_after)
        }

    def decisions(self, sample_id: object = None) -> list[Decision]:
        """Return what was decided about samples, in the order of time.

        Args:
            sample_id: Only about this sample.
        """
        with self._file.reading() as connection:
            return _runs.read_decisions(connection, sample_id)

    def record_losses(self, losses: Iterable[tuple[object, float]]) -> None:
        """Add losses of samples to their histories, as `Guard(history=True)` does; the last 32 of each are kept.

        Args:
            losses: Samples and their losses, in the order of time. What is not finite is passed over.
        """
        with self._file.writing() as connection:
            _runs.write_losses(connection, losses)

    def hardest(self, k: int = 10) -> list[SampleHistory]:
        """Return the samples with the largest losses, by the median of the last three, the hardest first.

        Args:
            k: How many.

        Raises:
            ArgumentValueError: `k` is negative.

        Examples:
            >>> import tempfile
            >>> ledger = gg.Ledger(tempfile.mkdtemp() + "/run.ledger")
            >>> ledger.record_losses([("a.png", 0.5), ("b.png", 4.0), ("a.png", 0.25)])
            >>> [(one.sample_id, one.losses) for one in ledger.hardest(2)]
            [('b.png', (4.0,)), ('a.png', (0.5, 0.25))]
        """
        if k < 0:
            raise ArgumentValueError(f"hardest(): `k` is {k}.", why="it is a number of samples.", fix="k=10")
        with self._file.reading() as connection:
            return _runs.hardest_of(_runs.read_histories(connection), k)

    def suspicious(self, threshold: float = 3.5) -> list[SampleHistory]:
        """Return the samples whose loss is high and does not fall: probably labelled wrongly, or not to be learned.

        High is a median of the last three losses that is `threshold` deviations above the median of all samples (1.4826
        times the median absolute deviation). A loss falls if the later half is a fifth below the earlier one. Samples
        with fewer than four losses are not judged. The hardest comes first.

        Args:
            threshold: How many deviations.
        """
        with self._file.reading() as connection:
            return _runs.suspicious_of(_runs.read_histories(connection), threshold)

    def stats(self, **filters: Unpack[Filters]) -> Stats:
        """Count the incidents in the file by run, stage, cause and exception, and name the worst samples.

        Args:
            **filters: Which incidents, as in `incidents`.

        Returns:
            The counts.
        """
        with self._file.reading() as connection:
            return _select.count_incidents(connection, filters)

    def export(
        self, path: str | os.PathLike[str] | IO[bytes], format: str | None = None, **filters: Unpack[Filters]
    ) -> int:
        """Write the incidents to a file for other programs.

        In csv, a text that a spreadsheet would take for a formula gets a `'` before it.

        Args:
            path: The file; one that is there is replaced. Or a binary stream, with `format`.
            format: "csv", "jsonl" or "parquet" (needs pyarrow); by the end of the path if None.
            **filters: Which incidents, as in `incidents`.

        Returns:
            How many were written.

        Raises:
            ArgumentValueError: There is no such format, or the path is the ledger itself.
            LedgerError: The file cannot be written, or pyarrow is missing.
        """
        target = Path(path) if isinstance(path, str | os.PathLike) else path
        if isinstance(target, Path) and target.absolute() == self._file.path:
            raise ArgumentValueError(
                f"export(): {target} is the ledger itself.", why="it would be replaced.", fix='"incidents.csv"'
            )
        with self._file.reading() as connection:
            return export_incidents(_select.select_incidents(connection, filters), target, format)

    def to_pandas(self, **filters: Unpack[Filters]) -> Any:
        """Return the incidents as a data frame of pandas, one row each, in the order of time.

        The columns are the attributes of `Incident`: texts, `Int64`, `Float64` (NaN is a value, NA is missing), and
        `time` in UTC. `details` is JSON.

        Args:
            **filters: Which incidents, as in `incidents`.

        Raises:
            LedgerError: Pandas is missing (`pip install 'gradgate[pandas]'`).
        """
        return pandas_frame(self.incidents(**filters))

    def to_polars(self, **filters: Unpack[Filters]) -> Any:
        """Return the incidents as a data frame of polars, with the columns of `to_pandas`.

        Args:
            **filters: Which incidents, as in `incidents`.

        Raises:
            LedgerError: Polars is missing (`pip install 'gradgate[polars]'`).
        """
        return polars_frame(self.incidents(**filters))

    def sql(
        self, question: str, values: Sequence[Any] = (), *, limit: int | None = None, seconds: float = 60
    ) -> Answer:
        """Ask a question in SQL about the views `incidents`, `samples` and `runs`; nothing can be changed this way.

        Args:
            question: One SELECT.
            values: What stands for its question marks.
            limit: How many rows at most.
            seconds: How long it may take.

        Returns:
            The names of the columns, and the rows.

        Raises:
            ArgumentValueError: The SQL is wrong, or does more than read.
            LedgerError: It took too long.
        """
        return _select.ask(self._file.path, question, values, limit, seconds)

    def runs(self) -> list[Run]:
        """Return all runs that wrote to this file, the first first."""
        with self._file.reading() as connection:
            return _runs.read_runs(connection)

    def close(self) -> None:
        """Write what is left and the end of the run, and close the file; done by itself when the process ends."""
        self._finish()

    def __enter__(self) -> Ledger:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Ledger({str(self.path)!r}, run={self.run!r})"

    def _repr_html_(self) -> str:
        counted = self.stats()
        title = f"{self.path}: {counted.incidents:,} incidents, {len(self.bad_ids()):,} samples are bad"
        return incident_html(title, self.incidents(limit=10, newest_first=True), counted.incidents)

    def __reduce__(self) -> tuple[Any, ...]:
        names = ("payload", "snapshot", "payload_limit", "snapshot_limit", "read_only")
        return _reopen, (self.path, {name: getattr(self, name) for name in names}, self._writer.run)

    def _entry(self, incident: Incident, payload: bytes | None, snapshot: bytes | None) -> Entry:
        reasons = {
            "payload": _why_not(payload, self.payload, self.payload_limit),
            "snapshot": _why_not(snapshot, self.snapshot, self.snapshot_limit),
        }
        if any(reasons.values()):
            incident = with_details(incident, not_stored={name: why for name, why in reasons.items() if why})
        if incident.run is None:
            incident = replace(incident, run=self.run)
        return Entry(incident, None if reasons["payload"] else payload, None if reasons["snapshot"] else snapshot)


def _why_not(data: bytes | None, wanted: bool, limit: int) -> str:
    if data is None or (wanted and len(data) <= limit):
        return ""
    return f"{len(data):,} bytes, over the limit of {limit:,}" if wanted else "the ledger was opened without it"


def _reopen(path: Path, settings: dict[str, Any], run: Run) -> Ledger:
    """Open in another process what was pickled; it is the same run."""
    ledger = Ledger(path, **settings)
    ledger._writer.run = run
    return ledger
