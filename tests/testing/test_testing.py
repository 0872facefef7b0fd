"""Assertions for pytest: they pass on what is well, and their failure is the finding."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gradgate as gg
from gradgate.errors import ArgumentTypeError, FrozenMovedError
from gradgate.testing import assert_finite_grads, assert_frozen, assert_learns, assert_no_cut

X = torch.linspace(-1, 1, 24).reshape(6, 4)
BATCH = (X, torch.tensor([0, 1, 2, 0, 1, 2]))


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.1), nn.Linear(8, 3))


def loss_of(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


ALL = [assert_learns, assert_no_cut, assert_finite_grads]


@pytest.mark.parametrize("check", ALL)
def test_a_healthy_model_passes_and_is_left_as_it_was(check):
    model = net()
    model(X).sum().backward()
    before = copy.deepcopy(model.state_dict())
    gradients = [p.grad for p in model.parameters()]
    random = torch.get_rng_state()
    check(model, BATCH, loss_of)
    check(model, BATCH, lambda batch: loss_of(model, batch))
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
    assert all(p.grad is g for p, g in zip(model.parameters(), gradients, strict=True))
    assert torch.equal(random, torch.get_rng_state())


def test_a_batch_can_be_learned():
    model = net()
    before = copy.deepcopy(model.state_dict())
    assert_learns(model, BATCH, loss_of, steps=10)
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
    with pytest.raises(AssertionError, match=r"after 3 steps on this batch the loss is .*; it was .* before"):
        assert_learns(model, BATCH, loss_of, steps=3, learning_rate=0.0)


@pytest.mark.parametrize("check", [assert_learns, assert_no_cut])
def test_a_cut_is_the_message(check):
    model = nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Linear(4, 3)})
    with pytest.raises(
        AssertionError, match=r"error GG101: a.weight, a.bias get no gradient(.|\n)*detach\(\)(.|\n)*fix: h = h"
    ):
        check(model, BATCH, lambda model, batch: F.cross_entropy(model.b(model.a(batch[0]).detach()), batch[1]))


def test_an_unused_parameter_does_not_learn_but_is_no_cut():
    model = nn.ModuleDict({"a": nn.Linear(4, 3), "spare": nn.Linear(4, 3)})
    assert_no_cut(model, BATCH, lambda model, batch: model.a(batch[0]).mean())
    with pytest.raises(AssertionError, match=r"GG102: spare.weight, spare.bias are not used"):
        assert_learns(model, BATCH, lambda model, batch: model.a(batch[0]).mean())


def test_a_dead_layer_does_not_learn():
    model = net()
    nn.init.constant_(model[1].bias, -100)
    with pytest.raises(AssertionError, match="GG302"):
        assert_learns(model, BATCH, loss_of)


def test_a_frozen_part_need_not_learn():
    model = net()
    model[0].requires_grad_(False)
    assert_learns(model, BATCH, loss_of)


@pytest.mark.parametrize("check", [assert_learns, assert_finite_grads])
def test_a_bad_gradient_is_the_message(check):
    model = nn.Linear(4, 1)
    with pytest.raises(
        AssertionError, match=r"GG403: Inf gradient produced in the backward of `\(model\(x\) \* 0\).sqrt\(\)`"
    ):
        check(model, X, lambda model, x: (model(x) * 0).sqrt().mean())


def test_a_step_that_raises_is_a_failure_with_its_cause():
    model = net()
    with pytest.raises(AssertionError, match="the step raised ZeroDivisionError") as caught:
        assert_learns(model, BATCH, lambda model, batch: 1 / 0)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_frozen_is_what_freezing_says():
    model = net()
    handle = gg.freeze(model, "0.*")
    assert_frozen(handle)
    model[0].weight.data[0, 0] = 9.0
    with pytest.raises(FrozenMovedError, match=r"0.weight\[0, 0\] is frozen and moved"):
        assert_frozen(handle)


@pytest.mark.parametrize("check", ALL)
def test_wrong_arguments(check):
    with pytest.raises(ArgumentTypeError, match=rf"{check.__name__}\(\): `model` is the str 'm'"):
        check("m", BATCH, loss_of)
    with pytest.raises(ArgumentTypeError, match=rf"{check.__name__}\(\): `loss_fn` is None"):
        check(net(), BATCH, None)


@pytest.mark.parametrize("check", ALL)
@pytest.mark.parametrize(
    ("loss_fn", "said"),
    [
        (lambda model, batch: None, "`loss_fn` gave None"),
        (lambda model, batch: loss_of(model, batch).item(), "`loss_fn` gave the float"),
        (lambda model, batch: {"loss": loss_of(model, batch)}, "`loss_fn` gave the dict"),
        (lambda model, batch: model(batch[0]), "error GG004: backward\\(\\) needs one number"),
    ],
)
def test_what_gives_no_loss_proves_nothing(check, loss_fn, said):
    with pytest.raises(AssertionError, match=said):
        check(net(), BATCH, loss_fn)


@pytest.mark.parametrize("check", ALL)
def test_a_loss_that_went_back_by_itself_is_enough(check):
    check(net(), BATCH, lambda model, batch: loss_of(model, batch).backward())
