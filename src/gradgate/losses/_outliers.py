"""Which values lie too far out to learn from: inliers and trimmed."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from numbers import Real
from typing import Literal, TypeAlias

import torch

from gradgate import masked
from gradgate._checks import check_tensor, wrong_type, wrong_value
from gradgate._names import listed
from gradgate._torch_private import has_data
from gradgate.errors import ArgumentValueError

_NUMPY = find_spec("numpy") is not None

Method: TypeAlias = Literal["mad", "zscore", "iqr", "quantile"]
Dim: TypeAlias = int | Sequence[int] | None


def inliers(x: torch.Tensor, *, method: Method = "mad", threshold: float = 3.5, dim: Dim = None) -> torch.Tensor:
    """Say which values are no outliers, as a `keep=` mask.

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
        A boolean mask of the shape of x, without gradient. NaN and infinities are never inliers, and do not count when
        the middle and the spread are computed.

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
    values = x.detach()
    if not values.is_floating_point():
        values = values.to(torch.get_default_dtype())
    if values.dtype in (torch.float16, torch.bfloat16):
        values = values.float()
    if values.numel() == 0:
        return torch.ones_like(values, dtype=torch.bool)
    return _METHODS[method](values, threshold, dim)


def _mad(x: torch.Tensor, threshold: float, dim: Dim) -> torch.Tensor:
    finite = _finite_or_none(x)
    deviation = (x - _middle(x, dim, finite)).abs_()
    spread = _middle(deviation, dim, finite)
    # Written as a product: with a spread of 0 the median itself is still in. Infinity is out, NaN compares as False.
    inside = deviation <= spread * (threshold * 1.4826022185056018)
    return inside if finite is None else inside & finite


def _zscore(x: torch.Tensor, threshold: float, dim: Dim) -> torch.Tensor:
    finite = torch.isfinite(x)
    mean = masked.mean(x, dim, keepdim=True, keep=finite)
    deviation = masked.std(x, dim, keepdim=True, keep=finite, correction=0)
    return ((x - mean).abs() <= threshold * deviation) & finite


def _iqr(x: torch.Tensor, threshold: float, dim: Dim) -> torch.Tensor:
    finite = torch.isfinite(x)
    low, high = masked.quantile(x, [0.25, 0.75], dim, keepdim=True, keep=finite)
    fence = threshold * (high - low)
    inside: torch.Tensor = (x >= low - fence) & (x <= high + fence)
    return inside & finite


def _quantile(x: torch.Tensor, threshold: float, dim: Dim) -> torch.Tensor:
    finite = torch.isfinite(x)
    tail = (1 - threshold) / 2
    low, high = masked.quantile(x, [tail, 1 - tail], dim, keepdim=True, keep=finite)
    inside: torch.Tensor = (x >= low) & (x <= high)
    return inside & finite


_METHODS: dict[str, Callable[[torch.Tensor, float, Dim], torch.Tensor]] = {
    "mad": _mad,
    "zscore": _zscore,
    "iqr": _iqr,
    "quantile": _quantile,
}


def _finite_or_none(x: torch.Tensor) -> torch.Tensor | None:
    """Give the mask of the finite values, or None where the host can see that all of them are."""
    # A sum is 20 times cheaper than asking each element; where it overflows, the elements are asked after all.
    if x.device.type == "cpu" and has_data(x) and math.isfinite(x.sum().item()):
        return None
    return torch.isfinite(x)


def _check_threshold(method: object, threshold: float) -> None:
    if not isinstance(method, str) or method not in _METHODS:
        raise wrong_value(method, "method", "losses.inliers", f"there are {listed(list(_METHODS))}.", 'method="mad"')
    if not _is_number(threshold):
        why = "it says how far out is too far, as a number."
        raise wrong_type(threshold, "threshold", "losses.inliers", why, "threshold=3.5")
    if method == "quantile" and not 0 < threshold <= 1:
        raise ArgumentValueError(
            f"losses.inliers(): `threshold` is {threshold} with method='quantile'.",
            why="there it is the part of the values to keep.",
            fix='losses.inliers(x, method="quantile", threshold=0.95)   # the central 95 %',
        )
    if not threshold >= 0:
        raise ArgumentValueError(
            f"losses.inliers(): `threshold` is {threshold}.",
            why="it is a distance from the middle.",
            fix="threshold=3.5",
        )


def _is_number(value: object) -> bool:
    return isinstance(value, (Real, torch.Tensor))


def trimmed(per_sample: torch.Tensor, fraction: float) -> torch.Tensor:
    """Average losses without the largest ones.

    Args:
        per_sample: The losses, of any shape; NaN counts as the largest of all.
        fraction: The part to leave out, from 0 up to but not including 1; rounded down to whole samples.

    Returns:
        The mean of the others, a 0-dim tensor; 0 for no losses at all. NaN only if more of them are NaN than are
        left out.

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
    if not _is_number(fraction):
        why = "how many losses are left out is a number that the host knows."
        fix = "losses.trimmed(per_sample, 0.1)   # without the largest 10 %"
        raise wrong_type(fraction, "fraction", "losses.trimmed", why, fix)
    if not 0 <= fraction < 1:
        raise ArgumentValueError(
            f"losses.trimmed(): `fraction` is {fraction}.",
            why="it is the part of the losses to leave out, and something has to be left.",
            fix="losses.trimmed(per_sample, 0.1)   # without the largest 10 %",
        )
    flat = per_sample.reshape(-1)
    # 0.3 * 10 is 2.9999999999999996: what is meant is 3.
    left_out = int(fraction * flat.numel() + 1e-9)
    if flat.numel() == 0:
        return flat.sum()
    return flat.sort().values[: flat.numel() - left_out].mean()


def _middle(x: torch.Tensor, dim: int | Sequence[int] | None, finite: torch.Tensor | None) -> torch.Tensor:
    """Give the median (of an even number the mean of the two in the middle) with the reduced dimensions kept."""
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
