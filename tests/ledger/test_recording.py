"""What goes into a ledger comes out of it: incidents, runs, payloads, snapshots."""

import gc
import math
import platform
import sqlite3
import subprocess
import time
from importlib import metadata

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import gradgate as gg
from gradgate._text import class_name
from gradgate.errors import ArgumentTypeError, ArgumentValueError, NothingMatchedError
from gradgate.ledger import Ledger
from gradgate.ledger._file import Connection
from gradgate.ledger._schema import DETAILS_LIMIT, MESSAGE_LIMIT, from_row, to_row
from gradgate.records import Incident, Sink
from tests.ledger.made import incident


@pytest.fixture
def ledger(tmp_path):
    with Ledger(tmp_path / "run.ledger", payload=True, snapshot=True) as opened:
        yield opened


def test_an_incident_comes_back_as_it_was(ledger):
    full = Incident(
        run="night", step=7, epoch=2, rank=1, world_size=4, sample_id="img_17.png", row=3, stage="backward",
        cause="non-finite gradient", exception_type="ValueError", message="bad", where="train.py:12",
        module="encoder.layer1", loss=0.5, grad_norm=math.inf, transient=True, time=12.5,
        details={"shapes": [[1, 3, 8, 8]], "dtype": "float32"},
    )  # fmt: skip
    ledger.record(full)
    (back,) = ledger.incidents()
    assert back == full
    assert back.details == full.details


def test_a_ledger_is_a_sink(ledger):
    assert isinstance(ledger, Sink)
    assert isinstance(ledger, gg.Ledger)


def test_a_nan_loss_stays_a_nan(ledger):
    ledger.record(incident(loss=math.nan, grad_norm=math.nan))
    (back,) = ledger.incidents()
    assert math.isnan(back.loss)
    assert math.isnan(back.grad_norm)


def test_recording_the_same_incident_twice_writes_it_once(ledger):
    one = incident()
    ledger.record_many([one, one])
    ledger.record(one)
    assert ledger.incidents() == [one.__class__(**{**one.to_dict(), "run": ledger.run})]


def test_nothing_to_record_is_nothing_recorded(ledger):
    ledger.record_many([])
    assert ledger.incidents() == []
    assert ledger.runs() == []


def test_what_is_no_incident_is_refused(ledger):
    with pytest.raises(ArgumentTypeError, match=r"'img_17\.png' is not an incident"):
        ledger.record_many(["img_17.png"])


LEAVES = st.none() | st.floats() | st.integers() | st.text() | st.binary()
TREES = st.recursive(LEAVES, lambda trees: st.lists(trees) | st.sets(st.integers()), max_leaves=5)


@given(
    sample_id=st.one_of(st.none(), st.text(max_size=20), st.integers(), st.binary(max_size=5)),
    message=st.text(st.characters(), max_size=50),
    step=st.one_of(st.none(), st.integers(), st.text(max_size=3), st.floats()),
    loss=st.one_of(st.none(), st.floats(), st.integers(), st.text(max_size=3)),
    moment=st.one_of(st.floats(), st.none()),
    details=st.dictionaries(st.text(max_size=3), TREES),
)
def test_whatever_an_incident_holds_becomes_a_row_and_an_incident_again(
    sample_id, message, step, loss, moment, details
):
    """A training must not stop because of a strange record."""
    odd = incident(sample_id, message=message, step=step, loss=loss, time=moment, details=details)
    connection = sqlite3.connect(":memory:")
    row = to_row(odd)
    back = from_row(connection.execute(f"SELECT {', '.join('?' * len(row))}", row).fetchone())
    assert back.sample_id is None if sample_id is None else isinstance(back.sample_id, str)
    assert from_row(to_row(back)).sample_id == back.sample_id  # A name that was read finds itself again.
    connection.close()


@pytest.mark.slow
def test_a_ledger_that_is_used_after_its_end_leaves_no_connection_open(tmp_path, monkeypatch):
    """Python 3.13 warns of each that is."""
    gc.collect()  # the ledgers of earlier tests
    closed = []
    monkeypatch.setattr(Connection, "close", lambda self: closed.append(sqlite3.Connection.close(self)))
    used = Ledger(tmp_path / "run.ledger")
    used.close()
    assert used.incidents() == []
    before = len(closed)
    del used
    gc.collect()
    assert len(closed) == before + 1


