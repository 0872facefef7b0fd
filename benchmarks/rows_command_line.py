"""How long a command takes from its start to its end, and an import, in a fresh process: none of them loads torch."""

from __future__ import annotations

import os
import subprocess
import sys

from benchmarks.harness import Candidate, Row
from benchmarks.rows_ledger import MILLION, SECOND, holding

FAST = 0.3 * SECOND  # the goal of commands that only read
IMPORT = 0.03 * SECOND


def process(*command: str) -> Candidate:
    """Run python with these arguments."""
    environment = {**os.environ, "COLUMNS": "80"}
    return lambda: subprocess.run([sys.executable, *command], check=True, capture_output=True, env=environment)


def against(name: str, *command: str) -> dict[str, Candidate]:
    """Line a process up with python alone, which no command can beat."""
    return {name: process(*command), "python alone": process("-c", "pass")}


def help_and_torch() -> dict[str, Candidate]:
    """The help, and the import of torch that it avoids."""
    return {**against("gradgate --help", "-m", "gradgate", "--help"), "import torch": process("-c", "import torch")}


def listing(count: int) -> dict[str, Candidate]:
    """The newest incidents of a ledger."""
    return against("gradgate ledger list", "-m", "gradgate", "ledger", "list", str(holding(count).path))


def page_of(count: int) -> dict[str, Candidate]:
    """The page of a ledger."""
    path = holding(count).path
    return against("gradgate report", "-m", "gradgate", "report", str(path), "-o", str(path.with_suffix(".html")))


def size_of_page(count: int) -> dict[str, Candidate]:
    """The bytes of the page of a ledger, against the five megabytes that it may have."""
    path = holding(count).path.with_suffix(".size.html")
    write = process("-m", "gradgate", "report", str(holding(count).path), "-o", str(path))

    def size() -> int:
        write()
        return path.stat().st_size

    return {"5 MB": lambda: 5_000_000, "gradgate report": size}


ROWS = [
    Row(
        "command line",
        "import gradgate in a fresh interpreter, python's own start included",
        lambda: against("import gradgate", "-c", "import gradgate"),
        "import gradgate",
        "python alone",
        microseconds=IMPORT,
    ),
    Row(
        "command line",
        "gradgate --help",
        lambda: against("gradgate --help", "-m", "gradgate", "--help"),
        "gradgate --help",
        "python alone",
        microseconds=FAST,
    ),
    Row(
        "command line",
        "gradgate --help against the import of torch",
        help_and_torch,
        "gradgate --help",
        "import torch",
        at_most=0.3,
    ),
    Row(
        "command line",
        "gradgate ledger list, 1,000 incidents",
        lambda: listing(1_000),
        "gradgate ledger list",
        "python alone",
        microseconds=FAST,
    ),
    Row(
        "command line",
        "gradgate ledger list, 1,000,000 incidents",
        lambda: listing(MILLION),
        "gradgate ledger list",
        "python alone",
        microseconds=SECOND,
    ),
    Row(
        "command line",
        "gradgate report, 1,000 incidents",
        lambda: page_of(1_000),
        "gradgate report",
        "python alone",
        microseconds=FAST,
    ),
    Row(
        "command line",
        "bytes of the page of 100,000 incidents",
        lambda: size_of_page(100_000),
        "gradgate report",
        "5 MB",
        at_most=1.0,
        counts=True,
    ),
]
