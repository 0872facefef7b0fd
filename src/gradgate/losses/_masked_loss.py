"""Any torch loss, evaluated only on what is kept: as if the rest had never been in the batch."""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable
from functools import reduce
from operator import and_
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from gradgate import masked
from gradgate._checks import check_keep, check_tensor, wrong_type
from gradgate._names import describe, no_such_argument
from gradgate._torch_private import has_data
from gradgate.errors import ArgumentValueError
from gradgate.losses._denominator import check_weights, divided, over_elements

Loss = Callable[..., torch.Tensor]

_FUNCTION = "losses.masked_loss"


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

    The denominator is the loss's own, over what is kept: the number of elements (mse, l1, huber, smooth_l1, bce,
    kl_div, gaussian_nll), of positions (cross_entropy, nll, linear_cross_entropy; with class weights their sum), or of
    samples (triplet, cosine, margin, ctc - which divides each by its length first - and kl_div with "batchmean").

    Args:
        loss_fn: A function of `torch.nn.functional`, a loss module, or a function of your own of the same form.
        input: The first argument of the loss; without a batch dimension where the loss takes that.
        target: The second argument of the loss.
        *more: Further arguments, such as the variance of `gaussian_nll_loss`.
        keep: What takes part: one answer for each sample, `(n,)`, or the shape of the unreduced loss. A loss of your
            own gets the elements kept as 1-D tensors in the second case.
        exclude: A value of the target (in margin_ranking and cosine_embedding the third argument), or several, that
            does not take part; NaN matches NaN. The `ignore_index` of cross_entropy and nll_loss counts as such.
        weights: How much each counts: one number for each sample, or the shape of the unreduced loss; 0 leaves out.
        empty: What to return when nothing is kept.
        **kw: Further arguments of the loss, such as `reduction` or `label_smoothing`. With `reduction="none"` the
            result has the shape of the unreduced loss, with 0 where something is left out.

    Returns:
        The loss; without `keep`, `exclude` and `weights` what `loss_fn` itself returns.

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
        why = "it is called with what is kept of input and target."
        fix = "losses.masked_loss(torch.nn.functional.cross_entropy, logits, labels, exclude=-100)"
        raise wrong_type(loss_fn, "loss_fn", _FUNCTION, why, fix)
    check_tensor(input, name="input", function=_FUNCTION)
    check_tensor(target, name="target", function=_FUNCTION)
    if "mask" in kw:
        _check_mask(loss_fn)
    if keep is None and exclude is None and weights is None and not _is(loss_fn, _WITH_CLASSES + _LINEAR):
        return loss_fn(input, target, *more, **kw)
    loss_fn, target, more, kw = _spelled_out(loss_fn, input, target, more, kw)
    data = (input, target, *more)
    reduction = kw.get("reduction", getattr(loss_fn, "reduction", "mean"))
    if _unbatched(loss_fn, input):
        batch = [_batch_of_one(loss_fn, argument, place) for place, argument in enumerate(data)]
        keep, weights = (
            one.reshape(1) if isinstance(one, torch.Tensor) and one.dim() == 0 else one for one in (keep, weights)
        )
        loss = masked_loss(loss_fn, *batch, keep=keep, exclude=exclude, weights=weights, empty=empty, **kw)
        return loss[0] if reduction == "none" else loss
    # Weights for single elements are about single elements, also beside one answer for each sample.
    by_element = isinstance(weights, torch.Tensor) and weights.dim() > 1
    picking = _picking_for(loss_fn, data, None if by_element else keep, exclude, reduction, kw)
    elements = torch.empty((), device=input.device).expand(picking.shape)
    each = None if weights is None else check_weights(weights, elements, function=_FUNCTION).expand(picking.shape)
    masks = [] if each is None else [each.detach() != 0]
    if keep is not None:
        masks.append(check_keep(over_elements(keep, elements, function=_FUNCTION), elements, function=_FUNCTION))
    labels = more[0] if more and _is(loss_fn, _TARGET_THIRD) else target
    left_out = [value for value in (exclude, picking.ignored) if value is not None]
    masks += [picking.over_loss(masked.valid(labels.detach(), exclude=value)) for value in left_out]
    if not masks:
        return loss_fn(*data, **kw)
    mask = reduce(and_, masks).expand(picking.shape)
    if isinstance(picking, _ByOutput):
        logits = picking.logits(mask, input)
        kw = {name: value for name, value in kw.items() if name != "options" and value is not None}
        return masked_loss(functional.cross_entropy, logits, target, keep=mask, weights=weights, empty=empty, **kw)
    amount = picking.amounts(target, kw)
    rows = mask.reshape(-1).nonzero().squeeze(1) if has_data(input, target, mask) else None
    if rows is None:
        # The shape of what is kept cannot be known: a harmless value stands in for what is left out.
        amount, each = torch.where(mask, amount, 0), None if each is None else torch.where(mask, each, 0)
        per_element = _unreduced(loss_fn, picking.stood_in(mask, *data), kw)
        per_element = torch.where(_beside(mask, per_element), per_element, 0)
    else:
        if each is None and reduction != "none" and len(rows):
            # Torch's own way is exact where no logit that is left out is NaN or infinite: the softmax of one position
            # knows nothing of another's.
            if isinstance(picking, _ByPosition) and picking.ignored is not None and picking.finite_outside(mask, input):
                return loss_fn(input, torch.where(mask, target, picking.ignored), *more, **kw)
            if len(rows) == mask.numel():
                return loss_fn(*data, **kw)
            return loss_fn(*picking.picked(rows, *data), **picking.picked_keywords(rows, kw))
        if len(rows) == 0 and not (reduction == "none" and type(picking) is _Picking):  # losses of another shape
            zero = input.reshape(-1)[:0].sum()
            return zero + zero.new_zeros(mask.shape) if reduction == "none" else zero + empty
        amount, each = amount.reshape(-1)[rows], None if each is None else each.reshape(-1)[rows]
        per_element = _unreduced(loss_fn, picking.picked(rows, *data), picking.picked_keywords(rows, kw))
    if each is not None:
        amount, per_element = amount * each, per_element * _beside(each, per_element)
    if reduction == "none":
        if rows is None:
            return per_element
        rest = per_element.shape[1:]
        whole = per_element.new_zeros(mask.numel(), *rest).index_put((rows,), per_element)
        return whole.reshape([*mask.shape, *rest])
    if reduction == "sum":
        return per_element.sum()
    # A sample may have several losses; "batchmean" counts samples all the same.
    amount = amount if reduction == "batchmean" else _beside(amount, per_element).expand(per_element.shape)
    return divided(picking.per_unit(per_element, rows, more).sum(), amount.sum(), empty)


