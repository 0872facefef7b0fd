"""Troubles that people reported, each ending well: numbers are those of the stories."""

import math

import pytest
import torch
from torch.nn import functional as F

from gradgate import losses, masked

NAN, INF = math.nan, math.inf


def test_25_nan_targets_do_not_reach_the_gradient():
    weight = torch.tensor([0.5, 0.3], requires_grad=True)
    x, y = torch.tensor([1.0, 2.0]), torch.tensor([NAN, 0.8])
    loss = losses.masked_loss(F.mse_loss, weight * x, y, exclude=NAN)
    loss.backward()
    torch.testing.assert_close(loss, ((weight[1] * 2 - 0.8) ** 2).detach().requires_grad_())
    assert weight.grad[0] == 0
    assert weight.grad[1].isfinite()


def test_32_a_head_without_a_label_does_not_spoil_the_other():
    weight = torch.tensor(1.0, requires_grad=True)
    logits = weight * torch.tensor([[1.0, 2.0, 3.0]])
    first = losses.masked_loss(F.cross_entropy, logits, torch.tensor([0]))
    none = losses.masked_loss(F.cross_entropy, logits, torch.tensor([-100]))
    assert none == 0
    assert none.requires_grad
    (alone,) = torch.autograd.grad(first, weight, retain_graph=True)
    (both,) = torch.autograd.grad(first + none, weight)
    assert torch.equal(both, alone)
    assert (first + none).isfinite()


def test_33_the_denominator_is_what_was_kept():
    logits, target = torch.randn(4, 3), torch.tensor([0, -100, 2, -100])
    per_sample = F.cross_entropy(logits, target, reduction="none")
    torch.testing.assert_close(losses.reduce(per_sample, keep=target != -100), F.cross_entropy(logits, target))


def test_33_binary_cross_entropy_has_a_label_to_leave_out():
    logits = torch.tensor([2.0, -1.0, 0.4], requires_grad=True)
    target = torch.tensor([1.0, 0.0, -100.0])
    loss = losses.masked_loss(F.binary_cross_entropy_with_logits, logits, target, exclude=-100)
    loss.backward()
    torch.testing.assert_close(loss, F.binary_cross_entropy_with_logits(logits[:2], target[:2]))
    assert logits.grad[2] == 0
    torch.testing.assert_close(logits.grad[:2], (logits[:2].sigmoid() - target[:2]).detach() / 2)


@pytest.mark.parametrize("ignored", [1.0, 0.0, -INF, NAN])
def test_35_a_class_that_is_left_out_takes_no_probability(ignored):
    logits = torch.tensor([[ignored, 1.0, 1.0]], requires_grad=True)
    scores = masked.log_softmax(logits, 1, keep=torch.tensor([False, True, True]))
    loss = F.nll_loss(scores, torch.tensor([1]))
    loss.backward()
    assert math.isclose(loss.item(), math.log(2), rel_tol=1e-6)
    assert logits.grad[0, 0] == 0


def test_50_micro_batches_with_unequal_counts():
    torch.manual_seed(0)
    model = torch.nn.Linear(5, 3)
    x, target = torch.randn(7, 5), torch.randint(0, 3, (7,))
    F.cross_entropy(model(x), target).backward()
    whole = model.weight.grad.clone()
    model.zero_grad()
    exact = losses.ExactMean(model)
    for rows in (slice(0, 6), slice(6, 7)):
        exact.backward(F.cross_entropy(model(x[rows]), target[rows], reduction="sum"), len(x[rows]))
    exact.finish()
    torch.testing.assert_close(model.weight.grad, whole)


@pytest.mark.parametrize("bad", [NAN, INF])
@pytest.mark.parametrize("loss", [F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss])
def test_57_a_bad_target_gets_gradient_zero_in_every_loss(loss, bad):
    prediction = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
    target = torch.tensor([1.5, bad, 5.0])
    losses.masked_loss(loss, prediction, target, exclude=[NAN, INF]).backward()
    assert prediction.grad[1] == 0
    assert prediction.grad[[0, 2]].isfinite().all()
    prediction.grad = None
    losses.huber(prediction - target, keep=target.isfinite()).backward()
    assert prediction.grad[1] == 0


def test_59_the_deviation_of_two_pairs_is_two():
    x = torch.tensor([1.0, 1.0, 5.0, 5.0])
    assert masked.median(x) == 3
    assert masked.median((x - masked.median(x)).abs()) == 2
    assert losses.inliers(x).all()
