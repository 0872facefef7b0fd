"""What several values say together: histogram, cov, corrcoef."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from gradgate._checks import check_number, wrong_value
from gradgate._torch_private import has_data
from gradgate.masked._order import amax, amin
from gradgate.masked._slices import HALVES, Dim, Exclude, Keep, Slices, exact_sum, fill, slices_of


class HistogramResult(NamedTuple):
    """How many kept elements lie in each bin, and the edges of the bins."""

    hist: Tensor
    bin_edges: Tensor


def histogram(
    x: Tensor,
    bins: int | Tensor = 100,
    dim: Dim = None,
    *,
    range: Sequence[float] | None = None,
    density: bool = False,
    weights: Tensor | None = None,
    keep: Keep = None,
    exclude: Exclude = None,
) -> HistogramResult:
    """Count the kept elements in bins.

    Args:
        x: The values, of any real dtype.
        bins: How many bins of equal width, or their edges, increasing, as a 1-D tensor. A bin has its lower edge, the
            last one has both.
        dim: The dimension to count along, several of them, or None for all.
        range: The lowest and the highest edge; without it, the smallest and the largest of all elements kept. What is
            outside is not counted.
        density: Give the share of each bin divided by its width instead of its count.
        weights: The weight of each element, broadcastable to x; 0 leaves it out, even NaN.
        keep: A boolean mask, broadcastable to x; True takes part.
        exclude: A value, or several, that do not take part; NaN matches NaN.

    Returns:
        A named tuple (hist, bin_edges). The bins are the last dimension of hist, which is of integers without
        weights and density. With nothing kept the edges go from 0 to 1, and all bins are empty (NaN as a density).

    Raises:
        ArgumentTypeError: x or the weights are complex.
        ArgumentValueError: `bins` is no number and no 1-D tensor, or NaN or an infinity is kept and no range is given;
            where the values cannot be read (torch.compile, vmap), the edges are not finite instead.

    Gradient:
        To the weights that are counted, that of their bin; exactly 0 to the others, and none to x.

    Examples:
        >>> gg.masked.histogram(torch.tensor([0.0, 1.0, 1.5, 4.0, float("nan")]), 2, exclude=float("nan"))
        HistogramResult(hist=tensor([3, 1]), bin_edges=tensor([0., 2., 4.]))
    """
    slices = slices_of(x, dim, keep, exclude, function="masked.histogram")
    slices.refuse(complexes=True)
    amount = None
    if weights is not None:
        slices, amount = slices.weighed(weights)
    edges = bins.detach() if isinstance(bins, Tensor) else _edges(slices, bins, range)
    if edges.dim() != 1 or len(edges) < 2:
        raise wrong_value(bins, "bins", slices.function, "edges are a 1-D tensor of two or more.", "bins=100")
    one = slices.in_one_dim()
    values = one.x.detach().to(edges.dtype)
    inside = one.full_mask() & (values >= edges[0]) & (values <= edges[-1])
    last = len(edges) - 2
    place = (torch.searchsorted(edges, values.contiguous(), right=True) - 1).clamp(0, last)
    each = inside.long() if amount is None else replace(slices, x=amount.expand(x.shape), keep=None).in_one_dim().x
    hist = each.new_zeros([*place.shape[:-1], last + 1]).scatter_add(-1, place, torch.where(inside, each, 0))
    if density:
        hist = hist / hist.sum(-1, keepdim=True) / edges.diff().to(hist.dtype if amount is not None else edges.dtype)
    return HistogramResult(hist if amount is None or x.dtype not in HALVES else hist.to(x.dtype), edges)


def _edges(slices: Slices, bins: int, range: Sequence[float] | None) -> Tensor:
    check_number(bins, "bins", slices.function, "it says how many bins there are, or where they end.", "bins=100")
    if isinstance(bins, float) or bins < 1:
        raise wrong_value(bins, "bins", slices.function, "there has to be one bin at least.", "bins=100")
    x = slices.x.detach()
    if not x.is_floating_point():
        x = x.to(torch.get_default_dtype())
    elif x.dtype in HALVES:
        x = x.float()
    if range is not None:
        low, high = (torch.as_tensor(float(end), dtype=x.dtype, device=x.device) for end in range)
    else:
        low, high = amin(x, keep=slices.mask, empty=0.0), amax(x, keep=slices.mask, empty=1.0)
        if has_data(low, high) and not (torch.isfinite(low) & torch.isfinite(high)):
            why = "the smallest and the largest kept element are not finite."
            fix = "keep=torch.isfinite   # or a range"
            raise wrong_value([low.item(), high.item()], "range", slices.function, why, fix)
    flat = low == high  # as in numpy, one value lies in the middle
    low, high = torch.where(flat, low - 0.5, low), torch.where(flat, high + 0.5, high)
    return torch.lerp(low, high, torch.linspace(0, 1, bins + 1, dtype=x.dtype, device=x.device))


def cov(x: Tensor, *, correction: float = 1, keep: Keep = None, exclude: Exclude = None) -> Tensor:
    """Return the covariances of variables, each from the observations in which both of the two are kept.

    Args:
        x: The values, floating or complex: variables x observations, as in torch.cov, after any batch dimensions; or
            the observations of one variable.
        correction: What is taken from the number of observations before dividing by it.
        keep: A boolean mask, broadcastable to x; True takes part.
        exclude: A value, or several, that do not take part; NaN matches NaN.

    Returns:
        A matrix of variables x variables: at (i, j) that of torch.cov for the two, without the observations in which
        one of them is left out; NaN for no more observations than `correction`. As each pair has observations of its
        own, the matrix need not be positive semi-definite; `keep=mask.all(0)` takes complete observations alone.

    Raises:
        ArgumentTypeError: x is of integers.

    Gradient:
        That of torch.cov of the observations of each pair; exactly 0 to what is left out, and from a pair that is NaN.

    Examples:
        >>> nan = float("nan")
        >>> gg.masked.cov(torch.tensor([[1.0, 2.0, 3.0, nan], [2.0, 4.0, 6.0, 9.0]]), exclude=nan).diag()
        tensor([1.0000, 8.9167])
    """
    check_number(correction, "correction", "masked.cov", "it is taken from the number of observations.", "correction=1")
    pairs = _Pairs.of(slices_of(x, -1, keep, exclude, function="masked.cov"))
    freedom = pairs.number - correction
    return pairs.where(freedom > 0, pairs.products / torch.where(freedom > 0, freedom, 1), x)


def corrcoef(x: Tensor, *, keep: Keep = None, exclude: Exclude = None) -> Tensor:
    """Return the correlations of variables, each from the observations in which both of the two are kept.

    Args:
        x: The values, floating or complex: variables x observations, as in torch.corrcoef, after any batch dimensions.
        keep: A boolean mask, broadcastable to x; True takes part.
        exclude: A value, or several, that do not take part; NaN matches NaN.

    Returns:
        A matrix of variables x variables: at (i, j) that of torch.corrcoef for the two, without the observations in
        which one of them is left out; NaN where one of the two does not vary.

    Raises:
        ArgumentTypeError: x is of integers.

    Gradient:
        That of torch.corrcoef of the observations of each pair; exactly 0 to what is left out, and from a pair that is
        NaN.

    Examples:
        >>> x = torch.tensor([[1.0, 2.0, 3.0, 0.0], [2.0, 4.0, 6.0, 9.0]])
        >>> gg.masked.corrcoef(x, exclude=0)
        tensor([[1., 1.],
                [1., 1.]])
    """
    pairs = _Pairs.of(slices_of(x, -1, keep, exclude, function="masked.corrcoef"))
    spread = (pairs.x * pairs.x.conj()).real @ pairs.mask.mT - (pairs.sums * pairs.sums.conj()).real / pairs.some
    varies = (spread > 0) & (spread > 0).mT
    root = torch.where(varies, spread, 1).sqrt()
    found = pairs.products / root / root.mT
    return pairs.where(varies, found if found.is_complex() else found.clamp(-1, 1), x)


class _Pairs(NamedTuple):
    """Sums over the observations that two variables have in common; x is centered, with 0 for what is left out."""

    x: Tensor
    mask: Tensor  # of numbers, 1 for a kept element
    number: Tensor
    some: Tensor  # the number, 1 at least
    sums: Tensor  # at (i, j) the sum of variable i
    products: Tensor  # of the distances to the two means
    exact: Tensor  # False where NaN or an infinity is among them

    @classmethod
    def of(cls, slices: Slices) -> _Pairs:
        slices.refuse(integers=True)
        x, kept = slices.x, slices.full_mask()
        x, kept = (x.reshape(1, -1), kept.reshape(1, -1)) if x.dim() < 2 else (x, kept)
        x = x.float() if x.dtype in HALVES else x
        # NaN of one variable must not touch a pair that leaves that observation out, so it is not in the products.
        finite = kept & torch.isfinite(x.detach())
        mask, every = finite.to(x.real.dtype), kept.to(x.real.dtype)
        # Nothing here depends on where the center is, but rounding; so nothing comes back from it.
        center = exact_sum(fill(x.detach(), finite, 0), (x.dim() - 1,)) / mask.sum(-1, keepdim=True).clamp(min=1)
        x = fill(fill(x, finite, 0) - center.to(x.dtype), finite, 0)
        number = mask @ mask.mT
        some = number.clamp(min=1)
        sums = x @ mask.mT.to(x.dtype)
        products = x @ x.mH - sums * sums.mH / some
        return cls(x, mask, number, some, sums, products, every @ every.mT == number)

    def where(self, defined: Tensor, result: Tensor, x: Tensor) -> Tensor:
        """Return a result where it is defined and NaN elsewhere, in the dtype of x, 0-dim for one variable."""
        result = torch.where(defined & self.exact, result, torch.nan).to(x.dtype)
        return result.reshape(()) if x.dim() < 2 else result
