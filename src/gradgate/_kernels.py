"""The native kernels, called with tensors.

`usable` says whether they take some tensors; every other function here relies on that. Autograd does not see
them, and the GIL is released while they run.
"""

from __future__ import annotations

import ctypes
import math
from array import array
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple, TypeAlias

import torch
from torch.autograd.graph import increment_version

from gradgate import _native
from gradgate._torch_private import are_plain, is_traced, storage_address

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
_FLOATS = {dtype: code for dtype, code in _CODES.items() if dtype.is_floating_point}
DTYPES = _CODES.keys()
_COMPUTED = dict.fromkeys(_CODES, torch.int64)
_COMPUTED.update(dict.fromkeys((torch.float32, torch.float16, torch.bfloat16), torch.float32))
_COMPUTED[torch.float64] = torch.float64
_ELEMENTS, _DIFFERENCES, _SQUARES, _LARGEST, _SMALLEST, _, _EQUALS = range(7)
_DISTANCES, _SHARES, _WEIGHTS = 0, 1, 2
_CPU = torch.device("cpu")
_NO_MEMORY = "gradgate's native kernels could not get the memory that they need"

Shape: TypeAlias = tuple[int, int, int]  # outer, reduced, inner

library: Any = _native.library

_pack = _native.INPUT.pack


def usable(*tensors: torch.Tensor) -> bool:
    """Return whether the kernels may read tensors as they lie in memory: on the CPU, while nothing traces the call."""
    return library is not None and not is_traced() and are_plain(tensors)


class Layout:
    """How a kernel sees a tensor: x as it lies in (outer, reduced, inner), the mask likewise.

    Without a mask, the elements that equal `value` are left out; NaN equals NaN.
    """

    __slots__ = ("keep", "packed", "shape", "tensor", "value")

    def __init__(
        self, x: torch.Tensor, shape: Shape, mask: torch.Tensor | None = None, value: float = math.nan
    ) -> None:
        self.tensor, self.shape, self.keep, self.value = x, shape, mask, value
        code, whole = _CODES[x.dtype], 0
        if value == value and code >= 2:
            if x.dtype.is_floating_point:
                value = torch.tensor(value, dtype=x.dtype).item()  # rounded as an element is
            else:
                whole = int(value)
        start = 0 if mask is None else address_of(mask)
        self.packed = _pack(address_of(x), start, *shape, value, whole, code, torch.get_num_threads())


def address_of(x: torch.Tensor) -> int:
    """Return the address of the first element; unlike `data_ptr()`, it leaves memory shared copy-on-write shared."""
    offset = x.storage_offset()
    return storage_address(x) + int(offset) * x.element_size() if offset else storage_address(x)


