"""The same gates for torch.compile and torch.func: operations and Functions that a tracer can take apart."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from gradgate._torch_private import inside_forward_mode, inside_functorch, is_compiling
from gradgate.errors import ArgumentError
from gradgate.gates._rules import LOW_PRECISION, Mask, Rule, Scale, Whole


class TracedSwap(torch.autograd.Function):
    """The value of hard with the gradient of soft; Dynamo takes only Functions without a jvp."""

    @staticmethod
    def forward(hard: torch.Tensor, soft: torch.Tensor) -> torch.Tensor:
        """Copy hard: a compiler removes the copy, a transformation needs it."""
        return hard.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        """Keep nothing."""

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Give everything to soft."""
        return None, gradients[0]


class TransformedSwap(TracedSwap):
    """The same with the rules that torch.func asks for."""

    @staticmethod
    def jvp(ctx: Any, *tangents: torch.Tensor) -> torch.Tensor:
        """Take the tangent of soft."""
        return tangents[1].clone()

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *tensors: torch.Tensor) -> tuple[torch.Tensor, int]:
        """Map over both, also where only one of them has the mapped dimension."""
        hard, soft = (
            tensor.expand(info.batch_size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)
            for tensor, dim in zip(tensors, in_dims, strict=True)
        )
        return _applied(TransformedSwap, hard, soft), 0


class TracedGate(torch.autograd.Function):
    """Identity forward, a rule backward."""

    @staticmethod
    def forward(x: torch.Tensor, rule: Rule) -> torch.Tensor:
        """Copy x, as above."""
        return x.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        """Remember the rule."""
        ctx.rule = inputs[1]

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Apply the rule."""
        return ctx.rule.settled(gradients[0])(gradients[0]), None


class TransformedGate(TracedGate):
    """The same with the rules that torch.func asks for."""

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> torch.Tensor:
        """Refuse: a rule that looks at the gradient has no counterpart for tangents."""
        raise ArgumentError(
            "clip_grad, finite_grad and gate with a callable have no forward-mode derivative.",
            why="what they do depends on the gradient that arrives, and in forward mode none does.",
            fix="torch.func.vjp(f, x)   # or torch.func.grad; without this gate torch.func.jvp works",
        )

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], x: torch.Tensor, rule: Rule) -> tuple[torch.Tensor, int]:
        """Apply the rule to the gradient of each sample alone."""
        return _applied(TransformedGate, x.movedim(in_dims[0] or 0, 0), EachSample(rule)), 0


@dataclass(slots=True)
class EachSample(Rule):
    """A rule applied along the first dimension, to one sample's gradient at a time."""

    rule: Rule

    def __call__(self, gradient: torch.Tensor) -> torch.Tensor:
        """Map the rule; where it stops everything there is still a gradient, of zeros, for the other samples' sake."""

        def one(gradient: torch.Tensor) -> torch.Tensor:
            result = self.rule.settled(gradient)(gradient)
            return torch.zeros_like(gradient) if result is None else result

        return torch.vmap(one)(gradient)


def swap(hard: torch.Tensor, soft: torch.Tensor, function: str) -> torch.Tensor:
    """Give the value of hard with the gradient of soft."""
    return _applied(_variant(TracedSwap, TransformedSwap, function), hard, soft)


def put_rule(x: torch.Tensor, rule: Rule, function: str) -> torch.Tensor:
    """Give x with a rule for its gradient."""
    if isinstance(rule, Whole):
        return x.clone() if rule.keep else x.detach().clone()
    if isinstance(rule, Mask):
        # `where` selects: nothing leaks from where it does not look, and every tracer knows it.
        return torch.where(rule.keep, x, x.detach())
    if isinstance(rule, Scale):
        factor = rule.factor
        if not isinstance(factor, torch.Tensor):
            wide = torch.float32 if x.dtype in LOW_PRECISION else x.real.dtype  # 100,000 is not a float16
            factor = torch.tensor(factor, dtype=wide, device=x.device)
        product = (x * factor).to(x.dtype)
        return swap(x.detach(), torch.where(factor == 0, x.detach(), product), function)
    return _applied(_variant(TracedGate, TransformedGate, function), x, rule)


def _variant(
    compiled: type[torch.autograd.Function], transformed: type[torch.autograd.Function], function: str
) -> type[torch.autograd.Function]:
    if not is_compiling():
        return transformed
    if inside_functorch() or inside_forward_mode():
        # Dynamo leaves out the backward of a Function there, without a word.
        raise ArgumentError(
            f"{function}(): torch.func inside torch.compile would lose the rule for the gradient.",
            why="torch.compile does not take over an autograd Function's backward under torch.func.",
            fix="torch.func.grad(torch.compile(f))   # or the same without torch.compile",
        )
    return compiled


def _applied(function: type[torch.autograd.Function], *args: Any) -> torch.Tensor:
    result: torch.Tensor = function.apply(*args)  # type: ignore[no-untyped-call]  # torch has no types here
    return result
