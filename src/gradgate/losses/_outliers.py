"""Which values lie too far out to learn from: inliers and trimmed, and a record of what was left out."""

from __future__ import annotations

import math
from collections.abc import Sequence
from importlib.util import find_spec
from numbers import Real
from typing import Literal, TypeAlias, get_args

import torch

from gradgate import masked
from gradgate._checks import check_tensor, wrong_type, wrong_value
from gradgate._names import listed
from gradgate._torch_private import has_data
from gradgate.errors import ArgumentValueError
from gradgate.losses._denominator import wide_dtype
from gradgate.records import Incident, Sink

_NUMPY = find_spec("numpy") is not None

Method: TypeAlias = Literal["mad", "zscore", "iqr", "quantile"]
Dim: TypeAlias = int | Sequence[int] | None


def inliers(x: torch.Tensor, *, method: Method = "mad", threshold: float = 3.5, dim: Dim = None) -> torch.Tensor:
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
    inside: torch.Tensor = (values >= low - fence) & (values <= high + fence)
    return inside & finite


def _within_mad(x: torch.Tensor, threshold: float, dim: Dim) -> torch.Tensor:
    # A sum is 20 times cheaper than asking each element; where it overflows, the elements are asked after all.
    all_finite = x.device.type == "cpu" and has_data(x) and math.isfinite(x.sum().item())
    finite = None if all_finite else torch.isfinite(x)
    deviation = (x - _middle(x, dim, finite)).abs_()
    spread = _middle(deviation, dim, finite)
    # Written as a product: with a spread of 0 the median itself is still in. Infinity is out, NaN compares as False.
    inside = deviation <= spread * (threshold * 1.4826022185056018)
    return inside if finite is None else inside & finite


def _middle(x: torch.Tensor, dim: Dim, finite: torch.Tensor | None) -> torch.Tensor:
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
    if not isinstance(threshold, (Real, torch.Tensor)):
        why = "it says how far out is too far, as a number."
        raise wrong_type(threshold, "threshold", "losses.inliers", why, "threshold=3.5")
    if method == "quantile" and not 0 < threshold <= 1:
        raise ArgumentValueError(
            f"losses.inliers(): `threshold` is {threshold} with method='quantile'.",
            why="there it is the part of the values to keep.",
            fix='losses.inliers(x, method="quantile", threshold=0.95)   # the central 95 %',
        )
    if not threshold >= 0:
        why = "it is a distance from the middle."
        raise ArgumentValueError(f"losses.inliers(): `threshold` is {threshold}.", why=why, fix="threshold=3.5")


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
    fix = "losses.trimmed(per_sample, 0.1)   # without the largest 10 %"
    if not isinstance(fraction, (Real, torch.Tensor)):
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
    keep: torch.Tensor | None = None,
    weights: torch.Tensor | None = None,
    per_sample: torch.Tensor | None = None,
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
        ArgumentValueError: Neither `keep` nor `weights` was given, or there is not one of them, of the losses or of
            the ids for each sample.

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
            raise ArgumentValueError(
                f"losses.record_decisions(): `{name}` has {len(values)} entries for {len(counts)} samples.",
                why="a decision is written down for each sample, so there is one of them for each.",
                fix=f"{name}={name}[:{len(counts)}]   # if the samples are the first ones",
            )
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


def _counts(keep: torch.Tensor | None, weights: torch.Tensor | None) -> list[float]:
    given = {name: value for name, value in (("keep", keep), ("weights", weights)) if value is not None}
    if not given:
        raise ArgumentValueError(
            "losses.record_decisions(): neither `keep` nor `weights` was given.",
            why="one of them says what was decided.",
            fix="losses.record_decisions(ledger, keep=losses.inliers(per_sample), ids=ids)",
        )
    counts = torch.ones(())
    for name, value in given.items():
        check_tensor(value, name=name, function="losses.record_decisions")
        if value.dim() != 1 or (counts.dim() and len(value) != len(counts)):
            raise ArgumentValueError(
                f"losses.record_decisions(): `{name}` has shape {tuple(value.shape)}.",
                why="a decision is written down for each sample, so there is one number for each.",
                fix=f"{name}={name}.flatten(1).all(1)   # a sample takes part if all of it does",
            )
        counts = counts * value.detach().double().cpu()
    return counts.tolist()
