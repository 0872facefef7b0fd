"""The four laws, for every function: all kept, the others removed, garbage left out, gradients exactly 0."""

import math

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from tests import witness
from tests.masked.laws import LAWS, SMOOTH

pytestmark = pytest.mark.usefixtures("both_paths")

every_law = pytest.mark.parametrize("law", LAWS, ids=lambda law: law.name)
every_smooth_law = pytest.mark.parametrize("law", SMOOTH, ids=lambda law: law.name)
few = settings(max_examples=20)

GARBAGE = (math.nan, math.inf, -math.inf, 3e38, 0.0, -0.0)


@st.composite
def masked_values(draw, min_rank=0):
    """Values, a mask that broadcasts to them, and dimensions: empty, all kept and nothing kept included."""
    shape = draw(st.lists(st.integers(0, 4), min_size=min_rank, max_size=3))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 10**6)))
    x = torch.randn(shape, generator=generator, dtype=torch.float64)
    mask_shape = [1 if draw(st.integers(0, 5)) == 0 else size for size in shape]
    share = draw(st.sampled_from([0.0, 0.3, 0.6, 0.9, 1.0]))
    keep = torch.rand(mask_shape, generator=generator) < share
    if draw(st.booleans()) and x.dim() > 1:
        x, keep = x.transpose(0, -1), keep.transpose(0, -1)
    dims = st.sampled_from(range(-x.dim(), x.dim())) if x.dim() else st.just(0)
    several = st.lists(st.integers(0, max(x.dim() - 1, 0)), min_size=1, max_size=3, unique=True).map(tuple)
    dim = draw(st.one_of(st.none(), dims, several))
    return x, keep, dim


def soiled(x, keep, garbage):
    return torch.where(keep, x, torch.full_like(x, garbage))


@every_law
@few
@given(masked_values())
def test_with_everything_kept_it_is_the_plain_function(law, drawn):
    x, _, dim = drawn
    dim = dim[0] if isinstance(dim, tuple) else dim
    size = x.numel() if dim is None or x.dim() == 0 else x.shape[dim]
    if law.plain is None or size < law.least or x.numel() == 0:
        return
    dim = None if x.dim() == 0 else dim
    ours, our_gradient = witness.value_and_gradients(lambda x: law.fn(x, dim), [x])
    masked, masked_gradient = witness.value_and_gradients(
        lambda x: law.fn(x, dim, keep=torch.ones(x.shape, dtype=torch.bool)), [x]
    )
    theirs, their_gradient = witness.value_and_gradients(lambda x: law.plain(x, dim), [x])
    for result, gradient in ((ours, our_gradient), (masked, masked_gradient)):
        witness.assert_same(result, theirs, what="value")
        witness.assert_same(gradient, their_gradient, what="gradient")


@every_law
@few
@given(masked_values(), st.sampled_from(GARBAGE), st.booleans())
def test_it_is_the_plain_function_of_what_is_kept(law, drawn, garbage, keepdim):
    x, keep, dim = drawn
    options = {} if law.along else {"keepdim": keepdim}
    clean = [soiled(x, keep, 1.0)]
    fn = lambda x: law.fn(x, dim, keep=keep, **options)  # noqa: E731
    oracle = lambda x: law.oracle(x, keep, dim, **options)  # noqa: E731
    if not law.smooth:
        witness.assert_same([fn(soiled(x, keep, garbage))], [oracle(clean[0])], what="value")
        return
    for order in (1, 2):
        ours, gradients = witness.value_and_gradients(fn, [soiled(x, keep, garbage)], order)
        theirs, expected = witness.value_and_gradients(oracle, clean, order)
        witness.assert_same(ours, theirs, what="value")
        expected = expected or [torch.zeros_like(x)]
        witness.assert_same(gradients or [torch.zeros_like(x)], expected, what=f"gradient {order}")
        for gradient in gradients:
            none = gradient[~keep.expand(x.shape)]
            assert (none == 0).all(), "a left-out element has a gradient"
            assert order == 2 or not torch.signbit(none).any(), "a left-out element has a gradient of -0.0"


@every_smooth_law
@few
@given(masked_values(), st.sampled_from(GARBAGE), st.sampled_from([math.nan, math.inf]))
def test_nothing_comes_back_from_what_is_left_out(law, drawn, garbage, arriving):
    """A NaN gradient that arrives at a left-out place, or at a slice with nothing kept, touches nobody."""
    x, keep, dim = drawn
    x = soiled(x, keep, garbage).requires_grad_()
    result = law.fn(x, dim, keep=keep)
    if law.along and not law.cumulative:  # the place of a left-out element holds a real sum there
        dead = ~keep.expand(x.shape)
    else:
        dims = tuple(range(x.dim())) if dim is None or x.dim() == 0 else dim
        dead = (keep.expand(x.shape).sum(dims, keepdim=law.along) == 0).expand(result.shape)
    weights = torch.linspace(0.5, 1.5, max(result.numel(), 1), dtype=x.dtype)[: result.numel()].reshape(result.shape)
    if not result.requires_grad:
        return
    (clean,) = torch.autograd.grad(result, x, weights * ~dead, retain_graph=True, materialize_grads=True)
    (dirty,) = torch.autograd.grad(result, x, torch.where(dead, arriving, weights), materialize_grads=True)
    assert torch.equal(clean, dirty)
    assert not clean.isnan().any()


@every_smooth_law
@few
@given(masked_values(), st.sampled_from(GARBAGE), st.sampled_from([torch.float64, torch.float32]))
def test_garbage_changes_no_bit(law, drawn, garbage, dtype):
    x, keep, dim = drawn
    x = x.to(dtype)
    for order in (1, 2):
        clean = witness.value_and_gradients(lambda x: law.fn(x, dim, keep=keep), [soiled(x, keep, 1.0)], order)
        dirty = witness.value_and_gradients(lambda x: law.fn(x, dim, keep=keep), [soiled(x, keep, garbage)], order)
        witness.assert_same(dirty[0], clean[0], what="value", exact=True)
        witness.assert_same(dirty[1], clean[1], what=f"gradient {order}", exact=True)
