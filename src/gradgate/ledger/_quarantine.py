"""Which samples are known to be bad, and what was decided about them.

A sample is bad while it has incidents that are not transient and that came after its last release. What was decided -
to release it, to leave it out of an epoch, to try it again - is written down like the incidents themselves.
"""

from __future__ import annotations

import sqlite3
import time
import uuid
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from types import NoneType
from typing import Any, Literal

from gradgate.ledger._rows import MESSAGE_LIMIT, as_text, check_kinds

__all__ = ["Decision", "Kind", "bad_samples", "decide", "read_decisions", "write_decisions"]

Kind = Literal["release", "skip", "retry"]

_NAMES = ("id", "kind", "sample_id", "run", "epoch", "time", "reason")


@dataclass(frozen=True, kw_only=True, slots=True)
class Decision:
    """What was decided about a sample.

    Attributes:
        id: The decision's own name; the same decision taken on several ranks has one.
        kind: "release" (it counts as good again), "skip" (left out of an epoch) or "retry" (given another chance).
        sample_id: The sample.
        run: The run in which it was decided.
        epoch: The epoch, for "skip" and "retry".
        time: Seconds since the epoch of the clock.
        reason: Why.
    """

    id: str
    kind: Kind
    sample_id: str
    run: str | None
    epoch: int | None
    time: float
    reason: str

    def to_dict(self) -> dict[str, Any]:
        """Give the record as a plain dictionary.

        Returns:
            One entry for each attribute.
        """
        return asdict(self)


def bad_samples(connection: sqlite3.Connection, cause: str | None = None) -> dict[str, tuple[int, int | None]]:
    """Find the samples with incidents that count.

    Args:
        connection: The open file.
        cause: Only incidents of this cause.

    Returns:
        For each sample how often it failed, and the last epoch in which it did, where that is known.
    """
    condition, values = ("AND cause = ?", [as_text(cause)]) if cause is not None else ("", [])
    failed = (
        f"SELECT sample_id, count(*), max(epoch) FROM incident WHERE transient = 0 AND sample_id {{}} {condition} {{}}"
    )
    rows = connection.execute(failed.format("IS NOT NULL", "GROUP BY sample_id"), values)
    found = {sample: (count, epoch) for sample, count, epoch in rows}
    for sample, (_, epoch) in found.items():
        if type(sample) is not str or type(epoch) not in (int, NoneType):
            check_kinds({"sample_id": sample, "epoch": epoch}, _KINDS, "an incident")
    # Releases are few: those samples are counted again, by themselves; asking in the first question doubles its time.
    releases = connection.execute("SELECT sample_id, max(time) FROM decision WHERE kind = 'release' GROUP BY sample_id")
    for sample, released in releases.fetchall():
        row = connection.execute(failed.format("= ?", "AND time > ?"), [sample, *values, released]).fetchone()
        found.pop(sample, None)
        if row[1]:
            found[sample] = row[1:]
    return found


def decide(kind: Kind, sample_id: str, run: str, epoch: int | None = None, reason: str = "") -> Decision:
    """Make a decision; the same skip or retry, taken on several ranks, has one id.

    Args:
        kind: What was decided.
        sample_id: About which sample.
        run: In which run.
        epoch: In which epoch.
        reason: Why.

    Returns:
        The decision, of now.
    """
    name = uuid.uuid4().hex if kind == "release" else f"{kind}:{run}:{epoch}:{sample_id}"
    reason = as_text(reason, MESSAGE_LIMIT)
    return Decision(id=name, kind=kind, sample_id=sample_id, run=run, epoch=epoch, time=time.time(), reason=reason)


def write_decisions(connection: sqlite3.Connection, decisions: Iterable[Decision]) -> None:
    """Write down what was decided; what is there already is left as it is.

    Args:
        connection: In a transaction.
        decisions: The decisions.
    """
    connection.executemany(
        f"INSERT OR IGNORE INTO decision ({', '.join(_NAMES)}) VALUES ({', '.join('?' * len(_NAMES))})",
        [tuple(getattr(decision, name) for name in _NAMES) for decision in decisions],
    )


def read_decisions(connection: sqlite3.Connection, sample_id: object = None) -> list[Decision]:
    """Read what was decided, in the order of time.

    Args:
        connection: The open file.
        sample_id: Only about this sample.

    Returns:
        The decisions.
    """
    rows = connection.execute(
        f"SELECT {', '.join(_NAMES)} FROM decision WHERE (?1 IS NULL OR sample_id = ?1) ORDER BY time, id",
        (None if sample_id is None else as_text(sample_id),),
    )
    found = [dict(zip(_NAMES, row, strict=True)) for row in rows]
    for values in found:
        check_kinds(values, _KINDS, "a decision")
    return [Decision(**values) for values in found]


_KINDS: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(("id", "kind", "sample_id", "reason"), (str,)),
    "run": (str, NoneType),
    "epoch": (int, NoneType),
    "time": (int, float),
}
