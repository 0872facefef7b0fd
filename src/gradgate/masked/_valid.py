"""Which elements take part: the one place where `keep=` and `exclude=` become a mask."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any, TypeAlias

import torch

from gradgate._checks import check_keep, check_tensor
from gradgate._names import describe
from gradgate._torch_compat import has_data, inside_functorch, is_traced
from gradgate.errors import ArgumentTypeError

__all__ = ["SMALL", "Exclude", "Number", "mask_of", "stored", "valid", "zeros_and_ones"]

Number: TypeAlias = bool | int | float | complex
Exclude: TypeAlias = Number | Iterable[Number] | torch.Tensor | None

SMALL = 1 << 13  # elements: beneath it, the overhead of a piece is more than what torch.where costs


def valid(
    x: torch.Tensor, *, keep: torch.Tensor | None = None, exclude: Exclude = None, finite: bool = False
) -> torch.Tensor:
    """Give the mask that the functions of this room use: True where an element takes part.

    Args:
        x: The values.
        keep: A boolean mask that broadcasts to the shape of x; True takes part.
        exclude: A value that does not take part, or several (a list, a tuple, a set, a tensor of values). NaN
            matches NaN. A value that the dtype of x cannot hold (-1 for uint8, 0.5 for an integer) matches nothing.
        finite: Leave out NaN and infinities as well.

    Returns:
        A boolean tensor of the shape of x. It may share memory with `keep`; do not write to it.

    Raises:
        ArgumentTypeError: `keep` is not a boolean tensor, or `exclude` has something that is not a number.
        ArgumentValueError: `keep` does not broadcast to the shape of x, or is on another device.

    Examples:
        >>> labels = torch.tensor([3, 255, 7, 0])
        >>> gg.masked.valid(labels, exclude=[255, 0])
        tensor([ True, False,  True, False])
    """
    mask = mask_of(x, keep, exclude, function="masked.valid")
    if finite:
        mask = torch.isfinite(x) if mask is None else mask & torch.isfinite(x)
    if mask is None:
        return torch.ones_like(x, dtype=torch.bool)
    return mask.expand(x.shape)


def mask_of(
    x: torch.Tensor, keep: torch.Tensor | None, exclude: Exclude = None, *, function: str
) -> torch.Tensor | None:
    """Give the mask that `keep` and `exclude` say together, or None if every element takes part for certain.

    Args:
        x: The values.
        keep: As in `valid`.
        exclude: As in `valid`.
        function: The public function that was called, for messages.

    Returns:
        A boolean tensor that broadcasts to the shape of x (it may be smaller), or None.
    """
    check_tensor(x, name="x", function=function)
    if x.layout is not torch.strided or x.is_nested:
        raise _not_dense(x, "x", function)
    mask = None if keep is None else check_keep(keep, x, function=function)
    if mask is not None and mask.layout is not torch.strided:
        raise _not_dense(mask, "keep", function)
    if mask is not None and x.numel() >= SMALL:
        mask = zeros_and_ones(mask)
    if exclude is not None:
        for others in _others(x.detach(), exclude, function):
            mask = others if mask is None else mask & others
    return mask


def _not_dense(tensor: torch.Tensor, name: str, function: str) -> ArgumentTypeError:
    kind = "nested" if tensor.is_nested else str(tensor.layout).removeprefix("torch.")
    return ArgumentTypeError(
        f"{function}(): `{name}` is a {kind} tensor.",
        why="each element takes part or does not, so each has to be there.",
        fix=f"torch.nested.to_padded_tensor({name}, float('nan'))   # exclude=float('nan')"
        if tensor.is_nested
        else f"{name}.to_dense()",
    )


def zeros_and_ones(mask: torch.Tensor) -> torch.Tensor:
    """Give a mask that may be read as bytes.

    Args:
        mask: A boolean mask; `image.view(torch.bool)` holds 255 where others hold 1.

    Returns:
        The same for torch. Where only torch reads it (on other devices, while something traces), the mask itself.
    """
    if not mask.is_cpu or mask.numel() == 0 or is_traced() or not has_data(mask):
        return mask
    kept = mask.view(torch.uint8)
    return mask if kept.amax().item() < 2 else kept != 0


def _others(x: torch.Tensor, exclude: Exclude, function: str) -> Iterator[torch.Tensor]:
    """Say for each excluded value that the dtype can hold where it is not."""
    if isinstance(exclude, torch.Tensor):
        for element in exclude.detach().reshape(-1).unbind():
            yield ~_matches_tensor(x, element)
        return
    for number in _numbers(exclude, function):
        value = stored(number, x.dtype)
        if value is not None:
            yield x == x if value != value else _differs(x, value)  # NaN is the only value that is not itself


def _differs(x: torch.Tensor, value: Number) -> torch.Tensor:
    # For bytes, torch compares with a number ten times faster if it may write 0 and 1 into bytes.
    if x.element_size() == 1 and x.device.type == "cpu" and not inside_functorch() and has_data(x):
        return torch.ne(x, value, out=torch.empty(x.shape, dtype=torch.uint8, device=x.device)).view(torch.bool)
    return x != value


def _numbers(exclude: Any, function: str) -> list[Number]:
    several = isinstance(exclude, Iterable) and not isinstance(exclude, str | bytes)
    found: list[Number] = []
    for value in exclude if several else (exclude,):
        # A numpy number is a number too, but not one of Python's.
        number = value.item() if hasattr(value, "item") and math.prod(getattr(value, "shape", ())) == 1 else value
        if not isinstance(number, bool | int | float | complex):
            raise ArgumentTypeError(
                f"{function}(): `exclude` has {describe(value)}.",
                why="values are compared with the elements of x, so they have to be numbers.",
                fix="exclude=255   # or [0, 255], or float('nan')",
            )
        found.append(number)
    return found


def stored(number: Number, dtype: torch.dtype) -> Number | None:
    """Give a number as a tensor of this dtype would take it, or None if it cannot hold it.

    Args:
        number: The number.
        dtype: The dtype.

    Returns:
        A number of the kind of the dtype, rounded no further than the dtype itself does.
    """
    if dtype.is_complex:
        parts = [_stored_real(part, dtype) for part in (number.real, number.imag)]
        return None if None in parts else complex(*parts)  # type: ignore[arg-type]
    return None if number.imag else _stored_real(number.real, dtype)


def _stored_real(number: float, dtype: torch.dtype) -> float | None:
    finite = isinstance(number, int) or math.isfinite(number)  # an int may be larger than any float
    if dtype.is_floating_point or dtype.is_complex:
        if not finite:
            return number
        info = torch.finfo(dtype)
        least = info.tiny * info.eps / 2  # half of the smallest number above 0: beneath it, 0 would be stored
        return float(number) if number == 0 or least < abs(number) <= info.max else None  # torch takes no large int
    if not finite or number != int(number):
        return None
    low, high = (0, 1) if dtype is torch.bool else (torch.iinfo(dtype).min, torch.iinfo(dtype).max)
    if not low <= number <= high:
        return None
    return bool(number) if dtype is torch.bool else int(number)


def _matches_tensor(x: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Say where a 0-dim tensor's value is in x, without asking the host for it."""
    fits = None
    if value.is_complex() and not x.is_complex():
        fits, value = value.imag == 0, value.real
    same = value.to(device=x.device, dtype=x.dtype)
    matched = x == same
    if x.is_floating_point() or x.is_complex():
        matched = matched | (torch.isnan(x) & torch.isnan(same))
        fitting = (torch.isinf(same) == torch.isinf(value)) & ((same == 0) == (value == 0))
    else:
        fitting = (same.to(value.dtype) == value) & (_is_negative(same) == _is_negative(value))
    return matched & fitting if fits is None else matched & fitting & fits


def _is_negative(value: torch.Tensor) -> torch.Tensor:
    # torch does not compare the wide unsigned integers with 0.
    return value < 0 if value.dtype.is_signed else torch.zeros_like(value, dtype=torch.bool)
