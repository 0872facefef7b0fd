"""Who trains a model together: found from its wrappers, and refused where a rank cannot run the model alone."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, NoReturn, Protocol

import torch
from torch import distributed

from gradgate._finite import FiniteCheck
from gradgate._names import listed
from gradgate._state import TrainingState
from gradgate._torch_distributed import Replica, shard_group, shard_roots
from gradgate.errors import ArgumentTypeError
from gradgate.guard.distributed._ranks import RankTotals, Share
from gradgate.guard.distributed._replicas import Replicas
from gradgate.guard.distributed._shards import Shards

# --- What ranks agree on --------------------------------------------------------------------------------------------


class Agreement(Protocol):
    """Asked by the guard; every process of a training asks the same questions in the same order."""

    has_whole_weights: bool
    device: torch.device
    made: int

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

    def before_backward(self, size: int, state: TrainingState, *, by_total: bool) -> None:
        """Hear that backward comes next: what is ready may be sent while it runs."""

    def check(self, usual: FiniteCheck) -> FiniteCheck:
        """Give the way to look for NaN and Inf in gradients that costs least."""

    def withdraw(self) -> None:
        """Hear that what backward gave does not count."""

    def exchange(self, share: Share, state: TrainingState, *, in_haste: bool = False) -> RankTotals:
        """Add up what all processes tell, and their gradients."""

    def settle(self, share: Share, totals: RankTotals, state: TrainingState) -> None:
        """Write the gradients that all have agreed on."""

    def add(self, numbers: torch.Tensor, *, in_haste: bool = False) -> None:
        """Add numbers over all processes, in place."""

    def gather(self, value: Any) -> list[Any]:
        """Give what every process has, to every process."""

    def warn_of_timeout(self, seconds: float, explained: str) -> None:
        """Warn, once, if a search keeps the other processes waiting for too long."""

    def bring(self, evidence: Any, owners: Sequence[int]) -> dict[int, Any]:
        """Bring what some processes have to the first one."""


class SingleProcess:
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


# --- Who trains a model together ------------------------------------------------------------------------------------


def unwrapped(module: torch.nn.Module) -> torch.nn.Module:
    """Give the user's own module out of DistributedDataParallel."""
    inner: torch.nn.Module = module.module if isinstance(module, Replica) else module
    return inner


def agreement_of(modules: Sequence[torch.nn.Module], state: TrainingState) -> Agreement | SingleProcess:
    """Find out with whom a model is trained."""
    if not in_a_group():
        return SingleProcess()
    parts = list(dict.fromkeys(part for module in modules for part in module.modules()))
    _refuse_collectives_in_forward(parts)
    replicas = [part for part in parts if isinstance(part, Replica)]
    roots = [root for module in modules for root in shard_roots(module)]
    if not replicas and not roots:
        _refuse_inner_modules(parts)
        return SingleProcess()
    if replicas and roots:
        _refuse("replicas (DistributedDataParallel) and shards (fully_shard)", "Guard(model)   # a guard for each")
    shared = {p for part in (*replicas, *roots) for p in part.parameters()}
    own = [name for m in modules for name, p in m.named_parameters() if p.requires_grad and p not in shared]
    if own:
        _refuse(f"parameters that no wrapper reduces ({listed(own, 3)})", "DistributedDataParallel(head)")
    if replicas:
        groups: set[Any] = {replica.process_group for replica in replicas}
        if len(groups) > 1:
            _refuse("parts of several process groups", "Guard(model)   # a guard for each")
        return Replicas(replicas)
    groups = {shard_group(root) for root in roots}
    group = groups.pop()
    if groups or group is None:
        _refuse("shards on several meshes, or split by tensor parallelism", "fully_shard(model)   # on one mesh")
    return Shards(roots, group, state)


def _refuse(what: str, fix: str) -> NoReturn:
    raise ArgumentTypeError(
        f"Guard(): the model has {what}.",
        why="all ranks must make the same step, and the guard knows how for one process group and one kind of wrapper.",
        fix=fix,
    )


def _refuse_collectives_in_forward(parts: Sequence[torch.nn.Module]) -> None:
    """Refuse what talks to other ranks in the middle of a forward: after a fault, one rank would run it alone."""
    if distributed.get_world_size() == 1:
        return
    for part in parts:
        if isinstance(part, torch.nn.SyncBatchNorm):
            raise ArgumentTypeError(
                "Guard(): the model has SyncBatchNorm layers.",
                why="their forward waits for all ranks, but after a fault one rank runs the model again alone.",
                fix="torch.nn.BatchNorm2d   # statistics of each rank's own batch; or torch.nn.GroupNorm",
            )
        if isinstance(part, distributed.fsdp.FullyShardedDataParallel):
            raise ArgumentTypeError(
                "Guard(): the model is in FullyShardedDataParallel.",
                why="its parameters cannot be gathered once for a whole step.",
                fix="torch.distributed.fsdp.fully_shard(model)",
            )


def _refuse_inner_modules(parts: Sequence[torch.nn.Module]) -> None:
    """Refuse a module whose DistributedDataParallel is elsewhere: the loss would run that, and wait."""
    parameters = {id(p) for part in parts for p in part.parameters(recurse=False)}
    replicas = [thing for thing in gc.get_objects() if issubclass(type(thing), Replica)]
    if any(id(parameter) in parameters for replica in replicas for parameter in replica.parameters()):
        raise ArgumentTypeError(
            "Guard(): `model` is inside of a DistributedDataParallel.",
            why="the guard must see the wrapper to run the model without the other ranks.",
            fix="gg.Guard(ddp_model)   # the wrapped model, not ddp_model.module",
        )
