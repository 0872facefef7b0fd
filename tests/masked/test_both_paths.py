"""The native path gives what the composition in torch gives, in value and in both derivatives."""

import math
from unittest import mock

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from gradgate import _kernels, masked
from tests import witness
from tests.masked.laws import BY_NAME, LAWS, SMOOTH
from tests.masked.test_laws import GARBAGE, masked_values, soiled

TRACED = ("sum", "mean", "var 1", "std 1", "amax", "median", "norm 2", "logsumexp", "softmax", "cumsum")
DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
EDGES = (torch.finfo(torch.float32).max, torch.finfo(torch.float32).min)
HEAVY = ("sum", "mean", "var 1", "amax", "amin", "softmax", "log_softmax", "logsumexp", "norm 2")


def on_torch():
    return mock.patch.object(_kernels, "library", None)


def both_paths(fn, inputs, order=1):
    ours = witness.value_and_gradients(fn, inputs, order)
    with on_torch():
        plain = witness.value_and_gradients(fn, inputs, order)
    return ours, plain


@pytest.mark.parametrize("law", SMOOTH, ids=lambda law: law.name)
@settings(max_examples=12)
@given(masked_values(), st.sampled_from(GARBAGE[:4]), st.sampled_from(DTYPES))
def test_both_paths_agree(law, drawn, garbage, dtype):
    x, keep, dim = drawn
    x = soiled(x.to(dtype), keep, torch.tensor(garbage, dtype=torch.float64).to(dtype).item())
    for order in (1, 2):
        ours, plain = both_paths(lambda x: law.fn(x, dim, keep=keep), [x], order)
        witness.assert_same(ours[0], plain[0], what="value", dtype=dtype)
        low = {torch.float16, torch.bfloat16} & {dtype}
        if not (low and order == 2):  # halves differ in the second order by more than they can say
            witness.assert_same(ours[1], plain[1], what=f"gradient {order}", dtype=dtype)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["amax", "amin", "softmax", "log_softmax", "logsumexp"])
@settings(max_examples=30)
@given(masked_values(), st.sampled_from(GARBAGE[:4]), st.sampled_from(DTYPES[:2]))
def test_what_other_devices_compute_agrees(name, drawn, garbage, dtype):
    """There the host cannot look at values."""
    x, keep, dim = drawn
    x = soiled(x.to(dtype), keep, garbage)
    fn = lambda x: BY_NAME[name].fn(x, dim, keep=keep)  # noqa: E731
    for order in (1, 2):
        ours = witness.value_and_gradients(fn, [x], order)
        with on_torch(), mock.patch("gradgate.masked._slices.can_sync", return_value=False):
            plain = witness.value_and_gradients(fn, [x], order)
        witness.assert_same(ours[0], plain[0], what="value", dtype=dtype)
        witness.assert_same(ours[1], plain[1], what=f"gradient {order}", dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64, torch.bool])
@pytest.mark.parametrize("name", ["sum", "prod", "amax", "amin", "argmax", "argmin", "cumsum", "count"])
def test_both_paths_agree_on_integers(name, dtype):
    x = torch.randint(0, 2 if dtype is torch.bool else 5, (6, 7)).to(dtype)
    keep = torch.rand(6, 7) < 0.5
    keep[2] = False
    options = {"empty": 1} if name in ("amax", "amin") else {}
    for choice in ({"keep": keep}, {"exclude": 1}, {"exclude": [0, 3], "keep": keep}):
        ours = BY_NAME[name].fn(x, 1, **choice, **options)
        with on_torch():
            assert torch.equal(ours, BY_NAME[name].fn(x, 1, **choice, **options))


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
@pytest.mark.parametrize("name", ["sum", "mean", "var 1", "norm 2", "cumsum"])
def test_both_paths_agree_on_complex_numbers(name, dtype):
    x, keep = torch.randn(5, 4, dtype=dtype), torch.rand(5, 4) < 0.6
    ours, plain = both_paths(lambda x: BY_NAME[name].fn(x, 0, keep=keep), [x])
    witness.assert_same(ours[0], plain[0], what="value")
    witness.assert_same(ours[1], plain[1], what="gradient")


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(70001,), (300, 301), (3, 70001), (70001, 3), (2, 3, 30000), (5, 40, 41, 3)])
def test_both_paths_agree_on_large_tensors(shape):
    x, keep = torch.randn(shape), torch.rand(shape) < 0.7
    x = soiled(x, keep, math.nan)
    for name in ("sum", "mean", "var 1", "amax", "softmax", "logsumexp", "norm 2"):
        for dim in {0, len(shape) - 1, len(shape) // 2}:
            ours, plain = both_paths(lambda x: BY_NAME[name].fn(x, dim, keep=keep), [x])  # noqa: B023
            for a, b in zip(ours[0] + ours[1], plain[0] + plain[1], strict=True):
                torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4, equal_nan=True)
            assert (ours[1][0][~keep] == 0).all()


