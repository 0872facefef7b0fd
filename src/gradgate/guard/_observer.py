"""Watching a replay: which modules ran, what they gave, and where the first value or gradient that is not finite was.

Hooks of all modules at once, for as long as a replay lasts, in the thread that replays. Nothing is installed on
the healthy path.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from types import TracebackType
from typing import Any

import torch
from torch.autograd.graph import Node

from gradgate._patches import Patches
from gradgate._source import Line, running_line, written
from gradgate._torch_compat import call_with_gradient, watched_modules, write_mark
from gradgate.guard._batches import batch_dim_of, index_of
from gradgate.guard._finite import non_finite_rows, tensors_in


@dataclass(slots=True)
class Sighting:
    """Rows that were not finite, and the module and line that this is laid to; None for the batch or the loss."""

    rows: frozenset[int]
    module: torch.nn.Module | None
    where: str | None
    norms: dict[int, float] = field(default_factory=dict)


class Observer:
    """Hooks around one replay.

    Args:
        size: How many samples the batch holds.
        batch_dim: The dimension of the samples.
        patches: Notes the hooks.
        values: Look at the values that modules take and give.
        gradients: Look at the gradients that come back to what modules gave.
    """

    def __init__(
        self, size: int, batch_dim: int, patches: Patches, *, values: bool = False, gradients: bool = False
    ) -> None:
        self._size = size
        self._batch_dim = batch_dim
        self._patches = patches
        self._values = values
        self._gradients = gradients
        self._thread = threading.get_ident()
        self._watching = ExitStack()
        self._known: dict[int, tuple[torch.Tensor, tuple[int, int], frozenset[int]]] = {}
        self._finite: tuple[torch.nn.Module | None, Line | None] = (None, None)
        self._itself = weakref.proxy(self)
        self._hooked: set[tuple[Node | torch.Tensor, int]] = set()
        self._done = False
        self.modules: dict[torch.nn.Module, None] = {}
        self.sightings: list[Sighting] = []

    def __enter__(self) -> Observer:
        self._watching.enter_context(watched_modules(self._patches, self._enter_module, self._leave_module))
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._watching.close()
        self._hooked.clear()

    @property
    def hint(self) -> frozenset[int]:
        """The rows that were not finite before they were mixed into all others, as far as rows are samples."""
        return self.sightings[-1].rows if self.sightings else frozenset()

    def look(self, batch: Any) -> None:
        """Look at the values of a batch before it is used."""
        if self._values:
            self._look(tensors_in(batch), None)

    def _look(self, tensors: list[torch.Tensor], module: torch.nn.Module | None) -> None:
        """Look at what a module takes or gives, and note which rows are not finite while these are some of them."""
        rows = frozenset[int]().union(*map(self._rows, tensors))
        if rows and len(rows) < self._size:
            if rows != self.hint:
                self.sightings.append(Sighting(rows, module, _written(running_line()) if module else None))
        elif rows and self.sightings:
            self._done = True  # all rows at once after some: something mixed them

    def _rows(self, tensor: torch.Tensor) -> frozenset[int]:
        known, mark = self._known.get(id(tensor)), write_mark(tensor)
        if known is None or known[0] is not tensor or known[1] != mark:
            known = self._known[id(tensor)] = tensor, mark, non_finite_rows([tensor], self._size, self._batch_dim)
        return known[2]

    def _enter_module(self, module: torch.nn.Module, args: Any) -> None:
        if threading.get_ident() == self._thread:
            self.modules[module] = None
            if self._values and not self._done:
                self._look(tensors_in(args), module)

    def _leave_module(self, module: torch.nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        if threading.get_ident() != self._thread or self._done:
            return
        if self._values:
            self._look(tensors_in(output), module)
        if self._gradients:
            self._watch(module, [tensor for tensor in tensors_in(output) if tensor.requires_grad])

    def _watch(self, module: torch.nn.Module, outputs: list[torch.Tensor]) -> None:
        """Look at the gradients of what a module gave as soon as they come."""
        for tensor in outputs:
            source = (tensor if tensor.grad_fn is None else tensor.grad_fn), tensor.output_nr
            # A container gives what its last child gave, and the innermost module that gave it is the one to ask.
            if source in self._hooked:
                continue
            self._hooked.add(source)
            # A hook must not hold the tensor that will hold it, nor the observer, which holds some of them.
            look = partial(Observer._look_back, self._itself, module=module, line=running_line())
            if isinstance(source[0], torch.Tensor):
                call_with_gradient(self._patches, source[0], look)
            else:  # the same gradient, for an eighth of the cost of a hook on the tensor
                source[0].register_prehook(partial(_of_output, source[1], look))

    def _look_back(self, grad: torch.Tensor, module: torch.nn.Module, line: Line | None) -> None:
        if self._done:
            return
        rows = non_finite_rows([grad], self._size, self._batch_dim)
        if not rows:
            self._finite = module, line
            return
        self._done = True
        if len(rows) < self._size:
            # What came back to the module before was finite: it was born in that one's backward (or in the loss).
            born_in, line = self._finite
            self.sightings.append(Sighting(rows, born_in, _written(line), self._norms(grad, rows)))

    def _norms(self, grad: torch.Tensor, rows: frozenset[int]) -> dict[int, float]:
        dim = batch_dim_of(grad, self._size, self._batch_dim)
        assert dim is not None
        chosen, others = sorted(rows), [axis for axis in range(grad.dim()) if axis != dim]
        values = grad.index_select(dim, index_of(chosen).to(grad.device))
        norms = torch.linalg.vector_norm(values, dim=others) if others else values.abs()
        return dict(zip(chosen, norms.tolist(), strict=True))


def _of_output(number: int, look: Callable[[torch.Tensor], None], gradients: Sequence[torch.Tensor | None]) -> None:
    """Look at the gradient of one output of a node."""
    if (gradient := gradients[number]) is not None:
        look(gradient)


def _written(line: Line | None) -> str | None:
    return None if line is None else written(line)
