"""Snapshots of a training in memory: modules, optimizers and whatever has a state, copied and put back in place."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from gradgate._names import describe, listed
from gradgate._state import random_state, set_random_state
from gradgate._torch_private import buffers_of, copy_tensors, local_part, parameters_of, tree_flatten
from gradgate.errors import ArgumentTypeError, ArgumentValueError


class Copier:
    """Copies tensors of parts; on an accelerator to pinned memory, beside the training where that is safe."""

    # Only an optimizer writes its parameters and its state, so they are copied on a stream of its own, which waits for
    # the step before; the optimizer's next step waits for the copies. All else, such as the buffers that a forward
    # pass writes, is copied on the current stream.

    def __init__(self, parts: Sequence[Any]) -> None:
        self.parts = parts
        self._streams: dict[torch.device, torch.Stream] = {}
        self._copied: list[tuple[torch.device, torch.Event]] = []  # what the next step of an optimizer waits for

    def copy(self, pairs: Collection[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Copy the second tensor of each pair into the first."""
        near = [(memory, source) for memory, source in pairs if memory.device == source.device]
        copy_tensors([memory for memory, _ in near], [local_part(source.detach()) for _, source in near])
        far = [(memory, source) for memory, source in pairs if memory.device != source.device]
        for device in dict.fromkeys(source.device for _, source in far):
            self._copy_to_host(device, [pair for pair in far if pair[1].device == device])

    def _copy_to_host(self, device: torch.device, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        optimizers = [part for part in self.parts if isinstance(part, torch.optim.Optimizer)]
        if device not in self._streams:
            self._streams[device] = torch.Stream(device=device)
            for optimizer in optimizers:
                optimizer.register_step_pre_hook(self._wait)
        owned = {id(leaf) for o in optimizers for leaf in (*_parameters(o), *tree_flatten(list(o.state.values()))[0])}
        current, beside = torch.accelerator.current_stream(device), self._streams[device]
        beside.wait_stream(current)
        try:
            for memory, source in sorted(pairs, key=lambda pair: id(pair[1]) in owned):  # the others first
                local = local_part(source.detach())
                if id(source) in owned:
                    torch.accelerator.set_stream(beside)
                    local.record_stream(beside)
                memory.copy_(local, non_blocking=True)
        finally:
            torch.accelerator.set_stream(current)
        self._copied.append((device, beside.record_event()))

    def _wait(self, *_: Any) -> None:
        """Let an optimizer's step wait for the copies, on the device."""
        for device, copied in self._copied:
            torch.accelerator.current_stream(device).wait_event(copied)
        self._copied = []

    def finish(self) -> None:
        """Wait for the copies, on the host, which is about to read them."""
        for device in self._streams:
            torch.accelerator.synchronize(device)
        self._copied = []


_STATE = ("where", "number", "rewinds", "loader", "levels", "kept", "random")


class StateSnapshot:
    """A copy of everything that a training step writes; its memory is used again."""

    def __init__(self, copier: Copier) -> None:
        self._copier, self._parts = copier, copier.parts
        self.kept: list[Any] = [None] * len(self._parts)
        self._sources: dict[int, torch.Tensor] = {}  # what was copied, by the id of the copy
        self.random: dict[str, Any] = {}
        self.where = self.number = self.rewinds = 0
        self.loader: tuple[int, int, Any] = (0, 0, None)
        self.levels: list[list[float]] = [[], []]
        self.doubts: list[str] = []  # of the last restore

    def take(self, where: int, number: int) -> None:
        """Copy everything as it is after the steps up to a place of the timeline."""
        self.where, self.number = where, number
        copies = _Copies()
        with torch.no_grad():
            states = [_state_of(part) for part in self._parts]
            kept = _mapped(copies.memory_for, states, self.kept)
            self._copier.copy(copies.pairs())
        self.kept, self._sources, self.random = kept, copies.sources, random_state()

    def restore(self) -> None:
        """Write everything back; the copy stays good, so this can be repeated."""
        self.doubts = []
        self._copier.finish()
        with torch.no_grad():
            for part, kept in zip(self._parts, self.kept, strict=True):
                if (doubt := _put_back(part, kept, self._sources)) is not None:
                    self.doubts.append(doubt)
        set_random_state(self.random)

    @property
    def nbytes(self) -> int:
        leaves = {id(leaf): leaf for leaf in tree_flatten(self.kept)[0] if isinstance(leaf, torch.Tensor)}
        return sum(leaf.nbytes for leaf in leaves.values())

    def state(self) -> dict[str, Any]:
        """Return the snapshot as tensors and plain values."""
        self._copier.finish()
        state = copy.deepcopy({name: getattr(self, name) for name in _STATE})
        if "numpy" in state["random"]:  # torch.load(weights_only=True) refuses its arrays
            numpy = state["random"]["numpy"]
            state["random"]["numpy"] = [torch.from_numpy(v.copy()) if hasattr(v, "dtype") else v for v in numpy]
        return state

    @classmethod
    def load(cls, copier: Copier, state: Mapping[str, Any]) -> StateSnapshot:
        snapshot = cls(copier)
        for name, value in copy.deepcopy(dict(state)).items():
            setattr(snapshot, name, value)
        if "numpy" in snapshot.random:
            numpy = [v.numpy() if isinstance(v, torch.Tensor) else v for v in snapshot.random["numpy"]]
            snapshot.random["numpy"] = tuple(numpy)
        return snapshot


def with_optimizers(parts: list[Any]) -> list[Any]:
    """Add the optimizers that parts hold: that of a scheduler, those inside others."""
    known = {id(part): part for part in parts}
    for part in parts:
        if not isinstance(part, torch.nn.Module):
            held = [value for value in vars(part).values() if isinstance(value, torch.optim.Optimizer)]
            known |= {id(one): one for one in held}
    return list(known.values()) if len(known) == len(parts) else with_optimizers(list(known.values()))


def stateful(part: Any) -> Any:
    if callable(getattr(part, "state_dict", None)) and callable(getattr(part, "load_state_dict", None)):
        return part
    raise ArgumentTypeError(
        f"Rewind(): {describe(part)} has no state_dict and load_state_dict.",
        why="whatever changes from step to step must be put back.",
        fix="gg.Rewind(model, optimizer, scheduler)   # modules, optimizers, schedulers, scalers",
    )


def _state_of(part: Any) -> Any:
    """Return what a part writes from step to step, as a tree of tensors and plain values."""
    if isinstance(part, torch.nn.Module):
        tensors = tensors_of(part)
        lazy = [name for name, tensor in tensors.items() if tensor is not None and is_lazy(tensor)]
        if lazy:
            what = f"Rewind.batches(): {listed(lazy, 3)} of {type(part).__name__} have no values yet."
            why = "a lazy module gets its weights in the first forward, and a snapshot is taken before it."
            raise ArgumentValueError(what, why=why, fix="model(batch)   # once, before the optimizer is made")
        return {"tensors": tensors, "gradients": [n for n, p in part.named_parameters() if p.grad is not None]}
    if isinstance(part, torch.optim.Optimizer):
        state = {place: part.state[p] for place, p in enumerate(_parameters(part)) if p in part.state}
        return {"state": state, "groups": options_of(part)}
    return part.state_dict()


def _slots_of(module: torch.nn.Module) -> Iterator[tuple[str, dict[str, Any], str]]:
    """Yield every slot of a module that a tensor is or may be in: its name, and where it is."""
    for prefix, part in module.named_modules():
        for table in (parameters_of(part), buffers_of(part)):
            for key in list(table):
                yield f"{prefix}.{key}" if prefix else key, table, key


def tensors_of(module: torch.nn.Module) -> dict[str, Any]:
    return {name: table[key] for name, table, key in _slots_of(module)}


def options_of(part: Any) -> Any:
    """Return what a loop sets itself: the options of an optimizer, the state of a scheduler."""
    if isinstance(part, torch.optim.Optimizer):
        return [{key: group[key] for key in group if key != "params"} for group in part.param_groups]
    return None if isinstance(part, torch.nn.Module) else part.state_dict()


def _parameters(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _mapped(function: Callable[[torch.Tensor, Any], torch.Tensor], tree: Any, other: Any) -> Any:
    """Rebuild a tree with a function of each of its tensors and what another tree has in its place; copy the rest."""
    if isinstance(tree, torch.Tensor):
        return function(tree, other)
    if type(tree) in (dict, OrderedDict):
        named = other if isinstance(other, Mapping) else {}
        return {key: _mapped(function, part, named.get(key)) for key, part in tree.items()}
    if type(tree) in (list, tuple):
        alike = isinstance(other, list | tuple) and len(other) == len(tree)
        pairs = zip(tree, other if alike else [None] * len(tree), strict=True)
        return type(tree)([_mapped(function, part, known) for part, known in pairs])
    return copy.deepcopy(tree)


class _Copies:
    """Copies that are to be made in one call, and what of."""

    # One tensor in two places has one copy, so that it is one tensor again when it is restored.

    def __init__(self) -> None:
        self.memory: dict[int, torch.Tensor] = {}  # by the id of the tensor
        self.sources: dict[int, torch.Tensor] = {}  # by the id of its copy

    def memory_for(self, tensor: torch.Tensor, old: Any) -> torch.Tensor:
        """Return memory for a copy: that of an older copy where it fits, else on the host, pinned for accelerators."""
        if id(tensor) not in self.memory:
            local = local_part(tensor.detach())
            fits = isinstance(old, torch.Tensor) and (old.shape, old.dtype) == (local.shape, local.dtype)
            if not fits or id(old) in self.sources:
                old = torch.empty_like(local, device="cpu", pin_memory=not local.is_cpu)
            self.memory[id(tensor)], self.sources[id(old)] = old, tensor
        return self.memory[id(tensor)]

    def pairs(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        return list(zip(self.memory.values(), self.sources.values(), strict=True))


def copy_of(tree: Any) -> Any:
    copies = _Copies()
    copied = _mapped(copies.memory_for, tree, None)
    for memory, source in copies.pairs():
        memory.copy_(local_part(source.detach()))
    return copied


def _put_back(part: Any, kept: Any, sources: dict[int, torch.Tensor]) -> str | None:
    """Write a copy into the tensors that it was made of, and put these where they were; return a doubt, if any."""
    if isinstance(part, torch.nn.Module):
        added = []
        for name, table, key in _slots_of(part):
            if name in kept["tensors"]:
                tensor = _written(table[key], kept["tensors"][name], sources)
                if table[key] is not tensor:
                    table[key] = tensor
            elif isinstance(table[key], torch.nn.Parameter):
                added.append(name)
            else:
                del table[key]  # a buffer that the module made in its forward; it makes it again
        for name, parameter in part.named_parameters():
            if name not in kept["gradients"]:
                parameter.grad = None
            elif parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        return f"parameters were added since the snapshot: {listed(added, 3)}" if added else None
    if isinstance(part, torch.optim.Optimizer):
        for place, trained in enumerate(_parameters(part)):
            if place in kept["state"]:
                state = _written(part.state.get(trained), kept["state"][place], sources, trained.device)
                part.state[trained] = state
            else:
                part.state.pop(trained, None)
        return set_groups(part, kept["groups"], sources)
    part.load_state_dict(copy.deepcopy(kept))
    return None


def set_groups(optimizer: torch.optim.Optimizer, groups: list[Any], sources: dict[int, torch.Tensor]) -> str | None:
    for group, saved in zip(optimizer.param_groups, groups, strict=False):
        for key in [key for key in group if key != "params" and key not in saved]:
            del group[key]
        group.update({key: _written(group.get(key), value, sources) for key, value in saved.items()})
    return None if len(groups) == len(optimizer.param_groups) else "parameter groups were added since the snapshot"


def _written(value: Any, kept: Any, sources: dict[int, torch.Tensor], device: torch.device | None = None) -> Any:
    """Return what a copy was made of, with the values of the copy."""

    # It is the tensor that was copied, not the one that is in its place now: that may be a batch, or in two places.
    # Only after a resume it is that one.
    def write(kept: torch.Tensor, value: Any) -> torch.Tensor:
        if id(kept) not in sources:
            taken = any(value is source for source in sources.values())
            fits = isinstance(value, torch.Tensor) and not taken and value.dtype is kept.dtype
            sources[id(kept)] = value if fits else kept.to(device if kept.ndim else None, copy=True)
        source = sources[id(kept)]
        local = local_part(source.detach())
        if local.shape != kept.shape or any(s == 0 and n > 1 for s, n in zip(local.stride(), local.shape, strict=True)):
            source.data = kept.to(local.device, copy=True)
        else:
            local.copy_(kept, non_blocking=True)
        return source

    return _mapped(write, kept, value)


def same_values(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and one.shape == other.shape and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same_values(value, other[key]) for key, value in one.items())
    if isinstance(one, list) or (isinstance(one, tuple) and one and not isinstance(one[0], int)):
        return len(one) == len(other) and all(map(same_values, one, other))
    return bool((one == other).all()) if hasattr(one, "dtype") else bool(one == other)
