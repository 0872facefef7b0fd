"""What the gradients of a step look like, taken down while they are there."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import torch

from gradgate._torch_compat import undispatched
from gradgate.doctor._looking import bad_kind, is_all_zero, is_readable, norm_of


@dataclass(frozen=True, slots=True)
class Gradient:
    """The gradient of one parameter after a step."""

    present: bool
    zero: bool = False
    bad: Literal["nan", "inf"] | None = None
    norm: float = math.nan
    weight_norm: float = math.nan


class Gradients:
    """Takes gradients down: before the optimizer uses them, or at the end of the step."""

    def __init__(self, parameters: Iterable[torch.Tensor] = ()) -> None:
        # A gradient that is still the same tensor at the same version was not touched by this step.
        self._before = {id(p): (p.grad, p.grad._version) for p in parameters if p.grad is not None}
        self.taken: dict[int, Gradient] = {}

    def take(self, parameters: Iterable[torch.Tensor]) -> None:
        """Take down what is there now; what was taken down before stays."""
        with undispatched(), torch.no_grad():
            for parameter in parameters:
                if id(parameter) not in self.taken or not self.taken[id(parameter)].present:
                    self.taken[id(parameter)] = self._look(parameter)

    def _look(self, parameter: torch.Tensor) -> Gradient:
        gradient = parameter.grad
        before = self._before.get(id(parameter))
        if gradient is None or (before is not None and before[0] is gradient and before[1] == gradient._version):
            return Gradient(present=False)
        if gradient.is_sparse:
            gradient = gradient.coalesce().values()
        if not is_readable(gradient):
            return Gradient(present=True, zero=not gradient.numel())
        norm = norm_of(gradient)
        bad = bad_kind(gradient) if not math.isfinite(norm) else None
        zero = norm == 0 and is_all_zero(gradient)
        return Gradient(True, zero, bad, norm, norm_of(parameter) if is_readable(parameter) else math.nan)
