"""masked.mode against a count in plain Python, on both paths and every kind of value."""

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gradgate import masked
from gradgate.errors import ArgumentTypeError, ArgumentValueError, NothingKeptError
from tests.witness import REAL, value_and_gradients, witness

pytestmark = pytest.mark.usefixtures("both_paths")

NAN, INF = math.nan, math.inf
INTEGERS = {
    torch.uint8: [0, 3, 254, 255],
    torch.int8: [-128, -1, 0, 127],
    torch.int16: [-32768, -1, 0, 32767],
    torch.int32: [-(2**31), -7, 0, 2**31 - 1],
    torch.int64: [-(2**63), -100, 0, 10**12, 2**63 - 1],
    torch.bool: [False, True],
}
FLOATS = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
SPECIAL = [0.0, -0.0, 1.0, -1.0, 2.5, NAN, -NAN, INF, -INF, 1e-7]


def most_frequent(row, kept):
    """The oracle: (index, count) of one slice, counted in Python."""
    places = {}
    for place, (value, chosen) in enumerate(zip(row, kept, strict=True)):
        if chosen:
            places.setdefault("nan" if value != value else value + 0, []).append(place)
    if not places:
        return -1, 0
    most = max(len(found) for found in places.values())
    winners = [value for value, found in places.items() if len(found) == most]
    winner = min((value for value in winners if value != "nan"), default="nan")
    return places[winner][-1], most


def check_rows(x, keep, **options):
    """Compare masked.mode over the last dimension, and over the first, with the oracle."""
    kept = torch.ones_like(x, dtype=torch.bool) if keep is None else keep
    expected = [most_frequent(*pair) for pair in zip(x.tolist(), kept.tolist(), strict=True)]
    found = masked.mode(x, keep=keep, empty=0, **options)
    assert list(zip(found.indices.tolist(), found.counts.tolist(), strict=True)) == expected
    for row, value, (index, count) in zip(x, found.values, expected, strict=True):
        assert torch.equal(value, row[index]) or (count and row[index] != row[index]) or (not count and value == 0)
    turned = masked.mode(x.t().contiguous(), 0, keep=None if keep is None else keep.t(), empty=0, **options)
    assert list(zip(turned.indices.tolist(), turned.counts.tolist(), strict=True)) == expected


SIZES = [1, 2, 3, 7, 16, 17, 40, 300]


@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
@pytest.mark.parametrize("size", SIZES)
def test_integers_of_every_range(dtype, size):
    values = INTEGERS[dtype]
    for few, fraction in itertools.product((values, values[1:3], values[:1], values[-1:]), (None, 0.0, 0.3, 0.8, 1.0)):
        x = torch.tensor(few, dtype=dtype)[torch.randint(0, len(few), (5, size))]
        check_rows(x, None if fraction is None else torch.rand(5, size) < fraction)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("size", SIZES)
def test_floats_with_nan_infinity_and_two_zeros(dtype, size):
    for few, fraction in itertools.product((SPECIAL, SPECIAL[:5], [NAN, -NAN, 1.0]), (None, 0.0, 0.5, 1.0)):
        x = torch.tensor(few, dtype=dtype)[torch.randint(0, len(few), (5, size))]
        check_rows(x, None if fraction is None else torch.rand(5, size) < fraction)


@pytest.mark.parametrize("high", [3, 100, 10**9, 2**62])
@pytest.mark.parametrize("offset", [0, -5, 10**6, -(2**40)])
def test_ranges_and_offsets(high, offset):
    for size, fraction in itertools.product((5, 16, 60), (None, 0.5)):
        x = torch.randint(0, 4, (6, size)) * (high // 3) + offset
        check_rows(x, None if fraction is None else torch.rand(6, size) < fraction)


@pytest.mark.parametrize("rows", [1, 255, 256, 257, 700])
@pytest.mark.parametrize("size", [1, 5, 16])
def test_votes_of_any_number_of_rows(rows, size):
    for high in (4, 300, 70_000, 2**33):
        x = torch.randint(0, 4, (rows, size)) * (high // 3)
        check_rows(x, torch.rand(rows, size) < 0.6)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float32])
