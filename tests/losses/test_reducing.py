"""losses.reduce: the sum over what is kept, divided by what was kept."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import gradgate as gg
from gradgate import losses
from tests.witness import REAL, witness

NAN, INF = math.nan, math.inf


def oracle(per_element, keep=None, weights=None):
    """Add up in a loop, over the elements that take part."""
    shape = per_element.shape
    each = (
        None if weights is None else (weights.reshape(-1, *[1] * (len(shape) - 1)) if weights.dim() == 1 else weights)
    )
    mask = None if keep is None else (keep.reshape(-1, *[1] * (len(shape) - 1)) if keep.dim() == 1 else keep)
    total, amount = per_element.sum() * 0, 0.0
    if not per_element.isfinite().all():
        total = per_element.new_zeros(())
    for place in range(per_element.numel()):
        index = tuple(int(i) for i in torch.unravel_index(torch.tensor(place), shape))
        weight = 1.0 if each is None else each.expand(shape)[index]
        if (mask is None or mask.expand(shape)[index]) and weight != 0:
            total, amount = total + weight * per_element[index], amount + weight
    return total / amount if amount else total


@st.composite
def cases(draw):
    shape = draw(st.lists(st.integers(0, 4), min_size=1, max_size=3))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 10**6)))
    per_element = torch.randn(shape, generator=generator, dtype=torch.float64)
    sizes = [shape, shape[:1]]
    keep = draw(st.sampled_from([None, *sizes]))
    weights = draw(st.sampled_from([None, *sizes]))
    if keep is not None:
        keep = torch.rand(keep, generator=generator) < draw(st.sampled_from([0.0, 0.5, 1.0]))
    if weights is not None:
        weights = torch.rand(weights, generator=generator, dtype=torch.float64)
        weights = weights * (torch.rand(weights.shape, generator=generator) < 0.7)
    return per_element, keep, weights


@given(cases())
def test_it_is_the_sum_over_what_is_kept_divided_by_what_was_kept(case):
    per_element, keep, weights = case
    torch.testing.assert_close(
        losses.reduce(per_element, keep=keep, weights=weights), oracle(per_element, keep, weights)
    )


@given(cases(), st.sampled_from([NAN, INF, -INF, 1e300]))
def test_garbage_that_is_left_out_changes_neither_value_nor_gradient(case, garbage):
    per_element, keep, weights = case
    shape = per_element.shape
    out = torch.zeros(shape, dtype=torch.bool)
    for each in (keep, weights):
        if each is not None:
            per_sample = each.reshape(-1, *[1] * (per_element.dim() - 1)) if each.shape != shape else each
            out |= per_sample == 0
    clean = torch.where(out, 0, per_element).requires_grad_()
    dirty = torch.where(out, garbage, per_element).requires_grad_()
    results = [losses.reduce(x, keep=keep, weights=weights) for x in (clean, dirty)]
    assert torch.equal(*results)
    gradients = [torch.autograd.grad(result, x)[0] for result, x in zip(results, (clean, dirty), strict=True)]
    assert torch.equal(*gradients)
    assert (gradients[1][out] == 0).all()


@pytest.mark.slow
def test_in_every_way_of_using_it():
    keep = torch.tensor([[True, False, True], [True, True, False]])
    weights = torch.tensor([0.5, 2.0], dtype=torch.float64)
    witness(
        lambda x, m: losses.reduce(x, keep=m, weights=weights.to(x.dtype)),
        lambda x, m: (x * weights[:, None].to(x.dtype) * m).sum() / (weights[:, None].to(x.dtype) * m).sum(),
        torch.randn(2, 3, dtype=torch.float64),
        keep,
        promises=REAL,
    )


def test_weights_can_learn():
    weights = torch.tensor([1.0, 3.0], requires_grad=True)
    losses.reduce(torch.tensor([2.0, 6.0]), weights=weights).backward()
    assert torch.allclose(weights.grad, torch.tensor([(2 - 5) / 4, (6 - 5) / 4]))


def test_nothing_kept():
    x = torch.tensor([NAN, 1.0], requires_grad=True)
    loss = losses.reduce(x, keep=torch.tensor([False, False]))
    loss.backward()
    assert loss == 0
    assert torch.equal(x.grad, torch.zeros(2))
    assert losses.reduce(x, weights=torch.zeros(2), empty=7.0) == 7
    assert losses.reduce(x, keep=torch.tensor([False, False]), empty=NAN).isnan()
    assert losses.reduce(torch.zeros(0)) == 0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("value", [0.0078125, 8.0])
def test_more_halves_than_a_half_can_count(dtype, value):
    x = torch.full((100_000,), value, dtype=dtype, requires_grad=True)
    keep, weights = torch.arange(100_000) > 4, torch.full((100_000,), 1e5)
    for options in ({}, {"keep": keep}, {"weights": weights}, {"keep": keep, "weights": weights}):
        loss = losses.reduce(x, **options)
        assert loss.dtype is dtype
        assert loss == value
        (gradient,) = torch.autograd.grad(loss, x)
        torch.testing.assert_close(gradient[9], torch.tensor(1e-5, dtype=dtype), rtol=0.01, atol=6e-8)


def test_integers_and_bools_are_averaged_too():
    wrong = torch.tensor([True, True, False, True])
    assert losses.reduce(wrong) == 0.75
    assert losses.reduce(wrong, keep=torch.tensor([True, True, True, False])) == torch.tensor(2 / 3)
    assert losses.reduce(torch.tensor([1, 2, 3]), weights=torch.tensor([0.5, 0.5, 1.0])) == 2.25
    assert losses.reduce(torch.ones(300, dtype=torch.uint8)) == 1
    assert losses.reduce(torch.ones(300, dtype=torch.uint8), keep=torch.arange(300) > 2) == 1


def test_one_answer_per_sample_is_about_samples_also_when_broadcasting_would_take_it_otherwise():
    square = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    assert losses.reduce(square, keep=torch.tensor([True, False])) == 1.5


def test_one_answer_per_column_is_not_guessed():
    x = torch.ones(2, 3)
    for call in (
        losses.reduce,
        losses.huber,
        lambda x, **kw: losses.masked_loss(torch.nn.functional.mse_loss, x, x, **kw),
    ):
        for wrong in ({"keep": torch.tensor([True, False, True])}, {"weights": torch.ones(3)}):
            name = next(iter(wrong))
            with pytest.raises(
                gg.errors.ArgumentValueError,
                match=rf"(?s)`{name}` has 3 values for 2 samples.*{name}={name}.expand\(2, 3\)",
            ):
                call(x, **wrong)
    assert losses.reduce(x, keep=torch.tensor([True, False, True]).expand(2, 3)) == 1


def test_wrong_masks_and_weights():
    x = torch.ones(2, 3)
    with pytest.raises(gg.errors.ArgumentTypeError, match=r"losses.reduce\(\): `keep` is a float32 tensor"):
        losses.reduce(x, keep=torch.ones(2))
    with pytest.raises(gg.errors.ArgumentValueError, match=r"(?s)`keep` has shape \(4,\).*exactly one answer"):
        losses.reduce(x, keep=torch.ones(4, dtype=torch.bool))
    with pytest.raises(gg.errors.ArgumentValueError, match=r"`weights` has shape \(4,\)"):
        losses.reduce(x, weights=torch.ones(4))
    with pytest.raises(gg.errors.ArgumentTypeError, match=r"(?s)`weights` is a complex64 tensor.*weights.abs\(\)"):
        losses.reduce(x, weights=torch.ones(2, dtype=torch.complex64))
    with pytest.raises(gg.errors.ArgumentTypeError, match="`per_element` is the list"):
        losses.reduce([1.0, 2.0])
    for call in (losses.reduce, losses.huber, losses.barron, lambda x, **kw: losses.huber(x, reduction="none", **kw)):
        with pytest.raises(gg.errors.ArgumentTypeError, match=r"(?s)`keep` is the list.*keep=torch.as_tensor"):
            call(x, keep=[True, False])
        with pytest.raises(gg.errors.ArgumentTypeError, match="`weights` is the list"):
            call(x, weights=[1.0, 0.0])


def test_limit_reduce_cannot_undo_a_nan_made_before_it():
    prediction = torch.tensor([1.0, 2.0], requires_grad=True)
    per_sample = (prediction - torch.tensor([0.0, NAN])) ** 2
    losses.reduce(per_sample, keep=torch.tensor([True, False])).backward()
    assert prediction.grad[1].isnan()