@pytest.mark.parametrize("dim", [(0, 2), (1, 3), (0, 1, 3), (0,), (1, 2), None])
def test_dimensions_that_are_not_neighbours(dim):
    x, keep = torch.randn(3, 4, 5, 6), torch.rand(3, 4, 5, 6) < 0.7
    for name in HEAVY:
        fn = lambda x: BY_NAME[name].fn(x, dim, keep=keep)  # noqa: B023, E731
        for given_x in (x, x.transpose(1, 2).contiguous().transpose(1, 2)):
            ours, plain = both_paths(fn, [given_x])
            witness.assert_same(ours[0] + ours[1], plain[0] + plain[1], what=name, dtype=torch.float32)


@pytest.mark.parametrize("value", [math.nan, -7.0, math.inf])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_an_excluded_value_is_the_mask_of_it(value, dtype):
    x = torch.randn(20, 30).to(dtype)
    x[torch.rand(20, 30) < 0.3] = value
    x[3] = value
    keep = x == x if math.isnan(value) else x != value
    for law in LAWS:
        for dim in (0, 1, None):
            assert_equal = torch.testing.assert_close
            expected = law.fn(x, dim, keep=keep)
            assert_equal(law.fn(x, dim, exclude=value), expected, rtol=0, atol=0, equal_nan=True, msg=law.name)
            if law.smooth:
                recorded = law.fn(x.clone().requires_grad_(), dim, exclude=value).detach()
                assert_equal(recorded, expected, equal_nan=True, msg=law.name)  # rounded once more


@pytest.mark.slow
@pytest.mark.parametrize("promise", ["compile", "vmap", "func_grad", "jvp", "fake"])
@pytest.mark.parametrize("law", [BY_NAME[n] for n in TRACED], ids=lambda law: law.name)
def test_what_traces_takes_the_composition(law, promise):
    x = torch.tensor([[0.5, -1.5, 2.5, 0.25], [1.75, 3.0, -0.75, 1.0], [2.0, -2.25, 4.0, 1.5]], dtype=torch.float64)
    keep = torch.tensor([[True, True, False, True], [False] * 4, [True, True, True, False]])
    witness.CHECKS[promise](lambda x, k: law.fn(x, 1, keep=k), lambda x, k: law.oracle(x, k, 1), [x, keep])


def test_a_batch_of_gradients_goes_back_through_the_composition():
    """torch.autograd.grad(is_grads_batched=True) is vmap over backward."""
    x, keep = torch.randn(2, 9, requires_grad=True), torch.rand(2, 9) < 0.6
    for name in ("mean", "var 1", "amax", "softmax", "log_softmax", "logsumexp"):
        result = BY_NAME[name].fn(x, 1, keep=keep)
        result = result.where(keep, 0) if name == "log_softmax" else result
        seeds = torch.eye(result.numel()).reshape(-1, *result.shape)
        (batched,) = torch.autograd.grad(result, x, seeds, is_grads_batched=True, retain_graph=True)
        loop = torch.stack([torch.autograd.grad(result, x, seed, retain_graph=True)[0] for seed in seeds])
        torch.testing.assert_close(batched, loop)


@pytest.mark.usefixtures("both_paths")
def test_a_sum_of_many_is_as_good_as_torch_makes_it():
    x = torch.rand(1 << 20) + 1
    keep = torch.ones(x.shape, dtype=torch.bool)
    exact = x.double().sum()
    assert abs(masked.sum(x, keep=keep) - exact) <= 2 * abs(x.sum() - exact) + exact * 1e-7


