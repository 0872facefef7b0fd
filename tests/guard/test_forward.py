"""Guard.forward: a function of a batch without backward, with the rows of bad samples filled."""

import pytest
import torch
from torch import nn

import gradgate as gg


def spoilt(*rows):
    x = torch.randn(6, 3)
    x[list(rows)] = float("nan")
    return x


def test_a_healthy_batch_is_given_as_it_is():
    model = nn.Linear(3, 2)
    x = torch.randn(6, 3)
    out, keep = gg.Guard(model).forward(x, model)
    assert torch.equal(out, model(x))
    assert keep.tolist() == [True] * 6


def test_rows_that_are_not_finite_are_filled():
    model = nn.Linear(3, 2)
    x = spoilt(1, 4)
    out, keep = gg.Guard(model).forward(x, model)
    assert keep.tolist() == [True, False, True, True, False, True]
    assert out[~keep].isnan().all()
    assert torch.equal(out[keep], model(x[keep]))


def test_batchnorm_in_training_does_not_spread_a_bad_row():
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    before = model[1].running_mean.clone()
    x = spoilt(2)
    out, keep = gg.Guard(model).forward(x, model, fill_value=-1.0)
    assert out[2].tolist() == [-1, -1, -1]
    assert out[keep].isfinite().all()
    assert model[1].running_mean.isfinite().all()
    assert not torch.equal(model[1].running_mean, before)
    assert int(model[1].num_batches_tracked) == 1


def test_a_default_device_that_is_not_the_models():
    x = torch.randn(8, 3)
    x[2] = float("nan")
    with torch.device("meta"):
        out, keep = gg.Guard(nn.Identity()).forward(x, lambda x: x * 2)
    assert keep.device.type == out.device.type == "cpu"
    assert keep.tolist() == [True, True, False, True, True, True, True, True]


def test_an_exception_fills_the_row():
    def function(x):
        if bool((x > 1e3).any()):
            raise ValueError("too large")
        return x * 2

    x = torch.randn(6, 3)
    x[5] = 1e4
    out, keep = gg.Guard(nn.Identity()).forward(x, function, fill_value=0.0)
    assert keep.tolist() == [True] * 5 + [False]
    assert out[5].tolist() == [0, 0, 0]


def test_outputs_in_a_tree():
    def function(batch):
        logits = batch["x"] * 2
        return {
            "logits": logits,
            "label": logits.argmax(1),
            "pair": (logits > 0, [logits.half()]),
            "note": "kept as it is",
        }

    out, keep = gg.Guard(nn.Identity()).forward({"x": spoilt(0)}, function)
    assert keep.tolist() == [False] + [True] * 5
    assert out["logits"][0].isnan().all()
    assert out["label"][0] == 0
    assert out["label"].dtype is torch.int64
    assert out["pair"][0].dtype is torch.bool
    assert out["pair"][1][0][0].isnan().all()
    assert out["note"] == "kept as it is"


def test_an_integer_output_takes_a_fill_value_that_it_can_hold():
    out, _ = gg.Guard(nn.Identity()).forward(spoilt(3), lambda x: (x, x.argmax(1)), fill_value=-100)
    assert out[1][3] == -100
    assert (out[0][3] == -100).all()


def test_an_output_that_cannot_hold_the_fill_value_gets_0():
    def function(x):
        return x, x.argmax(1).to(torch.uint8), x[:, 0] > 0

    (_, small, boolean), _ = gg.Guard(nn.Identity()).forward(spoilt(3), function, fill_value=-100)
    assert small[3] == 0
    assert not boolean[3]


def test_the_mode_in_force_stays_and_gradients_flow_to_the_kept_rows():
    model = nn.Linear(3, 1)
    x = spoilt(2)
    out, keep = gg.Guard(model).forward(x, model)
    out[keep].sum().backward()
    found = model.weight.grad.clone()
    model.zero_grad()
    model(x[keep]).sum().backward()
    assert torch.equal(model.weight.grad, found)
    with torch.no_grad():
        assert not gg.Guard(model).forward(x, model)[0].requires_grad


def test_gradients_that_were_there_stay():
    model = nn.Linear(3, 1)
    model(torch.ones(1, 3)).sum().backward()
    grad = model.weight.grad
    gg.Guard(model).forward(spoilt(2), model)
    assert model.weight.grad is grad


def test_every_row_bad_is_refused():
    model = nn.Linear(3, 1)
    with pytest.raises(gg.TooManyBadSamples, match="non-finite output in a batch of 6 samples"):
        gg.Guard(model).forward(spoilt(*range(6)), model)
    with pytest.raises(AttributeError, match="meen"):
        gg.Guard(model).forward(torch.ones(3, 3), lambda x: model(x).meen())


def test_more_than_max_bad_is_refused():
    model = nn.Linear(3, 1)
    with pytest.raises(gg.TooManyBadSamples, match="4 of 6 samples are bad"):
        gg.Guard(model).forward(spoilt(0, 1, 2, 3), model)


def test_another_batch_dimension():
    model = nn.GRU(3, 2)
    x = torch.randn(5, 4, 3)
    x[2, 1] = float("nan")
    (out, hidden), keep = gg.Guard(model, batch_dim=1).forward(x, model)
    assert keep.tolist() == [True, False, True, True]
    assert out.shape == (5, 4, 2)
    assert out[:, 1].isnan().all()
    assert hidden[:, 1].isnan().all()
    assert out[:, keep].isfinite().all()


def test_incidents_of_a_forward_count_but_not_as_steps():
    model = nn.Linear(3, 1)
    guard = gg.Guard(model, patience=1)
    guard.forward(spoilt(2), model)
    guard.forward(spoilt(2), model)
    assert guard.summary().dropped == 2
    assert guard.summary().steps == 0
