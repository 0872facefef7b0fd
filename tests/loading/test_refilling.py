"""The order of requests, without any loader: whatever is prefetched, batches are those of the good samples in order."""

from collections import deque
from itertools import count, islice

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, DataLoader

import gradgate as gg
from gradgate.loading._refilling import Asking


def deliver(batches, bad, prefetch):
    """Play the loader: some requests are under way, and the next is sent before the answer to one is read."""
    refilling = Asking(batches, refill=True)
    delivered = []
    requests = None
    restarts = 0
    while requests is None or requests.more():
        flight = deque()
        sender, requests = refilling.begin(refilling, requests)

        def send(flight=flight, sender=sender):
            asked = next(sender, None)
            if asked is not None:
                flight.append(asked)

        for _ in range(prefetch):
            send()
        while flight:
            indices = flight.popleft()
            send()
            rows = [row for row, index in enumerate(indices) if index in bad]
            asked = requests.received()
            requests.mark_bad(asked, rows)
            good = [index for index in indices if index not in bad]
            if requests.settles(asked, bool(rows)) and good:
                delivered.append(good)
        restarts += 1
        assert restarts < 50
    return delivered


@given(
    size=st.integers(0, 25),
    batch=st.integers(1, 5),
    bad=st.sets(st.integers(0, 25)),
    prefetch=st.integers(1, 6),
    drop_last=st.booleans(),
)
def test_batches_are_those_of_the_good_samples(size, batch, bad, prefetch, drop_last):
    good = [index for index in range(size) if index not in bad]
    expected = [good[start : start + batch] for start in range(0, len(good), batch)]
    if drop_last:
        expected = [one for one in expected if len(one) == batch]
    given_out = deliver(BatchSampler(range(size), batch, drop_last), bad, prefetch)
    assert [one for one in given_out if len(one) == batch or not drop_last] == expected


@given(sizes=st.lists(st.integers(1, 4), max_size=8), bad=st.sets(st.integers(0, 20)), prefetch=st.integers(1, 6))
def test_batches_of_different_sizes_keep_them(sizes, bad, prefetch):
    batches, start = [], 0
    for size in sizes:
        batches.append(list(range(start, start + size)))
        start += size
    good = [index for index in range(start) if index not in bad]
    expected = []
    for size in sizes:
        expected += [good[:size]] if good else []
        good = good[size:]
    assert deliver(batches, bad, prefetch) == expected


class Endless:
    def __iter__(self):
        return count()


@pytest.mark.parametrize(("refill", "in_order"), [(True, True), (False, True), (False, False)])
def test_what_was_given_is_forgotten(refill, in_order):
    """The order of an epoch may be without end."""
    samples = dict.fromkeys(range(9_000), 1.0)
    del samples[500]
    loader = gg.resilient(DataLoader(samples, sampler=Endless(), batch_size=4, in_order=in_order), refill=refill)
    assert sum(map(len, islice(loader, 1_000))) == 4_000 - (not refill)
    assert len(loader._asking.requests.indices) < 10
