"""Weights: 2 is the element twice, 0 is not there; and statistics of several values together."""

import math
from functools import partial

import hypothesis.strategies as st
import numpy
import pytest
import torch
from hypothesis import given, settings

from gradgate import masked
from gradgate.errors import ArgumentTypeError, ArgumentValueError, NothingKeptError
from tests import witness
from tests.masked import oracles
from tests.masked.test_laws import GARBAGE, soiled

pytestmark = pytest.mark.usefixtures("both_paths")

NAN, INF = math.nan, math.inf
few = settings(max_examples=25)
INTERPOLATIONS = ("linear", "lower", "higher", "midpoint", "nearest")

WEIGHTED = {
    "sum": (masked.sum, torch.sum, 1),
    "mean": (masked.mean, torch.mean, 1),
    **{f"var {c}": (partial(masked.var, correction=c), partial(torch.var, correction=c), c + 1) for c in (0, 1)},
    **{f"std {c}": (partial(masked.std, correction=c), partial(torch.std, correction=c), c + 1) for c in (0, 1)},
    **{
        f"quantile {i}": (
            lambda x, dim, i=i, **kw: masked.quantile(x, 0.37, dim, interpolation=i, **kw),
            lambda kept, i=i: torch.quantile(kept, 0.37, interpolation=i),
            1,
        )
        for i in INTERPOLATIONS
    },
}
every_function = pytest.mark.parametrize("name", WEIGHTED)


@st.composite
def weighted_rows(draw):
    rows, size = draw(st.integers(0, 3)), draw(st.integers(0, 6))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 10**6)))
    x = torch.randn(rows, size, generator=generator, dtype=torch.float64)
    keep = torch.rand(rows, size, generator=generator) < draw(st.sampled_from([0.0, 0.5, 1.0]))
    return x, torch.randint(0, 4, (rows, size), generator=generator), keep


def repeated(name, x, weights, keep):
    """The plain function of each row, with every element as often as its weight says."""
    _, plain, least = WEIGHTED[name]
    rows = []
    for row, weight, own in zip(x, weights, keep, strict=True):
        kept = row[own].repeat_interleave(weight[own])
        rows.append(plain(kept) if len(kept) >= least else x.new_full((), 0.0 if name == "sum" else NAN))
    return torch.stack(rows) if rows else x.new_zeros(0)


@every_function
@few
@given(weighted_rows(), st.sampled_from(GARBAGE))
def test_a_weight_of_2_is_the_element_twice_and_0_is_not_there(name, drawn, garbage):
    x, weights, keep = drawn
    dirty = soiled(x, keep & (weights != 0), garbage)
    fn = lambda x: WEIGHTED[name][0](x, 1, weights=weights, keep=keep)  # noqa: E731
    for order in (1, 2):
        ours, gradients = witness.value_and_gradients(fn, [dirty], order)
        theirs, expected = witness.value_and_gradients(lambda x: repeated(name, x, weights, keep), [x], order)
        witness.assert_same(ours, theirs, what="value")
        zero = [torch.zeros_like(x)]
        witness.assert_same(gradients or zero, expected or zero, what=f"gradient {order}")
        assert all((gradient[~keep | (weights == 0)] == 0).all() for gradient in gradients)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sum", "mean", "var 1", "std 1", "quantile linear"])
def test_weights_are_witnessed(name):
    fn = WEIGHTED[name][0]
    x = torch.tensor([[0.5, -1.5, 2.5, 0.25], [1.75, 3.0, -0.75, 1.0]])
    weights, keep = (
        torch.tensor([[2.0, 1.5, 0.5, 3.0], [1.0, 1.25, 2.0, 0.75]]),
        torch.tensor([True, True, False, True]),
    )
    if name.startswith("quantile"):  # nothing comes back to the weights
        promises = witness.REAL - {"complex"}
        call = lambda x, keep: fn(x, 1, weights=weights.to(x.dtype), keep=keep)  # noqa: E731
        witness.witness(call, call, x, keep, promises=promises)
        return
    call = lambda x, weights, keep: fn(x, 1, weights=weights, keep=keep)  # noqa: E731
    witness.witness(call, partial(formula, name), x, weights, keep)
    witness.check_complex(
        lambda x, keep: call(x, weights, keep), lambda x, keep: formula(name, x, weights, keep), [x, keep]
    )


