"""Every dtype that the plain function takes, layouts, and the accident points of the plain functions."""

import math

import pytest
import torch

from gradgate import masked
from tests import witness
from tests.masked.laws import BY_NAME, LAWS, SMOOTH

pytestmark = pytest.mark.usefixtures("both_paths")

NAN, INF = math.nan, math.inf
INTEGERS = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
KEEP = torch.tensor([[True, True, False, True], [False, False, True, False], [True, True, True, True]])


@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
@pytest.mark.parametrize("law", [law for law in LAWS if law.ints], ids=lambda law: law.name)
def test_integers(law, dtype):
    x = torch.tensor([[3, 1, 0, 2], [0, 5, 4, 1], [1, 0, 2, 1]]).to(dtype)
    if dtype is torch.bool and law.public in ("argmax", "argmin", "median"):
        return  # torch's own do not take bools
    for dim in (0, 1, None, (0, 1)):
        ours, theirs = law.fn(x, dim, keep=KEEP), law.oracle(x, KEEP, dim)
        assert ours.dtype == theirs.dtype
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128], ids=str)
@pytest.mark.parametrize("law", [law for law in LAWS if law.complexes], ids=lambda law: law.name)
def test_complex_numbers(law, dtype):
    x = torch.randn(3, 4, dtype=dtype)
    witness.check_against(lambda x: law.fn(x, 1, keep=KEEP), lambda x: law.oracle(x, KEEP, 1), [x])
    for order in (1, 2):
        dirty = witness.value_and_gradients(lambda x: law.fn(x, 1, keep=KEEP), [torch.where(KEEP, x, NAN)], order)
        clean = witness.value_and_gradients(lambda x: law.fn(x, 1, keep=KEEP), [x], order)
        witness.assert_same(dirty[0] + dirty[1], clean[0] + clean[1], what="with garbage", exact=True)


def test_logsumexp_takes_what_torch_takes():
    assert masked.logsumexp(torch.tensor([0, 0, 9]), exclude=9) == math.log(2)
    assert masked.logsumexp(torch.tensor([False, False, True]), exclude=True) == math.log(2)
    z = torch.tensor([1j, 0.5, 99])
    torch.testing.assert_close(masked.logsumexp(z, exclude=99), torch.logsumexp(z[:2], 0))


PROMISES = ("fake", "float16", "noncontiguous", "expanded", "gradcheck", "gradgradcheck")


@pytest.mark.parametrize("promise", PROMISES)
@pytest.mark.parametrize("law", SMOOTH, ids=lambda law: law.name)
def test_the_witness(law, promise):
    if promise.startswith("grad") and law.name == "norm 0":
        return  # it is constant: there is nothing to differentiate
    keep = KEEP.clone()
    keep[1] = False
    x = torch.tensor([[0.5, -1.5, 2.5, 0.25], [1.75, 3.0, -0.75, 1.0], [2.0, -2.25, 4.0, 1.5]], dtype=torch.float64)
    if promise == "expanded" and law.public == "normalize":
        x = x + 3
    fn = lambda x: law.fn(x, 1, keep=keep)  # noqa: E731
    if promise.startswith("grad"):  # a difference of infinities is no number, so a constant stands there
        fn = lambda x: (out := law.fn(x, 1, keep=keep)).where(out.isfinite(), 0)  # noqa: E731
    witness.CHECKS[promise](fn, lambda x: law.oracle(x, keep, 1), [x])


def test_a_mean_of_halves_does_not_overflow_on_the_way():
    x = torch.full((3000,), 60.0, dtype=torch.float16)
    keep = torch.arange(3000) % 2 == 0
    assert masked.mean(x, keep=keep) == 60
    assert masked.var(x, keep=keep) == 0
    many = x.repeat(10)
    assert masked.mean(many, exclude=1) == 60


@pytest.mark.parametrize("size", [2000, 70_000])
@pytest.mark.parametrize("twice", [False, True])
@pytest.mark.parametrize("empty", [False, True])
def test_gradients_of_halves_are_added_up_as_floats(size, twice, empty):
    """Many gradients of 100 each are more than a float16 can hold."""
    x, keep = torch.randn(2, size, dtype=torch.float16, requires_grad=True), torch.rand(2, size) < 0.9
    keep[1] = keep[1] & (not empty)
    arriving = torch.full((2, size), 100.0, dtype=torch.float16)
    wide = x.detach().float().requires_grad_()
    (expected,) = torch.autograd.grad(masked.log_softmax(wide, 1, keep=keep), wide, arriving.float())
    (found,) = torch.autograd.grad(masked.log_softmax(x, 1, keep=keep), x, arriving, create_graph=twice)
    torch.testing.assert_close(found.float(), expected, rtol=0.02, atol=1.0)


