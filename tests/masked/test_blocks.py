"""The way through the blocks gives what the way through torch.where gives, whatever the size of a block."""

import math
from unittest import mock

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from gradgate import masked
from gradgate.masked import _blocks, _kernels, _ways
from tests import witness
from tests.masked.laws import BY_NAME, SMOOTH
from tests.masked.test_laws import GARBAGE, masked_values, soiled

TRACED = ("sum", "mean", "var 1", "std 1", "amax", "median", "norm 2", "logsumexp", "softmax", "cumsum")
DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
EDGES = (torch.finfo(torch.float32).max, torch.finfo(torch.float32).min)


def tiny_blocks(block=8, columns=3):
    """Send everything through blocks, and make them so small that every way of cutting happens."""
    return mock.patch.multiple(_blocks, BLOCK=block, COLUMNS=columns), mock.patch.dict(
        _ways.WORTH, dict.fromkeys(_ways.WORTH, 1)
    )


def both_ways(fn, inputs, order, block=8, columns=3):
    blocks, no_small = tiny_blocks(block, columns)
    with blocks, no_small:
        ours = witness.value_and_gradients(fn, inputs, order)
    with mock.patch.dict(_ways.WORTH, dict.fromkeys(_ways.WORTH, math.inf)):
        plain = witness.value_and_gradients(fn, inputs, order)
    return ours, plain


@pytest.mark.parametrize("law", SMOOTH, ids=lambda law: law.name)
@settings(max_examples=12)
@given(
    masked_values(),
    st.sampled_from(GARBAGE[:4]),
    st.sampled_from(DTYPES),
    st.sampled_from([2, 8, 1 << 16]),
)
def test_both_ways_agree(law, drawn, garbage, dtype, block):
    x, keep, dim = drawn
    x = soiled(x.to(dtype), keep, torch.tensor(garbage, dtype=torch.float64).to(dtype).item())
    for order in (1, 2):
        ours, plain = both_ways(lambda x: law.fn(x, dim, keep=keep), [x], order, block)
        witness.assert_same(ours[0], plain[0], what="value", dtype=dtype)
        low = {torch.float16, torch.bfloat16} & {dtype}
        if not (low and order == 2):  # halves differ in the second order by more than they can say
            witness.assert_same(ours[1], plain[1], what=f"gradient {order}", dtype=dtype)


@pytest.mark.parametrize("name", ["amax", "amin", "softmax", "log_softmax", "logsumexp"])
@settings(max_examples=40)
@given(masked_values(), st.sampled_from(GARBAGE[:4]), st.sampled_from(DTYPES[:2]))
def test_what_other_devices_do_agrees_with_what_small_tensors_do(name, drawn, garbage, dtype):
    x, keep, dim = drawn
    x = soiled(x.to(dtype), keep, garbage)
    fn = lambda x: BY_NAME[name].fn(x, dim, keep=keep)  # noqa: E731
    for order in (1, 2):
        ours = witness.value_and_gradients(fn, [x], order)
        with mock.patch.multiple(_kernels, may_read=lambda *_: False, may_look=lambda *_: False):
            plain = witness.value_and_gradients(fn, [x], order)
        witness.assert_same(ours[0], plain[0], what="value", dtype=dtype)
        witness.assert_same(ours[1], plain[1], what=f"gradient {order}", dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64, torch.bool])
@pytest.mark.parametrize("name", ["sum", "prod", "amax", "amin", "argmax", "argmin", "cumsum", "count"])
def test_both_ways_agree_on_integers(name, dtype):
    x = torch.randint(0, 2 if dtype is torch.bool else 5, (6, 7)).to(dtype)
    keep = torch.rand(6, 7) < 0.5
    keep[2] = False
    law = BY_NAME[name]
    fn = lambda: law.fn(x, 1, keep=keep, **({"empty": 1} if name in ("amax", "amin") else {}))  # noqa: E731
    blocks, no_small = tiny_blocks()
    with blocks, no_small:
        ours = fn()
    assert torch.equal(ours, fn())


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
@pytest.mark.parametrize("name", ["sum", "mean", "var 1", "norm 2", "cumsum"])
def test_both_ways_agree_on_complex_numbers(name, dtype):
    x, keep = torch.randn(5, 4, dtype=dtype), torch.rand(5, 4) < 0.6
    ours, plain = both_ways(lambda x: BY_NAME[name].fn(x, 0, keep=keep), [x], 1)
    witness.assert_same(ours[0], plain[0], what="value")
    witness.assert_same(ours[1], plain[1], what="gradient")


