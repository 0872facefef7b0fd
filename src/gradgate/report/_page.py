"""The page as one file: the data, the script and the style in it, and a policy that allows no connections."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import time
import zlib
from collections.abc import Mapping
from functools import cache
from html import escape
from importlib import metadata
from pathlib import Path
from typing import Any

from gradgate._text import plain
from gradgate.errors import ArgumentTypeError, ArgumentValueError
from gradgate.records import Finding
from gradgate.report._columns import Book, gather

_FOLDER = Path(__file__).with_name("page")
_FORMAT = 1
_NAMED = {"code", "severity", "title"}


def render_page(ledger: Book | None = None, diagnosis: Mapping[str, Any] | None = None, *, name: str = "") -> str:
    """Return one self-contained HTML page about what happened.

    The page holds its data, its script and its style, and asks nothing of any network. It opens offline, in light and
    in dark, on a phone, and on paper.

    Args:
        ledger: The ledger, opened with `read_only=True` if nothing else is to be done with it.
        diagnosis: What `Diagnosis.to_dict` gives, or the JSON that `gradgate doctor --json` wrote.
        name: What to call it; the ledger's file if there is one.

    Returns:
        The page.

    Raises:
        ArgumentTypeError: The ledger is none.
        ArgumentValueError: There is nothing to show, or the diagnosis is none.
        LedgerError: The ledger cannot be read.

    Examples:
        >>> diagnosis = gg.diagnose(lambda: torch.nn.Linear(2, 1)(torch.ones(4, 2)).mean())
        >>> gg.report.render_page(diagnosis=diagnosis.to_dict())[:15]
        '<!doctype html>'
    """
    data = pack(ledger, diagnosis, name=name)
    return assemble(base64.b64encode(data).decode(), title=title_of(ledger, name))


def write_page(
    path: str | os.PathLike[str],
    ledger: Book | None = None,
    diagnosis: Mapping[str, Any] | None = None,
    *,
    name: str = "",
) -> int:
    """Write the page of `render_page` to a file, which is replaced in one go.

    Args:
        path: The file.
        ledger: The ledger.
        diagnosis: The diagnosis, as a dictionary.
        name: What to call it.

    Returns:
        How many bytes it has.

    Raises:
        ArgumentValueError: There is nothing to show, or the path is the ledger itself.
        LedgerError: The ledger cannot be read.
        OSError: The file cannot be written.

    Examples:
        >>> import tempfile
        >>> ledger = gg.Ledger(tempfile.mkdtemp() + "/run.ledger")
        >>> gg.report.write_page(ledger.path.with_name("report.html"), ledger) < 1_000_000
        True
    """
    target = Path(path)
    source = getattr(ledger, "path", None)
    if source is not None and target.exists() and os.path.samefile(target, source):
        raise ArgumentValueError(
            f"write_page(): {target} is the ledger itself.", why="it would be replaced.", fix='"report.html"'
        )
    page = render_page(ledger, diagnosis, name=name).encode()
    unfinished = target.with_name(target.name + ".unfinished")
    try:
        unfinished.write_bytes(page)
        unfinished.replace(target)
    finally:
        unfinished.unlink(missing_ok=True)
    return len(page)


def pack(ledger: Book | None, diagnosis: Mapping[str, Any] | None, *, name: str = "") -> bytes:
    """Return the data of a page, compressed as the page's script expects it."""
    if ledger is None and diagnosis is None:
        raise ArgumentValueError(
            "render_page(): there is neither a ledger nor a diagnosis.",
            why="a page shows one of them, or both.",
            fix='render_page(gg.Ledger("run.ledger", read_only=True))',
        )
    if ledger is not None and not isinstance(ledger, Book):
        raise ArgumentTypeError(
            f"render_page(): `ledger` is {ledger!r}.",
            why="a page is made of an open ledger, not of its path.",
            fix='render_page(gg.Ledger("run.ledger", read_only=True))',
        )
    if diagnosis is not None and not _is_diagnosis(diagnosis):
        raise ArgumentValueError(
            "render_page(): `diagnosis` has no list of findings, each with a code, a severity and a title.",
            why="it is what `Diagnosis.to_dict` gives.",
            fix="render_page(diagnosis=gg.diagnose(step).to_dict())",
        )
    name = title_of(ledger, name)
    data = {
        "format": _FORMAT,
        "made": time.time(),
        "gradgate": _version(),
        "name": name,
        "ledger": None if ledger is None else gather(ledger, name),
        "diagnosis": None if diagnosis is None else _whole(diagnosis),
    }
    return zlib.compress(json.dumps(data, separators=(",", ":"), allow_nan=False).encode(), 6)


def _is_diagnosis(data: Mapping[str, Any]) -> bool:
    findings = data.get("findings")
    return isinstance(findings, list) and all(isinstance(one, dict) and one.keys() >= _NAMED for one in findings)


def _whole(diagnosis: Mapping[str, Any]) -> dict[str, Any]:
    """Return a diagnosis as plain values, with everything that a page asks of its findings."""
    findings = [{**Finding(**{name: one[name] for name in _NAMED}).to_dict(), **one} for one in diagnosis["findings"]]
    data: dict[str, Any] = plain({**diagnosis, "findings": findings})
    return data


def assemble(data: str, *, title: str, live: bool = False) -> str:
    script, style = _part("page.js"), _part("page.css")
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy(live=live)}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta name="generator" content="gradgate {_version()}">
<meta name="referrer" content="no-referrer">
<title>{escape(title)} · gradgate</title>
<style>{style}</style>
</head>
<body>
<noscript>This page draws itself with a script of its own, which this browser does not run.</noscript>
<main id="page"></main>
<script type="application/octet-stream" id="data" data-live="{"yes" if live else "no"}">{data}</script>
<script>{script}</script>
</body>
</html>
"""


def policy(*, live: bool = False) -> str:
    """Return the Content-Security-Policy: this script, this style, pictures made here, and nothing else."""
    connect = " connect-src 'self';" if live else ""
    sources = f"script-src '{_digest('page.js')}'; style-src '{_digest('page.css')}'; img-src data: blob:;{connect}"
    return f"default-src 'none'; {sources} base-uri 'none'; form-action 'none'"


@cache
def _version() -> str:
    try:
        return metadata.version("gradgate")
    except metadata.PackageNotFoundError:  # Run from a folder that was never installed.
        return ""


@cache
def _part(name: str) -> str:
    return (_FOLDER / name).read_text(encoding="utf-8")


@cache
def _digest(name: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(_part(name).encode()).digest()).decode()


def title_of(ledger: Book | None, name: str = "") -> str:
    """Return the name of a page: the one it was given, else that of the ledger's file, else what it is about."""
    path = getattr(ledger, "path", None)
    return name or (Path(path).name if path is not None else "ledger" if ledger is not None else "diagnosis")
