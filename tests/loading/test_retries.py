"""What would pass at the next try is tried again before a sample is blamed."""

import pickle

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, SequentialSampler

import gradgate as gg
from gradgate.errors import ArgumentTypeError, ArgumentValueError
from tests.loading.broken import Numbers, Stepped

WORKERS = pytest.mark.parametrize("workers", [0, 1])


class Flaky(Dataset):
    """Sample n fails `faults[n]` times with `error` before it can be loaded; counts the loads."""

    def __init__(self, size, faults, error=OSError):
        self.size, self.faults, self.error = size, faults, error
        self.loads = torch.zeros(size, dtype=torch.int64).share_memory_()

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        self.loads[index] += 1
        if self.loads[index] <= self.faults.get(index, 0):
            raise self.error(f"try {int(self.loads[index])}")
        return torch.tensor(index)


class FlakyTogether(Flaky):
    """Loads whole batches; the first time it cannot."""

    def __getitems__(self, indices):
        if not self.loads.any():
            self.loads[0] += 1
            raise OSError("stale file handle")
        return [torch.tensor(index) for index in indices]


def given(loader):
    return [batch.tolist() for batch in loader]


@WORKERS
@pytest.mark.parametrize("refill", [False, True])
@pytest.mark.parametrize("error", [OSError, TimeoutError, ConnectionResetError])
def test_a_sample_that_can_be_loaded_at_a_retry_is_in_its_batch_and_nobody_leaves_it_out(
    workers, refill, error, tmp_path
):
    path = tmp_path / "run.ledger"
    data = Flaky(8, {1: 1, 5: 2}, error)
    loader = gg.resilient(DataLoader(data, batch_size=4, num_workers=workers), refill=refill, ledger=path)
    assert given(loader) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    told = [(i.sample_id, i.row, i.transient, i.message, i.details["retries"]) for i in loader.incidents]
    assert told == [("1", 1, True, "try 1", 1), ("5", 1, True, "try 1", 2)]
    assert {incident.cause for incident in loader.incidents} == {"exception, gone at a retry"}
    assert repr(loader) == "<resilient DataLoader: 0 samples left out>"
    with gg.Ledger(path) as ledger:
        assert len(ledger.incidents(transient=True)) == 2
        assert ledger.bad_ids() == set()
        assert len(gg.without(data, ledger)) == 8
        assert list(gg.QuarantineSampler(SequentialSampler(data), ledger)) == list(range(8))


def test_a_sample_that_fails_at_every_try_is_left_out_with_its_last_fault():
    data = Flaky(4, {2: 99})
    loader = gg.resilient(DataLoader(data, batch_size=4))
    assert given(loader) == [[0, 1, 3]]
    assert [(i.sample_id, i.transient, i.message) for i in loader.incidents] == [("2", False, "try 3")]
    assert data.loads.tolist() == [1, 1, 3, 1]


@pytest.mark.parametrize(
    ("arguments", "loads"),
    [
        ({}, 1),  # a ValueError will not go away
        ({"retry_on": ValueError}, 3),
        ({"retry_on": ValueError, "retries": 0}, 1),
        ({"retry_on": (KeyError, ValueError), "retries": 4}, 5),
        ({"retry_on": ()}, 1),
    ],
)
def test_what_is_tried_again_and_how_often(arguments, loads):
    data = Flaky(3, {1: 99}, ValueError)
    assert given(gg.resilient(DataLoader(data, batch_size=3), **arguments)) == [[0, 2]]
    assert data.loads[1] == loads


def test_each_wait_is_twice_as_long(monkeypatch):
    waits = []
    monkeypatch.setattr("gradgate.loading._bad_samples.sleep", waits.append)
    given(gg.resilient(DataLoader(Flaky(2, {1: 99}), batch_size=2), retries=4, backoff=0.5))
    assert waits == [0.5, 1.0, 2.0, 4.0]


def test_what_is_not_to_be_caught_is_tried_again_and_then_raised():
    assert given(gg.resilient(DataLoader(Flaky(2, {1: 1}), batch_size=2), catch=ValueError)) == [[0, 1]]
    with pytest.raises(OSError, match="try 3"):
        given(gg.resilient(DataLoader(Flaky(2, {1: 99}), batch_size=2), catch=ValueError))


def test_many_faults_that_pass_are_no_fault_of_the_code():
    loader = gg.resilient(DataLoader(Flaky(50, dict.fromkeys(range(50), 1)), batch_size=5), patience=4)
    assert len(given(loader)) == 10
    assert len(loader.incidents) == 50


@WORKERS
def test_a_dataset_that_loads_whole_batches(workers):
    loader = gg.resilient(DataLoader(FlakyTogether(4, {}), batch_size=2, num_workers=workers))
    assert given(loader) == [[0, 1], [2, 3]]
    assert [(i.sample_id, i.row, i.transient, i.message) for i in loader.incidents] == [
        (None, None, True, "stale file handle")
    ]


def test_a_dataset_alone():
    dataset = gg.resilient(Flaky(3, {1: 1, 2: 99}))
    assert [int(dataset[0]), int(dataset[1])] == [0, 1]
    assert isinstance(dataset[2], gg.loading.BadSample)
    assert [(i.sample_id, i.transient) for i in dataset.incidents] == [("1", True), ("2", False)]
    assert pickle.loads(pickle.dumps(dataset))[0] == 0


def test_a_stream_is_not_tried_again():
    """A second `next` would give the next sample in place of this one."""
    loader = gg.resilient(DataLoader(Stepped(4, {1}), batch_size=2))
    assert given(loader) == [[0], [2, 3]]
    assert [(i.sample_id, i.transient) for i in loader.incidents] == [("1", False)]


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, MemoryError])
def test_these_pass_at_a_retry_too(error):
    data = Flaky(2, {1: 2})
    data.error = lambda text: OSError(text) if text == "try 1" else error(text)
    with pytest.raises(error):
        given(gg.resilient(DataLoader(data, batch_size=2)))


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"retries": -1}, ArgumentValueError, "`retries` is the int -1"),
        ({"retries": 1.5}, ArgumentValueError, "`retries` is the float 1.5"),
        ({"retries": True}, ArgumentValueError, "`retries` is the bool True"),
        ({"backoff": -0.1}, ArgumentValueError, "`backoff` is the float -0.1"),
        ({"backoff": float("nan")}, ArgumentValueError, "`backoff` is the float nan"),
        ({"backoff": "1"}, ArgumentValueError, "`backoff` is the str '1'"),
        ({"retry_on": KeyboardInterrupt}, ArgumentTypeError, "`retry_on` has <class"),
        ({"retry_on": ["OSError"]}, ArgumentTypeError, "`retry_on` has ['OSError']"),
    ],
)
def test_wrong_arguments(arguments, error, words):
    with pytest.raises(error) as caught:
        gg.resilient(DataLoader(Numbers(3)), **arguments)
    assert words in str(caught.value)
    assert "Fix: " in str(caught.value)
