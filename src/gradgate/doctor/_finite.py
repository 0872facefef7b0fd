"""Are all gradients finite? Asked while a tracer may be looking, which need not see that."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from gradgate._finite import FiniteCheck
from gradgate._torch_compat import undispatched

_check = FiniteCheck()


def all_finite(gradients: Iterable[torch.Tensor]) -> bool:
    """Tell whether every element of every tensor is finite."""
    with undispatched():
        return not _check.alarm(list(gradients))