def _beside(each: torch.Tensor, per_element: torch.Tensor) -> torch.Tensor:
    """Align what is there for each sample, or for each element, with losses that may have more dimensions."""
    return each.reshape([*each.shape, *[1] * (per_element.dim() - each.dim())])


def _unreduced(loss_fn: Loss, data: tuple[Any, ...], kw: dict[str, Any]) -> torch.Tensor:
    """Return the losses without their reduction, of a function or a module."""
    if not isinstance(loss_fn, nn.Module):
        return loss_fn(*data, **kw | {"reduction": "none"})
    loss_fn = copy.copy(loss_fn)
    loss_fn.reduction = "none"  # type: ignore[assignment]
    return loss_fn(*data, **kw)  # type: ignore[no-any-return]


# --- which losses there are, and how their arguments are named --------------------------------------------------------


def _losses(names: str) -> tuple[Any, ...]:
    """Find functions and modules of torch by name, as far as this version has them."""
    found = [getattr(nn if name[0].isupper() else functional, name, None) for name in names.split()]
    return tuple(loss for loss in found if loss is not None)


_LINEAR = _losses("linear_cross_entropy LinearCrossEntropyLoss")  # new in torch 2.13
_WITH_CLASSES = _losses("cross_entropy nll_loss CrossEntropyLoss NLLLoss")
_BY_SAMPLE = _losses(
    "triplet_margin_loss triplet_margin_with_distance_loss cosine_embedding_loss multi_margin_loss "
    "multilabel_margin_loss multilabel_soft_margin_loss TripletMarginLoss TripletMarginWithDistanceLoss "
    "CosineEmbeddingLoss MultiMarginLoss MultiLabelMarginLoss MultiLabelSoftMarginLoss"
)
_CTC = _losses("ctc_loss CTCLoss")
_BY_ELEMENT = _losses(
    "mse_loss l1_loss huber_loss smooth_l1_loss binary_cross_entropy binary_cross_entropy_with_logits soft_margin_loss "
    "poisson_nll_loss kl_div gaussian_nll_loss hinge_embedding_loss margin_ranking_loss MSELoss L1Loss HuberLoss "
    "SmoothL1Loss BCELoss BCEWithLogitsLoss SoftMarginLoss PoissonNLLLoss KLDivLoss GaussianNLLLoss HingeEmbeddingLoss "
    "MarginRankingLoss"
)
_TARGET_THIRD = _losses("margin_ranking_loss cosine_embedding_loss MarginRankingLoss CosineEmbeddingLoss")
_GAUSSIAN = _losses("gaussian_nll_loss GaussianNLLLoss")
_WITHOUT_LABEL = _losses("multilabel_margin_loss multilabel_soft_margin_loss MultiLabelMarginLoss")
# Arguments after the second that have one entry for each sample.
_DATA = ("negative", "target", "var", "input_lengths", "target_lengths")
_NAMES = {
    function: tuple(inspect.signature(function).parameters)[2:]
    for function in _WITH_CLASSES + _BY_SAMPLE + _CTC + _BY_ELEMENT + _LINEAR
    if not isinstance(function, type)
}
# Keywords that broadcast against the input, so that they are picked with it.
_LIKE_INPUT: dict[Any, tuple[str, ...]] = dict.fromkeys(
    _losses("binary_cross_entropy mse_loss l1_loss huber_loss multilabel_soft_margin_loss"), ("weight",)
)
_LIKE_INPUT[functional.binary_cross_entropy_with_logits] = ("weight", "pos_weight")
_FUNCTION_OF: dict[Any, Any] = {
    nn.BCELoss: functional.binary_cross_entropy,
    nn.BCEWithLogitsLoss: functional.binary_cross_entropy_with_logits,
    nn.MultiLabelSoftMarginLoss: functional.multilabel_soft_margin_loss,
}


