"""What a page is made from: anything that answers as a ledger does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

from gradgate.records import Incident

__all__ = ["Book", "Counts", "RunOfBook"]


class RunOfBook(Protocol):
    """One training, as `gradgate.ledger.Run` describes it."""

    def to_dict(self) -> dict[str, Any]:
        """Give name, started, ended, versions, arguments and the number of incidents."""


class Counts(Protocol):
    """How many there are, as `gradgate.ledger.Stats` counts them."""

    @property
    def incidents(self) -> int:
        """How many incidents."""


@runtime_checkable
class Book(Protocol):
    """What a page can be made from: a `gradgate.Ledger`, or anything else that answers these questions.

    Examples:
        >>> import tempfile
        >>> isinstance(gg.Ledger(tempfile.mkdtemp() + "/run.ledger"), gg.report.Book)
        True
    """

    def incidents(self, *, limit: int | None = None, newest_first: bool = False) -> Sequence[Incident]:
        """Give the incidents in the order of time."""

    def stats(self) -> Counts:
        """Count them."""

    def runs(self) -> Sequence[RunOfBook]:
        """Give the runs."""

    def bad_ids(self) -> set[str]:
        """Give the samples that are known to be bad."""

    def payload_of(self, incident_id: str) -> bytes | None:
        """Give the stored sample of an incident, if there is one."""
