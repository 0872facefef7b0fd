"""The state that a step starts from, so that the step can be run again from there."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from gradgate._random_state import RandomState
from gradgate._torch_compat import copy_tensors


class Snapshot:
    """What a model and its surroundings were before a step.

    Buffers and the random states are copied at the start of each step. Weights are copied only when an optimizer is
    about to write to them, because until then they are what they were.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._buffers: list[torch.Tensor] = []
        self._buffer_copies: list[torch.Tensor] = []
        self._weights: dict[torch.Tensor, torch.Tensor] = {}
        self._written: dict[torch.Tensor, torch.Tensor] = {}
        self._random = RandomState(parameter.device for parameter in model.parameters())
        self._states: list[tuple[torch.optim.Optimizer, dict[str, Any]]] = []

    def take(self) -> None:
        """Remember the state of now."""
        buffers = list(self._model.buffers())
        if [id(x) for x in buffers] != [id(x) for x in self._buffers] or any(
            x.shape != y.shape or x.dtype != y.dtype for x, y in zip(buffers, self._buffer_copies, strict=False)
        ):
            self._buffers, self._buffer_copies = buffers, [torch.empty_like(x) for x in buffers]
        with torch.no_grad():
            copy_tensors(self._buffer_copies, buffers)
        self._random.remember()
        self._written = {}

    def before_write(self, optimizer: torch.optim.Optimizer) -> None:
        """Remember the weights that an optimizer is about to write to."""
        held = [p for group in optimizer.param_groups for p in group["params"] if p not in self._written]
        for parameter in held:
            if parameter not in self._weights or self._weights[parameter].shape != parameter.shape:
                self._weights[parameter] = torch.empty_like(parameter, requires_grad=False)
            self._written[parameter] = self._weights[parameter]
        with torch.no_grad():
            copy_tensors([self._weights[p] for p in held], held)

    def before_replayed_write(self, optimizer: torch.optim.Optimizer) -> None:
        """Remember the state of an optimizer that a replayed step is about to use."""
        if not any(optimizer is known for known, _ in self._states):
            self._states.append((optimizer, copy.deepcopy(optimizer.state_dict())))

    @contextmanager
    def rewound(self) -> Iterator[None]:
        """Go back to the remembered state for a block, and return to the state of now after it."""
        parameters = list(self._model.parameters())
        tensors = [*parameters, *self._model.buffers(), *self._written]
        kept = [tensor.detach().clone() for tensor in tensors]
        gradients = [(p, p.grad) for p in parameters]
        random = RandomState(parameter.device for parameter in parameters)
        random.remember()
        training = [(module, module.training) for module in self._model.modules()]
        with torch.no_grad():
            copy_tensors(list(self._written), list(self._written.values()))
            copy_tensors(self._buffers, self._buffer_copies)
        for parameter in parameters:
            parameter.grad = None
        self._random.restore()
        recording = torch.is_grad_enabled()
        torch.set_grad_enabled(True)
        try:
            yield
        finally:
            torch.set_grad_enabled(recording)
            with torch.no_grad():
                copy_tensors(tensors, kept)
            for parameter, gradient in gradients:
                parameter.grad = gradient
            for module, mode in training:
                module.training = mode
            for optimizer, state in self._states:
                optimizer.load_state_dict(state)
            self._states.clear()
            random.restore()
