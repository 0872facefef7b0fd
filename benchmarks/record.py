"""What a run measured, as one file: written after every row, so that a run that was cut is not lost."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness import Growth, Result, Row

PEERS = ("numpy", "scipy", "jax", "bottleneck", "numbagg")  # whose versions matter for the figures


@dataclass
class Record:
    """The results of a run, and where and when they were measured.

    Attributes:
        quick: Whether few rounds were run.
        rows: How many rows there were to run.
        machine: The processor, the system and the versions.
        results: By the name of the row, in the order of the run.
        measured: When each of them was measured, by the name of the row.
    """

    quick: bool
    rows: int
    machine: dict[str, str] = field(default_factory=dict)
    results: dict[str, Result] = field(default_factory=dict)
    measured: dict[str, str] = field(default_factory=dict)

    def add(self, result: Result) -> None:
        """Add a result, in the place of an older one of the same row.

        Args:
            result: What a row gave.
        """
        self.results[result.row.name] = result
        self.measured[result.row.name] = datetime.now(UTC).strftime("%Y-%m-%d %H:%M")

    def write(self, path: Path) -> None:
        """Write the file; it is whole at every moment.

        Args:
            path: Where to.
        """
        kept = {
            "quick": self.quick,
            "rows": self.rows,
            "machine": self.machine,
            "results": [
                {**_row_to_plain(result.row), **_figures(result), "measured": self.measured[name]}
                for name, result in self.results.items()
            ],
        }
        new = path.with_suffix(".new")
        new.write_text(json.dumps(kept, indent=0) + "\n")
        new.replace(path)


def this_machine() -> dict[str, str]:
    """Tell the processor, the system and the versions.

    Returns:
        Each by its name.
    """
    told = {
        "processor": _processor(),
        "cores": str(os.cpu_count()),
        "system": f"{platform.system()} {platform.machine()}",
    }
    told |= {"Python": platform.python_version(), "torch": torch.__version__}
    for name in PEERS:
        try:
            told[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            told[name] = "not installed"
    return told


def read(path: Path) -> Record:
    """Read a file that `Record.write` wrote.

    Args:
        path: Where from.

    Returns:
        The record; its rows cannot be run again.
    """
    kept = json.loads(path.read_text(encoding="utf-8"))
    record = Record(kept["quick"], kept["rows"], kept["machine"])
    for entry in kept["results"]:
        result = _result_from_plain(entry)
        record.results[result.row.name] = result
        record.measured[result.row.name] = entry["measured"]
    return record


_OF_A_ROW = ("package", "title", "ours", "base", "at_most", "at_least", "microseconds", "counts")


def _row_to_plain(row: Row) -> dict[str, Any]:
    plain = {name: getattr(row, name) for name in _OF_A_ROW}
    return {**plain, "peers": list(row.peers), "growth": asdict(row.growth) if row.growth else None}


def _figures(result: Result) -> dict[str, Any]:
    kept = {name: _rounded(getattr(result, name)) for name in ("ratio", "spread", "time")}
    return {**kept, "noise": float(f"{result.noise:.3g}"), "took": round(result.took, 2), "error": result.error}


def _rounded(figures: dict[str, float]) -> dict[str, float]:
    return {name: float(f"{value:.4g}") for name, value in figures.items()}


def _result_from_plain(entry: dict[str, Any]) -> Result:
    growth = Growth(**entry["growth"]) if entry["growth"] else None
    row = Row(**{name: entry[name] for name in _OF_A_ROW}, candidates=dict, peers=tuple(entry["peers"]), growth=growth)
    measured = {name: entry[name] for name in ("ratio", "spread", "time", "noise", "took", "error")}
    return Result(row, **measured)


def _processor() -> str:
    """Give the processor's own name, where the system tells it."""
    information = Path("/proc/cpuinfo")
    if information.exists():
        for line in information.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or "unknown"
