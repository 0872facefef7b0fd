"""The ranks of a training, and how they talk: the one file of the guard that makes collectives of its own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
from torch import distributed

from gradgate._names import text_of
from gradgate.errors import ArgumentValueError, OtherRankError
from gradgate.guard._shares import WIDTH, Share, Totals

__all__ = ["FAREWELL", "Ranks"]

# How long an interrupted rank goes on to tell the others; whoever interrupts does not want to wait.
FAREWELL = timedelta(seconds=20)


class Ranks:
    """Some processes that train together.

    Args:
        group: Their process group.
        device: Where their tensors lie.
    """

    def __init__(self, group: distributed.ProcessGroup | None, device: torch.device) -> None:
        self.group = group
        self.device = device
        self.rank = distributed.get_rank(group)
        self.world_size = distributed.get_world_size(group)

    def add(self, numbers: torch.Tensor, *, in_haste: bool = False) -> None:
        """Add numbers over all ranks, in place.

        Args:
            numbers: The numbers.
            in_haste: Whether not to wait long for the others.
        """
        with self.talking():
            work = distributed.all_reduce(numbers, group=self.group, async_op=True)
            assert work is not None
            if in_haste:
                work.wait(FAREWELL)
            else:
                work.wait()

    def add_up(self, share: Share, present: Sequence[bool], *, in_haste: bool = False) -> Totals:
        """Add up what all ranks tell, in one collective of its own.

        Args:
            share: What this rank tells.
            present: Which parameters have a gradient here.
            in_haste: Whether not to wait long for the others.

        Returns:
            What all ranks tell.
        """
        numbers = torch.zeros(WIDTH + len(present), dtype=torch.float64, device=self.device)
        share.write(numbers, present)
        self.add(numbers, in_haste=in_haste)
        return Totals.read(numbers)

    def gather(self, value: Any) -> list[Any]:
        """Give what every rank has, to every rank.

        Args:
            value: What this rank has; small, for it is made as long as the longest.

        Returns:
            One value for each rank.
        """
        values: list[Any] = [None] * self.world_size
        with self.talking():
            distributed.all_gather_object(values, value, group=self.group)
        return values

    def agreed(self, value: Any, what: str) -> None:
        """Make sure that all ranks have the same.

        Args:
            value: What this rank has.
            what: What it is, for the message.

        Raises:
            ArgumentValueError: They have not; on every rank.
        """
        values = self.gather(value)
        if len(set(values)) > 1:
            told = ", ".join(f"rank {rank}: {value}" for rank, value in enumerate(values[:4]))
            raise ArgumentValueError(
                f"Guard: the ranks do not have the same {what} ({told}).",
                why="all ranks decide alike about a step, each by itself.",
                fix="guard = gg.Guard(model, ...)   # with the same model and arguments on every rank",
            )

    def bring(self, evidence: Any, owners: Sequence[int]) -> dict[int, Any]:
        """Bring what some ranks have to the first rank, one by one.

        Args:
            evidence: What this rank has.
            owners: The ranks that have something.

        Returns:
            On the first rank what each of them has; nothing elsewhere.
        """
        found = {}
        with self.talking():
            first = self._global(0)
            for owner in owners:
                if owner == self.rank == 0:
                    found[0] = evidence
                elif self.rank == 0:
                    received = [None]
                    distributed.recv_object_list(received, self._global(owner), group=self.group, device=self.device)
                    found[owner] = received[0]
                elif self.rank == owner:
                    distributed.send_object_list([evidence], first, group=self.group, device=self.device)
        return found

    @contextmanager
    def talking(self) -> Iterator[None]:
        """Say clearly what it means when a collective fails.

        Raises:
            OtherRankError: Another rank is gone, waits elsewhere, or has not come in time.
        """
        try:
            yield
        except OtherRankError:
            raise
        except RuntimeError as error:
            first_line = next(iter(text_of(error).strip().splitlines()), type(error).__name__)
            raise OtherRankError(
                f"Guard: rank {self.rank} of {self.world_size} cannot reach the others: {first_line}",
                why="another rank has ended, was killed, or did not come to this step within the timeout of the group "
                "(a rank that leaves its loop early, or does not call guard.backward as often as the others).",
                fix="for batch in guard.batches(loader): ...   # all ranks make equally many steps; "
                "then start all ranks again from a checkpoint",
            ) from error

    def _global(self, rank: int) -> int:
        return rank if self.group is None else distributed.get_global_rank(self.group, rank)
