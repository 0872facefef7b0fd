"""The losses of samples over the epochs: which are hard, and which may be labelled wrongly.

Of each sample the last losses are kept, in half precision, in a table that is made when the first one is written.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from gradgate.ledger._file import Connection
from gradgate.ledger._rows import check_kinds, name_text
from gradgate.ledger._schema import HISTORY

KEPT = 32
"""How many losses of a sample are kept, the last ones."""
_LARGEST = 65504.0
_ENOUGH = 4
_RECENT = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleHistory:
    """The losses of one sample.

    Attributes:
        sample_id: The sample.
        losses: Its last losses, at most 32, the oldest first, in half precision.
    """

    sample_id: str
    losses: tuple[float, ...]

    @property
    def recent(self) -> float:
        """The median of the last three losses."""
        return median(self.losses[-_RECENT:])

    def to_dict(self) -> dict[str, Any]:
        """Give the record as a plain dictionary.

        Returns:
            One entry for each attribute.
        """
        return asdict(self)


def write_losses(connection: Connection, losses: Iterable[tuple[object, float]]) -> None:
    """Add losses of samples in the order of time; what is not finite has an incident, and is passed over."""
    new: dict[str, list[float]] = {}
    for sample, loss in losses:
        if sample is not None and math.isfinite(loss):
            new.setdefault(name_text(sample), []).append(max(min(loss, _LARGEST), -_LARGEST))
    if not new:
        return
    if not _is_there(connection):
        connection.execute(HISTORY)
    connection.executemany(
        "INSERT INTO history (sample_id, losses) VALUES (?, ?) ON CONFLICT (sample_id) "
        f"DO UPDATE SET losses = substr(CAST(losses || excluded.losses AS BLOB), -{2 * KEPT})",
        [(name, struct.pack(f"<{len(added[-KEPT:])}e", *added[-KEPT:])) for name, added in new.items()],
    )


def read_histories(connection: Connection) -> list[SampleHistory]:
    """Give the losses of all samples."""
    if not _is_there(connection):
        return []
    histories = []
    for name, packed in connection.rows("SELECT sample_id, losses FROM history ORDER BY sample_id"):
        check_kinds({"sample_id": name}, {"sample_id": (str,)}, "a history")
        if losses := _unpacked(packed):
            histories.append(SampleHistory(sample_id=name, losses=losses))
    return histories


def merge_histories(histories: Iterable[SampleHistory], target: Connection) -> None:
    """Copy the losses of samples that the target does not know: two histories of one sample have no common order."""
    known = {history.sample_id for history in read_histories(target)}
    new = [history for history in histories if history.sample_id not in known]
    write_losses(target, [(history.sample_id, loss) for history in new for loss in history.losses])


def hardest_of(histories: Iterable[SampleHistory], k: int) -> list[SampleHistory]:
    """Give the samples with the largest recent losses."""
    return sorted(histories, key=lambda history: (-history.recent, history.sample_id))[:k]


def suspicious_of(histories: list[SampleHistory], threshold: float) -> list[SampleHistory]:
    """Give the samples whose loss is far above that of the others and does not fall."""
    recent = [history.recent for history in histories]
    if not recent:
        return []
    middle = median(recent)
    limit = middle + threshold * 1.4826 * median(abs(loss - middle) for loss in recent)
    return hardest_of(
        (one for one in histories if len(one.losses) >= _ENOUGH and one.recent > limit and not _falls(one)),
        len(histories),
    )


def _falls(history: SampleHistory) -> bool:
    """Tell whether the later half of the losses is at least a fifth below the earlier one."""
    half = len(history.losses) // 2
    earlier, later = median(history.losses[:half]), median(history.losses[-half:])
    return later < earlier - 0.2 * abs(earlier)


def _is_there(connection: Connection) -> bool:
    found: Mapping[int, Any] | None = connection.execute(
        "SELECT 1 FROM sqlite_master WHERE type = 'table' AND name = 'history' AND sql = ?", (HISTORY,)
    ).fetchone()
    return found is not None


def _unpacked(packed: Any) -> tuple[float, ...]:
    check_kinds({"losses": packed}, {"losses": (bytes,)}, "a history")
    count = min(len(packed) // 2, KEPT)
    values: tuple[float, ...] = struct.unpack(f"<{count}e", packed[: 2 * count])
    return tuple(value for value in values if math.isfinite(value))
