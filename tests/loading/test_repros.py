"""Problems that users reported, in our own words, with the end that they should have had."""

import pytest
import torch
from torch.utils.data import DataLoader, default_collate

import gradgate as gg
from tests.loading.broken import BrokenFile, Generated, Nothing, Numbers, Stepped

WORKERS = pytest.mark.parametrize("workers", [0, 2])


@pytest.mark.slow
@WORKERS
def test_42_one_bad_sample_of_twelve(workers):
    with pytest.raises(OSError, match="truncated image"):
        list(DataLoader(Numbers(12, {5}), batch_size=3, num_workers=workers))
    loader = gg.resilient(DataLoader(Numbers(12, {5}), batch_size=3, num_workers=workers))
    seen = [index for batch in loader for index in batch.tolist()]
    assert seen == [0, 1, 2, 3, 4, 6, 7, 8, 9, 10, 11]
    (incident,) = loader.incidents
    assert incident.sample_id == "5"
    assert "OSError: truncated image" in incident.details["traceback"]


def drop_none(samples):
    """The recipe of the forums; it fails when nothing is left."""
    return default_collate([sample for sample in samples if sample is not None])


@pytest.mark.slow
@WORKERS
def test_43_none_in_the_batch_and_a_batch_of_nothing_else(workers):
    for collation in (default_collate, drop_none):
        loader = gg.resilient(
            DataLoader(Nothing(6, {0, 1, 2}), batch_size=3, collate_fn=collation, num_workers=workers)
        )
        assert [batch.tolist() for batch in loader] == [[3, 4, 5]]
        assert loader.skipped == 1
        assert [incident.sample_id for incident in loader.incidents] == ["0", "1", "2"]


def test_44_an_exception_class_that_needs_arguments():
    dataset = Numbers(2, {0, 1}, BrokenFile("broken file", 0))
    with pytest.raises(BrokenFile) as caught:  # every sample fails, so it is raised
        list(gg.resilient(DataLoader(dataset, num_workers=1)))
    assert (caught.value.reason, caught.value.offset) == ("broken file", 0)
    loader = gg.resilient(DataLoader(Numbers(3, {1}, BrokenFile("broken file", 1)), num_workers=1))
    assert len(list(loader)) == 2
    assert loader.exceptions[loader.incidents[0].id].offset == 1


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 1])
def test_68_the_neighbours_of_a_bad_sample(workers):
    good = [0, 1, 2, 3, 4, 6, 7, 8, 9, 10, 11]
    for dataset in (Numbers(12, {5}), Stepped(12, {5})):
        for refill in (False, True):
            loader = gg.resilient(DataLoader(dataset, batch_size=3, num_workers=workers), refill=refill)
            assert [index for batch in loader for index in batch.tolist()] == good
    loader = gg.resilient(DataLoader(Generated(12, {5}), batch_size=3, num_workers=workers))
    assert torch.cat(list(loader)).tolist() == [0, 1, 2, 3, 4]
    assert "the generator is finished" in loader.incidents[0].cause
