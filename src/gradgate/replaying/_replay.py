"""A recorded sample once more: does the fault come again?"""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch

from gradgate._names import describe
from gradgate._snapshot import restored
from gradgate._text import visible
from gradgate.errors import ArgumentTypeError
from gradgate.ledger import Ledger
from gradgate.records import Incident
from gradgate.replaying._stored import read_sample, stored
from gradgate.replaying._trial import Fault, LossFunction, find_fault

__all__ = ["Replay", "Verdict", "replay"]

Verdict = Literal["same", "another", "passes"]

_SENTENCES = {
    "same": "The same fault came again.",
    "another": "It still fails, but with another fault.",
    "passes": "It no longer fails.",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Replay:
    """What came of a replay; printed, it tells the story.

    Attributes:
        incident: What was recorded.
        verdict: "same", "another" or "passes".
        fault: What went wrong this time.
        rows: How often the sample was in the batch: 2 if it cannot run alone.
        snapshot: Whether the weights and the random state of that step were in force.
        snapshot_stored: Whether the ledger holds them.
    """

    incident: Incident
    verdict: Verdict
    fault: Fault | None
    rows: int
    snapshot: bool
    snapshot_stored: bool = False

    @property
    def fails(self) -> bool:
        """Whether something is still wrong."""
        return self.fault is not None

    def to_dict(self) -> dict[str, Any]:
        """Give the result as values that JSON can hold.

        Returns:
            The verdict, the incident's id and the fault.
        """
        names = ("cause", "stage", "exception_type", "message", "where")
        fault = None if self.fault is None else {name: getattr(self.fault, name) for name in names}
        return {
            "incident": self.incident.id,
            "verdict": self.verdict,
            "fault": fault,
            "rows": self.rows,
            "snapshot": self.snapshot,
            "snapshot_stored": self.snapshot_stored,
        }

    def __str__(self) -> str:
        then = self.incident
        recorded = f"{then.exception_type}: {then.message}" if then.exception_type else then.message or then.cause
        step = "" if then.step is None else f" at step {then.step}"
        lines = [
            f"Sample {then.sample_id!r} failed in {then.stage}{step}.",
            f"  then: {recorded}{f'   ({then.where})' if then.where else ''}",
            f"  now:  {self.fault or 'nothing'}",
            _SENTENCES[self.verdict],
        ]
        if self.rows > 1:
            lines.append("It was given twice in one batch, because alone it fails in another way (batch statistics).")
        if not self.snapshot and self.snapshot_stored:
            lines.append("The random state was that of that step, but the weights were those that loss_fn has now.")
            lines.append("The weights of that step are in the ledger; they need the model to go to: model=model.")
        elif not self.snapshot:
            lines.append("The weights were those that loss_fn has now; those of that step were not stored.")
        return visible("\n".join(lines), lines=True)


def replay(
    ledger: Ledger | str | os.PathLike[str],
    incident_id: str,
    loss_fn: LossFunction,
    *,
    model: torch.nn.Module | None = None,
    batch_dim: int = 0,
) -> Replay:
    """Run one recorded sample again, forward and backward, and say whether its fault came again.

    No `.grad` is touched, and the random state is put back; with `model`, so are its weights and buffers.

    Args:
        ledger: The ledger, or its path.
        incident_id: The incident, or the beginning of its id.
        loss_fn: The function that failed: loss_fn(batch) -> a mean loss, or one loss per sample.
        model: The model, to have the weights and buffers of that step if they were stored (`snapshot=True`).
        batch_dim: Which dimension of the sample's tensors counts the samples.

    Returns:
        What was, what is, and whether it is the same.

    Raises:
        NothingMatchedError: There is no such incident.
        LedgerError: Its sample was not stored, or not whole.
        ArgumentTypeError: loss_fn cannot be called, or gives no tensor.

    Examples:
        >>> import tempfile
        >>> ledger = gg.Ledger(tempfile.mkdtemp() + "/run.ledger", payload=True)
        >>> model = torch.nn.Linear(2, 1)
        >>> def loss_fn(batch):
        ...     return model(batch).log().mean()
        >>> guard = gg.Guard(model, ledger=ledger, payload=True)
        >>> batch = torch.stack([torch.ones(2) * model.weight[0].detach(), torch.full((2,), float("nan"))])
        >>> result = guard.backward(batch * 10 + model.bias.abs().item(), loss_fn, ids=["good", "bad"])
        >>> gg.replay(ledger, result.dropped[0].id, loss_fn).verdict
        'same'
        >>> gg.replay(ledger, result.dropped[0].id, lambda batch: model(batch.nan_to_num()).mean()).verdict
        'passes'
    """
    if not callable(loss_fn):
        raise ArgumentTypeError(
            f"replay(): `loss_fn` is {describe(loss_fn)}.",
            why="it is the function that the guard was given.",
            fix="gg.replay(ledger, incident_id, loss_fn)",
        )
    incident, data, state = stored(ledger, incident_id)

    def is_the_recorded_one(fault: Fault) -> bool:
        return _same(fault, incident)

    with restored(state, model):
        again = partial(read_sample, data, loss_fn)
        fault, rows = find_fault(again, loss_fn, expected=is_the_recorded_one, model=model, batch_dim=batch_dim)
    verdict: Verdict = "passes" if fault is None else "same" if _same(fault, incident) else "another"
    used = state is not None and model is not None
    return Replay(
        incident=incident, verdict=verdict, fault=fault, rows=rows, snapshot=used, snapshot_stored=state is not None
    )


def _same(fault: Fault, incident: Incident) -> bool:
    """Tell whether a fault is the recorded one: of the same class, and at the same place or with the same words."""
    if incident.exception_type is not None or fault.exception_type is not None:
        words = incident.message.split("... (")[0]
        return fault.exception_type == incident.exception_type and (
            fault.where == incident.where or (bool(words) and fault.message.startswith(words))
        )
    cause = incident.details.get("fault") if incident.cause == "together" else incident.cause
    return fault.cause == cause
