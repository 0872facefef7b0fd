"""What is frozen of one parameter, by whom, and how it is kept from moving.

A parameter that is frozen as a whole loses its gradient before every step: torch's optimizers then leave it alone,
decay and momentum included. Frozen elements have a gradient of exactly 0 from the moment it is accumulated, and
their values are written back after every step.

All of a parameter, whole rows, a few single elements and a dense mask are each kept in their own form, because the
cost is paid in every step: rows and single elements cost what they are, a dense mask costs one pass over gradient
and values. The state travels with the parameter into copies and pickles.
"""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from gradgate import _kernels
from gradgate._state import FREEZES, WATCHERS
from gradgate._torch_private import OPTIMIZER_HOOKS, parameters_of, write_count

# --- Which elements are frozen --------------------------------------------------------------------------------------


_FEW = 32  # single elements are addressed one by one up to one in so many; beyond that a dense mask is cheaper


class FrozenRegion:
    """Some elements of a parameter; `count` says how many."""

    count: int

    def read(self, values: torch.Tensor) -> torch.Tensor:
        """Copy the frozen values, in a form that `write` understands."""
        return self.gather(values)

    def write(self, values: torch.Tensor, kept: torch.Tensor) -> None:
        """Put the frozen values back, bit by bit; the others are not touched."""
        raise NotImplementedError

    def clear(self, gradient: torch.Tensor) -> None:
        """Make the gradient exactly 0 at the frozen elements, in place."""
        raise NotImplementedError

    def gather(self, values: torch.Tensor) -> torch.Tensor:
        """Give the frozen values one after the other, in the order of the elements."""
        raise NotImplementedError

    def mask(self, shape: torch.Size, device: torch.device) -> torch.Tensor:
        """Give the region as a boolean mask of the parameter's shape; True is frozen."""
        raise NotImplementedError

    def cleared(self, gradient: torch.Tensor) -> torch.Tensor:
        """Give a new gradient that is exactly 0 at the frozen elements; sparse ones, and ones with a graph."""
        if not gradient.is_sparse:
            return gradient.masked_fill(self.mask(gradient.shape, gradient.device), 0)
        gradient = gradient.coalesce()
        indices, values = gradient.indices(), gradient.values()
        frozen = self.mask(gradient.shape, gradient.device)[tuple(indices)]
        return torch.sparse_coo_tensor(
            indices, values.masked_fill(frozen, 0), gradient.shape, is_coalesced=True, check_invariants=False
        )

    def place(self, number: int, shape: torch.Size) -> tuple[int, ...]:
        """Give the index of the element that stands at this place of `gather`."""
        at = self.mask(shape, torch.device("cpu")).flatten().nonzero()[number, 0]
        return tuple(int(i) for i in torch.unravel_index(at, shape))


class Everything(FrozenRegion):
    """All elements."""

    def __init__(self, count: int) -> None:
        self.count = count

    def gather(self, values: torch.Tensor) -> torch.Tensor:
        return values.clone().flatten()

    def read(self, values: torch.Tensor) -> torch.Tensor:
        return values.clone()

    def write(self, values: torch.Tensor, kept: torch.Tensor) -> None:
        values.copy_(kept)

    def clear(self, gradient: torch.Tensor) -> None:
        gradient.zero_()

    def mask(self, shape: torch.Size, device: torch.device) -> torch.Tensor:
        return torch.ones(shape, dtype=torch.bool, device=device)

    def place(self, number: int, shape: torch.Size) -> tuple[int, ...]:
        return tuple(int(i) for i in torch.unravel_index(torch.tensor(number), shape))


