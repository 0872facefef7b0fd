"""trainable: who learns, how much, and why not."""

import json

import pytest
import torch
from torch import nn

import gradgate as gg


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(6, 2)
        self.norm = nn.BatchNorm1d(2)
        self.out = nn.Linear(2, 6, bias=False)
        self.out.weight = self.embed.weight
        self.head = nn.Linear(2, 3)


def test_every_state_with_its_reason():
    model = Net()
    gg.freeze(model, "norm.*")
    gg.freeze(model, model.norm.weight)
    gg.pin(model.head.weight, rows=[0])
    gg.pin(model.head.weight, frozen=torch.tensor([[True, True], [False, False], [False, True]]))
    model.head.bias.requires_grad_(False)
    table = gg.trainable(model)
    assert list(table) == [name for name, _ in model.named_parameters(remove_duplicate=False)]
    assert table["embed.weight"] == {
        "shape": (6, 2),
        "elements": 12,
        "learning": 12,
        "state": "learns",
        "why": "tied: out.weight",
        "tied": ["out.weight"],
    }
    assert table["norm.weight"]["why"] == "freeze('norm.*'); freeze(float32 tensor of shape (2,))"
    assert table["norm.weight"]["state"] == "frozen"
    assert table["head.weight"]["state"] == "part frozen"
    assert table["head.weight"]["learning"] == 3
    assert table["head.weight"]["why"] == "pin of 2 elements; pin of 3 elements"
    assert table["head.bias"]["why"] == "requires_grad is False"


def test_the_totals_count_tied_weights_once():
    model = Net()
    pin = gg.pin(model.embed.weight, rows=[0, 1])
    totals = gg.trainable(model).totals
    assert totals.elements == 12 + 4 + 9
    assert totals.frozen == 4
    assert totals.learning == totals.elements - 4
    assert totals.statistics_running == ("norm",)
    gg.freeze(model, "norm.*")
    assert gg.trainable(model).totals.statistics_held == ("norm",)
    pin.release()
    assert gg.trainable(model).totals.frozen == 4


def test_overlapping_pins_count_once():
    weight = nn.Linear(3, 4)
    gg.pin(weight.weight, rows=[0, 1])
    gg.pin(weight.weight, rows=[1, 2])
    table = gg.trainable(weight)
    assert table["weight"]["learning"] == 3
    assert table["weight"]["why"] == "pin of 6 elements; pin of 6 elements"


@pytest.mark.slow
def test_rows_that_learn_beside_their_table():
    model = Net()
    gg.train_rows(model.embed, rows=[4])
    table = gg.trainable(model)
    assert table["embed.weight"]["state"] == "part frozen"
    assert "train_rows: 1 of its rows learn" in table["embed.weight"]["why"]
    assert table["embed.weight_rows"]["state"] == "learns"
    assert table.totals.elements == 12 + 4 + 9
    assert table.totals.frozen == 10


def test_with_optimizers_it_tells_what_none_of_them_has():
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD([model.weight], lr=0.1)
    table = gg.trainable(model, optimizer)
    assert table["weight"]["state"] == "learns"
    assert table["bias"]["state"] == "frozen"
    assert table["bias"]["why"] == "in none of the optimizers"


def test_it_prints_and_is_plain():
    model = Net()
    gg.freeze(model, "norm.*")
    table = gg.trainable(model)
    text = " ".join(str(table).split())
    for word in (
        "parameter",
        "norm.weight",
        "freeze('norm.*')",
        "21 of 25 elements learn (84.00%)",
        "of 1 modules stand",
    ):
        assert word in text
    assert json.loads(json.dumps(table))["norm.bias"]["state"] == "frozen"
    assert isinstance(table, dict)


def test_a_model_without_parameters():
    table = gg.trainable(nn.ReLU())
    assert dict(table) == {}
    assert "0 of 0 elements learn" in str(table)


def test_a_wrapped_model_has_its_own_names():
    assert list(gg.trainable(torch.compile(nn.Linear(2, 2), backend="eager"))) == ["weight", "bias"]
