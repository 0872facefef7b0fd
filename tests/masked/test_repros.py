"""Problems that users reported, told again with the reductions, each with a good end and the number of its story."""

import math

import pytest
import torch

from gradgate import masked

NAN, INF = math.nan, math.inf


def gradient_of(out, x):
    return torch.autograd.grad(out.sum(), x)[0].tolist()


def test_10_masking_is_a_selection_and_not_a_product():
    losses = torch.tensor([1.0, INF, NAN], requires_grad=True)
    keep = torch.tensor([True, False, False])
    assert masked.sum(losses, keep=keep).item() == 1.0
    arriving = torch.tensor([2.0, NAN, 3.0])
    x = torch.ones(3, requires_grad=True)
    kept = masked.cumsum(x, keep=torch.tensor([True, False, True]))
    assert torch.autograd.grad(kept[[0, 2]], x, arriving[[0, 2]])[0].tolist() == [5.0, 0.0, 3.0]


def test_25_missing_targets_leave_the_mean_and_the_gradient_alone():
    target = torch.tensor([NAN, 1.0])
    prediction = torch.tensor([0.3, 0.7], requires_grad=True)
    loss = masked.mean((prediction - torch.where(target.isnan(), 0, target)).square(), keep=~target.isnan())
    assert gradient_of(loss, prediction) == pytest.approx([0.0, -0.6])


def test_26_the_norm_of_nothing_pulls_nowhere():
    x = torch.zeros(3, requires_grad=True)
    assert gradient_of(masked.norm(x), x) == [0, 0, 0]
    x = torch.tensor([3.0, 4.0, NAN], requires_grad=True)
    assert gradient_of(masked.norm(x, exclude=NAN), x) == pytest.approx([0.6, 0.8, 0.0])


def test_28_a_fully_masked_row_is_a_row_of_zeros():
    scores = torch.tensor([[0.0, 1.0], [0.0, 0.0]], requires_grad=True)
    keep = torch.tensor([[True, True], [False, False]])
    weights = masked.softmax(scores, dim=-1, keep=keep)
    assert weights[1].tolist() == [0, 0]
    gradient = torch.autograd.grad(weights[0, 1], scores)[0]
    torch.testing.assert_close(gradient, torch.tensor([[-0.196612, 0.196612], [0.0, 0.0]]))


@pytest.mark.parametrize("name", ["var", "std", "amax", "amin", "prod", "cumsum", "argmax", "argmin", "logsumexp"])
def test_30_every_reduction_has_its_form_without_nan(name):
    x = torch.tensor([3.0, NAN, 1.0, 2.0])
    plain = {"argmax": torch.argmax, "argmin": torch.argmin}.get(name)
    ours = getattr(masked, name)(x, exclude=NAN)
    if name == "cumsum":
        assert ours.tolist() == [3, 3, 4, 6]
    elif plain is not None:
        assert ours == {"argmax": 0, "argmin": 2}[name]
    else:
        kept = x[~x.isnan()]
        args = (0,) if name in ("logsumexp", "prod") else ()
        torch.testing.assert_close(ours, getattr(kept, name)(*args))


@pytest.mark.parametrize("name", ["sum", "mean", "var", "std", "norm", "amax", "logsumexp", "softmax", "median"])
def test_31_plain_tensors_with_a_mask_have_gradients_that_are_numbers(name):
    x = torch.tensor([1.0, NAN, 3.0], requires_grad=True)
    result = getattr(masked, name)(x, keep=torch.tensor([True, False, True]))
    gradient = torch.autograd.grad(result.sum(), x)[0]
    assert result.isfinite().all()
    assert gradient.isfinite().all()
    assert gradient[1] == 0


def test_31_nothing_left_is_told_and_not_guessed():
    row = torch.tensor([[1.0, 2.0]])
    nothing = torch.zeros(1, 2, dtype=torch.bool)
    assert masked.softmax(row, 1, keep=nothing).tolist() == [[0, 0]]
    assert masked.mean(row, 1, keep=nothing, empty=0.0).item() == 0


def test_32_a_head_without_labels_adds_nothing():
    losses = torch.tensor([0.5, 1.5], requires_grad=True)
    nothing = torch.zeros(2, dtype=torch.bool)
    total = losses.mean() + masked.mean(losses, keep=nothing, empty=0.0)
    assert total.item() == 1.0
    assert gradient_of(total, losses) == [0.5, 0.5]


def test_33_the_denominator_is_what_was_kept():
    per_sample = torch.tensor([0.41, 0.0])  # the second was ignored
    assert masked.mean(per_sample, keep=torch.tensor([True, False])).item() == pytest.approx(0.41)


@pytest.mark.parametrize("logit", [1.0, 0.0, -INF])
def test_35_an_ignored_class_takes_no_probability(logit):
    logits = torch.tensor([logit, 1.0, 1.0])
    loss = -masked.log_softmax(logits, keep=torch.tensor([False, True, True]))[1]
    assert loss.item() == pytest.approx(0.6931, abs=1e-4)


def test_48_statistics_do_not_see_a_bad_row():
    batch = torch.randn(5, 3)
    batch[2] = NAN
    mean, var = torch.zeros(3), torch.ones(3)
    masked.batch_norm(batch, mean, var, training=True, keep=batch.isfinite().all(1, keepdim=True))
    kept = batch[[0, 1, 3, 4]]
    torch.testing.assert_close(mean, 0.1 * kept.mean(0))
    torch.testing.assert_close(var, 0.9 + 0.1 * kept.var(0))


def test_49_one_survivor_does_not_stop_the_training():
    batch = torch.tensor([[1.0, 2.0], [NAN, NAN]])
    out = masked.batch_norm(batch, None, None, training=True, exclude=NAN)
    assert out.tolist() == [[0, 0], [0, 0]]


def test_59_the_median_is_the_one_in_the_middle():
    x = torch.tensor([1.0, 2.0, 3.0, 4.0])
    assert masked.median(x).item() == 2.5 == -masked.median(-x).item()
    pairs = torch.tensor([1.0, 1.0, 5.0, 5.0])
    assert masked.median((pairs - masked.median(pairs)).abs()).item() == 2.0
