"""Loaders and samplers that go on in mid-epoch: the rest of the epoch is what it would have been."""

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, RandomSampler, SequentialSampler

import gradgate as gg
from tests.loading.broken import Batched, Generated, Numbers, Stepped

SIZE = 23
BAD = {2, 9, 10, 15}


def shuffled(dataset, **more):
    return DataLoader(dataset, batch_size=3, shuffle=True, **more)


def seeded(dataset, **more):
    return DataLoader(dataset, batch_size=3, shuffle=True, generator=torch.Generator().manual_seed(5), **more)


def own_batches(dataset, **more):
    sampler = RandomSampler(dataset, generator=torch.Generator().manual_seed(5))
    return DataLoader(dataset, batch_sampler=BatchSampler(sampler, 4, drop_last=False), **more)


def single(dataset, **more):
    return DataLoader(dataset, batch_size=None, shuffle=True, **more)


def rest_of(epoch):
    return [batch.tolist() for batch in epoch]


def saved(state, tmp_path):
    torch.save(state, tmp_path / "state")
    return torch.load(tmp_path / "state", weights_only=True)


@pytest.mark.parametrize("stop", [0, 1, 4])
@pytest.mark.parametrize("refill", [False, True])
@pytest.mark.parametrize("make", [shuffled, seeded, own_batches, single])
@pytest.mark.parametrize("dataset", [Numbers, Batched])
def test_the_rest_of_an_epoch_and_the_epochs_after_it(make, refill, stop, dataset, tmp_path):
    def loader():
        return gg.resilient(make(dataset(SIZE, BAD)), refill=refill)

    torch.manual_seed(0)
    first = loader()
    rest_of(first)
    epoch = iter(first)
    had = [next(epoch) for _ in range(stop)]
    state, chance = saved(first.state_dict(), tmp_path), torch.get_rng_state()
    rest, next_chance = rest_of(epoch), torch.get_rng_state()
    after = rest_of(first)
    assert len(had) == stop

    torch.manual_seed(99)
    again = loader()
    again.load_state_dict(state)
    if stop:  # before the first batch nothing is drawn in the main process
        torch.set_rng_state(chance)
        assert rest_of(again) == rest
        torch.set_rng_state(next_chance)
        assert rest_of(again) == after
    else:
        assert rest_of(again) == rest
    assert {one.epoch for one in again.incidents} <= {1, 2}


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "settings", [{}, {"worker_timeout": 60}, {"refill": True}, {"worker_timeout": 60, "refill": True}]
)
def test_with_workers_that_load_ahead(settings, tmp_path):
    def loader():
        return gg.resilient(shuffled(Numbers(SIZE, BAD), num_workers=2), **settings)

    first = loader()
    epoch = iter(first)
    for _ in range(3):
        next(epoch)
    state = saved(first.state_dict(), tmp_path)
    rest = rest_of(epoch)
    again = loader()
    again.load_state_dict(state)
    assert rest_of(again) == rest


def test_resumed_twice_and_at_the_end_of_an_epoch(tmp_path):
    def loader():
        return gg.resilient(seeded(Numbers(SIZE, BAD)))

    first = loader()
    batches = rest_of(first)
    second = rest_of(first)
    a = loader()
    epoch = iter(a)
    for _ in range(2):
        next(epoch)
    b = loader()
    b.load_state_dict(a.state_dict())
    epoch = iter(b)
    for _ in range(2):
        next(epoch)
    c = loader()
    c.load_state_dict(b.state_dict())
    assert rest_of(c) == batches[4:]
    d = loader()
    d.load_state_dict(c.state_dict())
    assert rest_of(d) == second


@pytest.mark.parametrize("stream", [Generated, Stepped])
def test_a_stream_is_read_again_and_passed_over(stream):
    loader = gg.resilient(DataLoader(stream(12, {7}), batch_size=3))
    epoch = iter(loader)
    next(epoch)
    state, rest = loader.state_dict(), rest_of(epoch)
    again = gg.resilient(DataLoader(stream(12, {7}), batch_size=3))
    again.load_state_dict(state)
    assert rest_of(again) == rest