@pytest.mark.parametrize("shape", [(70001,), (300, 301), (3, 70001), (70001, 3), (2, 3, 30000), (5, 40, 41, 3)])
def test_both_ways_agree_on_large_tensors(shape):
    x, keep = torch.randn(shape), torch.rand(shape) < 0.7
    x = soiled(x, keep, math.nan)
    for name in ("sum", "mean", "var 1", "amax", "softmax", "logsumexp", "norm 2"):
        for dim in {0, len(shape) - 1, len(shape) // 2}:
            fn = lambda x: BY_NAME[name].fn(x, dim, keep=keep)  # noqa: B023, E731
            ours = witness.value_and_gradients(fn, [x])
            with mock.patch.dict(_ways.WORTH, dict.fromkeys(_ways.WORTH, math.inf)):
                plain = witness.value_and_gradients(fn, [x])
            for a, b in zip(ours[0] + ours[1], plain[0] + plain[1], strict=True):
                torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4, equal_nan=True)
            assert (ours[1][0][~keep] == 0).all()


@pytest.mark.parametrize("promise", ["compile", "vmap", "func_grad", "jvp", "fake"])
@pytest.mark.parametrize("law", [BY_NAME[n] for n in TRACED], ids=lambda law: law.name)
def test_what_traces_takes_the_plain_way_whatever_the_size(law, promise):
    x = torch.tensor([[0.5, -1.5, 2.5, 0.25], [1.75, 3.0, -0.75, 1.0], [2.0, -2.25, 4.0, 1.5]], dtype=torch.float64)
    keep = torch.tensor([[True, True, False, True], [False] * 4, [True, True, True, False]])
    blocks, no_small = tiny_blocks()
    with blocks, no_small:
        witness.CHECKS[promise](lambda x, k: law.fn(x, 1, keep=k), lambda x, k: law.oracle(x, k, 1), [x, keep])


def test_a_batch_of_gradients_takes_the_plain_way_back():
    """torch.autograd.grad(is_grads_batched=True) is vmap over backward."""
    x, keep = torch.randn(2, 9, requires_grad=True), torch.rand(2, 9) < 0.6
    blocks, no_small = tiny_blocks()
    with blocks, no_small:
        for name in ("mean", "var 1", "amax", "softmax"):
            result = BY_NAME[name].fn(x, 1, keep=keep)
            seeds = torch.eye(result.numel()).reshape(-1, *result.shape)
            (batched,) = torch.autograd.grad(result, x, seeds, is_grads_batched=True, retain_graph=True)
            loop = torch.stack([torch.autograd.grad(result, x, seed, retain_graph=True)[0] for seed in seeds])
            torch.testing.assert_close(batched, loop)


def test_a_sum_of_many_is_as_good_as_torch_makes_it():
    x = torch.rand(1 << 20) + 1
    keep = torch.ones(x.shape, dtype=torch.bool)
    exact = x.double().sum()
    assert abs(masked.sum(x, keep=keep) - exact) <= 2 * abs(x.sum() - exact) + exact * 1e-7


def test_the_saved_mask_is_guarded_against_edits():
    """Overwriting the mask between forward and backward is an error, not a wrong gradient."""
    x, keep = torch.randn(5000, requires_grad=True), torch.rand(5000) < 0.5
    result = masked.mean(x, keep=keep)
    keep.fill_(True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        result.backward()


@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf, -1.5, 3e38, *EDGES])
@pytest.mark.parametrize(("shape", "dim"), [((300_001,), None), ((301, 999), 1), ((999, 301), 0), ((2, 150_001), 1)])
def test_garbage_changes_no_bit_of_large_tensors(shape, dim, garbage):
    x, keep = torch.randn(shape), torch.rand(shape) < 0.7
    for name in ("sum", "mean", "var 1", "amax", "amin", "softmax", "logsumexp", "median", "norm 2"):
        fn = lambda x: BY_NAME[name].fn(x, dim, keep=keep)  # noqa: B023, E731
        clean = witness.value_and_gradients(fn, [soiled(x, keep, 0.0)])
        dirty = witness.value_and_gradients(fn, [soiled(x, keep, garbage)])
        witness.assert_same(dirty[0] + dirty[1], clean[0] + clean[1], what=name, exact=True)


