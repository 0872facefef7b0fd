"""The doctor's words for a terminal: one block for each finding, and a style for each line."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from gradgate.records import Finding

_STYLES = {"error": "bold red", "warning": "bold yellow", "info": "bold cyan"}


def lines_of(findings: Sequence[Finding], healthy: bool) -> Iterator[tuple[str, str]]:
    """Write findings."""
    if healthy:
        notes = f", {len(findings)} note{'s' if len(findings) > 1 else ''}" if findings else ""
        yield f"healthy: nothing to say about this step{notes}", "bold green"
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
        if finding.samples:
            shown = ", ".join(str(row) for row in finding.samples[:10])
            yield f"  samples: {shown}{', ...' if len(finding.samples) > 10 else ''}", ""
        for label, text in (("why", finding.reason), ("fix", finding.fix)):
            for number, line in enumerate(text.splitlines()):
                yield f"  {label + ': ' if not number else '     '}{line}", "green" if label == "fix" else ""
