"""`gradgate ledger`: list, show, stats, hardest, release, export, merge, sql."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import click

from gradgate.cli._output import CommandGroup, cell_text, json_option, moment, on_a_terminal, say, show_json, show_table
from gradgate.ledger import Ledger
from gradgate.records import Incident, Stage

_FILE = click.Path(dir_okay=False, path_type=Path)


@click.group(cls=CommandGroup)
def ledger() -> None:
    """What was dropped, why, and what was decided about it.

    LEDGER is the file that `gg.Ledger("run.ledger")` writes. Times are dates ("2026-11-15", "2026-11-15T21:30") or
    ages ("90s", "2h", "3d").

    Example: gradgate ledger stats run.ledger
    """


def _filters(command: Callable[..., None]) -> Callable[..., None]:
    """Add the options that narrow down the incidents, given to the command as one dictionary."""
    options = {
        "run": click.option("--run", help="Only of this run."),
        "cause": click.option("--cause", help='Only of this cause, such as "exception".'),
        "stage": click.option("--stage", type=click.Choice(get_args(Stage)), help="Only of this stage."),
        "sample_id": click.option("--sample", "sample_id", help="Only of this sample."),
        "since": click.option("--since", metavar="TIME", help="Not before this time."),
        "until": click.option("--until", metavar="TIME", help="Before this time."),
        "transient": click.option(
            "--transient/--persistent", default=None, help="Only what did not, or did, come again."
        ),
    }

    def gathered(**given: Any) -> None:
        command(filters={name: given.pop(name) for name in options}, **given)

    gathered.__name__, gathered.__doc__ = command.__name__, command.__doc__
    for option in reversed(options.values()):
        gathered = option(gathered)
    return gathered


@ledger.command("list")
@click.argument("path", metavar="LEDGER", type=_FILE)
@click.option("-n", "--limit", type=click.IntRange(min=1), default=50, show_default=True, help="How many at most.")
@json_option
@_filters
def list_incidents(path: Path, limit: int, as_json: bool, filters: dict[str, Any]) -> None:
    """List incidents, the newest first.

    Example: gradgate ledger list run.ledger --cause exception --since 12h
    """
    found = Ledger(path, read_only=True).incidents(limit=limit, newest_first=True, **filters)
    if as_json:
        show_json([incident.to_dict() for incident in found])
        return
    if on_a_terminal():
        shown = [(moment(one.time), one.id[:8], one.sample_id, _story(one)) for one in found]
        title = f"the newest {limit}; more with --limit" if len(found) == limit else ""
        show_table(("time", "incident", "sample", "what"), shown, title=title, empty="no incidents")
        return
    columns = ("time", "incident", "run", "step", "sample", "stage", "cause", "where", "message")
    rows = [
        (moment(one.time), one.id, one.run, one.step, one.sample_id, one.stage, one.cause, one.where, _message(one))
        for one in found
    ]
    show_table(columns, rows)


@ledger.command()
@click.argument("path", metavar="LEDGER", type=_FILE)
@click.option("-k", "--limit", type=click.IntRange(min=1), default=10, show_default=True, help="How many at most.")
@click.option("--suspicious", is_flag=True, help="Only those whose loss is high and does not fall.")
@json_option
def hardest(path: Path, limit: int, suspicious: bool, as_json: bool) -> None:
    """Show the samples with the largest losses.

    The losses are those that `gg.Guard(history=True)` recorded.

    Example: gradgate ledger hardest run.ledger --suspicious
    """
    book = Ledger(path, read_only=True)
    found = book.suspicious()[:limit] if suspicious else book.hardest(limit)
    if as_json:
        show_json([history.to_dict() for history in found])
        return
    rows = [(one.sample_id, f"{one.recent:.4g}", " ".join(f"{loss:.3g}" for loss in one.losses)) for one in found]
    empty = "no such sample" if suspicious else "no losses were recorded: gg.Guard(history=True) records them"
    show_table(("sample", "recent", "losses"), rows, empty=empty)


@ledger.command()
@click.argument("path", metavar="LEDGER", type=_FILE)
@click.argument("incident_id")
@json_option
def show(path: Path, incident_id: str, as_json: bool) -> None:
    """Show one incident, by its id or the beginning of it.

    Example: gradgate ledger show run.ledger 5e65948f
    """
    book = Ledger(path, read_only=True)
    incident = book.incident(incident_id)
    payload, snapshot = book.payload_of(incident.id), book.snapshot_of(incident.id)
    run = next((run for run in book.runs() if run.name == incident.run), None)
    decisions = [] if incident.sample_id is None else book.decisions(incident.sample_id)
    shown = {
        **incident.to_dict(),
        "payload_bytes": None if payload is None else len(payload),
        "snapshot_bytes": None if snapshot is None else len(snapshot),
        "bad": incident.sample_id is not None and incident.sample_id in book.bad_ids(),
        "run_details": None if run is None else run.to_dict(),
        "decisions": [decision.to_dict() for decision in decisions],
    }
    if as_json:
        show_json(shown)
        return
    shown |= {"time": moment(incident.time), "run_details": "", "decisions": ""}
    for name, value in shown.items():
        if value not in (None, "", {}):
            say(f"{name:>16}  {cell_text(value)}")
    if run is not None:
        say(f"{'versions':>16}  torch {run.torch}, python {run.python}, gradgate {run.gradgate}")
        say(f"{'git commit':>16}  {cell_text(run.git_commit)}")
        say(f"{'arguments':>16}  {cell_text(run.arguments)}")
    for decision in decisions:
        epoch = "" if decision.epoch is None else f" in epoch {decision.epoch}"
        say(f"{decision.kind:>16}  {moment(decision.time)}{epoch}  {cell_text(decision.reason)}")


@ledger.command()
@click.argument("path", metavar="LEDGER", type=_FILE)
@json_option
@_filters
def stats(path: Path, as_json: bool, filters: dict[str, Any]) -> None:
    """Count incidents by run, stage, cause and exception.

    Example: gradgate ledger stats run.ledger --run night --json
    """
    book = Ledger(path, read_only=True)
    counted = book.stats(**filters)
    bad = len(book.bad_ids())
    if as_json:
        show_json({**counted.to_dict(), "bad_samples": bad})
        return
    rows: list[tuple[object, ...]] = [
        ("incidents", "", counted.incidents),
        ("incidents", "transient", counted.transient),
        ("samples", "with incidents", counted.samples),
        ("samples", "bad in the whole ledger", bad),
        ("time", "first", moment(counted.first)),
        ("time", "last", moment(counted.last)),
    ]
    for what, counts in (
        ("run", counted.by_run),
        ("stage", counted.by_stage),
        ("cause", counted.by_cause),
        ("exception", counted.by_exception),
        ("worst sample", counted.worst),
    ):
        rows += [(what, name, count) for name, count in counts.items()]
    show_table(("what", "which", "count"), rows)


@ledger.command()
@click.argument("path", metavar="LEDGER", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.argument("sample_ids", metavar="SAMPLE...", nargs=-1, required=True)
@click.option("--reason", default="", help="Why, for the record.")
@json_option
def release(path: Path, sample_ids: tuple[str, ...], reason: str, as_json: bool) -> None:
    """Take samples out of quarantine.

    What they did until now does not count any more.

    Example: gradgate ledger release run.ledger img_17.png --reason relabelled
    """
    book = Ledger(path)
    released = [{"sample_id": sample, "was_bad": book.release(sample, reason)} for sample in sample_ids]
    if as_json:
        show_json(released)
        return
    for one in released:
        say(f"{cell_text(one['sample_id'])}: {'released' if one['was_bad'] else 'was not known to be bad'}")


@ledger.command()
@click.argument("path", metavar="LEDGER", type=_FILE)
@click.argument("target", metavar="FILE", type=click.Path(dir_okay=False, allow_dash=True, path_type=Path))
@click.option("--format", "kind", help="csv, jsonl or parquet; by the end of FILE if not given.")
@json_option
@_filters
def export(path: Path, target: Path, kind: str | None, as_json: bool, filters: dict[str, Any]) -> None:
    """Write incidents to FILE as csv, jsonl or parquet.

    The FILE - is the standard output, as csv or as --format says.

    Example: gradgate ledger export run.ledger incidents.csv --persistent
    """
    book = Ledger(path, read_only=True)
    if str(target) == "-":
        book.export(sys.stdout.buffer, kind or ("jsonl" if as_json else "csv"), **filters)
        return
    count = book.export(target, kind, **filters)
    if as_json:
        show_json({"file": str(target), "incidents": count})
    else:
        say(f"{count:,} incidents written to {target}")


@ledger.command()
@click.argument("path", metavar="LEDGER", type=_FILE)
@click.argument("others", metavar="OTHER...", nargs=-1, required=True, type=_FILE)
@json_option
def merge(path: Path, others: tuple[Path, ...], as_json: bool) -> None:
    """Copy into LEDGER what it does not have of OTHER.

    Doing it again changes nothing.

    Example: gradgate ledger merge run.ledger rank0.ledger rank1.ledger
    """
    book = Ledger(path)
    copied = [{"ledger": str(other), "new_incidents": book.merge(other)} for other in others]
    if as_json:
        show_json(copied)
        return
    for one in copied:
        say(f"{one['ledger']}: {one['new_incidents']:,} new incidents")


@ledger.command()
@click.argument("path", metavar="LEDGER", type=_FILE)
@click.argument("question", metavar="SELECT")
@click.option("--limit", type=click.IntRange(min=1), default=1000, show_default=True, help="How many rows at most.")
@click.option("--seconds", type=click.FloatRange(min=0), default=60, show_default=True, help="How long it may take.")
@json_option
def sql(path: Path, question: str, limit: int, seconds: float, as_json: bool) -> None:
    """Query the ledger in SQL.

    There are the views incidents, samples and runs. Nothing can be changed this way.

    Example: gradgate ledger sql run.ledger "SELECT * FROM runs"
    """
    answer = Ledger(path, read_only=True).sql(question, limit=limit, seconds=seconds)
    if as_json:
        show_json([dict(zip(answer.columns, row, strict=True)) for row in answer.rows])
    else:
        show_table(answer.columns, answer.rows, empty="no rows")


def _story(incident: Incident) -> str:
    place = f" at {incident.where}" if incident.where else ""
    rank = f", rank {incident.rank}" if incident.world_size > 1 else ""
    return f"{incident.stage}: {_message(incident) if incident.exception_type else incident.cause}{place}{rank}"


def _message(incident: Incident) -> str:
    kind = (incident.exception_type or "").rpartition(".")[2]
    return f"{kind}: {incident.message}" if kind else incident.message
