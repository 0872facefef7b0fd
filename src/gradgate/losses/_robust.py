"""Outliers: losses that they cannot dominate, masks and means that leave them out, and a record of what was left out.

All losses follow scipy's convention, `scale**2 * rho((r / scale)**2) / 2`: near 0 each of them is `r**2 / 2`, and
`scale` is where a residual begins to count as large.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from numbers import Real
from typing import Any, Literal, TypeAlias, get_args

import torch
from torch import Tensor

from gradgate import masked
from gradgate._checks import check_fits, check_tensor, wrong_type, wrong_value
from gradgate._names import listed
from gradgate._torch_private import has_data
from gradgate.errors import ArgumentValueError
from gradgate.gates import straight_through
from gradgate.losses._denominator import Reduction, reduced, shares_of, wide_dtype
from gradgate.records import Incident, Sink

_NUMPY = find_spec("numpy") is not None

Method: TypeAlias = Literal["mad", "zscore", "iqr", "quantile"]
Dim: TypeAlias = int | Sequence[int] | None
Scale: TypeAlias = float | Tensor
Each: TypeAlias = Tensor | None
"""A value for each sample or each element."""


def huber(
    residual: Tensor, *, scale: Scale = 1.0, keep: Each = None, weights: Each = None, reduction: Reduction = "mean"
) -> Tensor:
    """Return the Huber loss: r^2 / 2 up to the scale, a straight line beyond it.

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
        ArgumentValueError: The scale is not positive or does not broadcast to the residual, or an unknown reduction.

    Gradient:
        r up to the scale, scale x sign(r) beyond. Exactly 0 to what is left out, whatever it is; NaN that is kept
        stays visible. The rest of the family has the same shape of answer, with its own slope.

    Examples:
        >>> gg.losses.huber(torch.tensor([0.5, 3.0, float("nan")]), keep=torch.tensor([True, True, False]))
        tensor(1.3125)
    """

    def rho(r: Tensor, s: Scale) -> Tensor:
        small = torch.clamp(r, -s, s)  # type: ignore[arg-type]  # torch's types have no union here
        return small * (r - small / 2)

    return _apply("huber", rho, residual, scale, keep, weights, reduction)


def cauchy(
    residual: Tensor, *, scale: Scale = 1.0, keep: Each = None, weights: Each = None, reduction: Reduction = "mean"
) -> Tensor:
    """Return the Cauchy (Lorentzian) loss, scale^2 / 2 x log(1 + (r / scale)^2): outliers count less and less.

    Arguments, result and errors are those of `huber`.

    Gradient:
        r / (1 + (r / scale)^2); else as in `huber`.

    Examples:
        >>> gg.losses.cauchy(torch.tensor([0.0, 1.0]), reduction="none")
        tensor([0.0000, 0.3466])
    """
    return _apply("cauchy", lambda r, s: s**2 / 2 * _log1p_square(r / s), residual, scale, keep, weights, reduction)


def welsch(
    residual: Tensor, *, scale: Scale = 1.0, keep: Each = None, weights: Each = None, reduction: Reduction = "mean"
) -> Tensor:
    """Return the Welsch (Leclerc) loss, scale^2 / 2 x (1 - exp(-(r / scale)^2)): far outliers do not count at all.

    Arguments, result and errors are those of `huber`.

    Gradient:
        r x exp(-(r / scale)^2), 0 for an infinite residual; else as in `huber`.

    Examples:
        >>> gg.losses.welsch(torch.tensor([0.0, float("inf")]), reduction="none")
        tensor([0.0000, 0.5000])
    """
    return _apply(
        "welsch", lambda r, s: -(s**2) / 2 * _expm1(-_square(r / s)), residual, scale, keep, weights, reduction
    )


def geman_mcclure(
    residual: Tensor, *, scale: Scale = 1.0, keep: Each = None, weights: Each = None, reduction: Reduction = "mean"
) -> Tensor:
    """Return the Geman-McClure loss, r^2 / 2 / (1 + (r / scale)^2): bounded, with a soft shoulder.

    Arguments, result and errors are those of `huber`.

    Gradient:
        r / (1 + (r / scale)^2)^2, 0 for an infinite residual; else as in `huber`.

    Examples:
        >>> gg.losses.geman_mcclure(torch.tensor([1.0, float("inf")]), reduction="none")
        tensor([0.2500, 0.5000])
    """

    def rho(r: Tensor, s: Scale) -> Tensor:
        z = _square(r / s)
        small = z.detach()
        return s**2 / 2 * straight_through(small / (1 + small), 1 - 1 / (1 + z))

    return _apply("geman_mcclure", rho, residual, scale, keep, weights, reduction)


def tukey(
    residual: Tensor, *, scale: Scale = 1.0, keep: Each = None, weights: Each = None, reduction: Reduction = "mean"
) -> Tensor:
    """Return Tukey's biweight, scale^2 / 6 x (1 - (1 - (r / scale)^2)^3) up to the scale and constant beyond it.

    Arguments, result and errors are those of `huber`.

    Gradient:
        r x (1 - (r / scale)^2)^2 up to the scale, exactly 0 beyond; else as in `huber`.

    Examples:
        >>> gg.losses.tukey(torch.tensor([0.5, 100.0]), reduction="none")
        tensor([0.0964, 0.1667])
    """

    def rho(r: Tensor, s: Scale) -> Tensor:
        z = (r / s).clamp(-1, 1)
        size = z.detach()
        rest = straight_through((1 - size) * (1 + size), 1 - z**2)
        return s**2 / 6 * straight_through(size**2 * (3 - 3 * size**2 + size**4), 1 - rest**3)

    return _apply("tukey", rho, residual, scale, keep, weights, reduction)


def charbonnier(
    residual: Tensor, *, scale: Scale = 1.0, keep: Each = None, weights: Each = None, reduction: Reduction = "mean"
) -> Tensor:
    """Return the Charbonnier (pseudo-Huber, soft L1) loss, scale^2 x (sqrt(1 + (r / scale)^2) - 1).

    Arguments, result and errors are those of `huber`.

    Gradient:
        r / sqrt(1 + (r / scale)^2); else as in `huber`.

    Examples:
        >>> gg.losses.charbonnier(torch.tensor([0.0, 1.0]), reduction="none")
        tensor([0.0000, 0.4142])
    """

    def rho(r: Tensor, s: Scale) -> Tensor:
        root = torch.hypot(r / s, r.new_ones(()))
        size = (r / s).detach()
        return s**2 * straight_through(size * (size / (root.detach() + 1)), root - 1)

    return _apply("charbonnier", rho, residual, scale, keep, weights, reduction)


def barron(
    residual: Tensor,
    *,
    alpha: float | Tensor = 1.0,
    scale: Scale = 1.0,
    keep: Each = None,
    weights: Each = None,
    reduction: Reduction = "mean",
) -> Tensor:
    """Return Barron's general loss, whose shape is a number: the other losses are among its members, and it can learn.

    It is scale^2 x b / alpha x ((1 + (r / scale)^2 / b)^(alpha / 2) - 1) with b = |alpha - 2|. alpha = 2 is r^2 / 2,
    1 Charbonnier, 0 Cauchy (with scale x sqrt(2)), -2 Geman-McClure (with scale x 2), -inf Welsch (with scale x
    sqrt(2)); inf is refused. alpha is a number, or a tensor with finite values, which may learn. But this loss falls
    with alpha at every residual, so that a learned alpha runs away to -inf: `adaptive` holds it. The other arguments,
    result and errors are those of `huber`.

    Gradient:
        r x (1 + (r / scale)^2 / b)^(alpha / 2 - 1) to the residual, and the slope in alpha and scale to those; smooth
        through alpha = 0. At alpha = 2 the slope in alpha is infinite, so b is taken as at least 1e-3 there. Else as
        in `huber`.

    Examples:
        >>> r = torch.tensor([1.0, 2.0])
        >>> torch.allclose(gg.losses.barron(r, alpha=1.0), gg.losses.charbonnier(r))
        True
    """
    _check_alpha(alpha, residual, function="losses.barron")
    infinite = not isinstance(alpha, Tensor) and math.isinf(alpha)
    if infinite and alpha > 0:
        why = "the larger alpha, the less robust; without bound the loss is too."
        raise ArgumentValueError("losses.barron(): `alpha` is inf.", why=why, fix="alpha=2.0   # r**2 / 2")
    if infinite:
        return welsch(residual, scale=scale * math.sqrt(2), keep=keep, weights=weights, reduction=reduction)

    def rho(r: Tensor, s: Scale) -> Tensor:
        return s**2 * _general(r / s, torch.as_tensor(alpha, dtype=r.dtype, device=r.device))

    return _apply("barron", rho, residual, scale, keep, weights, reduction)


def adaptive(
    residual: Tensor,
    *,
    alpha: float | Tensor = 1.0,
    scale: Scale = 1.0,
    keep: Each = None,
    weights: Each = None,
    reduction: Reduction = "mean",
) -> Tensor:
    """Return Barron's adaptive loss, the negative log-likelihood of residuals: alpha and scale can learn.

    It is barron(residual, alpha, scale) / scale^2 + log(scale) + log Z(alpha), with Z the integral of exp(-loss) at the
    scale 1: sqrt(2 pi) for alpha = 2, pi sqrt(2) for 0. alpha is 0 (Cauchy) or more; 2 is a normal distribution. It is
    a number, or a tensor, which may learn, of one value or one for each channel: `2 * torch.sigmoid(parameter)`. A
    number beneath 0 or infinite is refused; a tensor gives NaN there, because the density has no integral. To learn the
    scale: `torch.nn.functional.softplus(parameter)`. The other arguments, result and errors are those of `huber`.

    Gradient:
        That of `barron` over scale^2 to the residual, and that of all three terms to alpha and scale. At alpha = 2 as
        in `barron`. Exactly 0 to what is left out, and nothing from it to alpha and scale.

    Examples:
        >>> normal = -torch.distributions.Normal(0.0, 3.0).log_prob(torch.tensor([1.0, 2.0])).mean()
        >>> torch.allclose(gg.losses.adaptive(torch.tensor([1.0, 2.0]), alpha=2.0, scale=3.0), normal, atol=1e-3)
        True
    """
    _check_alpha(alpha, residual, function="losses.adaptive")
    if not isinstance(alpha, Tensor) and not 0 <= alpha < math.inf:
        why = "beneath 0 the density has no integral, so that there is no likelihood."
        fix = "alpha=0.0   # Cauchy; losses.barron takes any alpha, as long as it does not learn"
        raise wrong_value(alpha, "alpha", "losses.adaptive", why, fix)

    def rho(r: Tensor, s: Scale) -> Tensor:
        shape = torch.as_tensor(alpha, dtype=r.dtype, device=r.device)
        logarithm = s.log() if isinstance(s, Tensor) else math.log(s)
        return _general(r / s, shape) + logarithm + _log_partition(shape)

    return _apply("adaptive", rho, residual, scale, keep, weights, reduction)


def _check_alpha(alpha: Any, residual: Any, *, function: str) -> None:
    if isinstance(alpha, Tensor):
        check_fits(alpha, check_tensor(residual, name="residual", function=function), name="alpha", function=function)
    elif not isinstance(alpha, Real):
        raise wrong_type(alpha, "alpha", function, "it is the shape of the loss, as a number.", "alpha=1.0")


def _general(r: Tensor, shape: Tensor) -> Tensor:
    """Return Barron's general loss at the scale 1."""
    b = (shape - 2).abs().clamp(min=1e-3)
    logarithm = _log1p_square(r / b.sqrt())
    t = shape / 2 * logarithm
    # (exp(t) - 1) / alpha, by its series where alpha or the residual is near 0.
    near = t.abs() < 1e-3
    series = logarithm / 2 * (1 + t / 2 * (1 + t / 3 * (1 + t / 4)))
    away = _expm1(torch.where(near, 1, t)) / torch.where(near, 1, shape)
    return b * torch.where(near, series, away)


