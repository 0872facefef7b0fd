"""Probing code around modules without running the modules again: they answer with the rows of what they gave.

A fault in the body of a forward or in the loss is found by running that body on many groups of rows. The modules
that had finished by then need not run again for this: while a tape is installed they answer from it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from gradgate._patches import Patches
from gradgate._torch_compat import call_before_modules, tree_flatten, tree_unflatten
from gradgate.guard._batches import batch_dim_of, taking
from gradgate.guard._observer import Answer, Enough

__all__ = ["Tape"]


class Tape:
    """What some modules gave, call by call.

    Args:
        answers: The calls in their order.
        size: How many samples they were given.
        batch_dim: The dimension of the samples.
    """

    def __init__(self, answers: Sequence[Answer], size: int, batch_dim: int) -> None:
        self._batch_dim = batch_dim
        self._by_module: dict[torch.nn.Module, list[Callable[[torch.Tensor], Any]]] = {}
        for answer in answers:
            self._by_module.setdefault(answer.module, []).append(taking(answer.output, size, batch_dim))
        self.usable = all(answer.is_untouched() for answer in answers)
        self.rewind(torch.empty(0, dtype=torch.int64))

    def __bool__(self) -> bool:
        return bool(self._by_module)

    @contextmanager
    def installed(
        self, patches: Patches, *, until: bool = False, besides: torch.nn.Module | None = None
    ) -> Iterator[None]:
        """Let the modules answer from the tape, with the rows that `rewind` was last called with.

        Args:
            patches: Notes what is replaced.
            until: Raise `Enough` at the first call that is not on the tape: it lies behind the place that the tape
                ends at. Else such a call runs as ever.
            besides: A module whose call does not end it.
        """

        def stop(module: torch.nn.Module, args: Any) -> None:
            if module is not besides and module not in self._by_module:
                raise Enough

        with patches.block():
            if until:
                call_before_modules(patches, stop)
            # `forward` in the instance's own dictionary goes before the class's; it was there before only by patching.
            for module in self._by_module:
                answer = partial(self._answer, module, None if until else module.forward)
                patches.put(module.__dict__, "forward", answer)
            yield

    def rewind(self, index: torch.Tensor, leaves: list[torch.Tensor] | None = None) -> None:
        """Start again with other rows.

        Args:
            index: The rows.
            leaves: Where to collect what is answered, as leaves that take a gradient; None for plain values.
        """
        self._index, self._leaves = index, leaves
        self._answered = dict.fromkeys(self._by_module, 0)

    def _answer(self, module: torch.nn.Module, forward: Callable[..., Any] | None, /, *args: Any, **kwargs: Any) -> Any:
        takes, number = self._by_module[module], self._answered[module]
        if number == len(takes):
            if forward is None:
                raise Enough
            return forward(*args, **kwargs)
        self._answered[module] += 1
        taken = takes[number](self._index)
        return taken if self._leaves is None else self._as_leaves(taken, self._leaves)

    def _as_leaves(self, tree: Any, leaves: list[torch.Tensor]) -> Any:
        values, form = tree_flatten(tree)
        for place, value in enumerate(values):
            if isinstance(value, torch.Tensor) and value.is_floating_point():
                values[place] = value.detach().clone().requires_grad_()
                if batch_dim_of(value, len(self._index), self._batch_dim) is not None:
                    leaves.append(values[place])
        return tree_unflatten(values, form)
