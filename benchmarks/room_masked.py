"""Reductions with elements left out, against the plain ones and against what else can leave elements out.

Masks are random, 70 % kept: the hardest kind for kernels that branch. One thread.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy
import torch

from benchmarks import jax_peer
from benchmarks.harness import Candidate, Growth, Row
from gradgate import masked

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # it says that it is a prototype
    from torch.masked import as_masked_tensor

OURS, PLAIN, TORCH_MASKED = "gradgate", "plain", "torch.masked"
LIMIT = "limit: sum in the fewest passes, NaN leaks"
KEPT = 0.7

Shape = tuple[int, ...]


def data(shape: Shape) -> tuple[torch.Tensor, torch.Tensor]:
    """Give values and a random mask."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(shape, generator=generator), torch.rand(shape, generator=generator) < KEPT


def quiet(call: Callable[[], Any]) -> Candidate:
    """MaskedTensor warns in every call."""

    def run() -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return call()

    return run


def fewest_passes(x: torch.Tensor, keep: torch.Tensor, dim: int | None) -> Candidate:
    """Do what torch cannot do a sum without, in pieces that stay in the cache, and no more.

    A mask has to become floats, because nothing in torch that multiplies or adds floats reads bytes without copying
    them first. Then one slice is a dot product; rows are multiplied and added, for want of a dot product for each row.
    There is no check, no count and no word to autograd, the memory is there already, and NaN times 0 is NaN.
    """
    size = 3 << 15
    weights = torch.empty(size)
    if dim is None:
        pieces = list(zip(x.split(size), keep.view(torch.uint8).split(size), strict=True))
        return lambda: [torch.dot(source, weights[: len(source)].copy_(part)) for source, part in pieces]
    rows = size // x.shape[1]
    pieces = list(zip(x.split(rows), keep.view(torch.uint8).split(rows), strict=True))
    return lambda: [
        weights[: source.numel()].view(source.shape).copy_(part).mul_(source).sum(1) for source, part in pieces
    ]


def mean_or_sum(name: str, shape: Shape, dim: int | None = None) -> dict[str, Candidate]:
    """Line up everything that can take a mean or a sum without some elements."""
    x, keep = data(shape)
    by_nan = torch.where(keep, x, math.nan)
    array = numpy.ma.masked_array(x.numpy(), ~keep.numpy())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tensor = as_masked_tensor(x, keep)
    theirs = getattr(torch.masked, name)
    return {
        PLAIN: lambda: getattr(x, name)(dim),
        OURS: lambda: getattr(masked, name)(x, dim, keep=keep),
        TORCH_MASKED: lambda: theirs(x, dim, mask=keep),
        "MaskedTensor": quiet(lambda: getattr(tensor, name)() if dim is None else getattr(tensor, name)(dim)),
        "numpy.ma": lambda: getattr(array, name)(axis=dim),
        "torch.nan" + name: lambda: getattr(torch, "nan" + name)(by_nan, dim),
        **({} if dim == 0 else {LIMIT: fewest_passes(x, keep, dim)}),
        **jax_peer.compiled(name, x, keep, dim),
    }


def along_rows(name: str, shape: Shape) -> dict[str, Candidate]:
    """Line up the plain function of rows, ours, that of torch.masked and that of JAX."""
    ours, theirs, plain = ALONG_ROWS[name]
    x, keep = data(shape)
    return {
        PLAIN: lambda: plain(x),
        OURS: lambda: ours(x, keep=keep),
        TORCH_MASKED: lambda: theirs(x, mask=keep),
        **({LIMIT: fewest_passes(x, keep, -1)} if name in ("sum", "mean") else {}),
        **jax_peer.compiled(name, x, keep, -1),
    }


def with_backward(shape: Shape, dim: int | None = None) -> dict[str, Candidate]:
    """Line up means with their gradients."""
    x, keep = data(shape)
    x.requires_grad_()

    def step(fn: Callable[[], torch.Tensor]) -> Candidate:
        return lambda: torch.autograd.grad(fn().sum(), x)

    return {
        PLAIN: step(lambda: x.mean(dim)),
        OURS: step(lambda: masked.mean(x, dim, keep=keep)),
        TORCH_MASKED: step(lambda: torch.masked.mean(x, dim, mask=keep)),
        **jax_peer.compiled_gradient(x, keep, dim),
    }


