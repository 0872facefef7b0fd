"""The robust family: values and slopes against closed forms and scipy's, and what is left out."""

import math

import mpmath
import pytest
import scipy.special
import torch
from hypothesis import given
from hypothesis import strategies as st

import gradgate as gg
from gradgate import losses
from tests.witness import REAL, witness

NAN, INF = math.nan, math.inf

# rho(z) for z = (r / scale)^2, as in scipy.optimize.least_squares: the loss is scale^2 / 2 x rho(z).
RHO = {
    "huber": lambda z: torch.where(z <= 1, z, 2 * z.sqrt() - 1),
    "cauchy": lambda z: torch.log(1 + z),
    "welsch": lambda z: 1 - torch.exp(-z),
    "geman_mcclure": lambda z: z / (1 + z),
    "tukey": lambda z: torch.where(z <= 1, (1 - (1 - z) ** 3) / 3, 1 / 3),
    "charbonnier": lambda z: 2 * (torch.sqrt(1 + z) - 1),
}
SLOPE = {
    "huber": lambda r, s: r.clamp(-s, s),
    "cauchy": lambda r, s: r / (1 + (r / s) ** 2),
    "welsch": lambda r, s: r * torch.exp(-((r / s) ** 2)),
    "geman_mcclure": lambda r, s: r / (1 + (r / s) ** 2) ** 2,
    "tukey": lambda r, s: torch.where(r.abs() <= s, r * (1 - (r / s) ** 2) ** 2, 0),
    "charbonnier": lambda r, s: r / torch.sqrt(1 + (r / s) ** 2),
}
FAMILY = pytest.mark.parametrize("name", [*RHO, "barron"])
residuals = st.lists(st.floats(-50, 50), min_size=0, max_size=8).map(lambda r: torch.tensor(r, dtype=torch.float64))


@pytest.mark.parametrize("name", RHO)
@given(residuals, st.floats(0.1, 10))
def test_values_and_slopes_are_the_closed_forms(name, r, scale):
    r = r.requires_grad_()
    ours = getattr(losses, name)(r, scale=scale, reduction="none")
    torch.testing.assert_close(ours, scale**2 / 2 * RHO[name]((r / scale) ** 2))
    (slope,) = torch.autograd.grad(ours.sum(), r)
    torch.testing.assert_close(slope, SLOPE[name](r.detach(), scale))


@given(residuals, st.floats(0.1, 10))
def test_scipy_says_the_same(r, scale):
    torch.testing.assert_close(
        losses.huber(r, scale=scale, reduction="none"), torch.from_numpy(scipy.special.huber(scale, r.numpy()))
    )
    torch.testing.assert_close(
        losses.charbonnier(r, scale=scale, reduction="none"),
        torch.from_numpy(scipy.special.pseudo_huber(scale, r.numpy())),
    )


@pytest.mark.parametrize("loss", ["huber", "soft_l1", "cauchy"])
def test_scipys_least_squares_finds_the_same_minimum(loss):
    """One outlier in a line fit: the minimum of our loss is where scipy's solver stops."""
    import numpy
    from scipy.optimize import least_squares

    x = numpy.linspace(0, 1, 12)
    y = 2 * x + numpy.where(x > 0.9, 30.0, 0.0)
    slope = least_squares(lambda p: p * x - y, [0.0], loss=loss, f_scale=0.5, xtol=1e-12).x[0]
    ours = {"huber": losses.huber, "soft_l1": losses.charbonnier, "cauchy": losses.cauchy}[loss]
    p = torch.tensor(slope, requires_grad=True)
    ours(p * torch.from_numpy(x) - torch.from_numpy(y), scale=0.5).backward()
    assert abs(p.grad) < 1e-5


@FAMILY
def test_near_zero_all_are_half_the_square(name):
    r = torch.tensor([-1e-4, 1e-5, 0.0], dtype=torch.float64)
    torch.testing.assert_close(getattr(losses, name)(r, reduction="none"), r**2 / 2, rtol=1e-6, atol=0)


