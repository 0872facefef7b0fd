"""The incidents in other formats: csv, JSON lines, parquet, and data frames of pandas and polars."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Callable, Iterable, Iterator
from importlib import import_module
from itertools import islice
from pathlib import Path
from typing import IO, Any

from gradgate._text import json_text, plain
from gradgate.errors import ArgumentValueError, LedgerError
from gradgate.records import Incident

_NAMES = tuple(Incident.__dataclass_fields__)
_INTEGERS = ("step", "epoch", "rank", "world_size", "row")
_REALS = ("loss", "grad_norm")
_LAST_YEAR = 253_402_300_800  # The calendar of Python ends with the year 9999.


def export_incidents(incidents: Iterable[Incident], target: Path | IO[bytes], format: str | None = None) -> int:
    """Write incidents to a file or a stream, and count them; a file appears when it is complete."""
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
    text = io.TextIOWrapper(stream, encoding="utf-8", errors="backslashreplace", newline="", write_through=True)
    writer = csv.writer(text)
    writer.writerow(_NAMES)
    count = 0
    for count, incident in enumerate(incidents, 1):  # noqa: B007 - counted
        writer.writerow([_cell(value) for value in _values(incident).values()])
    text.detach()
    return count


def _values(incident: Incident) -> dict[str, Any]:
    """Return an incident as one plain value for each attribute, its details as JSON."""
    values = {name: getattr(incident, name) for name in _NAMES}
    return {**values, "details": json_text(incident.details)}


def _cell(value: object) -> object:
    """Keep a spreadsheet from taking a text for a formula."""
    if isinstance(value, str):
        return f"'{value}" if value.startswith(("=", "+", "-", "@", "\t", "\r")) else value
    return plain(value)


def _json_lines(incidents: Iterable[Incident], stream: IO[bytes]) -> int:
    count = 0
    for count, incident in enumerate(incidents, 1):  # noqa: B007 - counted
        stream.write(json_text(incident.to_dict()).encode() + b"\n")
    return count


def _parquet(incidents: Iterable[Incident], stream: IO[bytes]) -> int:
    arrow, parquet = _extra("parquet", "pyarrow"), _extra("parquet", "pyarrow.parquet")
    kinds = {**dict.fromkeys(_NAMES, arrow.string()), "transient": arrow.bool_()}
    kinds |= dict.fromkeys(_INTEGERS, arrow.int64()) | dict.fromkeys((*_REALS, "time"), arrow.float64())
    schema = arrow.schema(list(kinds.items()))
    count = 0
    with parquet.ParquetWriter(stream, schema) as writer:
        for page in _pages(incidents, 50_000):
            rows = [_values(incident) for incident in page]
            writer.write_table(arrow.Table.from_pylist(rows, schema))
            count += len(rows)
    return count


def pandas_frame(incidents: Iterable[Incident]) -> Any:
    """Return incidents as a frame of pandas; a NaN is a value, and what is missing is NA."""
    pandas, columns = _extra("pandas", "pandas"), _columns(incidents)
    kinds = {**dict.fromkeys(_NAMES, "string"), "transient": "bool"} | dict.fromkeys(_INTEGERS, "Int64")
    series = {name: pandas.array(columns[name], dtype=kinds[name]) for name in _NAMES if name not in (*_REALS, "time")}
    numpy = import_module("numpy")
    for name in _REALS:  # By hand: `pandas.array` takes NaN for a missing value.
        missing = numpy.array([value is None for value in columns[name]], dtype=bool)
        values = numpy.array([value or 0.0 for value in columns[name]], dtype=float)
        series[name] = pandas.arrays.FloatingArray(values, missing)
    series["time"] = pandas.DatetimeIndex(numpy.array(columns["time"], dtype="datetime64[us]")).tz_localize("UTC")
    return pandas.DataFrame({name: series[name] for name in _NAMES})


def polars_frame(incidents: Iterable[Incident]) -> Any:
    polars, columns = _extra("polars", "polars"), _columns(incidents)
    kinds = {**dict.fromkeys(_NAMES, polars.String), "transient": polars.Boolean}
    kinds |= dict.fromkeys((*_INTEGERS, "time"), polars.Int64) | dict.fromkeys(_REALS, polars.Float64)
    frame = polars.DataFrame(columns, schema=kinds)
    return frame.with_columns(polars.col("time").cast(polars.Datetime("us", "UTC")))


def _columns(incidents: Iterable[Incident]) -> dict[str, list[Any]]:
    rows = [_values(incident) for incident in incidents]
    columns = {name: [row[name] for row in rows] for name in _NAMES}
    moments = (float(moment) for moment in columns["time"])
    columns["time"] = [round(at * 1e6) if 0 <= at < _LAST_YEAR else None for at in moments]
    return columns


def _extra(extra: str, module: str) -> Any:
    try:
        return import_module(module)
    except ImportError as error:
        raise LedgerError(
            f"{extra} needs {module.partition('.')[0]}, which is not installed.",
            why="it is an extra, because csv and jsonl need nothing.",
            fix=f"pip install 'gradgate[{extra}]'",
        ) from error


def _pages(incidents: Iterable[Incident], size: int) -> Iterator[list[Incident]]:
    iterator = iter(incidents)
    while page := list(islice(iterator, size)):
        yield page


FORMATS: dict[str, Callable[[Iterable[Incident], IO[bytes]], int]] = {
    "csv": _csv,
    "jsonl": _json_lines,
    "parquet": _parquet,
}