def rows_with_backward(name: str, shape: Shape) -> dict[str, Candidate]:
    """Line up a function of rows and its gradient: ours and that of torch.masked."""
    ours, theirs, _ = ALONG_ROWS[name]
    x, keep = data(shape)
    x.requires_grad_()

    def step(fn: Callable[[], torch.Tensor]) -> Candidate:
        arriving = torch.ones_like(fn())
        return lambda: torch.autograd.grad(fn(), x, arriving)

    return {OURS: step(lambda: ours(x, keep=keep)), TORCH_MASKED: step(lambda: theirs(x, mask=keep))}


# Each function along the last dimension: ours, torch.masked's, and the plain one.
ALONG_ROWS: dict[str, tuple[Callable[..., Any], Callable[..., Any], Callable[..., Any]]] = {
    "sum": (partial(masked.sum, dim=-1), partial(torch.masked.sum, dim=-1), partial(torch.sum, dim=-1)),
    "mean": (partial(masked.mean, dim=-1), partial(torch.masked.mean, dim=-1), partial(torch.mean, dim=-1)),
    "prod": (partial(masked.prod, dim=-1), partial(torch.masked.prod, dim=-1), partial(torch.prod, dim=-1)),
    "amax": (partial(masked.amax, dim=-1), partial(torch.masked.amax, dim=-1), partial(torch.amax, dim=-1)),
    "amin": (partial(masked.amin, dim=-1), partial(torch.masked.amin, dim=-1), partial(torch.amin, dim=-1)),
    "argmax": (partial(masked.argmax, dim=-1), partial(torch.masked.argmax, dim=-1), partial(torch.argmax, dim=-1)),
    "argmin": (partial(masked.argmin, dim=-1), partial(torch.masked.argmin, dim=-1), partial(torch.argmin, dim=-1)),
    "var": (partial(masked.var, dim=-1), partial(torch.masked.var, dim=-1), partial(torch.var, dim=-1)),
    "std": (partial(masked.std, dim=-1), partial(torch.masked.std, dim=-1), partial(torch.std, dim=-1)),
    "median": (
        partial(masked.median, dim=-1, interpolation="lower"),
        partial(torch.masked.median, dim=-1),
        partial(torch.median, dim=-1),
    ),
    "norm": (
        partial(masked.norm, dim=-1),
        partial(torch.masked.norm, ord=2.0, dim=-1),
        partial(torch.linalg.vector_norm, dim=-1),
    ),
    "logsumexp": (
        partial(masked.logsumexp, dim=-1),
        partial(torch.masked.logsumexp, dim=-1),
        partial(torch.logsumexp, dim=-1),
    ),
    "softmax": (
        partial(masked.softmax, dim=-1),
        partial(torch.masked.softmax, dim=-1),
        partial(torch.softmax, dim=-1),
    ),
    "log_softmax": (
        partial(masked.log_softmax, dim=-1),
        partial(torch.masked.log_softmax, dim=-1),
        partial(torch.log_softmax, dim=-1),
    ),
    "normalize": (
        partial(masked.normalize, dim=-1),
        partial(torch.masked.normalize, ord=2.0, dim=-1),
        partial(torch.nn.functional.normalize, dim=-1),
    ),
    "cumsum": (
        partial(masked.cumsum, dim=-1),
        partial(torch.masked.cumsum, dim=-1),
        partial(torch.cumsum, dim=-1),
    ),
}
ROW_GOALS = {"amax": 10.0, "amin": 10.0, "var": 0.3, "std": 0.3, "softmax": 2.5, "logsumexp": 2.5}
WITHOUT_GRADIENT = ("argmax", "argmin")
TIMES_FASTER = {"sum": 8.0, "mean": 8.0, "amax": 3.5, "var": 3.5}


def _against_plain(name: str, shape: Shape, at_most: float) -> Row:
    title, peers = f"{name} of rows, {' x '.join(str(n) for n in shape)}", (TORCH_MASKED, *jax_peer.peers(name))
    return Row("masked", title, partial(along_rows, name, shape), OURS, PLAIN, at_most, peers=peers)


