"""Run the benchmarks: `python -m benchmarks [words of a title or package ...]`; `--help` tells the rest.

`--write` keeps what was measured in benchmarks/results.json after every row, and makes the pages and charts of it.
"""

from __future__ import annotations

import argparse
import importlib
import pkgutil
import sys
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

import benchmarks
from benchmarks import jax_peer  # noqa: F401 - says how many threads it may use, before a package imports it
from benchmarks.charts import charts_of, file_name
from benchmarks.harness import Result, Row, quickly, race
from benchmarks.page import cells, page, summary
from benchmarks.record import Record, read, this_machine

ROOT = Path(__file__).parents[1]
KEPT = ROOT / "benchmarks" / "results.json"
CHARTS = ROOT / "docs" / "charts"
PAGES = {
    ROOT / "benchmarks" / "results.md": (page, "../docs/charts/"),
    ROOT / "docs" / "benchmarks.md": (summary, "charts/"),
}
"""The pages that are made of the results: who writes each, and where it finds the charts."""


def all_rows() -> list[Row]:
    """Collect the rows of every package; those that open a process group come last, because others would join it."""
    names = sorted(info.name for info in pkgutil.iter_modules(benchmarks.__path__) if info.name.startswith("rows_"))
    names.sort(key="rows_ranks".__eq__)
    return [row for name in names for row in importlib.import_module(f"benchmarks.{name}").ROWS]


def write_pages(record: Record) -> None:
    """Make the pages and the charts of a record; charts that are no longer drawn go."""
    for path, (written, charts) in PAGES.items():
        path.write_text(written(record, charts))
    drawn = {file_name(title): picture for title, picture in charts_of(list(record.results.values())).items()}
    CHARTS.mkdir(exist_ok=True)
    for old in CHARTS.glob("*.svg"):
        if old.name not in drawn:
            old.unlink()
    for name, picture in drawn.items():
        (CHARTS / name).write_text(picture)


def run(row: Row) -> Result:
    """Run a row; what it raises costs this row, not the page."""
    try:
        return race(row)
    except Exception as error:  # noqa: BLE001 - the page says so
        return Result(row, error=f"{type(error).__name__}: {error}")


def options_of_the_command_line() -> argparse.Namespace:
    """Read the options."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks")
    parser.add_argument("words", nargs="*", help="run only the rows whose package or title has all of these")
    parser.add_argument("--quick", action="store_true", help="fewer rounds and rows: a first look, with more noise")
    parser.add_argument("--list", action="store_true", help="only list the rows")
    parser.add_argument("--write", action="store_true", help="write the results; with words, only those rows change")
    parser.add_argument("--resume", action="store_true", help="go on where a run with --write was cut")
    parser.add_argument("--pages", action="store_true", help="run nothing, make the pages of what was measured before")
    return parser.parse_args()


def record_to_write(options: argparse.Namespace) -> Record:
    """Give the record that results go to: the one that is there when it goes on, else a new one."""
    if not (options.resume or (options.write and options.words)) or not KEPT.exists():
        return Record(options.quick, 0, this_machine())
    record = read(KEPT)
    if record.machine != this_machine():
        sys.exit(
            "results.json was measured on another machine or with other versions; start anew: --write without words"
        )
    if options.resume and record.quick != options.quick:
        sys.exit(
            f"results.json is of a {'quick' if record.quick else 'full'} run; go on in the same way, or start anew"
        )
    return record


def main() -> None:
    """Choose the rows, run them, show and perhaps write them."""
    options = options_of_the_command_line()
    if options.pages:
        write_pages(read(KEPT))
        return
    every = all_rows()
    rows = [row for row in every if all(word in row.name for word in options.words)]
    if options.quick:
        rows = [quickly(row) for row in rows if row.in_a_quick_run]
    if not rows:
        sys.exit(f"no row has all of {options.words}; --list shows the rows there are")
    record = record_to_write(options)
    record.rows = len(every)
    if options.resume:
        rows = [row for row in rows if row.name not in record.results or record.results[row.name].error]
    console, started = Console(), time.perf_counter()
    results: list[Result] = []
    for number, row in enumerate(rows, 1):
        if options.list:
            console.print(row.name, highlight=False, markup=False)
            continue
        result = run(row)
        results.append(result)
        line = f"[{number}/{len(rows)}] {row.name}: {result.error or f'{result.took:.1f} s'}"
        console.print(line, style="dim", highlight=False, markup=False)
        if options.write or options.resume:
            record.add(result)
            record.write(KEPT)
            write_pages(read(KEPT))  # of what is kept, which is rounded
    if results:
        _show(console, results)
        console.print(f"{time.perf_counter() - started:.0f} s in all", highlight=False)


def _show(console: Console, results: list[Result]) -> None:
    table = Table("package", "what", "goal", "measured", "", "the field: ratio (time)")
    for result in results:
        if not result.error:
            table.add_row(result.row.package, *cells(result), style=None if result.met is not False else "bold red")
    console.print(table)


if __name__ == "__main__":
    main()