@pytest.mark.slow
@FAMILY
def test_in_every_way_of_using_it(name):
    loss = getattr(losses, name)
    keep = torch.tensor([[True, False], [True, True], [False, True]])
    r = torch.tensor([[0.3, 5.0], [-0.7, 2.0], [1.4, -3.0]], dtype=torch.float64)
    witness(
        lambda x, m: loss(x, keep=m),
        lambda x, m: (loss(x, reduction="none") * m).sum() / m.sum().clamp(min=1),
        r,
        keep,
        promises=REAL,
        empty=(torch.zeros(0, 2), torch.zeros(0, 2, dtype=torch.bool)),
    )


@FAMILY
@pytest.mark.parametrize("garbage", [NAN, INF, -INF, 1e38])
def test_what_is_left_out_gets_exactly_zero_and_changes_nothing(name, garbage):
    loss = getattr(losses, name)
    kept = torch.tensor([0.5, -2.0], requires_grad=True)
    expected = loss(kept)
    (gradient,) = torch.autograd.grad(expected, kept)
    for how in ({"keep": torch.tensor([True, False, True])}, {"weights": torch.tensor([1.0, 0.0, 1.0])}):
        r = torch.tensor([0.5, garbage, -2.0], requires_grad=True)
        value = loss(r, **how)
        value.backward()
        torch.testing.assert_close(value, expected)
        assert r.grad[1] == 0
        torch.testing.assert_close(r.grad[[0, 2]], gradient)


@FAMILY
def test_nothing_kept_and_reductions(name):
    loss = getattr(losses, name)
    r = torch.tensor([NAN, 1.0], requires_grad=True)
    value = loss(r, keep=torch.tensor([False, False]))
    value.backward()
    assert value == 0
    assert torch.equal(r.grad, torch.zeros(2))
    per_element = loss(r, keep=torch.tensor([False, True]), reduction="none")
    assert per_element[0] == 0
    torch.testing.assert_close(loss(r, keep=torch.tensor([False, True]), reduction="sum"), per_element[1])


@pytest.mark.parametrize("name", ["welsch", "geman_mcclure", "tukey"])
def test_an_infinite_residual_of_a_bounded_loss_has_slope_zero(name):
    r = torch.tensor([INF, -INF, 1e30], requires_grad=True)
    value = getattr(losses, name)(r)
    value.backward()
    assert value.isfinite()
    assert torch.equal(r.grad, torch.zeros(3))


def test_huber_at_infinity_still_pulls_with_the_scale():
    r = torch.tensor([INF, -INF], requires_grad=True)
    losses.huber(r, scale=2.0, reduction="sum").backward()
    assert torch.equal(r.grad, torch.tensor([2.0, -2.0]))


@pytest.mark.parametrize(
    ("alpha", "member"),
    [
        (2.0, lambda r: r**2 / 2),
        (1.0, losses.charbonnier),
        (0.0, lambda r, reduction: losses.cauchy(r, scale=math.sqrt(2), reduction=reduction)),
        (-2.0, lambda r, reduction: losses.geman_mcclure(r, scale=2.0, reduction=reduction)),
        (-INF, lambda r, reduction: losses.welsch(r, scale=math.sqrt(2), reduction=reduction)),
    ],
)
def test_the_members_of_barrons_family(alpha, member):
    r = torch.linspace(-3, 3, 13, dtype=torch.float64)
    expected = member(r) if alpha == 2 else member(r, reduction="none")
    close = {"rtol": 2e-2, "atol": 1e-6} if alpha == 2 else {}
    torch.testing.assert_close(losses.barron(r, alpha=alpha, reduction="none"), expected, **close)


@pytest.mark.parametrize("alpha", [-1.5, 0.0, 1e-7, 0.5, 1.0, 1.9, 3.0])
def test_alpha_and_scale_learn(alpha):
    inputs = [torch.tensor(value, dtype=torch.float64, requires_grad=True) for value in (0.7, alpha, 1.3)]
    assert torch.autograd.gradcheck(lambda r, a, s: losses.barron(r, alpha=a, scale=s), inputs)
    assert torch.autograd.gradgradcheck(lambda r, a, s: losses.barron(r, alpha=a, scale=s), inputs)


