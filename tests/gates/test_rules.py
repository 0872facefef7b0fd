"""The corners of the single rules: exploding and broken gradients, orders, sparse gradients, hard and soft."""

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import gradgate as gg
from gradgate.gates._rules import Scale

NAN, INF = float("nan"), float("inf")


def gradient_of(gate, weights):
    weights = torch.as_tensor(weights)
    x = torch.zeros_like(weights, requires_grad=True)
    (gate(x) * weights).sum().backward()
    return x.grad


# --- masks ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float8_e5m2, torch.float8_e4m3fn])
def test_gradients_of_eight_bits_are_masked_too(dtype):
    with torch.no_grad():
        gradient = torch.tensor([1.0, NAN, 2.0]).to(dtype)
        keep = torch.tensor([True, False, True])
        masked = Scale(keep)(gradient)
    assert keep.tolist() == [True, False, True]
    assert masked.dtype is dtype
    assert masked.float().tolist() == [1, 0, 2]


def test_the_fast_way_asks_nothing_of_the_host():
    with FakeTensorMode(), torch.no_grad():
        gradient = torch.ones(4, 3)
        assert Scale(torch.ones(4, 1, dtype=torch.bool))(gradient).shape == (4, 3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.complex64])
def test_masks_of_many_blocks(dtype):
    gradient = torch.randn(3, 100_001, dtype=dtype)
    keep = torch.rand(3, 100_001) > 0.5
    gradient[~keep] = NAN
    before = keep.clone()
    with torch.no_grad():
        assert torch.equal(Scale(keep)(gradient), torch.where(keep, gradient, 0))
    assert torch.equal(keep, before)


def test_a_mask_that_lies_anyhow_in_memory():
    keep = torch.tensor([[True, False], [False, False], [True, True]]).t()
    weights = torch.full((2, 3), NAN)
    weights[keep] = 1.0
    assert torch.equal(gradient_of(lambda x: gg.gate(x, keep), weights), keep.float())
    column = torch.tensor([True]).expand(2, 3)
    assert torch.equal(gradient_of(lambda x: gg.gate(x, column), torch.ones(2, 3)), torch.ones(2, 3))


# --- factors --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_a_mask_of_other_bytes_than_one(dtype):
    keep = torch.tensor([255, 0, 2, 0], dtype=torch.uint8).view(torch.bool)  # a picture's mask, taken as it lies
    x = torch.zeros(4, dtype=dtype, requires_grad=True)
    gg.gate(x * 1, keep).backward(torch.tensor([1.5, NAN, -2.0, 3.0], dtype=dtype))
    assert x.grad.tolist() == [1.5, 0.0, -2.0, 0.0]


def test_a_factor_of_zero_stops_nan_but_does_not_prune():
    assert gradient_of(lambda x: gg.scale_grad(x, 0), [NAN, INF]).tolist() == [0, 0]
    factor = torch.tensor([0.0, 2.0])
    assert gradient_of(lambda x: gg.scale_grad(x, factor), [NAN, 1.0]).tolist() == [0, 2]
    assert gradient_of(lambda x: gg.reverse_grad(x, factor), [INF, 1.0]).tolist() == [0, -2]


@pytest.mark.parametrize("kind", [torch.float64, torch.float16, torch.int64])
def test_the_gradient_keeps_its_dtype_whatever_the_factor_has(kind):
    factor = torch.tensor([2, 3]).to(kind)
    for dtype in (torch.float32, torch.bfloat16):
        gradient = gradient_of(lambda x: gg.scale_grad(x, factor), torch.ones(2, dtype=dtype))
        assert gradient.dtype is dtype
        assert gradient.tolist() == [2, 3]


@pytest.mark.parametrize("kind", [torch.uint8, torch.int8, torch.uint16, torch.int64])
def test_the_negative_of_any_integer_is_negative(kind):
    strength = torch.tensor([1, 100]).to(kind)
    assert gradient_of(lambda x: gg.reverse_grad(x, strength), [1.0, 2.0]).tolist() == [-1, -200]
    assert torch.func.grad(lambda x: gg.reverse_grad(x, strength).sum())(torch.ones(2)).tolist() == [-1, -100]


