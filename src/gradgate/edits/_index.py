"""What the user wrote: the index, parsed once, and the value, with its dtype, device and shape.

torch applies an index in two steps, and so does this file. The basic part (ints, slices, None, ellipsis) is a view;
masks and index tensors then choose entries of that view. Where numpy, and with it JAX, sees an int beside an index
tensor as an index tensor too, torch sees a view; torch's rule holds here.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import torch

from gradgate._names import describe
from gradgate._torch_private import inside_functorch
from gradgate.errors import ArgumentIndexError, ArgumentTypeError, ArgumentValueError

Mode = Literal["raise", "drop", "clip"]


class AdvancedIndex(NamedTuple):
    """A mask or an index tensor, and its dimension: of the view, and of x for messages."""

    dim: int
    dim_of_x: int
    tensor: torch.Tensor

    def is_mask(self) -> bool:
        return self.tensor.dtype is torch.bool


class ParsedIndex(NamedTuple):
    basic: tuple[Any, ...]
    backwards: tuple[int, ...]
    advanced: tuple[AdvancedIndex, ...]
    missed: tuple[int, ...]

    def view_of(self, x: torch.Tensor) -> torch.Tensor:
        """Apply the basic part: a view, unless something runs backwards; if an int missed, only the shape is right."""
        if self.missed:
            x = x.new_zeros(()).expand([1 if dim in self.missed else size for dim, size in enumerate(x.shape)])
        view = x[self.basic] if self.basic else x
        return view.flip(self.backwards) if self.backwards else view

    def write(self, x: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Return a new tensor like x with another value in the place of the view; the value may broadcast."""
        if self.backwards:
            value = value.expand(self.view_of(x).shape).flip(self.backwards)
        if inside_functorch():
            # vmap cannot write a batch into a copy that is not one; out of place it can.
            places = torch.arange(x.numel(), device=x.device).reshape(x.shape)[self.basic]
            return x.reshape(-1).index_put((places,), value).reshape(x.shape)
        new = x.clone()
        new[self.basic].copy_(value)
        return new

    def restore(self, x: torch.Tensor, view: torch.Tensor) -> torch.Tensor:
        """Return a new tensor like x in which the view is another one; the view is new memory already."""
        if view.shape == x.shape and not self.backwards:
            return view  # it is the whole of x
        return self.write(x, view)


def check_mode(mode: str) -> None:
    if mode not in ("raise", "drop", "clip"):
        why = 'an index that is out of range can be refused ("raise"), ignored ("drop") or moved in ("clip").'
        raise ArgumentValueError(f"at(x)[...]: `mode` is {describe(mode)}.", why=why, fix='mode="drop"')


def read(index: Any, shape: Sequence[int], device: torch.device, mode: str) -> ParsedIndex:
    if isinstance(index, torch.Tensor) and index.dtype is torch.int64 and index.device == device and len(shape):
        return ParsedIndex((), (), (AdvancedIndex(0, 0, index),), ())  # the commonest one, at once
    items = [_as_item(item, device) for item in (index if isinstance(index, tuple) else (index,))]
    basic: list[Any] = []
    backwards: list[int] = []
    advanced: list[AdvancedIndex] = []
    missed: list[int] = []
    dim = 0  # of x
    width = 0  # dimensions of the view so far
    for item in _without_ellipsis(items, shape):
        used = _dims_used(item)
        if isinstance(item, torch.Tensor):
            _check_mask(item, shape, dim)
            # A mask without dimensions answers for a new dimension of size 1, as in torch.
            advanced.append(AdvancedIndex(width, dim, item if used else item.reshape(1)))
            basic += [slice(None)] * used or [None]
        elif item is None:
            basic.append(None)
        elif isinstance(item, slice):
            forwards, turned = _forwards(item, shape[dim])
            basic.append(forwards)
            backwards += [width] if turned else []
        else:
            place = _in_range(item, shape, dim, mode)
            basic.append(place or 0)
            missed += [dim] if place is None else []
        dim += used
        width += 0 if isinstance(item, int) else max(used, 1)
    return ParsedIndex(tuple(basic), tuple(backwards), tuple(advanced), tuple(missed))


def out_of_range(function: str, index: int, dim: int, size: int) -> ArgumentIndexError:
    there = f"indices from {-size} to {size - 1}" if size else "no index at all"
    what = f"{function}: index {index} is out of range for dimension {dim} of size {size}."
    why = f"a dimension of size {size} takes {there}."
    fix = 'mode="drop"   # to ignore it; mode="clip" takes the nearest; get(fill_value=0) fills'
    return ArgumentIndexError(what, why=why, fix=fix)


