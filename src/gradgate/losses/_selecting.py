"""The middle of many numbers, fast: selection instead of sorting where numpy is at hand."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec

import torch

from gradgate import masked
from gradgate._torch_compat import has_data

__all__ = ["middle"]

_NUMPY = find_spec("numpy") is not None


def middle(x: torch.Tensor, dim: int | Sequence[int] | None, finite: torch.Tensor | None) -> torch.Tensor:
    """Give the median (of an even number the mean of the two in the middle) with the reduced dimensions kept.

    Args:
        x: Values of float32 or float64, detached.
        dim: The dimensions to reduce; None for all.
        finite: Which values count, None for all.

    Returns:
        The medians, of a shape that broadcasts to x.
    """
    if dim is not None or not _NUMPY or x.device.type != "cpu" or not has_data(x):
        return masked.median(x, dim, keepdim=True, keep=finite)
    # numpy's selection is vectorised: a fifth of the time of torch.median on ten million numbers.
    import numpy

    flat = (x if finite is None else x[finite]).reshape(-1).numpy()
    upper = len(flat) // 2
    if len(flat) == 0:
        value = numpy.nan
    else:
        parted = numpy.partition(flat, upper)
        value = parted[upper] if len(flat) % 2 else parted[:upper].max() / 2 + parted[upper] / 2
    return torch.full([1] * x.dim(), float(value), dtype=x.dtype, device=x.device)
