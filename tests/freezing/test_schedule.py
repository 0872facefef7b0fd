"""What trains from when on: absolute, resumable at any point, and nothing free in between."""

import copy
import io

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import gradgate as gg
from gradgate.errors import ArgumentTypeError, ArgumentValueError, NothingMatchedError

PLAN = {0: ["head.*"], 2: ["body.1.*"], 4: ["body.*"]}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 3))
        self.head = nn.Linear(3, 1)

    def forward(self, x):
        return self.head(self.body(x))


def learning(model):
    return [name for name, parameter in model.named_parameters() if parameter.requires_grad]


def expected(at, plan=PLAN):
    prefixes = [pattern.removesuffix("*") for start, patterns in plan.items() if start <= at for pattern in patterns]
    return [name for name, _ in Net().named_parameters() if name.startswith(tuple(prefixes))]


@settings(max_examples=20)
@given(st.lists(st.integers(0, 6), max_size=6))
def test_only_the_number_counts_not_the_way_to_it(epochs):
    model = Net()
    schedule = gg.FreezeSchedule(model, PLAN)
    for epoch in (0, *epochs):
        schedule.set_epoch(epoch)
        assert learning(model) == schedule.learning() == expected(epoch)
        assert model.body[1].training == (epoch >= 2)


def run(epochs, at=0, checkpoint=None):
    """Train for some epochs from a checkpoint on, and give the next checkpoint."""
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, weight_decay=0.1)
    schedule = gg.FreezeSchedule(model, PLAN)
    if checkpoint is not None:
        saved = torch.load(io.BytesIO(checkpoint))
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        schedule.load_state_dict(saved["schedule"])
    for epoch in range(at, at + epochs):
        schedule.set_epoch(epoch)
        for batch in range(2):
            x = torch.randn(4, 3, generator=torch.Generator().manual_seed(10 * epoch + batch))
            optimizer.zero_grad()
            model(x).pow(2).sum().backward()
            optimizer.step()
        if schedule.handle is not None:
            schedule.handle.verify()
    file = io.BytesIO()
    torch.save(
        {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "schedule": schedule.state_dict()}, file
    )
    return model, file.getvalue()


@pytest.mark.parametrize("stop", range(1, 6))
def test_a_run_that_was_broken_off_goes_on_to_the_same_bits(stop):
    whole, _ = run(6)
    _, checkpoint = run(stop)
    resumed, _ = run(6 - stop, at=stop, checkpoint=checkpoint)
    for name, value in whole.state_dict().items():
        assert torch.equal(value, resumed.state_dict()[name]), name


def test_resume_alone_thaws_what_was_thawed():
    """A peer freezes again in silence when it resumes."""
    schedule = gg.FreezeSchedule(Net(), PLAN)
    schedule.set_epoch(5)
    model = Net()
    resumed = gg.FreezeSchedule(model, PLAN)
    resumed.load_state_dict(schedule.state_dict())
    assert resumed.at == 5
    assert learning(model) == expected(5)
    assert resumed.handle is None


def test_by_step():
    model = Net()
    schedule = gg.FreezeSchedule(model, {0: ["head.*"], 100: ["body.*"]}, by="step")
    handle = schedule.handle
    schedule.set_step(99)
    assert schedule.handle is handle  # nothing changed, so nothing was done
    assert schedule.state_dict()["at"] == 99
    schedule.set_step(100)
    assert learning(model) == [name for name, _ in model.named_parameters()]
    with pytest.raises(ArgumentValueError, match=r"set_epoch\(\): this schedule goes by steps"):
        schedule.set_epoch(1)


def test_other_handles_are_respected():
    model = Net()
    handle = gg.freeze(model, "head.bias")
    schedule = gg.FreezeSchedule(model, PLAN)
    assert learning(model) == ["head.weight"]
    handle.thaw()
    assert learning(model) == expected(0)
    schedule.set_epoch(4)
    assert len(learning(model)) == 8


def test_a_new_schedule_takes_the_place_of_the_old_one():
    model = nn.ModuleDict({"body": nn.Linear(2, 2), "head": nn.Linear(2, 2)})
    plan = {0: ["head.*"], 3: ["body.*"]}
    first = gg.FreezeSchedule(model, plan)
    second = gg.FreezeSchedule(model, plan)  # a notebook's cell, run again
    second.set_epoch(3)
    assert model["body"].weight.requires_grad
    first.set_epoch(3)
    first.set_epoch(0)  # whoever speaks last holds
    assert not model["body"].weight.requires_grad
    second.set_epoch(0)
    second.set_epoch(3)
    assert model["body"].weight.requires_grad
    del first, second
    gg.FreezeSchedule(model, plan)
    assert not model["body"].weight.requires_grad


def test_statistics_may_run():
    model = Net()
    gg.FreezeSchedule(model, PLAN, statistics=False)
    assert model.body[1].training


def test_nothing_from_the_start_is_allowed():
    model = Net()
    gg.FreezeSchedule(model, {2: ["head.*"]})
    assert learning(model) == []


def test_what_is_wrong_is_said():
    model = Net()
    with pytest.raises(NothingMatchedError, match=r"FreezeSchedule\(\): 'haed\.\*' matches no parameter of Net"):
        gg.FreezeSchedule(model, {0: ["haed.*"]})
    with pytest.raises(ArgumentTypeError, match=r"FreezeSchedule\(\): `plan` is the list"):
        gg.FreezeSchedule(model, ["head.*"])
    with pytest.raises(ArgumentTypeError, match="from which number on which list of selectors"):
        gg.FreezeSchedule(model, {0: "head.*"})
    with pytest.raises(ArgumentValueError, match="`plan` has the number -1"):
        gg.FreezeSchedule(model, {-1: ["head.*"]})
    with pytest.raises(ArgumentValueError, match="`plan` is empty"):
        gg.FreezeSchedule(model, {})
    with pytest.raises(ArgumentValueError, match="`by` is the str 'batch'"):
        gg.FreezeSchedule(model, PLAN, by="batch")
    schedule = gg.FreezeSchedule(model, PLAN)
    with pytest.raises(ArgumentValueError, match=r"set_epoch\(\): `epoch` is the int -1"):
        schedule.set_epoch(-1)
    state = copy.deepcopy(schedule.state_dict())
    state["learns"][2] = ["body.0.weight"]
    with pytest.raises(ArgumentValueError, match="the saved schedule has another plan, at epoch 2"):
        schedule.load_state_dict(state)
    state = {**schedule.state_dict(), "by": "step"}
    with pytest.raises(ArgumentValueError, match="the saved schedule has by='step'"):
        schedule.load_state_dict(state)
    gg.freezing.thaw(model)
    assert len(learning(model)) == 8
