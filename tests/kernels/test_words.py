"""Native kernels on words: a choice by a mask, checksums, repeated indices, copies, and finiteness, beside torch's."""

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from gradgate import _kernels
from gradgate.freezing._verify import fingerprint
from tests.kernels.test_sums import odd_mask

pytestmark = pytest.mark.skipif(_kernels.library is None, reason="the native kernels are not in force")

DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.complex64, torch.complex128)
SIZES = [(0,), (1,), (7,), (3, 5), (70_001,), (4, 3, 2)]


def spoilt(shape, dtype, seed=0):
    """Random values with NaN, infinities, -0.0 and the smallest numbers, at an odd address."""
    generator = torch.Generator().manual_seed(seed)
    size = torch.Size(shape).numel()
    kind = dtype if dtype.is_floating_point or dtype.is_complex else torch.float32
    x = torch.randn(size + 1, generator=generator).to(kind)
    if dtype.is_floating_point:
        for place, value in enumerate((float("nan"), float("inf"), -float("inf"), -0.0, torch.finfo(dtype).tiny / 2)):
            x[place :: 11 + place] = value
    return x.to(dtype)[1:].view(shape)


def bits(x):
    return x.contiguous().view(torch.uint8) if x.numel() else x


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SIZES, ids=str)
def test_what_is_kept_is_bit_identical_and_the_rest_is_plus_zero(shape, dtype):
    x, mask = spoilt(shape, dtype), odd_mask(shape)
    keep = mask.view(torch.uint8) != 0
    found = _kernels.kept(x, mask)
    assert torch.equal(bits(found), bits(torch.where(keep, x, torch.zeros((), dtype=dtype))))


@pytest.mark.parametrize(
    "mask", [(6, 1, 1), (6, 4, 1), (1, 4, 5), (4, 5), (5,), (1,), (), (1, 1, 1), (6, 1, 5)], ids=str
)
def test_a_mask_that_broadcasts(mask):
    x = spoilt((6, 4, 5), torch.float32)
    keep = torch.rand(mask) < 0.5
    for values in (x, x.transpose(0, 1).contiguous().transpose(0, 1)):
        assert torch.equal(bits(_kernels.kept(values, keep)), bits(torch.where(keep, x, 0.0)))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SIZES, ids=str)
def test_pinned_elements_are_written_and_the_others_are_not_touched(shape, dtype):
    x, frozen, values = spoilt(shape, dtype), odd_mask(shape), spoilt(shape, dtype, seed=1)
    where, version = frozen.view(torch.uint8) != 0, x._version
    for put in (values, None):
        wanted = torch.where(where, torch.zeros((), dtype=dtype) if put is None else put, x)
        _kernels.overwrite(x, frozen, put)
        assert torch.equal(bits(x), bits(wanted))
    assert x._version > version


def test_memory_that_is_shared_copy_on_write_is_not_written_through():
    x = torch.ones(10)
    shared = torch._lazy_clone(x)
    _kernels.overwrite(shared, torch.ones(10, dtype=torch.bool), None)
    assert (x.sum(), shared.sum()) == (10, 0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [0, 1, 31, 32, 33, 1000, 70_001])
def test_checksums_are_those_of_torch(size, dtype, monkeypatch):
    x = spoilt((size,), dtype)
    native = fingerprint(x).sums
    monkeypatch.setattr(_kernels, "library", None)
    assert torch.equal(native, fingerprint(x).sums)


@given(st.lists(st.integers(-1000, 999), max_size=40), st.integers(0, 5))
def test_repeated_indices_are_seen_from_both_ends(places, twice):
    index = torch.tensor(places, dtype=torch.int64)
    assert _kernels.repeats(index, 1000) == (len({place % 1000 for place in places}) != len(places))
    if places:
        same = index[twice % len(index)].reshape(1)
        other = torch.where(same < 0, same + 1000, same - 1000)
        assert _kernels.repeats(torch.cat([index, other]), 1000)
        assert _kernels.repeats(torch.cat([index, same]), 1000)
    for beyond in (1000, -1001, 2**62, -(2**63)):
        assert _kernels.repeats(torch.tensor([0, beyond]), 1000)


def test_an_index_with_gaps_and_a_large_table():
    assert not _kernels.repeats(torch.arange(100)[::3], 2**33)
    assert _kernels.repeats(torch.tensor([2**33 - 1, 5, -1]), 2**33)


FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("place", [0, 1, 65_535, 65_536, 199_999])
def test_one_value_that_is_not_finite_is_seen_anywhere(dtype, value, place):
    tensors = [torch.zeros(0, dtype=dtype), torch.full((200_000,), torch.finfo(dtype).max, dtype=dtype), torch.ones(3)]
    assert _kernels.nonfinite(tensors) is False
    tensors[1][place] = value
    assert _kernels.nonfinite(tensors) is True
    assert _kernels.nonfinite(tensors[:1] + tensors[2:]) is False


@pytest.mark.parametrize(
    "other",
    [
        torch.ones(2, dtype=torch.complex64),
        torch.ones(2, dtype=torch.int64),
        torch.ones(4, 4).t()[:, :2],
        torch.eye(2).to_sparse(),
        torch.ones(2, device="meta"),
    ],
    ids=["complex", "integer", "gaps", "sparse", "meta"],
)
def test_what_the_kernels_cannot_read_is_left_to_torch(other):
    assert _kernels.nonfinite([torch.ones(2), other]) is None


@pytest.mark.parametrize("threads", [1, 2])
def test_threads_give_the_same(threads):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        x, keep = spoilt((3, 400_000), torch.float32), torch.rand(3, 400_000) < 0.5
        assert torch.equal(bits(_kernels.kept(x, keep)), bits(torch.where(keep, x, 0.0)))
        assert _kernels.nonfinite([torch.ones(900_000), x]) is True
    finally:
        torch.set_num_threads(before)
