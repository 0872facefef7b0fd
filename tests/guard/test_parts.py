"""Batches that do not fit into memory: split, exactly where samples do not meet, or skipped; and steps that follow."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import gradgate as gg


class Limited(nn.Module):
    """Runs out of memory above a size of the batch, where a graph is recorded, or always."""

    def __init__(self, limit, *, always=False):
        super().__init__()
        self.limit, self.always, self.sizes = limit, always, []

    def forward(self, x):
        if len(x) > self.limit and (self.always or torch.is_grad_enabled()):
            raise torch.OutOfMemoryError("out of memory: tried to allocate 20 GiB")
        self.sizes.append(len(x))
        return x


def net(limit, *more, always=False):
    torch.manual_seed(1)
    made = nn.Sequential(nn.Linear(3, 4), *more, nn.Tanh(), Limited(limit, always=always), nn.Linear(4, 1))
    return made.double()


def plain(model, x, form):
    """The step on the whole batch, of a model that has all the memory it needs."""
    model = copy.deepcopy(model)
    model[-2].limit = 10**6
    value = form(model)(x)
    (value[0] / value[1] if isinstance(value, tuple) else value.mean()).backward()
    return [parameter.grad for parameter in model.parameters()]


FORMS = {
    "mean": lambda model: lambda x: model(x).square().mean(),
    "each": lambda model: lambda x: model(x).square()[:, 0],
    "total": lambda model: lambda x: (model(x).square().sum(), len(x)),
}


def same(model, expected):
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-12, atol=1e-14)


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
@settings(max_examples=20, deadline=None)
@given(size=st.integers(2, 13), limit=st.integers(1, 13))
def test_the_gradient_is_that_of_the_whole_batch(form, size, limit):
    model = net(limit)
    x = torch.randn(size, 3, dtype=torch.float64)
    expected = plain(model, x, form)
    guard = gg.Guard(model, out_of_memory="split")
    result = guard.backward(x, form(model))
    loss = guard.finish() if form is FORMS["total"] else result.loss
    same(model, expected)
    value = form(net(10**6))(x)
    torch.testing.assert_close(
        loss, value[0] / value[1] if isinstance(value, tuple) else value.mean(), check_dtype=False
    )
    assert (result.exact, result.kept, result.stepped, result.dropped) == (True, [*range(size)], True, ())
    assert (guard.global_step, guard.summary().steps, guard.summary().samples) == (1, 1, size)
    if size > limit:
        (incident,) = result.transient
        assert (incident.cause, incident.exception_type) == ("out of memory", "torch.OutOfMemoryError")
        assert sum(incident.details["parts"]) == size
        assert max(model[-2].sizes[1:], default=0) <= limit


def test_it_is_added_to_gradients_that_are_there_and_weighted_without_the_bad(tmp_path):
    model, x = net(3), torch.randn(8, 3, dtype=torch.float64)
    x[6] = float("nan")
    good = x[[0, 1, 2, 3, 4, 5, 7]]
    expected = [2 * gradient for gradient in plain(model, good, FORMS["mean"])]
    ledger = gg.Ledger(tmp_path / "run.ledger")
    guard = gg.Guard(model, ledger=ledger, out_of_memory="split", payload=True)
    guard.backward(x[:6], lambda x: model(x).square().mean() * 0)
    for _ in range(2):
        result = guard.backward(x, FORMS["mean"](model), ids=[f"{row}.png" for row in range(8)])
    same(model, expected)
    assert result.kept == [0, 1, 2, 3, 4, 5, 7]
    assert [(one.sample_id, one.row, one.step) for one in result.dropped] == [("6.png", 6, 2)]
    assert not result.exact
    assert ledger.bad_ids() == {"6.png"}
    assert len(ledger.incidents(cause="out of memory")) == 3


@pytest.mark.parametrize(
    ("model", "form"),
    [
        (net(4, nn.BatchNorm1d(4)), FORMS["mean"]),
        (net(4), lambda model: lambda x: model(x).square().sum() / (1 + x[:, 0].relu().sum())),
        (net(4), lambda model: lambda x: (model(x) - model(x).mean()).square().mean()),
    ],
    ids=["batch norm", "mean over tokens", "compared"],
)
def test_where_samples_meet_it_says_so(model, form):
    torch.manual_seed(0)
    result = gg.Guard(model, out_of_memory="split").backward(torch.randn(8, 3, dtype=torch.float64), form(model))
    assert not result.exact
    assert "samples meet" in result.reason


def test_what_cannot_be_compared_is_not_called_exact():
    model = net(4, always=True)
    result = gg.Guard(model, out_of_memory="split").backward(torch.randn(8, 3).double(), FORMS["mean"](model))
    assert (result.exact, result.stepped) == (False, True)
    assert result.reason.startswith("the whole batch could not be computed without a graph")


def test_a_step_can_be_skipped():
    model, x = net(4), torch.randn(8, 3, dtype=torch.float64)
    guard = gg.Guard(model, out_of_memory="skip")
    result = guard.backward(x, FORMS["total"](model))
    assert (result.kept, result.stepped, result.dropped) == ([], False, ())
    assert result.transient[0].cause == "out of memory"
    assert all(parameter.grad is None for parameter in model.parameters())
    guard.backward(x[:3], FORMS["total"](model))
    guard.finish()
    same(model, plain(model, x[:3], FORMS["total"]))


@pytest.mark.parametrize("choice", ["raise", "split"])
def test_everything_is_as_before_where_one_sample_is_too_large(choice):
    model, x = net(0, nn.BatchNorm1d(4)), torch.randn(4, 3, dtype=torch.float64)
    model[0].weight.grad = torch.ones(4, 3, dtype=torch.float64)
    before = copy.deepcopy(model.state_dict())
    chance = torch.get_rng_state()
    guard = gg.Guard(model, out_of_memory=choice, min_kept=2)
    with pytest.raises(torch.OutOfMemoryError):
        guard.backward(x, FORMS["mean"](model))
    torch.testing.assert_close(dict(model.state_dict()), dict(before), rtol=0, atol=0)
    assert torch.equal(model[0].weight.grad, torch.ones(4, 3))
    assert model[0].bias.grad is None
    assert torch.equal(torch.get_rng_state(), chance)
    assert guard.global_step == 0


def test_a_batch_that_takes_gradients_itself_is_not_split():
    model, x = net(2), torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    with pytest.raises(torch.OutOfMemoryError):
        gg.Guard(model, out_of_memory="split").backward(x, FORMS["mean"](model))


def test_a_choice_that_is_none_is_refused():
    with pytest.raises(ValueError, match="`out_of_memory` is the str 'halve'"):
        gg.Guard(net(1), out_of_memory="halve")


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_the_loop_is_the_five_lines(form):
    batches = [torch.randn(4, 3, dtype=torch.float64) for _ in range(4)]
    batches[1][:] = float("nan")

    def train(run):
        model = net(10**6)
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        run(model, optimizer, scheduler)
        return [*model.parameters()], scheduler.last_epoch

    def by_hand(model, optimizer, scheduler):
        for x in [batches[0], *batches[2:]]:
            optimizer.zero_grad()
            value = form(model)(x)
            (value[0] / value[1] if isinstance(value, tuple) else value.mean()).backward()
            optimizer.step()
            scheduler.step()

    def by_loop(model, optimizer, scheduler):
        guard = gg.Guard(model, min_kept=2, max_bad=1)
        bad = copy.deepcopy(batches)
        bad[1][:1] = 1.0  # one good sample, which is too few
        results = [*guard.loop(bad, form(model), optimizer, scheduler)]
        assert [result.stepped for result in results] == [True, False, True, True]
        assert guard.epoch == 1

    (left, steps), (right, others) = train(by_hand), train(by_loop)
    assert steps == others == 3
    torch.testing.assert_close(left, right)


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_a_part_that_keeps_nothing_has_no_weight_in_the_first_step(form):
    """It says nothing about whether the losses of the other parts are means or totals."""
    model = net(4)
    x = torch.randn(8, 3, dtype=torch.float64)
    expected = plain(model, x[4:], form)
    x[:3] = float("nan")
    guard = gg.Guard(model, max_bad=0.75, min_kept=2, out_of_memory="split")
    result = guard.backward(x, form(model))
    assert result.kept == [4, 5, 6, 7]
    if form is FORMS["total"]:
        guard.finish()
    same(model, expected)
