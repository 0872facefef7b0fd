"""The private names of torch about models that several processes share: DistributedDataParallel and FSDP2.

As in `_torch_private`, a name that this version of torch does not have is an error that says what is lost.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import torch
from torch import distributed
from torch.nn.parallel import DistributedDataParallel

from gradgate._torch_private import _check_names, _find

# --- Replicas -------------------------------------------------------------------------------------------------------


Replica = DistributedDataParallel


_REPLICA = """_comm_hooks mixed_precision _delay_all_reduce_params _use_python_reducer _join_config static_graph
    reducer _sync_buffers require_backward_grad_sync require_forward_param_sync"""
_NO_SHARDS = "the guard and Rewind cannot work with FSDP2 models"
_SHARD = "_lazy_init _training_state _root_post_backward_final_callback _state_ctx _comm_ctx"
_SHARD_GROUP = """mesh_info post_forward_mesh_info fsdp_params unshard wait_for_unshard reshard post_backward
    is_unsharded _training_state _sharded_state _all_gather_result reduce_grads all_reduce_grads reshard_after_backward
    unshard_in_backward"""
_SHARD_PARAMETER = "sharded_param sharded_state"


def replica_obstacle(replica: Replica) -> str | None:
    """Return what the guard cannot do in place of a replica when it reduces gradients; None if it can do all."""
    _check_names(replica, _REPLICA, "the guard cannot work with DistributedDataParallel")
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
    """Copy the buffers of the first process to all, if the next forward of the replica would; all processes call it."""
    if replica.will_sync_module_buffers():  # type: ignore[no-untyped-call]
        replica._sync_buffers()  # type: ignore[no-untyped-call]


@contextmanager
def alone_in_replica(replica: Replica) -> Iterator[None]:
    """Run forward and backward of a replica without collectives, as long as the block lasts."""
    reduced = replica.require_backward_grad_sync
    begun = replica.static_graph and replica._static_graph_delay_allreduce_enqueued
    replica.require_backward_grad_sync = replica.require_forward_param_sync = False
    if replica.static_graph:
        replica._static_graph_delay_allreduce_enqueued = True  # or the first backward would reduce after all
    # After an earlier forward without a backward, the reducer waits for gradients, and would take those to come.
    replica.reducer._reset_state()
    try:
        yield
    finally:
        replica.require_backward_grad_sync = replica.require_forward_param_sync = reduced
        if replica.static_graph:
            replica._static_graph_delay_allreduce_enqueued = begun


# --- Collectives ----------------------------------------------------------------------------------------------------


def collectives_made() -> int:
    """Count the collectives of this process so far, on all process groups that number theirs."""
    made = 0
    for group in _find("distributed.distributed_c10d._world", "collectives of a loss are not seen").pg_map:
        with suppress(RuntimeError):  # a backend that does not count
            made += group._get_sequence_number_for_group()
    return made


def timeout_of(group: distributed.ProcessGroup | None, device: torch.device) -> float:
    """Return how many seconds a collective of a process group may take; infinity where the backend does not say."""
    members: Any = group or distributed.group.WORLD
    with suppress(AttributeError, RuntimeError):
        return float(members._get_backend(device).options._timeout.total_seconds())
    return math.inf


class WatchedRanks:
    """The ranks that share a model, as `watch` sees them: replicas have the same gradients, shards each their own."""

    def __init__(self, model: torch.nn.Module) -> None:
        groups = [shard_group(root) for root in shard_roots(model)]
        self._group = groups[0] if len(set(groups)) == 1 else None
        self._device = next((parameter.device for parameter in model.parameters()), None)
        members: Any = model.process_group if isinstance(model, Replica) else self._group
        self.is_first = members is None or distributed.get_rank(members) == 0

    def any(self, flag: bool) -> bool:
        """Return whether a flag is set on any rank that has shards; all of them ask."""
        if self._group is None:
            return flag
        count = torch.tensor(int(flag), device=self._device)
        distributed.all_reduce(count, group=self._group)
        return bool(count)

    def union(self, names: Sequence[str]) -> set[str]:
        if self._group is None:
            return set(names)
        found: list[Any] = [None] * distributed.get_world_size(self._group)
        distributed.all_gather_object(found, list(names), group=self._group)
        return {name for part in found for name in part}


# --- Shards ---------------------------------------------------------------------------------------------------------


def sharded_like(tensor: Any, whole: torch.Tensor) -> torch.Tensor:
    """Return the part of a whole tensor that this process would have if it were distributed as a DTensor is."""
    distribute = torch.distributed.tensor.distribute_tensor
    # Every process has the whole, so that none has to send it.
    part: torch.Tensor = distribute(whole, tensor.device_mesh, tensor.placements, src_data_rank=None).to_local()
    return part


def _is_shard(module: torch.nn.Module) -> bool:
    return hasattr(module, "set_requires_gradient_sync")


def shard_roots(model: torch.nn.Module) -> list[Any]:
    """List the outermost modules of a model that FSDP2 was applied to."""
    if _is_shard(model):
        return [model]
    return [root for child in model.children() for root in shard_roots(child)]


def shard_group(root: Any) -> distributed.ProcessGroup | None:
    """Return the processes that share a sharded module: of its mesh, or all where the mesh has several dimensions."""
    groups = [group for state in _states(root) for group in _groups_of(state)]
    for group in groups:
        _check_names(group, _SHARD_GROUP, _NO_SHARDS)
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


def adds_gradients(group: distributed.ProcessGroup | None) -> bool:
    """Return whether FSDP2 adds gradients over a process group where it should average: up to torch 2.8, over Gloo."""
    several = distributed.get_world_size(group) > 1
    return several and torch.__version__ < "2.9" and "gloo" in distributed.get_backend(group)


class ShardUnit:
    """Parameters that FSDP2 gathers and reduces together, with every collective that it makes for them in sight."""

    def __init__(self, group: Any) -> None:
        _check_names(group, _SHARD_GROUP, _NO_SHARDS)
        for part in group.fsdp_params:
            _check_names(part, _SHARD_PARAMETER, _NO_SHARDS)
        self._group = group
        self._states = _find("distributed.fsdp._fully_shard._fsdp_common.TrainingState", _NO_SHARDS)
        self._sharded = _find("distributed.fsdp._fully_shard._fsdp_param.ShardedState", _NO_SHARDS).SHARDED
        self._present: set[Any] = set()
        self._earlier: list[tuple[torch.Tensor | None, torch.Tensor | None]] = []

    @property
    def obstacle(self) -> str | None:
        """What of its settings cannot be guarded."""
        group = self._group
        if group.post_forward_mesh_info is not None and group.post_forward_mesh_info != group.mesh_info:
            return "reshard_after_forward=<a number>"
        return "set_requires_all_reduce(False)" if group.reduce_grads and not group.all_reduce_grads else None

    @property
    def settings(self) -> tuple[object, ...]:
        """What decides, besides the code of the model, which collectives a step makes."""
        group, trained = self._group, tuple(part.sharded_param.requires_grad for part in self._group.fsdp_params)
        return group.reduce_grads, group.reshard_after_backward, group.is_unsharded, trained

    @property
    def reduces(self) -> bool:
        """Whether gradients are reduced, not accumulated in this process."""
        return bool(self._group.reduce_grads)

    @property
    def trained(self) -> list[torch.Tensor]:
        """The sharded parameters that are trained."""
        return [part.sharded_param for part in self._group.fsdp_params if part.sharded_param.requires_grad]

    @property
    def gathered(self) -> list[torch.Tensor]:
        """The whole parameters, as far as they have been gathered before; their memory may be freed."""
        parts = self._group.fsdp_params
        return [part._unsharded_param for part in parts if hasattr(part, "_unsharded_param")]

    def present(self) -> list[bool]:
        """Return for each trained parameter whether this process has a gradient for it, now or from earlier."""
        parts = zip(self._group.fsdp_params, self._earlier, strict=True)
        return [p in self._present or any(e is not None for e in old) for p, old in parts if _is_trained(p)]

    def watch(self, gathers: Callable[[Callable[[], None]], None], reduces: Callable[[], None]) -> None:
        """Call functions before this unit's collectives, in place of a gather, and before gradients are reduced."""
        group = self._group
        gather, post_backward = type(group).unshard, type(group).post_backward

        def unshard(async_op: bool = False) -> None:
            idle = group.unshard_in_backward is False and group._training_state == self._states.PRE_BACKWARD
            if group._all_gather_result is None and not group.is_unsharded and not idle:
                gathers(partial(gather, group, async_op))
            else:
                gather(group, async_op)

        def reduce(*unused: Any) -> None:
            if any(map(_has_gradient, group.fsdp_params)):
                reduces()
            post_backward(group)

        group.unshard, group.post_backward = unshard, reduce

    def unwatch(self) -> None:
        vars(self._group).pop("unshard", None)
        vars(self._group).pop("post_backward", None)

    def lend(self) -> None:
        """Take part in a gather of other processes: what this one has of the whole parameters stays as it is."""
        group = self._group
        if len(self.gathered) < len(group.fsdp_params):  # the first time: FSDP2 makes the whole parameters here, too
            type(group).unshard(group)
            group.wait_for_unshard()
            self._reshard()
            return
        before = group._all_gather_result, group._sharded_state, group._training_state
        parts = [(part, part.sharded_state) for part in group.fsdp_params]
        group._all_gather_result, group._sharded_state, group._training_state = None, self._sharded, self._states.IDLE
        for part, _ in parts:
            part.sharded_state = self._sharded
        try:
            type(group).unshard(group)
            if (work := group._all_gather_result.all_gather_work) is not None:
                work.wait()
        finally:
            group._all_gather_result, group._sharded_state, group._training_state = before
            for part, state in parts:
                part.sharded_state = state

    def reduce(self) -> None:
        """Take part in a reduction with the gradients that are there, and zeros."""
        self.fill()
        type(self._group).post_backward(self._group)

    def note_present(self) -> None:
        self._present.update(filter(_has_gradient, self._group.fsdp_params))

    def fill(self) -> None:
        """Set zeros where a parameter has no gradient: all processes must reduce the same ones."""
        for part in filter(_is_trained, self._group.fsdp_params):
            if not _has_gradient(part):
                parameter = part._unsharded_param
                parameter.grad = torch.zeros_like(parameter, dtype=getattr(parameter, "grad_dtype", None))

    def whole_gradients(self) -> list[torch.Tensor]:
        """Return the gradients of whole parameters that this process has and no reduction has taken."""
        pairs = [_whole_gradients(part) for part in self._group.fsdp_params]
        return [gradient for pair in pairs for gradient in pair if gradient is not None]

    def lay_aside(self) -> bool:
        """Take away the gradients that earlier backward passes have accumulated; return whether there are any."""
        self._present = set()
        self._earlier = [_whole_gradients(part) for part in self._group.fsdp_params]
        self.drop()
        return any(gradient is not None for pair in self._earlier for gradient in pair)

    def drop(self) -> None:
        self._present.clear()
        for part in self._group.fsdp_params:
            _set_whole_gradients(part, (None, None))

    def put_back(self) -> None:
        """Restore the accumulated gradients, and add what is there now."""
        for part, earlier in zip(self._group.fsdp_params, self._earlier, strict=True):
            new = _whole_gradients(part)
            both = [n if e is None else e if n is None else e.add_(n) for e, n in zip(earlier, new, strict=True)]
            _set_whole_gradients(part, (both[0], both[1]))
        self._earlier = [(None, None)] * len(self._earlier)

    def reset(self, *, broken: bool) -> None:
        """End whatever a forward or backward has left unfinished in this unit."""
        group = self._group
        group._training_state = self._states.IDLE
        if group._all_gather_result is not None and not broken:
            group.wait_for_unshard()
        group._all_gather_result = None
        self._reshard()
        group._training_state = self._states.POST_BACKWARD

    def _reshard(self) -> None:
        self._group._training_state = self._states.IDLE
        self._group.reshard()