@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("far", [0, 100, -100, 1000, -1000])
def test_votes_without_one_value_are_those_with_a_mask(dtype, dim, far):
    x = torch.randint(0, 4, (6, 300))
    x[torch.rand(x.shape) < 0.2] += far
    x = (x if dim == 0 else x.T.contiguous()).to(dtype)
    by_value, by_mask = (masked.mode(x, dim, empty=0, **which) for which in ({"exclude": 2}, {"keep": x != 2}))
    for one, other in zip(by_value, by_mask, strict=True):
        assert torch.equal(one, other)
    kept = by_value.indices >= 0
    picked = x.gather(dim, by_value.indices.clamp(min=0).unsqueeze(dim)).squeeze(dim)
    assert torch.equal(by_value.values[kept], picked[kept])


@pytest.mark.parametrize("low", [-20_000, -1, 0, 12_000, 10**9])
def test_a_range_as_wide_as_a_long_row(low):
    x = torch.randint(0, 20_000, (2, 10_001)) * 2 + low
    x[0, :2], x[1, :3] = low, low + 39_998
    for dtype in (torch.int16, torch.int32, torch.int64):
        if low + 39_998 <= torch.iinfo(dtype).max:
            check_rows(x.to(dtype), None)
            check_rows(x.to(dtype), torch.rand(x.shape) < 0.7)


CLOSE = {
    "float64": torch.tensor([1.0, 1.0 + 1e-12, 1.0 - 1e-12, -5.0, 7.0], dtype=torch.float64),
    "float32": torch.tensor([0.0, -0.0, 1e-30, -1e-30, 1e-3, 5.0]),
    "tiny": torch.tensor([0.0, 1e-45, 3e-45, -1e-42]),
    "int64": torch.tensor([2**60, 2**60 + 1, 2**60 - 1, -(2**40), -(2**62)]),
    "one value": torch.tensor([0.3]),
}


@pytest.mark.parametrize("values", CLOSE.values(), ids=CLOSE)
@pytest.mark.parametrize("fraction", [None, 0.1, 0.6])
def test_values_that_are_close_to_each_other(values, fraction):
    for size in (18, 50):
        x = values[torch.randint(0, len(values), (20, size))]
        x[::2] = values[-1]
        check_rows(x, None if fraction is None else torch.rand(20, size) < fraction)


@pytest.mark.parametrize("wild", [NAN, INF, -INF, 3e38, 1e300])
def test_wild_values(wild):
    x = torch.tensor([wild, -wild, 1.0, 2.0], dtype=torch.float64)[torch.randint(0, 4, (10, 30))]
    check_rows(x, None)
    check_rows(x, torch.rand(10, 30) < 0.5)


@pytest.mark.slow
def test_rows_whose_values_are_all_different():
    check_rows(torch.randn(30, 50), None)
    check_rows(torch.randint(-(2**62), 2**62, (30, 50)), torch.rand(30, 50) < 0.9)
    check_rows(torch.arange(100_000).flip(0).view(1, -1) * 2**40, None)  # many that differ in their upper bits only


def test_what_is_left_out_may_be_far_away():
    """A sentinel of any size changes no way of counting and no result."""
    for size, sentinel in itertools.product((5, 16, 50), (-(2**63), 2**63 - 1, -100, 255)):
        x = torch.randint(0, 4, (6, size))
        keep = torch.rand(6, size) < 0.6
        plain = masked.mode(x, keep=keep, empty=-1)
        hidden = masked.mode(torch.where(keep, x, sentinel), exclude=sentinel, empty=-1)
        assert all(torch.equal(a, b) for a, b in zip(plain, hidden, strict=True))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int64, torch.float32, torch.float64])
@pytest.mark.parametrize("size", [1, 5, 16, 17, 300])
def test_with_everything_kept_the_values_are_those_of_torch(dtype, size):
    x = torch.randint(0, 9, (20, size)).to(dtype)
    assert torch.equal(masked.mode(x).values, torch.mode(x).values)
    assert torch.equal(masked.mode(x, keep=torch.ones(size, dtype=torch.bool)).values, torch.mode(x).values)


# --- dimensions ---------------------------------------------------------------------------------------------------


