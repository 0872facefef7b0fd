"""Graphs of random programs, against the slow way: every reader gets a copy of its own that keeps its gradient."""

import math

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from torch import nn

import gradgate as gg
from tests.doctor.graphs import X, edges_of, norm


class Twice(nn.Module):
    """Reads what it is given more than once."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x):
        return x * x.sigmoid() + x.roll(1, dims=0) * self.weight


class Views(nn.Module):
    """Begins with a view and writes in place."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x):
        y = x.t().reshape(4, 2, 3) * self.weight
        y[0] = y[1] * 2
        return y.tanh().reshape(4, 6).t()


KINDS = {"linear": lambda: nn.Linear(4, 4), "twice": Twice, "views": Views}


JOINS = {
    "sum": lambda values: sum(values[1:], values[0]),
    "product": lambda values: math.prod(value.sin() for value in values),
    "mean of a stack": lambda values: torch.stack(values).mean(dim=0),
    "part of a concatenation": lambda values: torch.cat(values, dim=1)[:, -4:] + torch.cat(values, dim=1)[:, :4],
    "with detached": lambda values: values[0].detach() + sum(values[1:], values[-1] * 1),
}

# Each node is a module that reads a join of values made before it.
NODES = st.lists(
    st.tuples(
        st.sampled_from(list(KINDS)),
        st.sampled_from(list(JOINS)),
        st.lists(st.integers(0, 30), min_size=1, max_size=3),
    ),
    min_size=1,
    max_size=6,
)


@pytest.mark.slow
@given(NODES)
def test_every_edge_is_found_and_has_its_gradient(nodes):
    model = nn.ModuleDict({f"m{number}": KINDS[kind]() for number, (kind, _, _) in enumerate(nodes)})
    reads, living = {}, {}

    def run(own):
        values, names = [X.clone()], ["input"]
        for number, (_, join, picks) in enumerate(nodes):
            picked = [pick % len(values) for pick in picks]
            read = own(JOINS[join]([values[pick] for pick in picked]))
            name = f"m{number}"
            for place, pick in enumerate(picked):
                alive = not (join == "with detached" and place == 0 and len(picked) > 1 and pick not in picked[1:])
                living[names[pick], name] = alive
                reads[names[pick], name] = read
            values.append(model[name](read))
            names.append(name)
        return values[-1].pow(2).sum()

    found = edges_of(gg.diagnose(lambda: run(lambda tensor: tensor), model=model))

    def own(tensor):
        copy = tensor.clone()
        if copy.requires_grad:
            copy.retain_grad()
        return copy

    model.zero_grad()
    run(own).backward()
    last = f"m{len(nodes) - 1}"
    assert set(found) == {*reads, (last, "loss")}
    for ends, tensor in reads.items():
        came_back = living[ends] and ends[0] != "input" and tensor.grad is not None
        if came_back:
            assert found[ends]["gradient_norm"] == pytest.approx(norm([tensor.grad]), rel=1e-4, abs=1e-7), ends
        else:
            assert found[ends]["gradient_norm"] is None, ends
