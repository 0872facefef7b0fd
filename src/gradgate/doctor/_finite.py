"""Are all gradients finite? Asked before every step of an optimizer, so it has to cost next to nothing."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from gradgate._torch_compat import find_non_finite, undispatched

__all__ = ["all_finite"]

_flags: dict[torch.device, tuple[torch.Tensor, torch.Tensor]] = {}


def all_finite(gradients: Iterable[torch.Tensor]) -> bool:
    """Tell whether every element of every tensor is finite.

    Args:
        gradients: The tensors; of any kind and on any devices.

    Returns:
        Whether they are. The host waits once for each device.
    """
    by_device: dict[torch.device, list[torch.Tensor]] = {}
    for gradient in gradients:
        by_device.setdefault(gradient.device, []).append(gradient)
    return all(_all_finite_on(device, tensors) for device, tensors in by_device.items())


def _all_finite_on(device: torch.device, tensors: list[torch.Tensor]) -> bool:
    if device not in _flags:
        _flags[device] = torch.zeros(1, device=device), torch.ones(1, device=device)
    found, one = _flags[device]
    try:
        with undispatched():
            find_non_finite(tensors, found, one)
    except RuntimeError:  # sparse, complex or overlapping gradients, or a device without this pass
        return all(bool(torch.isfinite(t.coalesce().values() if t.is_sparse else t).all()) for t in tensors)
    if found.item() == 0:
        return True
    del _flags[device]
    return False
