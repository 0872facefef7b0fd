"""Objects as notebooks show them: one table that works offline, in light and in dark, in the colours of the page."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from html import escape

from gradgate._text import visible
from gradgate.records import Incident

_SHOWN = 50

# The colours of web/src/colours.css; a test compares them.
LIGHT = "--ink:#1d2126;--muted:#646b74;--line:#e2e3e0;--bad:#c22f2f;--warn:#9a6100;--good:#23764b;--accent:#2a5fb0"
DARK = "--ink:#e4e7ea;--muted:#98a1ab;--line:#2b3137;--bad:#f07a74;--warn:#e2ae56;--good:#6cc795;--accent:#84b0f0"

# JupyterLab and VS Code say which theme they have; elsewhere the system does.
_STYLE = f"""<style>
.gradgate{{{LIGHT};color:var(--ink);font:13px/1.4 system-ui,sans-serif;overflow-x:auto}}
@media (prefers-color-scheme:dark){{.gradgate{{{DARK}}}}}
[data-jp-theme-light=true] .gradgate,.vscode-light .gradgate{{{LIGHT}}}
[data-jp-theme-light=false] .gradgate,.vscode-dark .gradgate{{{DARK}}}
.gradgate table{{border-collapse:collapse;margin:4px 0;font:inherit;color:inherit}}
.gradgate td,.gradgate th{{border:0;border-bottom:1px solid var(--line);padding:3px 10px 3px 0;
text-align:left!important;vertical-align:top;white-space:pre-wrap;overflow-wrap:break-word;max-width:36em;background:none;color:inherit}}
.gradgate th,.gradgate .note{{color:var(--muted);font-weight:400}}
.gradgate .bad{{color:var(--bad)}}.gradgate .warn{{color:var(--warn)}}.gradgate .good{{color:var(--good)}}
.gradgate .info{{color:var(--accent)}}
</style>"""


def html_table(
    title: str,
    columns: Sequence[str] = (),
    rows: Iterable[Sequence[object]] = (),
    *,
    tones: Sequence[str] = (),
    total: int | None = None,
) -> str:
    """Write a title and a table as HTML; `tones` colour the first cells: "bad", "warn", "good", "info" or ""."""
    lines = ["".join(f"<th>{_cell(name)}</th>" for name in columns)] if columns else []
    for number, row in enumerate(rows):
        tone = f' class="{tones[number]}"' if number < len(tones) and tones[number] else ""
        lines.append("".join(f"<td{'' if place else tone}>{_cell(cell)}</td>" for place, cell in enumerate(row)))
    body = f"<table>{''.join(f'<tr>{line}</tr>' for line in lines)}</table>" if lines else ""
    more = 0 if total is None else total - len(lines) + bool(columns)
    rest = f'<div class="note">and {more:,} more</div>' if more > 0 else ""
    return f'{_STYLE}<div class="gradgate"><b>{_cell(title)}</b>{body}{rest}</div>'


def _cell(value: object) -> str:
    return "" if value is None else escape(visible(value, lines=True))


def incident_html(title: str, incidents: Sequence[Incident], total: int | None = None) -> str:
    """Write incidents as a table; what is not given of a total is counted."""
    rows = [
        (one.sample_id, one.row, one.step, one.stage, one.cause, _what(one), one.where, _moment(one.time))
        for one in incidents[:_SHOWN]
    ]
    tones = ["" if one.transient else "bad" for one in incidents[:_SHOWN]]
    columns = ("sample", "row", "step", "stage", "cause", "what", "where", "time (UTC)")
    return html_table(title, columns, rows, tones=tones, total=len(incidents) if total is None else total)


def _what(incident: Incident) -> str:
    kind = (incident.exception_type or "").rpartition(".")[2]
    text = f"{kind}: {incident.message}" if kind else incident.message
    return text if len(text) <= 200 else f"{text[:197]}..."


def _moment(seconds: float) -> str:
    try:
        return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S")
    except (ValueError, OverflowError, OSError):
        return str(seconds)


class IncidentList(list[Incident]):
    """A plain list of incidents that a notebook shows as a table."""

    def _repr_html_(self) -> str:
        return incident_html(f"{len(self):,} incident{'' if len(self) == 1 else 's'}", self)
