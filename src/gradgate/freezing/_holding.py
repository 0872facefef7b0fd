"""What is held of one parameter, by whom, and how it is kept from moving.

A parameter that is frozen as a whole loses its gradient before every step: torch's optimizers then leave it alone,
decay and momentum included. Frozen elements of a parameter have a gradient of exactly 0 from the moment it is
accumulated, and their values are written back after every step.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from gradgate._held import HOLD
from gradgate.freezing._carrying import Watcher, attach, detach, watchers_of
from gradgate.freezing._regions import Everything, Region, union
from gradgate.freezing._steps import skips_missing_gradients, watch_steps

__all__ = ["ROWS_TOKEN", "Hold", "hold_of", "take_hold"]

ROWS_TOKEN = "train_rows"  # the freeze of a table whose rows learn elsewhere; there is one at most

# State that does not rest at 0: the average of the weights (ASGD) and the size of the next step (Rprop).
_NOT_AT_REST_AT_ZERO = {"ax", "step_size"}


class Hold(Watcher):
    """The freezes and pins of one parameter, counted: it is free again when the last of them has gone.

    Attributes:
        freezes: Who froze it as a whole: the words of each call, by the token of its handle.
        pins: Which elements are pinned, by the token of the pin.
        learned: Whether the parameter required gradients before its first freeze.
        synchronised: Whether DistributedDataParallel waits for its gradient, so that there must be one.
    """

    def __init__(self) -> None:
        self.freezes: dict[str, str] = {}
        self.pins: dict[str, Region] = {}
        self.learned = True
        self.synchronised = False
        self._region: Region | None = None
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

    def pin(self, parameter: torch.Tensor, token: str, region: Region) -> None:
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
            detach(parameter, HOLD)
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
        """Begin on a parameter that was given this hold, or on a copy of one."""
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
    return parameter._version, parameter.data_ptr(), parameter.dtype, parameter.device


def hold_of(parameter: torch.Tensor) -> Hold | None:
    """Give the hold of a parameter, if it has one."""
    return watchers_of(parameter).get(HOLD)


def take_hold(parameter: torch.Tensor) -> Hold:
    """Give the hold of a parameter, a new one if it has none."""
    hold = hold_of(parameter)
    if hold is None:
        hold = Hold()
        attach(parameter, HOLD, hold)
    return hold
