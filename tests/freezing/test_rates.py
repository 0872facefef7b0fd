"""FreezeSchedule(lr=...): what thaws joins with a learning rate of its own that grows; state of what is frozen."""

import json

import pytest
import torch
from torch import nn

import gradgate as gg
from gradgate.errors import ArgumentTypeError, ArgumentValueError

PLAN = {0: ["2.*"], 2: ["1.*"], 3: ["0.*"]}
LR = {2: 0.01, 3: 0.004}

OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.01),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.1, foreach=True),
    "fused": lambda parameters: torch.optim.AdamW(parameters, lr=0.1, fused=True),
    "tensor": lambda parameters: torch.optim.Adam(parameters, lr=torch.tensor(0.1)),
    "adadelta": lambda parameters: torch.optim.Adadelta(parameters, lr=0.1),
}


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 1))


def run_epochs(model, optimizer, at_epoch, epochs=range(7), scheduler=None):
    torch.manual_seed(1)
    for epoch in range(7):
        x = torch.randn(4, 8, 3)
        if epoch not in epochs:
            continue
        at_epoch(epoch)
        for batch in x:
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()
        if scheduler is not None:
            scheduler.step()
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def expected(optimizer_of, decay=1.0):
    """The same training with a group for each layer, whose learning rate is set by hand."""
    model = net()
    optimizer = optimizer_of([{"params": list(layer.parameters())} for layer in model])

    def at_epoch(epoch):
        for layer, group, start in zip(model, optimizer.param_groups, (3, 2, 0), strict=True):
            layer.requires_grad_(epoch >= start)
            if epoch < start:
                layer.zero_grad()
            base = 0.1 * decay**epoch
            rate = min(base, LR[start] * 2.0 ** (epoch - start)) if start else base
            group["lr"] = torch.tensor(rate) if isinstance(group["lr"], torch.Tensor) else rate

    return run_epochs(model, optimizer, at_epoch)


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_the_same_training_with_groups_set_by_hand(kind):
    model = net()
    optimizer = OPTIMIZERS[kind](model.parameters())
    schedule = gg.FreezeSchedule(model, PLAN, lr=LR)
    keys = str(optimizer.state_dict()["param_groups"])
    got = run_epochs(model, optimizer, schedule.set_epoch)
    assert torch.equal(got, expected(OPTIMIZERS[kind]))
    assert str(optimizer.state_dict()["param_groups"]) == keys  # nobody else sees it


def test_with_a_scheduler_and_after_a_resume():
    def decayed(optimizer):
        return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7)

    model = net()
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    schedule, scheduler = gg.FreezeSchedule(model, PLAN, lr=LR), decayed(optimizer)
    run_epochs(model, optimizer, schedule.set_epoch, range(4), scheduler)
    saved = [thing.state_dict() for thing in (model, optimizer, schedule, scheduler)]
    model = net()
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    schedule, scheduler = gg.FreezeSchedule(model, PLAN, lr=LR), decayed(optimizer)
    for thing, state in zip((model, optimizer, schedule, scheduler), saved, strict=True):
        thing.load_state_dict(state)
    rates = "what thawed at 2 with lr <= 0.02; what thawed at 3 with lr <= 0.004"
    assert repr(schedule) == f"FreezeSchedule(epoch 3: 6 of 6 parameters learn; {rates})"
    got = run_epochs(model, optimizer, schedule.set_epoch, range(4, 7), scheduler)
    torch.testing.assert_close(got, expected(OPTIMIZERS["adamw"], decay=0.7))
    with pytest.raises(ArgumentValueError, match=r"the saved schedule has lr=\{2: 0.01, 3: 0.004\}, growth=2.0"):
        gg.FreezeSchedule(net(), PLAN).load_state_dict(saved[2])


def test_a_state_that_was_saved_as_json():
    schedule, again = (gg.FreezeSchedule(net(), PLAN, lr={max(PLAN): 1e-4}) for _ in range(2))
    schedule.set_epoch(max(PLAN))
    again.load_state_dict(json.loads(json.dumps(schedule.state_dict())))
    assert again.at == max(PLAN)
    assert again.learning() == schedule.learning()


