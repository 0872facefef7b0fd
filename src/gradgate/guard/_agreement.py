"""What all processes of a training must agree on before the guard acts; one process agrees with itself."""

from __future__ import annotations

from typing import Protocol

__all__ = ["Agreement", "Alone"]


class Agreement(Protocol):
    """Asked by the guard; every process of a training asks the same questions in the same order."""

    @property
    def rank(self) -> int:
        """The number of this process."""

    @property
    def world_size(self) -> int:
        """How many processes there are."""

    def total(self, *counts: int) -> tuple[int, ...]:
        """Add counts over all processes."""


class Alone:
    """The agreement of one process: its counts are the totals."""

    rank = 0
    world_size = 1

    def total(self, *counts: int) -> tuple[int, ...]:
        """Give the counts themselves."""
        return counts
