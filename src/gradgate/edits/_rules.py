"""The edits as rules: on a pair of tensors, under a mask, and where index tensors may name a place several times."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from gradgate._names import describe
from gradgate._torch_compat import inside_functorch
from gradgate.edits._places import Places
from gradgate.edits._reading import Chooser, Reading
from gradgate.edits._values import as_value, fit
from gradgate.errors import ArgumentTypeError

__all__ = [
    "Binary",
    "OnPlaces",
    "called",
    "check_kind",
    "choosers",
    "in_place",
    "larger",
    "second",
    "smaller",
    "subtracted",
    "under_mask",
    "with_extreme",
    "with_product",
]

Binary = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
OnPlaces = Callable[[Places, torch.Tensor, torch.Tensor], torch.Tensor]


def second(old: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Take the value: the rule of `set`."""
    return value


def smaller(old: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Take the smaller of two; equal ones share the gradient, and of a NaN neither gets any, as in JAX."""
    return _chosen(torch.minimum, old, value)


def larger(old: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Take the larger of two; equal ones share the gradient, and of a NaN neither gets any, as in JAX."""
    return _chosen(torch.maximum, old, value)


def _chosen(rule: Binary, old: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    best = rule(old.detach(), value.detach())
    # torch's own gradient at a NaN is 1 for both, also for the one that is a number.
    return rule(torch.where(old == best, old, old.detach()), torch.where(value == best, value, value.detach()))


def subtracted(places: Places, view: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Add the negative."""
    return places.add(view, -rows)


def with_product(pair: Binary) -> OnPlaces:
    """Apply a rule once, with the product of all values of a place: (x / a) / b is x / (a * b)."""

    def on_places(places: Places, view: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        return places.put(view, pair(places.take(view), places.product(rows)))

    return on_places


def with_extreme(which: str) -> OnPlaces:
    """Take the smallest ("amin") or largest ("amax") of a place."""

    def on_places(places: Places, view: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        return places.put(view, places.extreme(places.take(view), rows, which))

    return on_places


def choosers(reading: Reading, view: torch.Tensor) -> Sequence[Chooser]:
    """Give all masks and index tensors as index tensors, in the order of their dimensions."""
    if not reading.masks:
        return reading.indices
    found = list(reading.indices)
    for mask in reading.masks:
        found += [
            Chooser(mask.dim + offset, mask.dim_of_x + offset, places)
            for offset, places in enumerate(mask.tensor.nonzero(as_tuple=True))
        ]
    return sorted(found, key=lambda chooser: chooser.dim)


def under_mask(mask: Chooser, view: torch.Tensor, value: torch.Tensor, pair: Binary, function: str) -> Any:
    """Edit under one mask without asking how many are True, if no True element has a value of its own; else None."""
    width = mask.tensor.dim()
    after = view.dim() - mask.dim - width
    lead = value.shape[: max(value.dim() - after - 1, 0)]
    if value.dim() > after and value.shape[len(lead)] != 1:
        return None
    if value.dim() > after:
        value = value.reshape([*lead, *[1] * width, *value.shape[len(lead) + 1 :]])
    here = mask.tensor.reshape([*mask.tensor.shape, *[1] * after]) if after else mask.tensor
    if pair is second and not value.dim() and not inside_functorch():  # vmap has no rule for masked_fill
        return view.masked_fill(here, value)
    known = [*view.shape[: mask.dim], "number of True", *view.shape[mask.dim + width :]]
    value = fit(value, view.shape, function=function, spoken=known)
    if pair is second:
        return torch.where(here, value, view)
    # Elsewhere the rule sees 1 and 1, so that no value there can make a NaN of a gradient that is 0.
    one = torch.ones((), dtype=view.dtype, device=view.device)
    return torch.where(here, pair(torch.where(here, view, one), torch.where(here, value, one)), view)


def called(fn: Callable[[torch.Tensor], torch.Tensor], values: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Call the function of `apply` on a copy, which it may overwrite, and make its result fit."""
    function = "at(x)[...].apply()"
    if not callable(fn):
        raise ArgumentTypeError(
            f"{function}: `fn` is {describe(fn)}.",
            why="it is called with the chosen values.",
            fix="gg.at(x)[idx].apply(torch.relu)   # .set(v) puts a value",
        )
    return fit(as_value(fn(values.clone()), x, function=function), values.shape, function=function)


def check_kind(name: str, x: torch.Tensor, function: str) -> None:
    """Refuse what is not defined for the kind of numbers in x."""
    if name in ("min", "max") and x.is_complex():
        raise _undefined(function, x, "complex numbers have no order.", "gg.at(x.abs())")
    if name == "divide" and not (x.is_floating_point() or x.is_complex()):
        raise _undefined(
            function, x, "a quotient is no integer, and the result keeps the dtype of x.", "gg.at(x.float())"
        )
    if name in ("subtract", "power") and x.dtype is torch.bool:
        raise _undefined(function, x, "torch does not define it for booleans.", "gg.at(x.long())")


def in_place(sign: str, name: str) -> ArgumentTypeError:
    """Make the error of an assignment such as `at(x)[idx] += v`."""
    return ArgumentTypeError(
        f"at(x)[idx] {sign}= v works in place.",
        why="at() never touches x; an edit gives a new tensor.",
        fix=f"y = gg.at(x)[idx].{name}(v)",
    )


def _undefined(function: str, x: torch.Tensor, why: str, fix: str) -> ArgumentTypeError:
    return ArgumentTypeError(f"{function}: `x` is {describe(x)}.", why=why, fix=fix)
