"""Known-bad samples are left out: in the next run, in the next epoch, on every rank."""

import os
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)
from torch.utils.data.distributed import DistributedSampler

import gradgate as gg
from gradgate.errors import ArgumentTypeError, ArgumentValueError, LedgerError, LedgerWarning
from gradgate.ledger import Ledger
from gradgate.records import Incident

LETTERS = "abcdefgh"


def bad(*samples, **more):
    return [Incident(stage="load", cause="exception", sample_id=str(sample), **more) for sample in samples]


@pytest.fixture
def ledger(tmp_path):
    with Ledger(tmp_path / "run.ledger", run="night") as opened:
        opened.record_many(bad(1, 4))
        yield opened


def test_names_in_a_tensor_or_an_array_are_those_of_the_ledger(ledger):
    """The ledger writes 4 for tensor(4)."""
    for ids in (torch.arange(8), torch.arange(8).numpy(), lambda index: torch.tensor(index)):
        assert list(gg.without(LETTERS, ledger, ids=ids).indices) == [0, 2, 3, 5, 6, 7]
        loader = gg.resilient(torch.utils.data.DataLoader(LETTERS, batch_size=8), ids=ids)
        next(iter(loader))
        assert loader.ids == tuple("01234567")


# --- without -------------------------------------------------------------------------------------------------------


def test_known_bad_samples_are_not_in_the_dataset(ledger):
    kept = gg.without(list(LETTERS), ledger)
    assert list(kept) == list("acdfgh")
    assert isinstance(kept, Subset)
    assert kept.indices == [0, 2, 3, 5, 6, 7]
    assert kept.sample_id(1) == "2"  # The name that belongs in the ledger, not the new place.


def test_it_holds_after_a_resume_and_by_path(ledger):
    ledger.close()
    assert list(gg.without(list(LETTERS), str(ledger.path))) == list("acdfgh")


def test_a_ledger_that_is_not_there_yet_knows_nothing(tmp_path):
    assert len(gg.without(list(LETTERS), tmp_path / "new.ledger")) == 8
    assert not (tmp_path / "new.ledger").exists()


def test_what_is_no_ledger_is_an_error(tmp_path):
    (tmp_path / "notes.txt").write_text("my notes " * 100)
    with pytest.raises(LedgerError, match="not even an SQLite file"):
        gg.without(list(LETTERS), tmp_path / "notes.txt")


@pytest.mark.parametrize("ids", [[f"img_{n}.png" for n in range(8)], lambda index: f"img_{index}.png"])
def test_names_of_the_samples(ledger, ids):
    ledger.record_many(bad("img_0.png"))
    kept = gg.without(list(LETTERS), ledger, ids=ids)
    assert list(kept) == list("bcdefgh")
    assert kept.sample_id(0) == "img_1.png"


def test_twice_without_is_without_both(ledger, tmp_path):
    """The second ledger speaks of the same names as the first, not of places in what the first left over."""
    with Ledger(tmp_path / "other.ledger") as other:
        other.record_many(bad(2))
        kept = gg.without(gg.without(list(LETTERS), ledger), other)
    assert list(kept) == list("adfgh")
    assert kept.sample_id(1) == "3"


def test_only_what_failed_often_enough_for_the_cause(ledger):
    ledger.record_many(bad(4))
    assert list(gg.without(list(LETTERS), ledger, min_count=2)) == list("abcdfgh")
    assert list(gg.without(list(LETTERS), ledger, cause="non-finite loss")) == list(LETTERS)


def test_a_released_sample_is_back(ledger):
    ledger.release(1)
    assert list(gg.without(list(LETTERS), ledger)) == list("abcdfgh")


@pytest.mark.slow
def test_it_goes_through_a_loader_with_workers(ledger):
    data = TensorDataset(torch.arange(8))
    loader = DataLoader(gg.without(data, ledger), batch_size=2, num_workers=2)
    assert torch.cat([batch for (batch,) in loader]).tolist() == [0, 2, 3, 5, 6, 7]


