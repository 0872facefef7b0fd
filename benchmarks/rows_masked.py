"""Reductions with elements left out, against the plain ones and against what else can leave elements out.

Every candidate of a row sees the same data. With a mask, 70 % of the elements are kept, at random: the hardest kind for
kernels that branch. With `exclude=nan`, 10 % of the data are NaN. One thread.
"""

from __future__ import annotations

import importlib
import importlib.util
import math
import os
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy
import torch

from benchmarks import jax_peer
from benchmarks.harness import Candidate, Growth, Row
from gradgate import masked

OURS, PLAIN = "gradgate", "plain"
KEPT, MISSING = 0.7, 0.1

Shape = tuple[int, ...]
Dim = int | None

os.environ.setdefault("NUMBA_NUM_THREADS", "1")  # numbagg runs in parallel otherwise


def data(shape: Shape, *, missing: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """Give values and a random mask; with missing values the mask is where they are not NaN."""
    generator = torch.Generator().manual_seed(0)
    x, drawn = torch.randn(shape, generator=generator), torch.rand(shape, generator=generator)
    if not missing:
        return x, drawn < KEPT
    keep = drawn >= MISSING
    return torch.where(keep, x, math.nan), keep


# --- who can do what ------------------------------------------------------------------------------------------------


def _var_by_where(x: torch.Tensor, keep: torch.Tensor, dim: Dim) -> torch.Tensor:
    count = keep.sum(dim, keepdim=True)
    mean = torch.where(keep, x, 0).sum(dim, keepdim=True) / count
    return (torch.where(keep, x - mean, 0).square().sum(dim, keepdim=True) / (count - 1)).squeeze(dim)


BY_WHERE: dict[str, Callable[[torch.Tensor, torch.Tensor, Dim], torch.Tensor]] = {
    "sum": lambda x, keep, dim: torch.where(keep, x, 0).sum(dim),
    "mean": lambda x, keep, dim: torch.where(keep, x, 0).sum(dim) / keep.sum(dim),
    "prod": lambda x, keep, dim: torch.where(keep, x, 1).prod(dim),
    "amax": lambda x, keep, dim: torch.where(keep, x, -math.inf).amax(dim),
    "amin": lambda x, keep, dim: torch.where(keep, x, math.inf).amin(dim),
    "argmax": lambda x, keep, dim: torch.where(keep, x, -math.inf).argmax(dim),
    "argmin": lambda x, keep, dim: torch.where(keep, x, math.inf).argmin(dim),
    "var": _var_by_where,
    "std": lambda x, keep, dim: _var_by_where(x, keep, dim).sqrt(),
    "norm": lambda x, keep, dim: torch.linalg.vector_norm(torch.where(keep, x, 0), dim=dim),
    "logsumexp": lambda x, keep, dim: torch.where(keep, x, -math.inf).logsumexp(dim),
    "softmax": lambda x, keep, dim: torch.where(keep, x, -math.inf).softmax(dim),
    "log_softmax": lambda x, keep, dim: torch.where(keep, x, -math.inf).log_softmax(dim),
    "cumsum": lambda x, keep, dim: torch.where(keep, x, 0).cumsum(dim),
}
"""What one writes without a library; its gradient is wrong at NaN for some, which costs nothing."""

NAMES = ("sum", "mean", "prod", "amax", "amin", "argmax", "argmin", "var", "std", "median", "norm", "logsumexp",
         "softmax", "log_softmax", "normalize", "cumsum")  # fmt: skip
WITHOUT_GRADIENT = ("argmax", "argmin")
NAN_NAMES = {"amax": "nanmax", "amin": "nanmin"}  # numpy's, bottleneck's and numbagg's names


def ours(name: str, x: torch.Tensor, dim: Dim, **which: Any) -> Any:
    """Call our function of that name."""
    more = {"interpolation": "lower"} if name == "median" else {}
    return getattr(masked, name)(x, dim, **more, **which)


def plain(name: str, x: torch.Tensor, dim: Dim) -> Any:
    """Call torch's function that leaves nothing out."""
    if name == "norm":
        return torch.linalg.vector_norm(x, dim=dim)
    if name == "normalize":
        return torch.nn.functional.normalize(x, dim=dim)
    return getattr(torch, name)(x) if dim is None else getattr(torch, name)(x, dim)


def torch_masked(name: str, x: torch.Tensor, keep: torch.Tensor, dim: Dim) -> Any:
    """Call the function of `torch.masked`."""
    order = {"ord": 2.0} if name in ("norm", "normalize") else {}
    return getattr(torch.masked, name)(x, **order, dim=dim, mask=keep)


def with_mask(name: str, shape: Shape, dim: Dim) -> dict[str, Candidate]:
    """Line up everything that takes a mask."""
    x, keep = data(shape)
    found: dict[str, Candidate] = {
        PLAIN: lambda: plain(name, x, dim),
        OURS: lambda: ours(name, x, dim, keep=keep),
        "torch.masked": lambda: torch_masked(name, x, keep, dim),
    }
    if name in BY_WHERE:
        found["torch.where"] = lambda: BY_WHERE[name](x, keep, dim)
    array = numpy.ma.masked_array(x.numpy(), ~keep.numpy())
    if name in ("sum", "mean", "prod", "var", "std"):
        found["numpy.ma"] = lambda: getattr(array, name)(axis=dim)
    return found | jax_peer.compiled(name, x, keep, dim)


def with_nan(name: str, shape: Shape, dim: Dim) -> dict[str, Candidate]:
    """Line up everything that leaves out NaN, on data that have some."""
    x, _ = data(shape, missing=True)
    array, called = x.numpy(), NAN_NAMES.get(name, f"nan{name}")
    found: dict[str, Candidate] = {
        PLAIN: lambda: plain(name, x, dim),
        OURS: lambda: ours(name, x, dim, exclude=math.nan),
        "torch.masked": lambda: torch_masked(name, x, ~x.isnan(), dim),
    }
    if name in BY_WHERE:
        found["torch.where"] = lambda: BY_WHERE[name](x, ~x.isnan(), dim)
    if name in ("sum", "mean", "median"):
        found[f"torch.{called}"] = lambda: getattr(torch, called)(x) if dim is None else getattr(torch, called)(x, dim)
    for package in ("bottleneck", "numbagg"):
        if importlib.util.find_spec(package) is None or (package, name) == ("numbagg", "median"):
            continue  # numba takes a quarter of a minute to compile that one
        module = importlib.import_module(package)
        if hasattr(module, called):
            found[package] = _quiet(partial(getattr(module, called), array, axis=dim))
    return found | jax_peer.compiled_without_nan(name, x, dim)


def _quiet(call: Callable[[], Any]) -> Candidate:
    """Call what may warn of a slice without values."""

    def run() -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return call()

    return run


def with_label(name: str, shape: Shape, dim: Dim) -> dict[str, Candidate]:
    """Line up what leaves out the label 255 of small integers."""
    x = torch.randint(0, 21, shape, generator=torch.Generator().manual_seed(0)).to(torch.uint8)
    x[torch.rand(shape, generator=torch.Generator().manual_seed(1)) < MISSING] = 255
    by_hand = {
        "sum": lambda: torch.where(x != 255, x, 0).sum(dim),
        "amax": lambda: torch.where(x != 255, x, 0).amax(dim),
        "count": lambda: (x != 255).sum(dim),
    }
    return {
        PLAIN: lambda: torch.count_nonzero(x, dim) if name == "count" else plain(name, x, dim),
        OURS: lambda: ours(name, x, dim, exclude=255),
        "torch.where": by_hand[name],
    }


CASES = {"mask": with_mask, "nan": with_nan, "label": with_label}


def with_gradient(case: str, name: str, shape: Shape, dim: Dim) -> dict[str, Candidate]:
    """Line up functions with their gradients: those of torch, ours and that of torch.masked."""
    x, keep = data(shape, missing=case == "nan")
    x.requires_grad_()
    which = {"exclude": math.nan} if case == "nan" else {"keep": keep}

    def mask() -> torch.Tensor:
        return ~x.isnan() if case == "nan" else keep

    def step(fn: Callable[[], torch.Tensor]) -> Candidate:
        arriving = torch.ones_like(fn())
        return lambda: torch.autograd.grad(fn(), x, arriving)

    found = {
        PLAIN: step(lambda: _values(plain(name, x, dim))),
        OURS: step(lambda: _values(ours(name, x, dim, **which))),
        "torch.masked": step(lambda: torch_masked(name, x, mask(), dim)),
    }
    if name in BY_WHERE:
        found["torch.where"] = step(lambda: BY_WHERE[name](x, mask(), dim))
    if case == "nan" and name in ("sum", "mean"):
        found[f"torch.nan{name}"] = step(lambda: getattr(torch, f"nan{name}")(x, dim))
    return found | (jax_peer.compiled_gradient(x, keep, dim) if (case, name) == ("mask", "mean") else {})


def _values(result: Any) -> torch.Tensor:
    return result if isinstance(result, torch.Tensor) else result[0]  # torch.median also gives an index


# --- rows and goals -------------------------------------------------------------------------------------------------

GOALS = {
    "mask": {"sum": 1.6, "mean": 1.6, "amax": 2.0, "amin": 2.0, "var": 0.5, "std": 0.5, "softmax": 1.5,
             "logsumexp": 1.5, "log_softmax": 1.5},
    "nan": {"sum": 1.3, "mean": 1.3, "amax": 2.0, "amin": 2.0, "var": 0.5, "std": 0.5, "softmax": 1.5,
            "logsumexp": 1.5, "log_softmax": 1.5},
    "label": {},
}  # fmt: skip
"""Ratios to the plain operation, from 1e5 elements on."""

LEFT_OUT = {"mask": "mask given", "nan": "10 % NaN", "label": "255 of uint8"}
PEERS = ("torch.masked", "torch.where", "numpy.ma", "torch.nansum", "torch.nanmean", "torch.nanmedian", "bottleneck",
         "numbagg", jax_peer.JAX)  # fmt: skip


def _size(shape: Shape, dim: Dim) -> str:
    if dim is None:
        return f"{math.prod(shape):.0e} elements"
    return f"{'rows' if dim == -1 else 'columns'}, {' x '.join(map(str, shape))}"


def row(case: str, name: str, shape: Shape, dim: Dim = None, *, gradient: bool = False, **more: Any) -> Row:
    """Make a row; a size that has no goal is for information."""
    title = f"{name} of {_size(shape, dim)}, {LEFT_OUT[case]}{', with its gradient' if gradient else ''}"
    candidates = partial(with_gradient, case, name, shape, dim) if gradient else partial(CASES[case], name, shape, dim)
    goal = (1.2 if name == "mean" else None) if gradient else GOALS[case].get(name)
    small = math.prod(shape) < 10**5
    if shape == (1000,) and not gradient:
        more = {"microseconds": 15.0, **more}
    more = {"at_most": None if small else goal, "seconds": 1.0, **more}
    if dim is None and name == "mean":
        kind = "with its gradient, " if gradient else ""
        more["growth"] = Growth(f"masked.mean of all elements, {kind}{LEFT_OUT[case]}", "elements", math.prod(shape))
    return Row("masked", title, candidates, OURS, PLAIN, peers=_peers(case, name, gradient), **more)


def _peers(case: str, name: str, gradient: bool) -> tuple[str, ...]:
    """Tell which peers a row has, on small data of its kind."""
    found = with_gradient(case, name, (4, 4), -1) if gradient else CASES[case](name, (4, 4), -1)
    return tuple(peer for peer in PEERS if peer in found)


FLAT = [(10**3,), (10**4,), (10**5,), (10**6,), (10**7,)]

ROWS = [
    *[row(case, "mean", shape) for case in ("mask", "nan") for shape in FLAT],
    *[row(case, "sum", shape) for case in ("mask", "nan", "label") for shape in ((10**3,), (10**6,))],
    *[row(case, name, (3 * 10**7,), rounds=7) for case in ("mask", "nan") for name in ("sum", "mean")],
    *[row(case, name, (1000, 1000), -1) for case in ("mask", "nan") for name in NAMES],
    *[row(case, name, (1000, 1000), 0) for case in ("mask", "nan") for name in ("sum", "mean", "amax", "var")],
    *[row("nan", "mean", shape, -1) for shape in ((256, 1024), (10000, 1000))],
    *[row("label", name, (1000, 1000), -1) for name in ("sum", "amax", "count")],
    *[row("mask", name, (10, 100), -1, quick=False) for name in NAMES],
    *[row(case, "mean", shape, gradient=True) for case in ("mask", "nan") for shape in FLAT],
    *[
        row(case, name, (1000, 1000), -1, gradient=True)
        for case in ("mask", "nan")
        for name in NAMES
        if name not in WITHOUT_GRADIENT
    ],
    *[row("mask", name, (10, 100), -1, gradient=True, quick=False) for name in NAMES if name not in WITHOUT_GRADIENT],
]
