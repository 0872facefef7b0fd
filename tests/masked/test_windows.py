"""Pools, convolutions and attention: equal to loops over windows and queries with what is left out removed."""

import math

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch.nn import functional as F

from gradgate import masked
from gradgate.errors import ArgumentTypeError, ArgumentValueError, NothingKeptError
from tests import witness
from tests.masked import oracles
from tests.masked.test_laws import GARBAGE, soiled

pytestmark = pytest.mark.usefixtures("both_paths")

NAN, INF = math.nan, math.inf
few = settings(max_examples=15)


@st.composite
def images(draw):
    sizes = draw(st.sampled_from([(5,), (6,), (4, 5), (3, 3), (2, 3, 2)]))
    batch, channels = draw(st.integers(0, 2)), 2
    generator = torch.Generator().manual_seed(draw(st.integers(0, 10**6)))
    x = torch.randn(batch, channels, *sizes, generator=generator, dtype=torch.float64)
    mask_shape = [batch, draw(st.sampled_from([1, channels])), *sizes]
    keep = torch.rand(mask_shape, generator=generator) < draw(st.sampled_from([0.0, 0.4, 0.8, 1.0]))
    options = {"stride": draw(st.integers(1, 2)), "padding": draw(st.integers(0, 1))}
    return x, keep, options, generator


def compare(fn, oracle, inputs, dirty, left_out):
    for order in (1, 2):
        ours, gradients = witness.value_and_gradients(fn, dirty, order)
        theirs, expected = witness.value_and_gradients(oracle, inputs, order)
        witness.assert_same(ours, theirs, what="value")
        zero = [torch.zeros_like(each) for each in inputs]
        witness.assert_same(gradients or zero, expected or zero, what=f"gradient {order}")
        if gradients:
            assert (gradients[0][left_out] == 0).all()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["avg_pool", "max_pool"])
@few
@given(images(), st.sampled_from(GARBAGE))
def test_a_pool_is_the_plain_function_of_what_each_window_keeps(name, drawn, garbage):
    x, keep, options, _ = drawn
    of_kept = torch.mean if name == "avg_pool" else oracles.largest
    kernel = (2,) * (x.dim() - 2)
    compare(
        lambda x: getattr(masked, name)(x, 2, keep=keep, **options),
        lambda x: oracles.pool(x, keep, kernel, of_kept, **options),
        [x],
        [soiled(x, keep, garbage)],
        ~keep.expand(x.shape),
    )


@pytest.mark.slow
@few
@given(images(), st.sampled_from(GARBAGE), st.sampled_from([1, 2]), st.integers(1, 2))
def test_a_convolution_scales_what_each_window_keeps(drawn, garbage, groups, dilation):
    x, keep, options, generator = drawn
    options["padding"] = 1
    size = 2 if dilation == 1 or min(x.shape[2:]) > 2 else 1
    weight = torch.randn(4, 2 // groups, *[size] * (x.dim() - 2), generator=generator, dtype=torch.float64)
    bias = torch.randn(4, generator=generator, dtype=torch.float64)
    options |= {"groups": groups, "dilation": dilation}
    compare(
        lambda x, weight, bias: masked.conv(x, weight, bias, keep=keep, **options),
        lambda x, weight, bias: oracles.conv(x, weight, bias, keep, **options),
        [x, weight, bias],
        [soiled(x, keep, garbage), weight, bias],
        ~keep.expand(x.shape),
    )


@pytest.mark.parametrize("rank", [1, 2, 3])
def test_with_everything_kept_they_are_the_plain_functions(rank):
    x = torch.randn(2, 4, *[5] * rank, dtype=torch.float64)
    all_kept = torch.ones((), dtype=torch.bool)
    weight, bias = torch.randn(6, 2, *[3] * rank, dtype=torch.float64), torch.randn(6, dtype=torch.float64)
    average, largest, convolve = (getattr(F, f"{name}{rank}d") for name in ("avg_pool", "max_pool", "conv"))
    for keep in (None, all_kept):
        torch.testing.assert_close(masked.avg_pool(x, 3, 2, 1, keep=keep), average(x, 3, 2, 1, count_include_pad=False))
        torch.testing.assert_close(masked.max_pool(x, 3, padding=1, keep=keep), largest(x, 3, padding=1))
        for padding in (1, "same", "valid"):
            torch.testing.assert_close(
                masked.conv(x, weight, bias, 1, padding, groups=2, keep=keep),
                convolve(x, weight, bias, 1, padding, groups=2),
            )


def test_a_window_with_nothing_kept():
    x = torch.tensor([[[1.0, 2.0, NAN, INF]]], requires_grad=True)
    keep = torch.tensor([True, True, False, False])
    kernel = torch.ones(1, 1, 2, requires_grad=True)
    assert masked.avg_pool(x, 2, keep=keep)[..., 1].isnan()
    assert masked.max_pool(x, 2, keep=keep, empty=-1).tolist() == [[[2, -1]]]
    found = masked.conv(x, kernel, torch.ones(1), 2, keep=keep)
    assert found.tolist() == [[[4, 0]]]
    for result in (masked.avg_pool(x, 2, keep=keep), masked.max_pool(x, 2, keep=keep), found):
        gradients = torch.autograd.grad(result, [x, kernel], torch.tensor([[[1.0, NAN]]]), materialize_grads=True)
        assert all(gradient.isfinite().all() for gradient in gradients)
        assert (gradients[0][..., 2:] == 0).all()
    for function in (masked.avg_pool, masked.max_pool):
        with pytest.raises(
            NothingKeptError, match=r"nothing is kept for 1 of 2 results; the first is result\[0, 0, 1\]"
        ):
            function(x, 2, keep=keep, empty="raise")


def test_a_kept_infinity_wins_over_the_left_out():
    x = torch.tensor([[[5.0, -INF, 5.0, NAN]]], requires_grad=True)
    found = masked.max_pool(x, 2, exclude=5)
    assert found[..., 0] == -INF
    assert found[..., 1].isnan()  # NaN is kept
    found[..., 0].sum().backward()
    assert x.grad.tolist() == [[[0, 1, 0, 0]]]


def test_what_has_no_windows_is_refused():
    with pytest.raises(ArgumentValueError, match=r"masked.conv\(\): `x` is a float32 tensor of shape \(3, 4\)"):
        masked.conv(torch.zeros(3, 4), torch.zeros(1, 1, 2))
    with pytest.raises(ArgumentTypeError, match=r"masked.avg_pool\(\): `x` is the list"):
        masked.avg_pool([1.0], 2)
    with pytest.raises(ArgumentTypeError, match=r"masked.max_pool\(\): `x` is an? int64"):
        masked.max_pool(torch.zeros(1, 1, 4, dtype=torch.int64), 2)


def test_counts_do_not_suffer_from_autocast():
    x = torch.ones(1, 64, 8, 8)  # 576 elements in a window, which bfloat16 cannot count
    keep = torch.ones(8, 8, dtype=torch.bool)
    keep[0, 0] = False
    weight = torch.zeros(1, 64, 3, 3)
    weight[0, 0] = 1
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = masked.conv(x, weight, keep=keep).float()
    torch.testing.assert_close(found, torch.full_like(found, 9.0), rtol=1e-2, atol=0)


# --- attention ------------------------------------------------------------------------------------------------------


@st.composite
def heads(draw):
    batch, queries, keys = draw(st.integers(0, 2)), draw(st.integers(0, 3)), draw(st.integers(0, 4))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 10**6)))
    shapes = ((batch, queries, 3), (batch, keys, 3), (batch, keys, 2))
    parts = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    keep = torch.rand(batch, queries, keys, generator=generator) < draw(st.sampled_from([0.0, 0.3, 0.7, 1.0]))
    return *parts, keep


