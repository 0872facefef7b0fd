"""Checks of arguments that several packages share, each with one wording."""

from __future__ import annotations

from functools import reduce
from numbers import Real
from operator import and_
from typing import Any

import torch

from gradgate._names import describe
from gradgate.errors import ArgumentError, ArgumentTypeError, ArgumentValueError


def wrong_type(value: object, name: str, function: str, why: str, fix: str = "") -> ArgumentTypeError:
    return ArgumentTypeError(f"{function}(): `{name}` is {describe(value)}.", why=why, fix=fix)


def wrong_value(value: object, name: str, function: str, why: str, fix: str) -> ArgumentValueError:
    return ArgumentValueError(f"{function}(): `{name}` is {describe(value)}.", why=why, fix=fix)


def check_tensor(value: Any, *, name: str, function: str) -> torch.Tensor:
    if isinstance(value, torch.Tensor):
        return value
    fix = f"{name}=torch.as_tensor({name})" if _becomes_tensor(value) else ""
    raise wrong_type(value, name, function, "it works on a torch.Tensor, so that autograd can follow it.", fix)


def check_module(value: Any, *, name: str, function: str) -> torch.nn.Module:
    if isinstance(value, torch.nn.Module):
        return value
    why = "its parameters are asked for by name, so it has to be a torch.nn.Module."
    raise wrong_type(value, name, function, why)


def check_keep(keep: torch.Tensor, x: torch.Tensor, *, name: str = "keep", function: str) -> torch.Tensor:
    """Make sure that a mask is boolean, on the same device as what it masks, and broadcasts to its shape."""
    if not isinstance(keep, torch.Tensor):
        device = "" if x.device.type == "cpu" else f", device={str(x.device)!r}"
        fix = f"{name}=torch.as_tensor({name}, dtype=torch.bool{device})" if _becomes_tensor(keep) else ""
        raise wrong_type(keep, name, function, "a mask is a boolean tensor; True takes part.", fix)
    if keep.dtype is not torch.bool:
        why = "a mask answers yes or no for each element; numbers would be ambiguous."
        raise wrong_type(keep, name, function, why, f"{name}={name} != 0")
    return check_fits(keep, x, name=name, function=function)


def agreed(keep: Any, args: tuple[Any, ...], x: torch.Tensor | None = None, *, function: str) -> torch.Tensor | None:
    """Return one mask of `keep`: a mask, a function of the arguments, or a tuple of these, which all have to agree."""
    if isinstance(keep, torch.Tensor) and x is None:
        return keep
    masks = []
    for name, each in ((f"keep[{i}]", e) for i, e in enumerate(keep)) if isinstance(keep, tuple) else [("keep", keep)]:
        if callable(each):
            name, each = f"{name}(...)", each(*(a.detach() if isinstance(a, torch.Tensor) else a for a in args))
        own = each if isinstance(each, torch.Tensor) else args[0]
        try:
            masks.append(check_keep(each, own if x is None else x, name=name, function=function))
        except ArgumentError as error:
            error.fix = error.fix if name == "keep" else ""  # that name cannot be assigned to
            raise
    return reduce(and_, masks) if masks else None


def check_fits(tensor: torch.Tensor, x: torch.Tensor, *, name: str, function: str) -> torch.Tensor:
    """Make sure that a tensor can meet x element by element: on the same device, of a shape that broadcasts to x's."""
    # A 0-dim CPU tensor counts as a number everywhere in torch; so it does here.
    if tensor.device != x.device and not (tensor.dim() == 0 and tensor.device.type == "cpu"):
        raise ArgumentValueError(
            f"{function}(): `{name}` is on {tensor.device}, x is on {x.device}.",
            why="moving it here would copy in every call.",
            fix=f"{name}={name}.to({str(x.device)!r})",
        )
    if tensor.shape != x.shape and not broadcasts_to(tensor.shape, x.shape):
        raise ArgumentValueError(
            f"{function}(): `{name}` has shape {tuple(tensor.shape)}, "
            f"which does not broadcast to x of shape {tuple(x.shape)}.",
            why="each element of x needs exactly one answer.",
            fix=_shape_fix(tensor, x, name),
        )
    return tensor


def broadcasts_to(small: torch.Size, large: torch.Size) -> bool:
    missing = len(large) - len(small)
    return missing >= 0 and all(map(_is_one_or, small, large[missing:]))


def _is_one_or(small: int, large: int) -> bool:
    return small in (1, large)


def _shape_fix(keep: torch.Tensor, x: torch.Tensor, name: str) -> str:
    if 0 < keep.dim() < x.dim() and keep.shape == x.shape[: keep.dim()]:
        ones = ", 1" * (x.dim() - keep.dim())
        return f"{name}={name}.reshape(*{name}.shape{ones})   # one answer for each row"
    if keep.numel() == x.numel():
        return f"{name}={name}.reshape({', '.join(map(str, x.shape))})"
    return ""  # which of its elements belongs to which is not known


def _becomes_tensor(value: Any) -> bool:
    try:
        return value is not None and torch.as_tensor(value) is not None
    except (TypeError, ValueError, RuntimeError):
        return False


def check_number(value: Any, name: str, function: str, why: str, fix: str) -> None:
    """Make sure that an argument is a real number, and not NaN."""
    if type(value) is int or isinstance(value, torch.Tensor):  # at once, because most of them are ints
        return
    if isinstance(value, bool) or not isinstance(value, Real):
        raise wrong_type(value, name, function, why, fix)
    if value != value:
        raise wrong_value(value, name, function, why, fix)


def check_order(order: Any, *, function: str) -> None:
    """Make sure that `ord` is the order of a vector norm."""
    why = "it is the order of a vector norm, a number; names are those of norms of matrices."
    check_number(order, "ord", function, why, "ord=2   # or 1, or float('inf')")


def check_shape(value: Any, shape: tuple[int, ...], *, name: str, function: str) -> None:
    """Make sure that an argument is a tensor of one shape, or None."""
    if value is None:
        return
    if not isinstance(value, torch.Tensor):
        fix = f"{name}=torch.full({shape}, {value!r})" if isinstance(value, Real) else f"{name}=None"
        raise wrong_type(value, name, function, f"it is a tensor of shape {shape}, or None.", fix)
    if value.shape != shape:
        why = f"there is one number in it for each place that is scaled, so its shape is {shape}."
        fix = f"{name}={name}.expand({', '.join(map(str, shape))})   # if one number is meant for several"
        raise wrong_value(value, name, function, why, fix)


def check_broadcast(x: torch.Tensor, y: torch.Tensor, *, names: tuple[str, str], function: str) -> None:
    """Raise where two shapes do not broadcast; called only after torch has refused, so that it costs nothing."""
    try:
        torch.broadcast_shapes(x.shape, y.shape)  # type: ignore[no-untyped-call]
    except RuntimeError:
        raise ArgumentValueError(
            f"{function}(): `{names[0]}` has shape {tuple(x.shape)}, `{names[1]}` has {tuple(y.shape)}.",
            why="they have to broadcast to one shape.",
            fix=f"{names[1]}.unsqueeze(-1)   # or whatever makes them fit",
        ) from None
