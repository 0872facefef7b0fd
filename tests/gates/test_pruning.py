"""A shut gate prunes: what is upstream is neither computed nor held; shown by counting, not by time."""

import gc
import weakref

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import gradgate as gg


class Counted(torch.autograd.Function):
    """Doubles; counts how often its backward runs."""

    calls = 0

    @staticmethod
    def forward(ctx, x):
        ctx.set_materialize_grads(False)
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        if gradient is not None:
            Counted.calls += 1
            gradient = gradient * 2
        return gradient


@pytest.fixture(autouse=True)
def _from_zero():
    Counted.calls = 0


def run(keep, meter=None):
    x = torch.ones(3, requires_grad=True)
    w = torch.ones(3, requires_grad=True)
    (gg.gate(Counted.apply(x), keep, meter=meter) * w).sum().backward()
    return x.grad, w.grad


def test_shut_by_a_bool():
    x, w = run(False)
    assert (Counted.calls, x, w.tolist()) == (0, None, [2, 2, 2])


def test_shut_by_the_answer_of_a_function():
    x, w = run(lambda gradient: False)
    assert (Counted.calls, x, w.tolist()) == (0, None, [2, 2, 2])


def test_shut_while_a_meter_counts():
    meter = gg.GateMeter()
    x, w = run(False, meter)
    assert (Counted.calls, x, w.tolist()) == (0, None, [2, 2, 2])
    assert (meter.passed, meter.stopped, meter.norm_out) == (0, 3, 0)


@pytest.mark.parametrize("keep", [True, lambda gradient: True], ids=["bool", "function"])
def test_open_is_the_identity(keep):
    x, _ = run(keep)
    assert (Counted.calls, x.tolist()) == (1, [2, 2, 2])


def test_a_mask_tensor_is_not_looked_at_so_it_does_not_prune():
    x, _ = run(torch.tensor(False))
    assert (Counted.calls, x.tolist()) == (1, [0, 0, 0])


@pytest.mark.parametrize(
    "before",
    [
        lambda x: gg.gate(x, torch.tensor(True)),
        lambda x: gg.gate(x, lambda g: g == g),
        lambda x: gg.scale_grad(x, 2.0),
        lambda x: gg.clip_grad(x, max_norm=1.0),
        gg.finite_grad,
        lambda x: gg.straight_through(x.detach(), x),
    ],
    ids=["gate", "callable", "scale_grad", "clip_grad", "finite_grad", "straight_through"],
)
def test_nothing_stays_nothing_at_the_gates_upstream(before):
    """A gate that is reached by no gradient passes on no gradient, and not zeros."""
    x = torch.ones(3, requires_grad=True)
    y = gg.gate(before(Counted.apply(x)), lambda gradient: False)
    (y + torch.ones(3, requires_grad=True)).sum().backward()
    assert Counted.calls == 0
    assert x.grad is None


class Token:
    """Something that only the graph holds."""


class Holding(torch.autograd.Function):
    """Keeps a token in the graph, where saved activations would be."""

    @staticmethod
    def forward(ctx, x, token):
        ctx.token = token
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2, None


@pytest.mark.slow
@pytest.mark.parametrize(("keep", "held"), [(False, False), (torch.tensor(False), True)], ids=["shut", "masked"])
@pytest.mark.parametrize("metered", [False, True])
def test_a_gate_that_is_shut_at_forward_time_lets_go_of_the_activations_upstream(keep, held, metered):
    token = Token()
    in_the_graph = weakref.ref(token)
    x = torch.ones(3, requires_grad=True)
    y = gg.gate(Holding.apply(x, token), keep, meter=gg.GateMeter() if metered else None)
    del token
    gc.collect()
    assert (in_the_graph() is not None) == held
    assert y.requires_grad == (held or metered)


def test_an_optimizer_with_weight_decay_leaves_what_is_pruned_alone():
    net = nn.Sequential(nn.Linear(3, 3), gg.Gate(False), nn.Linear(3, 1))
    before = net[0].weight.detach().clone()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1, weight_decay=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        net(torch.ones(2, 3)).sum().backward()
        optimizer.step()
    assert torch.equal(net[0].weight, before)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize(
    "keep",
    [False, lambda gradient: False, True, torch.tensor([True, False, True])],
    ids=["shut", "shut by a function", "open", "a mask"],
)
def test_under_checkpoint(reentrant, keep):
    def part(x):
        return gg.gate(Counted.apply(x), keep) * w

    x = torch.ones(3, requires_grad=True)
    w = torch.ones(3, requires_grad=True)
    checkpoint(part, x, use_reentrant=reentrant).sum().backward()
    expected = {False: None, True: [2, 2, 2]}[keep] if isinstance(keep, bool) else None if callable(keep) else [2, 0, 2]
    assert (x.grad if x.grad is None else x.grad.tolist()) == expected
    assert w.grad.tolist() == [2, 2, 2]


def test_shut_under_compile():
    @torch.compile(fullgraph=True, backend="aot_eager")
    def part(x, w):
        return (gg.gate(x * 2, False) * w).sum()

    x = torch.ones(3, requires_grad=True)
    w = torch.ones(3, requires_grad=True)
    part(x, w).backward()
    assert x.grad is None
    assert w.grad.tolist() == [2, 2, 2]
