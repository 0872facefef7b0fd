"""How the arguments of a loss are taken apart: by sample, by element, or by position with classes behind it."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.nn import functional

from gradgate._names import describe
from gradgate.errors import ArgumentValueError

__all__ = ["Picking", "picking_for", "spelled_out"]

_WITH_CLASSES = (functional.cross_entropy, functional.nll_loss, torch.nn.CrossEntropyLoss, torch.nn.NLLLoss)
_BY_SAMPLE = (
    functional.triplet_margin_loss,
    functional.triplet_margin_with_distance_loss,
    functional.cosine_embedding_loss,
    functional.multi_margin_loss,
    functional.multilabel_margin_loss,
    functional.multilabel_soft_margin_loss,
    torch.nn.TripletMarginLoss,
    torch.nn.TripletMarginWithDistanceLoss,
    torch.nn.CosineEmbeddingLoss,
    torch.nn.MultiMarginLoss,
    torch.nn.MultiLabelMarginLoss,
    torch.nn.MultiLabelSoftMarginLoss,
)
_CTC = (functional.ctc_loss, torch.nn.CTCLoss)
# Keywords that broadcast against the input, so that they are picked with it.
_LIKE_INPUT = {
    functional.binary_cross_entropy: ("weight",),
    functional.binary_cross_entropy_with_logits: ("weight", "pos_weight"),
    functional.mse_loss: ("weight",),
    functional.l1_loss: ("weight",),
    functional.huber_loss: ("weight",),
    functional.smooth_l1_loss: (),
    functional.gaussian_nll_loss: ("var",),
}

_FUNCTION_OF = {
    torch.nn.BCELoss: functional.binary_cross_entropy,
    torch.nn.BCEWithLogitsLoss: functional.binary_cross_entropy_with_logits,
}


def _is(loss_fn: Any, kinds: tuple[Any, ...]) -> bool:
    return any(loss_fn is kind or (isinstance(kind, type) and isinstance(loss_fn, kind)) for kind in kinds)


class Picking:
    """One whole sample after the other: the first dimension of every argument.

    Args:
        loss_fn: The loss.
        input: Its first argument.
        target: Its second argument.
    """

    by_class = False
    ignored: int | None = None

    def __init__(self, loss_fn: Any, input: torch.Tensor, target: torch.Tensor) -> None:
        self.loss_fn = loss_fn
        self.shape = torch.Size([self._samples(input)])
        self.dims = input.dim()

    def _samples(self, input: torch.Tensor) -> int:
        return len(input)

    def over_loss(self, kept: torch.Tensor) -> torch.Tensor:
        """Turn a mask of the target's shape into one of the unreduced loss's: a sample needs all of it."""
        return kept if kept.dim() == 1 else kept.flatten(1).all(1)

    def picked(self, rows: torch.Tensor, input: Any, target: Any, more: tuple[Any, ...]) -> list[Any]:
        """Give the arguments of the loss for these rows."""
        return [self._pick(rows, argument) for argument in (input, target, *more)]

    def picked_keywords(self, rows: torch.Tensor, kw: dict[str, Any]) -> dict[str, Any]:
        """Give the keywords of the loss for these rows."""
        names = _LIKE_INPUT.get(self.loss_fn, ())
        return {
            # A weight of fewer dimensions is about columns; a variance never is.
            name: self._pick(rows, value) if name in names and (name == "var" or _dims(value) == self.dims) else value
            for name, value in kw.items()
        }

    def amounts(self, target: torch.Tensor, kw: dict[str, Any]) -> torch.Tensor:
        """Say how much each place of the unreduced loss adds to the denominator."""
        return torch.ones((), device=target.device).expand(self.shape)

    def per_unit(self, per_element: torch.Tensor, rows: torch.Tensor, more: tuple[Any, ...]) -> torch.Tensor:
        """Give the losses of these rows as the loss's own mean takes them."""
        return per_element

    def finite_outside(self, mask: torch.Tensor, input: torch.Tensor) -> bool:
        """Tell whether what is left out can be left to torch's own `ignore_index`."""
        return False

    def stood_in(self, mask: torch.Tensor, input: Any, target: Any, more: tuple[Any, ...]) -> list[Any]:
        """Give the arguments with harmless values in the places that are left out."""
        if _is(self.loss_fn, _BY_SAMPLE + _CTC):
            raise ArgumentValueError(
                f"losses.masked_loss(): {_name(self.loss_fn)} takes whole samples, and their number would depend on "
                "data that nobody may look at here (torch.compile, vmap, FakeTensorMode).",
                why="the shape of what is kept has to be known.",
                fix="call it outside of the compiled or mapped function",
            )
        return [self._without(mask, argument) for argument in (input, target, *more)]

    def _without(self, mask: torch.Tensor, argument: Any) -> Any:
        if not isinstance(argument, torch.Tensor) or not argument.dim() or len(argument) != self.shape[0]:
            return argument
        kept = mask.reshape(-1, *[1] * (argument.dim() - 1))
        return torch.where(kept, argument, 0.5 if argument.is_floating_point() else 0)

    def _pick(self, rows: torch.Tensor, argument: Any) -> Any:
        if isinstance(argument, torch.Tensor) and argument.dim() and len(argument) == self.shape[0]:
            return argument.index_select(0, rows)
        return argument