def test_dtype_converts_first_but_exclude_looks_before():
    x = torch.tensor([1, 2, 255], dtype=torch.uint8)
    assert masked.mean(x, exclude=255, dtype=torch.float64) == 1.5
    assert masked.sum(x, exclude=-1, dtype=torch.int8).dtype is torch.int8
    assert masked.softmax(x, exclude=255, dtype=torch.float32)[2] == 0
    assert masked.cumsum(x, exclude=255, dtype=torch.int32).tolist() == [1, 3, 3]


# --- where plain gradients are NaN by accident ------------------------------------------------------------------------


@pytest.mark.parametrize("size", [4, 9000])
@pytest.mark.parametrize("fn", [masked.var, masked.std])
def test_one_kept_value_has_no_spread_and_no_gradient(fn, size):
    x = torch.full((size,), NAN).index_fill(0, torch.tensor([1]), 3.0).requires_grad_()
    result = fn(x, exclude=NAN)
    assert result.isnan()
    assert (torch.autograd.grad(result, x)[0] == 0).all()
    assert fn(x, exclude=NAN, correction=0) == 0
    assert (torch.autograd.grad(fn(x, exclude=NAN, correction=0), x)[0] == 0).all()


def test_a_correction_larger_than_the_number():
    x = torch.tensor([1.0, 2.0, 9.0], requires_grad=True)
    result = masked.var(x, exclude=9, correction=3)
    assert result == INF
    assert torch.autograd.grad(result, x)[0].tolist() == [0, 0, 0]


@pytest.mark.parametrize("order", [1, 2, 3, INF])
def test_the_norm_at_zero(order):
    x = torch.tensor([0.0, 0.0, NAN], requires_grad=True)
    masked.norm(x, ord=order, exclude=NAN).backward()
    assert x.grad.tolist() == [0, 0, 0]


@pytest.mark.parametrize("size", [3, 9000])
def test_nothing_but_minus_infinity(size):
    x = torch.full((2, size), -INF)
    x[1] = 0
    x.requires_grad_()
    for keep in (None, torch.rand(2, size) < 0.7):
        for fn, value in ((masked.logsumexp, -INF), (masked.softmax, 0), (masked.log_softmax, -INF)):
            result = fn(x, 1, keep=keep)
            assert (result[0] == value).all()
            (gradient,) = torch.autograd.grad(result, x, torch.full_like(result, 2.0))
            assert (gradient[0] == 0).all()
            assert gradient.isfinite().all()


def test_one_minus_infinity_among_others_is_as_in_torch():
    x = torch.tensor([0.5, -INF, 1.5, 99.0], requires_grad=True)
    for name, plain in (("logsumexp", torch.logsumexp), ("softmax", torch.softmax), ("log_softmax", torch.log_softmax)):
        ours = getattr(masked, name)(x, exclude=99)
        theirs = plain(x[:3], 0)
        seed = torch.tensor([1.0, 0.0, 3.0, 0.0])
        seeds = (seed[:3], seed) if ours.dim() else (torch.tensor(1.0), torch.tensor(1.0))
        expected = torch.autograd.grad(theirs, x, seeds[0])[0]
        torch.testing.assert_close(torch.autograd.grad(ours, x, seeds[1])[0], expected)


@pytest.mark.parametrize("size", [6, 9000])
def test_ties_share_the_gradient_as_torch_shares_it(size):
    x = torch.randint(0, 3, (2, size)).float().requires_grad_()
    keep = torch.rand(2, size) < 0.8
    keep[:, 0] = True
    for ours, plain in ((masked.amax, torch.amax), (masked.amin, torch.amin)):
        (gradient,) = torch.autograd.grad(ours(x, 1, keep=keep).sum(), x)
        for row in range(2):
            (expected,) = torch.autograd.grad(plain(x[row][keep[row]], 0), x)
            torch.testing.assert_close(gradient[row], expected[row])


@pytest.mark.parametrize("size", [4, 9000])
def test_infinities_that_are_kept_share_with_no_left_out_one(size):
    x = torch.full((size,), -INF, requires_grad=True)
    keep = torch.arange(size) < 2
    (gradient,) = torch.autograd.grad(masked.amax(x, keep=keep), x)
    assert gradient[:2].tolist() == [0.5, 0.5]
    assert (gradient[2:] == 0).all()
    assert masked.argmax(x.detach(), keep=torch.arange(size) == 3) == 3
    assert masked.argmin(-x.detach(), keep=torch.arange(size) == 3) == 3