def test_a_stream_has_no_indexes(ledger):
    class Stream(IterableDataset):
        def __iter__(self):
            return iter(LETTERS)

    with pytest.raises(ArgumentTypeError, match=r"a stream has none(.|\n)*bad = ledger.bad_ids\(\)"):
        gg.without(Stream(), ledger)


def test_each_sample_has_one_name(ledger):
    with pytest.raises(ArgumentValueError, match="there are 2 names in `ids`, but 8 samples"):
        gg.without(list(LETTERS), ledger, ids=["a", "b"])


# --- the sampler ---------------------------------------------------------------------------------------------------


def test_the_ledger_is_asked_at_every_epoch(ledger):
    sampler = gg.QuarantineSampler(SequentialSampler(range(8)), ledger)
    loader = DataLoader(list(range(8)), sampler=sampler, batch_size=3)
    assert (len(sampler), len(loader)) == (6, 2)
    assert torch.cat(list(loader)).tolist() == [0, 2, 3, 5, 6, 7]
    ledger.record_many(bad(0))
    sampler.set_epoch(1)
    assert torch.cat(list(loader)).tolist() == [2, 3, 5, 6, 7]
    assert len(sampler) == 5
    ledger.release(4)
    assert list(sampler) == [2, 3, 4, 5, 6, 7]
    skipped = {(decision.epoch, decision.sample_id) for decision in ledger.decisions() if decision.kind == "skip"}
    assert skipped == {(0, "1"), (0, "4"), (1, "0"), (1, "1"), (1, "4")}


def test_another_chance_is_given_and_written_down(ledger):
    ledger.record_many(bad(6, epoch=0))
    sampler = gg.QuarantineSampler(SequentialSampler(range(8)), ledger.path, retry_after=1)
    seen = []
    for epoch in range(3):
        sampler.set_epoch(epoch)
        seen.append(6 in list(sampler))
    assert seen == [False, False, True]
    assert [(d.sample_id, d.epoch) for d in ledger.decisions() if d.kind == "retry"] == [("6", 2)]


def test_the_order_is_that_of_the_sampler_within(ledger):
    def order(wrap):
        inner = RandomSampler(range(8), generator=torch.Generator().manual_seed(3))
        return list(wrap(inner))

    assert order(lambda inner: gg.QuarantineSampler(inner, ledger)) == [n for n in order(list) if n not in (1, 4)]


@pytest.mark.parametrize(
    ("inner", "length"),
    [
        (SequentialSampler(range(8)), 6),
        (RandomSampler(range(8)), 6),
        (SubsetRandomSampler([0, 1, 2]), 2),
        (RandomSampler(range(8), num_samples=5), 5),
        (RandomSampler(range(8), replacement=True), 8),
        (WeightedRandomSampler([1.0] * 8, 20), 20),
        (BatchSampler(SequentialSampler(range(8)), 3, drop_last=False), 3),
    ],
    ids=["sequential", "random", "subset", "fewer", "replacement", "weighted", "batches"],
)
def test_lengths_are_exact_or_at_most(ledger, inner, length):
    sampler = gg.QuarantineSampler(inner, ledger)
    given_indexes = list(sampler)
    assert len(sampler) == length >= len(given_indexes)
    flat = [index for entry in given_indexes for index in (entry if isinstance(entry, list) else [entry])]
    assert not {1, 4} & set(flat)


def test_batches_are_filtered_and_empty_ones_dropped(ledger):
    batches = BatchSampler(SequentialSampler(range(8)), 2, drop_last=False)
    ledger.record_many(bad(5))
    assert list(gg.QuarantineSampler(batches, ledger)) == [[0], [2, 3], [6, 7]]