@pytest.mark.usefixtures("both_paths")
def test_a_variance_far_from_zero():
    x = torch.randn(2, 5000) + 1e4
    keep = torch.rand(2, 5000) < 0.8
    expected = torch.stack([row[kept].double().var() for row, kept in zip(x, keep, strict=True)])
    torch.testing.assert_close(masked.var(x, 1, keep=keep).double(), expected, rtol=1e-4, atol=0)
    assert (masked.var(torch.full((2, 5000), 1.1e8), 1, keep=keep) == 0).all()


def test_the_saved_mask_is_guarded_against_edits():
    """Overwriting the mask between forward and backward is an error, not a wrong gradient."""
    x, keep = torch.randn(5000, requires_grad=True), torch.rand(5000) < 0.5
    result = masked.mean(x, keep=keep)
    keep.fill_(True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        result.backward()


def test_the_values_may_be_edited_between_forward_and_backward():
    """A sum needs no values to go back, be they excluded by their value or not."""
    x = torch.tensor([1.0, math.nan, 2.0], requires_grad=True)
    y = x * 1
    result = masked.mean(y, exclude=math.nan)
    y.detach().fill_(0)
    assert torch.autograd.grad(result, x)[0].tolist() == [0.5, 0, 0.5]


@pytest.mark.usefixtures("both_paths")
@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf, -1.5, 3e38, *EDGES])
@pytest.mark.parametrize(("shape", "dim"), [((100_001,), None), ((101, 399), 1), ((399, 101), 0), ((2, 70_001), 1)])
def test_garbage_changes_no_bit(shape, dim, garbage):
    x, keep = torch.randn(shape), torch.rand(shape) < 0.7
    for name in (*HEAVY, "median"):
        fn = lambda x: BY_NAME[name].fn(x, dim, keep=keep)  # noqa: B023, E731
        clean = witness.value_and_gradients(fn, [soiled(x, keep, 0.0)])
        dirty = witness.value_and_gradients(fn, [soiled(x, keep, garbage)])
        witness.assert_same(dirty[0] + dirty[1], clean[0] + clean[1], what=name, exact=True)


def test_signalling_patterns_and_nan_payloads_do_not_leak():
    x, keep = torch.randn(4, 999), torch.rand(4, 999) < 0.7
    soil = torch.randint(0x7F800001, 0x7FFFFFFF, x.shape, dtype=torch.int32).view(torch.float32)
    for name in HEAVY:
        fn = lambda x: BY_NAME[name].fn(x, 1, keep=keep)  # noqa: B023, E731
        clean = witness.value_and_gradients(fn, [torch.where(keep, x, 0)])
        dirty = witness.value_and_gradients(fn, [torch.where(keep, x, soil)])
        witness.assert_same(dirty[0] + dirty[1], clean[0] + clean[1], what=name, exact=True)


@pytest.mark.usefixtures("both_paths")
def test_a_view_whose_bits_are_not_its_values():
    x = torch.randn(20_000, dtype=torch.complex64).conj()
    keep = torch.rand(20_000) < 0.5
    torch.testing.assert_close(masked.sum(x, keep=keep), x[keep].sum(), rtol=1e-4, atol=1e-3)
    torch.testing.assert_close(masked.amax(x.imag, keep=keep), x.imag[keep].amax())


def test_memory_that_is_not_aligned():
    memory = bytearray(torch.arange(41, dtype=torch.float32).numpy().tobytes())
    x = torch.frombuffer(memory, dtype=torch.float32, offset=1, count=40)
    assert x.data_ptr() % 4
    keep = torch.rand(40) < 0.5
    for name in HEAVY:
        torch.testing.assert_close(BY_NAME[name].fn(x, None, keep=keep), BY_NAME[name].fn(x.clone(), None, keep=keep))


def test_autocast_changes_nothing():
    x, keep = torch.randn(20_000), torch.rand(20_000) < 0.7
    for name in ("sum", "mean", "var 1", "amax", "softmax", "logsumexp"):
        fn = lambda x: BY_NAME[name].fn(x, None, keep=keep)  # noqa: B023, E731
        plain = witness.value_and_gradients(fn, [x])
        with torch.autocast("cpu", dtype=torch.bfloat16):
            mixed = witness.value_and_gradients(fn, [x])
        witness.assert_same(mixed[0] + mixed[1], plain[0] + plain[1], what=name, exact=True)