class _ByTime(Picking):
    """CTC: the samples are the second dimension of the input; targets may be one behind the other."""

    def _samples(self, input: torch.Tensor) -> int:
        return input.shape[1] if input.dim() == 3 else 1

    def picked(self, rows: torch.Tensor, input: Any, target: Any, more: tuple[Any, ...]) -> list[Any]:
        input_lengths, target_lengths, *others = more
        if target.dim() == 1 and input.dim() == 3:
            parts = target.split([int(length) for length in target_lengths])
            target = torch.cat([parts[row] for row in rows.tolist()])
        else:
            target = target.index_select(0, rows)
        lengths = [_chosen(given, rows) for given in (input_lengths, target_lengths)]
        return [input.index_select(1, rows), target, *lengths, *others]

    def per_unit(self, per_element: torch.Tensor, rows: torch.Tensor, more: tuple[Any, ...]) -> torch.Tensor:
        lengths = torch.as_tensor(_chosen(more[1], rows), device=per_element.device)
        return per_element / lengths.clamp(min=1)


class _ByElement(Picking):
    """One element after the other: input and target have one shape."""

    def __init__(self, loss_fn: Any, input: torch.Tensor, target: torch.Tensor) -> None:
        self.loss_fn = loss_fn
        self.shape = torch.broadcast_shapes(input.shape, target.shape)  # type: ignore[no-untyped-call]

    def over_loss(self, kept: torch.Tensor) -> torch.Tensor:
        return kept.expand(self.shape)

    def picked_keywords(self, rows: torch.Tensor, kw: dict[str, Any]) -> dict[str, Any]:
        names = _LIKE_INPUT.get(self.loss_fn, ())
        return {name: self._pick(rows, value) if name in names else value for name, value in kw.items()}

    def stood_in(self, mask: torch.Tensor, input: Any, target: Any, more: tuple[Any, ...]) -> list[Any]:
        # One half is inside the range of every loss of this kind: a probability, a variance, a number.
        return [
            torch.where(mask, argument, 0.5) if isinstance(argument, torch.Tensor) else argument
            for argument in (input, target, *more)
        ]

    def _pick(self, rows: torch.Tensor, argument: Any) -> Any:
        if not isinstance(argument, torch.Tensor):
            return argument
        if argument.dim() == len(self.shape) - 1 and argument.shape == self.shape[:-1]:
            argument = argument.unsqueeze(-1)  # gaussian_nll_loss takes one variance for each sample
        return argument.expand(self.shape).reshape(-1).index_select(0, rows)


