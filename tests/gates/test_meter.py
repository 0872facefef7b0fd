"""What a gate has let through, as plain numbers."""

import copy
import math
import pickle

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import gradgate as gg
from gradgate.gates import _rules

NAN = float("nan")
WEIGHTS = torch.tensor([[3.0, 4.0], [6.0, 8.0]])


def measure(gate, weights=WEIGHTS, **more):
    meter = gg.GateMeter()
    x = torch.ones_like(weights, requires_grad=True)
    (gate(x, meter=meter, **more) * weights).real.sum().backward()
    return meter, x.grad


@pytest.mark.parametrize(
    ("gate", "passed", "stopped", "norm_out"),
    [
        (lambda x, meter: gg.gate(x, torch.tensor([[True, False], [True, True]]), meter=meter), 3, 1, math.sqrt(109)),
        (lambda x, meter: gg.gate(x, torch.tensor([[True], [False]]), meter=meter), 2, 2, 5),
        (lambda x, meter: gg.gate(x, torch.tensor([False, True]), meter=meter), 2, 2, math.sqrt(80)),
        (lambda x, meter: gg.gate(x, torch.tensor(False), meter=meter), 0, 4, 0),
        (lambda x, meter: gg.gate(x, True, meter=meter), 4, 0, math.sqrt(125)),
        (lambda x, meter: gg.gate(x, False, meter=meter), 0, 4, 0),
        (lambda x, meter: gg.gate(x, lambda g: g > 5, meter=meter), 2, 2, 10),
        (lambda x, meter: gg.gate(x, lambda g: False, meter=meter), 0, 4, 0),
        (lambda x, meter: gg.scale_grad(x, 2, meter=meter), 4, 0, 2 * math.sqrt(125)),
        (lambda x, meter: gg.scale_grad(x, 0, meter=meter), 0, 4, 0),
        (lambda x, meter: gg.scale_grad(x, torch.tensor([[1.0], [0.0]]), meter=meter), 2, 2, 5),
        (lambda x, meter: gg.reverse_grad(x, meter=meter), 4, 0, math.sqrt(125)),
        (lambda x, meter: gg.clip_grad(x, max_norm=1.0, meter=meter), 4, 0, 1),
        (lambda x, meter: gg.finite_grad(x, meter=meter), 4, 0, math.sqrt(125)),
    ],
)
def test_counts_and_norms(gate, passed, stopped, norm_out):
    meter, _ = measure(gate)
    assert (meter.passed, meter.stopped) == (passed, stopped)
    assert meter.norm_in == pytest.approx(math.sqrt(125))
    assert meter.norm_out == pytest.approx(norm_out)
    assert [type(n) for n in (meter.passed, meter.stopped, meter.norm_in, meter.norm_out)] == [int, int, float, float]


def test_finite_grad_counts_what_it_replaced():
    meter, gradient = measure(gg.finite_grad, torch.tensor([[NAN, 4.0], [float("-inf"), 3.0]]))
    assert gradient.tolist() == [[0, 4], [0, 3]]
    assert (meter.passed, meter.stopped, meter.norm_out) == (2, 2, 5)
    assert math.isnan(meter.norm_in)


def test_it_adds_up_until_it_is_reset():
    meter = gg.GateMeter()
    assert repr(meter) == "GateMeter(passed=0, stopped=0, norm_in=0, norm_out=0)"
    x = torch.ones(3, requires_grad=True)
    for _ in range(4):
        gg.gate(x, torch.tensor([True, False, True]), meter=meter).sum().backward()
    assert (meter.passed, meter.stopped) == (8, 4)
    assert (meter.norm_in, meter.norm_out) == (pytest.approx(math.sqrt(12)), pytest.approx(math.sqrt(8)))
    meter.reset()
    assert (meter.passed, meter.stopped, meter.norm_in, meter.norm_out) == (0, 0, 0, 0)


def test_one_meter_for_several_gates_and_dtypes():
    meter = gg.GateMeter()
    for dtype in (torch.float16, torch.bfloat16, torch.float64, torch.complex64):
        x = torch.ones(2, dtype=dtype, requires_grad=True)
        gg.gate(x, torch.tensor([True, False]), meter=meter).real.sum().backward()
    assert (meter.passed, meter.stopped, meter.norm_in) == (4, 4, pytest.approx(math.sqrt(8)))


def test_exploding_gradients_still_have_a_norm():
    meter, _ = measure(gg.reverse_grad, torch.full((2, 2), 1e30))
    assert meter.norm_in == pytest.approx(2e30)


def test_nothing_is_counted_before_backward_nor_without_gradients():
    meter = gg.GateMeter()
    gg.gate(torch.ones(3, requires_grad=True), torch.tensor(True), meter=meter)
    gg.gate(torch.ones(3), False, meter=meter)
    assert (meter.passed, meter.stopped) == (0, 0)


@pytest.mark.parametrize("reentrant", [True, False])
def test_once_under_checkpoint(reentrant):
    meter = gg.GateMeter()
    x = torch.ones(3, requires_grad=True)
    part = lambda x: gg.gate(x * 2, torch.tensor([True, False, True]), meter=meter) ** 2  # noqa: E731
    checkpoint(part, x, use_reentrant=reentrant).sum().backward()
    assert (meter.passed, meter.stopped) == (2, 1)


def test_it_leaves_the_gradient_and_its_graph_alone():
    meter = gg.GateMeter()
    x = torch.tensor([2.0, 3.0], requires_grad=True)
    (slope,) = torch.autograd.grad((gg.scale_grad(x, 0.5, meter=meter) ** 3).sum(), x, create_graph=True)
    slope.sum().backward()
    assert x.grad.tolist() == [0.5 * 0.5 * 12, 0.5 * 0.5 * 18]
    assert meter.passed == 4, "the first and the second derivative"


def test_it_can_be_copied_and_pickled():
    meter, _ = measure(gg.reverse_grad)
    for other in (copy.deepcopy(meter), pickle.loads(pickle.dumps(meter))):
        assert (other.passed, other.norm_in) == (meter.passed, meter.norm_in)


def test_counting_does_not_ask_the_host(monkeypatch):
    """On tensors without data every question of the host would be an error."""
    assert _rules.GateMeter is gg.GateMeter
    meter = gg.GateMeter()
    for gate in (
        lambda x: gg.gate(x, torch.ones(2, 3, dtype=torch.bool, device="meta"), meter=meter),
        lambda x: gg.scale_grad(x, torch.ones(3, device="meta"), meter=meter),
        lambda x: gg.clip_grad(x, max_norm=1.0, per_sample=True, meter=meter),
        lambda x: gg.finite_grad(x, meter=meter),
        lambda x: gg.gate(x, lambda g: g > 0, meter=meter),
    ):
        x = torch.ones(2, 3, device="meta", requires_grad=True)
        gate(x).sum().backward()
        assert x.grad.shape == (2, 3)
    with pytest.raises(RuntimeError, match="meta"):
        print(meter.passed)
