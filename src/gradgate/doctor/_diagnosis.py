"""The diagnosis of a step, as an object, as JSON, as text and as a page."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from gradgate._text import html_table, json_text, text_of, visible
from gradgate.doctor._case import SEVERITIES
from gradgate.doctor._graph import Entry, Graph
from gradgate.errors import ArgumentValueError
from gradgate.records import Finding
from gradgate.report import write_page

# --- text -------------------------------------------------------------------------------------------------------------

_STYLES = {"error": "bold red", "warning": "bold yellow", "info": "bold cyan"}


def _lines(findings: Sequence[Finding], healthy: bool) -> Iterator[tuple[str, str]]:
    """Yield each line of the text, with its style."""
    if healthy:
        notes = f", {len(findings)} note{'s' if len(findings) > 1 else ''}" if findings else ""
        yield f"healthy: no problems found{notes}", "bold green"
    for finding in findings:
        yield "", ""
        yield f"{finding.severity} {finding.code}: {finding.title}", _STYLES[finding.severity]
        if finding.where:
            yield f"  --> {finding.where}{f'   in {finding.module}' if finding.module else ''}", "blue"
            if finding.source:
                yield f"      {finding.source}", "bold"
        elif finding.module:
            yield f"  --> in {finding.module}", "blue"
        for place in finding.also:
            yield f"      see also {place}", "dim"
        for line in finding.consequences[:3]:
            yield f"  therefore {line}", "dim"
        if len(finding.consequences) > 3:
            yield f"  and {len(finding.consequences) - 3} more consequences", "dim"
        if finding.samples:
            shown = ", ".join(str(row) for row in finding.samples[:10])
            yield f"  samples: {shown}{', ...' if len(finding.samples) > 10 else ''}", ""
        for label, text in (("why", finding.reason), ("fix", finding.fix)):
            for number, line in enumerate(text.splitlines()):
                yield f"  {label + ': ' if not number else '     '}{line}", "green" if label == "fix" else ""


# --- the diagnosis ----------------------------------------------------------------------------------------------------

_VERSION = 1


@dataclass(frozen=True, repr=False)
class Diagnosis:
    """What the doctor found in one step.

    Attributes:
        findings: What it says, the worst first.
        exception: What the step raised, or None.
        graph: The modules and what flowed between them, forward and back, as plain values; None where no module was in
            sight, or where `torch.func` did the work.
        layers: One entry for each parameter, as plain values; empty without a graph.

    Examples:
        >>> layer = torch.nn.Linear(2, 1)
        >>> diagnosis = gg.diagnose(lambda: layer(torch.ones(4, 2)).mean(), model=layer)
        >>> diagnosis.healthy, diagnosis.findings
        (True, ())
        >>> print(diagnosis)
        healthy: no problems found
    """

    findings: tuple[Finding, ...] = ()
    exception: BaseException | None = None
    graph: Graph | None = field(default=None, hash=False)
    layers: tuple[Entry, ...] = field(default=(), hash=False)

    @property
    def healthy(self) -> bool:
        """Return whether there is neither an error nor a warning; notes may be there."""
        return self.exception is None and all(finding.severity == "info" for finding in self.findings)

    def at_least(self, severity: str) -> tuple[Finding, ...]:
        """Return the findings of a severity or worse.

        Args:
            severity: "error", "warning" or "info".

        Returns:
            The findings.

        Raises:
            ArgumentValueError: There is no such severity.

        Examples:
            >>> gg.doctor.Diagnosis().at_least("error")
            ()
        """
        if severity not in SEVERITIES:
            why, fix = 'it is one of "error", "warning" and "info".', 'diagnosis.at_least("error")'
            raise ArgumentValueError(f"at_least(): `severity` is {severity!r}.", why=why, fix=fix)
        return tuple(f for f in self.findings if SEVERITIES.index(f.severity) <= SEVERITIES.index(severity))

    def to_dict(self) -> dict[str, Any]:
        """Return all of it as plain values, as `to_json` writes them.

        Returns:
            A dictionary of dictionaries, lists, texts and numbers.
        """
        error = self.exception
        return {
            "version": _VERSION,
            "healthy": self.healthy,
            "exception": None if error is None else {"type": type(error).__qualname__, "message": text_of(error)},
            "findings": [finding.to_dict() for finding in self.findings],
            "graph": self.graph,
            "layers": list(self.layers),
        }

    def to_json(self) -> str:
        """Write all of it as JSON.

        The object has `version` (1), `healthy`, `exception` (null or `type` and `message`), `findings` (a list of
        objects with the attributes of `Finding`), `graph` (null, or `modules`, `edges` and `nonfinite_path`) and
        `layers`. A norm that is not finite is the text "nan" or "inf". Within a version keys are only added.

        Returns:
            The text.

        Examples:
            >>> gg.doctor.Diagnosis().to_json()
            '{"version": 1, "healthy": true, "exception": null, "findings": [], "graph": null, "layers": []}'
        """
        return json_text(self.to_dict())

    def to_html(self, path: str | os.PathLike[str]) -> None:
        """Write all of it as one page that needs nothing else: the findings, the graph, the norm of each gradient.

        Args:
            path: Where to.
        """
        write_page(path, diagnosis=self.to_dict())

    def __str__(self) -> str:
        return "\n".join(visible(text, lines=True) for text, _ in _lines(self.findings, self.healthy))

    def __repr__(self) -> str:
        codes = ", ".join(finding.code for finding in self.findings)
        return f"Diagnosis({'healthy' if self.healthy else codes})"

    def _repr_html_(self) -> str:
        count = len(self.findings)
        title = "healthy: no problems found" if self.healthy else f"{count} finding{'' if count == 1 else 's'}"
        rows = [
            (
                f"{finding.code} {finding.title}",
                "\n".join(filter(None, (finding.where, finding.source, finding.module and f"in {finding.module}"))),
                "\n".join((finding.reason, *(f"therefore {line}" for line in finding.consequences))).strip(),
                finding.fix,
            )
            for finding in self.findings
        ]
        tones = [{"error": "bad", "warning": "warn", "info": "info"}[finding.severity] for finding in self.findings]
        return html_table(title, ("finding", "where", "why", "fix") if rows else (), rows, tones=tones)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for text, style in _lines(self.findings, self.healthy):
            yield Text(visible(text, lines=True), style=style)
