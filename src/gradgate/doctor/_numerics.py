"""The contents of tensors: non-finite values and where they first appear, zeros, norms, and the gradients of a step."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch

from gradgate._names import describe
from gradgate._torch_private import local_part, undispatched, write_count
from gradgate.doctor._trace import BadValue, Operator, storage_of, tensors_in

if TYPE_CHECKING:
    from gradgate.doctor._tracer import Tracer

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
        wide = torch.complex128 if tensor.is_complex() else torch.float64
        norm = torch.linalg.vector_norm(tensor.to(wide)).item()
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


# --- the first non-finite result in forward ---------------------------------------------------------------------------


class Mark(NamedTuple):
    """The kind of bad value that a piece of memory holds, and which value it is."""

    kind: Kind
    value: int


class NonfiniteTracker:
    """Checks the results of operations."""

    def __init__(self, tracer: Tracer) -> None:
        self.tracer = tracer
        self.marks: dict[int, Mark] = {}

    def value_in(self, tensor: torch.Tensor) -> int:
        mark = self.marks.get(storage_of(tensor))
        return mark.value if mark is not None else -1

    def marks_of_targets(self, operator: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Mark | None]:
        """Return the marks of the tensors that an operator is about to write to."""
        return [self.marks.get(storage_of(x)) for x in operator.targets(args, kwargs)] if self.marks else []

    def check(
        self,
        operator: Operator,
        number: int,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        inputs: list[torch.Tensor],
        result: Any,
        outputs: list[int],
        before: list[Mark | None] | None,
    ) -> None:
        """Check the results of an operation; `before` has the marks of its targets if it writes in place."""
        trace = self.tracer.trace
        targets = operator.targets(args, kwargs) if before is not None else tensors_in(result)
        for tensor, value in zip(targets, outputs, strict=False):
            if not is_readable(tensor):
                continue
            amount = total(tensor)
            storage = tensor.untyped_storage().data_ptr()
            if amount - amount == 0:
                if self.marks and before is None:
                    self.marks.pop(storage, None)
                continue
            kind = bad_kind(tensor)
            if kind is None:  # only the sum overflowed
                continue
            # The running statistics of a batch norm are among its inputs, and have been written to by now.
            read = inputs[:3] if "batch_norm" in operator.name else inputs
            if not self._is_inherited(kind, read, before, number):
                numbers = [x for x in (*args, *kwargs.values()) if isinstance(x, float)]
                deliberate = kind == "inf" and not all(map(math.isfinite, numbers))  # as a mask is filled with -inf
                detail = inputs_at(tensor, inputs if before is None else ()) if not deliberate else ""
                shape, rows = tuple(tensor.shape), bad_rows(tensor)
                trace.bad.append(BadValue(kind, "forward", number, value, rows, shape, detail, deliberate))
            self.marks[storage] = Mark(kind, value)
            trace.spoiled.add(value)

    def _is_inherited(
        self, kind: str, inputs: list[torch.Tensor], before: list[Mark | None] | None, number: int
    ) -> bool:
        """Return whether an input was bad in the same way already, and record what came in from outside."""
        kinds = {mark.kind for mark in before or () if mark is not None}
        for tensor in inputs if before is None else inputs[len(before or [None]) :]:
            storage = storage_of(tensor)
            mark = self.marks.get(storage)
            found = mark.kind if mark is not None else bad_kind(tensor) if is_suspicious(tensor) else None
            if found is None:
                continue
            kinds.add(found)
            if mark is None:
                value, rows, shape = self.tracer.values.of(tensor), bad_rows(tensor), tuple(tensor.shape)
                self.tracer.trace.bad.append(BadValue(found, "arrived", number, value, rows, shape))
                self.marks[storage] = Mark(found, value)
        return kind in kinds or "nan" in kinds