class Rows(FrozenRegion):
    """Whole rows: places along the first dimension."""

    def __init__(self, index: torch.Tensor, shape: torch.Size) -> None:
        self.index = index
        self.count = len(index) * shape[1:].numel()
        # Where nearly all is frozen it is quicker to set the few others aside and to treat the whole.
        self.others = None
        if 4 * len(index) > 3 * shape[0]:
            free = torch.ones(shape[0], dtype=torch.bool, device=index.device)
            free[index] = False
            self.others = free.nonzero().squeeze(1)

    def _here(self, device: torch.device) -> torch.Tensor:
        if self.index.device != device:
            self.index = self.index.to(device)
            self.others = self.others.to(device) if self.others is not None else None
        return self.index

    def read(self, values: torch.Tensor) -> torch.Tensor:
        return values.index_select(0, self._here(values.device)) if self.others is None else values.clone()

    def write(self, values: torch.Tensor, kept: torch.Tensor) -> None:
        index = self._here(values.device)
        if self.others is None:
            values.index_copy_(0, index, kept)
        else:  # in this order: at no time, whatever interrupts, are the others anything but what they learned
            kept.index_copy_(0, self.others, values.index_select(0, self.others))
            values.copy_(kept)

    def clear(self, gradient: torch.Tensor) -> None:
        index = self._here(gradient.device)
        if self.others is None:
            gradient.index_fill_(0, index, 0)
        else:
            aside = gradient.index_select(0, self.others)
            gradient.zero_().index_copy_(0, self.others, aside)

    def gather(self, values: torch.Tensor) -> torch.Tensor:
        return values.index_select(0, self._here(values.device)).flatten()

    def mask(self, shape: torch.Size, device: torch.device) -> torch.Tensor:
        rows = torch.zeros(shape[0], dtype=torch.bool, device=device)
        rows[self.index.to(device)] = True
        return rows.reshape(-1, *[1] * (len(shape) - 1)).expand(shape)

    def place(self, number: int, shape: torch.Size) -> tuple[int, ...]:
        row, rest = divmod(number, shape[1:].numel())
        inner = torch.unravel_index(torch.tensor(rest), shape[1:]) if len(shape) > 1 else ()
        return (int(self.index[row]), *(int(i) for i in inner))


class Points(FrozenRegion):
    """A few single elements, each by its index."""

    def __init__(self, mask: torch.Tensor) -> None:
        self.index = mask.nonzero(as_tuple=True)
        self.count = len(self.index[0])

    def _here(self, device: torch.device) -> tuple[torch.Tensor, ...]:
        if self.index[0].device != device:
            self.index = tuple(i.to(device) for i in self.index)
        return self.index

    def gather(self, values: torch.Tensor) -> torch.Tensor:
        return values[self._here(values.device)]

    def write(self, values: torch.Tensor, kept: torch.Tensor) -> None:
        values.index_put_(self._here(values.device), kept)

    def clear(self, gradient: torch.Tensor) -> None:
        gradient.index_put_(self._here(gradient.device), gradient.new_zeros(()))

    def mask(self, shape: torch.Size, device: torch.device) -> torch.Tensor:
        mask = torch.zeros(shape, dtype=torch.bool, device=device)
        mask[tuple(i.to(device) for i in self.index)] = True
        return mask


class Elements(FrozenRegion):
    """Many single elements, as a dense mask."""

    def __init__(self, mask: torch.Tensor) -> None:
        self.frozen = mask.clone()
        self.count = int(mask.sum())

    def _like(self, values: torch.Tensor) -> torch.Tensor:
        """Give the mask on the device of values, and in memory as they are."""
        if self.frozen.device != values.device or self.frozen.stride() != values.stride():
            self.frozen = torch.empty_like(values, dtype=torch.bool).copy_(self.frozen)
        return self.frozen

    def _write(self, values: torch.Tensor, kept: torch.Tensor | None) -> None:
        frozen = self._like(values)
        # A tensor without gaps is copied with its strides; then all three are one stretch of memory in the same order.
        dense = frozen.stride() == values.stride() and (kept is None or kept.stride() == values.stride())
        if dense and _kernels.usable(values, frozen, *([] if kept is None else [kept])):
            _kernels.overwrite(values, frozen, kept)
        elif kept is None:
            values.masked_fill_(frozen, 0)
        else:
            torch.where(frozen, kept, values, out=values)

    def read(self, values: torch.Tensor) -> torch.Tensor:
        return values.clone()

    def write(self, values: torch.Tensor, kept: torch.Tensor) -> None:
        self._write(values, kept)

    def clear(self, gradient: torch.Tensor) -> None:
        self._write(gradient, None)

    def gather(self, values: torch.Tensor) -> torch.Tensor:
        return values[self._like(values)]

    def mask(self, shape: torch.Size, device: torch.device) -> torch.Tensor:
        return self.frozen.to(device)


