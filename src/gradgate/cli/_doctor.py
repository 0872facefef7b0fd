"""`gradgate doctor` and `gradgate modes`: why does this script not learn, and where does it not record?"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

import click

from gradgate.cli._output import show_table

_FILE = click.Path(dir_okay=False, path_type=Path)
Function = TypeVar("Function", bound=Callable[..., object])


def _in_a_folder(ctx: click.Context, parameter: click.Parameter, path: Path | None) -> Path | None:
    """Refuse what cannot be written before the script runs for hours, which may also go to another folder."""
    if path is not None and not path.parent.is_dir():
        raise click.BadParameter(f"there is no folder {path.parent}.")
    return None if path is None else path.absolute()


def _check_script(script: str, module: bool) -> None:
    if not module and not Path(script).is_file():
        raise click.BadParameter(f"File {script!r} does not exist.", param_hint="SCRIPT")


_SCRIPT = {"ignore_unknown_options": True, "allow_interspersed_args": False}  # what follows the script is its own


def _file_option(name: str, help: str) -> Callable[[Function], Function]:
    return click.option(f"--{name}", f"{name}_path", type=_FILE, callback=_in_a_folder, metavar="FILE", help=help)


@click.command(context_settings=_SCRIPT)
@click.option("--trace", "whole", is_flag=True, help="Trace every step, not only the first ones and a bad one.")
@_file_option("json", "Write the diagnosis as JSON.")
@_file_option("html", "Write the diagnosis as a page.")
@click.option(
    "--fail-on",
    type=click.Choice(["error", "warning", "info", "never"]),
    default="never",
    show_default=True,
    help="End with 1 if there is a finding of this severity or worse.",
)
@click.option("-m", "module", is_flag=True, help="SCRIPT is a module, as in python -m package.train.")
@click.option("--steps", type=click.IntRange(min=1), metavar="N", help="End the script after N optimizer steps.")
@click.option("--timeout", type=click.FloatRange(min=0, min_open=True), metavar="SECONDS", help="End it after so long.")
@click.option("--from-step", type=click.IntRange(min=0), hidden=True)
@click.option("--rerun", "rerun_path", type=_FILE, hidden=True)
@click.argument("script")
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
@click.pass_context
def doctor(
    ctx: click.Context,
    /,
    json_path: Path | None,
    html_path: Path | None,
    fail_on: str,
    rerun_path: Path | None,
    script: str,
    args: tuple[str, ...],
    module: bool,
    **settings: Any,
) -> None:
    """Run SCRIPT with its own ARGS, unchanged, and say why it does not learn.

    The first steps are traced, the rest runs at full speed. When a later step goes wrong, the script is run again
    and that step is traced. What the first steps show is printed at once. Ends as the script ends; see --fail-on for
    more.

    Example: gradgate doctor --html step.html train.py --epochs 1
    """
    from rich.console import Console  # Here, because both are loaded for this command only.

    from gradgate.doctor import Diagnosis, ScriptReport, examine_script

    _check_script(script, module)
    rank = int(os.environ.get("RANK", "0"))  # set by torchrun: the first rank prints and writes for all
    console, terminal = Console(highlight=False, soft_wrap=True, quiet=rank > 0), Console(stderr=True)
    printed: list[Diagnosis] = []

    def tell_early(diagnosis: Diagnosis) -> None:
        if not diagnosis.healthy:
            console.print(diagnosis)
            printed.append(diagnosis)

    def tell(report: ScriptReport) -> None:
        if rerun_path is not None:
            rerun_path.write_text(json.dumps({**report.diagnosis.to_dict(), "losses": report.losses}), "utf-8")
        if rank > 0:
            if codes := ", ".join(f"{one.code} ({one.severity})" for one in report.diagnosis.findings):
                click.echo(f"gradgate doctor, rank {rank}: {codes}", err=True)
            return
        if not printed or report.diagnosis.findings != printed[-1].findings:
            console.print(report.diagnosis)
        if json_path is not None:
            json_path.write_text(report.diagnosis.to_json(), encoding="utf-8")
        if html_path is not None:
            report.diagnosis.to_html(html_path)

    with terminal.status("starting") if terminal.is_terminal and rerun_path is None else nullcontext() as status:

        def progress(step: int, seconds: float, what: str) -> None:
            if status is not None:
                status.update(f"step {step}, {seconds:.0f} s, {what}")

        calls: dict[str, Any] = {"at_exit": tell, "on_traced": tell_early, "progress": progress}
        report = examine_script(script, args, module=module, **calls, **settings)
    tell(report)
    failed = fail_on != "never" and bool(report.diagnosis.at_least(fail_on))
    ctx.exit(report.exit_code or int(failed))


@click.command(context_settings=_SCRIPT)
@_file_option("json", "Write the list as JSON.")
@click.option("-m", "module", is_flag=True, help="SCRIPT is a module, as in python -m package.train.")
@click.argument("script")
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
@click.pass_context
def modes(ctx: click.Context, json_path: Path | None, module: bool, script: str, args: tuple[str, ...]) -> None:
    """Run SCRIPT with its own ARGS, unchanged, and list every line that switched recording off.

    Each line comes with how often it did, how long recording was off, how many calls of torch and which modules ran
    meanwhile, and whether it was left off. Ends as the script ends.

    Example: gradgate modes train.py --epochs 1
    """
    from gradgate.doctor import examine_modes

    _check_script(script, module)
    report = examine_modes(script, args, module=module)
    if json_path is not None:
        json_path.write_text(json.dumps(asdict(report), indent=2), encoding="utf-8")
    columns, rows = ("where", "times", "seconds", "calls", "modules", "line"), []
    for gap in report.gaps:
        seconds = f"{gap.seconds:.3f}{', left off' if gap.left else ''}"
        rows.append((gap.where, gap.times, seconds, gap.operations, ", ".join(gap.modules), gap.source))
    off = sum(gap.seconds for gap in report.gaps)
    show_table(columns, rows, title=f"recording was off for {off:.3f} of {report.seconds:.3f} s", empty="never off")
    ctx.exit(report.exit_code)
