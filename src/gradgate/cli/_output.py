"""How answers are shown: tables for eyes, tab-separated lines for pipes, JSON for programs."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from difflib import get_close_matches

import click

from gradgate._text import json_text, plain, visible


class CommandGroup(click.Group):
    """Commands; a misspelt one gets an error that names the nearest."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if not args[0].startswith("-") and not ctx.resilient_parsing and self.get_command(ctx, args[0]) is None:
            best = get_close_matches(args[0], self.list_commands(ctx), n=1)
            guess = f" Did you mean {best[0]!r}?" if best else ""
            ctx.fail(f"No such command {args[0]!r}.{guess}")
        return super().resolve_command(ctx, args)


_WHOLE = 20  # characters of a cell that is never broken

json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


def say(text: object = "", *, err: bool = False) -> None:
    click.echo(visible(text, lines=True), err=err)


def show_json(value: object) -> None:
    """Print a value as JSON; numbers that JSON does not have become text, and what is not printable is escaped."""
    click.echo(json_text(value, indent=2))


def print_answer(as_json: bool, value: object, *lines: str) -> None:
    """Print an answer: as JSON if asked for, else as lines."""
    if as_json:
        show_json(value)
        return
    for line in lines:
        say(line)


def show_table(columns: Sequence[str], rows: Sequence[Sequence[object]], *, title: str = "", empty: str = "") -> None:
    """Print rows: as a table on a terminal (`empty` if there is none), as tab-separated lines elsewhere."""
    cells = [[cell_text(cell) for cell in row] for row in rows]
    columns = [visible(column) for column in columns]
    if not on_a_terminal():
        for line in (columns, *cells):
            click.echo("\t".join(line))
        return
    if not rows and empty:
        click.echo(empty)
        return
    from rich.box import SIMPLE_HEAD  # Here, because rich costs more than everything else, and pipes do not need it.
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(title=title or None, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    for place, column in enumerate(columns):  # Short ones stay whole; long ones share what is left.
        longest = max((len(row[place]) for row in cells), default=0)
        table.add_column(column, no_wrap=longest <= _WHOLE, overflow="fold")
    for row in cells:
        table.add_row(*map(Text, row))
    Console().print(table)


def on_a_terminal() -> bool:
    return sys.stdout.isatty()


def cell_text(value: object) -> str:
    """Return a cell as one line of text that is safe on a terminal; nothing for None."""
    if value is None:
        return ""
    return visible(
        plain(value) if isinstance(value, bytes) else json_text(value) if isinstance(value, Mapping) else value
    )
