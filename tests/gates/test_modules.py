"""The gates as modules: settings that move, change, and are saved only when asked."""

import copy
import pickle

import pytest
import torch
from torch import nn

import gradgate as gg
from gradgate.errors import ArgumentTypeError

KEEP = torch.tensor([True, False, True])


def positive(gradient):
    return gradient > 0


MODULES = {
    "Gate(keep=True)": lambda **kw: gg.Gate(**kw),
    "Gate(keep=bool tensor of shape (3,))": lambda **kw: gg.Gate(KEEP, **kw),
    "Gate(keep=positive)": lambda **kw: gg.Gate(positive, **kw),
    "ScaleGrad(factor=0.1)": lambda **kw: gg.ScaleGrad(0.1, **kw),
    "ReverseGrad(strength=1.0)": lambda **kw: gg.ReverseGrad(**kw),
    "ClipGrad(max_norm=1.0, max_value=None, per_sample=False)": lambda **kw: gg.ClipGrad(max_norm=1.0, **kw),
    "FiniteGrad(fill_value=0.0)": lambda **kw: gg.FiniteGrad(**kw),
}
each_module = pytest.mark.parametrize(("text", "make"), MODULES.items(), ids=MODULES.keys())


def bias_gradient(module, weights=(2.0, -3.0, 4.0)):
    layer = nn.Linear(1, 3)
    net = nn.Sequential(layer, module)
    (net(torch.ones(1, 1)) * torch.tensor(weights, requires_grad=True)).sum().backward()
    return None if layer.bias.grad is None else layer.bias.grad.tolist()


@each_module
def test_no_parameters_no_state_and_a_telling_repr(text, make):
    module = make()
    assert repr(module) == text
    assert not list(module.parameters())
    assert not list(module.buffers())
    assert not module.state_dict()
    net = nn.Sequential(nn.Linear(3, 3), module)
    assert list(net.state_dict()) == ["0.weight", "0.bias"]
    net.load_state_dict(nn.Sequential(nn.Linear(3, 3)).state_dict())


@each_module
def test_copies_do_the_same(text, make):
    module = make()
    expected = bias_gradient(module)
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert repr(other) == text
        assert bias_gradient(other) == expected


def test_each_is_its_function():
    assert bias_gradient(gg.Gate(KEEP)) == [2, 0, 4]
    assert bias_gradient(gg.Gate(positive)) == [2, 0, 4]
    assert bias_gradient(gg.Gate(False)) is None
    assert bias_gradient(gg.ScaleGrad(0.5)) == [1, -1.5, 2]
    assert bias_gradient(gg.ReverseGrad(2)) == [-4, 6, -8]
    assert bias_gradient(gg.ClipGrad(max_value=2.5)) == [2, -2.5, 2.5]
    assert bias_gradient(gg.ClipGrad(max_norm=1.0, per_sample=True), (3.0, 0.0, 4.0)) == pytest.approx([0.6, 0, 0.8])
    assert bias_gradient(gg.FiniteGrad(7.0), (2.0, float("nan"), 4.0)) == [2, 7, 4]


def test_settings_can_be_changed_to_another_kind_while_training():
    gate = gg.Gate(KEEP)
    for keep, expected in ((False, None), (positive, [2, 0, 4]), (~KEEP, [0, -3, 0]), (True, [2, -3, 4])):
        gate.keep = keep
        assert bias_gradient(gate) == expected
    scale = gg.ScaleGrad(1.0)
    scale.factor = torch.tensor([0.0, 1.0, 2.0])
    assert bias_gradient(scale) == [0, -3, 8]


def test_a_schedule_by_step():
    """Domain-adversarial training: the reversal grows from 0 to 1."""
    net = nn.Sequential(nn.Linear(1, 1), gg.ReverseGrad(0.0))
    strengths = [step / 4 for step in range(5)]
    seen = []
    for strength in strengths:
        net[1].strength = strength
        net.zero_grad()
        net(torch.ones(1, 1)).sum().backward()
        seen.append(-net[0].bias.grad.item())
    assert seen == strengths


def test_counting_in_a_module():
    meter = gg.GateMeter()
    bias_gradient(gg.Gate(KEEP, meter=meter))
    assert (meter.passed, meter.stopped) == (2, 1)


