"""The incidents in other formats: csv, JSON lines, parquet, and data frames of pandas and polars."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Callable, Iterable
from importlib import import_module
from itertools import count, islice
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
    numbers = count()
    counted = (incident for incident, _ in zip(incidents, numbers, strict=False))
    if not isinstance(target, Path):
        FORMATS[format](counted, target)
        return next(numbers)
    unfinished = target.with_name(f"{target.name}.{os.getpid()}.unfinished")
    try:
        with open(unfinished, "wb") as stream:
            FORMATS[format](counted, stream)
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
    return next(numbers)


def _csv(incidents: Iterable[Incident], stream: IO[bytes]) -> None:
    text = io.TextIOWrapper(stream, encoding="utf-8", errors="backslashreplace", newline="", write_through=True)
    writer = csv.writer(text)
    writer.writerow(_NAMES)
    writer.writerows([_cell(value) for value in _values(incident).values()] for incident in incidents)
    text.detach()


def _values(incident: Incident) -> dict[str, Any]:
    """Return an incident as one plain value for each attribute, its details as JSON."""
    values = {name: getattr(incident, name) for name in _NAMES}
    return {**values, "details": json_text(incident.details)}


def _cell(value: object) -> object:
    """Keep a spreadsheet from taking a text for a formula."""
    if isinstance(value, str):
        return f"'{value}" if value.startswith(("=", "+", "-", "@", "\t", "\r")) else value
    return plain(value)


def _json_lines(incidents: Iterable[Incident], stream: IO[bytes]) -> None:
    for incident in incidents:  # Not by `writelines`: a stream may have a `write` of its own.
        stream.write(json_text(incident.to_dict()).encode() + b"\n")


def _parquet(incidents: Iterable[Incident], stream: IO[bytes]) -> None:
    arrow, parquet = _extra("parquet", "pyarrow"), _extra("parquet", "pyarrow.parquet")
    schema = arrow.schema(
        _kinds(arrow.string(), arrow.bool_(), arrow.int64(), arrow.float64(), arrow.float64()).items()
    )
    rows = map(_values, incidents)
    with parquet.ParquetWriter(stream, schema) as writer:
        while page := list(islice(rows, 50_000)):
            writer.write_table(arrow.Table.from_pylist(page, schema))


def _kinds(text: Any, boolean: Any, integer: Any, real: Any, time: Any) -> dict[str, Any]:
    """Return the kind of each column, as another library calls it."""
    kinds = {**dict.fromkeys(_NAMES, text), "transient": boolean, "time": time}
    return kinds | dict.fromkeys(_INTEGERS, integer) | dict.fromkeys(_REALS, real)


def pandas_frame(incidents: Iterable[Incident]) -> Any:
    """Return incidents as a frame of pandas; a NaN is a value, and what is missing is NA."""
    pandas, columns = _extra("pandas", "pandas"), _columns(incidents)
    kinds = _kinds("string", "bool", "Int64", None, None)
    series = {name: pandas.array(columns[name], dtype=kind) for name, kind in kinds.items() if kind is not None}
    numpy = import_module("numpy")
    for name in _REALS:  # By hand: `pandas.array` takes NaN for a missing value.
        missing = numpy.array([value is None for value in columns[name]], dtype=bool)
        values = numpy.array([value or 0.0 for value in columns[name]], dtype=float)
        series[name] = pandas.arrays.FloatingArray(values, missing)
    series["time"] = pandas.DatetimeIndex(numpy.array(columns["time"], dtype="datetime64[us]")).tz_localize("UTC")
    return pandas.DataFrame({name: series[name] for name in _NAMES})


def polars_frame(incidents: Iterable[Incident]) -> Any:
    polars, columns = _extra("polars", "polars"), _columns(incidents)
    kinds = _kinds(polars.String, polars.Boolean, polars.Int64, polars.Float64, polars.Int64)
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


FORMATS: dict[str, Callable[[Iterable[Incident], IO[bytes]], None]] = {
    "csv": _csv,
    "jsonl": _json_lines,
    "parquet": _parquet,
}
