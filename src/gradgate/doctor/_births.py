"""Where NaN and infinities are born in forward: a look at every result, cheap while all is well.

A sum shows both. A tensor that is bad is remembered by its memory, so that the next one that only inherits it is not
accused.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch

from gradgate.doctor._looking import (
    bad_kind,
    bad_rows,
    has_infinite_argument,
    inputs_at,
    is_readable,
    is_suspicious,
    total,
)
from gradgate.doctor._memory import region_of
from gradgate.doctor._operators import Operator
from gradgate.doctor._trace import BadValue

if TYPE_CHECKING:
    from gradgate.doctor._tracer import Tracer


class Mark(NamedTuple):
    """What is known of a piece of memory: "nan" or "inf", and which value it holds."""

    kind: Literal["nan", "inf"]
    value: int


def _tensors(thing: Any) -> Iterator[torch.Tensor]:
    if isinstance(thing, torch.Tensor):
        yield thing
    elif isinstance(thing, (list, tuple)):
        for item in thing:
            if isinstance(item, torch.Tensor):
                yield item


class Births:
    """Looks at results."""

    def __init__(self, tracer: Tracer) -> None:
        self.tracer = tracer
        self._marks: dict[int, Mark] = {}

    def forget(self) -> None:
        """Begin a new trace."""
        self._marks.clear()

    def value_in(self, tensor: torch.Tensor) -> int:
        """Give the bad value that a tensor holds."""
        mark = self._marks.get(region_of(tensor).storage)
        return mark.value if mark is not None else -1

    def marks(self, operator: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Mark | None]:
        """Give what is known of the tensors that an operator is about to write to."""
        if not self._marks:
            return []
        return [self._marks.get(region_of(target).storage) for target in operator.targets(args, kwargs)]

    # --- forward --------------------------------------------------------------------------------------------------

    def look(
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
        """Look at what an operation of the forward pass gave."""
        targets = operator.targets(args, kwargs) if before is not None else _tensors(result)
        for tensor, value in zip(targets, outputs, strict=False):
            if not is_readable(tensor):
                continue
            amount = total(tensor)
            storage = tensor.untyped_storage().data_ptr()
            if amount - amount == 0:
                if self._marks and before is None:
                    self._marks.pop(storage, None)
                continue
            kind = bad_kind(tensor)
            if kind is None:  # only the sum overflowed
                continue
            # The running statistics of a batch norm are among its inputs, and have been written to by now.
            read = inputs[:3] if "batch_norm" in operator.name else inputs
            inherited = self._inherited(kind, read, before, number)
            if not inherited:
                deliberate = kind == "inf" and has_infinite_argument(args, kwargs)
                readable = [x for x in inputs if before is None]
                detail = inputs_at(tensor, readable) if not deliberate else ""
                rows = bad_rows(tensor)
                self.tracer.trace.bad.append(
                    BadValue(kind, "forward", number, value, rows, tuple(tensor.shape), detail, deliberate=deliberate)
                )
            self._marks[storage] = Mark(kind, value)
            self.tracer.trace.spoiled.add(value)

    def _inherited(self, kind: str, inputs: list[torch.Tensor], before: list[Mark | None] | None, number: int) -> bool:
        """Tell whether an input had the same trouble already; note what came in from outside."""
        kinds = {mark.kind for mark in before or () if mark is not None}
        trace = self.tracer.trace
        for tensor in inputs if before is None else inputs[len(before or [None]) :]:
            storage = region_of(tensor).storage
            mark = self._marks.get(storage)
            found = mark.kind if mark is not None else bad_kind(tensor) if is_suspicious(tensor) else None
            if found is None:
                continue
            kinds.add(found)
            if mark is None:
                value, rows, shape = self.tracer.values.of(tensor), bad_rows(tensor), tuple(tensor.shape)
                trace.bad.append(BadValue(found, "arrived", number, value, rows, shape, ""))
                self._marks[storage] = Mark(found, value)
        return kind in kinds or "nan" in kinds
