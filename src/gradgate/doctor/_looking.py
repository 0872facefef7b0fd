"""A look at values: is anything not finite, is all of it zero, and what stood at the first bad element."""

from __future__ import annotations

import math
from typing import Any, Literal

import torch

from gradgate._names import describe

_MOST_ROWS = 10_000
_PLAIN = (torch.Tensor, torch.nn.Parameter)


def total(tensor: torch.Tensor) -> float | complex:
    """Add up a tensor: NaN and infinities show in the sum, at a fraction of the cost of looking for them."""
    result: float | complex = tensor.sum().item()
    return result


def norm_of(tensor: torch.Tensor) -> float:
    """Give the 2-norm of a tensor."""
    tensor = tensor.detach()
    norm: float = torch.linalg.vector_norm(tensor, dtype=torch.float32 if tensor.element_size() < 4 else None).item()
    if math.isinf(norm) or norm == 0:  # the squares may have left the range where the elements have not
        wide = torch.complex128 if tensor.is_complex() else torch.float64
        norm = torch.linalg.vector_norm(tensor.to(wide)).item()
    return norm


def is_readable(tensor: torch.Tensor) -> bool:
    """Tell whether there are floating-point values to look at."""
    return (
        (tensor.is_floating_point() or tensor.is_complex())
        and type(tensor) in _PLAIN
        and tensor.layout is torch.strided
        and not tensor.is_meta
        and tensor.numel() > 0
    )


def is_suspicious(tensor: torch.Tensor) -> bool:
    """Tell whether a tensor may hold a NaN or an infinity."""
    if not is_readable(tensor):
        return False
    amount = total(tensor)
    return amount - amount != 0


def bad_kind(tensor: torch.Tensor) -> Literal["nan", "inf"] | None:
    """Tell what is wrong with the values of a tensor."""
    if not is_readable(tensor):
        return None
    if tensor.is_complex():
        return bad_kind(torch.view_as_real(tensor.resolve_conj()))
    # The extremes carry NaN and infinities on, and are found many times faster than a mask of them is made.
    lowest, highest = torch.aminmax(tensor)
    if math.isnan(lowest.item()):
        return "nan"
    return "inf" if math.isinf(lowest.item()) or math.isinf(highest.item()) else None


def bad_rows(tensor: torch.Tensor) -> tuple[int, ...]:
    """Give the places along the first dimension that hold a NaN or an infinity."""
    if tensor.dim() == 0:
        return ()
    bad = (~torch.isfinite(tensor)).reshape(tensor.shape[0], -1).any(dim=1)
    return tuple(bad.nonzero()[:_MOST_ROWS, 0].tolist())


def is_all_zero(tensor: torch.Tensor) -> bool:
    """Tell whether every element is zero."""
    return not bool(tensor.any())


def has_infinite_argument(args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> bool:
    """Tell whether the user handed over a number that is not finite, as masks do."""
    values = (*args, *kwargs.values()) if kwargs else args
    return any(isinstance(value, float) and not math.isfinite(value) for value in values)


def inputs_at(output: torch.Tensor, inputs: list[torch.Tensor]) -> str:
    """Say what the inputs held at the first bad element of the output."""
    index = (~torch.isfinite(output)).nonzero()
    where = tuple(index[0].tolist()) if len(index) else ()
    parts = []
    for tensor in inputs:
        if tensor.dtype is torch.bool or not tensor.numel():
            continue
        parts.append(_value_at(tensor, output, where))
    place = f" at {list(where)}" if where else ""
    return f"it read {' and '.join(parts)}{place}" if parts else ""


def _value_at(tensor: torch.Tensor, output: torch.Tensor, where: tuple[int, ...]) -> str:
    if tensor.dim() == 0 or tensor.shape == output.shape:
        return f"{tensor[where if tensor.dim() else ()].item():.6g}"
    try:
        return f"{tensor.expand(output.shape)[where].item():.6g}"
    except RuntimeError:
        if tensor.is_complex():
            return describe(tensor)
        return f"{describe(tensor)} with values from {tensor.min().item():.6g} to {tensor.max().item():.6g}"
