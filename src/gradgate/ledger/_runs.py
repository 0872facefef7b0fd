"""What a ledger holds beside incidents: the runs that wrote them, and what was decided about samples.

A sample is bad while it has incidents that are not transient and that came after its last release. What was decided -
to release it, to leave it out of an epoch, to try it again - is written down like the incidents themselves.
"""

from __future__ import annotations

import math
import os
import platform
import secrets
import subprocess
import time
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from importlib import metadata
from types import NoneType
from typing import Any, Literal

from gradgate._text import as_text
from gradgate.ledger._file import Connection
from gradgate.ledger._rows import MESSAGE_LIMIT, as_json, check_kinds, name_text, read_json

Kind = Literal["release", "skip", "retry"]

ARGUMENTS_LIMIT = 100_000
"""How many characters the arguments of a run may take as JSON."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
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

    def to_dict(self) -> dict[str, Any]:
        """Give the record as a plain dictionary.

        Returns:
            One entry for each attribute.
        """
        return asdict(self)


@dataclass(frozen=True, kw_only=True, slots=True)
class Decision:
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

    def to_dict(self) -> dict[str, Any]:
        """Give the record as a plain dictionary.

        Returns:
            One entry for each attribute.
        """
        return asdict(self)


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
    """Read all runs, the first first."""
    names = tuple(Run.__dataclass_fields__)
    rows = connection.rows(f"SELECT {', '.join(names)} FROM runs ORDER BY started, name")
    found = [dict(zip(names, row, strict=True)) for row in rows]
    for run in found:
        check_kinds(run, _RUN, "a run")
        run["arguments"] = read_json(run["arguments"])
    return [Run(**run) for run in found]


def decide(kind: Kind, sample_id: str, run: str, epoch: int | None = None, reason: str = "") -> Decision:
    """Make a decision of now; the same skip or retry, taken on several ranks, has one id."""
    name = uuid.uuid4().hex if kind == "release" else f"{kind}:{run}:{epoch}:{sample_id}"
    reason = as_text(reason, MESSAGE_LIMIT)
    return Decision(id=name, kind=kind, sample_id=sample_id, run=run, epoch=epoch, time=time.time(), reason=reason)


def write_decisions(connection: Connection, decisions: Iterable[Decision]) -> None:
    """Write down what was decided; what is there already is left as it is."""
    names = tuple(Decision.__dataclass_fields__)
    connection.executemany(
        f"INSERT INTO decision ({', '.join(names)}) VALUES (:{', :'.join(names)}) ON CONFLICT (id) DO NOTHING",
        [decision.to_dict() for decision in decisions],
    )


def read_decisions(connection: Connection, sample_id: object = None) -> list[Decision]:
    """Read what was decided, about one sample or all, in the order of time."""
    names = tuple(Decision.__dataclass_fields__)
    condition = "TRUE" if sample_id is None else "sample_id = :sample"
    rows = connection.rows(
        f"SELECT {', '.join(names)} FROM decision WHERE {condition} ORDER BY time, id", {"sample": name_text(sample_id)}
    )
    found = [dict(zip(names, row, strict=True)) for row in rows]
    for values in found:
        check_kinds(values, _DECISION, "a decision")
    return [Decision(**values) for values in found]


def last_release(connection: Connection, sample_id: str) -> float | None:
    """Give when a sample was released most recently."""
    question = "SELECT max(time) FROM decision WHERE sample_id = ? AND kind = 'release'"
    released = connection.execute(question, (sample_id,)).fetchone()[0]
    check_kinds({"time": released}, {"time": (int, float, NoneType)}, "a decision")
    return released  # type: ignore[no-any-return]


def time_of_release(connection: Connection, sample_id: str) -> float:
    """Give a time for a release of now: after everything that the sample has done, also if the clock was set back."""
    question = "SELECT max(time) FROM incident WHERE sample_id = ?"
    failed = connection.execute(question, (sample_id,)).fetchone()[0]
    check_kinds({"time": failed}, {"time": (int, float, NoneType)}, "an incident")
    times = (time.time(), failed, last_release(connection, sample_id))
    return max(one for one in times if one is not None and math.isfinite(one))


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
    found = {sample: (count, epoch) for sample, count, epoch in rows}
    for sample, (_, epoch) in found.items():
        if type(sample) is not str or type(epoch) not in (int, NoneType):
            check_kinds({"sample_id": sample, "epoch": epoch}, _DECISION, "an incident")
    return found


_RUN: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(("name", "arguments"), (str,)),
    **dict.fromkeys(("python", "torch", "gradgate", "git_commit"), (str, NoneType)),
    "started": (int, float),
    "ended": (int, float, NoneType),
    "incidents": (int,),
}
_DECISION: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(("id", "kind", "sample_id", "reason"), (str,)),
    "run": (str, NoneType),
    "epoch": (int, NoneType),
    "time": (int, float),
}


def _installed(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _git_commit() -> str | None:
    try:
        done = subprocess.run(
            ["git", "rev-parse", "HEAD"],
            capture_output=True,
            text=True,
            timeout=2,
            check=False,
            stdin=subprocess.DEVNULL,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
