"""The ranks of a training, what they tell each other about a step, and the only collectives that the guard makes."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from datetime import timedelta
from typing import Any

import torch
from torch import distributed

from gradgate._state import FiniteCheck
from gradgate._text import text_of, user_level
from gradgate._torch_distributed import timeout_of
from gradgate.errors import ArgumentValueError, GradgateWarning, OtherRankError

# --- What a rank says -----------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Share:
    """One rank's part in a step; or those of all, added: counts of samples, and of ranks of which something is true."""

    size: int = 0
    kept: int = 0
    busy: int = 0
    whole: int = 0
    failed: bool = False
    reported: int = 0
    more: int = 0
    stale: int = 0
    earlier: int = 0
    by_total: int = 0
    spoilt: int = 0
    changed: int = 0
    played: int = 0
    absent: int = 0
    count: Any = 0.0
    loss: Any = 0.0
    present: tuple[bool, ...] | None = None

    def weight(self, kept: int, times: int = 1) -> float:
        """Return the factor of its gradients: `times` its share in all samples kept, or `times` for totals."""
        return times * float(self.kept > 0) if self.by_total else self.kept * times / kept

    def write(self, numbers: torch.Tensor, present: Sequence[bool]) -> None:
        """Write the share as numbers; `present` says which parameters have a gradient."""
        self.absent = len(present) - sum(present)
        values = [getattr(self, name) for name in NUMBERS]
        on_device = {place: value for place, value in enumerate(values) if not getattr(value, "is_cpu", True)}
        on_host = [0.0 if place in on_device else float(value) for place, value in enumerate(values)]
        multiple = 1 if self.by_total else self.kept
        on_host[-1] *= multiple
        numbers.copy_(torch.tensor([*on_host, *map(float, present)], dtype=numbers.dtype), non_blocking=True)
        for place, value in on_device.items():  # the host does not read it
            numbers[place].copy_(value.detach() * (multiple if place == WIDTH - 1 else 1))

    @classmethod
    def read(cls, numbers: torch.Tensor) -> Share:
        *counts, count, loss = numbers[:WIDTH].tolist()
        totals = cls(**dict(zip(NUMBERS, [*map(int, counts), count, loss], strict=True)))
        totals.present = tuple((numbers[WIDTH:] > 0).tolist()) if totals.absent else None
        return totals


NUMBERS = tuple(entry.name for entry in fields(Share))[:-1]
WIDTH = len(NUMBERS)
"""How many numbers a share is, besides one for each parameter."""


# --- Collectives ----------------------------------------------------------------------------------------------------


class SingleProcess:
    """One process, which decides alone. In a process group it still knows its rank."""

    has_whole_weights = True

    @property
    def rank(self) -> int:
        return distributed.get_rank() if in_a_group() else 0

    @property
    def world_size(self) -> int:
        return distributed.get_world_size() if in_a_group() else 1


def in_a_group() -> bool:
    return distributed.is_available() and distributed.is_initialized()


# How long an interrupted rank goes on to inform the others; whoever interrupts does not want to wait.
FAREWELL = timedelta(seconds=20)


class Ranks(FiniteCheck):
    """Some processes that train together; they judge gradients where these are."""

    def __init__(self, group: distributed.ProcessGroup | None, device: torch.device) -> None:
        super().__init__()
        self.group = group
        self.device = device
        self.rank = distributed.get_rank(group)
        self.world_size = distributed.get_world_size(group)
        self.made = 0  # how many collectives a wrapper has made in the forward of this step
        self.broken = False  # whether a collective of shards has failed, so that no more can be made
        self.timeout = timeout_of(group, device)
        self._warned = False
        self._expected = 0  # how many samples of all ranks are kept, as in the last step

    def trained(self) -> list[torch.Tensor]:
        raise NotImplementedError

    def meet(self, size: int, terms: str) -> None:
        """Make sure, once, that all ranks have the same parameters and terms, and count their samples."""
        if not self._expected:
            shapes = [(tuple(parameter.shape), str(parameter.dtype)) for parameter in self.trained()]
            elements = sum(parameter.numel() for parameter in self.trained())
            mark = hashlib.sha256(repr(shapes).encode()).hexdigest()[:8]
            self._agree(f"{len(shapes)} tensors, {elements} elements, {mark}", "parameters")
            self._agree(terms, "arguments")
            self._expected = max(sum(self.gather(size)), 1)

    def _agree(self, value: str, what: str) -> None:
        values = self.gather(value)
        if len(set(values)) > 1:
            reported = ", ".join(f"rank {rank}: {value}" for rank, value in enumerate(values[:4]))
            why = "all ranks decide alike about a step, each by itself."
            fix = "guard = gg.Guard(model, ...)   # with the same model and arguments on every rank"
            raise ArgumentValueError(f"Guard: the ranks do not have the same {what} ({reported}).", why=why, fix=fix)

    def add(self, numbers: torch.Tensor, *, in_haste: bool = False) -> None:
        """Add numbers over all ranks, in place."""
        with self.talking():
            work = distributed.all_reduce(numbers, group=self.group, async_op=True)
            assert work is not None
            work.wait(FAREWELL) if in_haste else work.wait()

    def add_up(self, share: Share, present: Sequence[bool], *, in_haste: bool = False) -> Share:
        """Add the shares of all ranks, in one collective of its own."""
        numbers = torch.zeros(WIDTH + len(present), dtype=torch.float64, device=self.device)
        share.write(numbers, present)
        self.add(numbers, in_haste=in_haste)
        return Share.read(numbers)

    def gather(self, value: Any) -> list[Any]:
        values: list[Any] = [None] * self.world_size
        with self.talking():
            distributed.all_gather_object(values, value, group=self.group)
        return values

    def bring(self, evidence: Any, owners: Sequence[int]) -> dict[int, Any]:
        """Bring what some ranks have to the first rank, one by one."""
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

    def _global(self, rank: int) -> int:
        return rank if self.group is None else distributed.get_global_rank(self.group, rank)

    @contextmanager
    def talking(self) -> Iterator[None]:
        """Say clearly what it means when a collective fails."""
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

    def warn_of_timeout(self, seconds: float, explained: str) -> None:
        """Warn, once, if the other ranks may have to wait longer than the process group allows in a search."""
        if seconds > self.timeout and not self._warned:
            self._warned = True
            text = (
                f"Guard: a search for bad samples on rank {self.rank} may keep the other ranks waiting for "
                f"{seconds:.3g} s ({explained}), and the timeout of the process group is {self.timeout:.3g} s.\n"
                "Why: they wait in a collective, which fails after the timeout; that ends the training.\n"
                f"Fix: dist.init_process_group(..., timeout=timedelta(seconds={2 * seconds:.0f}))"
            )
            warnings.warn(text, GradgateWarning, stacklevel=user_level())
