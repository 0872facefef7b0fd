"""Which samples count as bad, and what was decided about them."""

import time

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import gradgate as gg
from gradgate.errors import ArgumentValueError
from gradgate.ledger import Ledger
from tests.ledger.made import incident


@pytest.fixture
def ledger(tmp_path):
    with Ledger(tmp_path / "run.ledger", run="night") as opened:
        yield opened


def test_a_sample_is_bad_when_it_failed_and_the_fault_came_again(ledger):
    ledger.record_many([incident("a"), incident("b", transient=True), incident(None), incident("c")])
    assert ledger.bad_ids() == {"a", "c"}


@pytest.mark.parametrize("number", [torch.tensor(7), numpy.int64(7), numpy.array(7)])
def test_a_number_is_the_same_sample_however_it_came(ledger, number):
    ledger.record(incident(number))
    assert ledger.bad_ids() == {"7"}
    assert list(gg.without(list(range(6, 16)), ledger)) == [6, 7, 8, 9, 10, 11, 12, 14, 15]
    assert ledger.release(number)
    assert ledger.bad_ids() == set()


def test_a_sample_must_fail_often_enough_and_for_the_cause_that_is_asked_for(ledger):
    ledger.record_many([incident("a"), incident("a", cause="non-finite loss"), incident("b"), incident("b")])
    assert ledger.bad_ids(min_count=2) == {"a", "b"}
    assert ledger.bad_ids(min_count=2, cause="exception") == {"b"}
    assert ledger.bad_ids(cause="non-finite loss") == {"a"}
    assert ledger.bad_ids(min_count=3) == set()


def test_a_release_forgives_what_was_but_not_what_comes(ledger):
    ledger.record_many([incident("a"), incident("b")])
    assert ledger.release("a", reason="label repaired") is True
    assert ledger.bad_ids() == {"b"}
    assert ledger.release("never seen") is False
    time.sleep(0.002)
    ledger.record(incident("a"))
    assert ledger.bad_ids() == {"a", "b"}
    assert ledger.bad_ids(min_count=2) == set()  # The incident before the release does not count.
    first, second = ledger.decisions()
    assert (first.kind, first.sample_id, first.reason, first.run) == ("release", "a", "label repaired", "night")
    assert second.sample_id == "never seen"
    assert len(ledger.incidents(sample_id="a")) == 2  # The record itself stays.


def test_a_number_is_as_good_a_name_as_its_text(ledger):
    ledger.record(incident(17))
    assert ledger.bad_ids() == {"17"}
    assert ledger.release(17)
    assert ledger.bad_ids() == set()
    assert [decision.kind for decision in ledger.decisions(17)] == ["release"]


def test_another_chance_comes_after_some_epochs(ledger):
    ledger.record_many([incident("a", epoch=0), incident("b", epoch=2), incident("unknown")])

    def bad(epoch):
        return sorted(ledger.bad_ids(retry_after=2, epoch=epoch))

    assert bad(1) == bad(2) == ["a", "b", "unknown"]
    assert bad(3) == bad(4) == ["b", "unknown"]
    assert bad(5) == ["unknown"]
    ledger.record(incident("a", epoch=3))  # It failed again in its chance.
    assert bad(4) == ["a", "b", "unknown"]
    assert bad(5) == ["a", "unknown"]
    assert bad(6) == ["unknown"]


def test_wrong_questions_are_refused(ledger):
    with pytest.raises(ArgumentValueError, match="`min_count` is 0"):
        ledger.bad_ids(min_count=0)
    with pytest.raises(ArgumentValueError, match=r"`retry_after` is 2, but `epoch` is not given(.|\n)*epoch=epoch"):
        ledger.bad_ids(retry_after=2)


def test_the_same_decision_of_several_ranks_is_one(ledger):
    for _ in range(3):
        ledger.record_decisions("skip", ["a", 7], epoch=4)
        ledger.record_decisions("retry", ["a"], epoch=9)
    told = {(decision.kind, decision.sample_id, decision.epoch) for decision in ledger.decisions()}
    assert told == {("skip", "a", 4), ("skip", "7", 4), ("retry", "a", 9)}
    assert len(ledger.decisions()) == 3


