"""`gradgate` on the command line; each command loads its package only when it runs.

Ends with 0 when all went well, 1 when something could not be done (the reason is on stderr), 2 when the command was
written wrongly. `doctor` and `modes` end as the script ends. `replay` ends with 3 when the same fault came again, and
with 4 when another one did.
"""

from __future__ import annotations

import errno
import os
import platform
import sys
from importlib import import_module
from io import TextIOWrapper

import click

import gradgate
from gradgate._text import visible
from gradgate.cli._output import CommandGroup
from gradgate.errors import GradgateError

__all__ = ["main"]

# Each command, the file that it lives in, and the line that `gradgate --help` shows without loading it.
_COMMANDS = {
    "doctor": ("gradgate.cli._doctor", "Run a script of yours and say why it does not learn."),
    "demo": ("gradgate.cli.demo", "Why this library exists, on real data, in under two minutes."),
    "ledger": ("gradgate.cli._ledger_commands", "What was dropped, why, and what was decided about it."),
    "modes": ("gradgate.cli._doctor", "Run a script of yours and list the lines that switch recording off."),
    "report": ("gradgate.cli._ledger_commands", "What happened, on one page; with --serve while it happens."),
    "replay": ("gradgate.cli._ledger_commands", "Run one recorded sample again, or make a test of it."),
}


class _Commands(CommandGroup):
    """The commands, loaded one by one; what gradgate raises is shown without a traceback."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        command: click.Command = getattr(import_module(_COMMANDS[cmd_name][0]), cmd_name)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, _COMMANDS[name][1]) for name in self.list_commands(ctx)])

    def invoke(self, ctx: click.Context) -> object:
        try:
            result = super().invoke(ctx)
            if sys.stdout is not None:
                sys.stdout.flush()  # Here a full disk is an error like others; at the end of Python it is a traceback.
            return result
        except click.ClickException as error:
            vars(error)["message"] = visible(error.message, lines=True)  # It may quote a name that a stranger chose.
            raise
        except (GradgateError, OSError) as error:
            if getattr(error, "errno", None) == errno.EPIPE:  # `| head` has seen enough; click ends silently.
                raise
            _forget_unwritten_output()
            raise click.ClickException(visible(error, lines=True)) from error


def _forget_unwritten_output() -> None:
    """Lead what could not be written into the void, so that Python does not fail once more when it ends."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _show_version(ctx: click.Context, parameter: click.Parameter, wanted: bool) -> None:
    """Print the versions of gradgate, of torch if it is installed (without loading it) and Python, and the kernels."""
    if not wanted or ctx.resilient_parsing:
        return
    from importlib import metadata  # Here, because it costs more than everything else that `--help` needs.

    try:
        torch = f", torch {metadata.version('torch')}"
    except metadata.PackageNotFoundError:
        torch = ""
    from gradgate._native import status

    click.echo(f"gradgate {gradgate.__version__}{torch}, Python {platform.python_version()}, {status}")
    ctx.exit()


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--version", is_flag=True, is_eager=True, expose_value=False, callback=_show_version, help="Show versions."
)
def main() -> None:
    """Decide, value by value, what your PyTorch model learns from.

    Each command has its own --help with an example.

    Example: gradgate report run.ledger -o report.html
    """
    if sys.stdout is None:  # Closed by whoever started us (`>&-`).
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 - for as long as the process lives
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):  # Names of samples may hold what this terminal cannot show.
            stream.reconfigure(errors="backslashreplace")
