"""What is frozen of one parameter, by which handles, and how it is kept from moving; the package says how.

Of a sharded parameter (DTensor) each process treats its own shard.
"""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from gradgate import _kernels
from gradgate._state import FREEZES, WATCHERS
from gradgate._torch_distributed import shard_units, sharded_like
from gradgate._torch_private import OPTIMIZER_HOOKS, is_sharded, local_part, parameters_of, write_count

# --- Which elements are frozen --------------------------------------------------------------------------------------


class FrozenRegion:
    """Elements of a tensor by an index: `...` for all, one tensor for rows, one for each dimension for elements."""

    # The cost is paid in every step: an index costs what it names, a dense mask one pass over gradient and values.

    def __init__(self, index: tuple[Any, ...], count: int) -> None:
        self.index, self.count = index, count

    def _on(self, device: torch.device) -> tuple[Any, ...]:
        if self.index[0] is not ... and self.index[0].device != device:
            self.index = tuple(index.to(device) for index in self.index)
        return self.index

    def gather(self, values: torch.Tensor) -> torch.Tensor:
        """Return the frozen values in the order of the elements; they may share memory with `values`."""
        return values[self._on(values.device)].flatten()

    def read(self, values: torch.Tensor) -> torch.Tensor:
        """Copy the frozen values, in a form that `write` understands."""
        return values[self._on(values.device)].clone()

    def write(self, values: torch.Tensor, kept: torch.Tensor) -> None:
        """Put the frozen values back bit by bit, and leave the others as they are."""
        values[self._on(values.device)] = kept

    def clear(self, gradient: torch.Tensor) -> None:
        """Make the gradient exactly 0 at the frozen elements, in place."""
        gradient[self._on(gradient.device)] = gradient.new_zeros(())

    def mask(self, shape: torch.Size, device: torch.device) -> torch.Tensor:
        """Return a boolean mask; True is frozen."""
        mask = torch.zeros(shape, dtype=torch.bool, device=device)
        mask[self._on(device)] = True
        return mask

    def cleared(self, gradient: torch.Tensor) -> torch.Tensor:
        """Return a new gradient that is exactly 0 at the frozen elements, for sparse ones and ones with a graph."""
        if not gradient.is_sparse:
            return gradient.masked_fill(self.mask(gradient.shape, gradient.device), 0)
        gradient = gradient.coalesce()
        indices, values = gradient.indices(), gradient.values()
        frozen = self.mask(gradient.shape, gradient.device)[tuple(indices)]
        return torch.sparse_coo_tensor(
            indices, values.masked_fill(frozen, 0), gradient.shape, is_coalesced=True, check_invariants=False
        )

    def place(self, number: int, shape: torch.Size) -> tuple[int, ...]:
        """Return the index of an element by its number in `gather`."""
        return tuple(self.mask(shape, torch.device("cpu")).nonzero()[number].tolist())


def whole_region(tensor: torch.Tensor) -> FrozenRegion:
    """Return all elements of the part of a tensor that is in this process."""
    return FrozenRegion((...,), local_part(tensor).numel())


class MaskedRegion(FrozenRegion):
    """Many elements, as a dense mask."""

    def __init__(self, mask: torch.Tensor) -> None:
        super().__init__((mask.clone(),), int(mask.sum()))

    def _like(self, values: torch.Tensor) -> torch.Tensor:
        """Return the mask on the device of values and with their strides."""
        frozen: torch.Tensor = self.index[0]
        if frozen.device != values.device or frozen.stride() != values.stride():
            frozen = torch.empty_like(values, dtype=torch.bool).copy_(frozen)
            self.index = (frozen,)
        return frozen

    def read(self, values: torch.Tensor) -> torch.Tensor:
        return values.clone()

    def write(self, values: torch.Tensor, kept: torch.Tensor) -> None:
        frozen = self._like(values)
        # A tensor without gaps is copied with its strides; then all three are one stretch of memory in the same order.
        if frozen.stride() == values.stride() == kept.stride() and _kernels.usable(values, frozen, kept):
            _kernels.overwrite(values, frozen, kept)
        else:
            torch.where(frozen, kept, values, out=values)

    def clear(self, gradient: torch.Tensor) -> None:
        frozen = self._like(gradient)
        if frozen.stride() == gradient.stride() and _kernels.usable(gradient, frozen):
            _kernels.overwrite(gradient, frozen, None)
        else:
            gradient.masked_fill_(frozen, 0)

    def mask(self, shape: torch.Size, device: torch.device) -> torch.Tensor:
        return self.index[0].to(device)  # type: ignore[no-any-return]


