"""The incidents in other formats: csv, JSON lines, and parquet where pyarrow is there."""

from __future__ import annotations

import csv
import io
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator
from importlib import import_module
from itertools import islice
from pathlib import Path
from typing import IO, Any

from gradgate.errors import ArgumentValueError, LedgerError
from gradgate.ledger._rows import as_json
from gradgate.records import Incident

__all__ = ["FORMATS", "export_incidents", "plain"]

_NAMES = tuple(Incident.__dataclass_fields__)


def plain(incident: Incident) -> dict[str, Any]:
    """Give an incident as values that JSON holds: numbers that are not finite become text.

    Args:
        incident: The incident.

    Returns:
        One entry for each attribute.
    """
    values = incident.to_dict()
    for name in ("loss", "grad_norm"):
        if values[name] is not None and not math.isfinite(values[name]):
            values[name] = str(values[name])
    return values


def export_incidents(incidents: Iterable[Incident], target: Path | IO[bytes], format: str | None = None) -> int:
    """Write incidents to a file or a stream.

    A file appears when it is complete; one that is there is replaced.

    Args:
        incidents: The incidents.
        target: Where to write.
        format: "csv", "jsonl" or "parquet"; by the name of the file if None.

    Returns:
        How many were written.

    Raises:
        ArgumentValueError: The format is none of these.
        LedgerError: The file cannot be written, or pyarrow is missing.
    """
    if format is None:
        format = target.suffix.removeprefix(".").lower() if isinstance(target, Path) else ""
    if format not in FORMATS:
        raise ArgumentValueError(
            f"export(): there is no format {format!r}.",
            why=f"the formats are {', '.join(FORMATS)}, taken from the end of the file's name.",
            fix='ledger.export("incidents.csv") or ledger.export("incidents.txt", format="csv")',
        )
    write = FORMATS[format]
    if not isinstance(target, Path):
        return write(incidents, target)
    unfinished = target.with_name(f"{target.name}.{os.getpid()}.unfinished")
    try:
        with open(unfinished, "wb") as stream:
            count = write(incidents, stream)
        os.replace(unfinished, target)
    except LedgerError:
        raise
    except OSError as error:
        raise LedgerError(
            f"{target} cannot be written: {error.strerror}.",
            why="the export makes a file there.",
            fix='ledger.export("incidents.csv")   # another path',
        ) from error
    finally:
        unfinished.unlink(missing_ok=True)
    return count


def _csv(incidents: Iterable[Incident], stream: IO[bytes]) -> int:
    text = io.TextIOWrapper(stream, encoding="utf-8", newline="", write_through=True)
    writer = csv.DictWriter(text, _NAMES)
    writer.writeheader()
    count = 0
    for incident in incidents:
        count += 1
        writer.writerow({**plain(incident), "details": as_json(incident.details)})
    text.detach()
    return count


def _json_lines(incidents: Iterable[Incident], stream: IO[bytes]) -> int:
    count = 0
    for incident in incidents:
        count += 1
        stream.write(json.dumps(plain(incident), ensure_ascii=False, allow_nan=False).encode() + b"\n")
    return count


def _parquet(incidents: Iterable[Incident], stream: IO[bytes]) -> int:
    try:
        arrow, parquet = import_module("pyarrow"), import_module("pyarrow.parquet")
    except ImportError as error:
        raise LedgerError(
            "parquet needs pyarrow, which is not installed.",
            why="it is an extra, because csv and jsonl need nothing.",
            fix="pip install 'gradgate[parquet]'",
        ) from error
    kinds = {**dict.fromkeys(_NAMES, arrow.string()), "transient": arrow.bool_()}
    kinds |= dict.fromkeys(("step", "epoch", "rank", "world_size", "row"), arrow.int64())
    kinds |= dict.fromkeys(("loss", "grad_norm", "time"), arrow.float64())
    schema = arrow.schema(list(kinds.items()))
    count = 0
    with parquet.ParquetWriter(stream, schema) as writer:
        for page in _pages(incidents, 50_000):
            rows = [{**incident.to_dict(), "details": as_json(incident.details)} for incident in page]
            writer.write_table(arrow.Table.from_pylist(rows, schema))
            count += len(rows)
    return count


def _pages(incidents: Iterable[Incident], size: int) -> Iterator[list[Incident]]:
    iterator = iter(incidents)
    while page := list(islice(iterator, size)):
        yield page


FORMATS: dict[str, Callable[[Iterable[Incident], IO[bytes]], int]] = {
    "csv": _csv,
    "jsonl": _json_lines,
    "parquet": _parquet,
}