def _is(loss_fn: Any, kinds: tuple[Any, ...]) -> bool:
    return any(loss_fn is kind or (isinstance(kind, type) and isinstance(loss_fn, kind)) for kind in kinds)


def _check_mask(loss_fn: Any) -> None:
    """Raise if `mask=` is meant for masked_loss, not for the loss."""
    accepted = inspect.signature(getattr(loss_fn, "forward", loss_fn)).parameters.values()
    if not any(parameter.name == "mask" or parameter.kind is parameter.VAR_KEYWORD for parameter in accepted):
        own = inspect.signature(masked_loss).parameters
        raise no_such_argument(_FUNCTION, "mask", [name for name in own if name not in ("more", "kw")])


def _spelled_out(
    loss_fn: Any, input: torch.Tensor, target: torch.Tensor, more: tuple[Any, ...], kw: dict[str, Any]
) -> tuple[Any, torch.Tensor, tuple[Any, ...], dict[str, Any]]:
    """Return a loss and its arguments in one form: data in `more`, settings and the weights of a module in `kw`."""
    if loss_fn in _NAMES:
        kw, more = dict(zip(_NAMES[loss_fn][: len(more)], more, strict=True)) | kw, ()
    more = (*more, *[kw[name] for name in _DATA if name in kw])
    kw = {name: value for name, value in kw.items() if name not in _DATA}
    if "size_average" in kw or "reduce" in kw:
        average, reduced = kw.pop("size_average", None), kw.pop("reduce", None)
        if average is not None or reduced is not None:
            kw["reduction"] = "none" if reduced is False else "sum" if average is False else "mean"
    if _is(loss_fn, _GAUSSIAN) and more and input.dim() and getattr(more[0], "shape", None) == input.shape[:-1]:
        more = (more[0].unsqueeze(-1), *more[1:])  # one variance for each sample
    if _is(loss_fn, _LINEAR):
        return _linear_spelled_out(loss_fn, target, more, kw)
    function = _FUNCTION_OF.get(type(loss_fn))
    if function is not None:
        names = ("reduction", *_LIKE_INPUT[function])
        loss_fn, kw = function, {name: getattr(loss_fn, name) for name in names} | kw
    return loss_fn, target, more, kw


