"""`gradgate doctor`: why does this script not learn?"""

from __future__ import annotations

from pathlib import Path

import click

__all__ = ["doctor"]

_FILE = click.Path(dir_okay=False, path_type=Path)


def _in_a_folder(ctx: click.Context, parameter: click.Parameter, path: Path | None) -> Path | None:
    """Refuse what cannot be written before the script runs for hours, which may also go to another folder."""
    if path is None:
        return None
    if not path.parent.is_dir():
        raise click.BadParameter(f"there is no folder {path.parent}.")
    return path.absolute()


@click.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.option("--trace", "whole", is_flag=True, help="Trace every step, not only the first ones and a bad one.")
@click.option(
    "--json", "json_path", type=_FILE, callback=_in_a_folder, metavar="FILE", help="Write the diagnosis as JSON."
)
@click.option(
    "--html", "html_path", type=_FILE, callback=_in_a_folder, metavar="FILE", help="Write the diagnosis as a page."
)
@click.option(
    "--fail-on",
    type=click.Choice(["error", "warning", "info", "never"]),
    default="never",
    show_default=True,
    help="End with 1 if there is a finding of this severity or worse.",
)
@click.option("--from-step", type=click.IntRange(min=0), hidden=True)
@click.argument("script", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
@click.pass_context
def doctor(
    ctx: click.Context,
    whole: bool,
    json_path: Path | None,
    html_path: Path | None,
    fail_on: str,
    from_step: int | None,
    script: Path,
    args: tuple[str, ...],
) -> None:
    """Run SCRIPT with its own ARGS, unchanged, and say why it does not learn.

    The first steps are traced, the rest runs at full speed. When a later step goes wrong, the script is run again
    and that step is traced. Ends as the script ends; see --fail-on for more.

    Example: gradgate doctor --html step.html train.py --epochs 1
    """
    from rich.console import Console  # Here, because both are loaded for this command only.

    from gradgate.doctor import ScriptReport, examine_script

    def tell(report: ScriptReport) -> None:
        Console(highlight=False, soft_wrap=True).print(report.diagnosis)
        if json_path is not None:
            json_path.write_text(report.diagnosis.to_json(), encoding="utf-8")
        if html_path is not None:
            report.diagnosis.to_html(html_path)

    report = examine_script(script, args, whole=whole, from_step=from_step, at_exit=tell)
    tell(report)
    failed = fail_on != "never" and bool(report.diagnosis.at_least(fail_on))
    ctx.exit(report.exit_code or int(failed))
