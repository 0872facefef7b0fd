"""From one loss per element to one loss: the sum over what is kept, divided by how much was kept."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias, get_args

import torch

from gradgate import masked
from gradgate._checks import check_fits, check_keep, check_tensor, wrong_type, wrong_value
from gradgate._names import listed
from gradgate.errors import ArgumentValueError

Reduction: TypeAlias = Literal["mean", "sum", "none"]

_HALVES = (torch.float16, torch.bfloat16)


def reduce(
    per_element: torch.Tensor,
    *,
    keep: torch.Tensor | None = None,
    weights: torch.Tensor | None = None,
    empty: float = 0.0,
) -> torch.Tensor:
    """Average losses over what is kept: their sum divided by the number kept, or by the weight kept.

    Args:
        per_element: The unreduced losses, samples along the first dimension.
        keep: What takes part, as a boolean mask: one answer for each sample, `(n,)`, or the shape of the losses.
        weights: How much each counts: one number for each sample, `(n,)`, or the shape of the losses. A weight of 0
            leaves out, whatever stands there: 0 x NaN is 0.
        empty: What to give when nothing is kept.

    Returns:
        A 0-dim tensor: sum(weight x loss) / sum(weight) over what is kept.

    Raises:
        ArgumentTypeError: The mask is not boolean, or an argument is no tensor.
        ArgumentValueError: A mask or weights fit neither the samples nor the elements.

    Gradient:
        weight / sum(weight) to each loss kept, and to each weight kept what it adds; exactly 0 to what is left out,
        also where its loss is NaN, and to everything when nothing is kept. What comes before `per_element` is still
        computed: where that has a NaN of its own, use `masked_loss`, which does not compute it at all.

    Examples:
        >>> per_sample = torch.tensor([0.5, 1.5, float("nan")])
        >>> gg.losses.reduce(per_sample, keep=torch.tensor([True, True, False]))
        tensor(1.)
    """
    check_tensor(per_element, name="per_element", function="losses.reduce")
    total, amount = _sum_and_amount(per_element, keep, weights, function="losses.reduce")
    return narrowed(divided(total, amount, empty), per_element)


def reduced(
    per_element: torch.Tensor,
    keep: torch.Tensor | None,
    weights: torch.Tensor | None,
    reduction: Reduction,
    *,
    function: str,
) -> torch.Tensor:
    """Reduce in the way that a `reduction=` argument names."""
    if reduction == "none":
        return narrowed(_weighed(per_element, keep, weights, function=function)[0], per_element)
    total, amount = _sum_and_amount(per_element, keep, weights, function=function)
    return narrowed(divided(total, amount, 0.0) if reduction == "mean" else total, per_element)


def check_reduction(reduction: str, *, function: str) -> None:
    """Make sure that a reduction is one that there is."""
    if reduction not in get_args(Reduction):
        why = f"there are {listed(get_args(Reduction))}."
        raise wrong_value(reduction, "reduction", function, why, 'reduction="mean"')


def divided(total: torch.Tensor, amount: torch.Tensor, empty: float) -> torch.Tensor:
    """Divide a sum by how much went into it, and give `empty` where nothing did; nobody looks at the data."""
    some = amount != 0
    return torch.where(some, total / torch.where(some, amount, 1), empty)


def over_elements(each: Any, elements: torch.Tensor, *, name: str = "keep", function: str) -> Any:
    """Line one value per sample up with losses that have more dimensions; leave everything else as it is."""
    if not isinstance(each, torch.Tensor) or each.dim() != 1 or elements.dim() < 2:
        return each
    if len(each) == len(elements):
        return each.reshape(-1, *[1] * (elements.dim() - 1))
    if len(each) > 1 and len(each) == elements.shape[-1]:
        raise ArgumentValueError(
            f"{function}(): `{name}` has {len(each)} values for {len(elements)} samples.",
            why=f"a loss of shape {tuple(elements.shape)} takes one value for each sample, or one for each element.",
            fix=f"{name}={name}.expand({', '.join(map(str, elements.shape))})   # if it is about the last dimension",
        )
    return each


def _sum_and_amount(
    per_element: torch.Tensor, keep: torch.Tensor | None, weights: torch.Tensor | None, *, function: str
) -> tuple[torch.Tensor, torch.Tensor]:
    wide, summed = wide_dtype(per_element), torch.float32 if per_element.dtype in _HALVES else None
    if weights is None and keep is None:
        amount = torch.full((), per_element.numel(), dtype=wide, device=per_element.device)
        return per_element.sum(dtype=summed), amount
    if keep is not None and weights is None:
        mask = check_keep(over_elements(keep, per_element, function=function), per_element, function=function)
        amount = mask.expand(per_element.shape).sum().to(wide)
        return masked.sum(per_element, keep=mask, dtype=summed), amount
    weighed, weights_kept = _weighed(per_element, keep, weights, function=function)
    return weighed.sum(), weights_kept.expand(per_element.shape).sum()


def wide_dtype(per_element: torch.Tensor) -> torch.dtype:
    """Give the dtype to compute in: a half holds neither squares nor counts beyond 65504, an integer has no parts."""
    if per_element.dtype in _HALVES:
        return torch.float32
    floating = per_element.is_floating_point() or per_element.is_complex()
    return per_element.dtype if floating else torch.get_default_dtype()


def narrowed(result: torch.Tensor, per_element: torch.Tensor) -> torch.Tensor:
    """Give what was computed from halves as a half again."""
    return result.to(per_element.dtype) if per_element.dtype in _HALVES else result


def _weighed(
    per_element: torch.Tensor, keep: torch.Tensor | None, weights: torch.Tensor | None, *, function: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Give weight x loss, 0 where left out, and the weights, 0 where left out."""
    mask = (
        None
        if keep is None
        else check_keep(over_elements(keep, per_element, function=function), per_element, function=function)
    )
    if weights is None:
        ones = torch.ones((), dtype=per_element.dtype, device=per_element.device)
        return per_element if mask is None else torch.where(mask, per_element, 0), ones
    each = check_weights(weights, per_element, function=function).to(wide_dtype(per_element))
    mask = each != 0 if mask is None else mask & (each != 0)
    # The loss is cut out before it is multiplied: 0 x NaN must not happen, neither here nor in backward.
    each = torch.where(mask, each, 0)
    return torch.where(mask, per_element, 0) * each, each


def check_weights(weights: torch.Tensor, per_element: torch.Tensor, *, function: str) -> torch.Tensor:
    """Make sure that weights fit the samples or the elements."""
    check_tensor(weights, name="weights", function=function)
    if weights.is_complex():
        raise wrong_type(weights, "weights", function, "a weight says how much a loss counts.", "weights=weights.abs()")
    each = over_elements(weights, per_element, name="weights", function=function)
    return check_fits(each, per_element, name="weights", function=function)