def _log_partition(shape: Tensor) -> Tensor:
    """Return the logarithm of the integral of exp(-loss) over all residuals at the scale 1, for each alpha."""
    # x = sinh(pi / 2 sinh t) makes every tail between exp(-x^2) and 1 / x^2 fall twice exponentially, and the sum over
    # equal steps of t is then exact to the last digits. It is even in t.
    wide = shape.to(torch.float32 if shape.device.type == "mps" else torch.float64).unsqueeze(-1)
    t = torch.arange(_NODES + 1, dtype=wide.dtype, device=wide.device) * _STEP
    inner = math.pi / 2 * t.sinh()
    measure = (inner.cosh() * t.cosh()).log() + torch.where(t == 0, 0.5, 1).log() + math.log(math.pi * _STEP)
    nodes = inner.sinh()
    # What adds nothing must not be infinite either: 0 times that is what would come back to alpha.
    nothing = measure - _general(nodes, wide.detach()) < -80
    scores = measure - _general(torch.where(nothing, 0, nodes), wide)
    found = torch.logsumexp(torch.where(nothing, -math.inf, scores), -1)
    return torch.where(shape < 0, math.nan, found.to(shape.dtype))


_STEP, _NODES = 1 / 16, 66  # up to residuals of 1e20: beyond, 1 / x^2 has nothing to add


