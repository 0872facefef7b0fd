"""What a ledger holds beside incidents: runs, decisions about samples, and the losses of samples.

A sample is bad while it has incidents that are not transient and that came after its last release. What was decided -
to release it, to leave it out of an epoch, to try it again - is written down like the incidents themselves. Of each
sample the last losses are kept, in half precision, in a table that is made when the first one is written.
"""

from __future__ import annotations

import math
import os
import platform
import secrets
import struct
import subprocess
import time
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from importlib import metadata
from statistics import median
from subprocess import DEVNULL
from types import NoneType
from typing import Any, Literal

from gradgate._text import as_text
from gradgate.ledger._file import Connection
from gradgate.ledger._schema import HISTORY, MESSAGE_LIMIT, as_json, checked, columns, from_row, name_text
from gradgate.records import Record

Kind = Literal["release", "skip", "retry"]

ARGUMENTS_LIMIT = 100_000  # characters of JSON


@dataclass(frozen=True, kw_only=True, slots=True)
class Run(Record):
    """One training that wrote to the ledger.

    Attributes:
        name: The run's name, the same in all its processes.
        started: When it began, in seconds since the epoch of the clock.
        ended: When its ledger was closed; None while it goes on, or when it was killed.
        python: The version of Python.
        torch: The version of torch that was installed.
        gradgate: The version of gradgate.
        git_commit: The commit that was checked out in the working directory.
        arguments: What the user gave as the arguments of the run.
        incidents: How many incidents it has.
    """

    name: str
    started: float
    ended: float | None = None
    python: str | None = None
    torch: str | None = None
    gradgate: str | None = None
    git_commit: str | None = None
    arguments: dict[str, Any] = field(default_factory=dict)
    incidents: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Decision(Record):
    """What was decided about a sample.

    Attributes:
        id: The decision's own name; the same decision taken on several ranks has one.
        kind: "release" (it counts as good again), "skip" (left out of an epoch) or "retry" (given another chance).
        sample_id: The sample.
        run: The run in which it was decided.
        epoch: The epoch, for "skip" and "retry".
        time: Seconds since the epoch of the clock.
        reason: Why.
    """

    id: str
    kind: Kind
    sample_id: str
    run: str | None
    epoch: int | None
    time: float
    reason: str


_RUN, _DECISION = ", ".join(columns(Run)), ", ".join(columns(Decision))


def this_run(name: str | None, arguments: Mapping[str, Any] | None) -> Run:
    """Describe the run that this process is part of; the elastic launcher may have a name for it."""
    started = time.time()
    if name is None:
        name = os.environ.get("TORCHELASTIC_RUN_ID", "none")
        if name == "none":  # The launcher's own word for having no name.
            name = f"{time.strftime('%Y%m%d-%H%M%S', time.localtime(started))}-{secrets.token_hex(3)}"
    return Run(
        name=name_text(name),
        started=started,
        python=platform.python_version(),
        torch=_installed("torch"),
        gradgate=_installed("gradgate"),
        git_commit=_git_commit(),
        arguments=dict(arguments or {}),
    )


def write_run(connection: Connection, run: Run) -> None:
    """Write a run unless one of that name is there: a resumed run goes on under its name."""
    connection.execute(
        "INSERT INTO run (name, started, ended, python, torch, gradgate, git_commit, arguments) VALUES "
        "(:name, :started, :ended, :python, :torch, :gradgate, :git_commit, :arguments) ON CONFLICT (name) DO NOTHING",
        {**run.to_dict(), "arguments": as_json(run.arguments, ARGUMENTS_LIMIT)},
    )


def finish_run(connection: Connection, name: str, ended: float) -> None:
    """Write down when a run ended; of several processes the last one counts."""
    values = {"name": name, "ended": ended}
    connection.execute("UPDATE run SET ended = max(coalesce(ended, :ended), :ended) WHERE name = :name", values)


def read_runs(connection: Connection) -> list[Run]:
    return [from_row(row, Run) for row in connection.rows(f"SELECT {_RUN} FROM runs ORDER BY started, name")]


def decide(kind: Kind, sample_id: str, run: str, epoch: int | None = None, reason: str = "") -> Decision:
    """Make a decision of now; the same skip or retry, taken on several ranks, has one id."""
    name = uuid.uuid4().hex if kind == "release" else f"{kind}:{run}:{epoch}:{sample_id}"
    reason = as_text(reason, MESSAGE_LIMIT)
    return Decision(id=name, kind=kind, sample_id=sample_id, run=run, epoch=epoch, time=time.time(), reason=reason)


def write_decisions(connection: Connection, decisions: Iterable[Decision]) -> None:
    """Write down what was decided; what is there already is left as it is."""
    connection.executemany(
        f"INSERT INTO decision ({_DECISION}) VALUES (:{_DECISION.replace(', ', ', :')}) ON CONFLICT (id) DO NOTHING",
        [decision.to_dict() for decision in decisions],
    )


def read_decisions(connection: Connection, sample_id: object = None) -> list[Decision]:
    """Read what was decided, about one sample or all, in the order of time."""
    condition = "TRUE" if sample_id is None else "sample_id = :sample"
    question = f"SELECT {_DECISION} FROM decision WHERE {condition} ORDER BY time, id"
    return [from_row(row, Decision) for row in connection.rows(question, {"sample": name_text(sample_id)})]


def last_release(connection: Connection, sample_id: str) -> float | None:
    return _last_time(connection, "a decision", "decision WHERE kind = 'release' AND", sample_id)


