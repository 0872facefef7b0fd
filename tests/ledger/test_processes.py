"""Real processes: several writers at once, killed ones, forked ones, two runs on one file."""

import multiprocessing
import os
import pickle
import signal
import threading
import time

import pytest

from gradgate.ledger import Ledger
from tests.ledger.made import finish, incident, start

pytestmark = pytest.mark.slow

WRITE = """
ledger = Ledger(sys.argv[1], run=sys.argv[2])
for number in range(int(sys.argv[3])):
    ledger.record(Incident(stage="load", cause="exception", sample_id=f"{sys.argv[2]}/{number}"))
"""

UNTIL_KILLED = """
ledger = Ledger(sys.argv[1], payload=True)
number = 0
while True:
    ledger.record(Incident(stage="load", cause="exception", sample_id=str(number), id=str(number)), b"x" * 10_000)
    os.write(1, f"{number}\\n".encode())   # Only what was recorded is told.
    number += 1
"""


def samples(path):
    return [found.sample_id for found in Ledger(path, read_only=True).incidents()]


def fork(work):
    """Run something in a forked child, which ends in any case, and give the child's number."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            work()
            code = 0
        finally:
            os._exit(code)
    return child


def ended_well(child):
    return os.waitpid(child, 0)[1] == 0


def is_sound(path):
    with Ledger(path)._file.reading() as connection:
        return connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)


def test_several_writers_that_also_make_the_file_lose_nothing(tmp_path):
    path = tmp_path / "run.ledger"
    finished = [finish(writer) for writer in [start(WRITE, path, f"run{n}", 100) for n in range(5)]]
    assert len(finished) == 5
    assert sorted(samples(path)) == sorted(f"run{n}/{number}" for n in range(5) for number in range(100))
    assert {run.name: run.incidents for run in Ledger(path).runs()} == {f"run{n}": 100 for n in range(5)}
    assert all(run.ended for run in Ledger(path).runs())
    assert is_sound(path)


@pytest.mark.parametrize("delay", [0.02, 0.15, 0.4])
def test_a_killed_process_loses_nothing_that_it_recorded(tmp_path, delay):
    path = tmp_path / "run.ledger"
    writers = [start(UNTIL_KILLED.replace("str(number)", f"'{n}/' + str(number)"), path) for n in range(2)]
    first = [writer.stdout.readline() for writer in writers]
    time.sleep(delay)
    told = []
    for writer in writers:
        writer.send_signal(signal.SIGKILL)
        told.append(int((first.pop(0) + writer.communicate()[0]).split()[-1]))
    assert is_sound(path)
    found = set(samples(path))
    ledger = Ledger(path)
    for n, last in enumerate(told):
        assert {f"{n}/{number}" for number in range(last + 1)} <= found
        assert ledger.payload_of(f"{n}/{last}") == b"x" * 10_000
    assert all(run.ended is None for run in ledger.runs())  # Nobody said that it was over.


def test_a_process_killed_while_it_makes_the_file_leaves_a_usable_one(tmp_path):
    for number in range(8):
        path = tmp_path / f"{number}.ledger"
        process = start("print('ready', flush=True)\nLedger(sys.argv[1], run='a')\ntime.sleep(60)", path)
        process.stdout.readline()
        time.sleep(number * 0.004)
        process.kill()
        process.communicate()
        Ledger(path).record(incident())
        assert len(samples(path)) == 1


def test_a_process_that_just_ends_writes_the_end_of_its_run(tmp_path):
    finish(start(WRITE, tmp_path / "run.ledger", "night", 1))
    assert Ledger(tmp_path / "run.ledger").runs()[0].ended is not None


def test_a_forked_child_writes_by_itself(tmp_path):
    ledger = Ledger(tmp_path / "run.ledger")
    ledger.record(incident("parent"))
    children = []
    for number in range(3):
        children.append(fork(lambda number=number: ledger.record(incident(f"child {number}"))))
        ledger.record(incident(f"parent {number}"))
    assert all(map(ended_well, children))
    ledger.record(incident("parent again"))
    assert len(ledger.incidents()) == 8
    assert len(ledger.runs()) == 1


def test_forking_while_threads_write_neither_hangs_nor_breaks(tmp_path):
    ledger = Ledger(tmp_path / "run.ledger")
    stop = threading.Event()

    def write():
        while not stop.is_set():
            ledger.record(incident("thread"))

    threads = [threading.Thread(target=write) for _ in range(3)]
    for thread in threads:
        thread.start()
    for _ in range(10):
        assert ended_well(fork(lambda: ledger.record(incident("child"))))
    stop.set()
    for thread in threads:
        thread.join()
    assert len(ledger.incidents(sample_id="child")) == 10
    assert is_sound(ledger.path)


def test_what_waits_in_the_parent_is_not_written_by_the_child(tmp_path):
    ledger = Ledger(tmp_path / "run.ledger")
    ledger._writer._waiting.append(ledger._entry(incident("waits"), None, None))
    assert ended_well(fork(lambda: ledger.record(incident("child"))))
    assert samples(ledger.path) == ["child"]
    ledger.flush()
    assert samples(ledger.path) == ["waits", "child"]


def record_in_a_worker(ledger, sample):
    ledger.record(incident(sample))


@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_a_ledger_goes_to_workers_and_stays_the_same_run(tmp_path, method):
    ledger = Ledger(tmp_path / "run.ledger", payload=True)
    context = multiprocessing.get_context(method)
    workers = [context.Process(target=record_in_a_worker, args=(ledger, str(number))) for number in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
        assert worker.exitcode == 0
    assert sorted(samples(ledger.path)) == ["0", "1"]
    assert [run.name for run in ledger.runs()] == [ledger.run]


def test_a_pickled_ledger_keeps_its_settings(tmp_path):
    ledger = Ledger(tmp_path / "run.ledger", True, snapshot=True, payload_limit=7, snapshot_limit=9, run="night")
    again = pickle.loads(pickle.dumps(ledger))
    assert (again.path, again.payload, again.snapshot, again.run) == (ledger.path, True, True, "night")
    assert (again.payload_limit, again.snapshot_limit, again.read_only) == (7, 9, False)


def test_threads_share_one_ledger(tmp_path):
    ledger = Ledger(tmp_path / "run.ledger")

    def write(name):
        for number in range(50):
            ledger.record(incident(f"{name}/{number}"))

    threads = [threading.Thread(target=write, args=(name,)) for name in "abcd"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(samples(ledger.path))) == 200


def test_reading_while_others_write(tmp_path):
    path = tmp_path / "run.ledger"
    Ledger(path).close()
    writer = start(WRITE, path, "night", 300)
    seen = [len(samples(path))]
    while writer.poll() is None:
        seen.append(len(samples(path)))
    finish(writer)
    assert seen == sorted(seen)
    assert len(samples(path)) == 300
