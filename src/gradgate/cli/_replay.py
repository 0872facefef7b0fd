"""`gradgate replay`: one recorded sample again, or all of them."""

from __future__ import annotations

import os
import shlex
import sys
import traceback
from importlib import import_module
from pathlib import Path
from typing import Any

import click

from gradgate._text import text_of
from gradgate.cli._output import json_option, say, show_json, show_table
from gradgate.errors import GradgateError

_EXIT = {"passes": 0, "same": 3, "another": 4}


@click.command()
@click.argument("path", metavar="LEDGER", type=click.Path(dir_okay=False, path_type=Path))
@click.argument("incident_id", required=False)
@click.option("--all", "every", is_flag=True, help="Every incident whose sample was stored, as a table.")
@click.option("--entry", required=True, metavar="MODULE:FUNCTION", help="The loss function: loss_fn(batch) -> loss.")
@click.option("--model", metavar="MODULE:NAME", help="The model, to have the weights of that step if they were stored.")
@click.option("--batch-dim", default=0, show_default=True, help="Which dimension counts the samples.")
@click.option("--as-test", type=click.Path(dir_okay=False, path_type=Path), help="Write a pytest file with its data.")
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

    from gradgate.ledger import Ledger
    from gradgate.replaying import replay

    with Ledger(path, read_only=True) as ledger:
        stored = [row[0] for row in ledger.sql("SELECT id FROM incidents WHERE has_payload ORDER BY time").rows]
        terminal = Console(stderr=True)
        shown = track(stored, "samples", console=terminal, disable=not terminal.is_terminal, transient=True)
        results = [replay(ledger, one, loss_fn, model=network, batch_dim=batch_dim) for one in shown]
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
