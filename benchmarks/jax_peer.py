"""JAX as a peer: compiled reductions with a mask, on one thread; where JAX is not installed, there are none.

XLA reads how many threads it may use when it starts, so this is imported before anything else that imports JAX.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.harness import Candidate

ONE_THREAD = {
    "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1",
    "NPROC": "1",  # the size of XLA's own pool
    "JAX_PLATFORMS": "cpu",
}

JAX = "JAX jit"
INSTALLED = importlib.util.find_spec("jax") is not None
NAMES = ("mean", "sum", "prod", "amax", "amin", "var", "std", "logsumexp", "softmax", "log_softmax")
"""The functions that JAX has with a mask."""

os.environ.update(ONE_THREAD)


def compiled(name: str, x: torch.Tensor, keep: torch.Tensor, dim: int | None = None) -> dict[str, Candidate]:
    """Compile a reduction with a mask.

    Args:
        name: A function of `reductions`.
        x: The values.
        keep: Which of them take part.
        dim: The dimension, or None for all.

    Returns:
        The candidate under its name; nothing where JAX is not installed or has no such function.
    """
    if not INSTALLED or name not in NAMES:
        return {}
    return _candidate(lambda values, mask: reductions()[name](values, mask, dim), x, keep)


def compiled_gradient(x: torch.Tensor, keep: torch.Tensor, dim: int | None = None) -> dict[str, Candidate]:
    """Compile the mean with a mask together with its gradient.

    Args:
        x: The values.
        keep: Which of them take part.
        dim: The dimension, or None for all.

    Returns:
        The candidate under its name; nothing where JAX is not installed.
    """
    if not INSTALLED:
        return {}
    import jax

    return _candidate(jax.value_and_grad(lambda x, keep: reductions()["mean"](x, keep, dim).sum()), x, keep)


def compiled_without_nan(name: str, x: torch.Tensor, dim: int | None = None) -> dict[str, Candidate]:
    """Compile a reduction that leaves out NaN.

    Args:
        name: A function of `reductions`.
        x: The values.
        dim: The dimension, or None for all.

    Returns:
        The candidate under its name; nothing where JAX is not installed or has no such function.
    """
    if not INSTALLED or name not in NAMES:
        return {}
    import jax

    return _candidate(lambda values: reductions()[name](values, ~jax.numpy.isnan(values), dim), x)


def _candidate(function: Callable[..., Any], *tensors: torch.Tensor) -> dict[str, Candidate]:
    import jax

    compiled = jax.jit(function)
    arrays = [jax.numpy.asarray(tensor.detach().numpy()) for tensor in tensors]
    return {JAX: lambda: jax.block_until_ready(compiled(*arrays))}


def reductions() -> dict[str, Callable[..., Any]]:
    """Give what JAX can do with a mask: a function of values, mask and dimension for each name."""
    import jax
    from jax import numpy

    lowest, highest = -numpy.inf, numpy.inf
    return {
        "mean": lambda x, keep, dim: numpy.mean(x, axis=dim, where=keep),
        "sum": lambda x, keep, dim: numpy.sum(x, axis=dim, where=keep),
        "prod": lambda x, keep, dim: numpy.prod(x, axis=dim, where=keep),
        "amax": lambda x, keep, dim: numpy.max(x, axis=dim, where=keep, initial=lowest),
        "amin": lambda x, keep, dim: numpy.min(x, axis=dim, where=keep, initial=highest),
        "var": lambda x, keep, dim: numpy.var(x, axis=dim, where=keep, ddof=1),
        "std": lambda x, keep, dim: numpy.std(x, axis=dim, where=keep, ddof=1),
        "logsumexp": lambda x, keep, dim: jax.nn.logsumexp(x, axis=dim, where=keep),
        "softmax": lambda x, keep, dim: jax.nn.softmax(x, axis=dim, where=keep),
        "log_softmax": lambda x, keep, dim: jax.nn.log_softmax(x, axis=dim, where=keep),
    }
