"""What a loss decided - which samples were left out or count less, and how far - as incidents for a ledger."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from gradgate._checks import check_tensor
from gradgate.errors import ArgumentValueError
from gradgate.records import Incident, Sink


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
    """Write down which samples a mask left out and which ones weights made count less.

    This looks at the data on the host; call it where that may be.

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
    _check_length(ids, len(counts), "ids")
    if per_sample is not None:
        check_tensor(per_sample, name="per_sample", function="losses.record_decisions")
        _check_length(per_sample.reshape(-1), len(counts), "per_sample")
    losses = None if per_sample is None else per_sample.detach().double().reshape(-1).tolist()
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


def _check_length(values: Sequence[object] | torch.Tensor | None, count: int, name: str) -> None:
    if values is not None and len(values) != count:
        raise ArgumentValueError(
            f"losses.record_decisions(): `{name}` has {len(values)} entries for {count} samples.",
            why="a decision is written down for each sample, so there is one of them for each.",
            fix=f"{name}={name}[:{count}]   # if the samples are the first ones",
        )


def _counts(keep: torch.Tensor | None, weights: torch.Tensor | None) -> list[float]:
    given = [value for value in (keep, weights) if value is not None]
    if not given:
        raise ArgumentValueError(
            "losses.record_decisions(): neither `keep` nor `weights` was given.",
            why="one of them says what was decided.",
            fix="losses.record_decisions(ledger, keep=losses.inliers(per_sample), ids=ids)",
        )
    counts = torch.ones(())
    for name, value in (("keep", keep), ("weights", weights)):
        if value is None:
            continue
        check_tensor(value, name=name, function="losses.record_decisions")
        if value.dim() != 1 or len(value) != len(given[0]):
            raise ArgumentValueError(
                f"losses.record_decisions(): `{name}` has shape {tuple(value.shape)}.",
                why="a decision is written down for each sample, so there is one number for each.",
                fix=f"{name}={name}.flatten(1).all(1)   # a sample takes part if all of it does",
            )
        counts = counts * value.detach().double().cpu()
    return [float(count) for count in counts.tolist()]
