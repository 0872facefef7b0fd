"""Run the benchmarks: `python -m benchmarks [words of a title or room ...] [--list] [--write]`."""

from __future__ import annotations

import argparse
import importlib
import os
import pkgutil
import platform
from dataclasses import replace
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

import benchmarks
from benchmarks.harness import Result, Row, race

PAGE = Path(__file__).parent / "results.md"


def all_rows() -> list[Row]:
    """Collect the rows of every room."""
    found: list[Row] = []
    for info in sorted(pkgutil.iter_modules(benchmarks.__path__), key=lambda info: info.name):
        if info.name.startswith("room_"):
            found += importlib.import_module(f"benchmarks.{info.name}").ROWS
    return found


def cells(result: Result) -> tuple[str, ...]:
    """Give a result as the cells of a line: room, title, goal, figure, verdict, the field."""
    row = result.row
    unit = " us" if row.microseconds is not None else " x faster" if row.at_least is not None else ""
    noise = "" if row.microseconds is not None else f" (iqr {result.spread[row.ours]:.2f})"
    verdict = {True: "met", False: "MISSED", None: ""}[result.met]
    field = ", ".join(f"{name} {result.ratio[name]:.3g} ({result.time[name] * 1e6:.3g} us)" for name in result.ratio)
    return row.room, row.title, result.goal, f"{result.figure:.3g}{unit}{noise}", verdict, field


def page(results: list[Result], *, quick: bool) -> str:
    """Write the results as Markdown."""
    how = "make bench-quick" if quick else "make bench"
    met = sum(1 for result in results if result.met)
    goals = sum(1 for result in results if result.met is not None)
    lines = [
        "# What was measured",
        "",
        f"`{how}`, all in one run: torch {torch.__version__}, Python {platform.python_version()},",
        f"{os.cpu_count()} cores, {platform.machine()}. {met} of {goals} goals met.",
        "",
        "A figure is the median over rounds of ours / base (or of base / ours where it says *faster*), candidates",
        "interleaved in each round; *iqr* is the interquartile range of those ratios. The field gives the ratio of",
        "every candidate to the base and its time per call; one thread unless the title says otherwise.",
    ]
    for room in dict.fromkeys(result.row.room for result in results):
        lines += [
            "",
            f"## {room}",
            "",
            "| what | goal | measured | | the field: ratio (time) |",
            "|---|---|---|---|---|",
        ]
        lines += ["| " + " | ".join(cells(r)[1:]) + " |" for r in results if r.row.room == room]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Choose the rows, run them, show and perhaps write the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks")
    parser.add_argument("words", nargs="*", help="run only the rows whose room or title has all of these")
    parser.add_argument("--quick", action="store_true", help="fewer rounds: a first look, with more noise")
    parser.add_argument("--list", action="store_true", help="only list the rows")
    parser.add_argument("--write", action="store_true", help="write benchmarks/results.md")
    options = parser.parse_args()
    rows = [row for row in all_rows() if all(word in f"{row.room} {row.title}" for word in options.words)]
    console = Console()
    results = []
    for number, row in enumerate(rows, 1):
        if options.list:
            console.print(f"{row.room}: {row.title}", highlight=False)
            continue
        console.print(f"[{number}/{len(rows)}] {row.room}: {row.title}", style="dim", highlight=False, markup=False)
        results.append(race(replace(row, rounds=5, seconds=0.5) if options.quick else row))
    if not results:
        return
    table = Table("room", "what", "goal", "measured", "", "the field: ratio (time)")
    for result in results:
        table.add_row(*cells(result), style=None if result.met is not False else "bold red")
    console.print(table)
    if options.write:
        PAGE.write_text(page(results, quick=options.quick))
        console.print(f"written to benchmarks/{PAGE.name}")


if __name__ == "__main__":
    main()
