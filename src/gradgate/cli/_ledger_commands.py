"""`gradgate ledger`, and what else reads a ledger: `gradgate report` and `gradgate replay`."""

from __future__ import annotations

import json
import os
import shlex
import sys
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import click

from gradgate._text import message_of, moment, text_of
from gradgate.cli._output import (
    CommandGroup,
    cell_text,
    json_option,
    on_a_terminal,
    print_answer,
    say,
    show_json,
    show_table,
)
from gradgate.errors import GradgateError
from gradgate.ledger import Ledger
from gradgate.records import Incident, Stage

if TYPE_CHECKING:
    from gradgate.report import LiveView

_FILE = click.Path(dir_okay=False, path_type=Path)
_ledger = click.argument("path", metavar="LEDGER", type=_FILE)


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
@_ledger
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
    rows = [
        (moment(one.time), one.id, one.run, one.step, one.sample_id, one.stage, one.cause, one.where, message_of(one))
        for one in found
    ]
    show_table(("time", "incident", "run", "step", "sample", "stage", "cause", "where", "message"), rows)


@ledger.command()
@_ledger
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
@_ledger
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
@_ledger
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
    kinds = {"run": counted.by_run, "stage": counted.by_stage, "cause": counted.by_cause}
    kinds |= {"exception": counted.by_exception, "worst sample": counted.worst}
    rows += [(what, name, count) for what, counts in kinds.items() for name, count in counts.items()]
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
    ends = ["released" if one["was_bad"] else "was not known to be bad" for one in released]
    lines = (f"{cell_text(sample)}: {end}" for sample, end in zip(sample_ids, ends, strict=True))
    print_answer(as_json, released, *lines)


@ledger.command()
@_ledger
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
    print_answer(as_json, {"file": str(target), "incidents": count}, f"{count:,} incidents written to {target}")


@ledger.command()
@_ledger
@click.argument("others", metavar="OTHER...", nargs=-1, required=True, type=_FILE)
@json_option
def merge(path: Path, others: tuple[Path, ...], as_json: bool) -> None:
    """Copy into LEDGER what it does not have of OTHER.

    Doing it again changes nothing.

    Example: gradgate ledger merge run.ledger rank0.ledger rank1.ledger
    """
    book = Ledger(path)
    copied = [{"ledger": str(other), "new_incidents": book.merge(other)} for other in others]
    print_answer(as_json, copied, *(f"{one['ledger']}: {one['new_incidents']:,} new incidents" for one in copied))


@ledger.command()
@_ledger
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
    return f"{incident.stage}: {message_of(incident) if incident.exception_type else incident.cause}{place}{rank}"


# --- Its page ---------------------------------------------------------------------------------------------------------


@click.command()
@_ledger
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
    from gradgate.report import LiveView, render_page, write_page  # Here, because only this command needs it.

    book = Ledger(path, read_only=True)
    saved = None if diagnosis is None else _read(diagnosis)
    if serve:
        _follow(LiveView(book, saved, port=port or 0), path, as_json)
        return
    if str(output) == "-":
        sys.stdout.buffer.write(render_page(book, saved).encode())
        return
    incidents = book.stats().incidents
    try:
        with _status(f"writing a page about {incidents:,} incidents"):
            size = write_page(output, book, saved)
    except OSError as error:
        if error.strerror is None:  # A ledger's own error.
            raise
        raise click.ClickException(f"{output} cannot be written: {error.strerror}.") from error
    about = {"file": str(output), "bytes": size, "incidents": incidents}
    print_answer(as_json, about, f"{output} written: {size / 1000:,.0f} kB")


def _status(text: str) -> AbstractContextManager[object]:
    """Say on a terminal what takes its time; it is gone when it is over."""
    if not sys.stderr.isatty():
        return nullcontext()
    from rich.console import Console

    return Console(stderr=True).status(text)


def _follow(view: LiveView, path: Path, as_json: bool) -> None:
    print_answer(as_json, {"url": view.url}, f"{view.url} follows {path}; Ctrl+C ends it")
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


# --- Its samples again ------------------------------------------------------------------------------------------------


_EXIT = {"passes": 0, "same": 3, "another": 4}