def test_tensors_move_with_the_module_and_are_no_buffers():
    """Buffers would be overwritten by those of rank 0 in DistributedDataParallel, per-sample masks among them."""
    net = nn.Sequential(gg.Gate(KEEP), gg.ScaleGrad(torch.ones(3)), gg.ReverseGrad(torch.tensor(0.5)))
    net.to("meta")
    assert [net[0].keep.device.type, net[1].factor.device.type, net[2].strength.device.type] == ["meta"] * 3
    assert not list(net.buffers())
    net = nn.Sequential(gg.Gate(KEEP), gg.ScaleGrad(torch.ones(3))).double()
    assert (net[0].keep.dtype, net[1].factor.dtype) == (torch.bool, torch.float64)


@pytest.mark.parametrize(
    ("make", "change", "keys"),
    [
        (lambda value: gg.Gate(value, save=True), (True, False), ["keep"]),
        (lambda value: gg.Gate(value, save=True), (KEEP, ~KEEP), ["keep"]),
        (lambda value: gg.Gate(value, save=True), (True, KEEP), ["keep"]),
        (lambda value: gg.ScaleGrad(value, save=True), (0.5, 0.25), ["factor"]),
        (lambda value: gg.ReverseGrad(value, save=True), (0.0, 0.75), ["strength"]),
        (lambda value: gg.ReverseGrad(value, save=True), (torch.tensor(0.0), torch.tensor(0.5)), ["strength"]),
        (lambda value: gg.ClipGrad(max_norm=value, save=True), (1.0, 2.0), ["max_norm", "per_sample"]),
        (lambda value: gg.FiniteGrad(value, save=True), (0.0, 1.0), ["fill_value"]),
    ],
)
def test_saved_when_asked(make, change, keys, tmp_path):
    before, after = change
    net = nn.Sequential(make(after))
    assert list(net.state_dict()) == [f"0.{key}" for key in keys]
    torch.save(net.state_dict(), tmp_path / "state.pt")
    resumed = nn.Sequential(make(before))
    resumed.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    name = keys[0]
    ours, theirs = getattr(resumed[0], name), getattr(net[0], name)
    assert type(ours) is type(theirs)
    assert torch.equal(torch.as_tensor(ours), torch.as_tensor(theirs))


def test_what_is_saved_is_a_copy():
    gate = gg.Gate(KEEP.clone(), save=True)
    state = gate.state_dict()
    gate.keep.fill_(True)
    assert torch.equal(state["keep"], KEEP)
    other = gg.Gate(~KEEP, save=True)
    other.load_state_dict(state)
    other.keep.fill_(False)
    assert torch.equal(state["keep"], KEEP)


def test_a_state_without_the_setting_is_said():
    with pytest.raises(RuntimeError, match='Missing key\\(s\\) in state_dict: "strength"'):
        gg.ReverseGrad(save=True).load_state_dict({})
    with pytest.raises(RuntimeError, match='Unexpected key\\(s\\) in state_dict: "strength"'):
        gg.ReverseGrad().load_state_dict({"strength": torch.tensor(1.0)})


def test_a_function_cannot_be_saved():
    with pytest.raises(ArgumentTypeError, match=r"Gate: `keep` is the function .*, and save=True") as caught:
        gg.Gate(positive, save=True).state_dict()
    assert caught.value.fix == "gg.Gate(keep, save=False)"


@pytest.mark.parametrize(
    ("make", "fix"),
    [
        (lambda: gg.ReverseGrad("0.5"), "strength=0.5"),
        (lambda: gg.ScaleGrad("0.5"), "factor=0.5"),
        (lambda: gg.ClipGrad(max_norm="1"), "max_norm=1.0"),
        (lambda: gg.ClipGrad(max_value="1"), "max_value=1.0"),
        (lambda: gg.ClipGrad(max_norm=1.0, per_sample="no"), "per_sample=True"),
        (lambda: gg.FiniteGrad("0"), "fill_value=0.0"),
        (lambda: gg.Gate("yes"), ""),
    ],
)
def test_text_is_no_setting(make, fix):
    with pytest.raises(gg.errors.ArgumentTypeError, match=r"\(\): `\w+` is the str") as caught:
        make()
    assert caught.value.fix == fix


@pytest.mark.parametrize(
    ("make", "name", "bad"),
    [
        (lambda: gg.ReverseGrad(), "strength", "1"),
        (lambda: gg.ScaleGrad(1.0), "factor", float("nan")),
        (lambda: gg.ClipGrad(1.0), "max_norm", -1),
        (lambda: gg.FiniteGrad(), "fill_value", float("inf")),
        (lambda: gg.Gate(), "keep", torch.ones(2)),
    ],
)
def test_a_setting_is_looked_at_where_it_is_made(make, name, bad):
    module = make()
    before = getattr(module, name)
    with pytest.raises(gg.errors.ArgumentError, match=f"`{name}`"):
        setattr(module, name, bad)
    assert getattr(module, name) is before