class _LinearCrossEntropy:
    """`linear_cross_entropy` in the form of the other losses: called with input and target."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self.weight, self.bias = weight, bias
        self.outputs = weight.shape[1:-1]

    def __call__(self, input: torch.Tensor, target: torch.Tensor, **kw: Any) -> torch.Tensor:
        loss: torch.Tensor = _LINEAR[0](input, self.weight, target, linear_bias=self.bias, **kw)
        return loss


def _linear_spelled_out(
    loss_fn: Any, target: torch.Tensor, more: tuple[Any, ...], kw: dict[str, Any]
) -> tuple[Any, torch.Tensor, tuple[Any, ...], dict[str, Any]]:
    if isinstance(loss_fn, nn.Module):
        shape = (loss_fn.num_classes, *loss_fn.out_features)  # type: ignore[misc]
        linear: Any = loss_fn.linear
        bias = None if linear.bias is None else linear.bias.reshape(shape)
        names = ("weight", "reduction", "ignore_index", "label_smoothing", "options")
        kw = {name: getattr(loss_fn, name) for name in names} | kw
        weight = linear.weight.reshape(*shape, -1)
    else:
        weight, target, bias, more = target, more[0], kw.pop("linear_bias", None), ()
    if kw.get("ignore_index") is None:  # torch wants none beside probabilities
        kw |= {"ignore_index": None if target.is_floating_point() else -100}
    return _LinearCrossEntropy(weight, bias), target, more, kw


# --- samples without a batch ------------------------------------------------------------------------------------------


def _unbatched(loss_fn: Any, input: torch.Tensor) -> bool:
    if _is(loss_fn, _CTC):
        return input.dim() == 2
    return input.dim() < 2 and (_is(loss_fn, _WITH_CLASSES + _BY_SAMPLE) or isinstance(loss_fn, _LinearCrossEntropy))


def _batch_of_one(loss_fn: Any, argument: Any, place: int) -> Any:
    """Return an argument of an unbatched loss as that of a batch of one sample."""
    if not isinstance(argument, torch.Tensor):
        return argument
    if _is(loss_fn, _CTC):
        return argument.unsqueeze(1) if place == 0 else argument.reshape(1, -1) if place == 1 else argument.reshape(1)
    label = place == 1 and _is(loss_fn, (functional.multi_margin_loss, nn.MultiMarginLoss))
    label = label or (place > 0 and argument.dim() == 0 and not _is(loss_fn, _WITHOUT_LABEL))
    return argument.reshape(1) if label else argument.reshape(1, -1)


# --- how the arguments of a loss are taken apart ----------------------------------------------------------------------


class _Picking:
    """One whole sample after the other: the first dimension of every argument."""

    ignored: int | None = None

    def __init__(self, loss_fn: Any, input: torch.Tensor, dim: int = 0) -> None:
        self.loss_fn = loss_fn
        self.shape = torch.Size([input.shape[dim]])
        self.dims = input.dim()

    def over_loss(self, kept: torch.Tensor) -> torch.Tensor:
        """Turn a mask of the target's shape into one of the unreduced loss's: a sample needs all of it."""
        return kept if kept.dim() == 1 else kept.flatten(1).all(1)

    def picked(self, rows: torch.Tensor, *data: Any) -> tuple[Any, ...]:
        """Return the arguments of the loss for these rows."""
        return tuple(self._pick(rows, argument) for argument in data)

    def picked_keywords(self, rows: torch.Tensor, kw: dict[str, Any]) -> dict[str, Any]:
        """Return the keywords for these rows; a weight of fewer dimensions than the input is about columns."""
        names = [name for name in _LIKE_INPUT.get(self.loss_fn, ()) if getattr(kw.get(name), "ndim", 0) == self.dims]
        return kw | {name: self._pick(rows, kw[name]) for name in names}

    def amounts(self, target: torch.Tensor, kw: dict[str, Any]) -> torch.Tensor:
        """Return how much each entry of the unreduced loss adds to the denominator."""
        return torch.ones((), device=target.device).expand(self.shape)

    def per_unit(self, per_element: torch.Tensor, rows: Any, more: tuple[Any, ...]) -> torch.Tensor:
        """Return the losses of these rows as the loss's own mean takes them."""
        return per_element

    def stood_in(self, mask: torch.Tensor, *data: Any) -> tuple[Any, ...]:
        """Return the arguments with harmless values where something is left out."""
        if _is(self.loss_fn, _BY_SAMPLE + _CTC):
            raise ArgumentValueError(
                f"losses.masked_loss(): {_name(self.loss_fn)} takes whole samples, and their number would depend on "
                "data that cannot be read here (torch.compile, vmap, FakeTensorMode).",
                why="the shape of what is kept has to be known; call it outside of the compiled or mapped function.",
            )
        return tuple(
            torch.where(_beside(mask, one), one, 0.5 if one.is_floating_point() else 0) if self._by_row(one) else one
            for one in data
        )

    def _by_row(self, argument: Any) -> bool:
        return isinstance(argument, torch.Tensor) and argument.shape[:1] == self.shape

    def _pick(self, rows: torch.Tensor, argument: Any) -> Any:
        return argument.index_select(0, rows) if self._by_row(argument) else argument


