"""Native sums and masks beside torch's: dtypes, shapes, offsets, odd mask bytes, accuracy, threads."""

import math
import threading
from functools import partial

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from gradgate import _kernels, _native
from gradgate._kernels import Layout

pytestmark = pytest.mark.skipif(_kernels.library is None, reason="the native kernels are not in force")

FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
INTEGERS = (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64)
SHAPES = [(1, 0, 1), (0, 5, 1), (1, 1, 1), (3, 7, 1), (2, 33, 1), (1, 5000, 1), (5, 129, 1), (1, 9, 3), (2, 70, 9)]
SHAPES += [(1, 130, 1025), (3, 0, 2), (1, 70_000, 1), (1, 300, 300)]


def values(shape, dtype):
    if dtype.is_floating_point:
        return torch.randn(shape).to(dtype)
    return torch.randint(-100 if dtype.is_signed else 0, 100, shape).to(dtype)


def odd_mask(shape):
    """A mask whose bytes are anything but 0 and 1, at an odd address."""
    size = math.prod(shape)
    memory = torch.randint(0, 256, (size + 1,), dtype=torch.uint8)
    memory[torch.rand(size + 1) < 0.4] = 0
    return memory[1:].view(shape).view(torch.bool)


@pytest.mark.parametrize("dtype", FLOATS + INTEGERS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_sums_means_and_counts(shape, dtype):
    x = values((math.prod(shape) + 1,), dtype)[1:].view(shape)
    mask = odd_mask(shape)
    keep = mask.view(torch.uint8) != 0
    if dtype.is_floating_point:
        x = torch.where(keep, x, math.nan)
    wide = torch.where(keep, x, 0).to(torch.float64 if dtype.is_floating_point else torch.int64)
    total, count, empty = _kernels.sums(Layout(x, shape, mask), (shape[0], shape[2]), mean=False, counted=True)
    assert torch.equal(count, keep.sum(1))
    assert empty == (keep.sum(1) == 0).sum()
    if dtype.is_floating_point:
        torch.testing.assert_close(total.double(), wide.sum(1), rtol=1e-5, atol=1e-4)
        mean, _, _ = _kernels.sums(Layout(x, shape, mask), (shape[0], shape[2]), mean=True, counted=False)
        torch.testing.assert_close(mean.double(), wide.sum(1) / keep.sum(1), rtol=1e-5, atol=1e-5, equal_nan=True)
    else:
        assert torch.equal(total, wide.sum(1))


@pytest.mark.parametrize("dtype", FLOATS + INTEGERS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("value", [math.nan, 3.0, -0.0, math.inf])
def test_an_excluded_value_needs_no_mask(shape, dtype, value):
    if not dtype.is_floating_point and not math.isfinite(value):
        return
    x = values(shape, dtype)
    x[torch.rand(shape) < 0.2] = value
    if dtype.is_floating_point and shape[1]:
        x[..., 0, :] = math.nan  # NaN is kept unless it is the excluded value
    keep = x == x if math.isnan(value) else x != value
    excluded = value if dtype.is_floating_point else int(value)
    assert torch.equal(_kernels.valid(x, None, excluded), keep)
    other = torch.rand(shape) < 0.5
    assert torch.equal(_kernels.valid(x, other, excluded), keep & other)
    by_value = _kernels.sums(Layout(x, shape, None, excluded), (shape[0], shape[2]), mean=False)
    by_mask = _kernels.sums(Layout(x, shape, keep), (shape[0], shape[2]), mean=False)
    torch.testing.assert_close(by_value, by_mask, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(by_value[1], keep.sum(1))


@pytest.mark.parametrize("dtype", FLOATS + INTEGERS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_level_of_the_processor_gives_the_same_bits(shape, dtype, monkeypatch):
    x, mask = values(shape, dtype), odd_mask(shape)
    layouts = [Layout(x, shape, mask), Layout(x, shape, None, 0 if dtype is torch.uint8 else math.nan)]
    calls = [_kernels.sums, partial(_kernels.extreme, largest=True), partial(_kernels.extreme, largest=False)]
    if dtype.is_floating_point:
        x[torch.rand(shape) < 0.1] = math.nan
        x[torch.rand(shape) < 0.1] = -0.0
        calls += [_kernels.logsumexp, _kernels.squares, lambda layout, out: _kernels.valid(x, None, math.nan)]
        if shape[2] == 1:
            calls += [lambda layout, out: _kernels.softmax(layout, logarithm=True)]
    results = []
    for level in range(_native.LEVELS.index(_kernels.library.level) + 1):
        monkeypatch.setattr(_kernels, "library", _native.Library(_native.FOLDER / "kernels.so", level))
        results.append([call(layout, (shape[0], shape[2])) for call in calls for layout in layouts])
    for result in results[1:]:
        torch.testing.assert_close(result, results[0], rtol=0, atol=0, equal_nan=True)


@pytest.mark.slow
@settings(max_examples=100)
@given(st.integers(0, 4), st.integers(0, 300), st.integers(1, 40), st.sampled_from(FLOATS + INTEGERS))
def test_any_shape(outer, reduced, inner, dtype):
    shape = (outer, reduced, inner)
    x, mask = values(shape, dtype), odd_mask(shape)
    kept = torch.where(mask.view(torch.uint8) != 0, x, 0)
    total, count, _ = _kernels.sums(Layout(x, shape, mask), (shape[0], shape[2]), mean=False, counted=True)
    wide = kept.double().sum(1) if dtype.is_floating_point else kept.sum(1)
    torch.testing.assert_close(total.to(wide.dtype), wide, rtol=1e-5, atol=1e-4)
    assert torch.equal(count, (mask.view(torch.uint8) != 0).sum(1))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_special_numbers_are_read_exactly(dtype):
    info = torch.finfo(dtype)
    special = [0.0, -0.0, info.tiny, -info.tiny, info.smallest_normal / 4, info.max, info.min, math.inf, -math.inf]
    for x in (torch.tensor([value], dtype=dtype) for value in special):
        total, _, _ = _kernels.sums(Layout(x, (1, 1, 1), None), (1,))
        assert total.item() == x.item()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("shape", [(1, 1 << 20, 1), (1, 1 << 14, 64)], ids=str)
def test_a_sum_is_as_good_as_torch_makes_it(shape, dtype):
    x = torch.rand(shape, dtype=dtype) + 1
    exact = sum(math.fsum(column) for column in x[0].t().tolist())
    total, _, _ = _kernels.sums(Layout(x, shape, torch.ones(shape, dtype=torch.bool)), (shape[0], shape[2]))
    ours = abs(math.fsum(total.flatten().tolist()) - exact)
    theirs = abs(math.fsum(x.sum(1).flatten().tolist()) - exact)
    assert ours <= theirs + exact * torch.finfo(dtype).eps


@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
@pytest.mark.parametrize("shape", [(3, 7, 1), (2, 1000, 1), (1, 600_000, 1), (2, 70, 9), (1, 700, 1025)], ids=str)
def test_the_extremes_of_integers_reach_the_ends_of_their_dtype(shape, dtype):
    info = torch.iinfo(dtype)
    x, mask = values(shape, dtype), odd_mask(shape)
    x[torch.rand(shape) < 0.01], x[torch.rand(shape) < 0.01] = info.min, info.max
    mask[:, :2], x[:, 0], x[:, 1] = True, 1, 2  # so that something is kept, whatever is left out
    for layout, keep in ((Layout(x, shape, mask), mask), (Layout(x, shape, None, info.max), x != info.max)):
        for largest, limit in ((True, info.min), (False, info.max)):
            found, _ = _kernels.extreme(layout, (shape[0], shape[2]), largest=largest)
            assert torch.equal(found.to(dtype), getattr(torch.where(keep, x, limit), "amax" if largest else "amin")(1))


@pytest.mark.parametrize("shape", [(1, 3_000_001, 1), (1, 3000, 1001), (1001, 3000, 1), (1, 1_000_001, 3)], ids=str)
def test_the_number_of_threads_changes_no_bit(shape):
    x, mask = torch.randn(shape), torch.rand(shape) < 0.7
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            results.append(_kernels.sums(Layout(x, shape, mask), (shape[0], shape[2]), mean=True, counted=True))
    finally:
        torch.set_num_threads(before)
    for total, count, empty in results[1:]:
        assert torch.equal(total, results[0][0])
        assert torch.equal(count, results[0][1])
        assert empty == results[0][2]


def test_calls_from_several_threads_do_not_meet():
    x, found = torch.randn(40, 10_000), {}
    mask = x > 0

    def work(i):
        for _ in range(20):
            rows = slice(i, i + 10)
            found[i] = _kernels.sums(Layout(x[rows], (10, 10_000, 1), mask[rows]), (10,), mean=True).total

    threads = [threading.Thread(target=work, args=(i,)) for i in (0, 10, 20, 30)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    expected = torch.where(mask, x, 0).sum(1) / mask.sum(1)
    for i, mean in found.items():
        torch.testing.assert_close(mean, expected[i : i + 10])


def test_who_may_not_be_read():
    x = torch.randn(3)
    assert _kernels.usable(x, x > 0)
    assert not _kernels.usable(x.to("meta"))
    assert not _kernels.usable(x.to_sparse())
    assert not _kernels.usable(torch.randn(3, dtype=torch.complex64).conj())
    assert not torch.vmap(lambda y: torch.tensor(_kernels.usable(y)).expand(y.shape))(x.view(1, 3)).any()
    assert not torch.compile(lambda y: y + _kernels.usable(y), backend="eager")(torch.zeros(3)).any()
