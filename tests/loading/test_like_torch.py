"""Healthy loaders behave under `resilient` as they are: the families of torch's own tests of its DataLoader."""

import multiprocessing
import os
import random
import time
import warnings
from collections import namedtuple

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    ChainDataset,
    ConcatDataset,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    get_worker_info,
)
from torch.utils.data.distributed import DistributedSampler

import gradgate as gg

DATA = TensorDataset(torch.arange(22.0).reshape(11, 2), torch.arange(11) % 3)
TRAININGS = pytest.mark.parametrize("refill", [False, True])
Point = namedtuple("Point", "x y")


class Numbers(Dataset):
    """Gives what `make` makes of the index."""

    def __init__(self, size, make):
        self.size, self.make = size, make

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        return self.make(index)


class Counting(IterableDataset):
    def __init__(self, size, start=0):
        self.size, self.start = size, start

    def __len__(self):
        return self.size

    def __iter__(self):
        return iter(range(self.start, self.start + self.size))


class SharedOut(Counting):
    """Each worker gives its own part."""

    def __iter__(self):
        worker = get_worker_info()
        return iter(range(self.size)[worker.id :: worker.num_workers])


def same(one, other):
    """Compare values, types and dtypes all the way down."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return [*one] == [*other] and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other


def check(make, refill=False, epochs=2):
    """Go through the loader and through the resilient one: batches, length, and the random state left behind."""
    outcomes = []
    for wrap in (lambda loader: loader, lambda loader: gg.resilient(loader, refill=refill)):
        torch.manual_seed(7)
        random.seed(7)
        loader = wrap(make())
        batches = [batch for _ in range(epochs) for batch in loader]
        length = len(loader) if hasattr(loader.dataset, "__len__") else None
        outcomes.append(((batches, length), torch.get_rng_state(), random.getstate()))
    assert same(outcomes[0][0], outcomes[1][0])
    assert torch.equal(outcomes[0][1], outcomes[1][1])
    assert outcomes[0][2] == outcomes[1][2]


# --- map-style, in this process ---------------------------------------------------------------------------------------


def seeded():
    return torch.Generator().manual_seed(42)


LOADERS = {
    "one by one": lambda: DataLoader(DATA),
    "batches": lambda: DataLoader(DATA, batch_size=3),
    "drop_last": lambda: DataLoader(DATA, batch_size=3, drop_last=True),
    "larger than the data": lambda: DataLoader(DATA, batch_size=50),
    "without batches": lambda: DataLoader(DATA, batch_size=None),
    "without batches, shuffled": lambda: DataLoader(DATA, batch_size=None, shuffle=True),
    "shuffled": lambda: DataLoader(DATA, batch_size=3, shuffle=True),
    "shuffled by a generator": lambda: DataLoader(DATA, batch_size=3, shuffle=True, generator=seeded()),
    "any iterable as sampler": lambda: DataLoader(DATA, batch_size=2, sampler=range(2, 9)),
    "with replacement": lambda: DataLoader(DATA, batch_size=4, sampler=RandomSampler(DATA, True, num_samples=15)),
    "more than there are": lambda: DataLoader(DATA, batch_size=4, sampler=RandomSampler(DATA, num_samples=25)),
    "subset": lambda: DataLoader(DATA, sampler=SubsetRandomSampler([1, 3, 5], generator=seeded())),
    "weighted": lambda: DataLoader(DATA, batch_size=2, sampler=WeightedRandomSampler([0.1, 0.9, 3.0], 7)),
    "distributed": lambda: DataLoader(DATA, batch_size=2, sampler=DistributedSampler(DATA, 3, 1, seed=5)),
    "batch sampler": lambda: DataLoader(DATA, batch_sampler=BatchSampler(SequentialSampler(DATA), 4, drop_last=True)),
    "tuples of indices": lambda: DataLoader(DATA, batch_sampler=[(0, 1), (2, 3, 4), (5,)]),
    "lists as indices": lambda: DataLoader(DATA, batch_size=None, sampler=BatchSampler(range(11), 4, drop_last=False)),
    "nothing": lambda: DataLoader([]),
    "nothing, in batches": lambda: DataLoader([], batch_size=4, drop_last=True),
    "numbers": lambda: DataLoader([1, 2, 3], batch_size=2),
    "floats": lambda: DataLoader([1.5, 2.5, 3.5], batch_size=2),
    "texts and bytes": lambda: DataLoader([("a", b"x"), ("b", b"y")], batch_size=2),
    "dictionaries": lambda: DataLoader(Numbers(5, lambda i: {"x": torch.ones(2), "n": i, "s": "a"}), batch_size=2),
    "named tuples": lambda: DataLoader(Numbers(5, lambda i: Point(i, [float(i), str(i)])), batch_size=2),
    "own collation": lambda: DataLoader(DATA, batch_size=3, collate_fn=lambda rows: [len(rows), *rows]),
    "own collation of one": lambda: DataLoader([1, 2], batch_size=None, collate_fn=lambda row: {"row": row}),
    "concatenated and cut": lambda: DataLoader(Subset(ConcatDataset([DATA, DATA]), [0, 11, 21]), batch_size=2),
    "random numbers": lambda: DataLoader(Numbers(6, lambda i: (torch.rand(2), random.random())), batch_size=4),
    "stream": lambda: DataLoader(Counting(10), batch_size=4),
    "stream, drop_last": lambda: DataLoader(Counting(10), batch_size=4, drop_last=True),
    "stream without batches": lambda: DataLoader(Counting(4), batch_size=None),
    "streams in a chain": lambda: DataLoader(ChainDataset([Counting(5), Counting(3, 50)]), batch_size=3),
    "stream of nothing": lambda: DataLoader(Counting(0), batch_size=3),
}  # fmt: skip


@TRAININGS
@pytest.mark.parametrize("name", LOADERS)
def test_it_gives_what_the_loader_gives(name, refill):
    check(LOADERS[name], refill)


def test_arrays_and_their_scalars():
    numpy = pytest.importorskip("numpy")
    kinds = ["float64", "float32", "float16", "int64", "int32", "int16", "int8", "uint8"]
    if torch.__version__ >= "2.9":  # 2.8 cannot collate NumPy's bool
        kinds.append("bool")
    for kind in kinds:
        check(lambda kind=kind: DataLoader(Numbers(3, lambda i: getattr(numpy, kind)(1)), batch_size=2), epochs=1)
    check(lambda: DataLoader(Numbers(5, lambda i: numpy.ones((2, 3)) * i), batch_size=2))
    check(lambda: DataLoader(numpy.arange(6.0), batch_size=4))


def test_a_dataset_that_grows():
    data = [torch.ones(2)] * 4
    loaders = [gg.resilient(DataLoader(data, shuffle=shuffle)) for shuffle in (False, True)]
    data.append(torch.ones(2))
    assert [len(loader) for loader in loaders] == [len(list(loader)) for loader in loaders] == [5, 5]


# --- with workers ---------------------------------------------------------------------------------------------------


def where(index):
    worker = get_worker_info()
    return torch.tensor(
        [index, worker.id, worker.num_workers, worker.seed == torch.initial_seed(), random.random() > 2]
    )


WITH_WORKERS = {
    "shuffled, with prefetching": lambda: DataLoader(
        DATA, batch_size=2, shuffle=True, num_workers=2, prefetch_factor=3, generator=seeded()
    ),
    "seeds and worker_info": lambda: DataLoader(Numbers(7, where), batch_size=2, num_workers=2),
    "random numbers": lambda: DataLoader(Numbers(6, lambda i: (torch.rand(2), i)), batch_size=2, num_workers=2),
    "persistent, a shared out stream": lambda: DataLoader(
        SharedOut(9), batch_size=2, num_workers=2, persistent_workers=True
    ),
    "persistent, shuffled, with a timeout": lambda: DataLoader(
        DATA, batch_size=4, shuffle=True, num_workers=1, persistent_workers=True, timeout=300
    ),
    "a batch sampler and named tuples": lambda: DataLoader(
        Numbers(6, lambda i: Point(torch.tensor(i), str(i))), batch_sampler=[[0, 1], [2, 3, 4], [5]], num_workers=2
    ),
    "without batches": lambda: DataLoader(Numbers(4, lambda i: i), batch_size=None, num_workers=1),
    "more workers than batches": lambda: DataLoader(DATA, batch_size=11, num_workers=2),
    "nothing": lambda: DataLoader([], num_workers=1),
    "a context": lambda: DataLoader(
        DATA, batch_size=6, num_workers=1, multiprocessing_context=multiprocessing.get_context("fork")
    ),
}


@pytest.mark.slow
@TRAININGS
@pytest.mark.parametrize("name", WITH_WORKERS)
def test_it_gives_what_the_loader_gives_with_workers(name, refill):
    check(WITH_WORKERS[name], refill, epochs=2 if "persistent" in name else 1)


def fixed_seed(worker_id):
    torch.manual_seed(12345 + worker_id)


@pytest.mark.slow
def test_worker_init_fn_runs_in_each_worker_and_its_errors_are_raised():
    check(lambda: DataLoader(Numbers(4, lambda i: torch.rand(1)), num_workers=2, worker_init_fn=fixed_seed), epochs=1)

    def fails(worker_id):
        raise RuntimeError("cannot open the shard")

    with pytest.raises(RuntimeError, match="cannot open the shard"):
        list(gg.resilient(DataLoader(DATA, num_workers=1, worker_init_fn=fails)))
    assert get_worker_info() is None


@pytest.mark.slow
def test_without_an_order_the_same_batches_come():
    def slow_first(index):
        time.sleep(0.2 if index == 0 else 0)
        return index

    loader = gg.resilient(DataLoader(Numbers(6, slow_first), batch_size=2, num_workers=2, in_order=False))
    batches = sorted((batch.tolist(), loader.ids) for batch in loader)
    assert batches == [([0, 1], ("0", "1")), ([2, 3], ("2", "3")), ([4, 5], ("4", "5"))]


@pytest.mark.slow
def test_a_worker_that_takes_too_long_is_a_timeout():
    def sleeps(index):
        time.sleep(3)

    with pytest.raises(RuntimeError, match="DataLoader timed out after 1 seconds"):
        next(iter(gg.resilient(DataLoader(Numbers(2, sleeps), num_workers=1, timeout=1))))


def test_a_worker_that_dies_is_raised():
    def dies(index):
        os._exit(3)

    with pytest.raises(RuntimeError, match=r"DataLoader worker \(pid\(?s?\)? \d+\) exited unexpectedly"):
        next(iter(gg.resilient(DataLoader(Numbers(2, dies), num_workers=1))))


@pytest.mark.slow
def test_workers_end_when_the_loop_is_left():
    before = set(multiprocessing.active_children())
    batches = iter(gg.resilient(DataLoader(DATA, num_workers=2)))
    next(batches)
    workers = set(multiprocessing.active_children()) - before
    assert len(workers) == 2
    batches.close()
    del batches
    deadline = time.monotonic() + 60
    while any(worker.is_alive() for worker in workers) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not any(worker.is_alive() for worker in workers)


@pytest.mark.slow
def test_two_loaders_at_once():
    one, two = (iter(gg.resilient(DataLoader(Numbers(4, lambda i: i), num_workers=count))) for count in (1, 2))
    assert [(int(a), int(b)) for a, b in zip(one, two, strict=True)] == [(0, 0), (1, 1), (2, 2), (3, 3)]


# --- settings and warnings ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["batch_size", "batch_sampler", "sampler", "drop_last", "dataset", "persistent_workers"]
)
def test_what_torch_lets_nobody_change_cannot_be_changed(name):
    loader = gg.resilient(DataLoader(DATA, batch_size=2))
    with pytest.raises(ValueError, match=f"{name} attribute should not be set"):
        setattr(loader, name, 4)
    assert len(list(loader)) == 6


def test_what_can_be_changed_counts_from_the_next_epoch_on():
    plain, ours = DataLoader(DATA, batch_size=4), gg.resilient(DataLoader(DATA, batch_size=4))
    for loader in (plain, ours):
        loader.collate_fn = len
        loader.num_workers, loader.prefetch_factor = 1, 2
        loader.worker_init_fn = fixed_seed
        loader.note = "mine"
    assert list(ours) == list(plain) == [4, 4, 3]
    assert (ours.num_workers, ours.note, ours.worker_init_fn) == (1, "mine", fixed_seed)


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
def test_torch_warns_of_a_stream_that_is_longer_than_it_said(workers):
    """With two workers that share nothing out, each gives all of it."""
    data = Counting(3)
    if not workers:
        data.__class__ = type("Longer", (Counting,), {"__iter__": lambda self: iter(range(6))})
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "Length of IterableDataset")
        assert len(list(gg.resilient(DataLoader(data, num_workers=workers)))) == 6  # nobody asked for the length
    loader = gg.resilient(DataLoader(data, num_workers=workers))
    assert len(loader) == 3
    with pytest.warns(UserWarning, match="samples have been fetched") as caught:
        list(loader)
    told = f"Length of IterableDataset {data!r} was reported to be 3(when accessing len(dataloader)), but {{}} samples"
    lengths = [str(warning.message) for warning in caught if "Length of" in str(warning.message)]
    assert [text.startswith(told.format(4 + number)) for number, text in enumerate(lengths)] == [True] * 3


@TRAININGS
def test_the_length_of_a_stream(refill):
    for batch_size, drop_last in ((1, False), (2, True), (3, False), (3, True), (None, False)):
        plain = DataLoader(Counting(10), batch_size=batch_size, drop_last=drop_last)
        assert len(gg.resilient(plain, refill=refill)) == len(plain) == len(list(gg.resilient(plain, refill=refill)))


@pytest.mark.slow
def test_pinning_passes_through():
    for workers in (0, 1):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # there may be nothing to pin for on this machine
            check(
                lambda workers=workers: DataLoader(DATA, batch_size=4, pin_memory=True, num_workers=workers), epochs=1
            )


# --- what a worker cannot send --------------------------------------------------------------------------------------


def with_a_function(index):
    return torch.tensor(index), (lambda: index) if index in (3, 4) else None


def as_they_are(samples):
    return samples


def test_a_sample_that_a_worker_cannot_send_is_named_and_nobody_waits():
    loader = gg.resilient(DataLoader(Numbers(8, with_a_function), batch_size=4, num_workers=1, collate_fn=as_they_are))
    assert [[int(number) for number, _ in batch] for batch in loader] == [[0, 1, 2], [5, 6, 7]]
    assert [(incident.sample_id, incident.cause) for incident in loader.incidents] == [
        ("3", "collate"),
        ("4", "collate"),
    ]
    assert "a worker cannot send the collated sample: " in loader.incidents[0].message
    here = gg.resilient(DataLoader(Numbers(8, with_a_function), batch_size=4, collate_fn=as_they_are))
    assert [len(batch) for batch in here] == [4, 4]  # nothing is sent


def test_where_no_sample_can_be_sent_it_is_raised():
    def all_functions(samples):
        return [lambda: 1 for _ in samples]

    loader = DataLoader(Numbers(2, lambda i: i), batch_size=2, num_workers=1, collate_fn=all_functions)
    with pytest.raises(Exception, match="a worker cannot send the collated sample") as caught:
        list(gg.resilient(loader))
    assert "The first: sample 0, " in str(caught.value.__cause__)
    with pytest.raises(Exception, match="samples 0, 1: a worker cannot send the collated sample"):
        list(gg.resilient(loader, catch=OSError))


def test_a_result_of_autograd_cannot_be_sent_either():
    weight = torch.ones(1, requires_grad=True)
    loader = gg.resilient(DataLoader(Numbers(4, lambda i: weight * i if i == 2 else torch.ones(1)), num_workers=1))
    assert len(list(loader)) == 3
    assert [incident.sample_id for incident in loader.incidents] == ["2"]


# --- nothing to load ------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 1])
def test_an_empty_loader_can_be_refilled(workers):
    for loader in (DataLoader([], num_workers=workers), DataLoader(DATA, batch_sampler=[], num_workers=workers)):
        ours = gg.resilient(loader, refill=True)
        assert (list(ours), list(ours), len(ours), ours.incidents) == ([], [], 0, ())
