"""How a gate gets into the graph: one path for eager code, one for torch.compile and torch.func.

In eager code an activation is shared copy-on-write, which makes a node of torch's own, and the rule is a hook before
that node: half the cost of an autograd Function. A parameter is not shared in that way, because its memory must stay
where it is; its gate is an autograd Function that returns a view. A tracer needs operations and Functions that it can
take apart.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from gradgate._checks import wrong_type
from gradgate._torch_private import (
    bound_apply,
    inside_forward_mode,
    inside_functorch,
    is_compiling,
    is_traced,
    recorded_without_copy,
    without_copy,
    write_count,
)
from gradgate.errors import ArgumentError, ArgumentValueError, GradgateError
from gradgate.gates._rules import LOW_PRECISION, GateMeter, Rule, Scale, on_stored_values

Gradients = tuple[torch.Tensor | None, ...]
Treatment = Callable[[Gradients], Gradients]
"""What autograd calls in backward: `treated` with everything but the gradients."""


def put_rule(x: torch.Tensor, rule: Rule, meter: GateMeter | None, function: str) -> torch.Tensor:
    """Return x with a rule for its gradient; only the values where no gradient will come."""
    if meter is not None and not isinstance(meter, GateMeter):
        why = "what counts is a gg.GateMeter that you keep and read."
        raise wrong_type(meter, "meter", function, why, "meter=gg.GateMeter()")
    if is_traced():
        if meter is not None:
            raise ArgumentValueError(
                f"{function}(): a meter cannot count inside torch.compile or torch.func.",
                why="counting is a side effect, and a traced function has none.",
                fix="meter=None",
            )
        return _put_traced(x, rule, function)
    if not (x.requires_grad and torch.is_grad_enabled()):
        # Not x itself: an in-place operation that follows must not do in evaluation what it does not do in training.
        return _values(x) if x.is_floating_point() or x.is_complex() else x
    operand = rule.factor if isinstance(rule, Scale) else None
    version = write_count(operand) if isinstance(operand, torch.Tensor) else None
    treatment = partial(treated, rule, version, meter)
    if operand is False:
        if meter is None:
            return _values(x)
        # The meter counts the gradient: an empty leaf makes autograd bring it this far, and no further.
        counted: torch.Tensor = _apply_gated(_values(x), treatment, None, torch.empty(0, requires_grad=True))
        return counted
    gated = recorded_without_copy(x)
    if gated is None:
        gated = _apply_gated(x, treatment, None)
    else:
        gated.grad_fn.register_prehook(treatment)  # type: ignore[union-attr]  # it was recorded just now
    return gated


def swap(hard: torch.Tensor, soft: torch.Tensor, function: str) -> torch.Tensor:
    """Return the value of hard with the gradient of soft."""
    if is_traced():
        return _apply_traced(hard, soft, None, function)
    if not (soft.requires_grad and torch.is_grad_enabled()):
        return _values(hard)
    swapped: torch.Tensor = _apply_gated(soft, _unchanged, (hard,))
    return swapped


# --- Eager ----------------------------------------------------------------------------------------------------------


def treated(rule: Any, version: int | None, meter: GateMeter | None, gradients: Gradients) -> Gradients:
    """Return what goes on in place of what arrives; nothing for nothing."""
    if gradients[0] is None:
        return gradients
    if version is not None and write_count(rule.factor) != version:
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


def _unchanged(gradients: Gradients) -> Gradients:
    return gradients


class Gated(torch.autograd.Function):
    """The values of x, or of one that autograd does not see because it is in a tuple; a treatment backward."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, treatment: Treatment, hidden: tuple[torch.Tensor] | None, *anchors: torch.Tensor
    ) -> torch.Tensor:
        ctx.treatment = treatment
        # Without this a gate behind a shut one would make zeros of "nothing", and the work upstream would be done.
        ctx.set_materialize_grads(False)
        return without_copy(x if hidden is None else hidden[0])

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Gradients:
        return *ctx.treatment(gradients), *(None for _ in ctx.needs_input_grad[1:])


