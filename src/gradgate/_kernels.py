"""The native kernels, called with tensors.

`usable` says whether they take some tensors; every other function here relies on that. Autograd does not see
them, and the GIL is released while they run.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
from torch.autograd.graph import increment_version

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
_FLOATS = {dtype: code for dtype, code in _CODES.items() if dtype.is_floating_point}
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


# --- elements as words, whatever they mean ---------------------------------------------------------------------------


def _words(x: torch.Tensor) -> tuple[int, int]:
    """Give how many words a contiguous tensor has, and how many bytes each; two words are one complex128."""
    size = x.element_size()
    return (x.numel(), size) if size <= 8 else (2 * x.numel(), 8)


def kept(x: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
    """Give x where keep and +0 elsewhere; `keep` broadcasts to x."""
    x = x.contiguous()
    count, size = _words(x)
    each = count // max(x.numel(), 1)
    if keep.shape != x.shape:
        # One answer for whole rows is used as it is.
        leading = next((dim for dim in range(keep.dim(), 0, -1) if keep.shape[dim - 1] != 1), 0)
        if keep.dim() == x.dim() and keep.shape[:leading] == x.shape[:leading]:
            each *= x.shape[leading:].numel()
        else:
            keep = keep.expand(x.shape)
    keep = keep.contiguous()
    out = torch.empty_like(x)
    library.choose(out.data_ptr(), address_of(x), None, address_of(keep), count, each, size, torch.get_num_threads())
    return out


def overwrite(x: torch.Tensor, where: torch.Tensor, values: torch.Tensor | None) -> None:
    """Write values, or 0, into x where a mask says so; all three lie in memory in the same dense order."""
    count, size = _words(x)
    library.choose(
        x.data_ptr(),
        None if values is None else address_of(values),
        x.data_ptr(),
        address_of(where),
        count,
        count // max(x.numel(), 1),
        size,
        torch.get_num_threads(),
    )
    increment_version(x)


def checksums(x: torch.Tensor, weights: torch.Tensor, block: int) -> torch.Tensor:
    """Give the sum of word times weight of each block of words of a contiguous tensor, for each row of weights."""
    count, size = _words(x)
    sums = torch.empty((len(weights), -(-count // block)), dtype=torch.int64, device=_CPU)
    library.checksum(address_of(x), count, size, address_of(weights), sums.data_ptr(), torch.get_num_threads())
    return sums


def repeats(index: torch.Tensor, size: int) -> bool:
    """Tell whether an index names a place of a dimension twice, or one that does not exist."""
    index = index.contiguous()
    return _checked(library.repeats(address_of(index), index.numel(), size)) != 0


def nonfinite(tensors: Sequence[torch.Tensor]) -> bool | None:
    """Tell whether any of many tensors has a NaN or an Inf; None where the kernels cannot read all of them."""
    if library is None or is_traced() or is_dispatched():
        return None
    addresses, counts, codes = array("q"), array("q"), array("q")
    for x in tensors:
        code = _FLOATS.get(x.dtype)
        if code is None or type(x) not in _PLAIN or not x.is_cpu or not x.is_contiguous():
            return None
        addresses.append(x.data_ptr())
        counts.append(x.numel())
        codes.append(code)
    found: int = library.nonfinite(
        addresses.buffer_info()[0],
        counts.buffer_info()[0],
        codes.buffer_info()[0],
        len(counts),
        torch.get_num_threads(),
    )
    return found != 0
