"""Exceptions that cannot be printed or written to, and datasets that only load several samples at once."""

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

import gradgate as gg
from tests.loading.broken import Numbers
from tests.odd_exceptions import Mute, Sealed


class Unspeakable:
    def __repr__(self):
        raise KeyError("text")


ERRORS = [Mute(), Sealed(), ValueError(Unspeakable())]


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("error", ERRORS)
def test_an_exception_that_cannot_be_printed_or_written_to_costs_one_sample(error, workers):
    loader = gg.resilient(DataLoader(Numbers(4, {2}, error), batch_size=4, num_workers=workers))
    assert [batch.tolist() for batch in loader] == [[0, 1, 3]]
    (incident,) = loader.incidents
    assert incident.exception_type.endswith(type(error).__name__)
    if type(error) is not Sealed:
        assert incident.message.endswith(f"{type(error).__name__} without a readable text")


@pytest.mark.parametrize("error", ERRORS)
def test_it_is_raised_as_it_is_where_every_sample_fails(error):
    with pytest.raises(type(error)) as caught:
        next(iter(gg.resilient(DataLoader(Numbers(4, range(4), error), batch_size=4))))
    assert "none of the 4 samples could be loaded" in str(caught.value.__cause__)


def labelled(bad=()):
    return [{"x": torch.tensor(float(n)), "label": "bad" if n in bad else n} for n in range(4)]


def taking_labels_out(samples):
    labels = [sample.pop("label") for sample in samples]
    return torch.stack([sample["x"] for sample in samples]), torch.tensor(labels)


def test_a_collation_that_takes_something_out_of_its_samples_is_tried_with_what_was_loaded():
    loader = gg.resilient(DataLoader(labelled({2}), batch_size=4, collate_fn=taking_labels_out))
    assert [[part.tolist() for part in batch] for batch in loader] == [[[0.0, 1.0, 3.0], [0, 1, 3]]]
    assert [incident.sample_id for incident in loader.incidents] == ["2"]


def writing(samples):
    for sample in samples:
        sample.add_(100)
    if any(sample == 102 for sample in samples):
        raise ValueError("102")
    return torch.stack(samples)


def test_a_collation_that_writes_into_its_samples_cannot_be_tried_again():
    """The second try would add 100 once more, and nobody would know."""
    loader = gg.resilient(DataLoader(Numbers(4), batch_size=4, collate_fn=writing))
    with pytest.raises(ValueError, match="102") as caught:
        next(iter(loader))
    assert "the collation wrote into the tensors of its samples" in str(caught.value.__cause__)


class OnlyTogether(Dataset):
    def __len__(self):
        return 8

    def __getitems__(self, indices):
        if 5 in indices:
            raise OSError("truncated")
        return [torch.tensor(index) for index in indices]


def test_a_dataset_that_only_loads_several_blames_only_the_bad_one():
    loader = gg.resilient(DataLoader(OnlyTogether(), batch_size=4))
    assert [batch.tolist() for batch in loader] == [[0, 1, 2, 3], [4, 6, 7]]
    assert [(incident.sample_id, incident.message) for incident in loader.incidents] == [("5", "truncated")]
