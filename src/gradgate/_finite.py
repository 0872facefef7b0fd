"""Is everything finite? Asked of all gradients before every step, so it has to cost next to nothing."""

from __future__ import annotations

import torch

from gradgate._torch_compat import find_non_finite

__all__ = ["FiniteCheck"]


class FiniteCheck:
    """Looks for NaN and Inf in a loss and in many gradients at once, with one read by the host."""

    def __init__(self) -> None:
        self._flags: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # by the device's number, which is read fastest

    def alarm(self, gradients: list[torch.Tensor], loss: torch.Tensor | None = None) -> bool:
        """Tell whether anything is not finite.

        Args:
            gradients: The gradients.
            loss: The loss, where it has not been looked at yet.

        Returns:
            True if there is a NaN or an Inf.
        """
        answer = self._found(gradients)
        if loss is not None:
            # 0 if the loss is finite and NaN if not: it travels with the flag in the same read.
            nothing = loss - loss
            answer = nothing if answer is None else answer + nothing.to(answer.device)
        alarm = answer is not None and answer.item() != 0
        if alarm:
            self._flags.clear()
        return alarm

    def _found(self, gradients: list[torch.Tensor]) -> torch.Tensor | None:
        if not gradients:
            return None
        first = gradients[0]
        flags = self._flags.get(first.get_device())
        if flags is None:
            flags = self._flags[first.get_device()] = (
                torch.zeros(1, device=first.device),
                torch.ones(1, device=first.device),
            )
        try:
            find_non_finite(gradients, *flags)
        except RuntimeError:  # several devices; sparse, complex or overlapping gradients; a device without this pass
            return torch.stack([_any_non_finite(gradient).to(first.device) for gradient in gradients]).any().float()
        return flags[0]


def _any_non_finite(tensor: torch.Tensor) -> torch.Tensor:
    values = tensor.coalesce().values() if tensor.is_sparse else tensor
    return ~torch.isfinite(values).all()
