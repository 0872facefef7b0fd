"""Any torch loss, evaluated only on what is kept: as if the rest had never been in the batch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch

from gradgate import masked
from gradgate._checks import check_keep, check_tensor
from gradgate._names import describe
from gradgate._torch_compat import has_data
from gradgate.errors import ArgumentTypeError
from gradgate.losses._ignoring import with_ignore_index
from gradgate.losses._picking import Picking, picking_for, spelled_out
from gradgate.losses._reducing import check_weights, divided, over_elements

__all__ = ["masked_loss"]

Loss = Callable[..., torch.Tensor]


def masked_loss(
    loss_fn: Loss,
    input: torch.Tensor,
    target: torch.Tensor,
    *more: Any,
    keep: torch.Tensor | None = None,
    exclude: Any = None,
    weights: torch.Tensor | None = None,
    empty: float = 0.0,
    **kw: Any,
) -> torch.Tensor:
    """Evaluate a loss only on what is kept: it is equal to the loss of the batch without the rest.

    What is left out is not looked at: NaN targets, NaN logits, an impossible CTC sample change neither value nor
    gradient. The denominator is the loss's own, over what is kept: the number of elements (mse, l1, huber, smooth_l1,
    bce, kl_div, gaussian_nll), of positions (cross_entropy, nll; with class weights their sum), or of samples
    (triplet, cosine, margin, ctc - which divides each by its length first - and kl_div with "batchmean").

    Args:
        loss_fn: A function of `torch.nn.functional`, a loss module, or a function of your own of the same form.
        input: The first argument of the loss.
        target: The second argument of the loss.
        *more: Further arguments, such as the variance of `gaussian_nll_loss`.
        keep: What takes part: one answer for each sample, `(n,)`, or the shape of the unreduced loss. A loss of your
            own gets the elements kept as 1-D tensors in the second case.
        exclude: A value of the target, or several, that does not take part; NaN matches NaN. The `ignore_index` of
            cross_entropy and nll_loss counts as such.
        weights: How much each counts: one number for each sample, or the shape of the unreduced loss; 0 leaves out.
        empty: What to give when nothing is kept.
        **kw: Further arguments of the loss, such as `reduction` or `label_smoothing`. With `reduction="none"` the
            result has the shape of the unreduced loss, with 0 where something is left out.

    Returns:
        The loss.

    Raises:
        ArgumentTypeError: `loss_fn` cannot be called, a mask is not boolean, or another argument is no tensor.
        ArgumentValueError: The mask or the weights fit neither the samples nor the elements of this loss.

    Gradient:
        That of the loss on what is kept; exactly 0 to everything left out, and to everything when nothing is kept.

    Examples:
        >>> logits = torch.tensor([[2.0, 0.0], [float("nan"), 0.0]], requires_grad=True)
        >>> labels = torch.tensor([0, 255])
        >>> loss = gg.losses.masked_loss(torch.nn.functional.cross_entropy, logits, labels, exclude=255)
        >>> loss.backward()
        >>> logits.grad
        tensor([[-0.1192,  0.1192],
                [ 0.0000,  0.0000]])
    """
    if not callable(loss_fn):
        raise ArgumentTypeError(
            f"losses.masked_loss(): `loss_fn` is {describe(loss_fn)}.",
            why="it is called with what is kept of input and target.",
            fix="losses.masked_loss(torch.nn.functional.cross_entropy, logits, labels, exclude=-100)",
        )
    check_tensor(input, name="input", function="losses.masked_loss")
    check_tensor(target, name="target", function="losses.masked_loss")
    if keep is None and weights is None and not more:
        loss = with_ignore_index(loss_fn, input, target, exclude, empty, kw)
        if loss is not None:
            return loss
    loss_fn, more, kw = spelled_out(loss_fn, more, kw)
    # Weights for single elements are about single elements, also beside one answer for each sample.
    each = isinstance(weights, torch.Tensor) and weights.dim() > 1
    picking = picking_for(loss_fn, input, target, None if each else keep, exclude, kw)
    mask = _mask(picking, target, keep, exclude, weights)
    if mask is None:
        return loss_fn(input, target, *more, **kw)
    reduction = kw.get("reduction", getattr(loss_fn, "reduction", "mean"))
    if not has_data(input, target, mask):
        return _standing_in(loss_fn, picking, input, target, more, kw, mask, weights, reduction, empty)
    # Torch's own way is exact where no logit that is left out is NaN or infinite: the softmax of one position knows
    # nothing of another's.
    if (
        picking.ignored is not None
        and weights is None
        and reduction != "none"
        and picking.finite_outside(mask, input)
        and bool(mask.any())
    ):
        return loss_fn(input, torch.where(mask, target, picking.ignored), *more, **kw)
    rows = mask.reshape(-1).nonzero().squeeze(1)
    if len(rows) == 0 and not (reduction == "none" and type(picking) is Picking):  # whose losses have another shape
        return _nothing(input, mask, reduction, empty)
    if weights is None and reduction != "none":
        if len(rows) == mask.numel():
            return loss_fn(input, target, *more, **kw)
        return loss_fn(*picking.picked(rows, input, target, more), **picking.picked_keywords(rows, kw))
    per_element = _unreduced(loss_fn, kw)(
        *picking.picked(rows, input, target, more), **picking.picked_keywords(rows, kw)
    )
    if weights is not None:
        heavy = _beside(_spread(weights, mask).reshape(-1)[rows], per_element)
        amount = _beside(picking.amounts(target, kw).reshape(-1)[rows], per_element) * heavy
        per_element = per_element * heavy
    if reduction == "none":
        return _put_back(per_element, rows, mask.shape)
    if reduction == "sum":
        return per_element.sum()
    return _mean(picking.per_unit(per_element, rows, more), amount, reduction, empty)


def _mean(weighed: torch.Tensor, amount: torch.Tensor, reduction: str, empty: float) -> torch.Tensor:
    # A sample may have several losses; "batchmean" counts samples all the same.
    amount = amount if reduction == "batchmean" else amount.expand(weighed.shape)
    return divided(weighed.sum(), amount.sum(), empty)


def _beside(each: torch.Tensor, per_element: torch.Tensor) -> torch.Tensor:
    """Line up what is there for each sample, or for each element, with losses that may have more dimensions."""
    return each.reshape(*each.shape, *[1] * (per_element.dim() - each.dim()))


def _mask(
    picking: Picking,
    target: torch.Tensor,
    keep: torch.Tensor | None,
    exclude: Any,
    weights: torch.Tensor | None,
) -> torch.Tensor | None:
    """Put all that leaves something out into one mask of the shape of the unreduced loss; None if nothing does."""
    mask = None
    if keep is not None:
        unreduced = torch.empty(picking.shape, device="meta")
        each = over_elements(keep, unreduced, function="losses.masked_loss")
        mask = check_keep(each, _blank(keep, picking.shape), function="losses.masked_loss")
    if exclude is not None or picking.ignored is not None:
        values = [value for value in (exclude, picking.ignored) if value is not None]
        for value in values:
            # Labels and one number, the commonest case, need no look at what the dtype can hold.
            plain = type(value) is int and target.dtype is torch.int64 and -(2**63) <= value < 2**63
            taking_part = target != value if plain else masked.valid(target.detach(), exclude=value)
            found = picking.over_loss(taking_part)
            mask = found if mask is None else mask & found
    if weights is not None:
        heavy = check_weights(weights, _blank(weights, picking.shape), function="losses.masked_loss").detach() != 0
        mask = heavy if mask is None else mask & heavy
    return mask if mask is None or mask.shape == picking.shape else mask.expand(picking.shape)


def _blank(like: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """Give something of the shape of the unreduced loss, where the mask or the weights are."""
    return torch.empty((), device=getattr(like, "device", None)).expand(shape)


def _spread(weights: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    spread: torch.Tensor = over_elements(weights, mask, name="weights", function="losses.masked_loss").expand(
        mask.shape
    )
    return spread


def _unreduced(loss_fn: Loss, kw: dict[str, Any]) -> Loss:
    """Give the loss with `reduction="none"`, whether it is a function or a module."""
    if isinstance(loss_fn, torch.nn.Module):
        loss_fn = copy.copy(loss_fn)
        loss_fn.reduction = "none"  # type: ignore[assignment]
    else:
        kw["reduction"] = "none"
    return loss_fn


def _nothing(input: torch.Tensor, mask: torch.Tensor, reduction: str, empty: float) -> torch.Tensor:
    zero = input.reshape(-1)[:0].sum()
    return zero + torch.zeros(mask.shape, dtype=zero.dtype, device=zero.device) if reduction == "none" else zero + empty


def _put_back(kept: torch.Tensor, rows: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    rest = kept.shape[1:]
    whole = torch.zeros((shape.numel(), *rest), dtype=kept.dtype, device=kept.device)
    return whole.index_put((rows,), kept).reshape(*shape, *rest)


def _standing_in(
    loss_fn: Loss,
    picking: Picking,
    input: torch.Tensor,
    target: torch.Tensor,
    more: tuple[Any, ...],
    kw: dict[str, Any],
    mask: torch.Tensor,
    weights: torch.Tensor | None,
    reduction: str,
    empty: float,
) -> torch.Tensor:
    """Do the same where nobody may look at the data: a harmless value stands in for what is left out."""
    amounts = picking.amounts(torch.where(mask, target, 0) if picking.by_class else target, kw)
    arguments = picking.stood_in(mask, input, target, more)
    per_element = _unreduced(loss_fn, kw)(*arguments, **kw)
    each = torch.ones((), dtype=per_element.dtype, device=per_element.device)
    if weights is not None:
        each = torch.where(mask, _spread(weights, mask), 0)
    amount = _beside(torch.where(mask, amounts * each, 0), per_element)
    per_element = torch.where(_beside(mask, per_element), per_element, 0)
    per_element = per_element if weights is None else per_element * _beside(each, per_element)
    if reduction == "none":
        return per_element
    return per_element.sum() if reduction == "sum" else _mean(per_element, amount, reduction, empty)