def test_a_view_whose_bits_are_not_its_values():
    x = torch.randn(20_000, dtype=torch.complex64).conj()
    keep = torch.rand(20_000) < 0.5
    torch.testing.assert_close(masked.sum(x, keep=keep), x[keep].sum(), rtol=1e-4, atol=1e-3)
    torch.testing.assert_close(masked.amax(x.imag, keep=keep), x.imag[keep].amax())


def test_autocast_changes_nothing():
    x, keep = torch.randn(20_000), torch.rand(20_000) < 0.7
    for name in ("sum", "mean", "var 1", "amax", "softmax", "logsumexp"):
        fn = lambda x: BY_NAME[name].fn(x, None, keep=keep)  # noqa: B023, E731
        plain = witness.value_and_gradients(fn, [x])
        with torch.autocast("cpu", dtype=torch.bfloat16):
            mixed = witness.value_and_gradients(fn, [x])
        witness.assert_same(mixed[0] + mixed[1], plain[0] + plain[1], what=name, exact=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("place", [0, 123_456, 299_999])
def test_one_bad_piece_of_a_long_slice_is_done_again_alone(dtype, place):
    x, keep = torch.randn(300_000, dtype=dtype), torch.rand(300_000) < 0.7
    keep[place] = False
    clean = [masked.sum(x, keep=keep), masked.mean(x, keep=keep)]
    x[place] = math.nan
    witness.assert_same([masked.sum(x, keep=keep), masked.mean(x, keep=keep)], clean, what="garbage", exact=True)
    keep[place] = True
    assert masked.sum(x, keep=keep).isnan()
    assert masked.mean(x, keep=keep).isnan()


@pytest.mark.parametrize("size", [9000, 196_608, 196_609, 400_000])
def test_one_slice_in_any_layout(size):
    wide, keep = torch.randn(size, 2), torch.rand(size, 2) < 0.7
    for x, mask in ((wide[:, 0], keep[:, 1]), (wide.T[0].contiguous(), keep[:, 1]), (wide.T, keep.T)):
        expected = x.double()[mask]
        torch.testing.assert_close(masked.sum(x, keep=mask).double(), expected.sum(), rtol=1e-4, atol=1e-2)
        torch.testing.assert_close(masked.mean(x, keep=mask).double(), expected.mean(), rtol=1e-4, atol=1e-6)
        nothing = torch.zeros_like(mask)
        assert masked.sum(x, keep=nothing) == 0
        assert masked.mean(x, keep=nothing).isnan()
        assert masked.mean(x, keep=nothing, empty=-1) == -1


def test_a_mean_counts_beyond_what_a_float_can_count():
    x, keep = torch.ones((1 << 24) + 5), torch.ones((1 << 24) + 5, dtype=torch.bool)
    keep[0] = False
    _, number = _blocks.total_of(x, keep, counted=True)
    assert number == (1 << 24) + 4


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_kept_may_be_as_extreme_as_it_likes(dtype):
    """What is left out goes to infinity by an addition: none of the kept may be taken for it, or be moved."""
    info = torch.finfo(dtype)
    kept = torch.tensor([-0.0, info.min, info.max, -math.inf, math.inf, math.nan, info.tiny, 3.0], dtype=dtype)
    x = kept.unsqueeze(1).repeat(1, 2048)
    keep = torch.rand(x.shape) < 0.5
    keep[:, 0] = True
    for garbage in (0.0, info.max, info.min, math.inf, -math.inf, math.nan):
        dirty = soiled(x, keep, garbage)
        for found in (masked.amax(dirty, 1, keep=keep), masked.amin(dirty, 1, keep=keep)):
            witness.assert_same([found, found.signbit()], [kept, kept.signbit()], what=f"beside {garbage}", exact=True)
        if dtype in (torch.float32, torch.float64):
            expected = kept + keep.sum(1).to(dtype).log()
            torch.testing.assert_close(masked.logsumexp(dirty, 1, keep=keep), expected, equal_nan=True)
        weights = masked.softmax(dirty, 1, keep=keep)
        plain = [torch.softmax(row[mask], 0) for row, mask in zip(x, keep, strict=True)]
        for i, (row, mask, expected) in enumerate(zip(weights, keep, plain, strict=True)):
            expected = torch.zeros_like(expected) if kept[i] == -math.inf else expected
            torch.testing.assert_close(row[mask], expected, equal_nan=True)
            assert (row[~mask] == 0).all()
