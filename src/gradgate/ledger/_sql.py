"""Plain SQL on a ledger, for reading only and for a limited time."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gradgate.errors import ArgumentValueError, LedgerError
from gradgate.ledger._file import LedgerFile

__all__ = ["Answer", "ask"]

_ALLOWED = {
    sqlite3.SQLITE_SELECT,
    sqlite3.SQLITE_READ,
    sqlite3.SQLITE_FUNCTION,
    sqlite3.SQLITE_RECURSIVE,
}


@dataclass(frozen=True, slots=True)
class Answer:
    """What a question in SQL gave.

    Attributes:
        columns: The names of the columns.
        rows: The rows.
    """

    columns: tuple[str, ...]
    rows: list[tuple[Any, ...]]


def ask(
    path: Path, question: str, values: Sequence[Any] = (), *, limit: int | None = None, seconds: float = 60
) -> Answer:
    """Ask a question in SQL; nothing is changed, no other file is touched.

    Args:
        path: The file.
        question: One SELECT.
        values: What stands for its question marks.
        limit: How many rows at most.
        seconds: How long it may take.

    Returns:
        The answer.

    Raises:
        ArgumentValueError: The SQL is wrong, or does more than read.
        LedgerError: It took too long, or the file cannot be read.
    """
    file = LedgerFile(path, read_only=True)
    try:
        with file.reading() as connection:
            connection.execute("PRAGMA query_only = ON")
            connection.set_authorizer(_only_reading)
            until = time.monotonic() + seconds
            connection.set_progress_handler(lambda: time.monotonic() > until, 10_000)
            try:
                cursor = connection.execute(question, values)
                rows = cursor.fetchall() if limit is None else cursor.fetchmany(limit)
            except (sqlite3.ProgrammingError, sqlite3.Warning, TypeError, UnicodeEncodeError) as error:
                raise _wrong(error) from error
            except sqlite3.DatabaseError as error:
                code = getattr(error, "sqlite_errorname", "")
                if code in ("SQLITE_ERROR", "SQLITE_AUTH"):
                    raise _wrong(error) from error
                if code == "SQLITE_INTERRUPT":
                    raise LedgerError(
                        f"the question took longer than {seconds:g} seconds.",
                        why="a question without an end must not hold up everything.",
                        fix=f"ledger.sql(..., seconds={10 * seconds:g})   # or ask for less",
                    ) from error
                raise
            return Answer(tuple(column[0] for column in cursor.description or ()), rows)
    finally:
        file.close()


def _only_reading(action: int, *_: str | None) -> int:
    return sqlite3.SQLITE_OK if action in _ALLOWED else sqlite3.SQLITE_DENY


def _wrong(error: Exception) -> ArgumentValueError:
    return ArgumentValueError(
        f"the question cannot be asked: {error}.",
        why="it must be one SELECT on the views incidents, samples and runs (or the tables behind them).",
        fix="SELECT cause, count(*) FROM incidents GROUP BY cause",
    )
