"""Whole rows by one index tensor."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import gradgate as gg
from gradgate.errors import ArgumentIndexError
from tests import witness
from tests.edits import oracle


def index_tensors(size, low):
    return st.lists(st.integers(low, size - 1), max_size=6).map(lambda i: torch.tensor(i, dtype=torch.int64))


@given(index_tensors(4, -4), st.sampled_from([(), (3,), (2, 0), (2, 2)]))
def test_rows_are_those_of_the_oracle(index, block):
    x, rows = torch.randn(4, *block), torch.randn(len(index), *block)
    expected = oracle.edit(x, (index,), "set", rows)
    assert torch.equal(gg.at(x)[index].set(rows), expected)


@pytest.mark.slow
def test_rows_keep_every_promise():
    index = torch.tensor([2, -3])
    witness.witness(
        lambda x, v: gg.at(x)[index].set(v),
        lambda x, v: oracle.edit(x, (index,), "set", v),
        torch.rand(3, 2),
        torch.rand(2, 2),
        promises=witness.ALL,
        empty=(torch.zeros(3, 0), torch.zeros(2, 0)),
    )


def test_an_index_that_is_out_of_range_is_named():
    with pytest.raises(ArgumentIndexError, match="index 3 is out of range for dimension 0 of size 3"):
        gg.at(torch.ones(3, 2))[torch.tensor([0, 3])].set(torch.ones(2, 2))
    with pytest.raises(ArgumentIndexError, match="index -4 is out of range for dimension 0 of size 3"):
        gg.at(torch.ones(3, 2))[torch.tensor([0, -4])].set(torch.ones(2, 2), unique_indices=True)
