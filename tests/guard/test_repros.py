"""The reported problems of this room, each ending well; numbers and stories as in the list of troubles."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import gradgate as gg


def test_45_one_nan_sample_poisons_the_batch_the_weights_and_adam():
    model = nn.Linear(4, 1)
    twin = copy.deepcopy(model)
    x, y = torch.randn(8, 4), torch.randn(8, 1)
    x[3, 2] = float("nan")
    good = [0, 1, 2, 4, 5, 6, 7]
    optimizers = [torch.optim.Adam(m.parameters(), lr=0.1) for m in (model, twin)]
    result = gg.Guard(model).backward((x, y), lambda b: (model(b[0]) - b[1]).square().mean())
    optimizers[0].step()
    (twin(x[good]) - y[good]).square().mean().backward()
    optimizers[1].step()
    assert [incident.row for incident in result.dropped] == [3]
    assert torch.equal(model.weight.grad, twin.weight.grad)
    assert torch.equal(model.weight, twin.weight)
    states = [optimizer.state[m.weight]["exp_avg"] for optimizer, m in zip(optimizers, (model, twin), strict=True)]
    assert torch.equal(*states)


def test_47_gradscaler_throws_away_the_whole_step():
    model = nn.Linear(2, 1, bias=False)
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), torch.amp.GradScaler("cpu", init_scale=4.0)
    x = torch.randn(256, 2)
    x[7, 0] = float("inf")
    before = model.weight.detach().clone()
    result = gg.Guard(model).backward(x, lambda x: model(x).mean(), scaler=scaler)
    scaler.step(optimizer)
    scaler.update()
    assert len(result.kept) == 255
    assert not torch.equal(model.weight, before)
    assert scaler.get_scale() == 4.0


def test_48_batchnorm_statistics_polluted_by_bad_rows():
    norm = nn.BatchNorm1d(1)
    twin = copy.deepcopy(norm)
    x = torch.randn(8, 1)
    bad = x.clone()
    bad[3] = float("nan")
    gg.Guard(norm).forward(bad, norm)
    twin(x[[0, 1, 2, 4, 5, 6, 7]])
    assert torch.equal(norm.running_mean, twin.running_mean)
    assert torch.equal(norm.running_var, twin.running_var)
    assert norm.eval()(x).isfinite().all()


def test_49_batchnorm_dies_when_one_survivor_is_left():
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    x = torch.randn(2, 3)
    x[0] = float("nan")
    before = copy.deepcopy(model.state_dict())
    result = gg.Guard(model, min_kept=2).backward(x, lambda x: model(x).square().mean())
    assert result.kept == []
    assert "no step was made" in result.reason
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_50_gradient_accumulation_with_a_bad_sample_in_one_micro_batch():
    """Only the bad sample is lost, not its micro-batch and not the window; the first gradient stays as it was."""
    weight = nn.Parameter(torch.randn(5, 3))
    holder = nn.ParameterList([weight])
    x, y = torch.randn(12, 5), torch.randint(0, 3, (12,))
    x[8, 1] = float("nan")
    guard = gg.Guard(holder)
    sums = lambda b: F.cross_entropy(b[0] @ weight, b[1], reduction="sum")  # noqa: E731
    first = guard.backward((x[:6], y[:6]), sums)
    second = guard.backward((x[6:], y[6:]), sums)
    kept = len(first.kept) + len(second.kept)
    found = weight.grad / kept  # the exact mean over the window: divide by what took part
    good = [row for row in range(12) if row != 8]
    weight.grad = None
    F.cross_entropy(x[good] @ weight, y[good]).backward()
    assert kept == 11
    torch.testing.assert_close(found, weight.grad)


def test_53_a_nan_that_another_process_would_spread():
    """What an all-reduce would spread is gone before it: the gradient that a process hands on is finite."""
    model = nn.Linear(2, 1, bias=False)
    x = torch.ones(4, 2)
    x[0, 0] = float("nan")
    gg.Guard(model).backward(x, lambda x: model(x).mean())
    assert model.weight.grad.tolist() == [[1.0, 1.0]]


def test_32_a_nan_loss_with_good_gradients_is_told_not_skipped_in_silence():
    model = nn.Linear(3, 4)
    y = torch.full((6,), -100)
    with pytest.raises(gg.TooManyBadSamples, match=r"a mean over nothing \(cross_entropy with every label ignored\)"):
        gg.Guard(model).backward((torch.randn(6, 3), y), lambda b: F.cross_entropy(model(b[0]), b[1]))
