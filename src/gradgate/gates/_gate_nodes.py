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
from gradgate.gates._rules import LOW_PRECISION, GateMeter, Mask, Rule, Scale, Whole, on_stored_values

Gradients = tuple[torch.Tensor | None, ...]
Treatment = Callable[[Gradients], Gradients]
"""What autograd calls in backward: `treated` with everything but the gradients."""


def put_rule(x: torch.Tensor, rule: Rule, meter: GateMeter | None, function: str, operand: Any = None) -> torch.Tensor:
    """Return x with a rule for its gradient, which `operand` belongs to; only the values where none will come."""
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
    operand = operand if isinstance(operand, torch.Tensor) else None
    treatment = partial(treated, rule, operand, 0 if operand is None else write_count(operand), meter)
    if isinstance(rule, Whole) and not rule.keep:
        if meter is None:
            return _values(x)
        # The meter counts the gradient: an empty leaf makes autograd bring it this far, and no further.
        counted: torch.Tensor = _apply_gated(_values(x), treatment, torch.empty(0, requires_grad=True))
        return counted
    gated = recorded_without_copy(x)
    if gated is None:
        gated = _apply_gated(x, treatment)
    else:
        gated.grad_fn.register_prehook(treatment)  # type: ignore[union-attr]  # it was recorded just now
    return gated


def swap(hard: torch.Tensor, soft: torch.Tensor, function: str) -> torch.Tensor:
    """Return the value of hard with the gradient of soft."""
    if is_traced():
        return _applied(_variant(TracedSwap, TransformedSwap, function), hard, soft)
    if not (soft.requires_grad and torch.is_grad_enabled()):
        return _values(hard)
    swapped: torch.Tensor = _apply_swapped(soft, (hard,))
    return swapped


# --- Eager ----------------------------------------------------------------------------------------------------------


def treated(
    rule: Rule, operand: torch.Tensor | None, version: int, meter: GateMeter | None, gradients: Gradients
) -> Gradients:
    """Return what goes on in place of what arrives; nothing for nothing."""
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


class Gated(torch.autograd.Function):
    """Identity forward, a treatment backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, treatment: Treatment, *anchors: torch.Tensor) -> torch.Tensor:
        ctx.treatment = treatment
        # Without this a gate behind a shut one would make zeros of "nothing", and the work upstream would be done.
        ctx.set_materialize_grads(False)
        return without_copy(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Gradients:
        return *ctx.treatment(gradients), None, *(None for _ in ctx.needs_input_grad[2:])


class Swapped(torch.autograd.Function):
    """The value of one tensor with the gradient of another."""

    @staticmethod
    def forward(ctx: Any, soft: torch.Tensor, hard: tuple[torch.Tensor]) -> torch.Tensor:
        """Share the memory of hard; autograd does not look into the tuple, so hard is no input."""
        ctx.set_materialize_grads(False)
        return without_copy(hard[0])

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Gradients:
        return gradients[0], None


_apply_gated = bound_apply(Gated)
_apply_swapped = bound_apply(Swapped)


def _values(x: torch.Tensor) -> torch.Tensor:
    """Return the values of x, cut off from its graph."""
    with torch.no_grad():
        return without_copy(x).detach()


# --- Traced ---------------------------------------------------------------------------------------------------------


def _put_traced(x: torch.Tensor, rule: Rule, function: str) -> torch.Tensor:
    if isinstance(rule, Whole):
        return x.clone() if rule.keep else x.detach().clone()
    if isinstance(rule, Mask):
        # `where` selects: nothing leaks from the branch that is not taken, and every tracer knows it.
        return torch.where(rule.keep, x, x.detach())
    if isinstance(rule, Scale):
        factor = rule.factor
        if not isinstance(factor, torch.Tensor):
            wide = torch.float32 if x.dtype in LOW_PRECISION else x.real.dtype  # 100,000 is not a float16
            factor = torch.tensor(factor, dtype=wide, device=x.device)
        product = (x * factor).to(x.dtype)
        return swap(x.detach(), torch.where(factor == 0, x.detach(), product), function)
    return _applied(_variant(TracedGate, TransformedGate, function), x, rule)


class TracedSwap(torch.autograd.Function):
    """The value of hard with the gradient of soft; Dynamo takes only Functions without a jvp."""

    @staticmethod
    def forward(hard: torch.Tensor, soft: torch.Tensor) -> torch.Tensor:
        return hard.clone()  # a compiler removes the copy, a transformation needs it

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None: ...

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Gradients:
        return None, gradients[0]


class TransformedSwap(TracedSwap):
    """The same with the rules that torch.func needs."""

    @staticmethod
    def jvp(ctx: Any, *tangents: torch.Tensor) -> torch.Tensor:
        return tangents[1].clone()

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *tensors: torch.Tensor) -> tuple[torch.Tensor, int]:
        hard, soft = (
            tensor.expand(info.batch_size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)
            for tensor, dim in zip(tensors, in_dims, strict=True)
        )
        return _applied(TransformedSwap, hard, soft), 0


class TracedGate(torch.autograd.Function):
    """Identity forward, a rule backward."""

    @staticmethod
    def forward(x: torch.Tensor, rule: Rule) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.rule = inputs[1]

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Gradients:
        return ctx.rule.settled(gradients[0])(gradients[0]), None


class TransformedGate(TracedGate):
    """The same with the rules that torch.func needs."""

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> torch.Tensor:
        raise ArgumentError(
            "clip_grad, finite_grad and gate with a callable have no forward-mode derivative.",
            why="what they do depends on the gradient that arrives, and in forward mode none does.",
            fix="torch.func.vjp(f, x)   # or torch.func.grad; without this gate torch.func.jvp works",
        )

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], x: torch.Tensor, rule: Rule) -> tuple[torch.Tensor, int]:
        return _applied(TransformedGate, x.movedim(in_dims[0] or 0, 0), EachSample(rule)), 0


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


def _variant(
    compiled: type[torch.autograd.Function], transformed: type[torch.autograd.Function], function: str
) -> type[torch.autograd.Function]:
    if not is_compiling():
        return transformed
    if inside_functorch() or inside_forward_mode():
        # Dynamo silently drops the backward of a Function there.
        raise ArgumentError(
            f"{function}(): torch.func inside torch.compile would lose the rule for the gradient.",
            why="torch.compile does not take over an autograd Function's backward under torch.func.",
            fix="torch.func.grad(torch.compile(f))   # or the same without torch.compile",
        )
    return compiled


def _applied(function: type[torch.autograd.Function], *args: Any) -> torch.Tensor:
    result: torch.Tensor = function.apply(*args)  # type: ignore[no-untyped-call]  # torch has no types here
    return result
