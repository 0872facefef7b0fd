"""A resilient loader: every good sample once and in order, every bad one as an incident, with any number of workers."""

import pickle
import warnings

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler, default_collate

import gradgate as gg
from tests.loading.broken import (
    Batched,
    BrokenFile,
    Configured,
    Generated,
    Nothing,
    Numbers,
    Shapes,
    Sharded,
    Stepped,
    Unpicklable,
    set_start,
)

WORKERS = pytest.mark.parametrize("workers", [0, 2])


def given(loader):
    return [batch.tolist() for batch in loader]


def bad_ids(loader):
    return [incident.sample_id for incident in loader.incidents]


@WORKERS
def test_a_bad_sample_costs_one_sample(workers):
    loader = gg.resilient(DataLoader(Numbers(12, {5}), batch_size=3, num_workers=workers))
    assert given(loader) == [[0, 1, 2], [3, 4], [6, 7, 8], [9, 10, 11]]
    (incident,) = loader.incidents
    assert (incident.sample_id, incident.row, incident.step, incident.epoch) == ("5", 2, 1, 0)
    assert (incident.stage, incident.cause, incident.exception_type) == ("load", "exception", "OSError")
    assert incident.message == "truncated image"
    assert incident.where.startswith("tests/loading/broken.py:")
    assert "in __getitem__" in incident.details["traceback"]
    assert incident.details.get("worker") == (1 if workers else None)


@pytest.mark.slow
@WORKERS
@pytest.mark.parametrize("dataset", [Numbers, Batched])
def test_refill_keeps_the_order_and_the_size(workers, dataset):
    loader = gg.resilient(DataLoader(dataset(14, {1, 5, 6, 11}), batch_size=3, num_workers=workers), refill=True)
    assert given(loader) == [[0, 2, 3], [4, 7, 8], [9, 10, 12], [13]]
    assert sorted(map(int, bad_ids(loader))) == [1, 5, 6, 11]
    assert loader.skipped == 0


@pytest.mark.slow
@WORKERS
@pytest.mark.parametrize(
    ("refill", "expected"), [(False, [[3, 4, 5], [6, 8], [9, 11]]), (True, [[3, 4, 5], [6, 8, 9], [11, 12, 13]])]
)
def test_drop_last_and_a_batch_without_any_good_sample(workers, refill, expected):
    size = 14 if refill else 13
    loader = gg.resilient(
        DataLoader(Numbers(size, {0, 1, 2, 7, 10}), batch_size=3, num_workers=workers, drop_last=True), refill=refill
    )
    assert given(loader) == expected
    assert loader.skipped == (0 if refill else 1)


@pytest.mark.slow
@pytest.mark.parametrize("size", range(5, 14))
@pytest.mark.parametrize("drop_last", [False, True])
def test_refill_with_workers_at_every_end(size, drop_last):
    """The workers come to their end before the main process knows that the last batches must be asked for again."""
    bad = {size - 1, size - 3, size - 5}
    loader = gg.resilient(DataLoader(Numbers(size, bad), batch_size=3, num_workers=2, drop_last=drop_last), refill=True)
    good = [index for index in range(size) if index not in bad]
    expected = [good[start : start + 3] for start in range(0, len(good), 3)]
    assert given(loader) == [batch for batch in expected if len(batch) == 3 or not drop_last]
    # What drop_last leaves out was never loaded, so nobody knows about it.
    assert bad - {size - 1} <= {int(name) for name in bad_ids(loader)} <= bad
    assert drop_last or len(loader.incidents) == len(bad)


@pytest.mark.slow
@WORKERS
def test_refill_with_a_batch_sampler_of_ones_own(workers):
    """Its batches have different sizes; they keep them."""
    batches = [[0, 1], [2, 3, 4], [5, 6], [7, 8]]
    loader = gg.resilient(DataLoader(Numbers(9, {1, 3}), batch_sampler=batches, num_workers=workers), refill=True)
    assert given(loader) == [[0, 2], [4, 5, 6], [7, 8]]
    plain = gg.resilient(DataLoader(Numbers(9, {1, 3}), batch_sampler=batches, num_workers=workers))
    assert given(plain) == [[0], [2, 4], [5, 6], [7, 8]]


