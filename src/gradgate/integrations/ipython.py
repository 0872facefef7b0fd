"""`%load_ext gradgate` in a notebook: the magic `%%doctor`, and tuples of incidents as tables."""

from __future__ import annotations

from typing import Any

from IPython.core.interactiveshell import InteractiveShell

from gradgate._text import IncidentList
from gradgate.doctor import Diagnosis, trace
from gradgate.records import Incident

__all__ = ["load"]


def load(shell: InteractiveShell) -> None:
    """Add the magic and the tables to a shell; `%load_ext gradgate` calls it.

    Args:
        shell: The shell of the notebook.
    """

    def doctor(line: str, cell: str) -> Diagnosis:
        """Run a cell and say why it does not learn: `%%doctor`, or `%%doctor model` for one model."""
        model = shell.ev(line) if line.strip() else None
        # Lines are numbered as in the cell: it begins with the magic, and IPython removes empty lines after that.
        source = "\n" * (1 + len(cell) - len(cell.lstrip("\n"))) + shell.transform_cell(cell)
        number = len(shell.user_ns["In"]) - 1
        code = compile(source, shell.compile.cache(source, number, raw_code=source), "exec")
        tracing = trace(model)
        try:
            with tracing:
                exec(code, shell.user_ns)
        except Exception:  # noqa: BLE001 - a cell may raise anything; the diagnosis comes after what it raised
            shell.showtraceback()
        return tracing.diagnosis

    shell.register_magic_function(doctor, "cell")
    shell.display_formatter.formatters["text/html"].for_type(tuple, _incident_table)


def _incident_table(values: tuple[Any, ...]) -> str | None:
    incidents = IncidentList(value for value in values if isinstance(value, Incident))
    return incidents._repr_html_() if incidents and len(incidents) == len(values) else None