def test_a_factor_larger_than_a_half_can_hold():
    def scaled(x):
        return (gg.scale_grad(x, 1e5) * 1e-4).sum()

    x = torch.ones(2, dtype=torch.float16, requires_grad=True)
    (eager,) = torch.autograd.grad(scaled(x), x)
    assert eager.tolist() == [10, 10]
    assert torch.equal(torch.func.grad(scaled)(x.detach()), eager)
    assert torch.equal(torch.vmap(torch.func.grad(scaled))(x.detach()), eager)


# --- clipping -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1e-30, 1.0, 1e20, 1e30])
def test_a_finite_gradient_is_clipped_however_large_it_is(size):
    """1e20 squared is no float32."""
    clipped = gradient_of(lambda x: gg.clip_grad(x, max_norm=0.5), torch.tensor([3.0, 4.0]) * size)
    expected = [0.3, 0.4] if size >= 1 else [3 * size, 4 * size]
    torch.testing.assert_close(clipped, torch.tensor(expected))


def test_half_precision_does_not_overflow_either():
    weights = torch.full((4096,), 6e4, dtype=torch.float16)
    assert gradient_of(lambda x: gg.clip_grad(x, max_norm=64.0), weights).unique().tolist() == [1]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_a_limit_larger_than_the_dtype_can_hold(dtype):
    gradient = gradient_of(lambda x: gg.clip_grad(x, max_value=1e39), torch.tensor([3.0, -INF], dtype=dtype))
    assert gradient.tolist() == [3, -torch.finfo(dtype).max]


def test_what_is_not_finite_goes_on_as_it_came():
    whole = gradient_of(lambda x: gg.clip_grad(x, max_norm=1.0), [NAN, 30.0])
    assert torch.equal(whole.nan_to_num(-1), torch.tensor([-1.0, 30.0]))
    rows = gradient_of(lambda x: gg.clip_grad(x, max_norm=1.0, per_sample=True), [[INF, 4.0], [3.0, 4.0]])
    torch.testing.assert_close(rows, torch.tensor([[INF, 4.0], [0.6, 0.8]]))


def test_values_first_then_the_norm():
    both = gradient_of(lambda x: gg.clip_grad(x, max_norm=1.0, max_value=2.0), [1e6, 2.0])
    torch.testing.assert_close(both, torch.full((2,), 0.5**0.5))  # the norm first would give [1, 2e-6]
    assert gradient_of(lambda x: gg.clip_grad(x, max_value=2.0), [INF, -INF]).tolist() == [2, -2]
    assert gradient_of(lambda x: gg.clip_grad(x, max_value=2.0), [NAN]).isnan().all()
    assert gradient_of(lambda x: gg.clip_grad(x, max_norm=INF), [3.0]).tolist() == [3]


def test_per_sample_along_every_number_of_dimensions():
    assert gradient_of(lambda x: gg.clip_grad(x, max_norm=1.0, per_sample=True), [3.0, -0.5]).tolist() == [1, -0.5]
    cube = gradient_of(lambda x: gg.clip_grad(x, max_norm=1.0, per_sample=True), torch.ones(2, 2, 2))
    assert torch.equal(cube, torch.full((2, 2, 2), 0.5))
    for shape in ((0, 3), (3, 0), (0,)):
        empty = gradient_of(lambda x: gg.clip_grad(x, max_norm=1.0, per_sample=True), torch.ones(shape))
        assert empty.shape == shape


def test_no_second_derivative_is_poisoned_where_the_gradient_is_zero():
    x = torch.zeros(2, requires_grad=True)
    (slope,) = torch.autograd.grad((gg.clip_grad(x, max_norm=1.0) ** 2).sum(), x, create_graph=True)
    slope.sum().backward()
    assert x.grad.isfinite().all()


# --- orders ---------------------------------------------------------------------------------------------------------