class _ByPosition(Picking):
    """One position after the other, the classes behind it: the second dimension of the input."""

    by_class = True

    def __init__(self, loss_fn: Any, input: torch.Tensor, target: torch.Tensor, ignored: int | None) -> None:
        self.loss_fn = loss_fn
        self.indices = not target.is_floating_point()
        self.by_class = self.indices
        self.ignored = ignored if self.indices else None
        self.shape = input.shape[:0] if input.dim() == 1 else input.shape[:1] + input.shape[2:]

    def over_loss(self, kept: torch.Tensor) -> torch.Tensor:
        return kept if self.indices else kept.all(1)

    def picked(self, rows: torch.Tensor, input: Any, target: Any, more: tuple[Any, ...]) -> list[Any]:
        return [self._behind(rows, input), self._pick(rows, target), *more]

    def amounts(self, target: torch.Tensor, kw: dict[str, Any]) -> torch.Tensor:
        weight = kw.get("weight", getattr(self.loss_fn, "weight", None))
        if weight is None or not self.indices:
            return super().amounts(target, kw)
        inside = (target >= 0) & (target < len(weight))
        return torch.where(inside, weight[torch.where(inside, target, 0)], 0)

    def stood_in(self, mask: torch.Tensor, input: Any, target: Any, more: tuple[Any, ...]) -> list[Any]:
        over_classes = mask.unsqueeze(1) if input.dim() > 1 else mask
        safe = torch.where(mask if self.indices else over_classes, target, 0)
        return [torch.where(over_classes, input, 0), safe, *more]

    def finite_outside(self, mask: torch.Tensor, input: torch.Tensor) -> bool:
        """Tell whether the scores of what is left out are finite for certain; where those lie apart, look at all."""
        scores = input.detach()
        if scores.dim() == 2:  # a bag is the sum of some rows, without a copy of them
            rows = mask.logical_not().nonzero().squeeze(1)
            scores = torch.embedding_bag(scores, rows, rows.new_zeros(1))[0]
        return math.isfinite(scores.sum().item())

    def _pick(self, rows: torch.Tensor, argument: Any) -> Any:
        return argument.reshape(-1).index_select(0, rows) if self.indices else self._behind(rows, argument)

    def _behind(self, rows: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if scores.dim() == 2:
            return scores.index_select(0, rows)
        return (
            scores.movedim(1, -1)
            .reshape(-1, scores.shape[1] if scores.dim() > 1 else len(scores))
            .index_select(0, rows)
        )


def spelled_out(loss_fn: Any, more: tuple[Any, ...], kw: dict[str, Any]) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """Give a loss and its arguments with every tensor that is to be picked in the place where it is looked for.

    Args:
        loss_fn: The loss.
        more: Its arguments after the target.
        kw: Its keywords.

    Returns:
        The same three. A module with weights becomes the function that it calls, and they its keywords; the lengths of
        CTC are no keywords.
    """
    if _is(loss_fn, _CTC):
        lengths = [name for name in ("input_lengths", "target_lengths")[len(more) :] if name in kw]
        others = {name: value for name, value in kw.items() if name not in lengths}
        return loss_fn, (*more, *[kw[name] for name in lengths]), others
    function = _FUNCTION_OF.get(type(loss_fn))
    if function is None:
        return loss_fn, more, kw
    names = ("reduction", *_LIKE_INPUT[function])
    return function, more, {name: getattr(loss_fn, name) for name in names} | kw


def picking_for(
    loss_fn: Any, input: torch.Tensor, target: torch.Tensor, keep: Any, exclude: Any, kw: dict[str, Any]
) -> Picking:
    """Choose how a loss is taken apart.

    Args:
        loss_fn: The loss.
        input: Its first argument.
        target: Its second argument.
        keep: The mask, whose shape says whether samples or elements are meant.
        exclude: The values left out.
        kw: The keywords of the loss.

    Returns:
        The way to take it apart.

    Raises:
        ArgumentValueError: "batchmean" divides by samples, but elements are left out.
    """
    if _is(loss_fn, _CTC):
        return _ByTime(loss_fn, input, target)
    if _is(loss_fn, _WITH_CLASSES):
        ignored = kw.get("ignore_index", getattr(loss_fn, "ignore_index", -100))
        return _ByPosition(loss_fn, input, target, ignored)
    by_sample = exclude is None and getattr(keep, "shape", None) == torch.Size([len(input) if input.dim() else 0])
    if _is(loss_fn, _BY_SAMPLE) or (by_sample and input.dim() > 1):
        return Picking(loss_fn, input, target)
    if kw.get("reduction", getattr(loss_fn, "reduction", None)) == "batchmean":
        raise ArgumentValueError(
            'losses.masked_loss(): reduction="batchmean" with single elements left out.',
            why="it divides by the number of samples, and a part of a sample has none.",
            fix='keep of shape (n,), or reduction="mean"',
        )
    return _ByElement(loss_fn, input, target)


def _chosen(lengths: Any, rows: torch.Tensor) -> Any:
    if isinstance(lengths, torch.Tensor):
        return lengths.index_select(0, rows.to(lengths.device))
    return type(lengths)(lengths[row] for row in rows.tolist())


def _dims(value: Any) -> int:
    return value.dim() if isinstance(value, torch.Tensor) else 0


def _name(loss_fn: Any) -> str:
    return getattr(loss_fn, "__name__", None) or describe(loss_fn)
