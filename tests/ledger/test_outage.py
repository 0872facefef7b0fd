"""A ledger that cannot be written does not stop the training: one warning, memory, and the file when it is back."""

import gc
import signal
import sqlite3
import subprocess
import warnings

import pytest

from gradgate.errors import LedgerError, LedgerWarning
from gradgate.ledger import Ledger, _file, _writer
from tests.ledger.made import incident, start


@pytest.fixture
def ledger(tmp_path):
    opened = Ledger(tmp_path / "run.ledger", payload=True, snapshot=True)
    opened.record(incident("before"))
    return opened


def fill_the_disk(ledger):
    """Let SQLite say that the disk is full, at exactly the size that the file has now."""
    with ledger._file.reading() as connection:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        pages = connection.execute("PRAGMA page_count").fetchone()[0]
        connection.execute(f"PRAGMA max_page_count = {pages}")


def make_room(ledger):
    with ledger._file.reading() as connection:
        connection.execute("PRAGMA max_page_count = 1000000")


def record_one_by_one(ledger, incidents, payload=None):
    for one in incidents:
        ledger.record(one, payload)


def samples(ledger):
    return [found.sample_id for found in ledger.incidents()]


def test_a_full_disk_warns_once_and_loses_nothing(ledger):
    fill_the_disk(ledger)
    large = [incident(f"during {number}", message="x" * 2000) for number in range(50)]
    with pytest.warns(
        LedgerWarning, match=r"is full.*Incidents are kept in memory(.|\n)*free some space on the disk"
    ) as said:
        record_one_by_one(ledger, large, b"sample " * 100)
    assert len(said) == 1
    assert {found.sample_id for found in ledger.pending} == {one.sample_id for one in large[-len(ledger.pending) :]}
    assert samples(ledger) == ["before", *(one.sample_id for one in large)]  # Also what is only in memory.
    assert large[-1].sample_id in ledger.bad_ids()
    make_room(ledger)
    ledger.record(incident("after"))
    assert ledger.pending == ()
    assert samples(Ledger(ledger.path, read_only=True)) == ["before", *(one.sample_id for one in large), "after"]
    assert ledger.payload_of(large[-1].id) == b"sample " * 100


def test_filters_and_counts_see_what_is_in_memory(ledger):
    fill_the_disk(ledger)
    with pytest.warns(LedgerWarning):
        ledger.record(incident("during", epoch=3, cause="non-finite loss", time=1e12), b"x" * 20_000)
    assert len(ledger.incidents(cause="non-finite loss", since=1e11)) == 1
    assert ledger.incidents(cause="exception", since=1e11) == []
    assert [found.sample_id for found in ledger.incidents(newest_first=True, limit=1)] == ["during"]
    assert ledger.bad_ids(cause="non-finite loss") == {"during"}
    assert ledger.bad_ids(min_count=2) == set()
    assert ledger.bad_ids(retry_after=1, epoch=5, cause="non-finite loss") == set()
    make_room(ledger)
    ledger.flush()
    assert ledger.pending == ()


def test_another_outage_is_another_warning(ledger):
    for _ in range(2):
        fill_the_disk(ledger)
        with pytest.warns(LedgerWarning) as said:
            record_one_by_one(ledger, [incident(), incident()], b"x" * 50_000)
        assert len(said) == 1
        make_room(ledger)
        ledger.flush()


