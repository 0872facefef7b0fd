"""The live view: this machine only, read-only, and up to date."""

import http.client
import socket
import struct
import threading
import time
from pathlib import Path

import pytest

from gradgate.errors import LedgerError
from gradgate.ledger import Ledger
from gradgate.report import LiveView, _page
from tests.ledger.made import finish, incident, start
from tests.report.made import MemoryBook, diagnosis, many
from tests.report.reading import unpacked


@pytest.fixture
def writer(tmp_path):
    with Ledger(tmp_path / "run.ledger") as ledger:
        ledger.record(incident("first"))
        yield ledger


@pytest.fixture
def view(writer):
    with LiveView(Ledger(writer.path, read_only=True), diagnosis()) as view:
        yield view


def ask(view, path="/", method="GET", **headers):
    """Ask the way a program does that may say anything."""
    port = int(view.url.rsplit(":")[-1].strip("/"))
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    try:
        connection.request(method, path, headers={"Host": f"127.0.0.1:{port}", **headers})
        answer = connection.getresponse()
        return answer.status, dict(answer.headers), answer.read()
    finally:
        connection.close()


def samples(view):
    return unpacked(ask(view, "/data")[2])["ledger"]["columns"]["sample"]["words"]


def test_the_page_holds_no_data_and_asks_only_its_server(view):
    status, headers, body = ask(view)
    assert status == 200
    assert b'data-live="yes"></script>' in body
    for policy in (headers["Content-Security-Policy"], body.decode()):
        assert "default-src 'none'" in policy
        assert "connect-src 'self'" in policy
    assert "frame-ancestors 'none'" in headers["Content-Security-Policy"]
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert headers["Cross-Origin-Resource-Policy"] == "same-origin"
    assert "Access-Control-Allow-Origin" not in headers


def test_the_data_follows_the_file(view, writer):
    assert samples(view) == ["first"]
    writer.record(incident("second"))
    deadline = time.monotonic() + 120
    while samples(view) != ["first", "second"] and time.monotonic() < deadline:
        time.sleep(0.05)
    assert samples(view) == ["first", "second"]
    assert unpacked(ask(view, "/data")[2])["diagnosis"] == diagnosis()


@pytest.mark.slow
def test_another_process_writes_meanwhile(view, writer):
    code = """
ledger = Ledger(sys.argv[1])
for number in range(200):
    ledger.record(Incident(stage="load", cause="exception", sample_id=str(number)))
"""
    process = start(code, writer.path)
    seen = [len(samples(view))]
    while process.poll() is None:
        seen.append(len(samples(view)))
    finish(process)
    deadline = time.monotonic() + 120
    while len(samples(view)) < 201 and time.monotonic() < deadline:
        time.sleep(0.05)
    assert len(samples(view)) == 201
    assert seen == sorted(seen)


def test_what_has_not_changed_is_not_sent_again(view, monkeypatch):
    status, headers, body = ask(view, "/data")
    assert (status, len(body) > 0) == (200, True)
    assert ask(view, "/data", **{"If-None-Match": headers["ETag"]})[::2] == (304, b"")
    assert ask(view, "/data", **{"If-None-Match": '"other"'})[0] == 200
    monkeypatch.setattr(_page, "pack", lambda *_: 1 / 0)
    assert ask(view, "/data")[0] == 200


def test_the_training_keeps_the_machine(writer, monkeypatch):
    """A ledger that takes long to read is read the more seldom."""
    view = LiveView(Ledger(writer.path, read_only=True))
    first = view._read()[1]
    view._not_before = time.monotonic() + 3600
    writer.record(incident("later"))
    assert view._read()[1] is first
    view._not_before = 0
    assert view._read()[1] is not first
    view.close()


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:{port}", "127.0.0.1:1", "127.0.0.1", "", "[::1]:{port}"]
)
def test_other_names_of_this_machine_are_refused(view, host):
    port = view.url.rsplit(":")[-1].strip("/")
    for path in ("/", "/data"):
        status, _, body = ask(view, path, Host=host.format(port=port))
        assert (status, body) == (421, b"This page answers to 127.0.0.1 only.\n")
    assert ask(view, Host=f"localhost:{port}")[0] == 200


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS"])
def test_nothing_can_be_sent(view, method):
    assert ask(view, method=method)[0] == 501


@pytest.mark.parametrize("path", ["/run.ledger", "/../run.ledger", "/x", "/data/", "/data?x", "/%2e%2e/", "*"])
def test_there_is_nothing_else(view, path):
    assert ask(view, path)[0] == 404


def test_heads_have_no_body(view):
    status, headers, body = ask(view, method="HEAD")
    assert (status, body) == (200, b"")
    assert int(headers["Content-Length"]) > 1000


def test_a_ledger_that_goes_away_is_told_and_comes_back(view, writer):
    ask(view, "/data")
    away = Path(f"{writer.path}.away")
    writer.close()
    writer.path.rename(away)
    time.sleep(0.1)
    deadline = time.monotonic() + 120
    while (answer := ask(view, "/data"))[0] == 200 and time.monotonic() < deadline:
        time.sleep(0.1)
    assert answer[0] == 503
    assert b"there is no ledger" in answer[2]
    away.rename(writer.path)
    assert samples(view) == ["first"]


def test_a_browser_that_goes_away_is_not_worth_a_word(view, capfd):
    for _ in range(5):
        connection = socket.create_connection(("127.0.0.1", view._server.server_address[1]))
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        port = view._server.server_address[1]
        connection.sendall(f"GET / HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n\r\n".encode() * 20)
        connection.close()
    assert ask(view)[0] == 200
    time.sleep(0.2)
    assert capfd.readouterr().err == ""


def test_only_this_machine_can_reach_it(view):
    address = view._server.server_address
    assert address[0] == "127.0.0.1"
    with socket.socket() as other:  # The same port is free on every other address of this machine.
        other.bind(("127.0.0.2", address[1]))


def test_a_port_that_is_taken_is_told(view):
    port = int(view.url.rsplit(":")[-1].strip("/"))
    with pytest.raises(
        LedgerError, match=rf"port {port} cannot be listened on: Address already in use.*\n.*\n.*--port 0"
    ):
        LiveView(MemoryBook([]), port=port)


def test_any_book_can_be_followed_and_it_ends():
    threads = threading.active_count()
    with LiveView(MemoryBook(many(3))) as view:
        assert len(samples(view)) == 3
        assert ask(view)[0] == 200
    with pytest.raises(ConnectionRefusedError):
        ask(view)
    deadline = time.monotonic() + 120
    while threading.active_count() > threads and time.monotonic() < deadline:
        time.sleep(0.05)
    assert threading.active_count() <= threads