def test_an_object_without_a_text_is_recorded_all_the_same(ledger):
    class Mute:
        def __str__(self):
            raise RuntimeError("no")

    ledger.record(incident(details={"mute": Mute()}))
    assert ledger.incidents()[0].details == {"mute": f"a {class_name(Mute)} without a readable text"}


def test_a_stage_of_another_name_does_not_spoil_the_ledger(ledger):
    ledger.record(incident(stage="collate"))
    assert ledger.incidents(stage="collate")[0].stage == "collate"


def test_long_texts_are_cut_and_say_so(ledger):
    ledger.record(incident(message="x" * 5_000, details={"tokens": "y" * 50_000, "values": [1] * 20_000}))
    (back,) = ledger.incidents()
    assert back.message == "x" * MESSAGE_LIMIT + "... (3,000 more characters)"
    assert len(back.details["cut"]) <= DETAILS_LIMIT
    assert back.details["characters"] > 50_000


# --- asking --------------------------------------------------------------------------------------------------------


def test_filters_narrow_what_is_given(ledger):
    ledger.record_many(
        [
            incident("a", run="one", stage="load", time=100.0),
            incident("b", run="one", cause="non-finite loss", time=200.0),
            incident("a", run="two", transient=True, time=300.0),
        ]
    )

    def samples(**filters):
        return "".join(found.sample_id for found in ledger.incidents(**filters))

    assert samples() == "aba"
    assert samples(run="one") == "ab"
    assert samples(cause="non-finite loss") == "b"
    assert samples(stage="load") == "a"
    assert samples(sample_id="a", run="two") == "a"
    assert samples(since=200.0) == "ba"
    assert samples(until=200.0) == "a"
    assert samples(since="1970-01-01T00:03:00+00:00", until="1970-01-01T00:04:00+00:00") == "b"
    assert samples(transient=False) == "ab"
    assert samples(newest_first=True, limit=1) == "a"
    assert samples(since="1h") == ""


def test_a_filter_that_does_not_exist_is_named(ledger):
    with pytest.raises(
        ArgumentTypeError, match=r"no argument 'sample'; did you mean sample_id=.*\n.*run, cause, stage, sample_id"
    ):
        ledger.incidents(sample="a")


def test_a_limit_is_not_negative(ledger):
    ledger.record(incident())
    assert ledger.incidents(limit=0) == []
    with pytest.raises(ArgumentValueError, match="`limit` is -1"):
        ledger.incidents(limit=-1)


@pytest.mark.parametrize("text", ["yesterday", "2h ago", "", "2026-13-01"])
def test_a_time_that_cannot_be_read_is_an_error(ledger, text):
    with pytest.raises(ArgumentValueError, match=f"the time '{text}' cannot be read"):
        ledger.incidents(since=text)


def test_a_time_of_a_wrong_kind_is_an_error(ledger):
    with pytest.raises(ArgumentTypeError, match="the time is of type list"):
        ledger.incidents(since=[1])


def test_one_incident_is_found_by_the_beginning_of_its_id(ledger):
    ledger.record_many([incident("a", id="abcd01"), incident("b", id="abcd02"), incident("c", id="beef")])
    assert ledger.incident("beef").sample_id == "c"
    assert ledger.incident("abcd02").sample_id == "b"
    with pytest.raises(NothingMatchedError, match=r"several incidents begin with 'abcd'.*\n.*abcd01, abcd02"):
        ledger.incident("abcd")
    with pytest.raises(NothingMatchedError, match="there is no incident 'fade'"):
        ledger.incident("fade")
    with pytest.raises(NothingMatchedError, match="at least 4 characters"):
        ledger.incident("bee")


# --- runs ----------------------------------------------------------------------------------------------------------


def test_a_run_says_what_ran(tmp_path):
    before = time.time()
    with Ledger(tmp_path / "run.ledger", run="night", arguments={"lr": 0.1, "layers": [1, 2]}) as ledger:
        (run,) = ledger.runs()  # It is there before anything went wrong.
        assert run.ended is None
        ledger.record(incident())
    (run,) = Ledger(tmp_path / "run.ledger", read_only=True).runs()
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False).stdout.strip()
    assert (run.name, run.arguments, run.incidents) == ("night", {"lr": 0.1, "layers": [1, 2]}, 1)
    assert (run.python, run.torch) == (platform.python_version(), metadata.version("torch"))
    assert (run.gradgate, run.git_commit) == (gg.__version__, commit or None)
    assert before <= run.started <= run.ended <= time.time()