@given(st.data())
def test_dimensions_one_several_and_all(data):
    shape = data.draw(st.lists(st.integers(0, 4), max_size=4).map(tuple))
    rank = len(shape)
    dims = st.lists(st.integers(0, rank - 1), min_size=1, unique=True).map(tuple) if rank else st.none()
    dim = data.draw(st.one_of(st.none(), st.integers(-max(rank, 1), max(rank, 1) - 1), dims))
    keepdim = data.draw(st.booleans())
    x = torch.randint(0, 3, shape).float()
    keep = torch.rand(shape) < data.draw(st.sampled_from([0.0, 0.5, 1.0]))
    if data.draw(st.booleans()):
        x, keep = x.transpose(0, -1).contiguous().transpose(0, -1) if rank else x, keep
    found = masked.mode(x, dim, keepdim=keepdim, keep=keep)

    wanted = range(rank) if dim is None else sorted(d % max(rank, 1) for d in ([dim] if isinstance(dim, int) else dim))
    reduced = [d for d in wanted if d < rank]
    rest = [d for d in range(rank) if d not in reduced]
    size = math.prod(shape[d] for d in reduced)
    out_shape = [1 if d in reduced else s for d, s in enumerate(shape) if keepdim or d not in reduced]
    rows = [t.permute([*rest, *reduced]).reshape(math.prod(shape[d] for d in rest), size) for t in (x, keep)]
    expected = [most_frequent(*pair) for pair in zip(*(t.tolist() for t in rows), strict=True)]
    assert all(list(result.shape) == out_shape for result in found)
    assert found.indices.reshape(-1).tolist() == [index for index, _ in expected]
    assert found.counts.reshape(-1).tolist() == [count for _, count in expected]
    for row, value, (index, count) in zip(rows[0], found.values.reshape(-1), expected, strict=True):
        assert value == row[index] if count else value.isnan()


def test_votes_over_the_first_dimension_and_a_small_mask():
    x = torch.tensor([[1, 2], [3, 2], [3, 4], [1, 4]])
    assert masked.mode(x, 0).values.tolist() == [1, 2]
    found = masked.mode(x, 0, keep=torch.tensor([[True], [True], [True], [False]]))
    assert found.values.tolist() == [3, 2]
    assert found.indices.tolist() == [2, 1]
    assert masked.mode(x, (0, 1)) == masked.mode(x, None)
    everything = masked.mode(x, None, keepdim=True)
    assert everything.values.tolist() == [[1]]
    assert everything.indices.tolist() == [[6]]


# --- gradient -----------------------------------------------------------------------------------------------------


def by_index(x, keep):
    """The oracle with a gradient: the element that the count in Python names."""
    pairs = zip(x.tolist(), keep.tolist(), strict=True)
    places = [most_frequent(*pair)[0] for pair in pairs]
    return torch.stack([row[i] if i >= 0 else torch.tensor(NAN) for row, i in zip(x, places, strict=True)])


X = torch.tensor([[1.0, 2.0, 2.0, 1.0], [3.0, 3.0, 0.5, 3.0], [4.0, 4.0, 4.0, 4.0]])
KEEP = torch.tensor([[True, True, True, True], [False, True, True, True], [True, False, True, False]])


@pytest.mark.slow
def test_every_promise():
    found = [lambda x, keep: masked.mode(x, keep=keep, empty=0).values, by_index]
    # A small step makes equal values unequal, so there is no numeric derivative here.
    witness(*found, X, KEEP, promises=REAL - {"gradcheck", "gradgradcheck", "vmap"})
    # vmap rolls the mask through rows that have one element each left out; none of them becomes empty.
    every = [lambda x, keep: masked.mode(x, keep=keep, empty=0), lambda x, keep: masked.mode(x, keep=keep, empty=0)]
    witness(*every, X, KEEP, promises={"vmap", "compile", "fake", "func_grad"})


def test_the_gradient_goes_to_the_index_only():
    x = X.clone().requires_grad_()
    found = masked.mode(x, keep=KEEP)
    found.values.backward(torch.tensor([1.0, 2.0, 3.0]))
    expected = torch.zeros(3, 4)
    expected[torch.arange(3), found.indices] = torch.tensor([1.0, 2.0, 3.0])
    assert torch.equal(x.grad, expected)


