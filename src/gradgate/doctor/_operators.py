"""What there is to know about an operator of torch, asked of its schema once and kept."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from gradgate._torch_compat import schema_of

# Reading these says nothing about where a value was made: what they give has no values yet, or the old ones.
_SILENT = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "lift_fresh", "set_", "resize_"}
_KEEPS_ARGUMENTS = {
    *("gt", "ge", "lt", "le", "eq", "ne", "pow", "pow_", "clamp", "clamp_min", "clamp_max", "native_batch_norm"),
    *("cudnn_batch_norm", "_native_batch_norm_legit", "_batch_norm_with_update", "_to_copy", "to", "div", "div_"),
}


@dataclass(frozen=True, slots=True)
class Operator:
    """One operator, as the tracer needs it."""

    name: str
    written: tuple[int, ...]
    written_names: tuple[str, ...]
    view: bool
    silent: bool
    zeroes: bool
    unscales: bool
    keeps_arguments: bool

    def targets(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[torch.Tensor]:
        """Give the tensors that a call writes to."""
        named = (kwargs[name] for name in self.written_names if name in kwargs)
        for target in (*(args[position] for position in self.written if position < len(args)), *named):
            if isinstance(target, torch.Tensor):
                yield target
            elif isinstance(target, (list, tuple)):
                yield from (tensor for tensor in target if isinstance(tensor, torch.Tensor))


_known: dict[Any, Operator] = {}


def operator_of(func: Any) -> Operator:
    """Describe an operator."""
    known = _known.get(func)
    if known is None:
        known = _known[func] = _describe(func)
    return known


def _describe(func: Any) -> Operator:
    schema = schema_of(func)
    space, _, name = schema.name.partition("::")
    arguments = schema.arguments
    written = [
        (position, argument)
        for position, argument in enumerate(arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    returns = [result.alias_info for result in schema.returns if result.alias_info is not None]
    return Operator(
        name=name,
        written=tuple(position for position, argument in written if not argument.kwarg_only),
        written_names=tuple(argument.name for _, argument in written),
        view=bool(returns) and not written,
        silent=name in _SILENT or (space not in ("aten", "prims") and not schema.returns),
        zeroes=name in ("zero_", "_foreach_zero_"),
        unscales=name == "_amp_foreach_non_finite_check_and_unscale_",
        keeps_arguments=name in _KEEPS_ARGUMENTS,
    )
