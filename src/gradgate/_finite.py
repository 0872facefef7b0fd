"""Is everything finite? Asked of all gradients before every step, so it has to cost next to nothing."""

from __future__ import annotations

import torch

from gradgate import _kernels
from gradgate._torch_private import find_non_finite


class FiniteCheck:
    """Looks for NaN and Inf in a loss and in many gradients at once, with one read by the host."""

    def __init__(self) -> None:
        self._flags: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # by the device's number, which is read fastest

    def has_nonfinite(self, gradients: list[torch.Tensor], loss: torch.Tensor | None = None) -> bool:
        if loss is None and (found := _kernels.nonfinite(gradients)) is not None:
            return found
        answer = flags = None
        if gradients:
            first = gradients[0]
            # Taken out while in use: an interrupt must not leave a flag that is set.
            answer, one = flags = self._flags.pop(first.get_device(), None) or _new_flags(first)
            try:
                find_non_finite(gradients, answer, one)
            except RuntimeError:
                # Several devices; sparse, complex or overlapping gradients; or a device without this pass.
                answer = torch.stack([_any_non_finite(each).to(first.device) for each in gradients]).any().float()
                flags = None
        if loss is not None:
            # 0 if the loss is finite and NaN if not: it travels with the flag in the same read.
            nothing = loss - loss
            answer = nothing if answer is None else answer + nothing.to(answer.device)
        if answer is not None and answer.item() != 0:
            return True
        if flags is not None:
            self._flags[first.get_device()] = flags
        return False


def _new_flags(like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.zeros(1, device=like.device), torch.ones(1, device=like.device)


def _any_non_finite(tensor: torch.Tensor) -> torch.Tensor:
    values = tensor.coalesce().values() if tensor.is_sparse else tensor
    return ~torch.isfinite(values).all()