def test_a_kept_nan_is_not_hidden():
    x = torch.tensor([1.0, NAN, 99.0])
    for law in LAWS:
        if law.public not in ("count", "argmax", "argmin") and law.name != "norm 0":
            assert law.fn(x, None, keep=x != 99).isnan().any(), law.name
    assert masked.argmax(x, exclude=99) == 1


# --- order ------------------------------------------------------------------------------------------------------------


def test_the_median_of_infinities():
    assert masked.median(torch.tensor([INF, INF, 0.0]), exclude=0) == INF
    assert masked.quantile(torch.tensor([-INF, 0.0, INF]), 0.75) == INF
    assert masked.quantile(torch.tensor([INF, INF, 0.0]), 0.3, exclude=0) == INF


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64], ids=str)
def test_an_infinity_may_be_one_of_the_two_in_the_middle(dtype):
    x = torch.tensor([[99, 1, INF], [99, -INF, 3], [2, 99, INF], [99, -INF, INF]], dtype=dtype, requires_grad=True)
    median = masked.median(x, 1, exclude=99)
    assert median[:3].tolist() == [INF, -INF, INF]
    assert median[3].isnan()
    (gradient,) = torch.autograd.grad(median.sum(), x)
    assert gradient.tolist() == [[0, 0.5, 0.5], [0, 0.5, 0.5], [0.5, 0, 0.5], [0, 0.5, 0.5]]


def test_median_of_integers_is_a_float_unless_one_is_chosen():
    x = torch.tensor([1, 2, 255])
    assert masked.median(x, exclude=255) == 1.5
    assert masked.median(x, exclude=255, interpolation="higher").dtype is torch.int64


def test_several_quantiles_come_first():
    x, keep = torch.randn(3, 50), torch.rand(3, 50) < 0.5
    q = torch.tensor([0.1, 0.5, 0.9])
    result = masked.quantile(x, q, 1, keep=keep, keepdim=True)
    assert result.shape == (3, 3, 1)
    for i in range(3):
        torch.testing.assert_close(result[:, i, 0], torch.quantile(x[i][keep[i]], q))
    torch.testing.assert_close(masked.quantile(x, [0.1, 0.5, 0.9], 1, keep=keep, keepdim=True), result)


@pytest.mark.slow
def test_quantile_has_no_size_limit():
    x = torch.arange(17_000_000, dtype=torch.float32)
    assert masked.quantile(x, 0.5, exclude=0) == 8_500_000


def test_both_searches_for_the_median_agree():
    """The one by selection is for real values on the CPU, the one by sorting for everything else."""
    law = BY_NAME["median"]
    x, keep = torch.randint(0, 5, (20, 30)).float(), torch.rand(20, 30) < 0.6
    keep[3] = False
    assert torch.equal(law.fn(x, 1, keep=keep).nan_to_num(-1), masked.quantile(x, 0.5, 1, keep=keep).nan_to_num(-1))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.complex64])
def test_zero_normalized_stays_zero_whatever_the_dtype_can_hold(dtype):
    x = torch.tensor([0, 0, 3], dtype=dtype)
    for eps in (1e-12, 0):
        assert masked.normalize(x, exclude=3, eps=eps).tolist() == [0, 0, 0]


def test_normalize_at_zero_is_steep_as_in_torch():
    """LIMITATIONS.md: the true derivative of x / max(norm, eps); masked.safe_normalize has none."""
    x = torch.zeros(3, requires_grad=True)
    (ours,) = torch.autograd.grad(masked.normalize(x).sum(), x)
    (theirs,) = torch.autograd.grad(torch.nn.functional.normalize(x, dim=0).sum(), x)
    assert torch.equal(ours, theirs)
    assert (ours > 1e11).all()


@pytest.mark.parametrize("compute", [masked.median, lambda x, **kw: masked.quantile(x, 0.3, **kw)])
def test_no_gradient_comes_from_a_median_that_is_nan(compute):
    """LIMITATIONS.md: torch.median sends it to the NaN, torch.quantile nowhere."""
    x = torch.tensor([1.0, NAN, 2.0, 99.0], requires_grad=True)
    result = compute(x, exclude=99)
    assert result.isnan()
    assert torch.autograd.grad(result, x)[0].tolist() == [0, 0, 0, 0]


def test_running_statistics_cannot_be_written_under_vmap():
    """LIMITATIONS.md: one buffer cannot hold the statistics of each of many batches; torch's own says so too."""
    x, mean, var = torch.randn(2, 4, 3), torch.zeros(3), torch.ones(3)
    keep = torch.ones(4, 3, dtype=torch.bool)
    with pytest.raises(RuntimeError, match="vmap"):
        torch.vmap(lambda x: masked.batch_norm(x, mean, var, training=True, keep=keep))(x)
