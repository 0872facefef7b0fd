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
from gradgate._torch_compat import ModuleCall, call_with_gradient, mixes_rows, watched_modules, write_mark
from gradgate.guard._batches import batch_dim_of, index_of
from gradgate.guard._finite import non_finite_rows, tensors_in

__all__ = ["Answer", "Enough", "Observer", "Open", "Sighting"]


class Enough(BaseException):
    """The replay has shown what it can; no `except Exception` in the user's code may stop it."""


@dataclass(slots=True)
class Answer:
    """What a module gave, for use in later probes: valid as long as nobody has written into it."""

    module: torch.nn.Module
    output: Any
    marks: list[tuple[int, int]]

    def is_untouched(self) -> bool:
        """Tell whether the output is still what the module returned."""
        return self.marks == [write_mark(tensor) for tensor in tensors_in(self.output)]


@dataclass(slots=True)
class Sighting:
    """Rows that were not finite, and the module and line that this is laid to; None for the batch or the loss."""

    rows: frozenset[int]
    module: torch.nn.Module | None
    where: str | None
    norms: dict[int, float] = field(default_factory=dict)


@dataclass(slots=True)
class Open:
    """A module that is running, what its children have given, and the autocast that it runs under."""

    module: torch.nn.Module | None
    answers: list[Answer] = field(default_factory=list)
    autocast: dict[str, torch.dtype] = field(default_factory=dict)


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
        self._looks = values or gradients  # then only the answers of the outermost modules are asked for
        self._thread = threading.get_ident()
        self._watching = ExitStack()
        self._known: dict[int, tuple[torch.Tensor, tuple[int, int], frozenset[int]]] = {}
        self._finite: tuple[int, torch.nn.Module | None, Line | None] = (0, None, None)
        self._itself = weakref.proxy(self)
        self._gave: dict[tuple[Node | torch.Tensor, int], Callable[[torch.Tensor], None]] = {}
        self._seen_at = 0
        self.open: list[Open] = [Open(None)]
        self.modules: dict[torch.nn.Module, None] = {}
        self.sightings: list[Sighting] = []
        self.smeared_by: ModuleCall | None = None
        self.entries: list[torch.Tensor] = []

    def __enter__(self) -> Observer:
        self._watching.enter_context(watched_modules(self._patches, self._enter_module, self._leave_module))
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> bool:
        self._watching.close()
        return kind is Enough

    def look(self, batch: Any) -> None:
        """Look at the values of a batch before it is used.

        Args:
            batch: The batch.
        """
        self._look(tensors_in(batch), None)

    def _look(self, tensors: list[torch.Tensor], call: ModuleCall | None) -> bool:
        """Look at what a module takes or gives, and tell whether only some rows of it are not finite."""
        rows: frozenset[int] = frozenset()
        for tensor in tensors:
            rows |= self._rows(tensor)
        if not rows:
            return False
        if len(rows) < self._size:
            if not self.sightings or self.sightings[-1].rows != rows:
                where = _written(running_line()) if call else None
                self.sightings.append(Sighting(rows, call.module if call else None, where))
        elif self.sightings:
            # All rows at once after some: something mixed them. What was seen last is all there is to see.
            self.smeared_by = call
            raise Enough
        return len(rows) < self._size

    def _rows(self, tensor: torch.Tensor) -> frozenset[int]:
        known, mark = self._known.get(id(tensor)), write_mark(tensor)
        if known is None or known[0] is not tensor or known[1] != mark:
            known = self._known[id(tensor)] = tensor, mark, non_finite_rows([tensor], self._size, self._batch_dim)
        return known[2]

    def inside(self, module: torch.nn.Module | None) -> Open:
        """Give what is known of a module that did not return; of None: of the code around all modules."""
        return next((running for running in reversed(self.open) if running.module is module), self.open[0])

    def _enter_module(self, module: torch.nn.Module, args: Any) -> None:
        if threading.get_ident() != self._thread:
            return
        self.modules[module] = None
        if self._values:
            self.open.append(Open(module))
            spoilt = self._look(tensors_in(args), ModuleCall(module, args, {}))
            if spoilt and mixes_rows(module) and batch_dim_of(args[0], self._size, self._batch_dim) == 0:
                raise Enough  # it would let these rows into all others
        elif self._gradients:
            self.open.append(Open(module))
        else:
            self.open.append(Open(module, autocast=_autocast_now()))

    def _leave_module(self, module: torch.nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        if threading.get_ident() != self._thread:
            return
        # Modules that raised into an `except` of the user's code are still open; they are done with now.
        while len(self.open) > 1 and self.open.pop().module is not module:
            continue
        tensors = tensors_in(output)
        if len(self.open) == 1 or not self._looks:
            self.open[-1].answers.append(Answer(module, output, [write_mark(tensor) for tensor in tensors]))
        if self._values:
            self._look(tensors, ModuleCall(module, args, kwargs))
        if self._gradients:
            self._watch(module, args, kwargs, [tensor for tensor in tensors if tensor.requires_grad])

    def _watch(self, module: torch.nn.Module, args: Any, kwargs: Any, outputs: list[torch.Tensor]) -> None:
        """Note what a module gave; and where no gradient goes further back, that the way back may end there."""
        if not _takes_gradient(args) and not _takes_gradient(kwargs):
            self.entries += outputs
        for tensor in outputs:
            source = _source_of(tensor)
            # A container gives what its last child gave, and the innermost module that gave it is the one to ask.
            if source not in self._gave:
                # A look must not hold the tensor that will hold it, nor the observer, which holds some of them.
                look = partial(Observer._look_back, self._itself, at=id(tensor), module=module, line=running_line())
                self._gave[source] = look

    def look_back(self) -> list[torch.Tensor]:
        """Look at the gradients of what modules gave as soon as they come, and give the tensors to walk back to."""
        for tensor in self.entries:
            # The way back ends at an entry: its node does not run, nor does a hook of the node.
            if (look := self._gave.get(_source_of(tensor))) is not None and tensor.grad_fn is not None:
                del self._gave[_source_of(tensor)]
                tensor.register_hook(look)  # type: ignore[no-untyped-call]
        for (source, number), look in self._gave.items():
            if isinstance(source, torch.Tensor):
                call_with_gradient(self._patches, source, look)
            else:  # the same gradient, for an eighth of the cost of a hook on the tensor
                source.register_prehook(partial(_of_output, number, look))
        return self.entries

    def _look_back(self, grad: torch.Tensor, at: int, module: torch.nn.Module, line: Line | None) -> None:
        rows = non_finite_rows([grad], self._size, self._batch_dim)
        if not rows:
            if self._finite[0] != at:  # the first to ask about a tensor is the innermost module that gave it
                self._finite = at, module, line
            return
        self._seen_at = at
        if len(rows) < self._size:
            # What came back to the module before was finite: it was born in that one's way back (or in the loss).
            _, born_in, line = self._finite
            self.sightings.append(Sighting(rows, born_in, _written(line), self._norms(grad, rows)))
        raise Enough

    def _norms(self, grad: torch.Tensor, rows: frozenset[int]) -> dict[int, float]:
        dim = batch_dim_of(grad, self._size, self._batch_dim)
        assert dim is not None
        chosen, others = sorted(rows), [axis for axis in range(grad.dim()) if axis != dim]
        values = grad.index_select(dim, index_of(chosen).to(grad.device))
        norms = torch.linalg.vector_norm(values, dim=others) if others else values.abs()
        return dict(zip(chosen, norms.tolist(), strict=True))

    @property
    def is_outermost(self) -> bool:
        """Whether the gradient that is not finite came back to what the outermost modules gave: born in the loss."""
        outputs = (tensor for answer in self.open[0].answers for tensor in tensors_in(answer.output))
        return any(id(tensor) == self._seen_at for tensor in outputs)


def _takes_gradient(arguments: Any) -> bool:
    """Tell whether a gradient goes back from a module into what it was called with."""
    return any(tensor.requires_grad for tensor in tensors_in(arguments)) if arguments else False


def _source_of(tensor: torch.Tensor) -> tuple[Node | torch.Tensor, int]:
    """Give the node and the number of its output that a tensor is; a leaf is its own source."""
    return (tensor if tensor.grad_fn is None else tensor.grad_fn), tensor.output_nr


def _of_output(number: int, look: Callable[[torch.Tensor], None], gradients: Sequence[torch.Tensor | None]) -> None:
    """Look at the gradient of one output of a node."""
    if (gradient := gradients[number]) is not None:
        look(gradient)


def _written(line: Line | None) -> str | None:
    return None if line is None else written(line)


def _autocast_now() -> dict[str, torch.dtype]:
    """Give the lower precision that operations run in now, by device type; empty where there is none."""
    accelerator = torch.accelerator.current_accelerator()
    types = ("cpu",) if accelerator is None else ("cpu", accelerator.type)
    return {kind: torch.get_autocast_dtype(kind) for kind in types if torch.is_autocast_enabled(kind)}
