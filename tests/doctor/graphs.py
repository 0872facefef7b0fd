"""What the tests of the module graph share: models to build, and the graph by names instead of places."""

import math

import torch
from torch import nn

X = torch.linspace(-1, 1, 24).reshape(6, 4)


class Residual(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(width), nn.Linear(width, width)

    def forward(self, x):
        return x + self.linear(self.norm(x))


def modules_of(*names, **more):
    return nn.ModuleDict({name: nn.Linear(4, 4) for name in names} | more)


def edges_of(diagnosis):
    """The edges by the names of their ends."""
    names = [module["name"] for module in diagnosis.graph["modules"]]
    ends = {-1: "input", -2: "loss"} | dict(enumerate(names))
    found = {(ends[edge["from"]], ends[edge["to"]]): edge for edge in diagnosis.graph["edges"]}
    assert len(found) == len(diagnosis.graph["edges"]), "an edge is listed twice"
    return found


def path_of(diagnosis):
    ends = {-1: "input", -2: "loss"} | dict(enumerate(m["name"] for m in diagnosis.graph["modules"]))
    return [ends[place] for place in diagnosis.graph["nonfinite_path"]]


def module_of(diagnosis, name):
    return next(module for module in diagnosis.graph["modules"] if module["name"] == name)


def layer_of(diagnosis, name):
    return next(layer for layer in diagnosis.layers if layer["name"] == name)


def norm(tensors):
    return math.hypot(*(float(torch.linalg.vector_norm(tensor.detach().to_dense())) for tensor in tensors))