def region_of(mask: torch.Tensor) -> FrozenRegion:
    """Give the cheapest region for a mask of the parameter's shape; True is frozen."""
    if mask.dim() == 0 or mask.numel() == 0:
        return Elements(mask)
    by_row = mask.reshape(len(mask), -1)
    whole = by_row.all(dim=1)
    if bool((whole == by_row.any(dim=1)).all()):
        return Rows(whole.nonzero().squeeze(1), mask.shape)
    return Points(mask) if int(mask.sum()) * _FEW <= mask.numel() else Elements(mask)


def union(regions: Iterable[FrozenRegion], like: torch.Tensor) -> FrozenRegion | None:
    """Give the region that holds what any of these holds."""
    regions = list(regions)
    if len(regions) < 2:
        return regions[0] if regions else None
    together = regions[0].mask(like.shape, like.device).clone()
    for region in regions[1:]:
        together |= region.mask(like.shape, like.device)
    return region_of(together)


# --- What travels with a parameter ----------------------------------------------------------------------------------


_ATTRIBUTES = (WATCHERS, "__deepcopy__", "__reduce_ex__")


class Watcher:
    """What wants to be asked around an optimizer's step. It must not refer to its parameter."""

    late = False

    def awake(self, parameter: torch.Tensor) -> None:
        """Begin, on a parameter that has just been given this watcher or has just been copied or unpickled."""

    def before_step(self, parameter: torch.Tensor, optimizer: torch.optim.Optimizer) -> None:
        """Look at the parameter before an optimizer's step."""

    def before_evaluation(self, parameter: torch.Tensor) -> None:
        """Look at the parameter before the optimizer evaluates its closure in the middle of a step."""

    def after_evaluation(self, parameter: torch.Tensor) -> None:
        """Look at the parameter after the closure."""

    def after_step(self, parameter: torch.Tensor, optimizer: torch.optim.Optimizer) -> None:
        """Look at the parameter after the step."""


def watchers_of(parameter: torch.Tensor) -> dict[str, Any]:
    """Give the watchers of a parameter by their kind; empty for most parameters."""
    return getattr(parameter, WATCHERS, {})


def attach(parameter: torch.Tensor, kind: str, watcher: Watcher) -> None:
    """Give a parameter a watcher, which from now on goes where the parameter goes."""
    if not hasattr(parameter, WATCHERS):
        # copy and pickle ask the object itself before its class, so this reaches one parameter and no other.
        reference = weakref.ref(parameter)
        setattr(parameter, WATCHERS, {})
        parameter.__dict__["__deepcopy__"] = partial(_copied, reference)
        parameter.__dict__["__reduce_ex__"] = partial(_reduced, reference)
    watchers_of(parameter)[kind] = watcher
    watcher.awake(parameter)


def detach(parameter: torch.Tensor, kind: str) -> None:
    """Take a watcher away; with the last one the parameter is plain again."""
    watchers_of(parameter).pop(kind)
    if not watchers_of(parameter):
        for name in _ATTRIBUTES:
            del parameter.__dict__[name]


def _copied(reference: weakref.ref[torch.Tensor], memo: dict[int, Any]) -> torch.Tensor:
    parameter = _alive_parameter(reference)
    if id(parameter) in memo:
        return memo[id(parameter)]  # type: ignore[no-any-return]
    with _bare(parameter):
        result: torch.Tensor = type(parameter).__deepcopy__(parameter, memo)  # type: ignore[no-untyped-call]
    for kind, watcher in watchers_of(parameter).items():
        attach(result, kind, copy.deepcopy(watcher, memo))
    return result


