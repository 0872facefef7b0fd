"""Clipping by a history or by the weights: closed forms, what is counted, and what is left alone."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import gradgate as gg


def one(**more):
    model = nn.Linear(2, 1, bias=False).double()
    return model, gg.AdaptiveClip(model, **more)


def step(model, clip, norm):
    model.weight.grad = torch.tensor([[0.6 * norm, -0.8 * norm]], dtype=torch.float64)
    return int(clip()), model.weight.grad.norm().item()


@pytest.mark.slow
@settings(max_examples=30, deadline=None)
@given(st.lists(st.floats(0.5, 50), min_size=3, max_size=14), st.floats(0, 8), st.integers(3, 6))
def test_the_limit_is_the_median_and_its_deviations(norms, threshold, window):
    """A slow oracle: plain lists, in double precision."""
    model, clip = one(threshold=threshold, window=window, warmup=3)
    seen, clipped = [], 0

    def median(values):
        values = sorted(values)
        return (values[(len(values) - 1) // 2] + values[len(values) // 2]) / 2

    for norm in norms:
        last = seen[-window:]
        expected = norm
        if len(last) >= 3:
            middle = median(last)
            spread = max(1.4826 * median([abs(value - middle) for value in last]), 0.01 * middle)
            expected = min(norm, middle + threshold * spread)
        seen.append(expected)
        many, given = step(model, clip, norm)
        assert given == pytest.approx(expected, rel=1e-4)
        clipped += many
    assert sum(clip.clipped.values()) == clipped
    assert clip.steps == len(norms)


def test_a_gradient_keeps_its_direction_and_others_are_not_touched():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
    clip = gg.AdaptiveClip(model, warmup=2, window=4)
    for _ in range(4):
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        assert int(clip()) == 0
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    model[0].weight.grad = torch.arange(9.0).reshape(3, 3)
    assert int(clip()) == 1
    direction = torch.arange(9.0).reshape(3, 3)
    limit = 3 * (1 + 6 * 0.01)
    torch.testing.assert_close(model[0].weight.grad, direction * limit / direction.norm())
    assert torch.equal(model[1].weight.grad, torch.ones(1, 3))
    assert clip.clipped == {"0.weight": 1}


def test_a_gradient_that_is_missing_or_not_finite_is_passed_over():
    model, clip = one(warmup=2, window=3)
    for norm in (1.0, 2.0, float("nan"), float("inf")):
        step(model, clip, norm)
    assert model.weight.grad.isinf().all()  # the guard's business
    model.weight.grad = None
    assert int(clip()) == 0
    step(model, clip, 1.0)
    assert clip.clipped == {}


def test_by_the_ratio_to_the_weights_row_by_row():
    model = nn.Linear(2, 3)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[3.0, 4.0], [0.0, 0.0], [30.0, 40.0]]))
        model.bias.copy_(torch.tensor([0.0, 3.0, 4.0]))
    model.weight.grad, model.bias.grad = torch.tensor([[6.0, 8.0]] * 3), torch.tensor([0.3, 0.4, 0.0])
    clip = gg.AdaptiveClip(model, "ratio", threshold=0.2)
    assert int(clip()) == 1
    expected = torch.tensor([[0.6, 0.8], [0.6 * 0.0002, 0.8 * 0.0002], [6.0, 8.0]])
    torch.testing.assert_close(model.weight.grad, expected)
    assert torch.equal(model.bias.grad, torch.tensor([0.3, 0.4, 0.0]))
    assert clip.clipped == {"weight": 1}


def test_sparse_gradients_and_half_precision():
    embedding = nn.Embedding(5, 2, sparse=True)
    clip = gg.AdaptiveClip(embedding, warmup=1)
    for factor in (1.0, 100.0):
        embedding.zero_grad()
        (embedding(torch.tensor([1, 1, 3])).sum() * factor).backward()
        clip()
    assert embedding.weight.grad.coalesce().values().norm().item() == pytest.approx(10**0.5 * 1.06, rel=1e-4)
    clip = gg.AdaptiveClip(embedding, "ratio", threshold=1e-3)
    assert int(clip()) == 1
    assert embedding.weight.grad.coalesce().values().norm() == pytest.approx(1e-3 * embedding.weight.norm().item())
    half = nn.Linear(2, 2).half()
    clip = gg.AdaptiveClip(half, "ratio")
    for parameter in half.parameters():
        parameter.grad = torch.ones_like(parameter)
    assert int(clip()) == 2


def test_it_goes_on_from_a_checkpoint():
    model, clip = one(warmup=3, window=5)
    for norm in (3.0, 4.0, 5.0, 90.0):
        step(model, clip, norm)
    again = one(warmup=3, window=5)
    again[1].load_state_dict(clip.state_dict())
    assert step(*again, 80.0) == step(model, clip, 80.0)
    assert again[1].clipped == clip.clipped == {"weight": 2}
    with pytest.raises(ValueError, match="of shape"):
        one(window=20)[1].load_state_dict(clip.state_dict())


@pytest.mark.parametrize(
    ("more", "text"),
    [
        ({"by": "norm"}, "`by` is the str 'norm'"),
        ({"threshold": -1.0}, "`threshold` is the float -1.0"),
        ({"window": 0}, "`window` is the int 0"),
        ({"window": 5, "warmup": 6}, "only window=5 norms are remembered"),
    ],
)
def test_wrong_arguments_say_what_and_how(more, text):
    with pytest.raises(ValueError, match=text.replace("(", r"\(")):
        one(**more)
    with pytest.raises(TypeError, match="`model` is"):
        gg.AdaptiveClip([torch.ones(2)])
