"""A resilient dataset gives markers, and `gg.collate` leaves them out."""

import copy
import functools
import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Subset, default_collate

import gradgate as gg
from gradgate.loading._fetching import collate_what_fits
from tests.loading.broken import Generated, Numbers, Stepped


def test_a_map_style_dataset():
    dataset = gg.resilient(Numbers(4, {2}))
    assert len(dataset) == 4
    samples = [dataset[index] for index in range(4)]
    assert isinstance(samples[2], gg.loading.BadSample)
    assert (samples[2].index, samples[2].incident.sample_id) == (2, "2")
    assert gg.collate(samples).tolist() == [0, 1, 3]
    assert dataset.incidents == (samples[2].incident,)


@pytest.mark.slow
def test_in_a_plain_loader_with_workers_and_a_ledger(tmp_path):
    """The markers stay in the worker; the ledger does not."""
    path = tmp_path / "run.ledger"
    dataset = gg.resilient(Numbers(6, {1, 4, 5}), ledger=path)
    batches = list(DataLoader(dataset, batch_size=2, collate_fn=gg.collate, num_workers=2))
    assert [None if batch is None else batch.tolist() for batch in batches] == [[0], [2, 3], None]
    assert gg.Ledger(path).bad_ids() == {"1", "4", "5"}


def test_with_a_collation_of_ones_own():
    collate = functools.partial(gg.collate, collate_fn=lambda samples: [int(sample) for sample in samples])
    assert list(DataLoader(gg.resilient(Numbers(4, {0})), batch_size=2, collate_fn=collate)) == [[1], [2, 3]]


def test_streams():
    samples = list(gg.resilient(Stepped(4, {1})))
    assert gg.collate(samples).tolist() == [0, 2, 3]
    stream = gg.resilient(Generated(4, {1}))
    samples = list(stream)
    assert len(samples) == 2
    assert stream.incidents[0].cause == "exception, and the generator is finished"


def test_what_the_dataset_has_it_has_too():
    inner = Numbers(4, {2})
    dataset = gg.resilient(inner)
    assert dataset.bad == {2}
    dataset.size = 9
    assert inner.size == 9
    with pytest.raises(AttributeError):
        dataset.colour  # noqa: B018
    for again in (pickle.loads(pickle.dumps(dataset)), copy.deepcopy(dataset)):
        assert len(again) == 9
        assert isinstance(again[2], gg.loading.BadSample)
    assert len(Subset(dataset, [0, 2])) == 2


def test_a_resilient_dataset_in_a_resilient_loader_says_it_once():
    dataset = gg.resilient(Numbers(4, {2}))
    loader = gg.resilient(DataLoader(dataset, batch_size=2), refill=True)
    assert [batch.tolist() for batch in loader] == [[0, 1], [3]]
    assert [incident.sample_id for incident in loader.incidents] == ["2"]


# --- who is to blame when collation fails --------------------------------------------------------------------------


@given(kinds=st.lists(st.sampled_from("aaaabc-"), min_size=1, max_size=9))
def test_the_largest_party_stays_and_what_fits_nobody_goes(kinds):
    """Samples of kind a, b, c fit their own kind only; "-" fits nobody, not even alone."""
    shapes = {"a": torch.zeros(2), "b": torch.zeros(3), "c": torch.zeros(4), "-": None}
    samples = [shapes[kind] for kind in kinds]
    batch, bad = collate_what_fits(samples, list("abcdefghi"), default_collate, (Exception,))
    kept = [row for row in range(len(kinds)) if row not in bad]
    counts = {kind: kinds.count(kind) for kind in set(kinds) - {"-"}}
    if not counts:
        assert (batch, kept) == (None, [])
        return
    winner = max(counts, key=lambda kind: (counts[kind], -kinds.index(kind)))
    assert kept == [row for row, kind in enumerate(kinds) if kind == winner]
    assert len(batch) == len(kept)
    assert all(marker.index == "abcdefghi"[row] for row, marker in bad.items())
    assert all(marker.incident.message for marker in bad.values())
