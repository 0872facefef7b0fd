"""The page of a training that still runs: served on this machine only, made anew when the ledger has changed."""

from __future__ import annotations

import hashlib
import os
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from gradgate.errors import GradgateError, LedgerError
from gradgate.report._columns import Book
from gradgate.report._page import assemble, pack, policy, title_of

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
        self._source = _Source(ledger, diagnosis)
        try:
            self._server = _Server((_ADDRESS, port), _Handler)
        except (OSError, OverflowError) as error:
            raise LedgerError(
                f"port {port} cannot be listened on: {getattr(error, 'strerror', None) or error}.",
                why="another program has it, or it takes more rights.",
                fix="gradgate report LEDGER --serve --port 0   # any free one",
            ) from error
        self._server.source = self._source
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


class _Source:
    """The data of the page, read anew when the file has changed, and not too often."""

    def __init__(self, ledger: Book, diagnosis: Mapping[str, Any] | None) -> None:
        self.title = title_of(ledger)
        self._ledger = ledger
        self._diagnosis = diagnosis
        self._lock = threading.Lock()
        self._seen: object = None
        self._data = b""
        self._not_before = 0.0

    def data(self) -> tuple[str, bytes]:
        """Return the data of now, and a name for this state of it."""
        with self._lock:
            now = time.monotonic()
            state = self._state()
            if not self._data or (state != self._seen and now >= self._not_before):
                self._data = pack(self._ledger, self._diagnosis)
                self._seen = state
                self._not_before = time.monotonic() + _REST * (time.monotonic() - now)
            return hashlib.sha256(repr(self._seen).encode()).hexdigest()[:16], self._data

    def _state(self) -> object:
        path = getattr(self._ledger, "path", None)
        if path is None:
            return time.monotonic()
        stamps: list[tuple[int, int, int] | None] = [None, None]
        for place, end in enumerate(("", "-wal")):
            with suppress(OSError):
                status = os.stat(f"{path}{end}")
                stamps[place] = status.st_ino, status.st_mtime_ns, status.st_size
        return stamps


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    source: _Source

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
            page = assemble("", title=self.server.source.title, live=True)
            self._answer(HTTPStatus.OK, "text/html; charset=utf-8", page.encode())
        elif self.path == "/data":
            self._data()
        else:
            self._answer(HTTPStatus.NOT_FOUND, "text/plain", b"There is only / here.\n")

    do_HEAD = do_GET

    def _data(self) -> None:
        try:
            state, data = self.server.source.data()
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