@click.command()
@_ledger
@click.argument("incident_id", required=False)
@click.option("--all", "every", is_flag=True, help="Every incident whose sample was stored, as a table.")
@click.option("--entry", required=True, metavar="MODULE:FUNCTION", help="The loss function: loss_fn(batch) -> loss.")
@click.option("--model", metavar="MODULE:NAME", help="The model, to have the weights of that step if they were stored.")
@click.option("--batch-dim", default=0, show_default=True, help="Which dimension counts the samples.")
@click.option("--as-test", type=_FILE, help="Write a pytest file with its data.")
@click.option("--doctor", is_flag=True, help="Let the doctor say where the fault is produced.")
@json_option
@click.pass_context
def replay(
    ctx: click.Context,
    path: Path,
    incident_id: str | None,
    every: bool,
    entry: str,
    model: str | None,
    batch_dim: int,
    as_test: Path | None,
    doctor: bool,
    as_json: bool,
) -> None:
    """Run one recorded sample again, forward and backward.

    Ends with 0 if it no longer fails, 3 if the same fault came again, 4 if another one did; with --all, the highest of
    these.

    Example: gradgate replay run.ledger 5e65948f --entry train:loss_fn --doctor
    """
    if every == (incident_id is not None):
        raise click.UsageError("Give the id of an incident, or --all.")
    if every and (as_test is not None or doctor):
        raise click.UsageError("--as-test and --doctor go with one incident.")
    from gradgate import replaying  # Here, because it loads torch, and `--help` does not need it.

    sys.path.insert(0, os.getcwd())
    loss_fn = _load(entry, "--entry")
    network = None if model is None else _load(model, "--model")
    if not callable(loss_fn):
        raise click.BadParameter(f"{entry} is not a function.", param_hint="--entry")
    if incident_id is None:
        ctx.exit(_replay_all(path, loss_fn, network, batch_dim, as_json))
    result = replaying.replay(path, incident_id, loss_fn, model=network, batch_dim=batch_dim)
    diagnosis = None
    if doctor:
        diagnosis = replaying.examine(path, incident_id, loss_fn, model=network, rows=result.rows, batch_dim=batch_dim)
    written = [] if as_test is None else replaying.write_test(as_test, path, incident_id, entry, model=model)
    if as_json:
        explained = {} if diagnosis is None else {"diagnosis": diagnosis.to_dict()}
        show_json({**result.to_dict(), **explained, "written": [str(file) for file in written]})
    else:
        say(result)
        if result.snapshot_stored and network is None:
            say(f"Fix: gradgate replay {shlex.quote(str(path))} {incident_id} --entry {entry} --model {_model(entry)}")
        if diagnosis is not None:
            say(f"\n{diagnosis}")
        for file in written:
            say(f"written: {file}")
    ctx.exit(_EXIT[result.verdict])


def _replay_all(path: Path, loss_fn: Any, network: Any, batch_dim: int, as_json: bool) -> int:
    from rich.console import Console
    from rich.progress import track

    from gradgate.replaying import replay

    with Ledger(path, read_only=True) as book:
        stored = [row[0] for row in book.sql("SELECT id FROM incidents WHERE has_payload ORDER BY time").rows]
        terminal = Console(stderr=True)
        shown = track(stored, "samples", console=terminal, disable=not terminal.is_terminal, transient=True)
        results = [replay(book, one, loss_fn, model=network, batch_dim=batch_dim) for one in shown]
    if as_json:
        show_json([result.to_dict() for result in results])
    else:
        rows = [
            (then.id[:8], then.sample_id, then.stage, then.message or then.cause, result.fault, result.verdict)
            for result in results
            for then in (result.incident,)
        ]
        show_table(("id", "sample", "stage", "then", "now", "verdict"), rows, empty="no sample was stored")
    return max((_EXIT[result.verdict] for result in results), default=0)


def _model(entry: str) -> str:
    """Return the model for --model: the one of the module of the loss function, if there is just one."""
    from torch.nn import Module

    module = entry.partition(":")[0]
    found = [name for name, thing in vars(sys.modules[module]).items() if isinstance(thing, Module)]
    return f"{module}:{found[0]}" if len(found) == 1 else "MODULE:NAME"


def _load(entry: str, option: str) -> Any:
    """Import "module:name.attribute" from the working directory or from what is installed."""
    module, colon, name = entry.partition(":")
    if not (module and colon and name):
        raise click.BadParameter(f"{entry!r} is not of the form module:name, such as train:loss_fn.", param_hint=option)
    try:
        found: Any = import_module(module)
    except GradgateError:
        raise
    except Exception as error:  # the user's own module may raise anything
        last = traceback.extract_tb(error.__traceback__)[-1]
        place = "" if "importlib" in last.filename else f" ({last.filename}:{last.lineno})"
        raise click.ClickException(
            f"{module} cannot be imported: {type(error).__name__}: {text_of(error)}{place}"
        ) from error
    for part in name.split("."):
        if not hasattr(found, part):
            raise click.BadParameter(f"{module} has no {name}.", param_hint=option)
        found = getattr(found, part)
    return found