def region_of(mask: torch.Tensor) -> FrozenRegion:
    """Choose the cheapest region for a mask; True is frozen."""
    count = int(mask.sum())
    if mask.dim() == 0 or mask.numel() == 0 or 4 * count > 3 * mask.numel():
        return MaskedRegion(mask)
    by_row = mask.flatten(1) if mask.dim() > 1 else mask.unsqueeze(1)
    whole = by_row.all(dim=1)
    if torch.equal(whole, by_row.any(dim=1)):
        return FrozenRegion(whole.nonzero(as_tuple=True), count)
    # Single elements are addressed one by one up to one in 32; beyond that a dense mask is cheaper.
    return FrozenRegion(mask.nonzero(as_tuple=True), count) if 32 * count <= mask.numel() else MaskedRegion(mask)


def union(regions: Collection[FrozenRegion], shape: torch.Size, device: torch.device) -> FrozenRegion:
    """Combine regions of one tensor."""
    if len(regions) == 1:
        return next(iter(regions))
    return region_of(torch.stack([region.mask(shape, device) for region in regions]).any(0))


def shard_region(region: FrozenRegion, parameter: torch.Tensor) -> FrozenRegion:
    """Return the part of a region that is in this process."""
    if not is_sharded(parameter):
        return region
    return region_of(sharded_like(parameter, region.mask(parameter.shape, parameter.device)))


# --- What travels with a parameter ----------------------------------------------------------------------------------


_ATTRIBUTES = (WATCHERS, "__deepcopy__", "__reduce_ex__")


class Watcher:
    """What is called around an optimizer's step. It must not refer to its parameter."""

    late = False

    def awake(self, parameter: torch.Tensor) -> None:
        """Begin, on a parameter that has just been given this watcher or has just been copied or unpickled."""

    def before_step(self, parameter: torch.Tensor, optimizer: torch.optim.Optimizer) -> None: ...

    def after_step(self, parameter: torch.Tensor, optimizer: torch.optim.Optimizer | None) -> None:
        """Act after a step; in the middle of it, before a closure, there is no optimizer."""


def watchers_of(parameter: torch.Tensor) -> dict[str, Any]:
    """Return the watchers of a parameter by their kind; most parameters have none."""
    return getattr(parameter, WATCHERS, {})


def attach(parameter: torch.Tensor, kind: str, watcher: Watcher) -> None:
    """Add a watcher to a parameter; copies and pickles of the parameter carry it."""
    before, after = OPTIMIZER_HOOKS  # ours stay, because torch iterates over them during a step
    before.setdefault(__name__, _before_step)
    after.setdefault(__name__, _after_step)
    if not hasattr(parameter, WATCHERS):
        # copy and pickle look at the object before its class, so this changes one parameter and no other.
        reference = weakref.ref(parameter)
        setattr(parameter, WATCHERS, {})
        parameter.__dict__["__deepcopy__"] = partial(_copied, reference)
        parameter.__dict__["__reduce_ex__"] = partial(_reduced, reference)
    watchers_of(parameter)[kind] = watcher
    watcher.awake(parameter)


def detach(parameter: torch.Tensor, kind: str) -> None:
    """Remove a watcher, if it is there; without the last one the parameter is plain again."""
    removed = watchers_of(parameter).pop(kind, None)
    if removed is not None and not watchers_of(parameter):
        for name in _ATTRIBUTES:
            del parameter.__dict__[name]


