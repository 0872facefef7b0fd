"""The contents of tensors: non-finite values, zeros, norms, and the gradients of a step."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import torch

from gradgate._names import describe
from gradgate._torch_private import local_part, undispatched, write_count

# --- one tensor -------------------------------------------------------------------------------------------------------

_MOST_ROWS = 10_000
_PLAIN = (torch.Tensor, torch.nn.Parameter)
Kind = Literal["nan", "inf"]


def total(tensor: torch.Tensor) -> float | complex:
    """Add up a tensor: NaN and infinities show in the sum, at a fraction of the cost of searching for them."""
    result: float | complex = tensor.sum().item()
    return result


def norm_of(tensor: torch.Tensor) -> float:
    """Return the 2-norm of a tensor."""
    tensor = tensor.detach()
    norm: float = torch.linalg.vector_norm(tensor, dtype=torch.float32 if tensor.element_size() < 4 else None).item()
    if math.isinf(norm) or norm == 0:  # the squares may have left the range where the elements have not
        tensor = tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)
        largest = tensor.abs().max().item()
        norm = largest * torch.linalg.vector_norm(tensor / largest).item() if 0 < largest < math.inf else largest
    return norm


def local_values(tensor: torch.Tensor) -> torch.Tensor:
    """Return the values of a tensor that lie in this process: the shard of a DTensor, the values of a sparse tensor."""
    with torch.no_grad():
        local = local_part(tensor)
    return local.coalesce().values() if local.is_sparse else local


def is_readable(tensor: torch.Tensor) -> bool:
    """Return whether a tensor has floating-point values that can be read here."""
    return (
        (tensor.is_floating_point() or tensor.is_complex())
        and type(tensor) in _PLAIN
        and tensor.layout is torch.strided
        and not tensor.is_meta
        and tensor.numel() > 0
    )


def is_suspicious(tensor: torch.Tensor) -> bool:
    """Return whether a tensor may hold a NaN or an infinity; the sum of finite values may overflow."""
    if not is_readable(tensor):
        return False
    amount = total(tensor)
    return amount - amount != 0


def bad_kind(tensor: torch.Tensor) -> Kind | None:
    if not is_readable(tensor):
        return None
    if tensor.is_complex():
        return bad_kind(torch.view_as_real(tensor.resolve_conj()))
    # The extremes carry NaN and infinities on, and are found many times faster than a mask of them is made.
    lowest, highest = (bound.item() for bound in torch.aminmax(tensor))
    return "nan" if math.isnan(lowest) else "inf" if math.isinf(lowest) or math.isinf(highest) else None


def bad_rows(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return the indices along the first dimension at which there is a NaN or an infinity."""
    if tensor.dim() == 0:
        return ()
    bad = (~torch.isfinite(tensor)).reshape(tensor.shape[0], -1).any(dim=1)
    return tuple(bad.nonzero()[:_MOST_ROWS, 0].tolist())


def is_all_zero(tensor: torch.Tensor) -> bool:
    return not bool(tensor.any())


def inputs_at(output: torch.Tensor, inputs: Iterable[torch.Tensor]) -> str:
    """Describe what the inputs held at the first bad element of the output."""
    index = (~torch.isfinite(output)).nonzero()
    where = tuple(index[0].tolist()) if len(index) else ()
    parts = [_value_at(x, output, where) for x in inputs if x.dtype is not torch.bool and x.numel()]
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


# --- the gradients of a step ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Gradient:
    """The gradient of one parameter after a step."""

    present: bool
    zero: bool = False
    bad: Kind | None = None
    norm: float = math.nan
    weight_norm: float = math.nan


class Gradients:
    """The gradients of parameters, measured before the optimizer uses them or at the end of the step."""

    def __init__(self, parameters: Iterable[torch.Tensor] = ()) -> None:
        # A gradient that is still the same tensor at the same version was not touched by this step.
        self._before = {id(p): (p.grad, write_count(p.grad)) for p in parameters if p.grad is not None}
        self.taken: dict[int, Gradient] = {}

    def take(self, parameters: Iterable[torch.Tensor]) -> None:
        """Measure the gradients that were not there before."""
        with undispatched(), torch.no_grad():
            for parameter in parameters:
                if id(parameter) not in self.taken or not self.taken[id(parameter)].present:
                    self.taken[id(parameter)] = self._measure(parameter)

    def _measure(self, parameter: torch.Tensor) -> Gradient:
        gradient = parameter.grad
        before = self._before.get(id(parameter))
        if gradient is None or (before is not None and before[0] is gradient and before[1] == write_count(gradient)):
            return Gradient(present=False)
        gradient = local_values(gradient)
        if not is_readable(gradient):
            return Gradient(present=True, zero=not gradient.numel())
        norm = norm_of(gradient)
        bad = bad_kind(gradient) if not math.isfinite(norm) else None
        zero = norm == 0 and is_all_zero(gradient)
        return Gradient(True, zero, bad, norm, norm_of(parameter) if is_readable(parameter) else math.nan)
