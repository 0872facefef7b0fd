"""Problems that users reported, told again with gates; each ends well. The numbers are those of the collection."""

import copy

import pytest
import torch
from torch import nn

import gradgate as gg

NAN = float("nan")


def test_09_a_reversal_as_a_module_is_really_called():
    """A method `backward` on an nn.Module is never called; papers were trained without their reversal."""
    x = torch.ones(3, requires_grad=True)
    (gg.ReverseGrad()(x) * 2).sum().backward()
    assert x.grad.tolist() == [-2, -2, -2]


def test_10_a_mask_removes_nan():
    """gradient * mask keeps NaN, since 0 * nan = nan."""
    w = torch.ones(3, requires_grad=True)
    keep = torch.tensor([True, False, True])
    (gg.gate(w, keep) * torch.tensor([2.0, NAN, 3.0])).sum().backward()
    assert w.grad.tolist() == [2, 0, 3]


POINTS = [-1.0, 0.0, 0.5, 1.0, 2.0]


def clamp_through(x):
    return gg.straight_through(x.clamp(0, 1), x)


def clamp_inward(x):
    def inward(gradient):
        return ~((x < 0) & (gradient > 0)) & ~((x > 1) & (gradient < 0))

    return gg.straight_through(x.clamp(0, 1), gg.gate(x, inward))


def clamp_zero(x):
    return gg.straight_through(x.clamp(0, 1), gg.gate(x, (x >= 0) & (x <= 1)))


@pytest.mark.parametrize(
    ("clamp", "up", "down"),
    [
        (clamp_through, [1, 1, 1, 1, 1], [-1, -1, -1, -1, -1]),
        (clamp_inward, [0, 1, 1, 1, 1], [-1, -1, -1, -1, 0]),
        (clamp_zero, [0, 1, 1, 1, 0], [0, -1, -1, -1, 0]),
    ],
)
def test_11_a_clamp_whose_gradient_rule_is_chosen_and_pinned_at_the_border(clamp, up, down):
    """torch.clamp kills the gradient outside, and its rule on the border changes between versions."""
    for sign, expected in ((1, up), (-1, down)):
        x = torch.tensor(POINTS, requires_grad=True)
        y = clamp(x)
        assert y.tolist() == [0, 0, 0.5, 1, 1]
        (sign * y).sum().backward()
        assert x.grad.tolist() == expected


@pytest.mark.parametrize("clamp", [clamp_through, clamp_inward])
def test_11_a_prediction_that_left_the_range_comes_back(clamp):
    p = torch.tensor([3.0], requires_grad=True)
    optimizer = torch.optim.SGD([p], lr=0.5)
    for _ in range(100):
        optimizer.zero_grad()
        ((clamp(p) - 0.3) ** 2).sum().backward()
        optimizer.step()
    assert p.item() == pytest.approx(0.3, abs=1e-4)


@pytest.mark.parametrize("order", ["gated first", "gated last"])
def test_12_the_sibling_branch_and_the_given_gradient_are_not_corrupted(order):
    """A hook that edits its gradient in place also edits that of a sibling, depending on who was made first."""
    x = torch.ones(3, requires_grad=True)
    h = x * 1
    if order == "gated first":
        gated, sibling = gg.gate(h, torch.tensor([True, False, True])), h * 1
    else:
        sibling = h * 1
        gated = gg.gate(h, torch.tensor([True, False, True]))
    given = torch.full((3,), 5.0)
    (gated + sibling).backward(given)
    assert x.grad.tolist() == [10, 5, 10]
    assert given.tolist() == [5, 5, 5]


def test_a_model_with_gates_can_be_copied_between_steps():
    """A gate keeps nothing of a step in the module, so there is nothing that a copy could stumble over."""
    net = nn.Sequential(nn.Linear(2, 2), gg.Gate(torch.tensor([True, False])))
    net(torch.ones(1, 2)).sum().backward()
    twin = copy.deepcopy(net)
    twin.zero_grad()
    twin(torch.ones(1, 2)).sum().backward()
    assert twin[0].bias.grad.tolist() == [1, 0]


def test_66_a_reversal_composes_with_torch_func():
    """The Function that everybody copies fails under grad, vmap, per-sample gradients and jvp."""
    x = torch.ones(3)
    assert torch.func.grad(lambda v: gg.reverse_grad(v).sum())(x).tolist() == [-1, -1, -1]
    assert torch.vmap(lambda v: gg.reverse_grad(v).sum())(torch.ones(3, 2)).tolist() == [2, 2, 2]
    per_sample = torch.vmap(torch.func.grad(lambda v: gg.reverse_grad(v).sum()))(torch.ones(3, 2))
    assert per_sample.tolist() == [[-1, -1]] * 3
    assert torch.func.jvp(gg.reverse_grad, (x,), (x,))[1].tolist() == [-1, -1, -1]


def test_67_a_gate_stands_before_an_in_place_activation():
    """A full backward hook there raises."""
    net = nn.Sequential(nn.Linear(2, 2), gg.Gate(torch.tensor([True, False])), nn.ReLU(inplace=True))
    nn.init.ones_(net[0].weight)
    nn.init.ones_(net[0].bias)
    net(torch.ones(1, 2)).sum().backward()
    assert net[0].bias.grad.tolist() == [1, 0]


def test_67_a_gate_changes_the_gradient_of_a_first_layer():
    """A full backward hook may not, when no input of the layer requires a gradient."""
    layer = nn.Linear(2, 2)
    gg.gate(layer(torch.ones(1, 2)), torch.tensor([True, False])).sum().backward()
    assert layer.bias.grad.tolist() == [1, 0]
    assert layer.weight.grad.tolist() == [[1, 1], [0, 0]]
