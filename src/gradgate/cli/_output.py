"""How answers are shown: tables for eyes, tab-separated lines for pipes, JSON for programs."""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

import click

__all__ = ["json_option", "moment", "on_a_terminal", "show_json", "show_table", "visible"]

json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


def show_json(value: object) -> None:
    """Print a value as JSON; numbers that JSON does not have become text.

    Args:
        value: Dictionaries, lists, numbers, text, bytes.
    """
    click.echo(json.dumps(_plain(value), indent=2, ensure_ascii=False, allow_nan=False))


def show_table(columns: Sequence[str], rows: Sequence[Sequence[object]], *, title: str = "") -> None:
    """Print rows: as a table on a terminal, as tab-separated lines elsewhere.

    Args:
        columns: The heads.
        rows: The cells; the last one of a row gets the room that is left on a terminal.
        title: What it shows, for the terminal.
    """
    cells = [[visible(cell) for cell in row] for row in rows]
    if not on_a_terminal():
        for line in (columns, *cells):
            click.echo("\t".join(line))
        return
    from rich.box import SIMPLE_HEAD  # Here, because rich costs more than everything else, and pipes do not need it.
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(title=title or None, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        table.add_column(column, no_wrap=column != columns[-1], overflow="fold")
    for row in cells:
        table.add_row(*map(Text, row))
    Console().print(table)


def on_a_terminal() -> bool:
    """Tell whether a person looks at the output."""
    return sys.stdout.isatty()


def visible(value: object) -> str:
    """Give a cell as one line of text without control characters, which would steer the terminal.

    Args:
        value: The cell.

    Returns:
        The text; nothing for None.
    """
    if value is None:
        return ""
    if isinstance(value, bytes):
        return f"<{len(value):,} bytes>"
    if isinstance(value, Mapping):
        value = json.dumps(_plain(value), ensure_ascii=False)
    text = str(value)
    return text if text.isprintable() else "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def moment(seconds: float | None) -> str:
    """Give a time as local date and time.

    Args:
        seconds: Seconds since the epoch of the clock.

    Returns:
        The text; the number itself if there is no such date.
    """
    if seconds is None:
        return ""
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))
    except (ValueError, OverflowError, OSError):
        return str(seconds)


def _plain(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, bytes):
        return f"<{len(value):,} bytes>"
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value
