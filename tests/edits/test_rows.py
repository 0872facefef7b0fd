"""Whole rows by one index tensor: the short way gives what the long one gives, and leaves all else to it."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import gradgate as gg
from gradgate import _kernels
from gradgate.edits import _scatter
from gradgate.errors import ArgumentIndexError
from tests import witness
from tests.edits import oracle


def index_tensors(size, low):
    return st.lists(st.integers(low, size - 1), max_size=6).map(lambda i: torch.tensor(i, dtype=torch.int64))


@given(index_tensors(4, -4), st.sampled_from([(), (3,), (2, 0), (2, 2)]))
def test_rows_are_those_of_the_oracle_whichever_way_they_go(index, block):
    x, rows = torch.randn(4, *block), torch.randn(len(index), *block)
    expected = oracle.edit(x, (index,), "set", rows)
    assert torch.equal(gg.at(x)[index].set(rows), expected)
    short = _scatter.with_rows(x, index, rows, unique=False)
    once = len({i % 4 for i in index.tolist()}) == len(index)
    assert (short is not None) == (once and _kernels.library is not None)
    assert short is None or torch.equal(short, expected)


def test_the_short_way_keeps_every_promise():
    index = torch.tensor([2, -3])
    witness.witness(
        lambda x, v: gg.at(x)[index].set(v),
        lambda x, v: oracle.edit(x, (index,), "set", v),
        torch.rand(3, 2),
        torch.rand(2, 2),
        promises=witness.ALL,
        empty=(torch.zeros(3, 0), torch.zeros(2, 0)),
    )


@pytest.mark.parametrize(
    ("x", "index", "rows"),
    [
        (torch.ones(3, 2), [0], torch.ones(1, 2)),
        (torch.ones(3, 2), torch.tensor([0]), 1.0),
        (torch.ones(3, 2), torch.tensor([0], dtype=torch.int32), torch.ones(1, 2)),
        (torch.ones(3, 2), torch.tensor(0), torch.ones(2)),
        (torch.ones(3, 2), torch.tensor([0]), torch.ones(2)),
        (torch.ones(3, 2), torch.tensor([0]), torch.ones(1, 2, dtype=torch.float64)),
        (torch.ones(3, 2), torch.tensor([3]), torch.ones(1, 2)),
        (torch.ones(0, 2), torch.tensor([-1]), torch.ones(1, 2)),
        (torch.ones(()), torch.tensor([0]), torch.ones(1)),
    ],
    ids=["list", "number", "int32", "0-dim", "broadcast", "dtype", "out of range", "no rows", "no dimension"],
)
def test_what_needs_a_closer_look_goes_the_long_way(x, index, rows):
    assert _scatter.with_rows(x, index, rows, unique=False) is None


def test_an_index_that_is_out_of_range_is_named():
    with pytest.raises(ArgumentIndexError, match="index 3 is out of range for dimension 0 of size 3"):
        gg.at(torch.ones(3, 2))[torch.tensor([0, 3])].set(torch.ones(2, 2))
    with pytest.raises(ArgumentIndexError, match="index -4 is out of range for dimension 0 of size 3"):
        gg.at(torch.ones(3, 2))[torch.tensor([0, -4])].set(torch.ones(2, 2), unique_indices=True)
