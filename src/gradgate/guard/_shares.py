"""What each rank tells of its step, as a few numbers that are added over all ranks, and what that adds up to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

__all__ = ["Share", "Totals", "WIDTH"]


@dataclass(slots=True)
class Share:
    """One rank's part in a step.

    Attributes:
        size: How many samples its batch has.
        kept: How many of them take part.
        bad: How many are dropped.
        whole: Whether every one of them fails.
        failed: Whether there was an exception that no sample is blamed for.
        told: Whether it has incidents to tell.
        more: Whether it has another batch.
        stale: Whether the gradients that it has sent are not those that count.
        earlier: Whether it has gradients of earlier steps.
        loss: Its mean loss over what takes part.
    """

    size: int = 0
    kept: int = 0
    bad: int = 0
    whole: bool = False
    failed: bool = False
    told: bool = False
    more: bool = False
    stale: bool = False
    earlier: bool = False
    loss: torch.Tensor | None = None

    def write(self, numbers: torch.Tensor, present: Sequence[bool]) -> None:
        """Write the share as numbers.

        Args:
            numbers: Where to: `WIDTH` of them, and as many as `present` has.
            present: Whether this rank has a gradient for each parameter.
        """
        flags = (self.size > 0, self.whole, self.failed, self.told, self.more, self.stale, self.earlier)
        absent = [] if all(present) else [place for place, there in enumerate(present) if not there]
        loss = 0.0 if self.loss is None or not self.loss.is_cpu else float(self.loss.item()) * self.kept
        counts = [self.size, self.kept, self.bad, *flags, len(absent), loss, *[1.0] * len(present)]
        numbers.copy_(torch.tensor(counts, dtype=numbers.dtype), non_blocking=True)
        if self.loss is not None and not self.loss.is_cpu:  # not read by the host
            numbers[WIDTH - 1].copy_(self.loss.detach() * self.kept)
        for place in absent:
            numbers[WIDTH + place] = 0.0


@dataclass(frozen=True, slots=True)
class Totals:
    """The shares of all ranks, added: counts of samples, and of ranks of which something is true.

    Attributes:
        size: Samples.
        kept: Samples that take part.
        bad: Samples that are dropped.
        busy: Ranks that have samples.
        whole: Ranks of which every sample fails.
        failed: Ranks with an exception that no sample is blamed for.
        told: Ranks with incidents.
        more: Ranks with another batch.
        stale: Ranks that sent what does not count.
        earlier: Ranks with gradients of earlier steps.
        absent: Gradients that a rank does not have.
        loss: The sum of the losses of what takes part.
        present: Which parameters have a gradient anywhere; None for all.
    """

    size: int
    kept: int
    bad: int
    busy: int
    whole: int
    failed: int
    told: int
    more: int
    stale: int
    earlier: int
    absent: int
    loss: float
    present: tuple[bool, ...] | None

    @classmethod
    def read(cls, numbers: torch.Tensor) -> Totals:
        """Read the numbers of all ranks."""
        *counts, loss = numbers[:WIDTH].tolist()
        size, kept, bad, busy, whole, failed, told, more, stale, earlier, absent = map(int, counts)
        present = tuple((numbers[WIDTH:] > 0).tolist()) if absent else None
        return cls(size, kept, bad, busy, whole, failed, told, more, stale, earlier, absent, loss, present)


WIDTH = 12
"""How many numbers a share is, besides one for each parameter."""
