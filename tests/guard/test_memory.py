"""What a bad step holds on to afterwards: nothing, without waiting for the garbage collector."""

import gc
import weakref

import pytest
import torch
from torch import nn

import gradgate as gg


class Trap(nn.Module):
    """Fails for rows that start with a 9: raises, or gives a value or a gradient that is not finite."""

    def __init__(self, fault):
        super().__init__()
        self.fault = fault

    def forward(self, x):
        marked = x[:, :1].detach() == 9
        if self.fault == "raise" and bool(marked.any()):
            raise ValueError("a nine")
        if self.fault == "value":
            return x + torch.where(marked, float("nan"), 0.0)
        if self.fault == "gradient":
            return x * (torch.where(marked, 0.0, 1.0) * (1 + 0 * x)).sqrt()
        return x


class Model(nn.Module):
    def __init__(self, fault):
        super().__init__()
        self.fault, self.seen = fault, []
        self.first, self.trap, self.last = nn.Linear(3, 3), Trap(fault), nn.Linear(3, 1)

    def forward(self, x):
        hidden = self.first(x)
        hidden = torch.cat([x[:, :1], hidden[:, 1:]], 1)
        self.seen.append(weakref.ref(hidden))
        if self.fault == "body" and bool((x[:, 0] == 9).any()):
            raise ValueError("a nine")
        return self.last(self.trap(hidden))


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["raise", "body", "value", "gradient", "loss"])
def test_a_bad_step_leaves_no_activations_behind(fault):
    model = Model(fault)
    guard = gg.Guard(model)
    x = torch.randn(8, 3)
    x[2, 0] = 9

    def loss_fn(x):
        out = model(x)
        if fault == "loss" and bool((x[:, 0] == 9).any()):
            raise ArithmeticError("a nine")
        return out.square().mean()

    gc.collect()
    gc.disable()
    try:
        result = guard.backward(x, loss_fn)
        assert [incident.row for incident in result.dropped] == [2]
        assert len(model.seen) > 1
        assert not any(activation() is not None for activation in model.seen)
    finally:
        gc.enable()
