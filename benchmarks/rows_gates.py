"""Gates: what a call costs, what a step costs with them, what a shut gate saves, and how fast a gradient is masked."""

from __future__ import annotations

import torch
from torch import nn

import gradgate as gg
from benchmarks.harness import Row
from gradgate.gates._rules import Scale


class _CopiedReversal(torch.autograd.Function):
    """The gradient reversal that is copied from repository to repository."""

    @staticmethod
    def forward(ctx, x, strength):
        ctx.strength = strength
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return gradient.neg() * ctx.strength, None


def calls(gate):
    """Give candidates: a gate on a small tensor, and what else one could write there."""

    def make():
        x = torch.randn(16, 64, requires_grad=True) * 1
        keep = torch.rand(16, 64) > 0.5
        return {
            "view_as": lambda: x.view_as(x),
            "gradgate": lambda: gate(x, keep),
            "where/detach": lambda: torch.where(keep, x, x.detach()),
            "hook on a view": lambda: x.view_as(x).register_hook(lambda g: torch.where(keep, g, 0)),
            "copied Function": lambda: _CopiedReversal.apply(x, 1.0),
        }

    return make


class _Hooked(nn.Module):
    def __init__(self, keep):
        super().__init__()
        self.keep = keep

    def forward(self, x):
        y = x.view_as(x)
        y.register_hook(lambda gradient: torch.where(self.keep, gradient, 0))
        return y


class _Selected(nn.Module):
    def __init__(self, keep):
        super().__init__()
        self.keep = keep

    def forward(self, x):
        return torch.where(self.keep, x, x.detach())


def _step(width, batch, depth, gates):
    layers = [nn.Linear(width, width) for _ in range(depth)]
    modules = [m for layer, gate in zip(layers, gates, strict=True) for m in (layer, gate, nn.ReLU()) if m is not None]
    net = nn.Sequential(*modules)
    x = torch.randn(batch, width)

    def step():
        net.zero_grad()
        net(x).sum().backward()

    return step


def six_gates():
    """An MLP of six layers with a random mask behind each."""
    keeps = [torch.rand(256, 512) > 0.3 for _ in range(6)]
    return {
        "no gates": _step(512, 256, 6, [None] * 6),
        "gradgate": _step(512, 256, 6, [gg.Gate(keep) for keep in keeps]),
        "hook with where": _step(512, 256, 6, [_Hooked(keep) for keep in keeps]),
        "where/detach": _step(512, 256, 6, [_Selected(keep) for keep in keeps]),
    }


def shut_gate():
    """An MLP of twelve layers, shut before the last."""

    def gates(gate):
        return [None] * 10 + [gate, None]

    return {
        "open": _step(512, 256, 12, gates(None)),
        "gradgate": _step(512, 256, 12, gates(gg.Gate(False))),
        "gradgate, function": _step(512, 256, 12, gates(gg.Gate(lambda gradient: False))),
        "mask of zeros": _step(512, 256, 12, gates(gg.Gate(torch.tensor(False)))),
    }


def mask_a_gradient():
    """A gradient of a million elements meets a random mask."""
    gradient = torch.randn(1024, 1024)
    keep = torch.rand(1024, 1024) > 0.3
    rule = Scale(keep)
    without_recording = torch.no_grad()

    def ours():
        with without_recording:
            return rule(gradient)

    return {
        "where": lambda: torch.where(keep, gradient, 0),
        "gradgate": ours,
        "masked_fill": lambda: gradient.masked_fill(~keep, 0),
        "product (lets NaN through)": lambda: gradient * keep,
        "a copy, no mask at all": gradient.clone,
    }


def mask_rows_of_a_gradient():
    """The same with one answer for each row."""
    gradient = torch.randn(1024, 1024)
    keep = torch.rand(1024, 1) > 0.3
    rule = Scale(keep)
    without_recording = torch.no_grad()

    def ours():
        with without_recording:
            return rule(gradient)

    return {"where": lambda: torch.where(keep, gradient, 0), "gradgate": ours}


def checks():
    """An activation that must be finite."""
    x = torch.randn(256, 4096)

    def asserted():
        assert bool(torch.isfinite(x).all())
        return x

    return {"assert isfinite().all()": asserted, "gg.check": lambda: gg.check(x, "finite", "activations")}


def clipping():
    """Gradients of 20 layers, clipped between backward and the step."""
    model = nn.Sequential(*[nn.Linear(512, 512) for _ in range(20)])
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    ratio = gg.AdaptiveClip(model, "ratio", threshold=1e3)
    history = gg.AdaptiveClip(model)

    def each_by_itself():
        for parameter in model.parameters():
            nn.utils.clip_grad_norm_(parameter, 1e9)

    return {
        "clip_grad_norm_ of each parameter": each_by_itself,
        "AdaptiveClip": history,
        "AdaptiveClip, ratio": ratio,
        "clip_grad_norm_ of all": lambda: nn.utils.clip_grad_norm_(model.parameters(), 1e9),
    }


BY_HAND = ("where/detach", "hook on a view", "copied Function")
IN_A_MODEL = ("hook with where", "where/detach")
MASKING = ("where", "masked_fill")

ROWS = [
    Row("gates", "gate, a call on 16 x 64", calls(gg.gate), "gradgate", "view_as", microseconds=6, peers=BY_HAND),
    Row(
        "gates",
        "reverse_grad, a call on 16 x 64",
        calls(lambda x, keep: gg.reverse_grad(x)),
        "gradgate",
        "view_as",
        microseconds=6,
        peers=BY_HAND,
    ),
    Row(
        "gates",
        "six gates in an MLP of 6 x 512, batch 256, a step",
        six_gates,
        "gradgate",
        "no gates",
        1.1,
        peers=IN_A_MODEL,
    ),
    Row("gates", "a shut gate in an MLP of 12 x 512, batch 256, a step", shut_gate, "gradgate", "open", at_most=0.4),
    Row("gates", "masking a gradient of 1024 x 1024", mask_a_gradient, "gradgate", "where", at_least=5, peers=MASKING),
    Row(
        "gates",
        "masking rows of a gradient of 1024 x 1024",
        mask_rows_of_a_gradient,
        "gradgate",
        "where",
        peers=MASKING[:1],
    ),
    Row(
        "gates",
        "check that 256 x 4096 is finite",
        checks,
        "gg.check",
        "assert isfinite().all()",
        1.1,
        peers=("assert isfinite().all()",),
    ),
    Row(
        "gates",
        "clip the gradients of 20 layers of 512 x 512, each by its own limit",
        clipping,
        "AdaptiveClip",
        "clip_grad_norm_ of each parameter",
        1.5,
        peers=("clip_grad_norm_ of each parameter",),
    ),
]