def test_the_gate_nearest_to_the_loss_acts_first():
    repaired_then_clipped = gradient_of(lambda x: gg.finite_grad(gg.clip_grad(x, max_norm=1.0)), [NAN, 5.0])
    assert repaired_then_clipped.tolist() == [0, 1]
    clipped_then_repaired = gradient_of(lambda x: gg.clip_grad(gg.finite_grad(x), max_norm=1.0), [NAN, 5.0])
    assert clipped_then_repaired.tolist() == [0, 5]


# --- hard and soft --------------------------------------------------------------------------------------------------


def test_straight_through_is_hard_bit_for_bit_whatever_soft_is():
    soft = torch.tensor([NAN, INF, 1e38, 0.1], requires_grad=True)
    hard = torch.tensor([-0.0, 1e-45, NAN, INF])
    y = gg.straight_through(hard, soft)
    assert y.detach().view(torch.int32).tolist() == hard.view(torch.int32).tolist()
    y.backward(torch.tensor([1.0, 2.0, 3.0, 4.0]))
    assert soft.grad.tolist() == [1, 2, 3, 4]


def test_nothing_reaches_hard_not_even_zeros():
    a = torch.ones(2, requires_grad=True)
    b = torch.ones(2, requires_grad=True)
    gg.straight_through(a * 2, b * 3).sum().backward()
    assert a.grad is None
    assert b.grad.tolist() == [3, 3]
    assert not gg.straight_through(a * 2, torch.ones(2)).requires_grad


def test_a_quantizer_learns():
    """Rounding has no gradient; through its input it learns to round to 3."""
    x = torch.tensor([0.2], requires_grad=True)
    optimizer = torch.optim.SGD([x], lr=0.1)
    for _ in range(50):
        optimizer.zero_grad()
        ((gg.straight_through(x.round(), x) - 3) ** 2).sum().backward()
        optimizer.step()
    assert x.round().item() == 3


# --- sparse gradients -----------------------------------------------------------------------------------------------

ROWS = torch.tensor([True, False, True, True, False])[:, None]
ELEMENTS = torch.tensor([[True, False]] * 5)


@pytest.mark.parametrize(
    "gate",
    [
        lambda w: gg.gate(w, ROWS),
        lambda w: gg.gate(w, ELEMENTS),
        lambda w: gg.gate(w, torch.tensor(True)),
        lambda w: gg.gate(w, lambda g: g > 3),
        lambda w: gg.gate(w, True),
        lambda w: gg.scale_grad(w, 0.5),
        lambda w: gg.scale_grad(w, 0),
        lambda w: gg.scale_grad(w, ROWS.float()),
        gg.reverse_grad,
        lambda w: gg.clip_grad(w, max_norm=1.0),
        lambda w: gg.clip_grad(w, max_norm=1.0, max_value=0.7, per_sample=True),
        gg.finite_grad,
        lambda w: gg.straight_through(w.round(), w),
    ],
)
def test_a_sparse_gradient_stays_sparse_and_equals_the_dense_one(gate):
    weight = torch.arange(10.0).reshape(5, 2)
    index = torch.tensor([1, 2, 2, 4])
    factors = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0], [7.0, NAN]])
    gradients = []
    for sparse in (True, False):
        leaf = weight.clone().requires_grad_()
        (nn.functional.embedding(index, gate(leaf), sparse=sparse) * factors).sum().backward()
        assert leaf.grad.is_sparse == sparse
        gradients.append(leaf.grad.to_dense())
    torch.testing.assert_close(*gradients, equal_nan=True)


def test_a_meter_counts_what_a_sparse_gradient_stores():
    meter = gg.GateMeter()
    leaf = torch.ones(5, 2, requires_grad=True)
    rows = nn.functional.embedding(torch.tensor([1, 2, 2]), gg.gate(leaf, ROWS, meter=meter), sparse=True)
    rows.sum().backward()
    assert (meter.passed, meter.stopped) == (2, 2)


def test_other_sparse_gradients_become_dense():
    x = torch.zeros(2, 2, requires_grad=True)
    gate = gg.clip_grad(x, max_norm=1.0, per_sample=True)
    gate.backward(torch.tensor([[3.0, 0.0], [0.0, 4.0]]).to_sparse())
    assert x.grad.to_dense().tolist() == [[1, 0], [0, 1]]