@WORKERS
def test_refill_with_an_index_that_comes_twice(workers):
    sampler = [0, 1, 0, 2, 1, 3, 0]
    loader = gg.resilient(DataLoader(Numbers(4, {1}), batch_size=2, sampler=sampler, num_workers=workers), refill=True)
    assert given(loader) == [[0, 0], [2, 3], [0]]
    assert bad_ids(loader) == ["1", "1"]


@WORKERS
def test_single_samples_without_batches(workers):
    loader = gg.resilient(DataLoader(Numbers(5, {2}), batch_size=None, num_workers=workers))
    assert [int(sample) for sample in loader] == [0, 1, 3, 4]
    assert bad_ids(loader) == ["2"]


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{}, {"num_workers": 2}, {"num_workers": 2, "persistent_workers": True}], ids=str)
@pytest.mark.parametrize("refill", [False, True])
def test_epochs_with_persistent_workers_and_shuffling(settings, refill):
    """Bad samples change nothing about the order of the others, in this epoch and in later ones."""

    def loader(bad):
        generator = torch.Generator().manual_seed(3)
        return DataLoader(Numbers(12, bad), batch_size=4, shuffle=True, generator=generator, **settings)

    plain, ours = loader(()), gg.resilient(loader({5, 8}), refill=refill)
    for _ in range(4):
        order = [index for batch in plain for index in batch.tolist()]
        assert [i for batch in given(ours) for i in batch] == [i for i in order if i not in (5, 8)]
    assert sorted(incident.epoch for incident in ours.incidents) == [0, 0, 1, 1, 2, 2, 3, 3]


@pytest.mark.slow
@WORKERS
@pytest.mark.parametrize("refill", [False, True])
def test_the_healthy_path_is_that_of_the_plain_loader(workers, refill):
    """The same batches, the same seeds in the workers, the same random numbers left behind."""
    torch.manual_seed(5)
    plain = list(DataLoader(Noise(9), batch_size=2, shuffle=True, num_workers=workers))
    after = torch.rand(3)
    torch.manual_seed(5)
    ours = list(gg.resilient(DataLoader(Noise(9), batch_size=2, shuffle=True, num_workers=workers), refill=refill))
    assert torch.equal(torch.rand(3), after)
    assert all(torch.equal(a["x"], b["x"]) and a["name"] == b["name"] for a, b in zip(ours, plain, strict=True))


class Noise(Numbers):
    """Random numbers of the process that loads, and a name, in a dictionary."""

    def __getitem__(self, index):
        return {"x": torch.rand(2), "name": f"sample {index}"}


# --- collation -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
@WORKERS
@pytest.mark.parametrize(
    ("dataset", "kept"),
    [
        (Shapes(12, {5, 6}), [[0, 1, 2, 3], [4, 7], [8, 9, 10, 11]]),
        (Shapes(8, {0, 4}), [[1, 2, 3], [5, 6, 7]]),
        (Nothing(8, {0, 1, 6}), [[2, 3], [4, 5, 7]]),
    ],
)
def test_what_cannot_be_collated_is_left_out(workers, dataset, kept):
    loader = gg.resilient(DataLoader(dataset, batch_size=4, num_workers=workers))
    assert [[int(row.reshape(-1)[0]) for row in batch] for batch in loader] == kept
    assert {int(name) for name in bad_ids(loader)} == dataset.bad
    assert {incident.cause for incident in loader.incidents} == {"collate"}
    assert all(incident.details["rows"] == 4 for incident in loader.incidents)


def needs_two(samples):
    if len(samples) < 2:
        raise ValueError("needs two")
    return default_collate(samples)


def test_a_collation_that_needs_several_does_not_blame_all():
    loader = gg.resilient(DataLoader(Nothing(8, {2}), batch_size=4, collate_fn=needs_two))
    assert given(loader) == [[0, 1, 3], [4, 5, 6, 7]]
    assert bad_ids(loader) == ["2"]


def test_an_exception_of_ones_own_collation_names_its_line():
    loader = gg.resilient(DataLoader(Numbers(4), batch_size=2, collate_fn=refuses_three))
    assert given(loader) == [[0, 1], [2]]
    assert loader.incidents[0].where.startswith("tests/loading/test_loader.py:")


