"""Samples that kill or hang their worker: named, left out, and nobody else with them."""

import signal

import pytest
import torch
from torch.utils.data import DataLoader, RandomSampler

import gradgate as gg
from tests.loading.broken import Deadly, DeadlyOnce, DeadlyTogether, Generated, Numbers, deadly_collate, write_start

# An innocent sample takes microseconds; even on a machine where it is stopped for longer than this, it must be so
# twice, the second time for twice as long and alone, before it is blamed.
TIMEOUT = 1.0


def watched(dataset, timeout=TIMEOUT, *, loader=None, **more):
    settings = {"batch_size": 3, "num_workers": 2, **(loader or {})}
    return gg.resilient(DataLoader(dataset, **settings), worker_timeout=timeout, **more)


def given(loader):
    return [batch.tolist() for batch in loader]


def blamed(loader):
    return [(one.sample_id, one.row) for one in loader.incidents if not one.transient]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_samples_that_kill_their_worker_cost_themselves(monkeypatch, tmp_path):
    """By a signal, a crash and an exit, two of them in one batch, first and last of the epoch; workers start anew."""
    starts = tmp_path / "starts"
    monkeypatch.setenv("GRADGATE_TEST_STARTS", str(starts))
    fate = {0: signal.SIGKILL, 5: signal.SIGSEGV, 7: "exit", 8: signal.SIGKILL, 10: "raise", 13: signal.SIGKILL}
    ledger = gg.Ledger(tmp_path / "run.ledger")
    loader = watched(Deadly(14, fate), 60, loader={"worker_init_fn": write_start}, ledger=ledger)
    assert given(loader) == [[1, 2], [3, 4], [6], [9, 11], [12]]
    assert blamed(loader) == [("0", 0), ("5", 2), ("7", 1), ("8", 2), ("10", 1), ("13", 1)]
    by_id = {one.sample_id: one for one in loader.incidents if not one.transient}
    assert {one.stage for one in by_id.values()} == {"load"}
    assert by_id["5"].cause == "killed its worker"
    assert by_id["5"].message == "the worker was killed by SIGSEGV"
    assert by_id["5"].details["again"] == "the worker was killed by SIGSEGV"
    assert by_id["7"].message == "the worker exited with code 3"
    assert (by_id["13"].step, by_id["13"].epoch) == (4, 0)
    assert ledger.bad_ids() == set(by_id)
    # One by one: two workers at the start, one in which each is alone, and two again.
    assert len(starts.read_text().split()) >= 2 + 3 * 3


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_samples_that_hang_their_worker_cost_themselves():
    fate = {4: "loop", 6: "wait"}
    loader = watched(Deadly(9, fate), refill=True, ids=[f"{index}.png" for index in range(9)])
    assert given(loader) == [[0, 1, 2], [3, 5, 7], [8]]
    incidents = [one for one in loader.incidents if not one.transient]
    assert [one.sample_id for one in incidents] == ["4.png", "6.png"]
    assert incidents[0].cause == "hung its worker"
    assert incidents[0].exception_type == "TimeoutError"
    assert incidents[0].message == f"the worker did not come back within {TIMEOUT:g} s"


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_worker_that_was_killed_from_outside_costs_nobody(tmp_path):
    loader = watched(DeadlyOnce(9, {4}, tmp_path / "mark"), 60, loader={"persistent_workers": True})
    for _ in range(2):
        assert given(loader) == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
    (incident,) = loader.incidents
    assert (incident.sample_id, incident.cause, incident.transient) == ("4", "killed its worker, not again", True)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("dataset", "loader"),
    [
        (DeadlyTogether(9, {4: signal.SIGKILL}), {}),
        (Numbers(9), {"collate_fn": deadly_collate}),
        (Deadly(9, {4: signal.SIGKILL}), {"batch_size": None}),
    ],
    ids=["loaded together", "collated", "without batches"],
)
def test_the_sample_is_found_however_it_is_loaded(dataset, loader):
    alone = "batch_size" in loader
    made = watched(dataset, 60, loader=loader)
    assert given(made) == ([0, 1, 2, 3, 5, 6, 7, 8] if alone else [[0, 1, 2], [3, 5], [6, 7, 8]])
    assert blamed(made) == [("4", 0 if alone else 1)]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_order_and_later_epochs_are_those_of_the_plain_loader():
    def batches(make):
        generator = torch.Generator().manual_seed(3)
        dataset = Deadly(12, {4: signal.SIGKILL} if make is watched else {})
        sampler = RandomSampler(dataset, generator=generator)
        settings = {"batch_size": 3, "num_workers": 2, "sampler": sampler, "generator": generator}
        loader = watched(dataset, 60, loader=settings) if make is watched else DataLoader(dataset, **settings)
        return [given(loader) for _ in range(2)]

    without = [[[n for n in batch if n != 4] for batch in epoch] for epoch in batches(DataLoader)]
    assert batches(watched) == without


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_fault_of_the_code_is_raised():
    loader = watched(Deadly(6, dict.fromkeys(range(6), signal.SIGKILL)), 60, loader={"num_workers": 1})
    with pytest.raises(RuntimeError, match="DataLoader worker") as raised:
        given(loader)
    assert "resilient(): each of the samples 1, 2, 0 does the same to a fresh worker" in str(raised.value.__cause__)
    assert not loader.incidents


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_worker_that_dies_at_its_start_is_raised():
    loader = watched(Numbers(6), 60, loader={"num_workers": 1, "worker_init_fn": _dies})
    with pytest.raises(RuntimeError, match="DataLoader worker") as raised:
        given(loader)
    assert "3 workers in a row were lost, and no sample is to blame" in str(raised.value.__cause__)


def _dies(worker_id):
    raise SystemExit(5)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_an_epoch_that_is_left_leaves_no_workers():
    import multiprocessing

    before = set(multiprocessing.active_children())
    loader = watched(Numbers(30), 60)
    assert next(iter(loader)).tolist() == [0, 1, 2]
    assert set(multiprocessing.active_children()) <= before


@pytest.mark.parametrize(
    ("source", "timeout", "text"),
    [
        (DataLoader(Numbers(3), num_workers=1), 0, "`worker_timeout` is the int 0"),
        (DataLoader(Numbers(3), num_workers=1), True, "`worker_timeout` is the bool True"),
        (DataLoader(Numbers(3)), 30, "`worker_timeout` is given, and the loader has num_workers=0."),
        (
            DataLoader(Numbers(3), num_workers=1, timeout=3),
            30,
            "`worker_timeout` is given, and the loader has timeout=3.",
        ),
        (DataLoader(Numbers(3), num_workers=1, in_order=False), 30, "the loader has in_order=False."),
        (DataLoader(Generated(3), num_workers=1), 30, "a stream."),
        (Numbers(3), 30, "`worker_timeout` are for a loader, the source is a dataset."),
    ],
)
def test_what_cannot_be_watched_is_refused(source, timeout, text):
    with pytest.raises((TypeError, ValueError)) as raised:
        gg.resilient(source, worker_timeout=timeout)
    assert text in str(raised.value)