class _ByTime(_Picking):
    """CTC: the samples are the second dimension of the input; targets may be one behind the other."""

    def picked(self, rows: torch.Tensor, *data: Any) -> tuple[Any, ...]:
        input, target, input_lengths, target_lengths, *others = data
        if target.dim() == 1:
            parts = target.split([int(length) for length in target_lengths])
            target = torch.cat([parts[row] for row in rows.tolist()])
        else:
            target = target.index_select(0, rows)
        lengths = [_chosen(given, rows) for given in (input_lengths, target_lengths)]
        return input.index_select(1, rows), target, *lengths, *others

    def per_unit(self, per_element: torch.Tensor, rows: Any, more: tuple[Any, ...]) -> torch.Tensor:
        lengths = torch.as_tensor(_chosen(more[1], rows), device=per_element.device)
        return per_element / lengths.clamp(min=1)


class _ByElement(_Picking):
    """One element after the other: the arguments broadcast to one shape."""

    def __init__(self, loss_fn: Any, *arguments: torch.Tensor) -> None:
        self.loss_fn = loss_fn
        self.shape = torch.broadcast_shapes(*[one.shape for one in arguments])  # type: ignore[no-untyped-call]

    def over_loss(self, kept: torch.Tensor) -> torch.Tensor:
        return kept.expand(self.shape)

    def picked_keywords(self, rows: torch.Tensor, kw: dict[str, Any]) -> dict[str, Any]:
        names = _LIKE_INPUT.get(self.loss_fn, ())
        return {name: self._pick(rows, value) if name in names else value for name, value in kw.items()}

    def amounts(self, target: torch.Tensor, kw: dict[str, Any]) -> torch.Tensor:
        # These two divide by the sum of their own weights, huber_loss and the rest by the number of elements.
        weight = kw.get("weight") if self.loss_fn in (functional.mse_loss, functional.l1_loss) else None
        return super().amounts(target, kw) if weight is None else weight.expand(self.shape)

    def stood_in(self, mask: torch.Tensor, *data: Any) -> tuple[Any, ...]:
        # One half is inside the range of every loss of this kind: a probability, a variance, a number.
        return tuple(torch.where(mask, one, 0.5) if isinstance(one, torch.Tensor) else one for one in data)

    def _pick(self, rows: torch.Tensor, argument: Any) -> Any:
        if not isinstance(argument, torch.Tensor):
            return argument
        return argument.expand(self.shape).reshape(-1).index_select(0, rows)


class _ByPosition(_Picking):
    """One position after the other, the classes behind it: the second dimension of the input."""

    def __init__(self, loss_fn: Any, input: torch.Tensor, target: torch.Tensor, ignored: int | None) -> None:
        self.loss_fn = loss_fn
        self.indices = not target.is_floating_point()
        self.ignored = ignored if self.indices else None
        self.shape = input.shape[:1] + input.shape[2:]

    def over_loss(self, kept: torch.Tensor) -> torch.Tensor:
        return kept if self.indices else kept.all(1)

    def amounts(self, target: torch.Tensor, kw: dict[str, Any]) -> torch.Tensor:
        linear = isinstance(self.loss_fn, _LinearCrossEntropy)  # whose own weight is another one
        weight = kw.get("weight", None if linear else getattr(self.loss_fn, "weight", None))
        if weight is None or not self.indices:
            return super().amounts(target, kw)
        inside = (target >= 0) & (target < len(weight))
        return torch.where(inside, weight[torch.where(inside, target, 0)], 0)

    def stood_in(self, mask: torch.Tensor, *data: Any) -> tuple[Any, ...]:
        return tuple(torch.where(mask.unsqueeze(1) if one.is_floating_point() else mask, one, 0) for one in data)

    def finite_outside(self, mask: torch.Tensor, input: torch.Tensor) -> bool:
        """Whether the scores of what is left out are finite for certain; where those lie apart, all are read."""
        scores = input.detach()
        if scores.dim() == 2:  # a bag is the sum of some rows, without a copy of them
            rows = mask.logical_not().nonzero().squeeze(1)
            scores = torch.embedding_bag(scores, rows, rows.new_zeros(1))[0]
        return math.isfinite(scores.sum().item())

    def _pick(self, rows: torch.Tensor, argument: Any) -> Any:
        if not argument.is_floating_point():  # classes, not scores of them
            argument = argument.reshape(-1)
        elif argument.dim() > 2:
            argument = argument.movedim(1, -1).reshape(-1, argument.shape[1])
        return argument.index_select(0, rows)


