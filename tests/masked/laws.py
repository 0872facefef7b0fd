"""The functions of the room beside their oracles: a Python loop over slices, what is left out removed."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from gradgate import masked


@dataclass(frozen=True)
class Law:
    """One function and what it must equal.

    Args:
        name: The public name, with what is special about this row.
        fn: The function, called as fn(x, dim, keep=..., exclude=...).
        of_kept: The plain function of a 1-D tensor that holds nothing but the kept elements.
        empty: What a slice with nothing kept gives.
        plain: The plain torch function of (x, dim) for one dim, where there is one.
        along: Whether the result has the shape of x; then of_kept gives one value for each kept element.
        left_out: What stands in the place of a left-out element, for those.
        least: How many kept elements it takes until the gradient is that of of_kept; 0 below.
        ints: Whether integers and bools are taken.
        complexes: Whether complex numbers are taken.
        smooth: Whether gradients exist.
    """

    name: str
    fn: Callable[..., torch.Tensor]
    of_kept: Callable[[torch.Tensor], torch.Tensor]
    empty: float = math.nan
    plain: Callable[..., torch.Tensor] | None = None
    along: bool = False
    left_out: float = 0.0
    least: int = 1
    ints: bool = False
    complexes: bool = False
    smooth: bool = True

    @property
    def public(self) -> str:
        return self.name.split()[0]

    @property
    def cumulative(self) -> bool:
        return self.public.startswith("cum")

    def oracle(self, x: torch.Tensor, keep: torch.Tensor, dim: Any = None, keepdim: bool = False) -> torch.Tensor:
        """Give the result by a loop over slices."""
        if dim is None:
            dims = list(range(x.dim()))
        else:
            dims = sorted(d % max(x.dim(), 1) for d in ([dim] if isinstance(dim, int) else dim)) if x.dim() else []
        outer = [d for d in range(x.dim()) if d not in dims]
        sizes = [x.shape[d] for d in dims]
        order = outer + dims
        rows = x.permute(order).reshape(*[x.shape[d] for d in outer], math.prod(sizes))
        masks = keep.expand(x.shape).permute(order).reshape(rows.shape)
        flat_rows = rows.reshape(math.prod(rows.shape[:-1]), rows.shape[-1])
        results = [self._row(r, m) for r, m in zip(flat_rows, masks.reshape(flat_rows.shape), strict=True)]
        if self.along:
            full = torch.stack(results) if results else flat_rows.clone()
            back = [order.index(d) for d in range(x.dim())]
            return full.reshape([x.shape[d] for d in order]).permute(back)
        shape = [x.shape[d] for d in outer]
        result = (
            torch.stack(results).reshape(shape)
            if results
            else self._row(x.new_ones(1), torch.ones(1).bool()).new_zeros(shape)
        )
        if keepdim:
            result = result.reshape([1 if d in dims else x.shape[d] for d in range(x.dim())])
        return result

    def _row(self, row: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        kept = row[mask]
        if self.public in ("argmax", "argmin"):
            return mask.nonzero()[self.of_kept(kept), 0] if len(kept) else torch.tensor(-1)
        if self.cumulative:
            nothing = torch.full_like(self.of_kept(row.new_ones(1))[0], self.empty)
            numbers = mask.cumsum(0)
            return torch.stack([self.of_kept(kept[:n])[-1] if n else nothing for n in numbers]) if len(row) else row
        if kept.numel() < self.least:
            # Nothing to learn from: a constant. What torch makes of so few is its value, not its gradient.
            value = self.empty if kept.numel() == 0 else math.nan
            like = self.of_kept(row.new_ones(max(self.least, 1))) if not self.along else row
            return torch.full_like(row, value) if self.along else torch.full_like(like, value)
        result = self.of_kept(kept)
        if not self.along:
            return result
        return torch.full_like(row, self.left_out).masked_scatter(mask, result)


def numpy_median(kept):
    ordered = kept.sort().values
    n = len(ordered)
    return (ordered[(n - 1) // 2] + ordered[n // 2]) / 2


def _prod(x, dim):
    return x.prod() if dim is None else x.prod(dim)


def _norm(p):
    return partial(torch.linalg.vector_norm, ord=p)


def _plain_norm(p):
    return lambda x, dim: torch.linalg.vector_norm(x, p, dim)


def _whole(fn):
    """A plain function along one dim, for dim None along all."""
    return lambda x, dim: fn(x.flatten(), -1).reshape(x.shape) if dim is None else fn(x, dim)


def _norm_law(p):
    """The norm; torch's own of order 0 warns when a complex number is differentiated."""
    fn = partial(masked.norm, ord=p)
    return Law(f"norm {p}", fn, _norm(p), empty=0, plain=_plain_norm(p), complexes=p != 0)