def _made(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    if len(shape) <= 1:  # strides that need no arithmetic: in half of the time
        return torch.empty_strided(shape, (1,) * len(shape), dtype=dtype, device=_CPU)
    return torch.empty(shape, dtype=dtype, device=_CPU)


def valid(x: torch.Tensor, keep: torch.Tensor | None, value: float) -> torch.Tensor:
    """Return the mask of what is kept and is not the value; x and keep are contiguous and of one shape."""
    mask = _made(x.shape, torch.bool)
    library.valid(Layout(x, (1, x.numel(), 1), keep, value).packed, mask.data_ptr())
    return mask


def count(mask: torch.Tensor, shape: Shape, out_shape: Sequence[int]) -> torch.Tensor:
    """Count what a contiguous mask keeps of each slice."""
    number, total = _made(out_shape, torch.int64), _made(out_shape, torch.int64)
    _fold(Layout(mask.view(torch.uint8), shape, mask), _ELEMENTS, total, number)
    return number


class Sums(NamedTuple):
    """The sums or means of slices, the numbers kept, and how many slices keep nothing."""

    total: torch.Tensor
    number: torch.Tensor | None
    empty: int


def sums(layout: Layout, out_shape: Sequence[int], *, mean: bool = False, counted: bool = True) -> Sums:
    """Add up what is kept of each slice, or give its mean; in float32 for halves, and int64 for integers."""
    dtype = _COMPUTED[layout.tensor.dtype]
    total = _made(out_shape, dtype)
    number = _made(out_shape, torch.int64) if counted or dtype is torch.int64 else None
    return Sums(total, number, _fold(layout, _ELEMENTS, total, number, None, mean - 1.0))


def _fold(
    layout: Layout,
    op: int,
    out: torch.Tensor,
    number: torch.Tensor | None = None,
    own: torch.Tensor | None = None,
    correction: float = -1,
) -> int:
    """Reduce what is kept of each slice; the sums are divided by the numbers less the correction if that is not < 0."""
    empty: int = library.fold(
        layout.packed,
        op,
        None if own is None else address_of(own),
        correction,
        out.data_ptr(),
        None if number is None else number.data_ptr(),
    )
    if empty < 0:
        raise MemoryError(_NO_MEMORY)
    return empty


def squares(
    layout: Layout, out_shape: Sequence[int], correction: float = -1
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Add up the squares of the distances to the mean of what is kept of each slice; give the means and numbers too.

    The sums are divided by the numbers less the correction, unless that is negative.
    """
    if layout.keep is None:
        layout = Layout(layout.tensor, layout.shape, valid(layout.tensor, None, layout.value))
    found, mean, first = (_made(out_shape, _COMPUTED[layout.tensor.dtype]) for _ in range(3))
    number = _made(out_shape, torch.int64)
    # Counted from one of the elements, the mean is so exact that equal values have no spread, however large they are.
    library.first(layout.packed, first.data_ptr())
    _fold(layout, _DIFFERENCES, mean, number, own=first, correction=0)
    mean += first
    _fold(layout, _SQUARES, found, own=mean, correction=correction)
    return found, mean, number


def extreme(layout: Layout, out_shape: Sequence[int], *, largest: bool) -> tuple[torch.Tensor, int]:
    """Return the largest or smallest kept element of each slice, and how many slices may keep nothing."""
    out = _made(out_shape, _COMPUTED[layout.tensor.dtype])
    return out, _fold(layout, _LARGEST if largest else _SMALLEST, out)


def ties(layout: Layout, found: torch.Tensor) -> torch.Tensor:
    """Count, in the dtype of `found`, how many kept elements equal what was found in their slice."""
    out = torch.empty_like(found)
    _fold(layout, _EQUALS, out, own=found)
    return out


def find(layout: Layout, found: torch.Tensor) -> torch.Tensor:
    """Return the first kept element of each slice that equals what was found in it; -1 if there is none."""
    index = _made(found.shape, torch.int64)
    library.find(layout.packed, address_of(found), index.data_ptr())
    return index


def logsumexp(layout: Layout, out_shape: Sequence[int]) -> torch.Tensor:
    """Return the logarithm of the sum of exponentials of each slice; -inf for nothing."""
    out = _made(out_shape, _COMPUTED[layout.tensor.dtype])
    if library.logsumexp(layout.packed, out.data_ptr()) < 0:
        raise MemoryError(_NO_MEMORY)
    return out


def distances(layout: Layout, center: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    """Return (x - center) * factor where the mask keeps, 0 elsewhere."""
    return _map(layout, _DISTANCES, center, factor)


def shares(layout: Layout, found: torch.Tensor, share: torch.Tensor) -> torch.Tensor:
    """Return the share of its slice to each kept element that equals what was found there, 0 to the others."""
    return _map(layout, _SHARES, found, share)


def weights(layout: Layout, logsumexp: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    """Return exp(x - logsumexp) * factor where the mask keeps, 0 elsewhere."""
    return _map(layout, _WEIGHTS, logsumexp, factor)


def _map(layout: Layout, op: int, own: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    out = _made(layout.tensor.shape, _COMPUTED[layout.tensor.dtype])
    library.map(layout.packed, op, address_of(own), address_of(factor), out.data_ptr())
    return out


def softmax(layout: Layout, *, logarithm: bool) -> torch.Tensor:
    """Return the softmax of each row, or its logarithm; 0, or -inf, where the mask keeps none."""
    out = _made(layout.tensor.shape, _COMPUTED[layout.tensor.dtype])
    library.softmax(layout.packed, logarithm, None, None, out.data_ptr())
    return out


def softmax_gradient(
    result: torch.Tensor, gradient: torch.Tensor, mask: torch.Tensor, shape: Shape, *, logarithm: bool
) -> torch.Tensor:
    """Return the gradient of the input of a softmax of rows; all are contiguous, float32 or float64."""
    out = _made(result.shape, result.dtype)
    layout = Layout(result, shape, mask)
    library.softmax(layout.packed, logarithm, address_of(result), address_of(gradient), out.data_ptr())
    return out


def fill(x: torch.Tensor, mask: torch.Tensor, value: complex) -> torch.Tensor:
    """Return x where the mask keeps, and a value elsewhere; both contiguous and of one shape, of any dtype."""
    out = _made(x.shape, x.dtype)
    _choose(out, x, mask, torch.full((), value, dtype=x.dtype, device=_CPU))
    return out


def _choose(
    out: torch.Tensor, yes: torch.Tensor, mask: torch.Tensor, no: torch.Tensor | None = None, each: int = 1
) -> None:
    """Write `yes` where the mask keeps and `no`, or else what is there, elsewhere; each of 0 dimensions is for all."""
    library.choose(
        out.data_ptr(),
        address_of(yes),
        yes.dim() > 0 or out.dim() == 0,
        out.data_ptr() if no is None else address_of(no),
        no is None,
        address_of(mask),
        out.numel(),
        each,
        out.element_size(),
        torch.get_num_threads(),
    )


def expand(slices: torch.Tensor, mask: torch.Tensor, shape: Shape) -> torch.Tensor:
    """Return each element that the mask keeps the value of its slice, and 0 to the others."""
    out = _made(mask.shape, slices.dtype)
    library.expand(
        address_of(slices), address_of(mask), *shape, slices.element_size(), out.data_ptr(), torch.get_num_threads()
    )
    return out


def mode(
    layout: Layout, out_shape: Sequence[int], *, excluding: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int]:
    """Return each slice's mode, the last kept element with it, how often it is, and how many slices keep nothing.

    Without a mask, nothing is left out unless `excluding`; halves take a mask only.
    """
    values = _made(out_shape, layout.tensor.dtype)
    index, number = _made(out_shape, torch.int64), _made(out_shape, torch.int64)
    empty = library.mode(layout.packed, excluding, values.data_ptr(), index.data_ptr(), number.data_ptr())
    if empty < 0:
        raise MemoryError(_NO_MEMORY)
    return values, index, number, empty


# --- elements as words, whatever they mean ---------------------------------------------------------------------------


def kept(x: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
    """Return x where keep and +0 elsewhere; `keep` broadcasts to x."""
    x, each = x.contiguous(), 1
    if keep.shape != x.shape:
        # One answer for whole rows is used as it is.
        leading = next((dim for dim in range(keep.dim(), 0, -1) if keep.shape[dim - 1] != 1), 0)
        if keep.dim() == x.dim() and keep.shape[:leading] == x.shape[:leading]:
            each = x.shape[leading:].numel()
        else:
            keep = keep.expand(x.shape)
    out = torch.empty_like(x)
    _choose(out, x, keep.contiguous(), _zero(x.dtype), each)
    return out


@cache
def _zero(dtype: torch.dtype) -> torch.Tensor:
    return torch.zeros((), dtype=dtype, device=_CPU)


def overwrite(x: torch.Tensor, where: torch.Tensor, values: torch.Tensor | None) -> None:
    """Write values, or 0, into x where a mask says so; all three lie in memory in the same dense order."""
    _choose(x, _zero(x.dtype) if values is None else values, where)
    increment_version(x)


def checksums(x: torch.Tensor, weights: torch.Tensor, block: int) -> torch.Tensor:
    """Return the sum of word times weight of each block of words of a contiguous tensor, for each row of weights."""
    size = min(x.element_size(), 8)  # two words are one complex128
    count = x.numel() * x.element_size() // size
    sums = torch.empty((len(weights), -(-count // block)), dtype=torch.int64, device=_CPU)
    library.checksum(address_of(x), count, size, address_of(weights), sums.data_ptr(), torch.get_num_threads())
    return sums


def repeats(index: torch.Tensor, size: int) -> bool:
    """Return whether an index names a place of a dimension twice, or one that does not exist."""
    index = index.contiguous()
    found: int = library.repeats(address_of(index), index.numel(), size)
    if found < 0:
        raise MemoryError(_NO_MEMORY)
    return found != 0


def nonfinite(tensors: Sequence[torch.Tensor]) -> bool | None:
    """Return whether any of many tensors has a NaN or an Inf; None where the kernels cannot read all of them."""
    if not usable(*tensors):
        return None
    parts = array("q")
    for x in tensors:
        code = _FLOATS.get(x.dtype)
        if code is None or not x.is_contiguous():
            return None
        parts.extend((x.data_ptr(), x.numel(), code))
    found: int = library.nonfinite(parts.buffer_info()[0], len(tensors), torch.get_num_threads())
    return found != 0


def memory(address: int, size: int) -> memoryview:
    """Return a view of memory that somebody else owns, and keeps."""
    return memoryview((ctypes.c_char * size).from_address(address)).cast("B")
