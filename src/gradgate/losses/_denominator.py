"""The right denominator: a mean over what is kept, and one over micro-batches and ranks with unequal counts."""

from __future__ import annotations

from numbers import Real
from typing import Any, Literal, TypeAlias

import torch
from torch import distributed

from gradgate._checks import check_fits, check_keep, check_tensor, wrong_type, wrong_value
from gradgate._state import divide_gradients
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
        weights: How much each counts, of the same shapes. A weight of 0 leaves out, whatever the loss: 0 x NaN is 0.
        empty: What to return when nothing is kept.

    Returns:
        A 0-dim tensor: sum(weight x loss) / sum(weight) over what is kept.

    Raises:
        ArgumentTypeError: The mask is not boolean, or an argument is no tensor.
        ArgumentValueError: A mask or weights fit neither the samples nor the elements.

    Gradient:
        weight / sum(weight) to each loss kept, and to each weight kept what it adds; exactly 0 to what is left out,
        also where its loss is NaN, and to everything when nothing is kept. `masked_loss` does not even compute it.

    Examples:
        >>> per_sample = torch.tensor([0.5, 1.5, float("nan")])
        >>> gg.losses.reduce(per_sample, keep=torch.tensor([True, True, False]))
        tensor(1.)
    """
    check_tensor(per_element, name="per_element", function="losses.reduce")
    shares = shares_of(per_element, keep, weights, function="losses.reduce")
    return reduced(per_element, shares, "mean", empty)


def shares_of(
    elements: torch.Tensor, keep: torch.Tensor | None, weights: torch.Tensor | None, *, function: str
) -> torch.Tensor | None:
    """Return how much each element counts: a mask, or weights with 0 for what is left out; None where all are kept."""
    kept = None
    if keep is not None:
        kept = check_keep(over_elements(keep, elements, function=function), elements, function=function)
    if weights is None:
        return kept
    each = check_weights(weights, elements, function=function).to(wide_dtype(elements))
    return torch.where(each != 0 if kept is None else kept & (each != 0), each, 0)


def reduced(
    per_element: torch.Tensor, shares: torch.Tensor | None, reduction: Reduction, empty: float = 0.0
) -> torch.Tensor:
    """Reduce losses by what `shares_of` returned."""
    dtype, halves = per_element.dtype, per_element.dtype in _HALVES
    if shares is None:
        shares = torch.ones((), dtype=torch.bool, device=per_element.device)
    else:
        # The loss is cut out before it is multiplied: 0 x NaN must not happen, neither here nor in backward.
        per_element = torch.where(shares != 0, per_element, 0)
    result = per_element if shares.dtype is torch.bool else per_element * shares
    if reduction != "none":
        result = result.sum(dtype=torch.float32 if halves else None)
    if reduction == "mean":
        amount = shares.expand(per_element.shape).sum().to(wide_dtype(per_element))
        result = divided(result, amount, empty)
    return result.to(dtype) if halves else result


def divided(total: torch.Tensor, amount: torch.Tensor, empty: float) -> torch.Tensor:
    """Divide a sum by how much went into it, and return `empty` where nothing did, without a host sync."""
    some = amount != 0
    return torch.where(some, total / torch.where(some, amount, 1), empty)


def over_elements(each: Any, elements: torch.Tensor, *, name: str = "keep", function: str) -> Any:
    """Align one value per sample with losses that have more dimensions; leave everything else as it is."""
    if not isinstance(each, torch.Tensor) or each.dim() != 1 or elements.dim() < 2:
        return each
    if len(each) == len(elements):
        return each.reshape(-1, *[1] * (elements.dim() - 1))
    if len(each) > 1 and len(each) == elements.shape[-1]:
        what = f"{function}(): `{name}` has {len(each)} values for {len(elements)} samples."
        why = f"a loss of shape {tuple(elements.shape)} takes one value for each sample, or one for each element."
        fix = f"{name}={name}.expand({', '.join(map(str, elements.shape))})   # if it is about the last dimension"
        raise ArgumentValueError(what, why=why, fix=fix)
    return each


def wide_dtype(x: torch.Tensor) -> torch.dtype:
    """Return the dtype to compute in: a half holds neither squares nor counts beyond 65504, an integer no parts."""
    if x.dtype in _HALVES:
        return torch.float32
    return x.dtype if x.is_floating_point() or x.is_complex() else torch.get_default_dtype()


def check_weights(weights: torch.Tensor, per_element: torch.Tensor, *, function: str) -> torch.Tensor:
    """Make sure that weights fit the samples or the elements."""
    if check_tensor(weights, name="weights", function=function).is_complex():
        raise wrong_type(weights, "weights", function, "a weight says how much a loss counts.", "weights=weights.abs()")
    each = over_elements(weights, per_element, name="weights", function=function)
    return check_fits(each, per_element, name="weights", function=function)


# --- Micro-batches and ranks ------------------------------------------------------------------------------------------


class ExactMean:
    """Train on the mean over a whole window - several micro-batches, several ranks - whatever their counts are.

    Each micro-batch gives the *sum* of its losses and how much went into it (samples, tokens, weight); before the
    optimizer steps the gradients are divided once by the count of all micro-batches of all ranks.

    With `DistributedDataParallel` and FSDP2 (`fully_shard`) accumulate under `no_sync()` as ever. A rank that has
    nothing for a micro-batch takes part with a sum that is 0 and a count of 0.

    Args:
        model: The model, or its wrapper, whose gradients are divided.
        group: The process group that shares the batch; found from the wrapper or the default group without it.

    Examples:
        >>> model = torch.nn.Linear(3, 1)
        >>> exact = gg.losses.ExactMean(model)
        >>> for keep in (torch.tensor([True, True, True]), torch.tensor([True, False, False])):
        ...     per_sample = model(torch.ones(3, 3)).squeeze(1).square()
        ...     exact.backward(gg.masked.sum(per_sample, keep=keep), keep.sum())
        >>> mean = exact.finish()  # then optimizer.step()
        >>> torch.allclose(mean, model(torch.ones(1, 3)).square().squeeze())
        True
    """

    def __init__(self, model: torch.nn.Module, *, group: distributed.ProcessGroup | None = None) -> None:
        if not isinstance(model, torch.nn.Module):
            why = "it divides the gradients of a model's parameters."
            raise wrong_type(model, "model", "losses.ExactMean", why, "losses.ExactMean(model)")
        self.model = model
        self._group = group if group is not None else getattr(model, "process_group", None)
        self._totals: torch.Tensor | None = None

    def __repr__(self) -> str:
        state = "nothing added yet" if self._totals is None else "finish() is due"
        return f"ExactMean({type(self.model).__name__}, {state})"

    def backward(self, loss_sum: torch.Tensor, count: int | float | torch.Tensor, *, scaler: Any = None) -> None:
        """Add one micro-batch: run backward from its sum, and remember how much went into it.

        Args:
            loss_sum: The sum (not the mean) of the losses, a 0-dim tensor.
            count: How much went into it: samples, tokens, or weight. A tensor is not read on the host.
            scaler: A `torch.amp.GradScaler`, if there is one.

        Raises:
            ArgumentTypeError: The count is not a number.
            ArgumentValueError: The sum or the count is not a single number, or the sum has no graph.

        Gradient:
            That of the sum is added to `.grad`; `finish` divides.
        """
        function = "ExactMean.backward"
        check_tensor(loss_sum, name="loss_sum", function=function)
        if loss_sum.dim() != 0:
            fix = 'exact.backward(per_sample.sum(), len(per_sample))   # or a loss with reduction="sum"'
            raise wrong_value(loss_sum, "loss_sum", function, "the sum over the micro-batch is one number.", fix)
        if not loss_sum.requires_grad:
            what = "ExactMean.backward(): `loss_sum` has no graph to go back through."
            why = "every micro-batch runs backward, also one with nothing in it: other ranks wait for its gradients."
            fix = "exact.backward(model(batch).sum() * 0, 0)   # where nothing is kept; else look for a no_grad"
            raise ArgumentValueError(what, why=why, fix=fix)
        if not isinstance(count, (Real, torch.Tensor)):
            why = "it is how much went into the sum: samples, tokens, or weight."
            raise wrong_type(count, "count", function, why, "exact.backward(per_sample.sum(), len(per_sample))")
        # In double precision: a float32 counts no further than 2^24 tokens.
        counted = torch.as_tensor(count, dtype=torch.float64, device=loss_sum.device).detach()
        if counted.dim() != 0:
            fix = "exact.backward(loss_sum, count.sum())"
            raise wrong_value(count, "count", function, "one number belongs to one sum.", fix)
        (loss_sum if scaler is None else scaler.scale(loss_sum)).backward()
        added = torch.stack([loss_sum.detach().double(), counted])
        self._totals = added if self._totals is None else self._totals + added

    def finish(self) -> torch.Tensor:
        """Divide the gradients by the count of all micro-batches and ranks; then the optimizer may step.

        Every rank calls it, once for each step. One small all-reduce.

        Returns:
            The mean loss over everything since the last call, the same on every rank; 0 if the count is 0.

        Raises:
            ArgumentValueError: No micro-batch was added.
        """
        if self._totals is None:
            what = "ExactMean.finish(): no micro-batch was added since the last call."
            why = "there is nothing to divide, and other ranks may be waiting."
            fix = "exact.backward(loss_sum, count)   # with a sum that is 0 and 0 where a rank has nothing"
            raise ArgumentValueError(what, why=why, fix=fix)
        totals, self._totals = self._totals, None
        ranks = 1
        if distributed.is_available() and distributed.is_initialized():
            ranks = distributed.get_world_size(self._group)
            if ranks > 1:
                distributed.all_reduce(totals, group=self._group)
        # DDP and FSDP have already divided by the number of ranks; a bare model has not been reduced at all.
        averaged = isinstance(self.model, torch.nn.parallel.DistributedDataParallel) or any(
            hasattr(module, "set_requires_gradient_sync") for module in self.model.modules()
        )
        return divide_gradients(self.model.parameters(), totals, ranks if averaged else 1)