_apply_gated = bound_apply(Gated)


def _values(x: torch.Tensor) -> torch.Tensor:
    """Return the values of x, cut off from its graph."""
    with torch.no_grad():
        return without_copy(x).detach()


# --- Traced ---------------------------------------------------------------------------------------------------------


def _put_traced(x: torch.Tensor, rule: Rule, function: str) -> torch.Tensor:
    if not isinstance(rule, Scale):
        return _apply_traced(x.detach(), x, rule, function)
    factor = rule.factor
    if isinstance(factor, bool):
        return x.clone() if factor else x.detach().clone()
    if isinstance(factor, torch.Tensor) and factor.dtype is torch.bool:
        # `where` selects: nothing leaks from the branch that is not taken, and every tracer knows it.
        return torch.where(factor, x, x.detach())
    if not isinstance(factor, torch.Tensor):
        wide = torch.float32 if x.dtype in LOW_PRECISION else x.real.dtype  # 100,000 is not a float16
        factor = torch.tensor(factor, dtype=wide, device=x.device)
    product = (x * factor).to(x.dtype)
    return _apply_traced(x.detach(), torch.where(factor == 0, x.detach(), product), None, function)


def _apply_traced(hard: torch.Tensor, soft: torch.Tensor, rule: Rule | None, function: str) -> torch.Tensor:
    """Return the value of hard with the gradient of soft, under a rule."""
    if is_compiling() and (inside_functorch() or inside_forward_mode()):
        # Dynamo silently drops the backward of a Function there.
        raise ArgumentError(
            f"{function}(): torch.func inside torch.compile would lose the rule for the gradient.",
            why="torch.compile does not take over an autograd Function's backward under torch.func.",
            fix="torch.func.grad(torch.compile(f))   # or the same without torch.compile",
        )
    kind = Traced if is_compiling() else Transformed
    result: torch.Tensor = kind.apply(hard, soft, rule)  # type: ignore[no-untyped-call]  # torch has no types here
    return result


class Traced(torch.autograd.Function):
    """The value of hard with the gradient of soft, under a rule; Dynamo takes only Functions without a jvp."""

    @staticmethod
    def forward(hard: torch.Tensor, soft: torch.Tensor, rule: Rule | None) -> torch.Tensor:
        return hard.clone()  # a compiler removes the copy, a transformation needs it

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.rule = inputs[2]

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Gradients:
        (gradient,) = gradients
        return None, gradient if ctx.rule is None else ctx.rule.settled(gradient)(gradient), None


class Transformed(Traced):
    """The same with what torch.func needs."""

    @staticmethod
    def jvp(ctx: Any, *tangents: torch.Tensor) -> torch.Tensor:
        if ctx.rule is None:
            return tangents[1].clone()
        raise ArgumentError(
            "clip_grad, finite_grad and gate with a callable have no forward-mode derivative.",
            why="what they do depends on the gradient that arrives, and in forward mode none does.",
            fix="torch.func.vjp(f, x)   # or torch.func.grad; without this gate torch.func.jvp works",
        )

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *inputs: Any) -> tuple[torch.Tensor, int]:
        *tensors, rule = inputs
        hard, soft = (
            tensor.expand(info.batch_size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)
            for tensor, dim in zip(tensors, in_dims[:2], strict=True)
        )
        return Transformed.apply(hard, soft, rule and EachSample(rule)), 0  # type: ignore[no-untyped-call]


@dataclass(slots=True)
class EachSample(Rule):
    """A rule applied along the first dimension, to one sample's gradient at a time."""

    rule: Rule

    def __call__(self, gradient: torch.Tensor) -> torch.Tensor:
        def one(gradient: torch.Tensor) -> torch.Tensor:
            result = self.rule.settled(gradient)(gradient)
            # Where the rule stops everything there are zeros, because other samples have a gradient.
            return torch.zeros_like(gradient) if result is None else result

        return torch.vmap(one)(gradient)