def time_of_release(connection: Connection, sample_id: str) -> float:
    """Return a time for a release of now: after everything that the sample has done, also if the clock was set back."""
    failed = _last_time(connection, "an incident", "incident WHERE", sample_id)
    times = (time.time(), failed, last_release(connection, sample_id))
    return max(one for one in times if one is not None and math.isfinite(one))


def _last_time(connection: Connection, of: str, table: str, sample_id: str) -> float | None:
    row = connection.execute(f"SELECT max(time) FROM {table} sample_id = ?", (sample_id,)).fetchone()
    return checked(row[0], "time", of, int, float, NoneType)  # type: ignore[no-any-return]


def bad_samples(
    connection: Connection, cause: str | None = None, sample: str | None = None
) -> dict[str, tuple[int, int | None]]:
    """Find the samples with incidents that count: for each how many, and the last epoch where that is known."""
    values = {"cause": None if cause is None else as_text(cause, MESSAGE_LIMIT), "sample_id": sample}
    condition = "".join(f" AND {name} = :{name}" for name, value in values.items() if value is not None)
    rows = connection.rows(
        "SELECT sample_id, count(*), max(epoch) FROM incident LEFT JOIN ("
        "  SELECT sample_id AS whose, max(time) AS released FROM decision WHERE kind = 'release' GROUP BY sample_id"
        ") ON whose = sample_id "
        f"WHERE transient = 0 AND sample_id IS NOT NULL {condition} "
        "AND (released IS NULL OR time > released) GROUP BY sample_id",
        values,
    )
    return {
        checked(sample, "sample_id", "an incident", str): (count, checked(epoch, "epoch", "an incident", int, NoneType))
        for sample, count, epoch in rows
    }


def _installed(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _git_commit() -> str | None:
    try:
        done = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, timeout=2, stdin=DEVNULL)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


# --- Losses of samples ----------------------------------------------------------------------------------------------


KEPT = 32  # losses of a sample, the last ones
_LARGEST = 65504.0  # of half precision
_ENOUGH = 4  # losses, to judge a sample by
_RECENT = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleHistory(Record):
    """The losses of one sample.

    Attributes:
        sample_id: The sample.
        losses: Its last losses, at most 32, the oldest first, in half precision.
    """

    sample_id: str
    losses: tuple[float, ...]

    @property
    def recent(self) -> float:
        """The median of the last three losses."""
        return median(self.losses[-_RECENT:])


def write_losses(connection: Connection, losses: Iterable[tuple[object, float]]) -> None:
    """Add losses of samples in the order of time; what is not finite has an incident, and is passed over."""
    new: dict[str, list[float]] = {}
    for sample, loss in losses:
        if sample is not None and math.isfinite(loss):
            new.setdefault(name_text(sample), []).append(max(min(loss, _LARGEST), -_LARGEST))
    if not new:
        return
    if not _is_there(connection):
        connection.execute(HISTORY)
    connection.executemany(
        "INSERT INTO history (sample_id, losses) VALUES (?, ?) ON CONFLICT (sample_id) "
        f"DO UPDATE SET losses = substr(CAST(losses || excluded.losses AS BLOB), -{2 * KEPT})",
        [(name, struct.pack(f"<{len(added[-KEPT:])}e", *added[-KEPT:])) for name, added in new.items()],
    )


def read_histories(connection: Connection) -> list[SampleHistory]:
    histories = []
    rows = connection.rows("SELECT sample_id, losses FROM history ORDER BY sample_id") if _is_there(connection) else ()
    for name, packed in rows:
        count = min(len(checked(packed, "losses", "a history", bytes)) // 2, KEPT)
        values = struct.unpack(f"<{count}e", packed[: 2 * count])
        if losses := tuple(value for value in values if math.isfinite(value)):
            name = checked(name, "sample_id", "a history", str)
            histories.append(SampleHistory(sample_id=name, losses=losses))
    return histories


def merge_histories(histories: Iterable[SampleHistory], target: Connection) -> None:
    """Copy the losses of samples that the target does not know: two histories of one sample have no common order."""
    known = {history.sample_id for history in read_histories(target)}
    new = [history for history in histories if history.sample_id not in known]
    write_losses(target, [(history.sample_id, loss) for history in new for loss in history.losses])


def hardest_of(histories: Iterable[SampleHistory], k: int) -> list[SampleHistory]:
    return sorted(histories, key=lambda history: (-history.recent, history.sample_id))[:k]


def suspicious_of(histories: list[SampleHistory], threshold: float) -> list[SampleHistory]:
    """Return the samples whose loss is far above that of the others and does not fall."""
    if not histories:
        return []
    middle = median(history.recent for history in histories)
    limit = middle + threshold * 1.4826 * median(abs(history.recent - middle) for history in histories)
    high = [one for one in histories if len(one.losses) >= _ENOUGH and one.recent > limit]
    return hardest_of((one for one in high if not _falls(one)), len(high))


def _falls(history: SampleHistory) -> bool:
    """Return whether the later half of the losses is at least a fifth below the earlier one."""
    half = len(history.losses) // 2
    earlier, later = median(history.losses[:half]), median(history.losses[-half:])
    return later < earlier - 0.2 * abs(earlier)


def _is_there(connection: Connection) -> bool:
    question = "SELECT 1 FROM sqlite_master WHERE type = 'table' AND name = 'history' AND sql = ?"
    return connection.execute(question, (HISTORY,)).fetchone() is not None
