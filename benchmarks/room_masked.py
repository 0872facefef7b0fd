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

from benchmarks.harness import Candidate, Row
from gradgate import masked

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # it says that it is a prototype
    from torch.masked import as_masked_tensor

OURS, PLAIN, TORCH_MASKED = "gradgate", "plain", "torch.masked"
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
    }


def two_peers(plain: Callable[..., Any], ours: Callable[..., Any], theirs: Callable[..., Any], shape: Shape):
    """Line up the plain function, ours, and that of torch.masked."""
    x, keep = data(shape)
    return {
        PLAIN: lambda: plain(x),
        OURS: lambda: ours(x, keep=keep),
        TORCH_MASKED: lambda: theirs(x, mask=keep),
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
    }


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
TIMES_FASTER = {"sum": 8.0, "mean": 8.0, "amax": 3.5, "var": 3.5}


def _against_plain(name: str, shape: Shape, at_most: float) -> Row:
    ours, theirs, plain = ALONG_ROWS[name]
    size = " x ".join(str(n) for n in shape)
    return Row(
        "masked", f"{name} of rows, {size}", partial(two_peers, plain, ours, theirs, shape), OURS, PLAIN, at_most
    )


def _against_torch_masked(name: str, shape: Shape, at_least: float) -> Row:
    ours, theirs, plain = ALONG_ROWS[name]
    size = " x ".join(str(n) for n in shape)
    return Row(
        "masked",
        f"{name} of rows against torch.masked, {size}",
        partial(two_peers, plain, ours, theirs, shape),
        OURS,
        TORCH_MASKED,
        at_least=at_least,
    )


ROWS = [
    *[
        Row("masked", f"{name} of {n:.0e} elements", partial(mean_or_sum, name, (n,)), OURS, PLAIN, 8.0)
        for n in (10**5, 10**6)
        for name in ("mean", "sum")
    ],
    *[
        Row("masked", f"{name} of 3e+07 elements", partial(mean_or_sum, name, (3 * 10**7,)), OURS, PLAIN, 5.0, rounds=7)
        for name in ("mean", "sum")
    ],
    Row("masked", "mean of rows, 1000 x 1000", partial(mean_or_sum, "mean", (1000, 1000), -1), OURS, PLAIN, 8.0),
    Row("masked", "mean of columns, 1000 x 1000", partial(mean_or_sum, "mean", (1000, 1000), 0), OURS, PLAIN, 8.0),
    Row("masked", "mean, forward and backward, 1e+06", partial(with_backward, (10**6,)), OURS, PLAIN, 2.2),
    Row("masked", "mean, forward and backward, 1e+07", partial(with_backward, (10**7,)), OURS, PLAIN, 1.2),
    Row(
        "masked",
        "mean, forward and backward, 1000 x 1000 rows",
        partial(with_backward, (1000, 1000), -1),
        OURS,
        PLAIN,
        2.2,
    ),
    *[_against_plain(name, (1000, 1000), goal) for name, goal in ROW_GOALS.items()],
    *[_against_plain(name, (10000, 1000), ROW_GOALS[name]) for name in ("amax", "var", "softmax", "logsumexp")],
    *[
        Row(
            "masked",
            f"{name} of {n:.0e} elements against torch.masked",
            partial(two_peers, getattr(torch, name), getattr(masked, name), getattr(torch.masked, name), (n,)),
            OURS,
            TORCH_MASKED,
            at_least=8.0,
        )
        for n in (10**6, 10**7)
        for name in ("mean", "sum")
    ],
    *[_against_torch_masked(name, (1000, 1000), TIMES_FASTER.get(name, 1.0)) for name in ALONG_ROWS],
    *[_against_torch_masked(name, (10, 100), 1.0) for name in ALONG_ROWS],
]
