"""What all processes of a training must agree on before the guard acts; one process agrees with itself."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from torch import distributed

from gradgate._finite import FiniteCheck
from gradgate.guard._shares import Share, Totals
from gradgate.guard._state import TrainingState

__all__ = ["Agreement", "Alone", "in_a_group"]


class Agreement(Protocol):
    """Asked by the guard; every process of a training asks the same questions in the same order."""

    has_whole_weights: bool

    @property
    def rank(self) -> int:
        """The number of this process."""

    @property
    def world_size(self) -> int:
        """How many processes there are."""

    def apart(self, *, training: bool) -> AbstractContextManager[None]:
        """Let the model run without the other processes, as long as the block lasts."""

    def meet(self, size: int, terms: Any) -> None:
        """Make sure, once, that all have the same model and the same terms."""

    def before_backward(self, size: int, state: TrainingState) -> None:
        """Hear that backward comes next: what is ready may be sent while it runs."""

    def check(self, usual: FiniteCheck) -> FiniteCheck:
        """Give the way to look for NaN and Inf in gradients that costs least."""

    def withdraw(self) -> None:
        """Hear that what backward gave does not count."""

    def exchange(self, share: Share, state: TrainingState, *, in_haste: bool = False) -> Totals:
        """Add up what all processes tell, and their gradients."""

    def settle(self, share: Share, totals: Totals, state: TrainingState) -> None:
        """Write the gradients that all have agreed on."""

    def gather(self, value: Any) -> list[Any]:
        """Give what every process has, to every process."""

    def bring(self, evidence: Any, owners: Sequence[int]) -> dict[int, Any]:
        """Bring what some processes have to the first one."""


class Alone:
    """The agreement of one process: it does what it finds right. In a process group it still knows its number."""

    has_whole_weights = True

    @property
    def rank(self) -> int:
        """The number of this process."""
        return distributed.get_rank() if in_a_group() else 0

    @property
    def world_size(self) -> int:
        """How many processes there are."""
        return distributed.get_world_size() if in_a_group() else 1


def in_a_group() -> bool:
    """Tell whether this process belongs to a process group."""
    return distributed.is_available() and distributed.is_initialized()
