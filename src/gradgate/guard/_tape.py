"""Probing code around modules without running the modules again: they answer with the rows of what they gave.

A fault in the body of a forward or in the loss is found by running that body on many groups of rows. The modules
that had finished by then need not run again for this; while `answering` is in force they answer from the tape.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_pre_hook

from gradgate._torch_compat import tree_flatten, tree_unflatten
from gradgate.guard._batches import batch_dim_of, select_rows
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
        self._size = size
        self._batch_dim = batch_dim
        self._by_module: dict[torch.nn.Module, list[Any]] = {}
        for answer in answers:
            self._by_module.setdefault(answer.module, []).append(answer.output)
        self.usable = all(answer.is_untouched() for answer in answers)

    def __bool__(self) -> bool:
        return bool(self._by_module)

    @contextmanager
    def answering(
        self,
        index: torch.Tensor,
        leaves: list[torch.Tensor] | None = None,
        *,
        until: bool = False,
        besides: torch.nn.Module | None = None,
    ) -> Iterator[None]:
        """Let the modules answer from the tape with these rows.

        Args:
            index: The rows.
            leaves: Where to collect what was answered, as leaves that take a gradient; None for plain values.
            until: End quietly at the first call that is not on the tape: it lies behind the place that the tape ends
                at. Else such a call runs as ever.
            besides: A module whose call does not end it.
        """

        def stop(module: torch.nn.Module, args: Any) -> None:
            if module is not besides and module not in self._by_module:
                raise Enough

        # `forward` in the instance's own dictionary goes before the class's; it was there before only by patching.
        before = {module: module.__dict__.get("forward") for module in self._by_module}
        try:
            for module, outputs in self._by_module.items():
                last = None if until else module.forward
                module.__dict__["forward"] = self._answer(last, iter(outputs), index, leaves)
            handle = register_module_forward_pre_hook(stop) if until else None
            try:
                yield
            except Enough:
                if not until:
                    raise
            finally:
                if handle is not None:
                    handle.remove()
        finally:
            for module, forward in before.items():
                if forward is None:
                    module.__dict__.pop("forward", None)
                else:
                    module.__dict__["forward"] = forward

    def _answer(
        self,
        forward: Callable[..., Any] | None,
        outputs: Iterator[Any],
        index: torch.Tensor,
        leaves: list[torch.Tensor] | None,
    ) -> Callable[..., Any]:
        def answer(*args: Any, **kwargs: Any) -> Any:
            try:
                output = next(outputs)
            except StopIteration:
                if forward is None:
                    raise Enough from None
                return forward(*args, **kwargs)
            taken = select_rows(output, index, self._size, self._batch_dim)
            return taken if leaves is None else self._as_leaves(taken, len(index), leaves)

        return answer

    def _as_leaves(self, tree: Any, size: int, leaves: list[torch.Tensor]) -> Any:
        values, form = tree_flatten(tree)
        for place, value in enumerate(values):
            if isinstance(value, torch.Tensor) and value.is_floating_point():
                values[place] = value.detach().clone().requires_grad_()
                if batch_dim_of(value, size, self._batch_dim) is not None:
                    leaves.append(values[place])
        return tree_unflatten(values, form)