def _reduced(reference: weakref.ref[torch.Tensor], protocol: int) -> tuple[Any, ...]:
    parameter = _alive_parameter(reference)
    with _bare(parameter):
        function, arguments = type(parameter).__reduce_ex__(parameter, protocol)  # type: ignore[no-untyped-call]
        # Attributes of the user come as the living dictionary, to which ours go back in a moment.
        arguments = tuple(dict(part) if type(part) is dict else part for part in arguments)
    return _rebuilt, (function, arguments, watchers_of(parameter))


@contextmanager
def _bare(parameter: torch.Tensor) -> Iterator[None]:
    """Take our attributes off, so that the class copies the parameter as it always does."""
    ours = {name: parameter.__dict__.pop(name) for name in _ATTRIBUTES}
    try:
        yield
    finally:
        parameter.__dict__.update(ours)


def _rebuilt(
    function: Callable[..., torch.Tensor], arguments: tuple[Any, ...], watchers: dict[str, Watcher]
) -> torch.Tensor:
    parameter = function(*arguments)
    for kind, watcher in watchers.items():
        attach(parameter, kind, watcher)
    return parameter


def _alive_parameter(reference: weakref.ref[torch.Tensor]) -> torch.Tensor:
    parameter = reference()
    assert parameter is not None, "a method of a tensor was called after the tensor was gone"
    return parameter


# --- Optimizer steps ------------------------------------------------------------------------------------------------


def watch_steps() -> None:
    """Hang the hooks, unless they hang already; one that an interrupt has kept from hanging is hung the next time."""
    before, after = OPTIMIZER_HOOKS
    # They stay: torch walks over all hooks of this kind during a step, so that none may be taken away there.
    before.setdefault(__name__, _before_step)
    after.setdefault(__name__, _after_step)


def skips_missing_gradients(kind: type[torch.optim.Optimizer]) -> bool:
    """Tell whether a class of optimizers is known to leave parameters alone that have no gradient."""
    # All of torch's do but L-BFGS, which steps along one direction for all parameters. Of others nothing is known.
    return kind.__module__.startswith("torch.optim.") and kind is not torch.optim.LBFGS


