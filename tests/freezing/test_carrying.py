"""What is held goes where the parameter goes: copies, pickles, files, state dicts."""

import copy
import io
import pickle
import subprocess
import sys

import pytest
import torch
from torch import nn

import gradgate as gg
from gradgate.errors import ArgumentValueError


def saved_and_loaded(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


TRAININGS = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda m: pickle.loads(pickle.dumps(m)),
    "torch.save": saved_and_loaded,
}
MASKS = {"rows": {"rows": [0, 2]}, "elements": {"frozen": torch.arange(12).reshape(4, 3) % 2 == 0}}
MASKS["points"] = {"frozen": torch.arange(12).reshape(4, 3) == 5}


def trained(model, steps=3):
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
    norms = []
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.ones(2, 3)).sum().backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item())
        optimizer.step()
    return norms


@pytest.mark.parametrize("way", TRAININGS.values(), ids=TRAININGS)
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_a_pin_goes_along_and_works_from_the_first_gradient_on(way, mask):
    model = nn.Linear(3, 4)
    pin = gg.pin(model.weight, **mask)
    other = way(way(model))  # the copy of a copy too
    assert other.weight is not model.weight
    assert list(other.state_dict()) == ["weight", "bias"]
    before = other.weight.detach().clone()
    assert trained(other) == trained(model)  # the clipped norm says that the first gradient was masked
    assert torch.equal(other.weight.detach()[pin.frozen], before[pin.frozen])
    assert not torch.equal(other.weight.detach()[~pin.frozen], before[~pin.frozen])
    pin.release()  # the original's pin holds the original only
    before = other.weight.detach().clone()
    trained(other)
    assert torch.equal(other.weight.detach()[pin.frozen], before[pin.frozen])
    gg.freezing.thaw(other)
    trained(other)
    assert not torch.equal(other.weight.detach()[pin.frozen], before[pin.frozen])


@pytest.mark.parametrize("way", TRAININGS.values(), ids=TRAININGS)
def test_a_freeze_goes_along(way):
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    gg.freeze(model, "0.*")
    other = way(model)
    before = other[0].weight.detach().clone()
    other[0].weight.grad = torch.ones(3, 3)  # stale
    trained(other)
    assert torch.equal(other[0].weight, before)
    assert gg.trainable(other)["0.weight"]["why"] == "freeze('0.*')"
    gg.freezing.thaw(other)
    assert other[0].weight.requires_grad
    assert not model[0].weight.requires_grad


@pytest.mark.parametrize("way", TRAININGS.values(), ids=TRAININGS)
def test_a_model_and_its_handles_together(way):
    model = nn.Linear(3, 4)
    handle, pin = gg.freeze(model, "bias"), gg.pin(model.weight, rows=[1])
    other, other_handle, other_pin = way((model, handle, pin))
    trained(other)
    other_handle.verify()
    other_pin.verify()
    other_handle.thaw()
    other_pin.release()
    assert other.bias.requires_grad
    assert not model.bias.requires_grad
    assert not hasattr(other.weight, "_gradgate_watchers")


@pytest.mark.slow
def test_another_process_holds_it_too(tmp_path):
    model = nn.Linear(3, 4)
    gg.pin(model.weight, rows=[0])
    gg.freeze(model, "bias")
    torch.save(model, tmp_path / "model.pt")
    code = (
        "import torch; torch.set_num_threads(1)\n"
        f"model = torch.load({str(tmp_path / 'model.pt')!r}, weights_only=False)\n"
        "before = [p.detach().clone() for p in model.parameters()]\n"
        "model.bias.grad = torch.ones(4)\n"
        "optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)\n"
        "model(torch.ones(2, 3)).sum().backward(); optimizer.step()\n"
        "print(torch.equal(model.weight[0], before[0][0]), torch.equal(model.weight[1], before[0][1]),"
        " torch.equal(model.bias, before[1]))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["True", "False", "True"], done.stderr


def test_the_state_dict_is_plain():
    model = nn.Linear(3, 4)
    gg.pin(model.weight, rows=[0])
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    state = torch.load(file)  # weights_only, the default
    assert list(state) == ["weight", "bias"]
    nn.Linear(3, 4).load_state_dict(state)


def test_tied_parameters_stay_tied_in_copies():
    model = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)])
    model[1].weight = model[0].weight
    gg.pin(model[0].weight, rows=[0])
    for way in TRAININGS.values():
        other = way(model)
        assert other[0].weight is other[1].weight