@pytest.mark.usefixtures("both_paths")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("place", [0, 123_456, 299_999])
def test_one_bad_element_of_a_long_slice(dtype, place):
    x, keep = torch.randn(300_000, dtype=dtype), torch.rand(300_000) < 0.7
    keep[place] = False
    clean = [masked.sum(x, keep=keep), masked.mean(x, keep=keep)]
    x[place] = math.nan
    witness.assert_same([masked.sum(x, keep=keep), masked.mean(x, keep=keep)], clean, what="garbage", exact=True)
    keep[place] = True
    assert masked.sum(x, keep=keep).isnan()
    assert masked.mean(x, keep=keep).isnan()


@pytest.mark.usefixtures("both_paths")
@pytest.mark.parametrize("size", [9000, 196_609])
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


@pytest.mark.usefixtures("both_paths")
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_kept_may_be_as_extreme_as_it_likes(dtype):
    info = torch.finfo(dtype)
    kept = torch.tensor([-0.0, info.min, info.max, -math.inf, math.inf, math.nan, info.tiny, 3.0], dtype=dtype)
    x = kept.unsqueeze(1).repeat(1, 2048)
    keep = torch.rand(x.shape) < 0.5
    keep[:, 0] = True
    for garbage in (0.0, info.max, info.min, math.inf, -math.inf, math.nan):
        dirty = soiled(x, keep, garbage)
        for found in (masked.amax(dirty, 1, keep=keep), masked.amin(dirty, 1, keep=keep)):
            signs = [value.signbit() & ~value.isnan() for value in (found, kept)]
            witness.assert_same([found, signs[0]], [kept, signs[1]], what=f"beside {garbage}", exact=True)
        if dtype in (torch.float32, torch.float64):
            expected = kept + keep.sum(1).to(dtype).log()
            torch.testing.assert_close(masked.logsumexp(dirty, 1, keep=keep), expected, equal_nan=True)
        weights = masked.softmax(dirty, 1, keep=keep)
        plain = [torch.softmax(row[mask], 0) for row, mask in zip(x, keep, strict=True)]
        for i, (row, mask, expected) in enumerate(zip(weights, keep, plain, strict=True)):
            expected = torch.zeros_like(expected) if kept[i] == -math.inf else expected
            torch.testing.assert_close(row[mask], expected, equal_nan=True)
            assert (row[~mask] == 0).all()


@pytest.mark.usefixtures("both_paths")
@pytest.mark.parametrize(("shape", "dim"), [((700, 400), 1), ((700, 400), 0), ((3, 50_001), 1), ((9, 8, 400), (0, 1))])
def test_large_masks_are_counted(shape, dim):
    keep = torch.rand(shape) < 0.4
    x = torch.zeros(shape)
    for mask in (keep, keep.transpose(0, 1).contiguous().transpose(0, 1)):
        assert torch.equal(masked.count(x, dim, keep=mask), keep.sum(dim))
        assert torch.equal(masked.count(x, dim, keep=mask, keepdim=True), keep.sum(dim, keepdim=True))
    assert masked.count(x, keep=keep) == keep.sum()
    assert torch.equal(masked.count(x, dim, keep=keep[..., :1]), keep[..., :1].expand(shape).sum(dim))


@pytest.mark.slow
def test_more_elements_than_an_int_can_count():
    """Addresses beyond 2**31; one byte each, and the mask is the tensor itself."""
    x = torch.zeros((1 << 31) + 4096, dtype=torch.uint8)
    if not _kernels.usable(x):
        pytest.skip("torch alone needs 16 GiB for this: it converts the bytes to int64 before it adds them")
    x[-1] = x[5] = 1
    mask = x.view(torch.bool)
    assert masked.count(x, keep=mask) == 2
    assert masked.sum(x, keep=mask) == 2
    assert masked.sum(x.view(-1, 4096), 0, keep=mask.view(-1, 4096)).nonzero().flatten().tolist() == [5, 4095]
