"""How a gate gets into the graph while Python runs line by line.

Two ways with one result. An activation is shared copy-on-write, which makes a node of torch's own, and the rule is
hung before that node: half the price of an autograd Function. A parameter is not shared in that way, because its
memory must stay where it is; its gate is an autograd Function that returns a view.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from gradgate._torch_private import (
    base_of,
    bound_apply,
    copy_on_write,
    recorded_without_copy,
    version_of,
    without_copy,
    write_count,
)
from gradgate.errors import GradgateError
from gradgate.gates._rules import GateMeter, Mask, Rule, Whole, on_stored_values

Treatment = Callable[[tuple[torch.Tensor | None, ...]], tuple[torch.Tensor | None, ...]]
"""What autograd meets in backward: `treated` with everything but the gradients given."""


def treated(
    rule: Rule,
    operand: torch.Tensor | None,
    version: int,
    meter: GateMeter | None,
    gradients: tuple[torch.Tensor | None, ...],
) -> tuple[torch.Tensor | None, ...]:
    """Give what goes on in place of what arrives; nothing for nothing."""
    if gradients[0] is None:
        return gradients
    if operand is not None and write_count(operand) != version:
        raise GradgateError(
            "A mask or factor of a gate was overwritten between forward and backward.",
            why="the gradient would follow another mask than the one that the gate was given.",
            fix="keep.clone()   # give the gate a copy, or overwrite it after backward",
        )

    def treat(gradient: torch.Tensor, rule: Rule) -> torch.Tensor | None:
        rule = rule.settled(gradient)
        result = rule(gradient)
        if meter is not None:
            meter.count(gradient, result, rule.stopped(gradient))
        return result

    return (on_stored_values(treat, gradients[0], rule),)


def masked(
    keep: torch.Tensor, version: int, gradients: tuple[torch.Tensor | None, ...]
) -> tuple[torch.Tensor | None, ...]:
    """Treat by a mask; the rule is made only now, which makes the gate's call cheaper."""
    return treated(Mask(keep), keep, version, None, gradients)


class Gated(torch.autograd.Function):
    """Identity forward, a treatment backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, treatment: Treatment, *anchors: torch.Tensor) -> torch.Tensor:
        """Share the memory of x, and remember the treatment."""
        ctx.treatment = treatment
        # Without this a gate behind a shut one would make zeros of "nothing", and the work upstream would be done.
        ctx.set_materialize_grads(False)
        return without_copy(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        """Treat the gradient, if one arrives."""
        return *ctx.treatment(gradients), None, *(None for _ in ctx.needs_input_grad[2:])


class Swapped(torch.autograd.Function):
    """The value of one tensor with the gradient of another."""

    @staticmethod
    def forward(ctx: Any, soft: torch.Tensor, hard: tuple[torch.Tensor]) -> torch.Tensor:
        """Share the memory of hard, which comes in a tuple: autograd does not look there, so it is no input."""
        ctx.set_materialize_grads(False)
        return without_copy(hard[0])

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        """Give everything to soft."""
        return gradients[0], None


apply_gated = bound_apply(Gated)
apply_swapped = bound_apply(Swapped)


def put_mask(x: torch.Tensor, keep: Any) -> torch.Tensor | None:
    """Do what `put_rule` does, in the commonest case: one answer for each element of an activation."""
    # On a small tensor each check and each call is felt, so everything that this case needs is here, and nothing else.
    if (
        type(keep) is not Tensor
        or type(x) is not Tensor
        or keep.dtype is not torch.bool
        or keep.shape != x.shape
        or keep.device != x.device
        or x.is_leaf
        or base_of(x) is not None
    ):
        return None
    try:
        treatment = partial(masked, keep, version_of(keep))
        gated = copy_on_write(x)
    except RuntimeError:  # a mask of inference mode, or x is of a kind that cannot be shared
        return None
    if (node := gated.grad_fn) is not None:  # else nothing is recorded
        node.register_prehook(treatment)
    return gated


def put_rule(x: torch.Tensor, rule: Rule, operand: torch.Tensor | None, meter: GateMeter | None) -> torch.Tensor:
    """Give x with a rule for its gradient; only the values where no gradient will come."""
    if not (x.requires_grad and torch.is_grad_enabled()):
        # Not x itself: an in-place operation that follows must not do in evaluation what it does not do in training.
        return _values(x) if x.is_floating_point() or x.is_complex() else x
    if isinstance(rule, Whole) and not rule.keep:
        return _shut(x, rule, meter)
    treatment = partial(treated, rule, operand, 0 if operand is None else write_count(operand), meter)
    gated = recorded_without_copy(x)
    if gated is None:
        gated = apply_gated(x, treatment)
    else:
        gated.grad_fn.register_prehook(treatment)  # type: ignore[union-attr]  # it was recorded just now
    return gated


def _shut(x: torch.Tensor, rule: Whole, meter: GateMeter | None) -> torch.Tensor:
    if meter is None:
        return _values(x)
    # The meter wants to see the gradient: an empty leaf makes autograd bring it this far, and no further.
    treatment = partial(treated, rule, None, 0, meter)
    counted: torch.Tensor = apply_gated(_values(x), treatment, torch.empty(0, requires_grad=True))
    return counted


def _values(x: torch.Tensor) -> torch.Tensor:
    """Give the values of x, cut off from its graph."""
    with torch.no_grad():
        return without_copy(x).detach()


def swap(hard: torch.Tensor, soft: torch.Tensor) -> torch.Tensor:
    """Give the value of hard with the gradient of soft."""
    if not (soft.requires_grad and torch.is_grad_enabled()):
        return _values(hard)
    swapped: torch.Tensor = apply_swapped(soft, (hard,))
    return swapped
