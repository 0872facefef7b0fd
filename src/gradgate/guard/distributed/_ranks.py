"""The ranks of a training, what they tell each other about a step, and the only collectives that the guard makes."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import distributed

from gradgate._state import FiniteCheck
from gradgate._text import text_of, user_level
from gradgate._torch_distributed import timeout_of
from gradgate.errors import ArgumentValueError, GradgateWarning, OtherRankError

# --- What a rank says -----------------------------------------------------------------------------------------------

FLAGS = ("whole", "failed", "reported", "more", "stale", "earlier", "by_total", "spoilt", "changed", "played")
WIDTH = len(FLAGS) + 7
"""How many numbers a share is, besides one for each parameter."""


@dataclass(slots=True)
class Share:
    """One rank's part in a step."""

    size: int = 0
    kept: int = 0
    bad: int = 0
    whole: bool = False
    failed: bool = False
    reported: bool = False
    more: bool = False
    stale: bool = False
    earlier: bool = False
    by_total: bool = False
    spoilt: bool = False
    changed: bool = False
    played: bool = False
    loss: torch.Tensor | None = None
    count: torch.Tensor | None = None

    def weight(self, kept: int, times: int = 1) -> float:
        """Return the factor of its gradients: `times` its share in all samples kept, or `times` for totals."""
        return times * float(self.kept > 0) if self.by_total else self.kept * times / kept

    def write(self, numbers: torch.Tensor, present: Sequence[bool]) -> None:
        """Write the share as numbers; `present` says which parameters have a gradient."""
        absent = [] if all(present) else [place for place, there in enumerate(present) if not there]
        multiple = 1 if self.by_total else self.kept
        loss = 0.0 if self.loss is None or not self.loss.is_cpu else float(self.loss.item()) * multiple
        count = 0.0 if self.count is None or not self.count.is_cpu else float(self.count.item())
        flags = [getattr(self, flag) for flag in FLAGS]
        counts = [
            self.size,
            self.kept,
            self.bad,
            self.size > 0,
            *flags,
            len(absent),
            count,
            loss,
            *[1.0] * len(present),
        ]
        numbers.copy_(torch.tensor(counts, dtype=numbers.dtype), non_blocking=True)
        if self.loss is not None and not self.loss.is_cpu:  # the host does not read it
            numbers[WIDTH - 1].copy_(self.loss.detach() * multiple)
        if self.count is not None and not self.count.is_cpu:
            numbers[WIDTH - 2].copy_(self.count)
        for place in absent:
            numbers[WIDTH + place] = 0.0


@dataclass(frozen=True, slots=True)
class RankTotals:
    """The shares of all ranks, added: counts of samples, and of ranks of which something is true."""

    size: int
    kept: int
    bad: int
    busy: int
    whole: int
    failed: int
    reported: int
    more: int
    stale: int
    earlier: int
    by_total: int
    spoilt: int
    changed: int
    played: int
    count: float
    loss: float
    present: tuple[bool, ...] | None

    @classmethod
    def read(cls, numbers: torch.Tensor) -> RankTotals:
        """Read the numbers of all ranks."""
        *counts, absent, count, loss = numbers[:WIDTH].tolist()
        present = tuple((numbers[WIDTH:] > 0).tolist()) if absent else None
        return cls(*map(int, counts), count, loss, present)  # type: ignore[arg-type, call-arg]


# --- Collectives ----------------------------------------------------------------------------------------------------


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
        self.made = 0
        """How many collectives a wrapper has made in the forward of this step."""
        self.timeout = timeout_of(group, device)
        self._warned = False
        self._expected = 0  # how many samples of all ranks are kept, as in the last step

    def trained(self) -> list[torch.Tensor]:
        """List the parameters that are trained."""
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
            raise ArgumentValueError(
                f"Guard: the ranks do not have the same {what} ({reported}).",
                why="all ranks decide alike about a step, each by itself.",
                fix="guard = gg.Guard(model, ...)   # with the same model and arguments on every rank",
            )

    def add(self, numbers: torch.Tensor, *, in_haste: bool = False) -> None:
        """Add numbers over all ranks, in place."""
        with self.talking():
            work = distributed.all_reduce(numbers, group=self.group, async_op=True)
            assert work is not None
            if in_haste:
                work.wait(FAREWELL)
            else:
                work.wait()

    def add_up(self, share: Share, present: Sequence[bool], *, in_haste: bool = False) -> RankTotals:
        """Add the shares of all ranks, in one collective of its own."""
        numbers = torch.zeros(WIDTH + len(present), dtype=torch.float64, device=self.device)
        share.write(numbers, present)
        self.add(numbers, in_haste=in_haste)
        return RankTotals.read(numbers)

    def gather(self, value: Any) -> list[Any]:
        """Return what every rank has."""
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
            warnings.warn(
                f"Guard: a search for bad samples on rank {self.rank} may keep the other ranks waiting for "
                f"{seconds:.3g} s ({explained}), and the timeout of the process group is {self.timeout:.3g} s.\n"
                "Why: they wait in a collective, which fails after the timeout; that ends the training.\n"
                f"Fix: dist.init_process_group(..., timeout=timedelta(seconds={2 * seconds:.0f}))",
                GradgateWarning,
                stacklevel=user_level(),
            )
