"""How many incidents of which kind: everything counted in one pass over one index."""

from __future__ import annotations

import sqlite3
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from gradgate.ledger._filters import where
from gradgate.ledger._rows import check_kinds

__all__ = ["Stats", "count_incidents"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Stats:
    """What there is in a ledger, counted.

    Attributes:
        incidents: How many incidents.
        transient: How many of them did not come again under the same state.
        samples: How many different samples.
        first: The time of the first one.
        last: The time of the last one.
        by_run: How many in each run, most first; likewise the next three.
        by_stage: How many in each stage.
        by_cause: How many of each cause.
        by_exception: How many of each class of exception.
        worst: The samples with most incidents, and how many those are.
    """

    incidents: int = 0
    transient: int = 0
    samples: int = 0
    first: float | None = None
    last: float | None = None
    by_run: dict[str, int] = field(default_factory=dict)
    by_stage: dict[str, int] = field(default_factory=dict)
    by_cause: dict[str, int] = field(default_factory=dict)
    by_exception: dict[str, int] = field(default_factory=dict)
    worst: dict[str, int] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Give the record as a plain dictionary.

        Returns:
            One entry for each attribute.
        """
        return asdict(self)


def count_incidents(connection: sqlite3.Connection, filters: Mapping[str, Any], worst: int = 10) -> Stats:
    """Count.

    Args:
        connection: The open file.
        filters: Which incidents.
        worst: How many of the worst samples to name.

    Returns:
        The counts.
    """
    condition, values = where(filters, by_index=filters.get("sample_id") is not None)
    groups = connection.execute(
        "SELECT run, stage, cause, exception_type, transient, count(*), min(time), max(time) FROM incident "
        f"WHERE {condition} GROUP BY run, stage, cause, exception_type, transient",
        values,
    ).fetchall()
    samples = connection.execute(
        "SELECT sample_id, count(*), count(*) OVER () FROM incident "
        f"WHERE sample_id IS NOT NULL AND {condition} GROUP BY sample_id ORDER BY count(*) DESC, sample_id LIMIT ?",
        [*values, worst],
    ).fetchall()
    counts = [Counter[str]() for _ in range(4)]
    for group in groups:
        check_kinds({"first": group[6], "last": group[7]}, {"first": (int, float), "last": (int, float)}, "incidents")
        for counter, name in zip(counts, group[:4], strict=True):
            if name is not None:
                counter[str(name)] += group[5]
    by_run, by_stage, by_cause, by_exception = (dict(counter.most_common()) for counter in counts)
    return Stats(
        incidents=sum(group[5] for group in groups),
        transient=sum(group[5] for group in groups if group[4]),
        samples=samples[0][2] if samples else 0,
        first=min((group[6] for group in groups), default=None),
        last=max((group[7] for group in groups), default=None),
        by_run=by_run,
        by_stage=by_stage,
        by_cause=by_cause,
        by_exception=by_exception,
        worst={str(sample): count for sample, count, _ in samples},
    )