def _against_torch_masked(name: str, shape: Shape, at_least: float) -> Row:
    title = f"{name} of rows against torch.masked, {' x '.join(str(n) for n in shape)}"
    peers = (TORCH_MASKED, *jax_peer.peers(name))
    candidates = partial(along_rows, name, shape)
    return Row("masked", title, candidates, OURS, TORCH_MASKED, at_least=at_least, peers=peers)


def _of_elements(name: str, n: int, *, base: str = PLAIN, **goal: Any) -> Row:
    """Make a row of all elements: against the plain function, or against torch.masked."""
    against = "" if base == PLAIN else f" against {base}"
    peers = (TORCH_MASKED, "MaskedTensor", "numpy.ma", f"torch.nan{name}", *jax_peer.peers(name))
    growth = Growth(f"masked.{name} of all elements", "elements", n) if base == PLAIN else None
    candidates = partial(mean_or_sum, name, (n,))
    return Row(
        "masked", f"{name} of {n:.0e} elements{against}", candidates, OURS, base, peers=peers, growth=growth, **goal
    )


def _mean_along(what: str, dim: int) -> Row:
    peers = (TORCH_MASKED, "MaskedTensor", "numpy.ma", "torch.nanmean", *jax_peer.peers("mean"))
    candidates = partial(mean_or_sum, "mean", (1000, 1000), dim)
    return Row("masked", f"mean of {what}, 1000 x 1000", candidates, OURS, PLAIN, 8.0, peers=peers)


def _with_backward(size: str, shape: Shape, at_most: float | None, dim: int | None = None) -> Row:
    growth = Growth("masked.mean, forward and backward", "elements", shape[0]) if dim is None else None
    title, candidates = f"mean, forward and backward, {size}", partial(with_backward, shape, dim)
    return Row(
        "masked", title, candidates, OURS, PLAIN, at_most, peers=(TORCH_MASKED, *jax_peer.peers("mean")), growth=growth
    )


def _gradient_of_rows(name: str, shape: Shape, at_least: float | None) -> Row:
    title = f"{name} of rows and its gradient against torch.masked, {' x '.join(str(n) for n in shape)}"
    candidates = partial(rows_with_backward, name, shape)
    return Row(
        "masked",
        title,
        candidates,
        OURS,
        TORCH_MASKED,
        at_least=at_least,
        peers=(TORCH_MASKED,),
        quick=False,
        seconds=1.0,
    )


ROWS = [
    *[_of_elements(name, n, at_most=8.0) for n in (10**5, 10**6) for name in ("mean", "sum")],
    *[_of_elements(name, 3 * 10**7, at_most=5.0, rounds=7) for name in ("mean", "sum")],
    *[_of_elements("mean", n) for n in (10**3, 10**4, 10**7)],
    _mean_along("rows", -1),
    _mean_along("columns", 0),
    _with_backward("1e+06", (10**6,), 2.2),
    _with_backward("1e+07", (10**7,), 1.2),
    _with_backward("1000 x 1000 rows", (1000, 1000), 2.2, dim=-1),
    *[_with_backward(f"{n:.0e}", (n,), None) for n in (10**3, 10**4, 10**5)],
    *[_against_plain(name, (1000, 1000), goal) for name, goal in ROW_GOALS.items()],
    *[_against_plain(name, (10000, 1000), ROW_GOALS[name]) for name in ("amax", "var", "softmax", "logsumexp")],
    *[_of_elements(name, n, base=TORCH_MASKED, at_least=8.0) for n in (10**6, 10**7) for name in ("mean", "sum")],
    *[_against_torch_masked(name, (1000, 1000), TIMES_FASTER.get(name, 1.0)) for name in ALONG_ROWS],
    *[_against_torch_masked(name, (10, 100), 1.0) for name in ALONG_ROWS],
    *[_gradient_of_rows(name, (1000, 1000), 1.0) for name in ALONG_ROWS if name not in WITHOUT_GRADIENT],
    *[_gradient_of_rows(name, (128, 256), 1.0) for name in ALONG_ROWS if name not in WITHOUT_GRADIENT],
    *[_gradient_of_rows(name, (10, 100), None) for name in ALONG_ROWS if name not in WITHOUT_GRADIENT],
]
