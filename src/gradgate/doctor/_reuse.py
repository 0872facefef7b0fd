"""Gradients that an optimizer used and that were still there at its next step: somebody forgot `zero_grad`."""

from __future__ import annotations

import weakref
from collections.abc import Iterable

import torch

from gradgate.doctor._memory import region_of


class Reuse:
    """Remembers which gradients were used.

    A gradient that was zeroed is another tensor (`set_to_none=True`), or a zero was written to it.
    """

    def __init__(self) -> None:
        self._used: dict[int, list[tuple[int, weakref.ref[torch.Tensor]]]] = {}
        self._zeroed: set[int] = set()
        self._at_start: list[tuple[int, weakref.ref[torch.Tensor]]] = []

    def start(self, parameters: Iterable[torch.Tensor]) -> None:
        """Remember the gradients that are there when the trace begins."""
        self._at_start = [(id(p), weakref.ref(p.grad)) for p in parameters if p.grad is not None]

    def zero(self, gradient: torch.Tensor) -> None:
        """Note that a tensor was zeroed."""
        self._zeroed.add(region_of(gradient).storage)

    def use(self, optimizer: torch.optim.Optimizer) -> tuple[int, int]:
        """Note that an optimizer uses the gradients of its parameters."""
        held = {id(p): p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None}
        again = self._count(held, self._used.get(id(optimizer), []))
        old = self._count(held, self._at_start)
        self._used[id(optimizer)] = [(number, weakref.ref(gradient)) for number, gradient in held.items()]
        self._at_start = []
        self._zeroed.clear()
        return again, old

    def _count(self, held: dict[int, torch.Tensor], known: list[tuple[int, weakref.ref[torch.Tensor]]]) -> int:
        count = 0
        for number, reference in known:
            gradient = reference()
            if gradient is not None and held.get(number) is gradient:
                count += region_of(gradient).storage not in self._zeroed
        return count
