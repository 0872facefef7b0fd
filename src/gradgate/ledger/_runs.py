"""A run: one training, with what is needed to know later what ran."""

from __future__ import annotations

import os
import platform
import secrets
import sqlite3
import subprocess
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from importlib import metadata
from types import NoneType
from typing import Any

from gradgate.ledger._rows import as_json, as_text, check_kinds, read_json

__all__ = ["Run", "finish_run", "read_runs", "this_run", "write_run"]


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


def this_run(name: str | None, arguments: Mapping[str, Any] | None) -> Run:
    """Describe the run that this process is part of.

    Args:
        name: Its name; if None, that of the elastic launcher, or else the time and a random word.
        arguments: What the user wants to have written down.

    Returns:
        The run.
    """
    started = time.time()
    if name is None:
        name = os.environ.get("TORCHELASTIC_RUN_ID", "none")
        if name == "none":  # The launcher's own word for having no name.
            name = f"{time.strftime('%Y%m%d-%H%M%S', time.localtime(started))}-{secrets.token_hex(3)}"
    return Run(
        name=as_text(name),
        started=started,
        python=platform.python_version(),
        torch=_installed("torch"),
        gradgate=_installed("gradgate"),
        git_commit=_git_commit(),
        arguments=dict(arguments or {}),
    )


def write_run(connection: sqlite3.Connection, run: Run) -> None:
    """Write a run unless one of that name is there: a resumed run goes on under its name.

    Args:
        connection: In a transaction.
        run: The run.
    """
    connection.execute(
        "INSERT OR IGNORE INTO run (name, started, ended, python, torch, gradgate, git_commit, arguments) "
        "VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
        (run.name, run.started, run.ended, run.python, run.torch, run.gradgate, run.git_commit, as_json(run.arguments)),
    )


def finish_run(connection: sqlite3.Connection, name: str, ended: float) -> None:
    """Write down when a run ended; of several processes the last one counts.

    Args:
        connection: In a transaction.
        name: The run.
        ended: When.
    """
    connection.execute("UPDATE run SET ended = max(coalesce(ended, ?1), ?1) WHERE name = ?2", (ended, name))


def read_runs(connection: sqlite3.Connection) -> list[Run]:
    """Read all runs, the first first.

    Args:
        connection: The open file.

    Returns:
        The runs.
    """
    rows = connection.execute(
        "SELECT name, started, ended, python, torch, gradgate, git_commit, arguments, incidents FROM runs "
        "ORDER BY started, name"
    )
    names = ("name", "started", "ended", "python", "torch", "gradgate", "git_commit", "arguments", "incidents")
    found = [dict(zip(names, row, strict=True)) for row in rows]
    for run in found:
        check_kinds(run, _KINDS, "a run")
        run["arguments"] = read_json(run["arguments"])
    return [Run(**run) for run in found]


_KINDS: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(("name", "arguments"), (str,)),
    **dict.fromkeys(("python", "torch", "gradgate", "git_commit"), (str, NoneType)),
    "started": (int, float),
    "ended": (int, float, NoneType),
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
