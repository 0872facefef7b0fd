"""What each gate does to a gradient, the meter that counts, and how a rule gets into the graph.

A rule is a pure function of tensors. While autograd records backward, for second derivatives, it uses operations that
autograd can follow, else the fastest ones with the same result.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from gradgate import _kernels
from gradgate._checks import check_keep, wrong_type
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

# --- Counting -------------------------------------------------------------------------------------------------------


class GateMeter:
    """Counts what reaches a gate and what leaves it, since it was made or last reset.

    Give it to a gate as `meter=`. It counts during backward, on the device of the gradient and without waiting for
    it; only reading a number waits. One meter may serve several gates; it then counts their sum.

    An element is *stopped* when the gate withholds or replaces it: closed by `keep`, multiplied by a factor of 0, or
    not finite at `finite_grad`. Elements that are only scaled or clipped *pass*; the norms show by how much. Of a
    sparse gradient the stored elements count. Under a gradient scaler the norms are those of the scaled gradient.

    Examples:
        >>> meter = gg.GateMeter()
        >>> x = torch.ones(2, 2, requires_grad=True)
        >>> gg.gate(x, torch.tensor([[True], [False]]), meter=meter).sum().backward()
        >>> meter
        GateMeter(passed=2, stopped=2, norm_in=2, norm_out=1.414)
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Start again from 0."""
        self._elements = 0
        self._stopped: dict[torch.device, torch.Tensor] = {}
        self._squares: dict[torch.device, torch.Tensor] = {}

    def count(self, arrived: torch.Tensor, left: torch.Tensor | None, stopped: torch.Tensor | int) -> None:
        """Add one gradient that arrived, what went on upstream, and how much was stopped; the gates call this."""
        device = arrived.device
        if device not in self._stopped:
            wide = torch.float32 if device.type == "mps" else torch.float64  # mps has no float64
            self._stopped[device] = torch.zeros((), dtype=torch.int64, device=device)
            self._squares[device] = torch.zeros(2, dtype=wide, device=device)
        with torch.no_grad():
            self._elements += arrived.numel()
            self._stopped[device] += stopped
            self._squares[device][0] += self._square_of_norm(arrived)
            if left is not None:
                self._squares[device][1] += self._square_of_norm(left)

    def _square_of_norm(self, gradient: torch.Tensor) -> torch.Tensor:
        values = torch.view_as_real(gradient.resolve_conj()) if gradient.is_complex() else gradient
        norm: torch.Tensor = torch.linalg.vector_norm(values, dtype=self._squares[gradient.device].dtype)
        return norm.square()

    @property
    def passed(self) -> int:
        """How many elements went on upstream."""
        return self._elements - self.stopped

    @property
    def stopped(self) -> int:
        """How many elements were withheld or replaced."""
        return sum(int(count) for count in self._stopped.values())

    @property
    def norm_in(self) -> float:
        """The norm of all that reached the gate."""
        return math.sqrt(sum(float(squares[0]) for squares in self._squares.values()))

    @property
    def norm_out(self) -> float:
        """The norm of all that went on upstream."""
        return math.sqrt(sum(float(squares[1]) for squares in self._squares.values()))

    def __repr__(self) -> str:
        return (
            f"GateMeter(passed={self.passed}, stopped={self.stopped}, "
            f"norm_in={self.norm_in:.4g}, norm_out={self.norm_out:.4g})"
        )


# --- Rules ----------------------------------------------------------------------------------------------------------


LOW_PRECISION = (torch.float16, torch.bfloat16)


class Rule:
    """What a gate does to a gradient: returns what goes on upstream, None for nothing, and never writes into it."""

    __slots__ = ()

    def __call__(self, gradient: torch.Tensor) -> torch.Tensor | None:
        raise NotImplementedError

    def stopped(self, gradient: torch.Tensor) -> torch.Tensor | int:
        """Count the elements that are withheld or replaced, without a host sync."""
        return 0

    def at(self, rows: torch.Tensor, shape: torch.Size) -> Rule:
        """Return the rule for these rows of a gradient of that shape."""
        return self

    def settled(self, gradient: torch.Tensor) -> Rule:
        """Return the rule for this gradient; itself, unless it depends on the gradient."""
        return self


@dataclass(slots=True)
class Scale(Rule):
    """The gradient times a number, a mask or a tensor, and exactly +0.0 where that is 0; False lets nothing through."""

    factor: bool | float | torch.Tensor

    def __call__(self, gradient: torch.Tensor) -> torch.Tensor | None:
        factor = self.factor
        if isinstance(factor, torch.Tensor):
            if factor.dtype is torch.bool:
                return _masked(gradient, factor)
            return _masked((gradient * factor).to(gradient.dtype), factor != 0)
        if factor is False:
            return None
        if factor == 1:
            return gradient
        return torch.zeros_like(gradient) if factor == 0 else gradient * factor

    def stopped(self, gradient: torch.Tensor) -> torch.Tensor | int:
        """Count where the factor is 0, each as often as it is broadcast."""
        if isinstance(self.factor, torch.Tensor):
            return (self.factor == 0).count_nonzero() * (gradient.numel() // max(self.factor.numel(), 1))
        return gradient.numel() if self.factor == 0 else 0

    def at(self, rows: torch.Tensor, shape: torch.Size) -> Scale:
        return Scale(self.factor.expand(shape)[rows]) if isinstance(self.factor, torch.Tensor) else self


@dataclass(slots=True)
class Chosen(Rule):
    """The gradient where a function of the gradient says so."""

    keep: Callable[[torch.Tensor], Any]

    def settled(self, gradient: torch.Tensor) -> Rule:
        keep = self.keep(_constant(gradient))
        if not isinstance(keep, bool):
            check_keep(keep, gradient, name="keep(grad)", function="gate")
        return Scale(keep)


@dataclass(slots=True)
class Clip(Rule):
    """The gradient with its values, then its norm, brought down to a limit."""

    max_norm: float | None
    max_value: float | None
    per_sample: bool

    def __call__(self, gradient: torch.Tensor) -> torch.Tensor:
        if self.max_value is not None:
            limit = min(self.max_value, torch.finfo(gradient.dtype).max)  # torch does not clamp by more than that
            gradient = gradient.clamp(-limit, limit)
        if self.max_norm is None or gradient.numel() == 0:
            return gradient
        wide = gradient.float() if gradient.dtype in LOW_PRECISION else gradient
        # Divided by its largest element first: the squares of exploding gradients do not fit into float32.
        largest = _norm(_constant(wide), float("inf"), self.per_sample)
        unit = wide / torch.where(largest > 0, largest, 1.0)
        norm = _norm(unit, 2, self.per_sample)
        shrunk = unit * (self.max_norm / torch.where(norm > 0, norm, 1.0))
        # A norm that is NaN is not greater than anything, so a gradient that is not finite goes on as it came.
        return torch.where(largest * norm > self.max_norm, shrunk, wide).to(gradient.dtype)


@dataclass(slots=True)
class Finite(Rule):
    """The gradient where it is finite, and a number elsewhere."""

    fill_value: float

    def __call__(self, gradient: torch.Tensor) -> torch.Tensor:
        if torch.is_grad_enabled() or gradient.is_complex():
            return torch.where(gradient.isfinite(), gradient, self.fill_value)
        return gradient.nan_to_num(self.fill_value, self.fill_value, self.fill_value)

    def stopped(self, gradient: torch.Tensor) -> torch.Tensor:
        return gradient.isfinite().logical_not().count_nonzero()


def _masked(gradient: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
    """Return the gradient where keep and +0.0 elsewhere, whatever arrives there."""
    if keep.device != gradient.device:  # only a 0-dim mask on the CPU gets here, see check_keep
        keep = keep.to(gradient.device, non_blocking=True)
    if not torch.is_grad_enabled() and _kernels.usable(gradient, keep):
        return _kernels.kept(gradient, keep)
    return torch.where(keep, gradient, 0)


def _constant(gradient: torch.Tensor) -> torch.Tensor:
    # torch.autograd.grad(is_grads_batched=True) knows no detach, and needs none.
    return gradient.detach() if gradient.requires_grad else gradient


def _norm(gradient: torch.Tensor, order: float, per_sample: bool) -> torch.Tensor:
    rows = gradient.reshape(len(gradient) if per_sample else 1, -1)
    norm: torch.Tensor = torch.linalg.vector_norm(rows, order, dim=1)
    return norm.reshape(-1, *[1] * (gradient.dim() - 1)) if per_sample else norm.reshape(())


# --- Sparse gradients -----------------------------------------------------------------------------------------------


def on_stored_values(
    treat: Callable[[torch.Tensor, Rule], torch.Tensor | None], gradient: torch.Tensor, rule: Rule
) -> torch.Tensor | None:
    """Treat what a gradient stores by the part of the rule that belongs there; rows stay sparse."""
    if gradient.layout is not torch.sparse_coo:
        return treat(gradient, rule)
    if gradient.sparse_dim() != 1:
        return treat(gradient.to_dense(), rule)
    gradient = gradient.coalesce()
    rows = gradient.indices()
    values = treat(gradient.values(), rule.at(rows[0], gradient.shape))
    if values is None:
        return None
    return torch.sparse_coo_tensor(rows, values, gradient.shape, is_coalesced=True, check_invariants=False)


# --- Into the graph -------------------------------------------------------------------------------------------------

# In eager code an activation is shared copy-on-write, which makes a node of torch's own, and the rule is a hook before
# that node: half the cost of an autograd Function. A parameter is not shared in that way, because its memory must stay
# where it is; its gate is an autograd Function that returns a view. torch.compile and torch.func need operations and
# Functions that they can take apart.

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
            what = f"{function}(): a meter cannot count inside torch.compile or torch.func."
            why = "counting is a side effect, and a traced function has none."
            raise ArgumentValueError(what, why=why, fix="meter=None")
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
    swapped: torch.Tensor = _apply_gated(soft, lambda gradients: gradients, (hard,))
    return swapped


# --- Eager ----------------------------------------------------------------------------------------------------------


def treated(rule: Any, version: int | None, meter: GateMeter | None, gradients: Gradients) -> Gradients:
    """Return what goes on in place of what arrives; nothing for nothing."""
    if gradients[0] is None:
        return gradients
    if version is not None and write_count(rule.factor) != version:
        what = "A mask or factor of a gate was overwritten between forward and backward."
        why = "the gradient would follow another mask than the one that the gate was given."
        raise GradgateError(what, why=why, fix="keep.clone()   # give the gate a copy, or overwrite it after backward")

    def treat(gradient: torch.Tensor, rule: Rule) -> torch.Tensor | None:
        rule = rule.settled(gradient)
        result = rule(gradient)
        if meter is not None:
            meter.count(gradient, result, rule.stopped(gradient))
        return result

    return (on_stored_values(treat, gradients[0], rule),)


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
        what = f"{function}(): torch.func inside torch.compile would lose the rule for the gradient."
        why = "torch.compile does not take over an autograd Function's backward under torch.func."
        fix = "torch.func.grad(torch.compile(f))   # or the same without torch.compile"
        raise ArgumentError(what, why=why, fix=fix)
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
        what = "clip_grad, finite_grad and gate with a callable have no forward-mode derivative."
        why = "what they do depends on the gradient that arrives, and in forward mode none does."
        fix = "torch.func.vjp(f, x)   # or torch.func.grad; without this gate torch.func.jvp works"
        raise ArgumentError(what, why=why, fix=fix)

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
