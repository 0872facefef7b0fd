"""A recorded sample under the doctor: not only that it fails, but where the fault is born."""

from __future__ import annotations

import os

import torch

from gradgate._snapshot import restored
from gradgate.doctor import Diagnosis, diagnose
from gradgate.ledger import Ledger
from gradgate.replaying._stored import read_sample, stored
from gradgate.replaying._trial import LossFunction, twice

__all__ = ["examine"]


def examine(
    ledger: Ledger | str | os.PathLike[str],
    incident_id: str,
    loss_fn: LossFunction,
    *,
    model: torch.nn.Module | None = None,
    rows: int = 1,
    batch_dim: int = 0,
) -> Diagnosis:
    """Run one recorded sample under the tracer, and let the doctor say what it sees.

    Args:
        ledger: The ledger, or its path.
        incident_id: The incident, or the beginning of its id.
        loss_fn: The function that failed.
        model: The model, for names, and for the weights of that step if they were stored.
        rows: How often the sample is in the batch, as `Replay.rows` says.
        batch_dim: Which dimension of the sample's tensors counts the samples.

    Returns:
        The diagnosis.

    Raises:
        NothingMatchedError: There is no such incident.
        LedgerError: Its sample was not stored, or not whole.

    Examples:
        >>> import tempfile
        >>> folder = tempfile.mkdtemp()
        >>> ledger = gg.Ledger(folder + "/run.ledger", payload=True)
        >>> model = torch.nn.Linear(2, 1)
        >>> def loss_fn(batch):
        ...     return model(batch).mean()
        >>> batch = torch.tensor([[1.0, 2.0], [float("nan"), 0.0]])
        >>> result = gg.Guard(model, ledger=ledger, payload=True).backward(batch, loss_fn)
        >>> gg.replaying.examine(ledger, result.dropped[0].id, loss_fn, model=model).findings[0].title
        'the tensor sample holds NaN before `model(batch)` reads it'
    """
    _, data, state = stored(ledger, incident_id)
    sample = read_sample(data, loss_fn)
    if rows > 1:
        sample = twice(sample, batch_dim)
    with restored(state, model):
        return diagnose(lambda: loss_fn(sample).mean(), model=model)
