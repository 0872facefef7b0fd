"""What a ledger keeps of an incident: the sample, and the state in which it was bad."""

from __future__ import annotations

import inspect
import os
from dataclasses import is_dataclass
from functools import partial
from typing import Any

from gradgate._payload import decode, missing_in
from gradgate.errors import LedgerError
from gradgate.ledger import Ledger
from gradgate.records import Incident
from gradgate.replaying._trial import LossFunction

__all__ = ["read_sample", "stored"]


def stored(ledger: Ledger | str | os.PathLike[str], incident_id: str) -> tuple[Incident, bytes, bytes | None]:
    """Fetch an incident and what was stored with it.

    Args:
        ledger: The ledger, or its path; that is opened for reading only.
        incident_id: The incident's id.

    Returns:
        The incident, the bytes of its sample, and those of the weights and the random state if they were kept.

    Raises:
        NothingMatchedError: There is no such incident.
        LedgerError: Its sample was not stored.
    """
    book = ledger if isinstance(ledger, Ledger) else Ledger(ledger, read_only=True)
    incident = book.incident(incident_id)
    data = book.payload_of(incident.id)
    if data is not None:
        return incident, data, book.snapshot_of(incident.id)
    reason = incident.details.get("not_stored")
    loading = incident.stage == "load"
    raise LedgerError(
        f"the sample of incident {incident.id} was not stored{f': {reason}' if reason else ''}.",
        why="it failed while it was loaded, so there was no sample to keep."
        if loading
        else "values of samples are kept only where that was asked for.",
        fix=f"dataset[{incident.sample_id}]   # load it again"
        if loading
        else 'gg.Guard(model, ledger="run.ledger", payload=True)   # for the next run',
    )


def read_sample(data: bytes, loss_fn: LossFunction) -> Any:
    """Read a stored sample, with the named tuples and dataclasses that the module of loss_fn knows.

    Args:
        data: The stored bytes.
        loss_fn: The function that will take it.

    Returns:
        The sample.

    Raises:
        LedgerError: It was not stored whole.
    """
    sample = decode(data, classes=_classes(loss_fn))
    missing = missing_in(sample)
    if missing:
        raise LedgerError(
            f"the sample was not stored whole; missing: {', '.join(missing[:5])}.",
            why="only tensors, numbers, text and trees of them are stored, up to a limit.",
            fix='gg.Ledger("run.ledger", payload=True, payload_limit=2**28)   # if it was too large',
        )
    return sample


def _classes(loss_fn: LossFunction) -> list[type]:
    function: Any = inspect.unwrap(loss_fn)
    while isinstance(function, partial):
        function = function.func
    function = getattr(function, "__func__", function)
    known = getattr(function, "__globals__", None)
    if known is None:
        known = getattr(getattr(type(function), "__call__", None), "__globals__", {})  # noqa: B004 - the function
    return [
        thing
        for thing in known.values()
        if isinstance(thing, type) and (is_dataclass(thing) or (issubclass(thing, tuple) and hasattr(thing, "_fields")))
    ]