def refuses_three(samples):
    if any(int(sample) == 3 for sample in samples):
        raise KeyError("three")
    return torch.stack(samples)


# --- streams -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("refill", [False, True])
def test_a_stream_whose_iterator_is_a_class_goes_on(workers, refill):
    loader = gg.resilient(DataLoader(Stepped(12, {5, 6}), batch_size=3, num_workers=workers), refill=refill)
    filled = [[0, 1, 2], [3, 4, 7], [8, 9, 10], [11]]
    assert given(loader) == (filled if refill else [[0, 1, 2], [3, 4], [7, 8], [9, 10, 11]])
    assert bad_ids(loader) == (["0:5", "0:6"] if workers else ["5", "6"])


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("refill", [False, True])
def test_a_generator_that_raised_is_finished_and_says_so(workers, refill):
    loader = gg.resilient(DataLoader(Generated(12, {5}), batch_size=3, num_workers=workers), refill=refill)
    assert given(loader) == [[0, 1, 2], [3, 4]]
    (incident,) = loader.incidents
    assert incident.cause == "exception, and the generator is finished"


@pytest.mark.slow
def test_a_stream_shared_by_workers_and_one_set_up_by_worker_init_fn():
    loader = gg.resilient(DataLoader(Sharded(4, {1}), batch_size=2, num_workers=2))
    assert sorted(i for batch in given(loader) for i in batch) == [0, 2, 3, 100, 102, 103]
    assert sorted(bad_ids(loader)) == ["0:1", "1:1"]
    loader = gg.resilient(DataLoader(Configured(2), batch_size=2, num_workers=2, worker_init_fn=set_start))
    assert sorted(i for batch in given(loader) for i in batch) == [1000, 1001, 2000, 2001]


@pytest.mark.parametrize("refill", [False, True])
def test_a_stream_without_batches_and_with_drop_last(refill):
    loader = gg.resilient(DataLoader(Stepped(5, {4}), batch_size=None), refill=refill)
    assert [int(sample) for sample in loader] == [0, 1, 2, 3]
    assert bad_ids(loader) == ["4"]
    loader = gg.resilient(DataLoader(Stepped(6, {5}), batch_size=3, drop_last=True), refill=True)
    assert given(loader) == [[0, 1, 2]]
    assert bad_ids(loader) == ["5"]


# --- names, sinks, exceptions --------------------------------------------------------------------------------------


def test_names_and_the_ids_of_the_last_batch():
    loader = gg.resilient(DataLoader(Numbers(4, {1}), batch_size=2), ids=["a", "b", "c", "d"])
    assert [loader.ids for _ in loader] == [("a",), ("c", "d")]
    assert bad_ids(loader) == ["b"]
    named = Numbers(4, {1})
    named.sample_id = lambda index: f"img_{index}.png"
    assert bad_ids(run(gg.resilient(DataLoader(named, batch_size=2)))) == ["img_1.png"]
    assert bad_ids(run(gg.resilient(DataLoader(named, batch_size=2), ids=str))) == ["1"]


def run(loader):
    for _ in loader:
        pass
    return loader


class Heap:
    def __init__(self):
        self.incidents = []

    def record_many(self, incidents, payloads=None):
        self.incidents += incidents


@pytest.mark.slow
@WORKERS
def test_incidents_go_to_a_sink_or_a_ledger_and_to_the_log(workers, tmp_path, caplog):
    heap = Heap()
    loader = run(gg.resilient(DataLoader(Numbers(6, {1, 4}), batch_size=2, num_workers=workers), sink=heap))
    assert heap.incidents == list(loader.incidents)
    path = tmp_path / "run.ledger"
    run(gg.resilient(DataLoader(Numbers(6, {1, 4}), batch_size=2, num_workers=workers), ledger=path))
    assert gg.Ledger(path).bad_ids() == {"1", "4"}
    assert "sample 4 left out while loading: OSError: truncated image (tests/loading/broken.py:" in caplog.text
    assert len(gg.without(Numbers(6), path)) == 4