def test_a_run_that_only_incidents_name_is_written_down_too(tmp_path):
    with Ledger(tmp_path / "run.ledger") as ledger:
        ledger.record_many([incident(run="day"), incident(run="night")])
    assert [(run.name, run.incidents, run.ended is not None) for run in ledger.runs()] == [
        ("day", 1, True),
        ("night", 1, True),
    ]


def test_without_git_there_is_no_commit(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with Ledger("run.ledger", run="night") as ledger:
        assert ledger.runs()[0].git_commit is None
    monkeypatch.setenv("PATH", "")
    with Ledger("run.ledger", run="day") as ledger:
        assert ledger.runs()[1].git_commit is None


def test_a_resumed_run_goes_on_under_its_name(tmp_path):
    for sample in "ab":
        with Ledger(tmp_path / "run.ledger", run="night") as ledger:
            ledger.record(incident(sample))
    (run,) = ledger.runs()
    assert run.incidents == 2


def test_the_launcher_names_the_run(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job-7")
    assert Ledger(tmp_path / "run.ledger").run == "job-7"
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    assert Ledger(tmp_path / "run.ledger").run != "none"


# --- payloads ------------------------------------------------------------------------------------------------------


def test_payload_and_snapshot_come_back(ledger):
    first, second = incident("a"), incident("b")
    ledger.record_many([first, second], {first.id: b"sample"}, snapshot=b"weights")
    assert ledger.payload_of(first.id) == b"sample"
    assert ledger.payload_of(second.id) is None
    assert ledger.snapshot_of(first.id) == ledger.snapshot_of(second.id) == b"weights"
    assert ledger.sql("SELECT count(*) FROM snapshot").rows == [(1,)]  # Stored once for both.


def test_no_value_of_a_sample_is_stored_unless_asked_for(tmp_path):
    with Ledger(tmp_path / "run.ledger") as ledger:
        secret = incident()
        ledger.record_many([secret], {secret.id: b"very secret"}, snapshot=b"very secret")
        assert ledger.payload_of(secret.id) is ledger.snapshot_of(secret.id) is None
        assert ledger.incident(secret.id).details["not_stored"] == {
            "payload": "the ledger was opened without it",
            "snapshot": "the ledger was opened without it",
        }
    assert b"very secret" not in (tmp_path / "run.ledger").read_bytes()


def test_a_payload_over_the_limit_is_left_out_and_said(tmp_path):
    with Ledger(tmp_path / "run.ledger", payload=True, payload_limit=10) as ledger:
        small, large = incident("a"), incident("b")
        ledger.record_many([small, large], {small.id: b"x" * 10, large.id: b"x" * 11})
        assert ledger.payload_of(small.id) == b"x" * 10
        assert ledger.payload_of(large.id) is None
        assert ledger.incident(large.id).details == {"not_stored": {"payload": "11 bytes, over the limit of 10"}}


def test_a_run_of_an_incident_may_have_any_name(tmp_path):
    name = "night \ud800 \x00"
    with Ledger(tmp_path / "run.ledger") as ledger:
        ledger.record(incident(run=name))
    (run,) = Ledger(tmp_path / "run.ledger", read_only=True).runs()
    assert run.name == ledger.incidents()[0].run
    assert run.incidents == 1


@pytest.mark.parametrize("payload", ["text", torch.ones(2), bytearray(b"x"), 3])
def test_a_payload_that_is_not_bytes_is_refused_and_spoils_nothing(tmp_path, payload):
    with Ledger(tmp_path / "run.ledger", payload=True) as ledger:
        one = Incident(stage="load", cause="exception", sample_id="a")
        with pytest.raises(ArgumentTypeError, match=rf"is of type {type(payload).__name__}\."):
            ledger.record(one, payload)
        ledger.record(one, b"x")
        assert ledger.pending == ()
        assert ledger.payload_of(one.id) == b"x"


def test_hardest_takes_no_negative_number(tmp_path):
    with Ledger(tmp_path / "run.ledger") as ledger, pytest.raises(ArgumentValueError, match="`k` is -1"):
        ledger.hardest(-1)
