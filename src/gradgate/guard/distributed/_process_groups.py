"""Who trains a model together: found from its wrappers, and refused where a rank cannot run the model alone."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch import distributed

from gradgate._names import listed
from gradgate._state import TrainingState
from gradgate._torch_distributed import Replica, shard_group, shard_roots
from gradgate.errors import ArgumentTypeError
from gradgate.guard.distributed._replicas import Replicas
from gradgate.guard.distributed._shards import Shards


class SingleProcess:
    """The agreement of one process: it decides alone. In a process group it still knows its rank."""

    has_whole_weights = True

    @property
    def rank(self) -> int:
        """The rank of this process."""
        return distributed.get_rank() if in_a_group() else 0

    @property
    def world_size(self) -> int:
        """How many processes there are."""
        return distributed.get_world_size() if in_a_group() else 1


def in_a_group() -> bool:
    """Return whether this process belongs to a process group."""
    return distributed.is_available() and distributed.is_initialized()


def unwrapped(module: torch.nn.Module) -> torch.nn.Module:
    """Return the user's own module out of DistributedDataParallel."""
    inner: torch.nn.Module = module.module if isinstance(module, Replica) else module
    return inner


def agreement_of(modules: Sequence[torch.nn.Module], state: TrainingState) -> Replicas | Shards | SingleProcess:
    """Find out with whom a model is trained."""
    if not in_a_group():
        return SingleProcess()
    parts = list(dict.fromkeys(part for module in modules for part in module.modules()))
    if distributed.get_world_size() > 1:
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
                why="its collectives cannot be seen, so a rank that raises could not take part in them.",
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
