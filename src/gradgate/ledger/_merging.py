"""One ledger into another: the files of several ranks become one, however often it is done."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from gradgate.ledger._file import LedgerFile
from gradgate.ledger._incidents import blob
from gradgate.ledger._quarantine import read_decisions, write_decisions
from gradgate.ledger._rows import COLUMNS, from_row
from gradgate.ledger._runs import finish_run, read_runs, write_run
from gradgate.ledger._writer import INSERT

__all__ = ["merge_files"]

PAGE = 1_000
"""How many incidents go in one transaction, so that other writers get their turn."""


def merge_files(source: LedgerFile, target: LedgerFile) -> int:
    """Copy what the target does not have: runs, incidents with their payloads, and decisions.

    Args:
        source: The ledger to read.
        target: The ledger to write.

    Returns:
        How many incidents were new.
    """
    with source.reading() as connection:
        runs, decisions = read_runs(connection), read_decisions(connection)
    with target.writing() as connection:
        for run in runs:
            write_run(connection, run)
            if run.ended is not None:
                finish_run(connection, run.name, run.ended)
        write_decisions(connection, decisions)
    return sum(_copy_page(source, target, rows) for rows in _pages(source))


def _pages(source: LedgerFile) -> Iterator[list[tuple[Any, ...]]]:
    last = -(2**63)
    question = f"SELECT number, {', '.join(COLUMNS)}, snapshot FROM incident WHERE number > ? ORDER BY number LIMIT ?"
    while True:
        with source.reading() as connection:
            rows = connection.execute(question, (last, PAGE)).fetchall()
        if not rows:
            return
        yield [row[1:] for row in rows]
        last = rows[-1][0]


def _copy_page(source: LedgerFile, target: LedgerFile, rows: list[tuple[Any, ...]]) -> int:
    for row in rows:
        from_row(row[:-1])  # What is damaged in the source does not get into the target.
    with source.reading() as there, target.writing() as here:
        before = here.total_changes
        here.executemany(INSERT, rows)
        written = here.total_changes - before
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
