"""A spectral or weight norm, a pruning, a parametrization: applied to what is frozen it is found, and named."""

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune, spectral_norm, weight_norm

import gradgate as gg
from gradgate.errors import FrozenMovedError

pytestmark = pytest.mark.filterwarnings("ignore:.*weight_norm.*is deprecated:FutureWarning")


class Halved(nn.Module):
    def forward(self, weight):
        return weight / 2


class Parts(nn.Module):
    def forward(self, first, second):
        return first + second

    def right_inverse(self, weight):
        return weight / 2, weight / 2


CHANGES = {
    "SpectralNorm": spectral_norm,
    "WeightNorm": weight_norm,
    "L1Unstructured": lambda layer: prune.l1_unstructured(layer, "weight", 0.5),
    "RandomStructured": lambda layer: prune.random_structured(layer, "weight", 0.5, dim=0),
    "spectral parametrization": parametrizations.spectral_norm,
    "weight parametrization": parametrizations.weight_norm,
    "Orthogonal": parametrizations.orthogonal,
    "Halved": lambda layer: parametrize.register_parametrization(layer, "weight", Halved()),
}
KINDS = {"spectral parametrization": "SpectralNorm", "weight parametrization": "WeightNorm"}
each_change = pytest.mark.parametrize("change", CHANGES)


def network():
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))


def train(model, steps=2):
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(3, 4)).pow(2).sum().backward()
        optimizer.step()


@each_change
@pytest.mark.parametrize("trained", [False, True], ids=["at once", "after steps"])
def test_freeze_finds_it_and_names_it(change, trained):
    model = network()
    handle = gg.freeze(model, "0.*")
    handle.verify()
    CHANGES[change](model[0])
    if trained:
        train(model)
    with pytest.raises(FrozenMovedError, match=rf"0\.weight is frozen, but {KINDS.get(change, change)} was applied"):
        handle.verify()


@each_change
@pytest.mark.parametrize("trained", [False, True], ids=["at once", "after steps"])
def test_pin_finds_it_and_names_it(change, trained):
    model = network()
    pin = gg.pin(model[0].weight, rows=[0, 1, 2])
    pin.verify()
    CHANGES[change](model[0])
    if trained:
        train(model)
    with pytest.raises(FrozenMovedError, match=rf"^parameter is frozen, but {KINDS.get(change, change)} was"):
        pin.verify()


def test_a_parametrization_into_several_tensors_is_found_by_its_name():
    model = network()
    handle = gg.freeze(model, "0.*")
    parametrize.register_parametrization(model[0], "weight", Parts())
    with pytest.raises(FrozenMovedError, match=r"0\.weight is frozen, but Parts was applied"):
        handle.verify()


@pytest.mark.parametrize("change", ["L1Unstructured", "Halved"])
def test_what_was_accepted_is_compared_from_then_on(change):
    model = network()
    handle, pin = gg.freeze(model, "0.*"), gg.pin(model[1].weight, rows=[0])
    for layer in model:
        CHANGES[change](layer)
    handle.accept()
    pin.accept()
    handle.verify()
    pin.verify()
    with torch.no_grad():
        model[0].weight_mask.zero_() if change == "L1Unstructured" else model[0].parametrizations.weight.original.add_(
            1
        )
    model(torch.ones(1, 4))
    pin.verify()
    with pytest.raises(FrozenMovedError, match=rf"(?s)0\.weight.*moved.*{change} computes it anew"):
        handle.verify()


def test_looking_does_not_go_on_with_the_power_iteration():
    model = network()
    parametrizations.spectral_norm(model[0])
    handle = gg.freeze(model, "0.*", statistics=False)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    handle.verify()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert model[0].parametrizations.weight[0].training


def test_the_older_spectral_norm_of_a_frozen_layer_stands_still():
    """Its power iteration would go on in every forward, and with it the weight that the layer uses."""
    model = network()
    spectral_norm(model[0])
    model(torch.ones(1, 4))
    handle = gg.freeze(model, "0.*")
    assert handle.statistics == ("0",)
    model.train()
    before = model[0].weight.clone()
    train(model)
    assert torch.equal(model[0].weight, before)
    handle.verify()
    handle.thaw()
    assert model[0].training


def test_a_parameter_that_gets_a_second_name_is_not_computed():
    """Tying registers it again; that is no reason to speak."""
    model = network()
    pin = gg.pin(model[0].weight, rows=[0])
    other = nn.Linear(4, 4)
    other.weight = model[0].weight
    pin.verify()
    handle = gg.freeze(other)
    train(nn.Sequential(other, model[1]))
    handle.verify()
    pin.verify()


def test_removed_again_is_as_before():
    model = network()
    pin, handle = gg.pin(model[1].weight, rows=[0]), gg.freeze(model, "0.*")
    for layer in model:
        CHANGES["Halved"](layer)
        parametrize.remove_parametrizations(layer, "weight", leave_parametrized=False)
    handle.verify()
    pin.verify()


def test_limit_a_pin_does_not_see_a_parametrization_into_several_new_tensors():
    """A pin knows no module, and nothing that is registered then is the parameter or shares its memory."""
    layer = nn.Linear(4, 4)
    pin = gg.pin(layer.weight, rows=[0])
    parametrize.register_parametrization(layer, "weight", Parts())
    pin.verify()