def formula(name, x, weights, keep):
    x, weights = x[:, keep.expand(4)] if keep.dim() == 1 else x, weights[:, keep]
    amount, total = weights.sum(1), (x * weights).sum(1)
    if name in ("sum", "mean"):
        return total if name == "sum" else total / amount
    distance = x - (total / amount)[:, None]
    found = (weights * (distance * distance.conj()).real).sum(1) / (amount - int(name[-1]))
    return found.sqrt() if name.startswith("std") else found


def test_a_left_out_weight_gets_no_gradient():
    x = torch.tensor([1.0, NAN, INF, 4.0], requires_grad=True)
    weights = torch.tensor([1.0, NAN, 0.0, 2.0], requires_grad=True)
    for function in (masked.sum, masked.mean, masked.var, masked.std):
        x.grad = weights.grad = None
        function(x, weights=weights, keep=torch.tensor([True, False, True, True])).backward()
        assert x.grad.isfinite().all()
        assert weights.grad.isfinite().all()
        assert (x.grad[1:3] == 0).all()
        assert (weights.grad[1:3] == 0).all()


def test_shares_are_no_counts_for_a_quantile():
    x, shares = torch.arange(5.0), torch.full((5,), 0.2)
    assert masked.quantile(x, 0.5, weights=shares).isnan()
    assert masked.quantile(x, 0.5, weights=shares * 5) == 2
    assert masked.quantile(x[:1], 0.5, weights=shares[:1]) == 0
    assert not masked.var(x, weights=shares * 1.00001).isfinite()
    torch.testing.assert_close(masked.var(x, weights=shares, correction=0), x.var(correction=0))


def test_weights_of_the_wrong_kind():
    x = torch.zeros(2, 3)
    with pytest.raises(ArgumentTypeError, match=r"masked.mean\(\): `weights` is the list"):
        masked.mean(x, weights=[1.0, 2.0, 3.0])
    with pytest.raises(ArgumentTypeError, match=r"(?s)`weights` is a complex64.*how much an element counts"):
        masked.sum(x, weights=x + 0j)
    with pytest.raises(ArgumentValueError, match=r"`weights` has shape \(2,\), which does not broadcast"):
        masked.std(x, weights=torch.ones(2))
    with pytest.raises(NothingKeptError, match="in 1 of 2 slices"):
        masked.mean(x, 1, weights=torch.tensor([[1.0], [0.0]]), empty="raise")
    assert masked.sum(torch.tensor([1, 2, 3]), weights=torch.tensor([2, 0, 1])).dtype is torch.int64
    assert masked.sum(torch.tensor([True, True]), weights=torch.tensor([0.5, 2.0])) == 2.5


# --- pairs of variables ---------------------------------------------------------------------------------------------


@st.composite
def observations(draw):
    variables, number = draw(st.integers(0, 3)), draw(st.integers(0, 6))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 10**6)))
    x = torch.randn(variables, number, generator=generator, dtype=torch.float64)
    if draw(st.booleans()):
        x = torch.complex(x, x.flip(-1) * 0.5 + 1)
    return x, torch.rand(x.shape, generator=generator) < draw(st.sampled_from([0.0, 0.6, 1.0]))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["cov", "corrcoef"])
@few
@given(observations(), st.sampled_from(GARBAGE))
def test_each_pair_has_its_own_observations(name, drawn, garbage):
    x, keep = drawn
    fn, oracle = (lambda x: getattr(masked, name)(x, keep=keep)), (lambda x: getattr(oracles, name)(x, keep))
    for order in (1, 2):
        ours, gradients = witness.value_and_gradients(fn, [soiled(x, keep, garbage)], order)
        theirs, expected = witness.value_and_gradients(oracle, [x], order)
        witness.assert_same(ours, theirs, what="value")
        zero = [torch.zeros_like(x)]
        witness.assert_same(gradients or zero, expected or zero, what=f"gradient {order}")
        assert all((gradient[~keep] == 0).all() for gradient in gradients)