def test_a_locked_file_is_waited_for_once_and_then_hardly(ledger, monkeypatch):
    monkeypatch.setattr(_writer, "PATIENCE", 0.2)
    other = sqlite3.connect(ledger.path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with pytest.warns(LedgerWarning, match=r"database is locked.*\n.*another process holds it") as said:
        record_one_by_one(ledger, [incident("during"), incident("during, too")])
    assert len(said) == 1
    with pytest.raises(LedgerError, match="database is locked"):
        ledger.flush()
    other.execute("ROLLBACK")
    other.close()
    ledger.flush()
    assert samples(Ledger(ledger.path, read_only=True)) == ["before", "during", "during, too"]


def test_a_file_that_became_something_else_is_not_overwritten(ledger):
    for file in ledger.path.parent.iterdir():
        file.unlink()
    ledger.path.write_text("my notes " * 1000)
    with pytest.warns(LedgerWarning, match="not even an SQLite file"):
        ledger.record(incident("during"))
    assert ledger.path.read_text() == "my notes " * 1000
    assert [found.sample_id for found in ledger.pending] == ["during"]
    with pytest.warns(LedgerWarning, match="1 incident was never written"):
        ledger.close()


def test_a_folder_that_vanished_is_an_outage_too(ledger):
    folder = ledger.path.parent
    moved = folder.rename(folder.with_name("elsewhere"))
    with pytest.warns(LedgerWarning, match="there is no folder"):
        ledger.record(incident("during"))
    moved.rename(folder)
    ledger.record(incident("after"))
    assert samples(ledger) == ["before", "during", "after"]


def test_a_folder_that_may_no_longer_be_entered_is_an_outage_too(ledger, monkeypatch):
    def forbidden(*_):
        raise PermissionError(13, "Permission denied")

    ledger._file.close()
    monkeypatch.setattr(_file, "_open_to_write", forbidden)
    with pytest.warns(LedgerWarning, match=r"cannot be opened: Permission denied(.|\n)*ls -l"):
        ledger.record(incident("during"))
    monkeypatch.undo()
    ledger.flush()
    assert samples(ledger) == ["before", "during"]


def test_what_is_lost_at_the_end_is_said(ledger):
    fill_the_disk(ledger)
    with pytest.warns(LedgerWarning):
        ledger.record(incident("during"), b"x" * 50_000)
    with pytest.warns(LedgerWarning, match="1 incident was never written"):
        ledger.close()


def test_memory_holds_all_incidents_but_not_all_samples(ledger, monkeypatch):
    monkeypatch.setattr(_writer, "PAYLOADS_IN_MEMORY", 250_000)
    fill_the_disk(ledger)
    many = [incident(str(number)) for number in range(5)]
    with pytest.warns(LedgerWarning):
        record_one_by_one(ledger, many, b"x" * 100_000)
    assert len(ledger.pending) == 5
    make_room(ledger)
    ledger.flush()
    assert [ledger.payload_of(one.id) is not None for one in many] == [True, True, False, False, False]
    assert "memory" in ledger.incident(many[-1].id).details["not_stored"]["payload"]


def test_recording_in_a_ledger_that_is_only_read_is_an_outage(ledger):
    reader = Ledger(ledger.path, read_only=True)
    with pytest.warns(LedgerWarning, match="read_only=True"):
        reader.record(incident("lost"))
    with pytest.warns(LedgerWarning, match="never written"):
        reader.close()


def test_a_closed_ledger_can_still_be_asked(ledger):
    ledger.close()
    ledger.close()
    assert samples(ledger) == ["before"]
    ledger._file.close()


def test_an_incident_recorded_while_another_is_written_is_not_lost(ledger, monkeypatch):
    """As a signal handler does it: in the same thread, in the middle of a transaction."""
    write = _writer.write_entries
    once = iter([True])

    def interrupted(connection, entries):
        if next(once, False):
            ledger.record(incident("inner"))
        return write(connection, entries)

    monkeypatch.setattr(_writer, "write_entries", interrupted)
    with pytest.warns(LedgerWarning, match="within a transaction"):
        ledger.record(incident("outer"))
    assert ledger.pending == ()
    assert sorted(samples(ledger)) == ["before", "inner", "outer"]


def test_no_warning_while_all_is_well(ledger):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ledger.record_many([incident(str(number)) for number in range(100)])
        ledger.close()
    assert _file.LOCK.acquire(blocking=False)  # And nothing holds the lock.
    _file.LOCK.release()


def test_a_file_that_is_moved_alone_takes_everything_along(tmp_path):
    """Also what was still in `run.ledger-wal`, which SQLite does not find under the new name."""
    with Ledger(tmp_path / "run.ledger") as ledger:
        for number in range(5):
            ledger.record(incident(f"first {number}"))
        ledger.path.rename(tmp_path / "moved.ledger")
        with pytest.warns(LedgerWarning, match=r"is another file than before(.|\n)*Fix: gradgate ledger merge") as said:
            record_one_by_one(ledger, [incident("second"), incident("third")])
        assert len(said) == 1
        assert ledger.bad_ids() == {"second", "third"}
    moved = Ledger(tmp_path / "moved.ledger", read_only=True)
    assert moved.bad_ids() == {f"first {number}" for number in range(5)}


def test_another_process_takes_the_path_of_a_file_that_was_moved_away(tmp_path):
    """Both go on, and whatever was acknowledged is in one of the two files."""
    path, moved = tmp_path / "run.ledger", tmp_path / "old.ledger"
    with Ledger(path) as ledger:
        record_one_by_one(ledger, [incident(f"a{number}") for number in range(30)])
        path.rename(moved)
        code = """
ledger = Ledger(sys.argv[1])
for number in range(30):
    ledger.record(Incident(stage="load", cause="exception", sample_id=f"b{number}"))
print("ready", flush=True); sys.stdin.readline()
for number in range(30, 60):
    ledger.record(Incident(stage="load", cause="exception", sample_id=f"b{number}"))
assert ledger.pending == ()
ledger.close()
"""
        other = start(code, path, stdin=subprocess.PIPE)
        assert other.stdout.readline() == "ready\n"
        with pytest.warns(LedgerWarning, match="is another file than before") as said:
            record_one_by_one(ledger, [incident(f"a{number}") for number in range(30, 60)])
        assert len(said) == 1
        _, err = other.communicate("\n", timeout=120)
        assert other.returncode == 0, err
        record_one_by_one(ledger, [incident("last")])
        assert ledger.pending == ()
    new, old = Ledger(path, read_only=True).bad_ids(), Ledger(moved, read_only=True).bad_ids()
    assert old == {f"a{number}" for number in range(30)}
    assert new == {f"a{number}" for number in range(30, 60)} | {f"b{number}" for number in range(60)} | {"last"}
    with sqlite3.connect(moved) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    connection.close()


def test_a_full_disk_costs_the_same_however_many_wait(ledger, monkeypatch):
    rows = []
    write = _writer.write_entries
    monkeypatch.setattr(
        _writer, "write_entries", lambda connection, entries: rows.append(len(entries)) or write(connection, entries)
    )
    fill_the_disk(ledger)
    with pytest.warns(LedgerWarning):
        record_one_by_one(ledger, [incident(str(number), message="x" * 2000) for number in range(400)])
    waiting = len(ledger.pending)
    assert waiting > 300
    assert rows[-100:] == [1] * 100
    make_room(ledger)
    rows.clear()
    ledger.record(incident("after"))
    assert ledger.pending == ()
    assert sum(rows) == waiting + 1
    assert len(rows) <= 2 + waiting.bit_length()
    assert len(ledger.incidents()) == 402


def test_limit_a_copy_of_the_file_alone_may_lack_the_last_moments(tmp_path, monkeypatch):
    """They are still in `run.ledger-wal`. A merge takes them along."""
    monkeypatch.setattr(_file, "SETTLE_AFTER", 1e9)
    with Ledger(tmp_path / "run.ledger") as ledger:
        ledger.record(incident("first"))
        (tmp_path / "copy.ledger").write_bytes(ledger.path.read_bytes())
        with Ledger(tmp_path / "merged.ledger") as merged:
            assert merged.merge(ledger) == 1
    assert Ledger(tmp_path / "copy.ledger", read_only=True).bad_ids() == set()


class Stop(BaseException):
    pass


def again_and_again(ask):
    signal.setitimer(signal.ITIMER_REAL, 0.01, 10.0)  # what is lost comes again: a failure, not an endless test
    try:
        while True:
            ask()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


@pytest.mark.slow
def test_what_a_signal_handler_raises_inside_sqlite_is_raised(tmp_path):
    """SQLite calls back into Python, and sqlite3 swallows what is raised there: Ctrl-C would be a failed ledger."""
    stopped = []

    def stop(*_):
        stopped.append(1)
        raise Stop

    with Ledger(tmp_path / "run.ledger") as ledger:
        ledger.record_many([incident(str(number)) for number in range(3_000)])
        asked = (
            ledger.stats,
            ledger.bad_ids,
            lambda: ledger.sql("SELECT count(*) FROM incidents a, incidents b"),
            lambda: ledger.merge(other.path),
        )
        with Ledger(tmp_path / "other.ledger") as other:
            other.record_many([incident(f"other {number}") for number in range(500)])
            before = signal.signal(signal.SIGALRM, stop)
            gc.disable()  # Python swallows what is raised in callbacks of the collector, of which hypothesis has one
            try:
                for ask in asked * 3:
                    with pytest.raises(Stop):
                        again_and_again(ask)
            finally:
                signal.signal(signal.SIGALRM, before)
                gc.enable()
        assert len(stopped) == 3 * len(asked)
        assert ledger.stats().incidents >= 3_000
        assert ledger.pending == ()