def _as_item(item: Any, device: torch.device) -> Any:
    """Return an int, a slice, None, Ellipsis, or a tensor that is bool or int64."""
    if isinstance(item, torch.Tensor):
        return _as_advanced_index(item, device)
    if item is None or item is Ellipsis or isinstance(item, slice):
        return item
    if hasattr(item, "__index__") and not isinstance(item, bool) and not hasattr(item, "__len__"):
        return operator.index(item)  # an int, or what numpy has in its place
    if getattr(item, "shape", None) == ():
        item = item.item()  # torch 2.8 cannot read a bool of numpy
    try:
        tensor = torch.as_tensor(list(item) if isinstance(item, range) else item, device=device)
    except (TypeError, ValueError, RuntimeError):
        raise _no_index(item) from None
    # An empty list has no dtype of its own; as an index it is one of no entries.
    return _as_advanced_index(tensor.long() if not tensor.numel() and tensor.is_floating_point() else tensor, device)


def _as_advanced_index(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    if tensor.dtype is torch.uint8:
        what = f"at(x)[...]: an index is {describe(tensor)}."
        why = "uint8 is a mask to old torch and an index to numpy; the two differ."
        raise ArgumentTypeError(what, why=why, fix="index.bool()   # a mask; index.long() are places")
    if tensor.is_floating_point() or tensor.is_complex():
        raise _no_index(tensor)
    return tensor.to(device, torch.bool if tensor.dtype is torch.bool else torch.int64)


def _no_index(item: Any) -> ArgumentTypeError:
    why = "an index is an int, a slice, ..., None, a mask, integers in a tensor or list, or a tuple of these."
    fix = "gg.at(x)[index.long()]" if isinstance(item, torch.Tensor) else "gg.at(x)[0]"
    return ArgumentTypeError(f"at(x)[...]: {describe(item)} is no index.", why=why, fix=fix)


def _without_ellipsis(items: list[Any], shape: Sequence[int]) -> list[Any]:
    used = sum(_dims_used(item) for item in items)
    if used > len(shape):
        what = f"at(x)[...]: the index speaks of {used} dimensions, x of shape {tuple(shape)} has {len(shape)}."
        why = "each int, slice and index tensor takes one dimension, a mask as many as it has."
        raise ArgumentIndexError(what, why=why, fix="gg.at(x.unsqueeze(0))[...]   # or an index with fewer parts")
    places = [number for number, item in enumerate(items) if item is Ellipsis]
    if len(places) > 1:
        why = "two of them could share the dimensions in several ways."
        raise ArgumentIndexError("at(x)[...]: the index has more than one ellipsis.", why=why, fix="gg.at(x)[..., 0]")
    at = places[0] if places else len(items)
    return [*items[:at], *[slice(None)] * (len(shape) - used), *items[at + 1 :]]


def _dims_used(item: Any) -> int:
    if isinstance(item, torch.Tensor):
        return item.dim() if item.dtype is torch.bool else 1
    return 0 if item is None or item is Ellipsis else 1


def _check_mask(mask: torch.Tensor, shape: Sequence[int], dim: int) -> None:
    for offset, size in enumerate(mask.shape if mask.dtype is torch.bool else ()):
        if size != shape[dim + offset]:
            raise ArgumentIndexError(
                f"at(x)[...]: the mask has size {size} in its dimension {offset}, "
                f"x has size {shape[dim + offset]} in dimension {dim + offset}.",
                why=f"a mask answers for each element; its shape is {tuple(mask.shape)}, that of x {tuple(shape)}.",
                fix="gg.at(x)[keep.expand(x.shape)]   # or gg.at(x)[:, keep] for a later dimension",
            )


def _forwards(item: slice, size: int) -> tuple[slice, bool]:
    """Reverse a slice with a negative step; torch itself takes positive steps only."""
    try:
        step = 1 if item.step is None else operator.index(item.step)
        if step > 0:
            return item, False
        start, stop, step = item.indices(size)
    except (TypeError, ValueError):
        why, fix = "start and stop are ints or None, the step is an int other than 0.", "gg.at(x)[0:2]"
        raise ArgumentTypeError(f"at(x)[...]: {item} is no slice of a dimension.", why=why, fix=fix) from None
    places = range(start, stop, step)
    return (slice(places[-1], places[0] + 1, -step) if places else slice(0, 0)), True


def _in_range(item: int, shape: Sequence[int], dim: int, mode: str) -> int | None:
    """Return an int as a place, None where there is none and that is allowed."""
    size = shape[dim]
    place = item + size if item < 0 else item
    if 0 <= place < size:
        return place
    if mode == "drop":
        return None
    if mode == "clip" and size:
        return min(max(place, 0), size - 1)
    raise out_of_range("at(x)[...]", item, dim, size)


# --- Values ---------------------------------------------------------------------------------------------------------


def as_value(value: Any, x: torch.Tensor, *, function: str) -> torch.Tensor:
    """Convert a value to a tensor of the dtype and on the device of x."""
    # A value may be cast where no kind of information is lost: bool to int to float to complex, and between widths of
    # one kind. The other direction (a float into an integer tensor) would round silently.
    is_number = type(value) in _NUMBERS
    if not is_number and not isinstance(value, torch.Tensor):
        try:
            value = torch.as_tensor(value, device=x.device)
        except (TypeError, ValueError, RuntimeError):
            why, fix = "what is written into a tensor is a number or a tensor.", function.split("(")[0]
            what = f"{function}: the value is {describe(value)}."
            raise ArgumentTypeError(what, why=why, fix=f"{fix}(torch.as_tensor(value))") from None
    if (_NUMBERS.index(type(value)) if is_number else _kind(value.dtype)) > _kind(x.dtype):
        why = "it cannot be written there without losing what kind of number it is; the result keeps the dtype of x."
        fix = "gg.at(x.to(torch.float32))   # or a value of the kind of x" if is_number else "v.to(x.dtype)"
        raise ArgumentTypeError(f"{function}: the value is {describe(value)}, x is {describe(x)}.", why=why, fix=fix)
    if is_number:
        return _number(value, x, function)
    # A 0-dim CPU tensor counts as a number everywhere in torch; so it does here.
    if value.device != x.device and (value.dim() or value.device.type != "cpu"):
        what = f"{function}: the value is on {value.device}, x is on {x.device}."
        raise ArgumentValueError(what, why="moving it here would copy in every call.", fix="v.to(x.device)")
    same = value.dtype is x.dtype and value.device == x.device
    written: torch.Tensor = value if same else value.to(x.device, x.dtype)
    return written


def _number(value: complex, x: torch.Tensor, function: str) -> torch.Tensor:
    try:
        if _kind(x.dtype) == 1 and value.real < torch.iinfo(x.dtype).min:  # torch itself makes 255 of -1
            raise OverflowError
        return torch.tensor(value, dtype=x.dtype, device=x.device)
    except (RuntimeError, ValueError, OverflowError):
        what = f"{function}: {value} does not fit into {str(x.dtype).removeprefix('torch.')}."
        fix = "gg.at(x.long())   # or a value in range"
        raise ArgumentValueError(what, why="it would wrap around silently.", fix=fix) from None


_NUMBERS = [bool, int, float, complex]  # each can be written as any later one


def _kind(dtype: torch.dtype) -> int:
    """Return which of these numbers a dtype has."""
    return 3 if dtype.is_complex else 2 if dtype.is_floating_point else 0 if dtype is torch.bool else 1


def fit(
    value: torch.Tensor, shape: Sequence[int], *, function: str, spoken: Sequence[object] | None = None
) -> torch.Tensor:
    if value.shape == shape:
        return value
    given = tuple(value.shape)
    while value.dim() > len(shape) and value.shape[0] == 1:
        value = value[0]  # as in torch's own assignment
    try:
        return value.expand(tuple(shape))
    except RuntimeError:
        what = f"{function}: the value has shape {given}, the selection has shape ({_written(spoken or shape)})."
        why = "each selected element needs exactly one value; a value broadcasts to the selection, never the reverse."
        raise ArgumentValueError(what, why=why, fix=_shape_fix(value, shape)) from None


def _written(shape: Sequence[object]) -> str:
    return f"{shape[0]}," if len(shape) == 1 else ", ".join(map(str, shape))


def _shape_fix(value: torch.Tensor, shape: Sequence[int]) -> str:
    if 0 < value.dim() < len(shape) and tuple(value.shape) == tuple(shape[: value.dim()]):
        return f"v.reshape({', '.join(map(str, value.shape))}{', 1' * (len(shape) - value.dim())})"
    return f"v.expand({', '.join(map(str, shape))})   # after making its shape fit"