def _var_law(name, correction):
    fn = getattr(masked, name)
    plain = getattr(torch, name)
    return Law(
        f"{name} {correction}",
        partial(fn, correction=correction),
        partial(plain, correction=correction),
        plain=partial(plain, correction=correction),
        least=correction + 1,
        complexes=True,
    )


def _quantile_law(q, interpolation):
    return Law(
        f"quantile {q} {interpolation}",
        lambda x, dim=None, **kw: masked.quantile(x, q, dim, interpolation=interpolation, **kw),
        lambda kept: torch.quantile(kept, q, interpolation=interpolation),
        plain=lambda x, dim: torch.quantile(x, q, dim, interpolation=interpolation),
    )


def _cumulative_law(name):
    fn, plain = getattr(masked, name), getattr(torch, name)
    return Law(
        name,
        lambda x, dim=None, **kw: fn(x, dim, **kw).values,
        lambda kept: plain(kept, 0).values,
        plain=_whole(lambda x, dim: plain(x, dim).values),
        along=True,
    )


LAWS = [
    Law("sum", masked.sum, torch.sum, empty=0, plain=torch.sum, ints=True, complexes=True),
    Law("prod", masked.prod, torch.prod, empty=1, plain=_prod, ints=True, complexes=True),
    Law("mean", masked.mean, torch.mean, plain=torch.mean, complexes=True),
    _var_law("var", 1),
    _var_law("var", 0),
    _var_law("std", 1),
    _var_law("std", 0),
    Law("amax", masked.amax, torch.amax, plain=lambda x, dim: x.amax(() if dim is None else dim), ints=True),
    Law("amin", masked.amin, torch.amin, plain=lambda x, dim: x.amin(() if dim is None else dim), ints=True),
    Law("argmax", partial(masked.argmax, empty=-1), torch.argmax, -1, plain=torch.argmax, ints=True, smooth=False),
    Law("argmin", partial(masked.argmin, empty=-1), torch.argmin, -1, plain=torch.argmin, ints=True, smooth=False),
    Law("median", masked.median, numpy_median),
    Law(
        "median lower",
        partial(masked.median, interpolation="lower"),
        torch.median,
        plain=lambda x, dim: x.median() if dim is None else x.median(dim).values,
        ints=True,
    ),
    _quantile_law(0.3, "linear"),
    _quantile_law(0.3, "lower"),
    _quantile_law(0.7, "higher"),
    _quantile_law(0.7, "midpoint"),
    _quantile_law(0.4, "nearest"),
    _norm_law(2),
    _norm_law(1),
    _norm_law(0),
    _norm_law(3.5),
    _norm_law(0.5),
    _norm_law(math.inf),
    _norm_law(-math.inf),
    _norm_law(-2),
    Law(
        "logsumexp",
        masked.logsumexp,
        lambda kept: torch.logsumexp(kept, 0),
        empty=-math.inf,
        plain=lambda x, dim: torch.logsumexp(x, tuple(range(x.dim())) if dim is None else dim),
    ),
    Law("softmax", masked.softmax, lambda k: k.softmax(0), empty=0, plain=_whole(torch.softmax), along=True),
    Law(
        "log_softmax",
        masked.log_softmax,
        lambda kept: kept.log_softmax(0),
        empty=-math.inf,
        left_out=-math.inf,
        plain=_whole(torch.log_softmax),
        along=True,
    ),
    Law(
        "normalize",
        masked.normalize,
        lambda kept: F.normalize(kept, dim=0),
        empty=0,
        plain=_whole(lambda x, dim: F.normalize(x, dim=dim)),
        along=True,
        complexes=True,
    ),
    Law(
        "cumsum",
        masked.cumsum,
        lambda kept: kept.cumsum(0),
        empty=0,
        plain=_whole(torch.cumsum),
        along=True,
        ints=True,
        complexes=True,
    ),
    Law(
        "cumprod",
        masked.cumprod,
        lambda kept: kept.cumprod(0),
        empty=1,
        plain=_whole(torch.cumprod),
        along=True,
        ints=True,
        complexes=True,
    ),
    _cumulative_law("cummax"),
    _cumulative_law("cummin"),
    Law("count", masked.count, lambda kept: torch.tensor(kept.numel()), empty=0, ints=True, smooth=False),
]
BY_NAME = {law.name: law for law in LAWS}
SMOOTH = [law for law in LAWS if law.smooth]
