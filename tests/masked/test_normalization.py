"""batch_norm and layer_norm: the statistics see only what is kept."""

import hypothesis.strategies as st
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings

from gradgate import masked
from gradgate.errors import ArgumentTypeError, ArgumentValueError
from tests import witness
from tests.masked.normalization import batch_norm_oracle, layer_norm_oracle

NAN = float("nan")


@pytest.mark.slow
@settings(max_examples=40)
@given(st.integers(0, 10**6), st.sampled_from([NAN, float("inf"), 5.0]), st.booleans(), st.booleans())
def test_batch_norm_is_that_of_what_is_kept(seed, garbage, training, whole_samples):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(4, 3, 5, generator=generator, dtype=torch.float64)
    keep = torch.rand(4, 1 if whole_samples else 3, 1 if whole_samples else 5, generator=generator) < 0.6
    weight, bias = torch.randn(2, 3, generator=generator, dtype=torch.float64)
    start = torch.rand(2, 3, generator=generator, dtype=torch.float64) + 0.5
    ours, theirs = start.clone(), start.clone()

    def fn(x, weight, bias):
        dirty = torch.where(keep, x, garbage)
        return masked.batch_norm(dirty, ours[0], ours[1], weight, bias, training, keep=keep)

    def oracle(x, weight, bias):
        return batch_norm_oracle(x, theirs[0], theirs[1], weight, bias, keep, training)

    witness.check_against(fn, oracle, [x, weight, bias])
    torch.testing.assert_close(ours, theirs)
    assert torch.equal(ours, start) is (not training or not keep.any())


@pytest.mark.slow
@settings(max_examples=40)
@given(st.integers(0, 10**6), st.sampled_from([NAN, float("inf"), 5.0]))
def test_layer_norm_is_that_of_what_is_kept(seed, garbage):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(2, 3, 4, generator=generator, dtype=torch.float64)
    keep = torch.rand(2, 3, 4, generator=generator) < 0.6
    weight, bias = torch.randn(2, 4, generator=generator, dtype=torch.float64)
    witness.check_against(
        lambda x, w, b: masked.layer_norm(torch.where(keep, x, garbage), [4], w, b, keep=keep),
        lambda x, w, b: layer_norm_oracle(x, w, b, keep),
        [x, weight, bias],
    )


def test_layer_norm_over_several_dimensions_is_that_over_one_flat_dimension():
    x, keep = torch.randn(3, 2, 4), torch.rand(3, 2, 4) < 0.6
    ours = masked.layer_norm(x, (2, 4), keep=keep)
    flat = masked.layer_norm(x.reshape(3, 8), (8,), keep=keep.reshape(3, 8))
    torch.testing.assert_close(ours, flat.reshape(3, 2, 4))


def test_a_padded_batch_gives_what_the_batch_without_padding_gives():
    batch, padding = torch.randn(6, 3, 7), torch.full((2, 3, 7), NAN)
    keep = torch.tensor([True] * 6 + [False] * 2)[:, None, None]
    ours, theirs = torch.nn.BatchNorm1d(3), torch.nn.BatchNorm1d(3)
    out = masked.batch_norm(
        torch.cat([batch, padding]), ours.running_mean, ours.running_var, ours.weight, ours.bias, True, keep=keep
    )
    torch.testing.assert_close(out[:6], theirs(batch))
    assert (out[6:] == 0).all()
    torch.testing.assert_close(ours.running_mean, theirs.running_mean)
    torch.testing.assert_close(ours.running_var, theirs.running_var)


def test_with_everything_kept_they_are_the_plain_functions():
    x = torch.randn(4, 3)
    assert torch.equal(masked.layer_norm(x, [3]), F.layer_norm(x, [3]))
    assert torch.equal(masked.batch_norm(x, None, None, training=True), F.batch_norm(x, None, None, training=True))
    ones = torch.ones(4, 3, dtype=torch.bool)
    torch.testing.assert_close(masked.layer_norm(x, [3], keep=ones), F.layer_norm(x, [3]))


@pytest.mark.slow
@pytest.mark.parametrize("promise", ["compile", "vmap", "jvp", "func_grad", "fake", "float16", "gradcheck"])
def test_ways_of_using_them(promise):
    x = torch.randn(4, 3, dtype=torch.float64)
    keep = torch.tensor([[True, True, True], [False, True, True], [True, False, True], [True, True, False]])
    check = witness.CHECKS[promise]
    weight, bias = torch.randn(3, dtype=torch.float64), torch.randn(3, dtype=torch.float64)
    if promise != "vmap":  # rolled masks would keep one element of a channel
        mean, var = torch.zeros(3, dtype=torch.float64), torch.ones(3, dtype=torch.float64)
        check(
            lambda x, keep: masked.batch_norm(x, None, None, weight.to(x.dtype), bias.to(x.dtype), True, keep=keep),
            lambda x, keep: batch_norm_oracle(x, mean, var, weight, bias, keep, True),
            [x, keep],
        )
    check(
        lambda x, keep: masked.layer_norm(x, [3], weight.to(x.dtype), bias.to(x.dtype), keep=keep),
        lambda x, keep: layer_norm_oracle(x, weight, bias, keep),
        [x, keep],
    )


def test_errors_teach():
    with pytest.raises(ArgumentValueError, match=r"`normalized_shape` is \(4,\), x is a float32 tensor of shape"):
        masked.layer_norm(torch.zeros(2, 3), [4])
    with pytest.raises(ArgumentValueError, match="dimension 1 is the channels"):
        masked.batch_norm(torch.zeros(3), None, None, training=True)
    with pytest.raises(ArgumentValueError, match="no running statistics and `training` is False"):
        masked.batch_norm(torch.zeros(3, 2), None, None)
    with pytest.raises(ArgumentTypeError, match="the result is generally not an integer"):
        masked.batch_norm(torch.zeros(3, 2).int(), None, None, training=True)
