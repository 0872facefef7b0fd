"""How a gate gets into the graph while Python runs line by line: an autograd Function, applied at the C level."""

from __future__ import annotations

from typing import Any

import torch

from gradgate._torch_compat import bound_apply, without_copy
from gradgate.gates._meter import GateMeter
from gradgate.gates._rules import Rule, Whole
from gradgate.gates._sparse import on_stored_values

__all__ = ["put_rule", "swap"]


class Gated(torch.autograd.Function):
    """Identity forward, a rule backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, rule: Rule, meter: GateMeter | None, *tensors: torch.Tensor) -> torch.Tensor:
        """Share the memory of x, and remember the rule."""
        ctx.rule = rule, meter
        # Without this a gate behind a shut one would make zeros of "nothing", and the work upstream would be done.
        ctx.set_materialize_grads(False)
        if tensors:
            # Saved, not just remembered: a mask that is overwritten before backward is then an error, not a surprise.
            ctx.save_for_backward(*tensors)
        return without_copy(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        """Apply the rule to the gradient, if one arrives."""
        tensors = ctx.saved_tensors
        nothing = (None,) * (2 + len(tensors))
        if gradients[0] is None:
            return None, *nothing

        def treat(gradient: torch.Tensor, *tensors: torch.Tensor) -> torch.Tensor | None:
            rule, meter = ctx.rule
            rule, tensors = rule.settled(gradient, *tensors)
            result: torch.Tensor | None = rule(gradient, *tensors)
            if meter is not None:
                meter.count(gradient, result, rule.stopped(gradient, *tensors))
            return result

        return on_stored_values(treat, gradients[0], *tensors), *nothing


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


def put_rule(x: torch.Tensor, rule: Rule, meter: GateMeter | None, *tensors: torch.Tensor) -> torch.Tensor:
    """Give x with a rule for its gradient; x itself where no gradient will come."""
    if not (x.requires_grad and torch.is_grad_enabled()):
        return x
    if isinstance(rule, Whole) and not rule.keep:
        with torch.no_grad():
            x = without_copy(x)
        if meter is None:
            return x
        # The meter wants to see the gradient: an empty leaf makes autograd bring it this far, and no further.
        tensors = (torch.empty(0, requires_grad=True),)
    gated: torch.Tensor = apply_gated(x, rule, meter, *tensors)
    return gated


def swap(hard: torch.Tensor, soft: torch.Tensor) -> torch.Tensor:
    """Give the value of hard with the gradient of soft."""
    if not (soft.requires_grad and torch.is_grad_enabled()):
        with torch.no_grad():
            return without_copy(hard)
    swapped: torch.Tensor = apply_swapped(soft, (hard,))
    return swapped