def _is_trained(part: Any) -> bool:
    return bool(part.sharded_param.requires_grad)


def _whole_gradients(part: Any) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    parameter = getattr(part, "_unsharded_param", None)
    accumulated = vars(part).get("unsharded_accumulated_grad")  # up to torch 2.14: what no longer fits the parameter
    return accumulated, None if parameter is None else parameter.grad


def _set_whole_gradients(part: Any, gradients: tuple[torch.Tensor | None, torch.Tensor | None]) -> None:
    if "unsharded_accumulated_grad" in vars(part):
        part.unsharded_accumulated_grad = gradients[0]
    if hasattr(part, "_unsharded_param"):
        part._unsharded_param.grad = gradients[1]


def _has_gradient(part: Any) -> bool:
    return any(gradient is not None for gradient in _whole_gradients(part))


def shard_units(roots: Sequence[Any]) -> list[ShardUnit]:
    return [ShardUnit(group) for root in roots for state in _states(root) for group in _groups_of(state)]


def start_shards(roots: Sequence[Any]) -> None:
    """Let FSDP2 find out which module is the root, as its first forward would."""
    for root in roots:
        root._get_fsdp_state()._lazy_init()


def reset_shards(roots: Sequence[Any], units: Sequence[ShardUnit], *, broken: bool = False, drop: bool = True) -> None:
    """Leave sharded modules as after a whole step, whatever has been interrupted; drop whole gradients."""
    for unit in units:
        unit.reset(broken=broken)
        if drop:
            unit.drop()
    for root in roots:
        state = root._get_fsdp_state()
        context = state._state_ctx
        # From torch 2.15 on, the pre-backward hook notes whether the user finishes a backward; it may not have run.
        if getattr(context, "manual_backward_finalization_active", False) is None:
            context.manual_backward_finalization_active = context.manual_backward_finalization
        state._comm_ctx.all_gather_state = context.iter_forward_root = None
        for part in context.all_states:
            getattr(part, "_modules_to_run_forward", set()).clear()  # of several modules in one unit
        state._root_post_backward_final_callback()


def _states(root: Any) -> list[Any]:
    modules = (module for module in root.modules() if _is_shard(module))
    states = list(dict.fromkeys(module._get_fsdp_state() for module in modules))
    for state in states:
        _check_names(state, _SHARD, _NO_SHARDS)
    return states


def _groups_of(state: Any) -> list[Any]:
    """List the groups of parameters of an FSDP2 state; up to torch 2.10 there is at most one."""
    if (groups := getattr(state, "_fsdp_param_groups", None)) is None:
        groups = [state._fsdp_param_group] if state._fsdp_param_group is not None else []
    return list(groups)
