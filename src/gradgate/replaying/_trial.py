"""One sample through a loss function, forward and backward, and what went wrong on the way."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

import torch

from gradgate._names import class_name, describe, listed, text_of
from gradgate._payload import Fields
from gradgate._source import raising_line
from gradgate._text import visible
from gradgate._torch_compat import leaf_of, nodes_below
from gradgate.errors import ArgumentTypeError
from gradgate.records import Stage

__all__ = ["Fault", "LossFunction", "find_fault", "twice"]

LossFunction = Callable[[Any], torch.Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """What went wrong with a sample.

    Attributes:
        cause: "exception", "non-finite loss" or "non-finite gradient".
        stage: "forward" for whatever loss_fn raised, "loss" or "backward".
        exception_type: The class of the exception, with its module.
        message: What the exception or the check said.
        where: The user's line, as "path.py:12".
        exception: The exception itself.
    """

    cause: str
    stage: Stage
    exception_type: str | None = None
    message: str = ""
    where: str | None = None
    exception: Exception | None = field(default=None, repr=False, compare=False)

    def __str__(self) -> str:
        what = f"{self.exception_type}: {self.message}" if self.exception_type else self.message or self.cause
        return visible(f"{what}   ({self.where})" if self.where else what, lines=True)


def find_fault(
    make_sample: Callable[[], Any],
    loss_fn: LossFunction,
    *,
    expected: Callable[[Fault], bool] = lambda fault: False,
    model: torch.nn.Module | None = None,
    batch_dim: int = 0,
) -> tuple[Fault | None, int]:
    """Run one sample and see what goes wrong.

    A sample that fails only because it is alone (batch statistics of one value) is not at fault: unless the fault is
    the expected one, it is tried again with the same row twice.

    Args:
        make_sample: Gives the sample, with a batch dimension of 1; a new one each time, because loss_fn may change it.
        loss_fn: The function that failed with it.
        expected: Tells whether a fault is the one that is looked for.
        model: The model, for the names of its parameters.
        batch_dim: Which dimension counts the samples.

    Returns:
        The fault, or None if there is none any more; and with how many rows that was found.
    """
    names = {} if model is None else {id(parameter): name for name, parameter in model.named_parameters()}
    with torch.inference_mode(False), torch.enable_grad():
        alone = _attempt(make_sample(), loss_fn, names)
        if alone is None or expected(alone):
            return alone, 1
        return _attempt(twice(make_sample(), batch_dim), loss_fn, names), 2


def _attempt(sample: Any, loss_fn: LossFunction, names: dict[int, str]) -> Fault | None:
    try:
        loss = loss_fn(sample)
    except Exception as error:  # noqa: BLE001 - it is the user's function that is on trial
        return _raised(error, "forward")
    if not isinstance(loss, torch.Tensor):
        raise ArgumentTypeError(
            f"replay(): `loss_fn` returned {describe(loss)}.",
            why="it is the function that the guard was given: loss_fn(batch) -> a mean loss, or one per sample.",
            fix="def loss_fn(batch): ...; return loss",
        )
    if not bool(torch.isfinite(loss).all()):
        return Fault(cause="non-finite loss", stage="loss", message=f"non-finite loss: {_some(loss)}")
    leaves = [leaf for node in nodes_below([loss]) if (leaf := leaf_of(node)) is not None]
    if not leaves:
        return None
    try:
        gradients = torch.autograd.grad(loss.sum(), leaves, allow_unused=True, materialize_grads=True)
    except Exception as error:  # noqa: BLE001 - so is its backward
        return _raised(error, "backward")
    bad = [
        names.get(id(leaf), describe(leaf))
        for leaf, gradient in zip(leaves, gradients, strict=True)
        if not bool(torch.isfinite(_values(gradient)).all())
    ]
    if not bad:
        return None
    message = f"non-finite gradient of {listed(bad, 3)}"
    return Fault(cause="non-finite gradient", stage="backward", message=message)


def _raised(error: Exception, stage: Stage) -> Fault:
    kind = type(error)
    return Fault(
        cause="exception",
        stage=stage,
        exception_type=class_name(kind),
        message=text_of(error),
        where=raising_line(error.__traceback__),
        exception=error,
    )


def _values(gradient: torch.Tensor) -> torch.Tensor:
    return gradient.coalesce().values() if gradient.layout is torch.sparse_coo else gradient


def _some(loss: torch.Tensor) -> str:
    values = [f"{value:g}" for value in loss.detach().reshape(-1)[:4].tolist()]
    return ", ".join(values) + (", ..." if loss.numel() > 4 else "")


def twice(tree: Any, dim: int) -> Any:
    """Repeat the one row of a batch; what has no batch dimension stays as it is."""
    if isinstance(tree, torch.Tensor):
        return torch.cat([tree, tree], dim) if tree.dim() > dim and tree.shape[dim] == 1 else tree
    if isinstance(tree, dict):
        return {key: twice(value, dim) for key, value in tree.items()}
    if isinstance(tree, list) and len(tree) == 1 and isinstance(tree[0], str | int | float):
        return tree * 2  # Names and the like, one for each sample.
    if isinstance(tree, Fields):
        return Fields(tree.names, [twice(value, dim) for value in tree])
    if isinstance(tree, tuple):
        return tuple.__new__(type(tree), [twice(value, dim) for value in tree])
    if isinstance(tree, list):
        return [twice(value, dim) for value in tree]
    if is_dataclass(tree) and not isinstance(tree, type):
        made = copy(tree)
        for part in fields(tree):
            object.__setattr__(made, part.name, twice(getattr(tree, part.name), dim))
        return made
    return tree