def test_a_ledger_that_fails_later_does_not_stop_the_training(ledger):
    sampler = gg.QuarantineSampler(SequentialSampler(range(8)), ledger)
    for file in ledger.path.parent.iterdir():
        file.unlink()
    ledger.path.write_text("my notes " * 1000)
    with pytest.warns(LedgerWarning, match="the quarantine stays as it was"):
        assert list(sampler) == [0, 2, 3, 5, 6, 7]


# --- ranks ---------------------------------------------------------------------------------------------------------


def shares(ledger, samples, ranks, **options):
    """What each rank gets of an epoch."""
    given_indexes = []
    for rank in range(ranks):
        inner = DistributedSampler(range(samples), num_replicas=ranks, rank=rank, **options)
        sampler = gg.QuarantineSampler(inner, ledger)
        sampler.set_epoch(2)
        given_indexes.append(list(sampler))
        assert len(sampler) == len(given_indexes[-1])
    return given_indexes


@given(
    samples=st.integers(1, 12),
    ranks=st.integers(1, 4),
    shuffle=st.booleans(),
    drop_last=st.booleans(),
    wrong=st.sets(st.integers(0, 11), max_size=6),
)
def test_ranks_have_the_same_number_and_share_what_a_distributed_sampler_would(
    tmp_path_factory, samples, ranks, shuffle, drop_last, wrong
):
    """The law: as if the sampler had been made for a dataset that never had the bad ones, in the same order."""
    with Ledger(tmp_path_factory.mktemp("ranks") / "run.ledger") as ledger:
        ledger.record_many(bad(*wrong))
        options = {"shuffle": shuffle, "drop_last": drop_last}
        given_indexes = shares(ledger, samples, ranks, **options)
    whole = DistributedSampler(range(samples), num_replicas=1, rank=0, **options)
    whole.set_epoch(2)
    good = [index for index in whole if index not in wrong]
    fewer = [
        list(DistributedSampler(good, num_replicas=ranks, rank=rank, shuffle=False, drop_last=drop_last))
        for rank in range(ranks)
    ]
    assert given_indexes == [[good[place] for place in places] for places in fewer]
    assert len({len(share) for share in given_indexes}) == 1


def test_nothing_bad_is_what_the_distributed_sampler_gives(tmp_path):
    with Ledger(tmp_path / "run.ledger") as ledger:
        inner = DistributedSampler(range(10), num_replicas=3, rank=1, seed=5)
        inner.set_epoch(4)
        sampler = gg.QuarantineSampler(inner, ledger)
        assert list(sampler) == list(inner)


def test_a_sampler_that_shares_in_its_own_way_is_refused(ledger):
    class Own(DistributedSampler):
        def __iter__(self):
            return iter([0])

    with pytest.raises(ArgumentTypeError, match=r"wait for each other without end(.|\n)*Own\(gg.without\("):
        gg.QuarantineSampler(Own(range(8), num_replicas=2, rank=0), ledger)


def each_rank(rank, folder):
    os.environ.update(MASTER_ADDR="127.0.0.1", GLOO_SOCKET_IFNAME="lo")
    limit = timedelta(seconds=300)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2, timeout=limit)
    ledger = Ledger(f"{folder}/rank{rank}.ledger", run="night")
    ledger.record_many(bad(rank))  # Each rank knows another bad sample, in a file of its own.
    sampler = gg.QuarantineSampler(DistributedSampler(range(8), shuffle=False), ledger)
    if rank == 1:  # And the file of one fails.
        os.remove(ledger.path)
        with open(ledger.path, "w") as file:
            file.write("notes " * 1000)
        with pytest.warns(LedgerWarning):
            share = list(sampler)
    else:
        share = list(sampler)
        assert {decision.sample_id for decision in ledger.decisions()} == {"0", "1"}
    assert share == [[2, 4, 6], [3, 5, 7]][rank]
    dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.distributed
def test_real_ranks_agree_on_what_any_of_them_knows(tmp_path):
    mp.spawn(each_rank, (str(tmp_path),), nprocs=2)
