"""Losses that an outlier cannot dominate: huber, cauchy, welsch, geman_mcclure, tukey, charbonnier, barron.

All follow scipy's convention, `scale**2 * rho((r / scale)**2) / 2`: near 0 each of them is `r**2 / 2`, and `scale` is
where a residual begins to count as large.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from numbers import Real

import torch

from gradgate._checks import check_fits, check_tensor
from gradgate._names import describe
from gradgate.errors import ArgumentTypeError, ArgumentValueError
from gradgate.losses._reducing import Reduction
from gradgate.losses._residuals import Scale, floating, of_residual

__all__ = ["barron", "cauchy", "charbonnier", "geman_mcclure", "huber", "robust_weights", "tukey", "welsch"]


def huber(
    residual: torch.Tensor,
    *,
    scale: Scale = 1.0,
    keep: torch.Tensor | None = None,
    weights: torch.Tensor | None = None,
    reduction: Reduction = "mean",
) -> torch.Tensor:
    """Give the Huber loss: r^2 / 2 up to the scale, a straight line beyond it.

    Args:
        residual: The differences, of any shape.
        scale: Where a residual begins to count as large; a positive number or a tensor, which may learn.
        keep: What takes part: one answer for each sample, `(n,)`, or the shape of the residual.
        weights: How much each counts, of the same shapes; 0 leaves out, also NaN.
        reduction: "mean" over what is kept (by weight), "sum", or "none".

    Returns:
        The loss.

    Raises:
        ArgumentTypeError: The residual is complex.
        ArgumentValueError: The scale is not positive or does not broadcast to the residual, or the reduction is
            unknown.

    Gradient:
        r up to the scale, scale x sign(r) beyond. Exactly 0 to what is left out, whatever it is; NaN that is kept
        stays visible. The rest of the family has the same shape of answer, with its own slope.

    Examples:
        >>> gg.losses.huber(torch.tensor([0.5, 3.0, float("nan")]), keep=torch.tensor([True, True, False]))
        tensor(1.3125)
    """

    def rho(r: torch.Tensor, s: Scale) -> torch.Tensor:
        size = r.abs()
        small = torch.minimum(size, torch.as_tensor(s, dtype=r.dtype, device=r.device))
        return small * (size - small / 2)

    return of_residual(rho, residual, scale, keep, weights, reduction, function="losses.huber")


def cauchy(
    residual: torch.Tensor,
    *,
    scale: Scale = 1.0,
    keep: torch.Tensor | None = None,
    weights: torch.Tensor | None = None,
    reduction: Reduction = "mean",
) -> torch.Tensor:
    """Give the Cauchy (Lorentzian) loss, scale^2 / 2 x log(1 + (r / scale)^2): outliers count less and less.

    Args:
        residual: As in `huber`.
        scale: As in `huber`.
        keep: As in `huber`.
        weights: As in `huber`.
        reduction: As in `huber`.

    Returns:
        The loss.

    Raises:
        ArgumentValueError: As in `huber`.

    Gradient:
        r / (1 + (r / scale)^2); else as in `huber`.

    Examples:
        >>> gg.losses.cauchy(torch.tensor([0.0, 1.0]), reduction="none")
        tensor([0.0000, 0.3466])
    """
    return of_residual(
        lambda r, s: s**2 / 2 * torch.log1p((r / s) ** 2),
        residual,
        scale,
        keep,
        weights,
        reduction,
        function="losses.cauchy",
    )


def welsch(
    residual: torch.Tensor,
    *,
    scale: Scale = 1.0,
    keep: torch.Tensor | None = None,
    weights: torch.Tensor | None = None,
    reduction: Reduction = "mean",
) -> torch.Tensor:
    """Give the Welsch (Leclerc) loss, scale^2 / 2 x (1 - exp(-(r / scale)^2)): far outliers do not count at all.

    Args:
        residual: As in `huber`.
        scale: As in `huber`.
        keep: As in `huber`.
        weights: As in `huber`.
        reduction: As in `huber`.

    Returns:
        The loss.

    Raises:
        ArgumentValueError: As in `huber`.

    Gradient:
        r x exp(-(r / scale)^2), 0 for an infinite residual; else as in `huber`.

    Examples:
        >>> gg.losses.welsch(torch.tensor([0.0, float("inf")]), reduction="none")
        tensor([0.0000, 0.5000])
    """
    return of_residual(
        lambda r, s: -(s**2) / 2 * torch.expm1(-_square(r / s)),
        residual,
        scale,
        keep,
        weights,
        reduction,
        function="losses.welsch",
    )


def geman_mcclure(
    residual: torch.Tensor,
    *,
    scale: Scale = 1.0,
    keep: torch.Tensor | None = None,
    weights: torch.Tensor | None = None,
    reduction: Reduction = "mean",
) -> torch.Tensor:
    """Give the Geman-McClure loss, r^2 / 2 / (1 + (r / scale)^2): bounded, with a soft shoulder.

    Args:
        residual: As in `huber`.
        scale: As in `huber`.
        keep: As in `huber`.
        weights: As in `huber`.
        reduction: As in `huber`.

    Returns:
        The loss.

    Raises:
        ArgumentValueError: As in `huber`.

    Gradient:
        r / (1 + (r / scale)^2)^2, 0 for an infinite residual; else as in `huber`.

    Examples:
        >>> gg.losses.geman_mcclure(torch.tensor([1.0, float("inf")]), reduction="none")
        tensor([0.2500, 0.5000])
    """

    def rho(r: torch.Tensor, s: Scale) -> torch.Tensor:
        # 1 - 1 / (1 + z) instead of z / (1 + z): the same, without infinity over infinity.
        return s**2 / 2 * (1 - 1 / (1 + _square(r / s)))

    return of_residual(rho, residual, scale, keep, weights, reduction, function="losses.geman_mcclure")


def tukey(
    residual: torch.Tensor,
    *,
    scale: Scale = 1.0,
    keep: torch.Tensor | None = None,
    weights: torch.Tensor | None = None,
    reduction: Reduction = "mean",
) -> torch.Tensor:
    """Give Tukey's biweight, scale^2 / 6 x (1 - (1 - (r / scale)^2)^3) up to the scale and constant beyond it.

    Args:
        residual: As in `huber`.
        scale: As in `huber`.
        keep: As in `huber`.
        weights: As in `huber`.
        reduction: As in `huber`.

    Returns:
        The loss.

    Raises:
        ArgumentValueError: As in `huber`.

    Gradient:
        r x (1 - (r / scale)^2)^2 up to the scale, exactly 0 beyond; else as in `huber`.

    Examples:
        >>> gg.losses.tukey(torch.tensor([0.5, 100.0]), reduction="none")
        tensor([0.0964, 0.1667])
    """
    return of_residual(
        lambda r, s: s**2 / 6 * (1 - (1 - (r / s).clamp(-1, 1) ** 2) ** 3),
        residual,
        scale,
        keep,
        weights,
        reduction,
        function="losses.tukey",
    )


def charbonnier(
    residual: torch.Tensor,
    *,
    scale: Scale = 1.0,
    keep: torch.Tensor | None = None,
    weights: torch.Tensor | None = None,
    reduction: Reduction = "mean",
) -> torch.Tensor:
    """Give the Charbonnier (pseudo-Huber, soft L1) loss, scale^2 x (sqrt(1 + (r / scale)^2) - 1).

    Args:
        residual: As in `huber`.
        scale: As in `huber`.
        keep: As in `huber`.
        weights: As in `huber`.
        reduction: As in `huber`.

    Returns:
        The loss.

    Raises:
        ArgumentValueError: As in `huber`.

    Gradient:
        r / sqrt(1 + (r / scale)^2); else as in `huber`.

    Examples:
        >>> gg.losses.charbonnier(torch.tensor([0.0, 1.0]), reduction="none")
        tensor([0.0000, 0.4142])
    """

    def rho(r: torch.Tensor, s: Scale) -> torch.Tensor:
        # z / (sqrt(1 + z) + 1) is sqrt(1 + z) - 1 without losing the small ones; nor is z, a square, made of the large.
        size = r / s
        return s**2 * (size * (size / (torch.hypot(size, size.new_ones(())) + 1)))

    return of_residual(rho, residual, scale, keep, weights, reduction, function="losses.charbonnier")


def barron(
    residual: torch.Tensor,
    *,
    alpha: float | torch.Tensor = 1.0,
    scale: Scale = 1.0,
    keep: torch.Tensor | None = None,
    weights: torch.Tensor | None = None,
    reduction: Reduction = "mean",
) -> torch.Tensor:
    """Give Barron's general loss, whose shape is a number: the other losses are among its members, and it can learn.

    alpha = 2 is r^2 / 2, 1 Charbonnier, 0 Cauchy (with scale x sqrt(2)), -2 Geman-McClure (with scale x 2),
    -inf Welsch (with scale x sqrt(2)).

    Args:
        residual: As in `huber`.
        alpha: The shape; a number, or a tensor with finite values, which may learn.
        scale: As in `huber`.
        keep: As in `huber`.
        weights: As in `huber`.
        reduction: As in `huber`.

    Returns:
        scale^2 x b / alpha x ((1 + (r / scale)^2 / b)^(alpha / 2) - 1) with b = |alpha - 2|.

    Raises:
        ArgumentTypeError: alpha is not a number.
        ArgumentValueError: As in `huber`, or alpha is inf.

    Gradient:
        r x (1 + (r / scale)^2 / b)^(alpha / 2 - 1) to the residual, and the slope in alpha and scale to those; smooth
        through alpha = 0. At alpha = 2 the slope in alpha is infinite, so b is taken as at least 1e-3 there. Else as
        in `huber`.

    Examples:
        >>> r = torch.tensor([1.0, 2.0])
        >>> torch.allclose(gg.losses.barron(r, alpha=1.0), gg.losses.charbonnier(r))
        True
    """
    if isinstance(alpha, torch.Tensor):
        check_tensor(residual, name="residual", function="losses.barron")
        check_fits(alpha, residual, name="alpha", function="losses.barron")
    elif not isinstance(alpha, Real):
        raise ArgumentTypeError(
            f"losses.barron(): `alpha` is {describe(alpha)}.",
            why="it is the shape of the loss, as a number.",
            fix="alpha=1.0",
        )
    elif math.isinf(alpha):
        if alpha > 0:
            raise ArgumentValueError(
                "losses.barron(): `alpha` is inf.",
                why="the larger alpha, the less robust; without bound the loss is too.",
                fix="alpha=2.0   # r**2 / 2",
            )
        return welsch(residual, scale=scale * math.sqrt(2), keep=keep, weights=weights, reduction=reduction)

    def rho(r: torch.Tensor, s: Scale) -> torch.Tensor:
        shape = torch.as_tensor(alpha, dtype=r.dtype, device=r.device)
        b = (shape - 2).abs().clamp(min=1e-3)
        logarithm = torch.log1p((r / s) ** 2 / b)
        return s**2 * b / 2 * logarithm * _exponential_quotient(shape / 2 * logarithm)

    return of_residual(rho, residual, scale, keep, weights, reduction, function="losses.barron")


def robust_weights(loss: Callable[..., torch.Tensor], residual: torch.Tensor, *, scale: Scale = 1.0) -> torch.Tensor:
    """Say how much a robust loss lets each residual count: its slope divided by the slope of r^2 / 2.

    Args:
        loss: One of the robust losses of this room, or any with the same arguments.
        residual: The differences.
        scale: The scale of the loss.

    Returns:
        Weights of the residual's shape, 1 for a small residual, towards 0 for an outlier; detached. NaN for NaN.

    Raises:
        ArgumentTypeError: `loss` cannot be called, or the residual is no tensor.
        ArgumentValueError: The scale is not positive.

    Examples:
        >>> gg.losses.robust_weights(gg.losses.cauchy, torch.tensor([0.0, 1.0, 3.0]))
        tensor([1.0000, 0.5000, 0.1000])
    """
    if not callable(loss):
        raise ArgumentTypeError(
            f"losses.robust_weights(): `loss` is {describe(loss)}.",
            why="it is asked for its slope at each residual.",
            fix="losses.robust_weights(losses.cauchy, residual)",
        )
    check_tensor(residual, name="residual", function="losses.robust_weights")
    with torch.enable_grad():
        leaf = floating(residual.detach()).clone().requires_grad_()
        (slope,) = torch.autograd.grad(loss(leaf, scale=scale, reduction="sum"), leaf)
    return torch.where(residual == 0, 1, slope / torch.where(residual == 0, 1, residual.detach()))


def _square(r: torch.Tensor) -> torch.Tensor:
    """Square, with 0 for the slope where the square would be infinite."""
    limit = math.sqrt(torch.finfo(r.dtype).max)
    return r.clamp(-limit, limit) ** 2


def _exponential_quotient(t: torch.Tensor) -> torch.Tensor:
    """Give (exp(t) - 1) / t, which is 1 at 0, smoothly."""
    small = t.abs() < 1e-3
    series = 1 + t / 2 * (1 + t / 3 * (1 + t / 4))
    away = torch.where(small, 1, t)
    return torch.where(small, series, torch.expm1(away) / away)