@few
@given(heads(), st.sampled_from(GARBAGE))
def test_attention_sees_what_is_kept_alone(drawn, garbage):
    query, key, value, keep = drawn
    dead_query, dead_key = ~keep.any(-1, keepdim=True), ~keep.any(-2).unsqueeze(-1)
    dirty = [torch.where(dead_query, garbage, query), *(torch.where(dead_key, garbage, part) for part in (key, value))]
    fn = lambda *parts: masked.attention(*parts, keep=keep)  # noqa: E731
    compare(
        fn, lambda *parts: oracles.attention(*parts, keep), [query, key, value], dirty, dead_query.expand(query.shape)
    )
    gradients = witness.value_and_gradients(fn, dirty)[1]
    for gradient, dead in zip(gradients, (dead_query, dead_key, dead_key), strict=False):
        assert (gradient[dead.expand(gradient.shape)] == 0).all()


def test_attention_is_that_of_torch():
    query, key, value = torch.randn(2, 4, 5, 8), torch.randn(2, 4, 5, 8), torch.randn(2, 4, 5, 3)
    keep = torch.rand(2, 1, 1, 5) < 0.7
    keep[..., 0] = True
    plain = F.scaled_dot_product_attention
    torch.testing.assert_close(masked.attention(query, key, value), plain(query, key, value))
    torch.testing.assert_close(masked.attention(query, key, value, keep=keep), plain(query, key, value, keep))
    causal = keep & torch.ones(5, 5, dtype=torch.bool).tril()
    torch.testing.assert_close(
        masked.attention(query, key, value, keep=keep, is_causal=True, scale=0.3),
        plain(query, key, value, causal, scale=0.3),
    )
    above = masked.attention(query, key, value, keep=(keep, lambda scores: scores > 0))
    assert torch.equal(above, masked.attention(query, key, value, keep=keep & (query @ key.mT > 0)))
    torch.testing.assert_close(  # one set of keys for all heads
        masked.attention(query, key[:, :1], value[:, :1], keep=keep), plain(query, key[:, :1], value[:, :1], keep)
    )


def test_a_bad_key_reaches_the_queries_that_keep_it_and_no_other():
    parts = [torch.randn(1, 4, 3, requires_grad=True) for _ in range(3)]
    with torch.no_grad():
        parts[1][0, 2] = NAN
        parts[2][0, 2, 0] = INF
    keep = torch.ones(4, 4, dtype=torch.bool).tril()  # the third position is bad, the first two come before it
    found = masked.attention(*parts, keep=keep)
    assert found[0, :2].isfinite().all()
    assert found[0, 2:].isnan().all()
    found[0, :2].sum().backward()
    assert all(part.grad.isfinite().all() for part in parts)
    with pytest.raises(ArgumentValueError, match=r"masked.attention\(\): `keep` has shape \(3, 4\)"):
        masked.attention(*parts, keep=keep[:3])
