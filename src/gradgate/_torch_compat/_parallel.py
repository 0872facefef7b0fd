"""Models that several processes share: DistributedDataParallel and FSDP2, run by one process without the others."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import distributed
from torch.nn.parallel import DistributedDataParallel

__all__ = [
    "Replica",
    "alone_in_replica",
    "alone_in_shards",
    "reduce_shards",
    "replica_obstacle",
    "shard_group",
    "shard_roots",
    "sync_buffers",
]

Replica = DistributedDataParallel


def replica_obstacle(replica: Replica) -> str | None:
    """Tell what of a replica's way to reduce gradients cannot be done by others.

    Args:
        replica: A model in DistributedDataParallel.

    Returns:
        What it is, or None.
    """
    if replica._comm_hooks:
        return "a communication hook"
    if replica.mixed_precision is not None:
        return "DistributedDataParallel(mixed_precision=...)"
    if replica._delay_all_reduce_params:
        return "DistributedDataParallel(delay_all_reduce_named_params=...)"
    if replica._use_python_reducer:
        return "the Python reducer of compiled autograd"
    return "a join context" if replica._join_config.enable else None


def sync_buffers(replica: Replica) -> None:
    """Give every process the buffers of the first, if the replica's next forward would; all processes call this.

    Args:
        replica: A model in DistributedDataParallel.
    """
    if replica.will_sync_module_buffers():  # type: ignore[no-untyped-call]
        replica._sync_buffers()  # type: ignore[no-untyped-call]


@contextmanager
def alone_in_replica(replica: Replica) -> Iterator[None]:
    """Let a replica run forward and backward without a single collective, as long as the block lasts.

    Args:
        replica: A model in DistributedDataParallel.
    """
    reduced = replica.require_backward_grad_sync
    begun = replica.static_graph and replica._static_graph_delay_allreduce_enqueued
    replica.require_backward_grad_sync = replica.require_forward_param_sync = False
    if replica.static_graph:
        replica._static_graph_delay_allreduce_enqueued = True  # or the first backward would reduce after all
    # A forward before that nobody walked back from has left the reducer waiting for gradients: those to come.
    replica.reducer._reset_state()
    try:
        yield
    finally:
        replica.require_backward_grad_sync = replica.require_forward_param_sync = reduced
        if replica.static_graph:
            replica._static_graph_delay_allreduce_enqueued = begun


def _is_shard(module: torch.nn.Module) -> bool:
    """Tell whether FSDP2 (`fully_shard`) was applied to a module."""
    return hasattr(module, "set_requires_gradient_sync")


def shard_roots(model: torch.nn.Module) -> list[Any]:
    """List the outermost modules of a model that FSDP2 was applied to.

    Args:
        model: A model.

    Returns:
        The modules.
    """
    if _is_shard(model):
        return [model]
    return [root for child in model.children() for root in shard_roots(child)]


def shard_group(root: Any) -> distributed.ProcessGroup | None:
    """Give the processes that share a sharded module: of its mesh, or all where the mesh has several dimensions.

    Args:
        root: An outermost sharded module.

    Returns:
        The group; None if there is none that holds the whole mesh.
    """
    groups = [group for state in _states(root) for group in state._fsdp_param_groups]
    meshes = {group.mesh_info.mesh for group in groups}
    if len(meshes) != 1:
        return None
    mesh = meshes.pop()
    if any(part.sharded_param.device_mesh.ndim != mesh.ndim for group in groups for part in group.fsdp_params):
        return None  # split by tensor parallelism besides
    if mesh.ndim == 1:
        found: distributed.ProcessGroup = mesh.get_group()
        return found
    return distributed.group.WORLD if mesh.size() == distributed.get_world_size() else None


@contextmanager
def alone_in_shards(roots: Sequence[Any]) -> Iterator[None]:
    """Gather the whole parameters, and let each process run forward and backward with them by itself.

    Every process enters. Inside, `parameters()` gives whole parameters, and their gradients are plain ones.

    Args:
        roots: Outermost sharded modules.
    """
    from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState

    for root in roots:
        root._get_fsdp_state()._lazy_init()
    states = [state for root in roots for state in _states(root)]
    for state in states:
        for group in state._fsdp_param_groups:
            group.unshard()
            group.wait_for_unshard()
        # In this state, made for recomputing activations, the hooks of a forward only cast what they are given.
        state._training_state = TrainingState.PRE_BACKWARD
    try:
        yield
    finally:
        for state in states:
            state._training_state = TrainingState.IDLE
            for group in state._fsdp_param_groups:
                group._training_state = TrainingState.IDLE
                group.reshard()


def reduce_shards(roots: Sequence[Any]) -> None:
    """Do with whole gradients what the end of a backward does: mean over processes, each its shard; or accumulate.

    Args:
        roots: Outermost sharded modules, inside of `alone_in_shards`.
    """
    for root in roots:
        root._get_fsdp_state()._root_post_backward_final_callback()


def _states(root: Any) -> list[Any]:
    modules = (module for module in root.modules() if _is_shard(module))
    return list(dict.fromkeys(module._get_fsdp_state() for module in modules))