def test_what_a_step_writes_into_its_group_stays():
    class Counting(torch.optim.SGD):
        def step(self, closure=None):
            for group in self.param_groups:
                group["steps"] = group.get("steps", 0) + 1
            return super().step(closure)

    model = net()
    optimizer = Counting(model.parameters(), lr=0.1)
    schedule = gg.FreezeSchedule(model, {0: ["2.*"], 1: ["*"]}, lr={1: 0.001})
    run_epochs(model, optimizer, schedule.set_epoch, range(3))
    assert len(optimizer.param_groups) == 1
    assert optimizer.param_groups[0]["steps"] == 12
    assert set(optimizer.param_groups[0]) == {*torch.optim.SGD(net().parameters()).param_groups[0], "steps"}


def test_a_step_that_raises_and_the_next_one():
    model = net()
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    schedule = gg.FreezeSchedule(model, {0: ["2.*"], 1: ["*"]}, lr={1: 0.001})
    schedule.set_epoch(1)

    def fails():
        raise KeyError("a closure")

    with pytest.raises(KeyError):
        optimizer.step(fails)
    assert len(optimizer.param_groups) == 2
    model(torch.ones(1, 3)).sum().backward()
    before = model[0].weight.detach().clone()
    optimizer.step()
    torch.testing.assert_close(model[0].weight, before - 0.001 * (model[0].weight.grad + 0.01 * before))
    assert len(optimizer.param_groups) == 1


def test_lbfgs_is_refused_while_rates_differ():
    model = net()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1)
    schedule = gg.FreezeSchedule(model, {0: ["2.*"], 1: ["*"]}, lr={1: 0.05})
    schedule.set_epoch(1)
    with pytest.raises(ArgumentValueError, match="L-BFGS moves all parameters along one direction"):
        optimizer.step(lambda: model(torch.ones(1, 3)).sum())
    schedule.set_epoch(2)
    assert len(optimizer.param_groups) == 1


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"lr": 0.1}, ArgumentTypeError, "FreezeSchedule(): `lr` is the float 0.1."),
        ({"lr": {2: -1.0}}, ArgumentTypeError, "FreezeSchedule(): `lr` is the dict {2: -1.0}."),
        (
            {"lr": {1: 0.1}},
            ArgumentValueError,
            "`lr` has the number 1.\nWhy: nothing thaws there; the plan has 0, 2, 3.",
        ),
        ({"lr": LR, "growth": 1.0}, ArgumentValueError, "FreezeSchedule(): `growth` is the float 1.0."),
    ],
)
def test_what_is_refused(options, error, text):
    with pytest.raises(error) as caught:
        gg.FreezeSchedule(net(), PLAN, **options)
    assert text in str(caught.value)


def test_state_of_what_is_frozen_is_said_and_released():
    model = net()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    handle = gg.freeze(model, "0.*")
    table = gg.trainable(model, optimizer)
    assert table["0.weight"]["why"] == "freeze('0.*'); optimizer state of 76 bytes"  # two moments of 9, and a step
    assert table["1.weight"]["why"] == ""
    assert handle.release_state(optimizer) == 76 + 28
    assert handle.release_state(optimizer) == 0
    assert model[0].weight not in optimizer.state
    assert model[1].weight in optimizer.state
    handle.thaw()
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    assert optimizer.state[model[0].weight]["step"] == 1


def test_the_state_of_a_tied_parameter_is_counted_once():
    model = nn.ModuleList([nn.Embedding(2, 3), nn.Linear(3, 2, bias=False)])
    model[1].weight = model[0].weight
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    model[1](model[0](torch.tensor([0, 1]))).sum().backward()
    optimizer.step()
    assert gg.freeze(model).release_state(optimizer) == 2 * 6 * 4 + 4  # two moments, and a step
