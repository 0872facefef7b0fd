"""Every gate against its oracle, in every way that is promised, and on random shapes, masks and gradients."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import gradgate as gg
from tests import witness as eye
from tests.gates import oracles
from tests.witness import ALL, RULE, assert_same

NAN, INF = float("nan"), float("inf")
X = torch.linspace(-2.0, 3.0, 12).reshape(3, 4)
EMPTY = torch.zeros(3, 0)


def witness(fn, oracle, *inputs, **more):
    """Look at the gate of the inputs themselves, which are leaves, and at that of activations."""
    eye.witness(fn, oracle, *inputs, **more)
    eye.check_against(_behind(fn), _behind(oracle), inputs, exact=more.get("exact", False))


def _behind(fn):
    return lambda *inputs: fn(*(value * 2 if eye.differentiable(value) else value for value in inputs))


ELEMENTS = torch.tensor([[True, False, True, True], [False, False, True, False], [True, True, True, True]])
ROWS = torch.tensor([[True], [False], [True]])
COLUMNS = torch.tensor([True, False, False, True])


@pytest.mark.parametrize("keep", [ELEMENTS, ROWS, COLUMNS, torch.tensor(True), torch.tensor(False)], ids=str)
def test_gate_with_every_shape_of_mask(keep):
    """With a mask as second input, vmap is tried over x alone, over keep alone, and over both."""
    empty = (EMPTY, keep if keep.shape[-1:] in ((), (1,)) else torch.ones(0, dtype=torch.bool))
    witness(gg.gate, oracles.gate, X, keep, promises=RULE, empty=empty, exact=True)


@pytest.mark.slow
def test_gate_that_is_all_open_is_the_identity():
    """Then the rule is the true derivative, so the numeric checks hold too."""
    witness(gg.gate, lambda x, keep: x.clone(), X, torch.ones(3, 4, dtype=torch.bool), promises=ALL, exact=True)
    witness(lambda x: gg.gate(x, True), lambda x: x.clone(), X, promises=ALL, empty=(EMPTY,), exact=True)


def test_gate_that_is_shut_gives_no_gradient_in_any_way():
    witness(
        lambda x: gg.gate(x, False) + 0 * x, lambda x: x.detach() + 0 * x, X, promises=RULE, empty=(EMPTY,), exact=True
    )


@pytest.mark.slow
def test_gate_with_a_callable():
    witness(
        lambda x: gg.gate(x, lambda g: g.real > 0),
        lambda x: oracles.Plain.apply(x, lambda g: torch.where(g.real > 0, g, torch.zeros_like(g))),
        X,
        promises=RULE - {"jvp"},
        empty=(EMPTY,),
        exact=True,
    )


@pytest.mark.slow
@pytest.mark.parametrize("factor", [0.5, -2, 0, 1, 1e-3])
def test_scale_grad_by_a_number(factor):
    witness(
        lambda x: gg.scale_grad(x, factor), lambda x: oracles.scale_grad(x, factor), X, promises=RULE, empty=(EMPTY,)
    )


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(3, 4), (3, 1), (4,), ()], ids=str)
def test_scale_grad_by_a_tensor(shape):
    factor = torch.linspace(-1, 1, 12).reshape(3, 4)[tuple(slice(0, n) for n in shape) if len(shape) == 2 else 0]
    factor = (factor if len(shape) != 0 else factor[0]).clone().mul_(2).round_()
    assert factor.shape == shape
    witness(lambda x: gg.scale_grad(x, factor), lambda x: oracles.scale_grad(x, factor), X, promises=RULE)


def test_scale_grad_under_vmap_over_the_factor_alone_and_over_both():
    factors = torch.tensor([[0.5, 0.0], [-1.0, 2.0], [0.0, 0.0]])
    x = torch.tensor([3.0, 4.0])

    def slope(x, factor):
        return torch.func.grad(lambda v: (gg.scale_grad(v, factor) ** 2).sum())(x)

    expected = torch.stack([factor * 2 * x for factor in factors])
    assert_same([torch.vmap(slope, in_dims=(None, 0))(x, factors)], [expected], what="over the factor")
    assert_same([torch.vmap(slope)(x.expand(3, 2), factors)], [expected], what="over both")


@pytest.mark.slow
@pytest.mark.parametrize("strength", [1.0, 0.25])
def test_reverse_grad(strength):
    witness(
        lambda x: gg.reverse_grad(x, strength),
        lambda x: oracles.reverse_grad(x, strength),
        X,
        promises=RULE,
        empty=(EMPTY,),
    )


CLIPS = [
    {"max_norm": 0.5},
    {"max_norm": 1e4},
    {"max_value": 0.3},
    {"max_norm": 0.5, "max_value": 0.3},
    {"max_norm": 0.5, "per_sample": True},
    {"max_norm": 1.0, "max_value": 0.7, "per_sample": True},
]


@pytest.mark.slow
@pytest.mark.parametrize("limits", CLIPS, ids=str)
def test_clip_grad(limits):
    def oracle(x):
        return oracles.clip_grad(x, **limits)

    # The oracle decides with `if`, which neither vmap nor FakeTensorMode of the oracle itself would survive; it is
    # only ever run eagerly.
    promises = RULE - {"jvp", "complex" if "max_value" in limits else "jvp"}
    witness(lambda x: gg.clip_grad(x, **limits), oracle, X, promises=promises, empty=(EMPTY,))


@pytest.mark.parametrize("fill_value", [0.0, -1.5])
def test_finite_grad(fill_value):
    witness(
        lambda x: gg.finite_grad(x, fill_value),
        lambda x: oracles.finite_grad(x, fill_value),
        X,
        promises=RULE - {"jvp"},
        empty=(EMPTY,),
        exact=True,
    )


@pytest.mark.slow
def test_straight_through():
    """Over (hard, soft) both batched or one of them; the gradient never reaches hard."""
    hard = torch.tensor([[1, 2, 3, 4], [0, 0, 0, 0], [-1, -2, -3, -4]])
    witness(
        lambda hard, soft: gg.straight_through(hard.to(soft.dtype), soft**2),
        lambda hard, soft: oracles.straight_through(hard.to(soft.dtype), soft**2),
        hard,
        X,
        promises=RULE,
        empty=(hard[:, :0], EMPTY),
        exact=True,
    )


# --- random ---------------------------------------------------------------------------------------------------------

DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.complex128)
SPECIAL = (NAN, INF, -INF, 0.0, -0.0, 1e-40, 3e38)


@st.composite
def cases(draw):
    """A shape (empty and 0-dim among them), a dtype, a gradient with special values, and a way to lie in memory."""
    shape = tuple(draw(st.lists(st.integers(0, 4), max_size=3)))
    dtype = draw(st.sampled_from(DTYPES))
    seed = draw(st.integers(0, 10_000))
    generator = torch.Generator().manual_seed(seed)
    parts = []
    for _ in range(2):
        part = torch.randn(shape, generator=generator, dtype=torch.float64)
        spots = torch.rand(shape, generator=generator) < 0.3
        chosen = torch.tensor(SPECIAL)[torch.randint(len(SPECIAL), shape, generator=generator)].double()
        parts.append(torch.where(spots, chosen, part))
    gradient = (torch.complex(*parts) if dtype.is_complex else parts[0]).to(dtype)
    layout = draw(st.sampled_from(["plain", "transposed", "expanded", "conjugated", "negated"]))
    if layout == "transposed" and gradient.dim() > 1:
        gradient = gradient.transpose(0, -1).contiguous().transpose(0, -1)
    elif layout == "expanded" and gradient.dim() and len(gradient):
        gradient = gradient[:1].expand_as(gradient)
    elif layout == "conjugated" and dtype.is_complex:
        gradient = gradient.conj()
    elif layout == "negated" and dtype.is_complex:
        gradient = gradient.conj().imag.view(gradient.shape)  # a lazy negation, real
    return gradient, generator


def through(fn, gradient):
    """Send a gradient through the gate of a leaf and of an activation, as usual and with a graph of its own."""
    leaf = torch.zeros(gradient.shape, dtype=gradient.dtype, requires_grad=True)
    activation = leaf.clone()
    before = gradient.clone()
    arrived = []
    for x in (leaf, activation):
        for create_graph in (False, True):
            (result,) = torch.autograd.grad(fn(x), x, gradient, create_graph=create_graph)
            arrived.append(result.detach())
    assert_same([gradient], [before], what="the gradient that was given", exact=True)
    for other in arrived[1:]:
        assert_same([arrived[0]], [other], what="leaf or activation, with and without create_graph", exact=True)
    assert arrived[0].dtype == gradient.dtype
    return arrived[0]


def bits(tensor):
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor.resolve_neg()


@given(cases(), st.sampled_from(["all", "leading 1", "trailing", "0-dim"]))
def test_gate_selects_bit_for_bit(case, kind):
    gradient, generator = case
    shape = {
        "all": gradient.shape,
        "leading 1": (1, *gradient.shape[1:]) if gradient.dim() else (),
        "trailing": gradient.shape[1:],
        "0-dim": (),
    }[kind]
    keep = torch.rand(shape, generator=generator) < 0.5
    result = through(lambda x: gg.gate(x, keep), gradient)
    wide = keep.expand(gradient.shape)
    assert_same([result[wide]], [gradient[wide]], what="kept", exact=True)
    closed = bits(result[~wide])
    assert (closed == 0).all()
    assert not closed.signbit().any(), "a closed element is +0.0"


@given(cases(), st.sampled_from([0.0, 1.0, -1.0, 0.5, 3]))
def test_scale_grad_multiplies(case, factor):
    gradient, _ = case
    # Times 1 nothing happens, not even what torch makes of a complex infinity: (inf + 0j) * 1 = inf + nan j.
    expected = torch.zeros_like(gradient) if factor == 0 else gradient if factor == 1 else gradient * factor
    assert_same([through(lambda x: gg.scale_grad(x, factor), gradient)], [expected], what="scaled", exact=True)


@given(cases(), st.booleans(), st.sampled_from([0.1, 1.0, 100.0]))
def test_clip_grad_shortens_what_is_finite_and_leaves_the_rest(case, per_sample, max_norm):
    gradient, _ = case
    per_sample = per_sample and gradient.dim() > 0
    result = through(lambda x: gg.clip_grad(x, max_norm=max_norm, per_sample=per_sample), gradient)
    samples = zip(result, gradient, strict=True) if per_sample else [(result, gradient)]
    for ours, given_ in samples:
        wide = bits(given_).double()
        norm = wide.norm()
        if not norm.isfinite() or norm <= max_norm * (1 - 1e-6):
            assert_same([ours], [given_], what="left as it was", exact=True)
        elif norm >= max_norm * (1 + 1e-6):
            low = gradient.dtype in (torch.float16, torch.bfloat16)
            tolerance = {"rtol": 2e-2, "atol": 1e-3} if low else {"rtol": 1e-5, "atol": 1e-7}
            torch.testing.assert_close(bits(ours).double(), wide * (max_norm / norm), **tolerance)


@given(cases(), st.sampled_from([0.0, -2.5]))
def test_finite_grad_replaces_exactly_what_is_not_finite(case, fill_value):
    gradient, _ = case
    expected = torch.where(torch.isfinite(gradient), gradient, torch.full_like(gradient, fill_value))
    assert_same([through(lambda x: gg.finite_grad(x, fill_value), gradient)], [expected], what="finite", exact=True)
