"""The page as one file, with its data, script and style, and a policy that allows no connections; or served live."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import sys
import threading
import time
import zlib
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from html import escape
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import metadata
from pathlib import Path
from typing import Any

from gradgate._text import plain
from gradgate.errors import ArgumentTypeError, ArgumentValueError, GradgateError, LedgerError
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


# --- The page of a training that still runs: served on this machine only --------------------------------------------


_ADDRESS = "127.0.0.1"
_REST = 5.0  # how many times as long as reading took the ledger is left alone, so that the training keeps the machine


class LiveView:
    """A page that follows a ledger while a training writes to it; the file is read, and nothing else is asked.

    It answers on 127.0.0.1 only, and only to requests that name this machine, so that no other website can read it
    through the browser. It has two answers, the page and its data, and takes nothing.

    Args:
        ledger: The ledger, opened with `read_only=True`.
        diagnosis: What `Diagnosis.to_dict` gives, to be shown beside it.
        port: Where to listen; 0 takes any free one.

    Raises:
        LedgerError: The port is taken.

    Examples:
        >>> import tempfile, urllib.request
        >>> ledger = gg.Ledger(tempfile.mkdtemp() + "/run.ledger")
        >>> with gg.report.LiveView(ledger) as view:
        ...     page = urllib.request.urlopen(view.url).read()
        >>> page[:15]
        b'<!doctype html>'
    """

    def __init__(self, ledger: Book, diagnosis: Mapping[str, Any] | None = None, *, port: int = 0) -> None:
        self._ledger, self._diagnosis = ledger, diagnosis
        self._lock = threading.Lock()
        self._state: object = None
        self._data = b""
        self._not_before = 0.0
        try:
            self._server = _Server((_ADDRESS, port), _Handler)
        except (OSError, OverflowError) as error:
            raise LedgerError(
                f"port {port} cannot be listened on: {getattr(error, 'strerror', None) or error}.",
                why="another program has it, or it takes more rights.",
                fix="gradgate report LEDGER --serve --port 0   # any free one",
            ) from error
        self._server.view = self
        self._thread: threading.Thread | None = None

    @property
    def url(self) -> str:
        """The address of the page."""
        return f"http://{_ADDRESS}:{self._server.server_address[1]}/"

    def __repr__(self) -> str:
        return f"LiveView({self.url!r})"

    def serve(self) -> None:
        """Answer until `close` is called from elsewhere, or an interrupt comes."""
        self._server.serve_forever(poll_interval=0.2)

    def close(self) -> None:
        """Stop answering."""
        if self._thread is not None:
            self._server.shutdown()
            self._thread.join()
            self._thread = None
        self._server.server_close()

    def __enter__(self) -> LiveView:
        self._thread = threading.Thread(target=self.serve, name="gradgate-live-view", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _page(self) -> str:
        return assemble("", title=title_of(self._ledger), live=True)

    def _read(self) -> tuple[str, bytes]:
        """Return a name for the state of the file, and its data: read anew when it has changed, and not too often."""
        with self._lock:
            now = time.monotonic()
            state = self._stamps()
            if not self._data or (state != self._state and now >= self._not_before):
                self._data = pack(self._ledger, self._diagnosis)
                self._state = state
                self._not_before = time.monotonic() + _REST * (time.monotonic() - now)
            return hashlib.sha256(repr(self._state).encode()).hexdigest()[:16], self._data

    def _stamps(self) -> object:
        path = getattr(self._ledger, "path", None)
        if path is None:
            return time.monotonic()
        files = [Path(f"{path}{end}") for end in ("", "-wal")]
        with suppress(OSError):  # It is gone between the two questions.
            found = [file.stat() for file in files if file.exists()]
            return [(status.st_ino, status.st_mtime_ns, status.st_size) for status in found]
        return None


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    view: LiveView

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing of a browser that went away in the middle of an answer."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    server_version = "gradgate"
    sys_version = ""
    protocol_version = "HTTP/1.1"
    timeout = 30
    server: _Server

    def do_GET(self) -> None:
        host, _, port = self.headers.get("Host", "").rpartition(":")
        if host not in (_ADDRESS, "localhost") or port != str(self.server.server_address[1]):
            # Another name that leads here is how a website would read what only this machine may.
            self._answer(HTTPStatus.MISDIRECTED_REQUEST, "text/plain", b"This page answers to 127.0.0.1 only.\n")
            return
        if self.path == "/":
            self._answer(HTTPStatus.OK, "text/html; charset=utf-8", self.server.view._page().encode())
        elif self.path == "/data":
            self._data()
        else:
            self._answer(HTTPStatus.NOT_FOUND, "text/plain", b"There is only / here.\n")

    do_HEAD = do_GET

    def _data(self) -> None:
        try:
            state, data = self.server.view._read()
        except GradgateError as error:
            self._answer(HTTPStatus.SERVICE_UNAVAILABLE, "text/plain; charset=utf-8", str(error).encode())
            return
        if self.headers.get("If-None-Match") == f'"{state}"':
            self._answer(HTTPStatus.NOT_MODIFIED, "", b"")
            return
        self._answer(HTTPStatus.OK, "application/octet-stream", data, {"ETag": f'"{state}"'})

    def _answer(self, status: HTTPStatus, kind: str, body: bytes, more: Mapping[str, str] | None = None) -> None:
        self.send_response(status)
        headers = {
            "Content-Type": kind,
            "Content-Length": str(len(body)),
            "Content-Security-Policy": policy(live=True) + "; frame-ancestors 'none'",
            "X-Content-Type-Options": "nosniff",
            "Cross-Origin-Resource-Policy": "same-origin",
            "Referrer-Policy": "no-referrer",
            "Cache-Control": "no-store",
            **(more or {}),
        }
        for name, value in headers.items():
            if value:
                self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing: the terminal belongs to whoever started this."""