def test_covariances_are_those_of_torch_when_all_is_kept():
    x = torch.randn(2, 3, 8, dtype=torch.float64)
    for ours, theirs in ((masked.cov, torch.cov), (masked.corrcoef, torch.corrcoef)):
        torch.testing.assert_close(ours(x), torch.stack([theirs(each) for each in x]))
        torch.testing.assert_close(ours(x[0, 0]), theirs(x[0, 0]))
    torch.testing.assert_close(masked.cov(x[0], correction=0), torch.cov(x[0], correction=0))
    witness.check_gradcheck(masked.cov, None, [x[0]])
    witness.check_gradgradcheck(masked.corrcoef, None, [x[0]])


def test_nan_that_is_kept_stays_with_its_pairs():
    x = torch.randn(3, 6)
    keep = torch.ones(3, 6, dtype=torch.bool)
    x[0, 2] = NAN
    keep[1, 2] = False
    found = masked.cov(x, keep=keep)
    assert found.isnan().tolist() == [[True, False, True], [False, False, False], [True, False, False]]
    torch.testing.assert_close(found[0, 1], torch.cov(x[:2, [0, 1, 3, 4, 5]])[0, 1])
    assert masked.corrcoef(torch.ones(2, 4)).isnan().all()
    with pytest.raises(ArgumentTypeError, match="generally not an integer"):
        masked.cov(torch.ones(2, 4, dtype=torch.int64))


# --- histograms -----------------------------------------------------------------------------------------------------


@few
@given(weighted_rows(), st.integers(1, 5), st.booleans())
def test_histograms_are_those_of_numpy(drawn, bins, density):
    x, weights, keep = drawn
    dirty = soiled(x, keep, NAN)
    hist, edges = masked.histogram(dirty, bins, keep=keep, density=density)
    with numpy.errstate(invalid="ignore"):
        expected, _ = numpy.histogram(x[keep].numpy(), bins=edges.numpy(), density=density)
        torch.testing.assert_close(edges.numpy(), numpy.histogram_bin_edges(x[keep].numpy(), bins), check_dtype=False)
    numpy.testing.assert_allclose(hist.numpy(), expected)
    by_row = masked.histogram(dirty, edges, 1, keep=keep, weights=weights.double()).hist
    for row, x_row, w_row, k_row in zip(by_row, x, weights, keep, strict=True):
        numpy.testing.assert_allclose(row, numpy.histogram(x_row[k_row], edges, weights=w_row[k_row].double())[0])
    torch.testing.assert_close(by_row.sum(0), masked.histogram(dirty, edges, keep=keep, weights=weights.double()).hist)


def test_what_a_histogram_does_with_edges():
    x = torch.tensor([0.0, 1.0, 2.0, 5.0, NAN])
    assert masked.histogram(x, 2, range=(0, 2)).hist.tolist() == [1, 2]  # 5 and NaN are outside
    assert masked.histogram(x[:1], 3).bin_edges.tolist() == pytest.approx([-0.5, -1 / 6, 1 / 6, 0.5])
    assert masked.histogram(x, 3, exclude=[NAN, 0, 1, 2, 5]).hist.tolist() == [0, 0, 0]
    assert masked.histogram(torch.tensor([1, 3, 3, 255]), 2, exclude=255).hist.tolist() == [1, 2]
    with pytest.raises(ArgumentValueError, match=r"(?s)`range` is .*nan.*not finite.*keep=torch.isfinite"):
        masked.histogram(x)
    for bins in (0, 2.0, torch.zeros(1)):
        with pytest.raises(ArgumentValueError, match=r"masked.histogram\(\): `bins` is "):
            masked.histogram(x, bins, range=(0, 1))