def test_nothing_kept_gives_nan_and_a_gradient_of_zero():
    x = torch.tensor([[NAN, 1.0], [2.0, 2.0]], requires_grad=True)
    found = masked.mode(x, keep=torch.tensor([[False], [True]]))
    assert found.values[0].isnan()
    assert found.indices.tolist() == [-1, 1]
    assert found.counts.tolist() == [0, 2]
    (gradient,) = torch.autograd.grad(found.values, x, torch.tensor([NAN, 1.0]))
    assert gradient.tolist() == [[0.0, 0.0], [0.0, 1.0]]


def test_garbage_that_is_left_out_changes_nothing():
    keep = torch.tensor([[True, False, True, False, True]])
    x = torch.tensor([[1.0, 0.0, 1.0, 0.0, 2.0]])
    for garbage in (NAN, INF, -INF, 1.0, 2.0):
        hidden = torch.where(keep, x, garbage)
        ours, (gradient,) = value_and_gradients(lambda x: masked.mode(x, keep=keep).values, [hidden])
        alone, (expected,) = value_and_gradients(lambda x: masked.mode(x).values, [x[keep].unsqueeze(0)])
        assert torch.equal(ours[0], alone[0])
        assert torch.equal(gradient[keep], expected[0])
        assert (gradient[~keep] == 0).all()


# --- nothing kept, zero size, words -------------------------------------------------------------------------------


def test_integers_with_nothing_kept_are_an_error_that_names_the_slice():
    x = torch.tensor([[5, 6], [-100, -100]])
    with pytest.raises(
        NothingKeptError, match=r"masked.mode\(\): nothing is kept in 1 of 2 slices; the first is x\[1, :\]"
    ):
        masked.mode(x, exclude=-100)
    found = masked.mode(x, exclude=-100, empty=-1)
    assert found.values.tolist() == [5, -1]
    with pytest.raises(NothingKeptError, match="nothing is kept"):
        masked.mode(x.float(), exclude=-100, empty="raise")


@pytest.mark.parametrize("exclude", [255, 7])
def test_a_value_for_nothing_that_does_not_fit_is_told_whether_it_is_needed_or_not(exclude):
    with pytest.raises(ArgumentValueError, match=r"`empty` is -1, the result is uint8"):
        masked.mode(torch.tensor([255, 255], dtype=torch.uint8), exclude=exclude, empty=-1)


@pytest.mark.parametrize("shape", [(0,), (2, 0), (0, 2), (2, 0, 3)])
def test_dimensions_of_size_zero(shape):
    found = masked.mode(torch.zeros(shape), 0)
    expected = shape[1:]
    assert all(result.shape == expected for result in found)
    if shape[0] == 0:
        assert found.values.isnan().all()
        assert (found.indices == -1).all()
    with pytest.raises(NothingKeptError, match="nothing is kept"):
        masked.mode(torch.zeros(2, 0, dtype=torch.int64))


@pytest.mark.parametrize("size", [3, 60, 5000])
@pytest.mark.parametrize("dtype", [torch.int64, torch.float32, torch.bool])
def test_no_slices_at_all(size, dtype):
    for keep in (None, torch.ones(size, dtype=torch.bool)):
        found = masked.mode(torch.zeros(0, size, dtype=dtype), keep=keep)
        assert all(result.shape == (0,) for result in found)
        assert found.values.dtype == dtype


def test_bool_values_and_their_empty_value():
    x = torch.tensor([[True, True, False], [False, False, False]])
    found = masked.mode(x, exclude=False, empty=True)
    assert found.values.dtype == torch.bool
    assert found.values.tolist() == [True, True]
    assert found.counts.tolist() == [2, 0]


def test_complex_values_are_refused():
    with pytest.raises(ArgumentTypeError, match=r"masked.mode\(\): `x` is a complex64 tensor(.|\n)*no order"):
        masked.mode(torch.zeros(3, dtype=torch.complex64))


def test_the_meta_device_and_inference_mode():
    assert masked.mode(torch.zeros(3, 4, device="meta")).values.shape == (3,)
    with torch.inference_mode():
        assert masked.mode(torch.tensor([1, 2, 2])).values == 2
