"""Text that is safe to print, JSON that is safe to write, and HTML, whatever a stranger's file or a user's class holds.

Everything that gradgate prints about values that it did not make goes through `visible` or `json_text`: a control
sequence, a bidirectional mark or half a surrogate pair in a sample's name or in an exception's text is shown, and
never reaches the terminal. Nothing here needs more than the standard library.
"""

from __future__ import annotations

import json
import logging
import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from datetime import UTC, datetime, tzinfo
from html import escape
from typing import Any

from gradgate.records import Incident

_LARGEST = 2**63 - 1
_LONGEST = 2_000


def visible(value: object, *, lines: bool = False) -> str:
    """Return a value as text in which every character shows, as an escape if need be; `lines` keeps line ends."""
    text = text_of(value)
    if text.isprintable():
        return text
    kept = "\n\t" if lines else ""
    return "".join(c if c.isprintable() or c in kept else c.encode("unicode_escape").decode() for c in text)


def text_of(value: object, write: Callable[[object], str] = str) -> str:
    """Write a value that somebody else made, whatever its class does when it is asked for a text."""
    try:
        return write(value)
    except Exception:  # noqa: BLE001 - a user's own __str__ may raise anything
        return f"a {class_name(type(value))} without a readable text"


def class_name(kind: type) -> str:
    """Write a class with its module, as far as that says something."""
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def as_text(value: object, limit: int | None = None) -> str:
    """Return a value as text that can be encoded, cut to a length."""
    text = value if isinstance(value, str) else text_of(value, _scalar)
    if limit is not None and len(text) > limit:
        text = f"{text[:limit]}... ({len(text) - limit:,} more characters)"
    return text.encode("utf-8", "backslashreplace").decode()


def _scalar(value: Any) -> str:
    return str(value.item() if getattr(value, "shape", None) == () and hasattr(value, "item") else value)


def plain(value: Any, depth: int = 100) -> Any:
    """Return a tree of values as JSON can hold it: numbers that JSON does not have, and everything unknown, as text."""
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int):
        return value if -_LARGEST <= value <= _LARGEST else hex(value)
    if isinstance(value, float):
        return value if math.isfinite(value) else str(float(value))
    if isinstance(value, bytes):
        return f"<{len(value):,} bytes>"
    if depth and isinstance(value, Mapping):
        return {as_text(key): plain(item, depth - 1) for key, item in value.items()}
    if depth and isinstance(value, list | tuple | set | frozenset):
        return [plain(item, depth - 1) for item in value]
    return as_text(value, _LONGEST)


def json_text(value: Any, *, indent: int | None = None, depth: int = 100) -> str:
    """Write a value as JSON in which everything that is not printable is escaped."""
    text = json.dumps(plain(value, depth), ensure_ascii=False, allow_nan=False, indent=indent)
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c == "\n" else _escape(c) for c in text)


def _escape(character: str) -> str:
    units = character.encode("utf-16-be", "surrogatepass").hex()
    return "".join(f"\\u{units[at : at + 4]}" for at in range(0, len(units), 4))


def log_line(text: str) -> None:
    """Log a warning of one line; bars of tqdm are cleared for it and drawn again (rich does so by itself)."""
    bars = getattr(sys.modules.get("tqdm"), "tqdm", None)
    with nullcontext() if bars is None else bars.external_write_mode():
        logging.getLogger("gradgate").warning("%s", visible(text))


def user_level() -> int:
    """Return the `stacklevel` with which `warnings.warn` in the calling function names the line of the user."""
    level, frame = 1, sys._getframe(1)
    inner = {"gradgate", "torch", "contextlib"}
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in inner:
        level, frame = level + 1, frame.f_back
    return level


# --- Tables in notebooks: they work offline, in light and in dark --------------------------------------------------


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
        (one.sample_id, one.row, one.step, one.stage, one.cause, _what(one), one.where, moment(one.time, UTC))
        for one in incidents[:_SHOWN]
    ]
    tones = ["" if one.transient else "bad" for one in incidents[:_SHOWN]]
    columns = ("sample", "row", "step", "stage", "cause", "what", "where", "time (UTC)")
    return html_table(title, columns, rows, tones=tones, total=len(incidents) if total is None else total)


def _what(incident: Incident) -> str:
    text = message_of(incident)
    return text if len(text) <= 200 else f"{text[:197]}..."


def message_of(incident: Incident) -> str:
    """Return the message of an incident, after the class of its exception if there was one."""
    kind = (incident.exception_type or "").rpartition(".")[2]
    return f"{kind}: {incident.message}" if kind else incident.message


def moment(seconds: float | None, zone: tzinfo | None = None) -> str:
    """Write a time, in a zone or in that of this machine; a time that no calendar has as a number."""
    try:
        return "" if seconds is None else datetime.fromtimestamp(seconds, zone).strftime("%Y-%m-%d %H:%M:%S")
    except (ValueError, OverflowError, OSError):
        return str(seconds)


class IncidentList(list[Incident]):
    """A plain list of incidents that a notebook shows as a table."""

    def _repr_html_(self) -> str:
        return incident_html(f"{len(self):,} incident{'' if len(self) == 1 else 's'}", self)
