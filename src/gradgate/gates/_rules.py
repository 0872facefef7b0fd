"""What each gate does to a gradient: pure functions of tensors that know nothing of graphs, and the meter that counts.

A rule takes the arriving gradient and returns what goes on upstream; None means that nothing does. It never writes into
the gradient that it takes. While autograd records backward, for second derivatives, it uses operations that autograd
can follow, else the fastest ones with the same result.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from gradgate import _kernels
from gradgate._checks import check_keep

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
    """What a gate does to a gradient."""

    __slots__ = ()

    def __call__(self, gradient: torch.Tensor) -> torch.Tensor | None:
        """Return what goes on upstream."""
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