def _held(optimizer: torch.optim.Optimizer) -> list[tuple[torch.Tensor, Watcher]]:
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
    held = _held(optimizer)
    if not held:
        return None
    for parameter, watcher in held:
        watcher.before_step(parameter, optimizer)
    # Arguments are (optimizer, closure) or the closure comes by name; a step may go without.
    if len(args) > 1 and callable(args[1]):
        return (args[0], _guarded(args[1], held, optimizer), *args[2:]), kwargs
    if callable(kwargs.get("closure")):
        return args, {**kwargs, "closure": _guarded(kwargs["closure"], held, optimizer)}
    return None


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _after_step(optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    for parameter, watcher in sorted(_held(optimizer), key=lambda pair: pair[1].late):
        watcher.after_step(parameter, optimizer)


def _guarded(
    closure: Callable[[], Any], held: list[tuple[torch.Tensor, Watcher]], optimizer: torch.optim.Optimizer
) -> Callable[[], Any]:
    """Let the closure see held values as they are held, also in the middle of a step (line searches)."""

    def guarded() -> Any:
        for parameter, watcher in held:
            watcher.before_evaluation(parameter)
        try:
            result = closure()
        except BaseException:  # the step ends here, and what is loaded before the next one is meant
            for parameter, watcher in held:
                watcher.after_step(parameter, optimizer)
            raise
        for parameter, watcher in held:
            watcher.after_evaluation(parameter)
        return result

    return guarded


# --- Who froze a parameter ------------------------------------------------------------------------------------------


ROWS_TOKEN = "train_rows"  # the freeze of a table whose rows learn elsewhere; there is one at most

# State that does not rest at 0: the average of the weights (ASGD) and the size of the next step (Rprop).
_NOT_AT_REST_AT_ZERO = {"ax", "step_size"}


class FreezeState(Watcher):
    """The freezes and pins of one parameter, counted: it is free again when the last of them has gone."""

    def __init__(self) -> None:
        self.freezes: dict[str, str] = {}
        self.pins: dict[str, FrozenRegion] = {}
        self.learned = True
        self.synchronised = False
        self._region: FrozenRegion | None = None
        self._forget_runtime()

    def _forget_runtime(self) -> None:
        self._hook: RemovableHandle | None = None
        self._kept: torch.Tensor | None = None
        self._seen: tuple[Any, ...] = ()
        # Whose step has begun and not ended: a weak reference.
        self._stepping: Callable[[], torch.optim.Optimizer | None] | None = None
        self._met: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()

    def __getstate__(self) -> dict[str, Any]:
        # What belongs to one process and one parameter is made anew where the copy wakes up.
        return {name: value for name, value in self.__dict__.items() if name not in _RUNTIME}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._forget_runtime()

    # --- who holds ---------------------------------------------------------------------------------------------

    def freeze(self, parameter: torch.Tensor, token: str, label: str, *, synchronised: bool) -> None:
        """Add a freeze of the whole parameter."""
        if not self.freezes:
            self.learned, self.synchronised = parameter.requires_grad, synchronised
        self.freezes[token] = label
        if not self.synchronised:
            parameter.requires_grad_(False)
        parameter.grad = None
        self._changed(parameter)

    def thaw(self, parameter: torch.Tensor, token: str) -> None:
        """Take a freeze away; the parameter learns again if it was the last one."""
        if self.freezes.pop(token, None) is None:
            return
        if not self.freezes:
            parameter.requires_grad_(self.learned)
        self._changed(parameter)

    def pin(self, parameter: torch.Tensor, token: str, region: FrozenRegion) -> None:
        """Add pinned elements."""
        self.pins[token] = region
        self._changed(parameter)
        self.mask_gradient(parameter)

    def release(self, parameter: torch.Tensor, token: str) -> None:
        """Take pinned elements away; those that no other pin holds are free."""
        if self.pins.pop(token, None) is not None:
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
            self._region = Everything(parameter.numel())
        else:
            self._region = union(self.pins.values(), parameter)
        self._listen(parameter)

    @property
    def count(self) -> int:
        """How many elements are frozen or pinned; overlaps count once."""
        return self._region.count if self._region is not None else 0

    def pinned_mask(self, parameter: torch.Tensor) -> torch.Tensor | None:
        """Give what is pinned as a mask of the parameter's shape; None if nothing is."""
        region = union(self.pins.values(), parameter)
        return region.mask(parameter.shape, parameter.device).clone() if region is not None else None

    # --- gradients ---------------------------------------------------------------------------------------------

    def _listen(self, parameter: torch.Tensor) -> None:
        if self._hook is None and parameter.requires_grad:
            self._hook = parameter.register_post_accumulate_grad_hook(self.mask_gradient)  # type: ignore[no-untyped-call]

    def mask_gradient(self, parameter: torch.Tensor) -> None:
        """Make the gradient exactly 0 where the parameter is frozen."""
        gradient = parameter.grad
        if gradient is None or self._region is None:
            return
        if gradient.is_sparse or gradient.requires_grad:
            parameter.grad = self._region.cleared(gradient)
        else:
            self._region.clear(gradient)

    # --- steps -------------------------------------------------------------------------------------------------

    def awake(self, parameter: torch.Tensor) -> None:
        """Begin on a parameter that was given this frozen, or on a copy of one."""
        watch_steps()
        self._listen(parameter)

    def before_step(self, parameter: torch.Tensor, optimizer: torch.optim.Optimizer) -> None:
        """Take the gradient away, or set the frozen values aside."""
        if self.freezes:
            parameter.grad = None
            if skips_missing_gradients(type(optimizer)):
                if self._stepping is None:
                    self._kept = None  # of an earlier step: what was loaded since then would be undone
                return
        elif self._hook is None:  # the gradient did not come from a backward that we could listen to
            self._listen(parameter)
            self.mask_gradient(parameter)
        if optimizer not in self._met:
            self._met.add(optimizer)
            self._quiet(parameter, optimizer)
        self._keep(parameter, optimizer)

    def before_evaluation(self, parameter: torch.Tensor) -> None:
        """Show the closure the frozen values, whatever the step has done so far."""
        self._restore(parameter)

    def after_evaluation(self, parameter: torch.Tensor) -> None:
        """Hide from the step what the closure's backward may have left."""
        if self.freezes:
            parameter.grad = None

    def after_step(self, parameter: torch.Tensor, optimizer: torch.optim.Optimizer) -> None:
        """Put the frozen values back; so too when a step ends in which others began and ended (`super().step()`)."""
        if self._kept is None:
            return
        self._restore(parameter)
        self._seen = _mark(parameter)
        if self._stepping is not None and self._stepping() is optimizer:
            self._stepping = None

    def _keep(self, parameter: torch.Tensor, optimizer: torch.optim.Optimizer) -> None:
        assert self._region is not None
        if self._stepping is not None:  # a step inside another one, or the last one was broken off by an exception
            self._restore(parameter)
        elif self._kept is None or self._seen != _mark(parameter):  # the first step, or new values were loaded
            self._kept = self._region.read(parameter.detach())
        if self._stepping is None or self._stepping() is None:
            self._stepping = weakref.ref(optimizer)

    def _restore(self, parameter: torch.Tensor) -> None:
        if self._region is not None and self._kept is not None:
            with torch.no_grad():
                self._region.write(parameter.detach(), self._kept)

    def _quiet(self, parameter: torch.Tensor, optimizer: torch.optim.Optimizer) -> None:
        """Take the frozen elements out of an optimizer's memory, where it could move them or mix them into others."""
        if isinstance(optimizer, torch.optim.LBFGS):
            # Its memory is one list of directions through all parameters; they lead out of what is free now.
            optimizer.state.clear()
        elif not self.freezes and self._region is not None:
            for name, value in optimizer.state.get(parameter, {}).items():
                alike = isinstance(value, torch.Tensor) and value.shape == parameter.shape and value.is_floating_point()
                if alike and name not in _NOT_AT_REST_AT_ZERO:
                    self._region.clear(value)


_RUNTIME = {"_hook", "_kept", "_seen", "_stepping", "_met"}


def _mark(parameter: torch.Tensor) -> tuple[Any, ...]:
    """Give something that differs once the values were written in place or exchanged."""
    return write_count(parameter), parameter.data_ptr(), parameter.dtype, parameter.device


def freeze_state_of(parameter: torch.Tensor) -> FreezeState | None:
    """Give the freeze state of a parameter, if it has one."""
    return watchers_of(parameter).get(FREEZES)


def make_freeze_state(parameter: torch.Tensor) -> FreezeState:
    """Give the freeze state of a parameter, a new one if it has none."""
    frozen = freeze_state_of(parameter)
    if frozen is None:
        frozen = FreezeState()
        attach(parameter, FREEZES, frozen)
    return frozen


# --- Modules found by the garbage collector -------------------------------------------------------------------------


def owners_of(parameter: torch.Tensor) -> list[nn.Module]:
    """Give all modules that have this parameter as their own; several if it is tied."""
    return [
        module
        for module in gc.get_objects()
        if issubclass(type(module), nn.Module) and any(one is parameter for one in parameters_of(module).values())
    ]


def replicated() -> set[int]:
    """Give the ids of all parameters that some DistributedDataParallel of this process has."""
    # DDP counts the gradients of the parameters that required one when it was built. A parameter that is switched off
    # later stops the training ("expected to have finished reduction"), one that is switched on later is never
    # synchronised.
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return set()
    wrappers = [thing for thing in gc.get_objects() if issubclass(type(thing), DistributedDataParallel)]
    return {id(parameter) for wrapper in wrappers for parameter in wrapper.module.parameters()}
