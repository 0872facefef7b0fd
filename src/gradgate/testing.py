"""Assertions for pytest: a model learns, nothing cuts it, its gradients are finite, what is frozen stays.

When one of them fails, its message is what the doctor found, with the line and the fix.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from gradgate._checks import check_module, wrong_type
from gradgate._names import describe, suggest_names
from gradgate.doctor import Diagnosis, diagnose
from gradgate.errors import ArgumentTypeError
from gradgate.freezing import assert_frozen

__all__ = ["assert_finite_grads", "assert_frozen", "assert_learns", "assert_no_cut"]

LossFn = Callable[[Any], torch.Tensor] | Callable[[Any, Any], torch.Tensor]

_CUTS = ("GG101", "GG103", "GG105", "GG201")
_BAD = ("GG401", "GG402", "GG403", "GG404", "GG405", "GG502")
_IDLE = ("GG102", "GG301", "GG302", "GG303", "GG304", "GG305", "GG601", "GG602", "GG801")


def assert_learns(
    model: torch.nn.Module, batch: Any, loss_fn: LossFn, *, steps: int = 0, learning_rate: float = 1e-3
) -> None:
    """Prove that every parameter of a model that ought to learn can: it gets a finite gradient that is not all zero.

    The model and the random state are what they were afterwards.

    Args:
        model: The model. What is frozen (requires_grad is False) is not asked to learn.
        batch: One batch, handed on as it is.
        loss_fn: `loss_fn(batch)` or `loss_fn(model, batch)`; returns the loss.
        steps: Also take so many steps of Adam on this batch and prove that the loss has become smaller.
        learning_rate: The learning rate of those.

    Raises:
        AssertionError: A parameter cannot learn; the message says which, why and where.
        ArgumentTypeError: `model` is not a module, or `loss_fn` cannot be called.

    Examples:
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
        >>> gg.testing.assert_learns(model, torch.randn(16, 4), lambda x: model(x).pow(2).mean(), steps=5)
        >>> gg.testing.assert_learns(model, torch.randn(16, 4), lambda x: model(x).detach().mean())
        Traceback (most recent call last):
        AssertionError: error GG201: the loss is not connected to any parameter...
    """
    __tracebackhide__ = True
    step = _step_of(model, batch, loss_fn, "assert_learns")
    _refuse(model, step, (*_CUTS, *_BAD, *_IDLE))
    if steps:
        first, last = _losses(model, step, steps, learning_rate)
        if not last < first:
            raise AssertionError(f"after {steps} steps on this batch the loss is {last:.6g}; it was {first:.6g} before")


def assert_no_cut(model: torch.nn.Module, batch: Any, loss_fn: LossFn) -> None:
    """Prove that no line stands between a parameter and the loss that keeps its gradient away.

    Args:
        model: The model.
        batch: One batch.
        loss_fn: As in `assert_learns`.

    Raises:
        AssertionError: A line cuts; the message says which.

    Examples:
        >>> model = torch.nn.Linear(4, 1)
        >>> gg.testing.assert_no_cut(model, torch.randn(16, 4), lambda model, x: model(x).mean())
    """
    __tracebackhide__ = True
    _refuse(model, _step_of(model, batch, loss_fn, "assert_no_cut"), _CUTS)


def assert_finite_grads(model: torch.nn.Module, batch: Any, loss_fn: LossFn) -> None:
    """Prove that every gradient is finite.

    Args:
        model: The model.
        batch: One batch.
        loss_fn: As in `assert_learns`.

    Raises:
        AssertionError: A gradient is NaN or Inf; the message says where it was produced and in which samples.

    Examples:
        >>> model = torch.nn.Linear(4, 1)
        >>> gg.testing.assert_finite_grads(model, torch.zeros(16, 4), lambda x: (model(x) * 0).sqrt().mean())
        Traceback (most recent call last):
        AssertionError: error GG403: Inf gradient produced in the backward of `(model(x) * 0).sqrt()`...
    """
    __tracebackhide__ = True
    _refuse(model, _step_of(model, batch, loss_fn, "assert_finite_grads"), _BAD)


def _step_of(
    model: torch.nn.Module, batch: Any, loss_fn: Callable[..., torch.Tensor], function: str
) -> Callable[[], torch.Tensor]:
    check_module(model, name="model", function=function)
    if not callable(loss_fn):
        fix = f"{function}(model, batch, lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]))"
        raise wrong_type(loss_fn, "loss_fn", function, "it computes the loss of the batch.", fix)
    with_model = _takes_model(loss_fn)

    def step() -> torch.Tensor:
        loss = loss_fn(model, batch) if with_model else loss_fn(batch)
        if not isinstance(loss, torch.Tensor) and all(parameter.grad is None for parameter in model.parameters()):
            raise ArgumentTypeError(
                f"{function}(): `loss_fn` gave {describe(loss)}.",
                why="backward needs the loss as a tensor, and nothing is proved without it.",
                fix="return loss   # not loss.item(), and not in a dictionary",
            )
        return loss

    return step


def _takes_model(loss_fn: Callable[..., torch.Tensor]) -> bool:
    try:
        parameters = inspect.signature(loss_fn).parameters.values()
    except (TypeError, ValueError):  # a builtin without a signature
        return False
    needed = [p for p in parameters if p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return len(needed) >= 2


@contextmanager
def _left_as_it_was(model: torch.nn.Module) -> Iterator[None]:
    """Put weights, buffers, gradients and the random state back after a block."""
    state = copy.deepcopy(model.state_dict())
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    model.zero_grad()
    try:
        with torch.random.fork_rng():
            yield
    finally:
        model.load_state_dict(state)
        for parameter, gradient in gradients:
            parameter.grad = gradient


def _refuse(model: torch.nn.Module, step: Callable[[], torch.Tensor], codes: tuple[str, ...]) -> None:
    """Raise what the doctor finds of some codes in a step."""
    __tracebackhide__ = True
    with _left_as_it_was(model):
        diagnosis = diagnose(step, model=model)
    found = tuple(finding for finding in diagnosis.at_least("warning") if finding.code in codes)
    if diagnosis.exception is not None:  # then nothing is proved
        found = found or diagnosis.at_least("error")
    if found or diagnosis.exception is not None:
        raise AssertionError(str(Diagnosis(found)).strip()) from diagnosis.exception


def _losses(model: torch.nn.Module, step: Callable[[], torch.Tensor], steps: int, rate: float) -> tuple[float, float]:
    """Train on the batch for a while and return the first and the last loss."""
    losses = []
    with _left_as_it_was(model):
        optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=rate)
        random = torch.random.get_rng_state()
        for _ in range(steps + 1):
            torch.random.set_rng_state(random)
            optimizer.zero_grad()
            loss = step()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            losses.append(float(loss.detach()))
    return losses[0], losses[-1]


suggest_names(__name__)
