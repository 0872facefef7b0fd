"""The native kernels, called with tensors.

`usable` says whether they take some tensors; every other function here relies on that. They write into new tensors
only, autograd does not see them, and the GIL is released while they run.
"""

from __future__ import annotations

import math
from typing import Any, TypeAlias

import torch

from gradgate import _native
from gradgate._torch_compat import address_of, is_dispatched, is_traced, is_vmapped_the_old_way

# The order of the enum in kernels.c, and what each dtype is added up in.
_CODES = {
    torch.float32: 0,
    torch.float64: 1,
    torch.float16: 2,
    torch.bfloat16: 3,
    torch.int8: 4,
    torch.uint8: 5,
    torch.int16: 6,
    torch.int32: 7,
    torch.int64: 8,
}
_SUMMED = {dtype: torch.float32 if code in (0, 2, 3) else torch.float64 if code == 1 else torch.int64
           for dtype, code in _CODES.items()}  # fmt: skip
_PLAIN = (torch.Tensor, torch.nn.Parameter)
_CPU = torch.device("cpu")

Shape: TypeAlias = tuple[int, int, int]  # outer, reduced, inner

library: Any = _native.library


def usable(*tensors: torch.Tensor) -> bool:
    """Tell whether the kernels may read tensors just as they lie in memory: on the CPU, and nothing traces the call."""
    if is_traced() or library is None or is_dispatched():
        return False
    for x in tensors:
        if type(x) not in _PLAIN or not x.is_cpu or x.layout != torch.strided:
            return False
        if x.is_conj() or x.is_neg() or is_vmapped_the_old_way(x):
            return False
    return True


def takes(dtype: torch.dtype) -> bool:
    """Tell whether the kernels know a dtype."""
    return dtype in _CODES


def _input(x: torch.Tensor, shape: Shape, mask: torch.Tensor | None, value: float | None) -> Any:
    """Describe contiguous tensors; without a mask, the elements that equal the value are left out (NaN equals NaN)."""
    whole = 0 if value is None or x.dtype.is_floating_point else int(value)
    return _native.Input(
        address_of(x),
        None if mask is None else address_of(mask),
        *shape,
        math.nan if value is None else value,
        whole,
        _CODES[x.dtype],
        torch.get_num_threads(),
    )


def valid(x: torch.Tensor, keep: torch.Tensor | None, value: float) -> torch.Tensor:
    """Give the mask of what is kept and is not the value."""
    x = x.contiguous()
    keep = None if keep is None else keep.expand(x.shape).contiguous()
    mask = torch.empty(x.shape, dtype=torch.bool, device=_CPU)
    library.valid(_input(x, (1, x.numel(), 1), keep, value), address_of(mask))
    return mask


def sums(
    x: torch.Tensor, shape: Shape, mask: torch.Tensor | None, value: float | None, *, mean: bool, counted: bool
) -> tuple[torch.Tensor, torch.Tensor | None, int]:
    """Add up what is kept of each slice, or give the mean, and count it.

    Gives (outer, inner) tensors, in float32 for halves and int64 for integers, and how many slices keep nothing.
    """
    outer, _, inner = shape
    total = torch.empty((outer, inner), dtype=_SUMMED[x.dtype], device=_CPU)
    number = torch.empty((outer, inner), dtype=torch.int64, device=_CPU) if counted else None
    empty = library.sum(
        _input(x, shape, mask, value), mean, address_of(total), None if number is None else address_of(number)
    )
    return total, number, _checked(empty)


def _checked(result: int) -> int:
    if result < 0:
        raise MemoryError("gradgate's native kernels could not get the memory that they need")
    return result