events = st.lists(
    st.tuples(st.sampled_from("abc"), st.sampled_from(["fault", "transient", "release"]), st.integers(0, 3)),
    max_size=12,
)


@given(events=events, min_count=st.integers(1, 3), retry_after=st.none() | st.integers(0, 2), now=st.integers(0, 6))
def test_the_answer_is_that_of_a_slow_obvious_count(tmp_path_factory, events, min_count, retry_after, now):
    expected = {}
    with Ledger(tmp_path_factory.mktemp("random") / "run.ledger") as ledger:
        for number, (sample, what, epoch) in enumerate(events):
            if what == "release":
                ledger.release(sample)
                expected[sample] = []
                time.sleep(1e-4)
            else:
                ledger.record(incident(sample, transient=what == "transient", epoch=epoch, step=number))
                expected.setdefault(sample, []).extend([epoch] * (what == "fault"))
        bad = {
            sample
            for sample, epochs in expected.items()
            if len(epochs) >= min_count and (retry_after is None or now <= max(epochs) + retry_after)
        }
        assert ledger.bad_ids(min_count, retry_after=retry_after, epoch=now) == bad


def test_the_view_of_samples_says_the_same(ledger):
    ledger.record_many([incident("a"), incident("b", transient=True), incident("c"), incident(None)])
    ledger.release("c")
    answer = ledger.sql("SELECT sample_id, bad FROM samples ORDER BY sample_id")
    assert answer.rows == [("a", 1), ("b", 0), ("c", 0)]
    assert {sample for sample, bad in answer.rows if bad} == ledger.bad_ids()


def test_counts(ledger):
    ledger.record_many(
        [
            incident("a", exception_type="ValueError", time=10.0),
            incident("a", cause="non-finite loss", stage="loss", transient=True, time=20.0),
            incident(None, run="day", time=30.0),
        ]
    )
    stats = ledger.stats()
    assert (stats.incidents, stats.transient, stats.samples, stats.first, stats.last) == (3, 1, 1, 10.0, 30.0)
    assert stats.by_cause == {"exception": 2, "non-finite loss": 1}
    assert stats.by_stage == {"forward": 2, "loss": 1}
    assert stats.by_run == {"night": 2, "day": 1}
    assert stats.by_exception == {"ValueError": 1}
    assert stats.worst == {"a": 2}
    assert ledger.stats(cause="non-finite loss").incidents == 1
    assert ledger.stats(sample_id="a", since=15.0).by_cause == {"non-finite loss": 1}
    assert ledger.stats(run="no such run").to_dict() == type(stats)().to_dict()


# --- the clock ------------------------------------------------------------------------------------------------------


@pytest.fixture
def clock(monkeypatch):
    """A clock that can be set."""
    now = [1_000_000.0]
    monkeypatch.setattr("time.time", lambda: now[0])
    return now


def test_a_clock_set_back_after_a_release_hides_no_failure(tmp_path, clock):
    with Ledger(tmp_path / "run.ledger") as ledger:
        ledger.record(incident("a", time=clock[0]))
        assert ledger.release("a")
        clock[0] -= 3600
        assert ledger.bad_ids() == set()
        ledger.record(incident("a", time=clock[0]))
        assert ledger.bad_ids() == {"a"}
        assert ledger.sql("SELECT bad FROM samples").rows == [(1,)]
        assert ledger.incidents()[-1].details == {"clock": clock[0]}  # What the clock said then.
        clock[0] -= 3600
        assert ledger.release("a")  # Released once more, by a clock that is further behind.
        assert ledger.bad_ids() == set()
        ledger.record(incident("a", time=clock[0]))
        assert ledger.bad_ids() == {"a"}
    with Ledger(tmp_path / "all.ledger") as merged:
        merged.merge(tmp_path / "run.ledger")
        assert merged.bad_ids() == {"a"}


def test_what_happened_before_a_release_and_is_written_later_does_not_count(tmp_path, clock):
    """A rank whose file was away for a while writes what it saw before."""
    with Ledger(tmp_path / "run.ledger") as ledger:
        early = incident("a", time=clock[0])
        clock[0] += 10
        ledger.release("a")
        clock[0] += 10
        ledger.record(early)
        assert ledger.bad_ids() == set()
        assert ledger.incidents()[0].time == early.time