@WORKERS
def test_a_sink_that_raises_is_warned_of_once_and_the_epoch_goes_on(workers):
    class Full:
        def record_many(self, incidents, payloads=None):
            raise ValueError("no room")

    with pytest.warns(gg.errors.LedgerWarning, match="Full raised ValueError: no room") as said:
        loader = run(gg.resilient(DataLoader(Numbers(6, {1, 4}), batch_size=2, num_workers=workers), sink=Full()))
    assert [each.category for each in said].count(gg.errors.LedgerWarning) == 1  # Python 3.12 warns of forks, too
    assert [one.sample_id for one in loader.incidents] == ["1", "4"]


@pytest.mark.slow
@WORKERS
def test_the_exception_itself_comes_out_of_the_worker(workers):
    dataset = Numbers(4, {1}, BrokenFile("bad header", 7))
    loader = run(gg.resilient(DataLoader(dataset, batch_size=2, num_workers=workers)))
    (incident,) = loader.incidents
    error = loader.exceptions[incident.id]
    assert type(error) is BrokenFile
    assert (error.reason, error.offset) == ("bad header", 7)
    assert incident.exception_type == "tests.loading.broken.BrokenFile"
    assert incident.details["arguments"] == ["'bad header'", "7"]


def test_an_exception_that_cannot_be_pickled_leaves_its_type_and_text():
    dataset = Numbers(4, {1}, Unpicklable("header"))
    loader = run(gg.resilient(DataLoader(dataset, batch_size=2, num_workers=1)))
    (incident,) = loader.incidents
    assert incident.exception_type == "tests.loading.broken.Unpicklable"
    assert incident.message == "unpicklable: header"
    assert loader.exceptions == {}


@pytest.mark.slow
def test_pinning_and_other_settings_pass_through():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # there is nothing to pin for on this machine
        loader = gg.resilient(DataLoader(Numbers(4, {1}), batch_size=2, pin_memory=True, num_workers=1, timeout=60))
        assert given(loader) == [[0], [2, 3]]
    loader = gg.resilient(DataLoader(Numbers(4, {1}), batch_size=2, num_workers=2, prefetch_factor=1, in_order=False))
    assert sorted(i for batch in given(loader) for i in batch) == [0, 2, 3]
    assert loader.prefetch_factor == 1


@pytest.mark.slow
def test_workers_that_are_spawned():
    loader = gg.resilient(
        DataLoader(Numbers(6, {1}), batch_size=2, num_workers=1, multiprocessing_context="spawn"), refill=True
    )
    assert given(loader) == [[0, 2], [3, 4], [5]]


def test_it_looks_like_the_loader():
    plain = DataLoader(Numbers(7, {1}), batch_size=2)
    loader = gg.resilient(plain)
    assert len(loader) == len(plain) == 4
    assert loader.batch_size == 2
    assert loader.dataset is plain.dataset
    assert loader.sampler is plain.sampler
    assert repr(run(loader)) == "<resilient DataLoader: 1 samples left out>"
    with pytest.raises(AttributeError):
        loader._nothing  # noqa: B018
    with pytest.raises(TypeError, match="has no len"):
        len(gg.resilient(DataLoader(Stepped(3))))


def test_two_epochs_at_once():
    loader = gg.resilient(DataLoader(Numbers(6, {1}), batch_size=2), refill=True)
    assert [(a.tolist(), b.tolist()) for a, b in zip(loader, loader, strict=True)] == [
        ([0, 2], [0, 2]),
        ([3, 4], [3, 4]),
        ([5], [5]),
    ]


def test_a_stock_batch_sampler_given_by_hand_and_a_random_one():
    batches = BatchSampler(SequentialSampler(range(7)), 3, drop_last=False)
    assert given(gg.resilient(DataLoader(Numbers(7, {0}), batch_sampler=batches), refill=True)) == [
        [1, 2, 3],
        [4, 5, 6],
    ]
    sampler = RandomSampler(range(7), replacement=True, num_samples=20)
    loader = gg.resilient(DataLoader(Numbers(7, {0}), sampler=sampler, batch_size=4), refill=True)
    sizes = [len(batch) for batch in given(loader)]
    assert all(size == 4 for size in sizes[:-1])
    assert sum(sizes) + len(loader.incidents) == 20


def test_a_marker_can_be_pickled():
    bad = gg.resilient(Numbers(2, {1}))[1]
    again = pickle.loads(pickle.dumps(bad))
    assert again.incident == bad.incident
    assert again.index == 1
    assert type(again.exception) is OSError