def test_attributes_of_the_user_are_pickled_as_before():
    weight = nn.Parameter(torch.ones(2))
    weight.note = "kept"
    gg.pin(weight, rows=[0])
    other = pickle.loads(pickle.dumps(weight))
    assert other.note == "kept"
    assert weight.note == "kept"


def test_a_plain_leaf_tensor_is_carried_too():
    tensor = torch.ones(3, requires_grad=True)
    gg.pin(tensor, rows=[0])
    for way in TRAININGS.values():
        other = way(way(tensor))
        other.sum().backward()
        assert other.grad.tolist() == [0, 1, 1]
    assert tensor.grad is None


# --- the mask in the state dict, on request ------------------------------------------------------------------------


def test_a_saved_mask_is_one_more_key_and_is_compared():
    model = nn.Sequential(nn.Linear(3, 4))
    gg.pin(model[0].weight, rows=[0]).save_in(model)
    state = copy.deepcopy(model.state_dict())
    assert list(state) == ["0.weight", "0.bias", "0.weight_frozen"]
    assert state["0.weight_frozen"].sum() == 3
    model.load_state_dict(state)
    twin = nn.Sequential(nn.Linear(3, 4))
    gg.pin(twin[0].weight, frozen=state["0.weight_frozen"]).save_in(twin)
    twin.load_state_dict(state)
    assert torch.equal(twin[0].weight, model[0].weight)


def test_resuming_without_the_pin_is_detected():
    model = nn.Sequential(nn.Linear(3, 4))
    gg.pin(model[0].weight, rows=[0]).save_in(model)
    state = model.state_dict()
    with pytest.raises(RuntimeError, match=r'Unexpected key\(s\) in state_dict: "0.weight_frozen"'):
        nn.Sequential(nn.Linear(3, 4)).load_state_dict(state)


def test_resuming_with_another_pin_is_detected():
    model, other = nn.Sequential(nn.Linear(3, 4)), nn.Sequential(nn.Linear(3, 4))
    gg.pin(model[0].weight, rows=[0]).save_in(model)
    pin = gg.pin(other[0].weight, rows=[1, 2])
    pin.save_in(other)
    with pytest.raises(RuntimeError, match=r"0\.weight has 6 pinned elements here and 3 in the checkpoint"):
        other.load_state_dict(model.state_dict())
    pin.release()
    with pytest.raises(RuntimeError, match=r"0\.weight has 0 pinned elements here and 3 in the checkpoint"):
        other.load_state_dict(model.state_dict())


def test_a_state_without_the_mask_is_detected():
    model = nn.Sequential(nn.Linear(3, 4))
    gg.pin(model[0].weight, rows=[0]).save_in(model)
    with pytest.raises(RuntimeError, match=r'Missing key\(s\) in state_dict: "0.weight_frozen"'):
        model.load_state_dict(nn.Sequential(nn.Linear(3, 4)).state_dict())


def test_several_pins_of_one_parameter_are_saved_as_one():
    model = nn.Linear(3, 4)
    for row in (0, 1):
        pin = gg.pin(model.weight, rows=[row])
        pin.save_in(model)
        pin.save_in(model)
    state = model.state_dict()
    assert state["weight_frozen"].sum() == 6
    model.load_state_dict(state)


def test_the_saving_of_the_mask_goes_along():
    model = nn.Sequential(nn.Linear(3, 4))
    gg.pin(model[0].weight, rows=[0]).save_in(model)
    for way in TRAININGS.values():
        other = way(model)
        assert "0.weight_frozen" in other.state_dict()
        other.load_state_dict(model.state_dict())


def test_the_parameter_must_be_in_the_model():
    pin = gg.pin(nn.Parameter(torch.ones(2)), rows=[0])
    with pytest.raises(ArgumentValueError, match="this Linear does not have the pinned parameter"):
        pin.save_in(nn.Linear(2, 2))
