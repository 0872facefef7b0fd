"""What all robust losses do with a residual before and after their own formula."""

from __future__ import annotations

from collections.abc import Callable
from numbers import Real
from typing import Any, TypeAlias

import torch

from gradgate._checks import check_fits, check_keep, check_tensor
from gradgate._names import describe
from gradgate.errors import ArgumentTypeError, ArgumentValueError
from gradgate.losses._reducing import (
    Reduction,
    check_reduction,
    check_weights,
    narrowed,
    over_elements,
    reduced,
    wide_dtype,
)

__all__ = ["Scale", "floating", "of_residual"]

Scale: TypeAlias = float | torch.Tensor


def of_residual(
    rho: Callable[[torch.Tensor, Scale], torch.Tensor],
    residual: torch.Tensor,
    scale: Scale,
    keep: torch.Tensor | None,
    weights: torch.Tensor | None,
    reduction: Reduction,
    *,
    function: str,
) -> torch.Tensor:
    """Give a loss of residuals, reduced; what is left out is taken away before the formula sees it.

    Args:
        rho: The formula, called with a residual in float32 or float64 and the scale.
        residual: As in `huber`.
        scale: As in `huber`.
        keep: As in `huber`.
        weights: As in `huber`.
        reduction: As in `huber`.
        function: The public function that was called.

    Returns:
        The loss, in the dtype of the residual if that is floating.
    """
    if check_tensor(residual, name="residual", function=function).is_complex():
        raise ArgumentTypeError(
            f"{function}(): `residual` is {describe(residual)}.",
            why="a residual has a size and a sign.",
            fix=f"{function}(residual.abs(), ...)",
        )
    check_reduction(reduction, function=function)
    number: Any = scale
    if not isinstance(number, torch.Tensor) and not (isinstance(number, Real) and float(number) > 0):
        raise ArgumentValueError(
            f"{function}(): `scale` is {describe(scale)}.",
            why="it is the size at which a residual counts as large.",
            fix="scale=1.0   # or 1.4826 * the median absolute residual",
        )
    if isinstance(scale, torch.Tensor):
        scale = _wide(check_fits(scale, residual, name="scale", function=function))
    kept = _without_left_out(_wide(residual), keep, weights, function)
    return narrowed(reduced(rho(kept, scale), keep, weights, reduction, function=function), residual)


def _wide(x: torch.Tensor) -> torch.Tensor:
    return x.to(wide_dtype(x))


def floating(x: torch.Tensor) -> torch.Tensor:
    """Give integers as torch's default floating dtype, and everything else as it is.

    Args:
        x: Real numbers.

    Returns:
        A floating tensor.
    """
    return x if x.is_floating_point() else x.to(torch.get_default_dtype())


def _without_left_out(
    residual: torch.Tensor, keep: torch.Tensor | None, weights: torch.Tensor | None, function: str
) -> torch.Tensor:
    """Put 0 where something is left out, before anything is computed from it: no NaN goes in, none comes back."""
    if keep is not None:
        mask = check_keep(over_elements(keep, residual, function=function), residual, function=function)
        residual = torch.where(mask, residual, 0)
    if weights is not None:
        residual = torch.where(check_weights(weights, residual, function=function) != 0, residual, 0)
    return residual
