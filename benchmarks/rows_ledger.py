"""The ledger: what one incident costs, and what a million of them do to a question."""

from __future__ import annotations

import atexit
import json
import shutil
import sqlite3
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import torch

import gradgate as gg
from benchmarks.harness import Candidate, Growth, Row
from gradgate.ledger._schema import to_row
from gradgate.ledger._writer import INSERT

MILLION = 1_000_000
SECOND = 1e6  # In microseconds.


@cache
def folder() -> Path:
    """A folder for this run of the benchmarks."""
    made = tempfile.mkdtemp(prefix="gradgate-bench-")
    atexit.register(shutil.rmtree, made, ignore_errors=True)
    return Path(made)


def incident(number: int = 0) -> gg.Incident:
    """A full incident, as the guard writes it."""
    return gg.Incident(
        run="bench",
        step=number,
        epoch=number // 100_000,
        sample_id=f"img_{number * 7919 % 100_003}.png",
        row=number % 64,
        stage=("forward", "loss", "backward", "load")[number % 4],
        cause=("exception", "non-finite loss", "non-finite gradient")[number % 3],
        exception_type="builtins.ValueError" if number % 3 == 0 else None,
        message="expected 3 channels, got 4: " + "x" * 40,
        where="train.py:112",
        module="encoder.layer1.0.conv1",
        loss=0.5,
        transient=number % 50 == 0,
        time=1.7e9 + number,
        details={"batch": 64, "tried": "bisection", "tests": 7},
    )


@cache
def holding(count: int) -> gg.Ledger:
    """A ledger with so many incidents, of a tenth as many samples, written once for all rows."""
    ledger = gg.Ledger(folder() / f"{count}.ledger", run="bench")
    samples = count // 10 + 3
    patterns = [to_row(incident(number)) for number in range(3_000)]

    def rows() -> Iterator[tuple[Any, ...]]:
        for number in range(count):
            row = list(patterns[number % 3_000])
            row[0], row[2], row[3] = f"{number * 2654435761 % 2**32:08x}{number:024x}", number, number // 100_000
            row[6], row[17] = f"img_{number * 7919 % samples}.png", 1.7e9 + number
            yield (*row, None)

    with ledger._file.writing(size=1_000 * count) as connection:
        connection.execute("PRAGMA cache_size = -400000")
        connection.executemany(INSERT, rows())
    ledger.close()
    return gg.Ledger(folder() / f"{count}.ledger", read_only=True)


def one_incident() -> dict[str, Candidate]:
    """One incident written so that it survives the process, by the ledger and by hand."""
    ledger = gg.Ledger(folder() / "one.ledger")
    lines = open(folder() / "one.jsonl", "a")  # noqa: SIM115 - open for the whole race
    by_hand = sqlite3.connect(folder() / "one.db", isolation_level=None)
    atexit.register(lines.close)
    atexit.register(by_hand.close)
    by_hand.execute("PRAGMA journal_mode = WAL")
    by_hand.execute("PRAGMA synchronous = NORMAL")
    by_hand.execute("CREATE TABLE t (id, text)")

    def json_lines() -> None:
        lines.write(json.dumps(incident().to_dict()) + "\n")
        lines.flush()

    def sqlite_by_hand() -> None:
        one = incident()
        by_hand.execute("INSERT INTO t VALUES (?, ?)", (one.id, json.dumps(one.to_dict())))

    return {"ledger": lambda: ledger.record(incident()), "JSON lines": json_lines, "sqlite3 by hand": sqlite_by_hand}


def many_incidents() -> dict[str, Candidate]:
    """The hundred incidents of one very bad step, together and one by one."""
    ledger = gg.Ledger(folder() / "many.ledger")
    return {
        "together": lambda: ledger.record_many([incident(number) for number in range(100)]),
        "one by one": lambda: [ledger.record(incident(number)) for number in range(100)],
    }


def listing() -> dict[str, Candidate]:
    """The newest fifty, of all and of one cause, one stage and one run."""
    ledger = holding(MILLION)
    return {
        "ledger": lambda: ledger.incidents(limit=50, newest_first=True),
        "one cause": lambda: ledger.incidents(limit=50, newest_first=True, cause="exception", since=1.7e9),
        "nothing fits": lambda: ledger.incidents(
            limit=50, newest_first=True, run="bench", stage="load", transient=True
        ),
    }


def counting() -> dict[str, Candidate]:
    """Counts by run, stage, cause and exception, and the worst samples."""
    ledger = holding(MILLION)
    return {"ledger": ledger.stats, "one cause": lambda: ledger.stats(cause="exception")}


def bad_samples() -> dict[str, Candidate]:
    """The hundred thousand samples that are bad."""
    ledger = holding(MILLION)
    return {"ledger": ledger.bad_ids, "one cause": lambda: ledger.bad_ids(cause="exception")}


def growing(count: int) -> dict[str, Candidate]:
    """Each question, and one more incident, to a ledger with so many incidents."""
    reading, writing = holding(count), gg.Ledger(holding(count).path, run="bench")
    return {
        "stats": reading.stats,
        "bad_ids": reading.bad_ids,
        "list of 50": lambda: reading.incidents(limit=50, newest_first=True),
        "record one": lambda: writing.record(incident(count)),
    }


def of_size(count: int) -> Row:
    """A row of a ledger of some size."""
    growth = Growth("questions to a ledger, and one more incident", "incidents in the ledger", count)
    title, candidates = f"a ledger of {count:,} incidents", lambda: growing(count)
    return Row(
        "ledger", title, candidates, "stats", "list of 50", growth=growth, quick=count < MILLION, rounds=7, seconds=1.0
    )


def healthy_step() -> dict[str, Candidate]:
    """A step in which nothing is wrong, with and without a ledger."""
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
    batch = torch.randn(32, 64)
    kinds = {"ledger": gg.Guard(model, ledger=folder() / "healthy.ledger", payload=True), "no ledger": gg.Guard(model)}

    def step(guard: Any) -> Candidate:
        return lambda: guard.backward(batch, lambda batch: model(batch).square().mean())

    return {name: step(guard) for name, guard in kinds.items()}


BY_HAND = ("JSON lines", "sqlite3 by hand")

ROWS = [
    Row("ledger", "record one incident", one_incident, "ledger", "JSON lines", microseconds=1000, peers=BY_HAND),
    Row("ledger", "record 100 incidents of one step", many_incidents, "together", "one by one", at_least=2),
    Row("ledger", "healthy step of the guard, MLP 64", healthy_step, "ledger", "no ledger", at_most=1.02, seconds=6),
    Row("ledger", "list of 1,000,000", listing, "ledger", "ledger", microseconds=SECOND, rounds=7),
    Row("ledger", "list of 1,000,000, nothing fits", listing, "nothing fits", "ledger", microseconds=SECOND, rounds=7),
    Row("ledger", "stats of 1,000,000", counting, "ledger", "ledger", microseconds=SECOND, rounds=7),
    Row("ledger", "bad_ids of 1,000,000", bad_samples, "ledger", "ledger", microseconds=SECOND, rounds=7),
    Row("ledger", "bad_ids of 1,000,000, one cause", bad_samples, "one cause", "ledger", microseconds=SECOND, rounds=7),
    *[of_size(count) for count in (1_000, 10_000, 100_000, MILLION)],
]