def _copied(reference: weakref.ref[torch.Tensor], memo: dict[int, Any]) -> torch.Tensor:
    with _bare(reference) as parameter:
        result: torch.Tensor = type(parameter).__deepcopy__(parameter, memo)  # type: ignore[no-untyped-call]
    return _with_watchers(result, copy.deepcopy(watchers_of(parameter), memo))


def _reduced(reference: weakref.ref[torch.Tensor], protocol: int) -> tuple[Any, ...]:
    with _bare(reference) as parameter:
        function, arguments = type(parameter).__reduce_ex__(parameter, protocol)  # type: ignore[no-untyped-call]
        # Attributes of the user come as the parameter's own dictionary, which gets ours back in a moment.
        arguments = tuple(dict(part) if type(part) is dict else part for part in arguments)
    return _rebuilt, (function, arguments, watchers_of(parameter))


@contextmanager
def _bare(reference: weakref.ref[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Take our attributes off the parameter, so that its class copies it as it always does."""
    parameter = reference()
    assert parameter is not None, "a method of a tensor was called after the tensor was gone"
    ours = {name: parameter.__dict__.pop(name) for name in _ATTRIBUTES}
    try:
        yield parameter
    finally:
        parameter.__dict__.update(ours)


def _rebuilt(function: Callable[..., torch.Tensor], arguments: Any, watchers: dict[str, Watcher]) -> torch.Tensor:
    return _with_watchers(function(*arguments), watchers)


def _with_watchers(parameter: torch.Tensor, watchers: dict[str, Watcher]) -> torch.Tensor:
    for kind, watcher in watchers.items():
        attach(parameter, kind, watcher)
    return parameter


# --- Optimizer steps ------------------------------------------------------------------------------------------------


def _watched(optimizer: torch.optim.Optimizer) -> list[tuple[torch.Tensor, Watcher]]:
    return [
        (parameter, watcher)
        for group in optimizer.param_groups
        for parameter in group["params"]
        for watcher in watchers_of(parameter).values()
    ]


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _before_step(
    optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    for parameter, watcher in (watched := _watched(optimizer)):
        watcher.before_step(parameter, optimizer)
    # Arguments are (optimizer, closure) or the closure comes by name; a step may go without.
    if watched and len(args) > 1 and callable(args[1]):
        return (args[0], _between(args[1], optimizer), *args[2:]), kwargs
    if watched and callable(kwargs.get("closure")):
        return args, {**kwargs, "closure": _between(kwargs["closure"], optimizer)}
    return None


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _after_step(optimizer: torch.optim.Optimizer, *arguments: Any, ended: bool = True) -> None:
    for parameter, watcher in sorted(_watched(optimizer), key=lambda pair: pair[1].late):
        watcher.after_step(parameter, optimizer if ended else None)


def _between(closure: Callable[[], Any], optimizer: torch.optim.Optimizer) -> Callable[[], Any]:
    """Show the closure the frozen values, also in the middle of a step (line searches)."""

    def between() -> Any:
        _after_step(optimizer, ended=False)
        try:
            result = closure()
        except BaseException:  # the step ends here; values that are loaded before the next one are intended
            _after_step(optimizer)
            raise
        _before_step(optimizer, (), {})
        return result

    return between


# --- Who froze a parameter ------------------------------------------------------------------------------------------


ROWS_TOKEN = "train_rows"  # the freeze of a table whose rows learn elsewhere; there is one at most

# State whose neutral value is not 0: the average of the weights (ASGD) and the size of the next step (Rprop).
_NOT_NEUTRAL_AT_ZERO = {"ax", "step_size"}


class FreezeState(Watcher):
    """The freezes and pins of one parameter, counted: it is free again without the last of them."""

    def __init__(self) -> None:
        self.freezes: dict[str, str] = {}
        self.pins: dict[str, FrozenRegion] = {}  # of a sharded parameter: by their global index
        self.count = 0  # how many elements are frozen or pinned, over all processes; overlaps count once
        self.learned = True
        self.synchronised = False
        self._region = FrozenRegion((...,), 0)  # what is frozen of the part in this process
        # What follows does not travel.
        self._hook: RemovableHandle | None = None
        self._kept: torch.Tensor | None = None
        self._seen: tuple[Any, ...] = ()
        # The optimizer whose step has begun and not ended: a weak reference.
        self._stepping: Callable[[], torch.optim.Optimizer | None] | None = None
        self._met: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()

    def __getstate__(self) -> dict[str, Any]:
        names = ("freezes", "pins", "count", "learned", "synchronised", "_region")
        return {name: getattr(self, name) for name in names}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__()  # type: ignore[misc]
        self.__dict__.update(state)

    # --- who froze ---------------------------------------------------------------------------------------------

    def freeze(self, parameter: torch.Tensor, token: str, label: str, *, synchronised: bool) -> None:
        """Add a freeze of the whole parameter."""
        if not self.freezes:
            self.learned, self.synchronised = parameter.requires_grad, synchronised
        self.freezes[token] = label
        if not self.synchronised:
            parameter.requires_grad_(False)
        parameter.grad = None
        self._changed(parameter)

    def pin(self, parameter: torch.Tensor, token: str, region: FrozenRegion) -> None:
        self.pins[token] = region
        self._changed(parameter)
        self.mask_gradient(parameter)

    def release(self, parameter: torch.Tensor, token: str) -> None:
        """Remove a freeze or a pin; what no other one has is free, and learns again as it did before."""
        frozen = self.freezes.pop(token, None) is not None
        if frozen and not self.freezes:
            parameter.requires_grad_(self.learned)
        if frozen or self.pins.pop(token, None) is not None:
            self._changed(parameter)

    def _changed(self, parameter: torch.Tensor) -> None:
        if not self.freezes and not self.pins:
            if self._hook is not None:
                self._hook.remove()
            detach(parameter, FREEZES)
            return
        self._kept, self._stepping = None, None
        self._met.clear()
        if self.freezes:
            self.count, self._region = parameter.numel(), whole_region(parameter)
        else:
            together = union(self.pins.values(), parameter.shape, parameter.device)
            self.count, self._region = together.count, shard_region(together, parameter)
        self._listen(parameter)

    # --- gradients ---------------------------------------------------------------------------------------------

    def _listen(self, parameter: torch.Tensor) -> None:
        if self._hook is None and parameter.requires_grad:
            self._hook = parameter.register_post_accumulate_grad_hook(self.mask_gradient)  # type: ignore[no-untyped-call]

    def mask_gradient(self, parameter: torch.Tensor) -> None:
        """Make the gradient exactly 0 where the parameter is frozen."""
        gradient = parameter.grad
        if gradient is None:
            return
        if is_sharded(parameter):
            # Some operations on DTensors leave a gradient that is distributed otherwise than its parameter.
            placed: Any = parameter
            if gradient.placements != placed.placements:  # type: ignore[attr-defined]
                gradient = gradient.redistribute(placed.device_mesh, placed.placements)  # type: ignore[attr-defined]
                parameter.grad = gradient
            self._region.clear(local_part(gradient.detach()))
        elif gradient.is_sparse or gradient.requires_grad:
            parameter.grad = self._region.cleared(gradient)
        else:
            self._region.clear(gradient)

    # --- steps -------------------------------------------------------------------------------------------------

    def awake(self, parameter: torch.Tensor) -> None:
        self._listen(parameter)

    def before_step(self, parameter: torch.Tensor, optimizer: torch.optim.Optimizer) -> None:
        """Drop the gradient, or keep a copy of the frozen values."""
        if self.freezes:
            parameter.grad = None
            # All of torch's optimizers skip a parameter without a gradient, except L-BFGS, which steps along one
            # direction for all parameters. Of others nothing is known.
            kind = type(optimizer)
            if kind.__module__.startswith("torch.optim.") and kind is not torch.optim.LBFGS:
                if self._stepping is None:
                    self._kept = None  # of an earlier step: what was loaded since then would be undone
                return
        elif self._hook is None:  # the gradient did not come from a backward that we could listen to
            self._listen(parameter)
            self.mask_gradient(parameter)
        if optimizer not in self._met:
            self._met.add(optimizer)
            self._clear_memory(parameter, optimizer)
        if self._stepping is not None:  # a step inside another one, or an exception ended the last one
            self._restore(parameter)
        elif self._kept is None or self._seen != _mark(parameter):  # the first step, or new values were loaded
            self._kept = self._region.read(local_part(parameter.detach()))
        if self._stepping is None or self._stepping() is None:
            self._stepping = weakref.ref(optimizer)

    def after_step(self, parameter: torch.Tensor, optimizer: torch.optim.Optimizer | None) -> None:
        """Put the frozen values back, also at the end of a step that has other steps inside (`super().step()`)."""
        if self._kept is None:
            return
        self._restore(parameter)
        self._seen = _mark(parameter)
        if optimizer is not None and self._stepping is not None and self._stepping() is optimizer:
            self._stepping = None

    def _restore(self, parameter: torch.Tensor) -> None:
        if self._kept is not None:
            with torch.no_grad():
                self._region.write(local_part(parameter.detach()), self._kept)

    def _clear_memory(self, parameter: torch.Tensor, optimizer: torch.optim.Optimizer) -> None:
        """Remove the frozen elements from an optimizer's state, which could move them or mix them into others."""
        if isinstance(optimizer, torch.optim.LBFGS):
            # Its state is one list of directions through all parameters; they lead out of what is free now.
            optimizer.state.clear()
        elif not self.freezes:
            for name, value in optimizer.state.get(parameter, {}).items():
                alike = isinstance(value, torch.Tensor) and value.shape == parameter.shape and value.is_floating_point()
                if alike and name not in _NOT_NEUTRAL_AT_ZERO:
                    self._region.clear(local_part(value.detach()))


def _mark(parameter: torch.Tensor) -> tuple[Any, ...]:
    """Return something that differs after the values were written in place or replaced."""
    return write_count(parameter), local_part(parameter.detach()).data_ptr(), parameter.dtype, parameter.device


def freeze_state_of(parameter: torch.Tensor) -> FreezeState | None:
    return watchers_of(parameter).get(FREEZES)


def holds(parameter: torch.Tensor, token: str) -> bool:
    """Whether a parameter has this freeze or pin."""
    frozen = freeze_state_of(parameter)
    return frozen is not None and (token in frozen.freezes or token in frozen.pins)


def release(parameter: torch.Tensor, token: str) -> None:
    """Remove a freeze or a pin, if the parameter has it."""
    if (frozen := freeze_state_of(parameter)) is not None:
        frozen.release(parameter, token)


def make_freeze_state(parameter: torch.Tensor) -> FreezeState:
    """Return the freeze state of a parameter, a new one if it has none."""
    if FREEZES not in watchers_of(parameter):
        attach(parameter, FREEZES, FreezeState())
    return watchers_of(parameter)[FREEZES]  # type: ignore[no-any-return]


# --- Modules found by the garbage collector -------------------------------------------------------------------------


def owners_of(parameter: torch.Tensor) -> list[nn.Module]:
    """List all modules that have this parameter as their own; several if it is tied."""
    return [
        module
        for module in gc.get_objects()
        if issubclass(type(module), nn.Module) and any(one is parameter for one in parameters_of(module).values())
    ]


def replicated() -> set[int]:
    """List the ids of all parameters that some DistributedDataParallel of this process has."""
    # DDP counts the gradients of the parameters that required one when it was built. A parameter that is switched off
    # later stops the training ("expected to have finished reduction"), one that is switched on later is never
    # synchronised.
    wrappers = [thing for thing in _distributed_objects() if issubclass(type(thing), DistributedDataParallel)]
    return {id(parameter) for wrapper in wrappers for parameter in wrapper.module.parameters()}


def gathered() -> set[int]:
    """List the ids of all whole parameters that FSDP2 has gathered; what is done to them is lost when it reshards."""
    shards = [thing for thing in _distributed_objects() if hasattr(type(thing), "set_requires_gradient_sync")]
    return {id(parameter) for shard in shards for unit in shard_units([shard]) for parameter in unit.gathered}


def _distributed_objects() -> list[Any]:
    ready = torch.distributed.is_available() and torch.distributed.is_initialized()
    return gc.get_objects() if ready else []