@pytest.mark.parametrize("alpha", [0.0, 1e-4, 0.3, 1.0, 1.7, 2.0, 4.0])
def test_the_density_of_the_adaptive_loss_has_the_integral_one(alpha):
    def density(r):
        b = mpmath.mpf(abs(alpha - 2))
        if alpha == 2:
            return mpmath.exp(-(r**2) / 2)
        power = mpmath.log(1 + r**2 / 2) if alpha == 0 else b / alpha * ((1 + r**2 / b) ** (mpmath.mpf(alpha) / 2) - 1)
        return mpmath.exp(-power)

    with mpmath.workdps(30):
        ends = [0, 1, 10, 1e3, 1e6, mpmath.inf]
        truth = float(mpmath.log(2 * mpmath.quad(density, ends)))
    for dtype in (torch.float64, torch.float32):
        r = torch.zeros(1, dtype=dtype)
        torch.testing.assert_close(losses.adaptive(r, alpha=alpha).item(), truth, rtol=2e-6, atol=2e-6)
    assert losses.adaptive(torch.zeros(1, dtype=torch.float64), alpha=alpha).item() == pytest.approx(truth, abs=1e-9)


@pytest.mark.parametrize("alpha", [1e-4, 0.5, 1.0, 1.9, 3.0])
def test_the_adaptive_loss_learns(alpha):
    inputs = [torch.tensor(value, dtype=torch.float64, requires_grad=True) for value in (0.7, alpha, 1.3)]
    assert torch.autograd.gradcheck(lambda r, a, s: losses.adaptive(r, alpha=a, scale=s), inputs)
    assert torch.autograd.gradgradcheck(lambda r, a, s: losses.adaptive(r, alpha=a, scale=s), inputs)
    for value, largest in ((0.0, 1e30), (2.0, 1e4), (30.0, 10.0)):
        shape = torch.tensor(value, requires_grad=True)
        losses.adaptive(torch.tensor([0.0, 1.0, largest]), alpha=shape).backward()
        assert shape.grad.isfinite()


