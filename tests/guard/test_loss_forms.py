"""Whatever the form of the loss, the innocent are kept, in few calls; a fault of the size of a batch is nobody's."""

import math

import pytest
import torch
from torch import nn

import gradgate as gg
from tests.guard.loss_forms import check

NAN = float("nan")


@pytest.mark.parametrize("first", range(0, 120, 20))
def test_nobody_is_dropped_who_does_no_harm(first):
    assert any(check(seed, sizes=(1, 40))[0] for seed in range(first, first + 20))


def test_large_batches_keep_the_law_too():
    assert any(check(seed, sizes=(100, 130))[0] for seed in range(200, 215))


@pytest.mark.parametrize("size", [2, 3, 5, 16, 32, 130])
def test_a_model_that_runs_once_for_each_sample(size):
    """A module sees one sample a call: nothing that it takes or gives has a row for each sample."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 4))
    x = torch.randn(size, 16)
    row = min(9, size - 1)
    x[row] = NAN
    calls = []

    def loss_fn(batch):
        calls.append(len(batch))
        return torch.stack([model(sample).square().mean() for sample in batch]).mean()

    result = gg.Guard(model).backward(x, loss_fn)
    assert [incident.row for incident in result.dropped] == [row]
    assert result.dropped[0].cause == "non-finite loss"
    assert len(calls) <= 2 * math.log2(size) + 6


def test_a_loss_over_chunks():
    model = nn.Linear(5, 2)
    x = torch.randn(15, 5)
    x[4] = float("inf")
    result = gg.Guard(model).backward(x, lambda x: sum(model(c).square().sum() for c in x.split(3)) / len(x))
    assert [incident.row for incident in result.dropped] == [4]


def test_three_bad_samples_of_a_loop_are_named_and_nobody_else():
    model = nn.Linear(6, 2)
    x = torch.randn(8, 6)
    x[[1, 4, 6]] = NAN

    def loss_fn(batch):
        return torch.stack([model(sample).square().mean() for sample in batch]).mean()

    result = gg.Guard(model).backward(x, loss_fn)
    assert [incident.row for incident in result.dropped] == [1, 4, 6]
    assert {incident.cause for incident in result.dropped} == {"non-finite loss"}
    with pytest.raises(gg.TooManyBadSamples) as caught:
        gg.Guard(model, max_bad=0.25).backward(x, loss_fn)
    assert [incident.row for incident in caught.value.incidents] == [1, 4, 6]


def test_features_that_are_as_many_as_samples_are_no_samples():
    """The innermost module gets the features of one sample along its first dimension."""
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
    x = torch.randn(8, 8)
    x[5, 2] = NAN
    result = gg.Guard(model).backward(x, lambda x: torch.stack([model(s).square().mean() for s in x]).mean())
    assert [incident.row for incident in result.dropped] == [5]


# --- the size of the batch ---


def pairs(x):
    return x.view(-1, 2, x.shape[1]).diff(dim=1)


def triplets(x):
    anchor, positive, negative = x.view(3, -1, x.shape[1])
    return anchor - positive + negative


def fours(x):
    return x.reshape(-1, 4 * x.shape[1])


def halves(x):
    return x[: len(x) // 2] - x[len(x) // 2 :]


def three_chunks(x):
    return torch.stack(x.chunk(3)).sum(0)


def groups_over_the_batch(x):
    return nn.functional.group_norm(x.T.unsqueeze(0), 1).view(x.shape[1], 4, -1)


def last_batch_is_short(x):
    if len(x) % 8:
        raise ValueError(f"{len(x)} samples, not eight")
    return x


def log_of_what_is_left(x):
    """No exception: a loss that is infinite for odd batches."""
    return x + torch.tensor(1.0 - len(x) % 2).log()


SIZED = (pairs, triplets, fours, halves, three_chunks, groups_over_the_batch, last_batch_is_short, log_of_what_is_left)


@pytest.mark.parametrize("in_module", [True, False], ids=["in the model", "in the loss"])
@pytest.mark.parametrize("sized", SIZED, ids=lambda sized: sized.__name__)
def test_a_fault_of_the_size_of_the_batch_is_raised(sized, in_module):
    class Sized(nn.Module):
        def forward(self, x):
            return sized(x)

    linear = nn.Linear(5, 6)
    model = nn.Sequential(linear, Sized()) if in_module else linear
    for size in (5, 7, 11, 13, 29):
        x = torch.randn(size, 5)
        error = gg.TooManyBadSamples
        if sized is not log_of_what_is_left:
            with pytest.raises((RuntimeError, ValueError)) as plain:
                sized(linear(x))
            error = plain.type
        calls = []

        def loss_fn(x, calls=calls):
            calls.append(len(x))
            return (model(x) if in_module else sized(model(x))).square().mean()

        with pytest.raises(error) as caught:
            gg.Guard(model).backward(x, loss_fn)
        assert not getattr(caught.value, "incidents", ())
        assert len(calls) <= 45
        assert all(parameter.grad is None for parameter in model.parameters())


def test_the_size_is_named_as_the_reason():
    model = nn.Linear(3, 1)
    with pytest.raises(RuntimeError, match="is invalid for input of size") as caught:
        gg.Guard(model).backward(torch.randn(7, 3), lambda x: pairs(model(x)).mean())
    assert "as many samples that pass otherwise fail, too (a batch of 7)" in caught.value.__notes__[-1]


@pytest.mark.parametrize("size", [7, 8])
def test_a_bad_sample_in_a_model_of_pairs_is_not_hidden_by_another(size):
    """With 7 samples the batch cannot run; with 8 it cannot run without the bad one. Nobody is dropped."""
    model = nn.Linear(3, 2)
    x = torch.randn(size, 3)
    x[5] = NAN
    with pytest.raises(RuntimeError, match="is invalid for input of size"):
        gg.Guard(model).backward(x, lambda x: pairs(model(x)).square().mean())


def test_two_bad_samples_in_a_model_of_pairs_are_dropped():
    model = nn.Linear(3, 2)
    x = torch.randn(12, 3)
    x[[2, 9]] = NAN
    result = gg.Guard(model).backward(x, lambda x: pairs(model(x)).square().mean())
    assert [incident.row for incident in result.dropped] == [2, 9]