class _ByOutput(_ByPosition):
    """`linear_cross_entropy` with several outputs of one sample: positions of the logits, not of the input."""

    def __init__(self, loss_fn: _LinearCrossEntropy, input: torch.Tensor, target: torch.Tensor, ignored: Any) -> None:
        super().__init__(loss_fn, input, target, ignored)
        self.shape = torch.Size([len(input), *loss_fn.outputs])

    def logits(self, mask: torch.Tensor, input: torch.Tensor) -> torch.Tensor:
        weight, bias = self.loss_fn.weight, self.loss_fn.bias
        kept = torch.where(mask.flatten(1).any(1).unsqueeze(1), input, 0)  # a sample that is left out reaches no weight
        flat = functional.linear(kept, weight.flatten(0, -2), None if bias is None else bias.flatten())
        return flat.reshape(-1, *weight.shape[:-1])


def _picking_for(
    loss_fn: Any, data: tuple[Any, ...], keep: Any, exclude: Any, reduction: str, kw: dict[str, Any]
) -> _Picking:
    """Choose how a loss is taken apart."""
    input, target = data[:2]
    if _is(loss_fn, _CTC):
        return _ByTime(loss_fn, input, dim=1)
    if isinstance(loss_fn, _LinearCrossEntropy):
        by = _ByOutput if loss_fn.outputs else _ByPosition
        return by(loss_fn, input, target, kw["ignore_index"])
    if _is(loss_fn, _WITH_CLASSES):
        ignored = kw.get("ignore_index", getattr(loss_fn, "ignore_index", -100))
        return _ByPosition(loss_fn, input, target, ignored)
    samples = input.shape[:1]
    batchmean = reduction == "batchmean"
    if (
        _is(loss_fn, _BY_SAMPLE)
        or (exclude is None and input.dim() > 1 and getattr(keep, "shape", None) == samples)
        or (batchmean and input.dim() == 1)  # each element is a sample
    ):
        return _Picking(loss_fn, input)
    if batchmean:
        what = 'losses.masked_loss(): reduction="batchmean" with single elements left out.'
        why = "it divides by the number of samples, and a part of a sample has none."
        fix = 'reduction="mean"   # or keep of shape (n,), one answer for each sample'
        raise ArgumentValueError(what, why=why, fix=fix)
    if not _is(loss_fn, _BY_ELEMENT) and input.dim() > target.dim() > 0 and target.shape == samples:
        return _Picking(loss_fn, input)  # one label for each sample, also where the two happen to broadcast
    aligned = data[:3] if _is(loss_fn, _TARGET_THIRD) else data[:2]
    try:
        return _ByElement(loss_fn, *aligned)
    except RuntimeError:
        shapes = ", ".join(str(tuple(one.shape)) for one in aligned)
        what = f"losses.masked_loss(): the arguments of {_name(loss_fn)} have shapes {shapes}, which do not broadcast."
        why = "which elements of one belong to an element of the other is not known; whole samples can be left out."
        fix = "" if exclude is None else f"keep=(target != {exclude!r}).flatten(1).all(1)   # whole samples"
        raise ArgumentValueError(what, why=why, fix=fix) from None


def _chosen(lengths: Any, rows: torch.Tensor) -> Any:
    if isinstance(lengths, torch.Tensor):
        return lengths.index_select(0, rows.to(lengths.device))
    return type(lengths)(lengths[row] for row in rows.tolist())


def _name(loss_fn: Any) -> str:
    return getattr(loss_fn, "__name__", None) or describe(loss_fn)