@pytest.mark.parametrize("kind", ["random", "ranks", "batches"])
def test_a_quarantine_is_the_one_of_its_epoch(kind, tmp_path):
    ledger = gg.Ledger(tmp_path / "run.ledger")
    ledger.record(gg.Incident(stage="load", cause="exception", sample_id="3"))

    def sampler():
        inner = {
            "random": lambda: RandomSampler(range(SIZE)),
            "ranks": lambda: DistributedSampler(range(SIZE), 2, 1),
            "batches": lambda: BatchSampler(RandomSampler(range(SIZE)), 4, drop_last=True),
        }[kind]()
        return gg.QuarantineSampler(inner, ledger)

    first = sampler()
    order = iter(first)
    for _ in range(4):
        next(order)
    state = saved(first.state_dict(), tmp_path)
    ledger.record(gg.Incident(stage="load", cause="exception", sample_id="8"))
    rest = list(order)
    again = sampler()
    again.load_state_dict(state)
    chance = torch.get_rng_state()
    assert list(again) == rest
    assert torch.equal(torch.get_rng_state(), chance)
    assert "8" not in map(str, again)  # the next epoch asks the ledger


def test_a_loader_with_a_quarantine(tmp_path):
    ledger = gg.Ledger(tmp_path / "run.ledger")
    ledger.record(gg.Incident(stage="load", cause="exception", sample_id="3"))

    def loader():
        sampler = gg.QuarantineSampler(RandomSampler(range(SIZE)), ledger)
        return gg.resilient(DataLoader(Numbers(SIZE), batch_size=3, sampler=sampler))

    first = loader()
    epoch = iter(first)
    next(epoch)
    state = saved(first.state_dict(), tmp_path)
    rest = rest_of(epoch)
    ledger.record(gg.Incident(stage="load", cause="exception", sample_id=str(rest[-1][0])))
    again = loader()
    again.load_state_dict(state)
    assert rest_of(again) == rest


@pytest.mark.filterwarnings("ignore")  # it calls what torch has deprecated
def test_the_stateful_loader_of_torchdata(tmp_path):
    """It carries the state of a quarantine in its own, and its batches can be made resilient."""
    stateful = pytest.importorskip("torchdata.stateful_dataloader")
    ledger = gg.Ledger(tmp_path / "run.ledger")
    ledger.record(gg.Incident(stage="load", cause="exception", sample_id="3"))

    def loader():
        sampler = gg.QuarantineSampler(RandomSampler(range(SIZE)), ledger)
        return stateful.StatefulDataLoader(Numbers(SIZE), batch_size=3, sampler=sampler)

    for wrap in (lambda loader: loader, gg.resilient):
        first = wrap(loader())
        epoch = iter(first)
        next(epoch)
        state, rest = first.state_dict(), rest_of(epoch)
        again = wrap(loader())
        again.load_state_dict(state)
        assert rest_of(again) == rest


class Stateful(DataLoader):
    """A loader that has an __iter__ for the sake of its state, as torchdata's has."""

    def __iter__(self):
        return super().__iter__()

    def state_dict(self):
        return {}


def test_a_loader_with_a_state_of_its_own_is_replaced():
    assert rest_of(gg.resilient(Stateful(Numbers(4, {1}), batch_size=2))) == [[0], [2, 3]]
    dataset = Numbers(4)
    dataset.state_dict = dict
    with pytest.raises(TypeError, match="has an __iter__ of its own"):
        gg.resilient(Stateful(dataset))


def test_what_cannot_be_resumed_is_refused():
    loader = gg.resilient(DataLoader(Numbers(4), num_workers=1, in_order=False))
    with pytest.raises(ValueError, match=r"in_order=False\.\nWhy: the batches that were given so far"):
        loader.state_dict()
    loader = gg.resilient(DataLoader(Numbers(4), sampler=SequentialSampler(range(4))))
    with pytest.raises(ValueError, match="the entries"):
        loader.load_state_dict({"step": 3})
