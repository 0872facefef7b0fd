"""Prove that what was frozen is what it was, and say what is not."""

from __future__ import annotations

from typing import Protocol

import torch

from gradgate._names import describe
from gradgate.errors import ArgumentTypeError, FrozenMovedError
from gradgate.freezing._fingerprints import Fingerprint, fingerprint
from gradgate.freezing._regions import Region

__all__ = ["assert_frozen", "check_unmoved"]


class Verifiable(Protocol):
    """What `freeze`, `train_only`, `pin` and `train_rows` give."""

    def verify(self) -> None:
        """Raise if anything moved."""


def assert_frozen(*handles: Verifiable) -> None:
    """Prove that nothing moved since these were frozen.

    Args:
        *handles: What `freeze`, `train_only`, `pin` or `train_rows` gave.

    Raises:
        FrozenMovedError: A frozen element is not what it was; the message names it. It is an AssertionError too.
        ArgumentTypeError: Something else was given.

    Examples:
        >>> model = torch.nn.Linear(2, 1)
        >>> handle = gg.freeze(model)
        >>> gg.freezing.assert_frozen(handle)
        >>> model.weight.data[0, 1] = 7.0
        >>> gg.freezing.assert_frozen(handle)
        Traceback (most recent call last):
        gradgate.errors.FrozenMovedError: weight[0, 1] is frozen and moved: it was 0.37932288646698 and is 7.0.
        Why: something wrote to it that is no step of a torch.optim.Optimizer: ...
        Fix: handle.accept()   # if the new values are meant, as after load_state_dict
    """
    for handle in handles:
        if not callable(getattr(handle, "verify", None)):
            raise ArgumentTypeError(
                f"assert_frozen(): {describe(handle)} is no handle.",
                why="only what was frozen knows what it was.",
                fix="handle = gg.freeze(model, ...); gg.freezing.assert_frozen(handle)",
            )
        handle.verify()


def check_unmoved(name: str, tensor: torch.Tensor, region: Region, then: Fingerprint) -> Fingerprint:
    """Compare frozen elements with their fingerprint.

    Args:
        name: What the tensor is called.
        tensor: The tensor of now.
        region: Which elements are frozen.
        then: The fingerprint of these.

    Returns:
        The fingerprint to compare with next time: a new one if the tensor was converted to another dtype since,
        because that rounds on purpose.

    Raises:
        FrozenMovedError: They differ.
    """
    values = region.gather(tensor.detach())
    if values.numel() != then.count:
        raise FrozenMovedError(
            f"{name} is frozen and has now {values.numel()} elements instead of {then.count}.",
            why="another tensor was put in its place.",
            fix="freeze it again: the new tensor is not held",
        )
    if values.dtype is not then.dtype:
        return fingerprint(values)
    moved = then.moved(values)
    if moved is None:
        return then
    raise FrozenMovedError(
        _what(name, tensor, region, values, moved.first, moved.last, moved.before), why=_WHY, fix=_FIX
    )


_WHY = "something wrote to it that is no step of a torch.optim.Optimizer: a home-made update, .data, or a loaded state."
_FIX = "handle.accept()   # if the new values are meant, as after load_state_dict"


def _what(
    name: str,
    tensor: torch.Tensor,
    region: Region,
    values: torch.Tensor,
    first: int,
    last: int,
    before: float | complex | None,
) -> str:
    start = list(region.place(first, tensor.shape))
    if before is not None:
        return f"{name}{start or ''} is frozen and moved: it was {before!r} and is {values[first].item()!r}."
    stop = list(region.place(last, tensor.shape))
    return f"{name}{start} to {name}{stop} are frozen, and several of them moved."