def robust_weights(loss: Callable[..., Tensor], residual: Tensor, *, scale: Scale = 1.0) -> Tensor:
    """Say how much a robust loss lets each residual count: its slope divided by the slope of r^2 / 2.

    Args:
        loss: One of the robust losses of this package, or any with the same arguments.
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
        why = "it is asked for its slope at each residual."
        raise wrong_type(loss, "loss", "losses.robust_weights", why, "losses.robust_weights(losses.cauchy, residual)")
    check_tensor(residual, name="residual", function="losses.robust_weights")
    with torch.enable_grad():
        dtype = residual.dtype if residual.is_floating_point() else torch.get_default_dtype()
        leaf = residual.detach().to(dtype, copy=True).requires_grad_()
        (slope,) = torch.autograd.grad(loss(leaf, scale=scale, reduction="sum"), leaf)
    return torch.where(residual == 0, 1, slope / torch.where(residual == 0, 1, residual.detach()))


# --- formulas that are exact near 0 and far out -----------------------------------------------------------------------
# Where no single formula is exact in both value and slope, straight_through combines the value of one with the slope of
# another.


def _square(z: Tensor) -> Tensor:
    """Square, with a slope of 0 where the square would be infinite."""
    limit = math.sqrt(torch.finfo(z.dtype).max)
    return z.clamp(-limit, limit) ** 2


def _log1p_square(z: Tensor) -> Tensor:
    """Return log(1 + z^2), also where the square would be infinite."""
    size, limit = z.detach().abs(), torch.finfo(z.dtype).max
    value = torch.where(size < math.sqrt(limit), torch.log1p(size**2), 2 * size.log())
    return straight_through(value, 2 * torch.hypot(z.clamp(-limit, limit), z.new_ones(())).log())


def _expm1(t: Tensor) -> Tensor:
    """Return exp(t) - 1 with the slope exp(t); that of torch.expm1 is (exp(t) - 1) + 1, which is noise far below 0."""
    return straight_through(torch.expm1(t.detach()), t.exp() - 1)


# --- what all of them do with a residual before and after their formula -----------------------------------------------


def _apply(
    name: str,
    rho: Callable[[Tensor, Any], Tensor],
    residual: Tensor,
    scale: Scale,
    keep: Each,
    weights: Each,
    reduction: Reduction,
) -> Tensor:
    """Apply a formula to residuals and reduce; what is left out is replaced by 0 before the formula sees it."""
    function = f"losses.{name}"
    if check_tensor(residual, name="residual", function=function).is_complex():
        why = "a residual has a size and a sign."
        raise wrong_type(residual, "residual", function, why, f"{function}(residual.abs())")
    if reduction not in get_args(Reduction):
        why = f"there are {listed(get_args(Reduction))}."
        raise wrong_value(reduction, "reduction", function, why, 'reduction="mean"')
    if isinstance(scale, Tensor):
        scale = check_fits(scale, residual, name="scale", function=function).to(wide_dtype(scale))
    elif not (isinstance(scale, Real) and scale > 0):
        why = "it is the size at which a residual counts as large."
        raise wrong_value(scale, "scale", function, why, "scale=1.0   # or 1.4826 * the median absolute residual")
    wide = residual.to(wide_dtype(residual))
    shares = shares_of(wide, keep, weights, function=function)
    kept = wide if shares is None else torch.where(shares != 0, wide, 0)
    result = reduced(rho(kept, scale), shares, reduction)
    return result.to(residual.dtype) if wide.dtype is not residual.dtype and residual.is_floating_point() else result


# --- which values lie too far out to learn from -----------------------------------------------------------------------


def inliers(x: Tensor, *, method: Method = "mad", threshold: float = 3.5, dim: Dim = None) -> Tensor:
    """Return which values are no outliers, as a `keep=` mask.

    Args:
        x: The values, of any real dtype.
        method: How far out is too far:
            "mad": more than `threshold` robust standard deviations from the median (1.4826 x the median absolute
            deviation; with a deviation of 0 only the median itself is in);
            "zscore": more than `threshold` standard deviations from the mean;
            "iqr": more than `threshold` interquartile ranges outside of the quartiles (1.5 is Tukey's fence);
            "quantile": outside of the central part, `threshold=0.95` keeps the central 95 %.
        threshold: As the method says.
        dim: The dimension or dimensions that are looked at together; None for all.

    Returns:
        A boolean mask of the shape of x, without gradient. NaN and infinities are never inliers and never count.

    Raises:
        ArgumentTypeError: x is complex.
        ArgumentValueError: The method is unknown, or the threshold makes no sense for it.

    Examples:
        >>> gg.losses.inliers(torch.tensor([1.0, 2.0, 3.0, 1000.0, float("nan")]))
        tensor([ True,  True,  True, False, False])
    """
    check_tensor(x, name="x", function="losses.inliers")
    if x.is_complex():
        raise wrong_type(x, "x", "losses.inliers", "complex numbers have no order.", "losses.inliers(x.abs())")
    _check_threshold(method, threshold)
    values = x.detach().to(wide_dtype(x))
    values = values.to(wide_dtype(values))  # the default dtype may be a half
    if values.numel() == 0:
        return torch.ones_like(values, dtype=torch.bool)
    if method == "mad":
        return _within_mad(values, threshold, dim)
    finite = torch.isfinite(values)
    if method == "zscore":
        mean = masked.mean(values, dim, keepdim=True, keep=finite)
        deviation = masked.std(values, dim, keepdim=True, keep=finite, correction=0)
        return ((values - mean).abs() <= threshold * deviation) & finite
    tail = 0.25 if method == "iqr" else (1 - threshold) / 2
    low, high = masked.quantile(values, [tail, 1 - tail], dim, keepdim=True, keep=finite)
    fence = threshold * (high - low) if method == "iqr" else 0
    inside: Tensor = (values >= low - fence) & (values <= high + fence)
    return inside & finite


def _within_mad(x: Tensor, threshold: float, dim: Dim) -> Tensor:
    # A sum is 20 times cheaper than asking each element; where it overflows, the elements are asked after all.
    all_finite = x.device.type == "cpu" and has_data(x) and math.isfinite(x.sum().item())
    finite = None if all_finite else torch.isfinite(x)
    deviation = (x - _middle(x, dim, finite)).abs_()
    spread = _middle(deviation, dim, finite)
    # Written as a product: with a spread of 0 the median itself is still in. Infinity is out, NaN compares as False.
    inside = deviation <= spread * (threshold * 1.4826022185056018)
    return inside if finite is None else inside & finite


def _middle(x: Tensor, dim: Dim, finite: Tensor | None) -> Tensor:
    """Return the median (of an even number the mean of the two in the middle) with the reduced dimensions kept."""
    if dim is not None or not _NUMPY or x.device.type != "cpu" or not has_data(x):
        return masked.median(x, dim, keepdim=True, keep=finite)
    # numpy's selection is vectorised: a fifth of the time of torch.median on ten million numbers.
    import numpy

    flat = (x if finite is None else x[finite]).reshape(-1).numpy()
    upper = len(flat) // 2
    if len(flat) == 0:
        value = numpy.nan
    else:
        parted = numpy.partition(flat, upper)
        value = parted[upper] if len(flat) % 2 else parted[:upper].max() / 2 + parted[upper] / 2
    return torch.full([1] * x.dim(), float(value), dtype=x.dtype, device=x.device)


def _check_threshold(method: object, threshold: float) -> None:
    if method not in get_args(Method):
        why = f"there are {listed(get_args(Method))}."
        raise wrong_value(method, "method", "losses.inliers", why, 'method="mad"')
    if not isinstance(threshold, (Real, Tensor)):
        why = "it says how far out is too far, as a number."
        raise wrong_type(threshold, "threshold", "losses.inliers", why, "threshold=3.5")
    if method == "quantile" and not 0 < threshold <= 1:
        what = f"losses.inliers(): `threshold` is {threshold} with method='quantile'."
        why = "there it is the part of the values to keep."
        fix = 'losses.inliers(x, method="quantile", threshold=0.95)   # the central 95 %'
        raise ArgumentValueError(what, why=why, fix=fix)
    if not threshold >= 0:
        why = "it is a distance from the middle."
        raise ArgumentValueError(f"losses.inliers(): `threshold` is {threshold}.", why=why, fix="threshold=3.5")


def trimmed(per_sample: Tensor, fraction: float) -> Tensor:
    """Average losses without the largest ones.

    Args:
        per_sample: The losses, of any shape; NaN counts as the largest of all.
        fraction: The part to leave out, from 0 up to but not including 1; rounded down to whole samples.

    Returns:
        The mean of the others, a 0-dim tensor; 0 for no losses at all. NaN if more are NaN than are left out.

    Raises:
        ArgumentTypeError: per_sample is not a real floating tensor.
        ArgumentValueError: The fraction is out of range.

    Gradient:
        1 / (number kept) to each loss kept, exactly 0 to those left out, also where they are NaN or infinite.

    Examples:
        >>> gg.losses.trimmed(torch.tensor([1.0, 2.0, 3.0, float("nan")]), 0.25)
        tensor(2.)
    """
    check_tensor(per_sample, name="per_sample", function="losses.trimmed")
    if not per_sample.is_floating_point():
        why = "losses are real numbers."
        fix = "losses.trimmed(per_sample.float(), fraction)"
        raise wrong_type(per_sample, "per_sample", "losses.trimmed", why, fix)
    fix = "losses.trimmed(per_sample, 0.1)   # without the largest 10 %"
    if not isinstance(fraction, (Real, Tensor)):
        why = "how many losses are left out is a number that the host knows."
        raise wrong_type(fraction, "fraction", "losses.trimmed", why, fix)
    if not 0 <= fraction < 1:
        why = "it is the part of the losses to leave out, and something has to be left."
        raise ArgumentValueError(f"losses.trimmed(): `fraction` is {fraction}.", why=why, fix=fix)
    flat = per_sample.reshape(-1)
    # 0.3 * 10 is 2.9999999999999996: what is meant is 3.
    left_out = int(fraction * flat.numel() + 1e-9)
    if flat.numel() == 0:
        return flat.sum()
    return flat.sort().values[: flat.numel() - left_out].mean()


def record_decisions(
    sink: Sink,
    *,
    keep: Tensor | None = None,
    weights: Tensor | None = None,
    per_sample: Tensor | None = None,
    ids: Sequence[object] | None = None,
    cause: str = "outlier",
    step: int | None = None,
    epoch: int | None = None,
    run: str | None = None,
) -> list[Incident]:
    """Write down which samples a mask left out and which ones weights made count less; it reads them on the host.

    Args:
        sink: Where the incidents go, such as a `gg.Ledger`.
        keep: One answer for each sample, `(n,)`; False is written down.
        weights: One number for each sample, `(n,)`; what is below 1 is written down, with how far.
        per_sample: The samples' losses, to be written beside.
        ids: The samples' names; their row numbers without it.
        cause: What to call it.
        step: The step of the run.
        epoch: The epoch.
        run: The run.

    Returns:
        The incidents, in the order of the rows.

    Raises:
        ArgumentValueError: Neither `keep` nor `weights` was given, or one argument is not one for each sample.

    Examples:
        >>> class Printer:
        ...     def record_many(self, incidents, payloads=None):
        ...         print(*(f"{i.sample_id}: {i.cause} {i.details}" for i in incidents))
        >>> keep = gg.losses.inliers(torch.tensor([1.0, 1.1, 0.9, 50.0]))
        >>> _ = gg.losses.record_decisions(Printer(), keep=keep, ids=["a", "b", "c", "d"])
        d: outlier {'weight': 0.0}
    """
    counts = _counts(keep, weights)
    losses = None
    if per_sample is not None:
        check_tensor(per_sample, name="per_sample", function="losses.record_decisions")
        losses = per_sample.detach().double().reshape(-1).tolist()
    for name, values in (("ids", ids), ("per_sample", losses)):
        if values is not None and len(values) != len(counts):
            what = f"losses.record_decisions(): `{name}` has {len(values)} entries for {len(counts)} samples."
            why = "a decision is written down for each sample, so there is one of them for each."
            fix = f"{name}={name}[:{len(counts)}]   # if the samples are the first ones"
            raise ArgumentValueError(what, why=why, fix=fix)
    incidents = [
        Incident(
            run=run,
            step=step,
            epoch=epoch,
            sample_id=str(row if ids is None else ids[row]),
            row=row,
            stage="loss",
            cause=cause if count == 0 else f"{cause}, counts less",
            message="left out of the loss" if count == 0 else f"counts {count:.3g} instead of 1",
            loss=None if losses is None else losses[row],
            details={"weight": count},
        )
        for row, count in enumerate(counts)
        if count < 1
    ]
    if incidents:
        sink.record_many(incidents)
    return incidents


def _counts(keep: Tensor | None, weights: Tensor | None) -> list[float]:
    given = {name: value for name, value in (("keep", keep), ("weights", weights)) if value is not None}
    if not given:
        why = "one of them says what was decided."
        fix = "losses.record_decisions(ledger, keep=losses.inliers(per_sample), ids=ids)"
        raise ArgumentValueError("losses.record_decisions(): neither `keep` nor `weights` was given.", why=why, fix=fix)
    counts = torch.ones(())
    for name, value in given.items():
        check_tensor(value, name=name, function="losses.record_decisions")
        if value.dim() != 1 or (counts.dim() and len(value) != len(counts)):
            what = f"losses.record_decisions(): `{name}` has shape {tuple(value.shape)}."
            why = "a decision is written down for each sample, so there is one number for each."
            fix = f"{name}={name}.flatten(1).all(1)   # a sample takes part if all of it does"
            raise ArgumentValueError(what, why=why, fix=fix)
        counts = counts * value.detach().double().cpu()
    return counts.tolist()
