"""`gradgate report`: what happened, on one page."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import click

from gradgate.cli._output import json_option, say, show_json, status
from gradgate.ledger import Ledger
from gradgate.report import LiveView, render_page, write_page

_FILE = click.Path(dir_okay=False, path_type=Path)


@click.command()
@click.argument("path", metavar="LEDGER", type=_FILE)
@click.option("--diagnosis", type=_FILE, metavar="FILE", help="Show this too: what `gradgate doctor --json` wrote.")
@click.option(
    "-o",
    "--output",
    default=Path("report.html"),
    show_default=True,
    type=click.Path(dir_okay=False, allow_dash=True, path_type=Path),
    help="The page; - is the standard output.",
)
@click.option("--serve", is_flag=True, help="Follow a running training: a live page, on this machine only.")
@click.option("--port", type=click.IntRange(0, 65535), help="Where to serve; any free port if not given.")
@json_option
def report(path: Path, diagnosis: Path | None, output: Path, serve: bool, port: int | None, as_json: bool) -> None:
    """Write one page about what happened: complete in itself, it opens offline and can be sent to anybody.

    LEDGER is the file that `gg.Ledger("run.ledger")` writes; it is only read.

    Example: gradgate report run.ledger -o report.html
    """
    if port is not None and not serve:
        raise click.UsageError("--port goes with --serve.")
    ledger = Ledger(path, read_only=True)
    saved = None if diagnosis is None else _read(diagnosis)
    if serve:
        _follow(ledger, saved, port or 0, as_json)
    elif str(output) == "-":
        sys.stdout.buffer.write(render_page(ledger, saved).encode())
    else:
        incidents = ledger.stats().incidents
        try:
            with status(f"writing a page about {incidents:,} incidents"):
                size = write_page(output, ledger, saved)
        except OSError as error:
            if error.strerror is None:  # A ledger's own error.
                raise
            raise click.ClickException(f"{output} cannot be written: {error.strerror}.") from error
        if as_json:
            show_json({"file": str(output), "bytes": size, "incidents": incidents})
        else:
            say(f"{output} written: {size / 1000:,.0f} kB")


def _follow(ledger: Ledger, diagnosis: dict[str, Any] | None, port: int, as_json: bool) -> None:
    view = LiveView(ledger, diagnosis, port=port)
    if as_json:
        show_json({"url": view.url})
    else:
        say(f"{view.url} follows {ledger.path}; Ctrl+C ends it")
    sys.stdout.flush()  # A program that started this waits for the address.
    try:
        view.serve()
    except KeyboardInterrupt:
        say("", err=True)
    finally:
        view.close()


def _read(path: Path) -> dict[str, Any]:
    fix = f"Fix: gradgate doctor --json {path} train.py"
    try:
        saved = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise click.ClickException(f"{path} cannot be read: {error.strerror}.") from error
    except (ValueError, RecursionError) as error:
        raise click.ClickException(f"{path} is not JSON: {error}.\n{fix}") from error
    if not isinstance(saved, dict):
        raise click.ClickException(f"{path} is not a diagnosis.\n{fix}")
    return saved