@pytest.mark.slow
@pytest.mark.parametrize(("name", "low", "high"), [("Normal", 1.4, 2.0), ("Cauchy", 0.0, 0.4)])
def test_a_learned_alpha_finds_the_tail_of_the_residuals_and_stays(name, low, high):
    torch.manual_seed(0)
    r = getattr(torch.distributions, name)(0.0, 3.0).sample((2000,)).double()
    free = torch.zeros(2, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.Adam([free], lr=0.1)
    for _ in range(150):
        alpha, scale = 2 * free[0].sigmoid(), free[1].exp()
        optimizer.zero_grad()
        losses.adaptive(r, alpha=alpha, scale=scale).backward()
        optimizer.step()
    assert low <= alpha.item() <= high
    # Without the partition term every residual pulls the same way, for ever.
    shape = torch.linspace(-5, 1.9, 30, dtype=torch.float64, requires_grad=True)
    losses.barron(torch.ones(30, dtype=torch.float64), alpha=shape, reduction="sum").backward()
    assert (shape.grad > 0).all()


def test_the_adaptive_loss_leaves_out():
    r = torch.tensor([1.0, NAN, INF, 2.0], requires_grad=True)
    alpha, scale = torch.full((4,), 1.2, requires_grad=True), torch.full((4,), 2.0, requires_grad=True)
    losses.adaptive(r, alpha=alpha, scale=scale, keep=torch.tensor([True, False, False, True])).backward()
    for each in (r, alpha, scale):
        assert (each.grad[1:3] == 0).all()
        assert (each.grad[[0, 3]] != 0).all()
        assert each.grad.isfinite().all()
    assert losses.adaptive(r[:1], alpha=torch.tensor(-0.1)).isnan()
    for alpha in (-1.0, INF):
        with pytest.raises(
            gg.errors.ArgumentValueError, match=r"(?s)adaptive\(\): `alpha` is .*no integral.*alpha=0.0"
        ):
            losses.adaptive(r, alpha=alpha)


def test_alpha_at_two_has_a_finite_slope():
    alpha = torch.tensor(2.0, requires_grad=True)
    losses.barron(torch.tensor([0.0, 1.0, 1e4]), alpha=alpha).backward()
    assert alpha.grad.isfinite()


def test_a_scale_that_is_a_tensor_learns_in_each():
    for name in RHO:
        scale = torch.tensor(1.5, dtype=torch.float64, requires_grad=True)
        r = torch.tensor([0.4, 3.0], dtype=torch.float64)
        assert torch.autograd.gradcheck(lambda s, name=name, r=r: getattr(losses, name)(r, scale=s), (scale,))


def test_robust_weights_are_how_much_a_residual_counts():
    r = torch.tensor([0.0, 0.5, 4.0], dtype=torch.float64)
    torch.testing.assert_close(
        losses.robust_weights(losses.huber, r), torch.tensor([1.0, 1.0, 0.25], dtype=torch.float64)
    )
    torch.testing.assert_close(losses.robust_weights(losses.cauchy, r, scale=2.0), 1 / (1 + (r / 2) ** 2))
    assert not losses.robust_weights(losses.tukey, r.requires_grad_()).requires_grad


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@FAMILY
def test_halves_are_squared_as_floats(name, dtype):
    """300 squared is no float16; and 100,000 losses are more than it can count."""
    r = torch.tensor([300.0, 1.0, -2.0], dtype=dtype, requires_grad=True)
    scale = torch.tensor(2.0, dtype=dtype)
    loss = getattr(losses, name)(r, scale=scale, reduction="none")
    wide = r.detach().float().requires_grad_()
    expected = getattr(losses, name)(wide, scale=2.0, reduction="none")
    assert loss.dtype is dtype
    assert torch.equal(loss, expected.to(dtype))
    assert torch.equal(torch.autograd.grad(loss.sum(), r)[0], torch.autograd.grad(expected.sum(), wide)[0].to(dtype))
    many = r.detach()[1:2].expand(100_000)
    assert getattr(losses, name)(many, scale=scale) == loss[1].item()


@FAMILY
def test_integers_are_differences_too(name):
    loss = getattr(losses, name)
    for dtype in (torch.int64, torch.uint8):
        r = torch.tensor([1, 0, 3], dtype=dtype)
        assert torch.equal(loss(r, scale=0.5), loss(r.float(), scale=0.5))
        torch.testing.assert_close(losses.robust_weights(loss, r), losses.robust_weights(loss, r.float()))
    assert loss(torch.tensor([True, False])) == loss(torch.tensor([1.0, 0.0]))


def test_charbonnier_of_what_cannot_be_squared():
    r = torch.tensor([1e20, -1e38], requires_grad=True)
    loss = losses.charbonnier(r, scale=2.0, reduction="none")
    torch.testing.assert_close(loss, 2 * r.abs())
    assert torch.autograd.grad(loss.sum(), r)[0].tolist() == [2, -2]


# value, slope and second derivative of each at z = r / scale, to be evaluated with 200 digits
CLOSED = {
    "huber": (
        lambda z: z**2 / 2 if abs(z) <= 1 else abs(z) - mpmath.mpf(0.5),
        lambda z: max(min(z, 1), -1),
        lambda z: mpmath.mpf(abs(z) <= 1),
    ),
    "cauchy": (lambda z: mpmath.log1p(z**2) / 2, lambda z: z / (1 + z**2), lambda z: (1 - z**2) / (1 + z**2) ** 2),
    "welsch": (
        lambda z: -mpmath.expm1(-(z**2)) / 2,
        lambda z: z * mpmath.exp(-(z**2)),
        lambda z: (1 - 2 * z**2) * mpmath.exp(-(z**2)),
    ),
    "geman_mcclure": (
        lambda z: z**2 / 2 / (1 + z**2),
        lambda z: z / (1 + z**2) ** 2,
        lambda z: (1 - 3 * z**2) / (1 + z**2) ** 3,
    ),
    "tukey": (
        lambda z: (1 - (1 - min(z**2, 1)) ** 3) / 6,
        lambda z: z * (1 - min(z**2, 1)) ** 2,
        lambda z: (1 - min(z**2, 1)) * (1 - 5 * z**2),
    ),
    "charbonnier": (
        lambda z: mpmath.sqrt(1 + z**2) - 1,
        lambda z: z / mpmath.sqrt(1 + z**2),
        lambda z: (1 + z**2) ** mpmath.mpf(-1.5),
    ),
}
ALPHAS = (-50.0, -10.0, -4.0, -2.0, -1.0, -0.1, 0.5, 1.0, 1.5, 3.0)
POINTS = (
    0,
    1e-30,
    1e-12,
    1e-6,
    1e-3,
    0.1,
    0.3,
    0.5,
    0.9,
    0.999,
    1,
    1.001,
    1.5,
    3,
    7,
    30,
    1e2,
    1e4,
    1e8,
    1e12,
    1e20,
    1e30,
)


def closed(name, alpha):
    if name != "barron":
        return CLOSED[name]
    a, b = mpmath.mpf(alpha), mpmath.mpf(abs(alpha - 2))
    return (
        lambda z: b / a * ((1 + z**2 / b) ** (a / 2) - 1),
        lambda z: z * (1 + z**2 / b) ** (a / 2 - 1),
        lambda z: (1 + z**2 / b) ** (a / 2 - 2) * (1 + (a - 1) * z**2 / b),
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("name", "alpha"), [*((name, None) for name in CLOSED), *(("barron", a) for a in ALPHAS)])
def test_value_slope_and_curvature_are_right_at_zero_at_the_joints_and_far_out(name, alpha, dtype):
    """Within a few hundred roundings of 200 digits; a curvature is measured beside slope / residual."""
    more = {} if alpha is None else {"alpha": alpha}
    tiny, eps, largest = torch.finfo(dtype).tiny, torch.finfo(dtype).eps, torch.finfo(dtype).max
    r = torch.tensor([*POINTS, *(-point for point in POINTS)], dtype=dtype, requires_grad=True)
    value = getattr(losses, name)(r, reduction="none", **more)
    (slope,) = torch.autograd.grad(value.sum(), r, create_graph=True)
    (curvature,) = torch.autograd.grad(slope.sum(), r)
    with mpmath.workdps(200):
        truths = [[formula(mpmath.mpf(x)) for formula in closed(name, alpha)] for x in r.tolist()]
        for x, ours, truth in zip(r.tolist(), zip(value, slope, curvature, strict=True), truths, strict=True):
            if truth[0] > largest:
                continue  # nor is the slope of what overflows known
            size = [abs(truth[0]), abs(truth[1]), max(abs(truth[2]), abs(truth[1] / x) if x else 0)]
            for what, got, wanted, scale in zip(("value", "slope", "curvature"), ours, truth, size, strict=True):
                if name == "huber" and what == "curvature" and abs(x) == 1:
                    assert got in (0, 1)  # at the joint it is that of one side; of which, torch decides
                    continue
                error = abs(mpmath.mpf(got.item()) - wanted)
                assert error <= 500 * eps * scale + 1e4 * tiny, (what, x, got.item(), mpmath.nstr(wanted, 5))


def test_wrong_arguments():
    r = torch.ones(3)
    with pytest.raises(gg.errors.ArgumentValueError, match=r"(?s)`scale` is the float 0.0.*scale=1.0"):
        losses.huber(r, scale=0.0)
    with pytest.raises(gg.errors.ArgumentValueError, match=r"(?s)`reduction` is the str 'avg'.*mean, sum, none"):
        losses.cauchy(r, reduction="avg")
    with pytest.raises(gg.errors.ArgumentValueError, match=r"(?s)`alpha` is inf.*alpha=2.0"):
        losses.barron(r, alpha=INF)
    with pytest.raises(gg.errors.ArgumentTypeError, match=r"(?s)`alpha` is the str 'wide'.*alpha=1.0"):
        losses.barron(r, alpha="wide")
    with pytest.raises(gg.errors.ArgumentValueError, match=r"`alpha` has shape \(2,\), which does not broadcast"):
        losses.barron(r, alpha=torch.ones(2))
    with pytest.raises(gg.errors.ArgumentValueError, match=r"`scale` has shape \(2, 1\), which does not broadcast"):
        losses.huber(r, scale=torch.ones(2, 1))
    with pytest.raises(gg.errors.ArgumentTypeError, match=r"(?s)`residual` is a complex64 tensor.*residual.abs\(\)"):
        losses.huber(torch.ones(2, dtype=torch.complex64))


def test_a_scale_is_a_positive_number_and_a_loss_can_be_called():
    for scale in ("wide", None, 0, -1.0, float("nan")):
        with pytest.raises(gg.errors.ArgumentValueError, match=r"losses.cauchy\(\): `scale` is"):
            losses.cauchy(torch.ones(2), scale=scale)
    with pytest.raises(gg.errors.ArgumentTypeError, match=r"(?s)`loss` is the str 'cauchy'.*losses.cauchy, residual"):
        losses.robust_weights("cauchy", torch.ones(2))
