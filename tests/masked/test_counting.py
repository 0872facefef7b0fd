"""Eight bytes at a time count what one at a time count."""

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from gradgate import masked
from gradgate.masked._counting import count, count_all


@pytest.mark.parametrize("share", [0.0, 0.7, 1.0])
@pytest.mark.parametrize(
    "shape",
    [
        (1, 8, 1),
        (1, 2040, 1),  # each byte counts to 255
        (1, 2048, 1),
        (1, 300_003, 1),  # one slice may have a rest
        (37, 2400, 1),
        (300, 1000, 1),
        (1, 255, 8),
        (1, 256, 24),
        (7, 513, 40),
        (2, 1, 8),
    ],
)
def test_it_counts_as_torch_does(shape, share):
    mask = torch.rand(shape) < share
    assert torch.equal(count(mask), mask.sum(1))


@pytest.mark.parametrize("offset", range(9))
@pytest.mark.parametrize("n", [0, 1, 7, 2039, 2040, 2041, 4087, 300_003])
def test_one_slice_may_begin_and_end_anywhere(n, offset):
    kept = (torch.rand(offset + n) < 0.7).view(torch.uint8)[offset:]
    found = count_all(kept)
    assert found.dtype is torch.int64
    assert found == kept.long().sum()


@settings(max_examples=60)
@given(st.integers(1, 5), st.integers(1, 600), st.integers(1, 20), st.integers(0, 20), st.booleans())
def test_it_counts_rightly_or_not_at_all(outer, reduced, inner, offset, turned):
    memory = torch.rand(offset + outer * reduced * inner) < 0.8
    mask = memory[offset:].view(outer, reduced, inner)
    mask = mask.transpose(0, 2) if turned else mask
    found = count(mask)
    assert found is None or (found.dtype is torch.int64 and torch.equal(found, mask.sum(1)))


@pytest.mark.parametrize(
    "mask",
    [
        torch.ones(0, 8, 1, dtype=torch.bool),
        torch.ones(2, 0, 8, dtype=torch.bool),
        torch.ones(3, 9, 1, dtype=torch.bool),  # the second slice does not start at a whole word
        torch.ones(2, 16, 8, dtype=torch.bool)[:, ::2],
        torch.ones(49, dtype=torch.bool)[1:].view(2, 24, 1),  # nor does the first
        torch.ones((), dtype=torch.bool).expand(2, 8, 8),
    ],
    ids=["no slices", "empty slices", "a rest in each slice", "steps", "an odd start", "expanded"],
)
def test_what_does_not_lie_in_whole_words_is_left_to_others(mask):
    assert count(mask) is None


@pytest.mark.parametrize(("shape", "dim"), [((700, 400), 1), ((700, 400), 0), ((3, 50_001), 1), ((9, 8, 4000), (0, 1))])
def test_the_room_counts_large_masks(shape, dim):
    keep = torch.rand(shape) < 0.4
    x = torch.zeros(shape)
    for mask in (keep, keep.transpose(0, 1).contiguous().transpose(0, 1)):
        assert torch.equal(masked.count(x, dim, keep=mask), keep.sum(dim))
        assert torch.equal(masked.count(x, dim, keep=mask, keepdim=True), keep.sum(dim, keepdim=True))
    assert masked.count(x, keep=keep) == keep.sum()
    assert torch.equal(masked.count(x, dim, keep=keep[..., :1]), keep[..., :1].expand(shape).sum(dim))
