"""Optimizers that call the step of another, or that of their class, and write values afterwards themselves."""

import pytest
import torch
from torch import nn

import gradgate as gg


def shrink(parameters):
    with torch.no_grad():
        for parameter in parameters:
            parameter.mul_(0.9)


class Wraps(torch.optim.Optimizer):
    """Steps with another optimizer, as often as it is told, and shrinks the weights each time."""

    def __init__(self, inner, times):
        self.inner, self.times = inner, times
        super().__init__([p for group in inner.param_groups for p in group["params"]], {})

    def step(self, closure=None):
        for _ in range(self.times):
            self.inner.step()
            shrink(p for group in self.param_groups for p in group["params"])


class Derived(torch.optim.SGD):
    """Shrinks the weights after the step of its class, whose hooks run inside its own."""

    def step(self, closure=None):
        super().step(closure)
        shrink(p for group in self.param_groups for p in group["params"])


def plain(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)  # made first: only then torch hooks SGD.step itself


MAKE = {
    "wraps": lambda parameters: Wraps(plain(parameters), 1),
    "wraps and repeats": lambda parameters: Wraps(plain(parameters), 3),
    "wraps twice": lambda parameters: Wraps(Wraps(plain(parameters), 2), 2),
    "derived": lambda parameters: [plain(parameters), Derived(parameters, lr=0.1, momentum=0.9)][1],
}


def train(model, optimizer, steps=3):
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.ones(2, 3)).square().sum().backward()
        optimizer.step()


@pytest.mark.parametrize("make", MAKE.values(), ids=MAKE)
def test_pinned_rows_stay_and_the_others_step_as_alone(make):
    model, alone = nn.Linear(3, 4, bias=False), nn.Linear(3, 3, bias=False)
    alone.load_state_dict({"weight": model.weight[1:]})
    before = model.weight.detach().clone()
    pin = gg.pin(model.weight, rows=[0])
    train(model, make(list(model.parameters())))
    train(alone, make(list(alone.parameters())))
    pin.verify()
    assert torch.equal(model.weight[0], before[0])
    assert torch.equal(model.weight[1:], alone.weight)


@pytest.mark.parametrize("make", MAKE.values(), ids=MAKE)
def test_what_is_frozen_stays(make):
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with gg.freeze(model, "0.*") as handle:
        train(model, make(list(model.parameters())))
        handle.verify()
    assert torch.equal(model[0].weight, before["0.weight"])
    assert torch.equal(model[0].bias, before["0.bias"])
    assert not torch.equal(model[1].weight, before["1.weight"])


@pytest.mark.parametrize("hold", [lambda m: gg.pin(m.weight, rows=[0]), lambda m: gg.freeze(m, "weight")])
@pytest.mark.parametrize("make", MAKE.values(), ids=MAKE)
def test_values_loaded_between_steps_are_kept(make, hold):
    model = nn.Linear(3, 4)
    hold(model)
    optimizers = [make(list(model.parameters())), plain(model.parameters())]
    for optimizer in (optimizers[0], *optimizers, *optimizers):
        state = nn.Linear(3, 4).state_dict()
        model.load_state_dict(state)
        train(model, optimizer)
        assert torch.equal(model.weight[0], state["weight"][0])


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.LBFGS, Derived])
def test_values_loaded_after_a_closure_that_raised_are_kept(kind):
    model = nn.Linear(3, 4)
    pin = gg.pin(model.weight, rows=[0])
    optimizer = kind(model.parameters(), lr=0.1)

    def closure():
        optimizer.zero_grad()
        loss = model(torch.ones(2, 3)).square().sum()
        loss.backward()
        return loss

    def broken():
        raise RuntimeError("no memory")

    optimizer.step(closure)
    with pytest.raises(RuntimeError, match="no memory"):
        optimizer.step(broken)
    pin.verify()
    state = nn.Linear(3, 4).state_dict()
    model.load_state_dict(state)
    optimizer.step(closure)
    assert torch.equal(model.weight[0], state["weight"][0])
    assert not torch.equal(model.weight[1], state["weight"][1])


@pytest.mark.parametrize("hold", [lambda m: gg.pin(m.weight, rows=[0]), lambda m: gg.pin(m.weight, rows=range(4))])
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.LBFGS])
def test_what_a_closure_writes_to_pinned_rows_is_undone(kind, hold):
    model = nn.Linear(3, 4)
    before = model.weight.detach().clone()
    pin = hold(model)
    optimizer = kind(model.parameters(), lr=0.1)

    def closure():
        optimizer.zero_grad()
        loss = model(torch.ones(2, 3)).square().sum()
        loss.backward()
        shrink(model.parameters())
        return loss

    for _ in range(2):
        optimizer.step(closure)
    pin.verify()
    assert torch.equal(model.weight[0], before[0])


def test_a_step_that_broke_off_is_put_right_by_another_optimizer():
    class Breaks(torch.optim.SGD):
        def step(self, closure=None):
            super().step(closure)
            raise RuntimeError("the power went")

    model = nn.Linear(3, 4)
    before = model.weight.detach().clone()
    pin = gg.pin(model.weight, rows=[0])
    for kind in (Breaks, Breaks):
        model(torch.ones(2, 3)).sum().backward()
        with pytest.raises(RuntimeError, match="the power went"):
            kind(model.parameters(), lr=0.1, weight_decay=1.0).step()
    train(model, plain(model.parameters()))
    pin.verify()
    assert torch.equal(model.weight[0], before[0])
