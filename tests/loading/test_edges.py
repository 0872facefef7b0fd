"""The edges of a resilient loader: odd datasets, loops left early, and the limits that LIMITATIONS.md states."""

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader

import gradgate as gg
from gradgate.errors import ArgumentValueError
from tests.loading.broken import Numbers


def given(loader):
    return [batch.tolist() for batch in loader]


class Fewer(Numbers):
    """Leaves bad samples out itself when it loads whole batches."""

    def __getitems__(self, indices):
        return [self[index] for index in indices if index not in self.bad]


@pytest.mark.parametrize("refill", [False, True])
def test_a_dataset_that_gives_fewer_samples_than_asked(refill):
    loader = gg.resilient(DataLoader(Fewer(6, {1}), batch_size=2), refill=refill)
    assert given(loader) == [[0], [2, 3], [4, 5]]
    assert loader.incidents == ()


def test_a_loop_that_is_left_early_begins_anew():
    loader = gg.resilient(
        DataLoader(Numbers(6, {1}), batch_size=2, num_workers=1, persistent_workers=True), refill=True
    )
    for _ in range(3):
        for batch in loader:
            assert batch.tolist() == [0, 2]
            break


# --- limits --------------------------------------------------------------------------------------------------------


class Whole(Numbers):
    def __getitem__(self, indices):
        return torch.stack([super(Whole, self).__getitem__(index) for index in indices])


def test_a_list_that_is_loaded_as_a_whole_is_one_sample():
    batches = BatchSampler(range(6), 2, drop_last=False)
    loader = gg.resilient(DataLoader(Whole(6, {3}), batch_size=None, sampler=batches))
    assert given(loader) == [[0, 1], [4, 5]]
    assert [incident.sample_id for incident in loader.incidents] == ["[2, 3]"]


class Counted(Numbers):
    def __init__(self, *args):
        super().__init__(*args)
        self.loads = torch.zeros(self.size, dtype=torch.int64).share_memory_()

    def __getitem__(self, index):
        self.loads[index] += 1
        return super().__getitem__(index)


@pytest.mark.slow
def test_refill_loads_again_what_was_prefetched():
    dataset = Counted(12, {1})
    loader = DataLoader(dataset, batch_size=3, num_workers=1, prefetch_factor=2)
    assert given(gg.resilient(loader, refill=True, retries=0))[0] == [0, 2, 3]
    assert dataset.loads[0] == 2
    assert dataset.loads.max() == 2
    assert dataset.loads[-1] == 1
    dataset = Counted(12, {1})
    given(gg.resilient(DataLoader(dataset, batch_size=3, num_workers=1), retries=0))
    assert dataset.loads.tolist() == [1] * 12


def test_a_rank_may_have_a_batch_less():
    ranks = [gg.resilient(DataLoader(Numbers(8, {0, 2}), batch_size=2, sampler=range(rank, 8, 2))) for rank in range(2)]
    assert [len(given(loader)) for loader in ranks] == [1, 2]


def test_too_few_names_are_refused_at_once():
    """Not at the first bad sample, hours later."""
    with pytest.raises(ArgumentValueError, match=r"resilient\(\): there are 1 names in `ids`, but 6 samples\."):
        gg.resilient(DataLoader(range(6)), ids=["a"])
    with pytest.raises(ArgumentValueError, match="but 6 samples"):
        gg.resilient(range(6), ids=["a"])
    gg.resilient(DataLoader({0: 1.0, 3: 2.0}, sampler=range(4)), ids=list("abcd"))  # its length is not its last index
