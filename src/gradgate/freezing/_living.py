"""Modules that a parameter cannot name but that have it: found among the living objects of the process.

A wrapped module does not know its wrapper and a parameter does not know its modules, so the garbage collector is
asked. That takes some milliseconds and happens when something is frozen, never in a step.
"""

from __future__ import annotations

import gc

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

__all__ = ["owners_of", "replicated"]


def owners_of(parameter: torch.Tensor) -> list[nn.Module]:
    """Give all modules that have this parameter as their own; several if it is tied."""
    return [
        module
        for module in gc.get_objects()
        if issubclass(type(module), nn.Module)
        and any(candidate is parameter for candidate in module.__dict__.get("_parameters", {}).values())
    ]


def replicated() -> set[int]:
    """Give the ids of all parameters that some DistributedDataParallel of this process has.

    DDP counts the gradients of the parameters that required one when it was built. A parameter that is switched off
    later stops the training ("expected to have finished reduction"), one that is switched on later is never
    synchronised.
    """
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return set()
    wrappers = [thing for thing in gc.get_objects() if issubclass(type(thing), DistributedDataParallel)]
    return {id(parameter) for wrapper in wrappers for parameter in wrapper.module.parameters()}
