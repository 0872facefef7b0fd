"""The exact mean over micro-batches and ranks with unequal counts: sum now, divide once by the count of all."""

from __future__ import annotations

from numbers import Real
from typing import Any

import torch
from torch import distributed

from gradgate._checks import check_tensor, wrong_type, wrong_value
from gradgate._state import divide_gradients
from gradgate.errors import ArgumentValueError


class ExactMean:
    """Train on the mean over a whole window - several micro-batches, several ranks - whatever their counts are.

    The mean of means is not the mean: a micro-batch with one token would count as much as one with a thousand. So each
    micro-batch gives the *sum* of its losses and how much went into it, and before the optimizer steps the gradients
    are divided once by the count of all micro-batches of all ranks. The unit is yours: samples, tokens, weight.

    With `DistributedDataParallel` and FSDP2 (`fully_shard`) it knows that gradients have been averaged over ranks;
    accumulate under `no_sync()` as ever. A rank that has nothing for a micro-batch takes part with a sum that is 0 and
    a count of 0.

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
            count: How much went into it: samples, tokens, or weight. A tensor is not looked at on the host.
            scaler: A `torch.amp.GradScaler`, if there is one.

        Raises:
            ArgumentTypeError: The count is not a number.
            ArgumentValueError: The sum or the count is not a single number, or the sum has no graph.

        Gradient:
            That of the sum is added to `.grad`; `finish` divides.
        """
        check_tensor(loss_sum, name="loss_sum", function="ExactMean.backward")
        if loss_sum.dim() != 0:
            why = "the sum over the micro-batch is one number."
            fix = 'exact.backward(per_sample.sum(), len(per_sample))   # or a loss with reduction="sum"'
            raise wrong_value(loss_sum, "loss_sum", "ExactMean.backward", why, fix)
        if not loss_sum.requires_grad:
            raise ArgumentValueError(
                "ExactMean.backward(): `loss_sum` has no graph to go back through.",
                why="every micro-batch runs backward, also one with nothing in it: other ranks wait for its gradients.",
                fix="exact.backward(model(batch).sum() * 0, 0)   # where nothing is kept; else look for a no_grad",
            )
        counted = _counted(count, loss_sum.device)
        (loss_sum if scaler is None else scaler.scale(loss_sum)).backward()
        # In double precision on the host's side of things only: a float32 counts no further than 2^24 tokens.
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
            raise ArgumentValueError(
                "ExactMean.finish(): no micro-batch was added since the last call.",
                why="there is nothing to divide, and other ranks may be waiting.",
                fix="exact.backward(loss_sum, count)   # with a sum that is 0 and 0 where a rank has nothing",
            )
        totals, self._totals = self._totals, None
        ranks = 1
        if distributed.is_available() and distributed.is_initialized():
            ranks = distributed.get_world_size(self._group)
            if ranks > 1:
                distributed.all_reduce(totals, group=self._group)
        # DDP and FSDP have already divided by the number of ranks; a bare model has not been reduced at all.
        return divide_gradients(self.model.parameters(), totals, ranks if self._is_averaged() else 1)

    def _is_averaged(self) -> bool:
        if isinstance(self.model, torch.nn.parallel.DistributedDataParallel):
            return True
        return any(hasattr(module, "set_requires_gradient_sync") for module in self.model.modules())


def _counted(count: Any, device: torch.device) -> torch.Tensor:
    if not isinstance(count, (Real, torch.Tensor)):
        why = "it is how much went into the sum: samples, tokens, or weight."
        raise wrong_type(count, "count", "ExactMean.backward", why, "exact.backward(per_sample.sum(), len(per_sample))")
    counted = torch.as_tensor(count, dtype=torch.float64, device=device).detach()
    if counted.dim() != 0:
        why = "one number belongs to one sum."
        raise wrong_value(count, "count", "ExactMean.backward", why, "exact.backward(loss_sum, count.sum())")
    return counted
