"""The state that a step began with: weights, buffers and every random state, as bytes and back."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from gradgate._payload import decode, encode, missing_in
from gradgate.errors import LedgerError

__all__ = ["LIMIT", "capture", "random_state", "restored", "set_random_state"]

LIMIT = 256 * 2**20
"""How many bytes a snapshot may take unless more is allowed."""


def capture(model: torch.nn.Module | None = None, *, limit: int = LIMIT) -> bytes:
    """Take the weights and buffers of a model and the random states of this process.

    Args:
        model: The model; without one, only the random states.
        limit: How many bytes it may take.

    Returns:
        The state, to be given to a ledger.

    Examples:
        >>> model = torch.nn.Linear(1, 1)
        >>> data = capture(model)
        >>> before = model.weight.detach().clone()
        >>> _ = torch.nn.init.constant_(model.weight, 7.0)
        >>> with restored(data, model):
        ...     print(torch.equal(model.weight, before))
        True
        >>> model.weight.item()
        7.0
    """
    weights = None if model is None else dict(model.state_dict())
    return encode({"model": weights, "random": random_state()}, limit=limit)


@contextmanager
def restored(data: bytes | None, model: torch.nn.Module | None = None) -> Iterator[None]:
    """Put a state in force for a block, and put back afterwards what was.

    Args:
        data: What `capture` gave; None to change nothing, only to put back what the block changes.
        model: The model to put the weights into.

    Raises:
        LedgerError: The state is not whole, or does not fit the model.
    """
    state = None if data is None else _whole(decode(data))
    weights = {} if model is None else {name: value.clone() for name, value in model.state_dict().items()}
    chance = random_state()
    try:
        if state is not None:
            _put_in_force(state, model)
        yield
    finally:
        set_random_state(chance)
        if model is not None:
            model.load_state_dict(weights)


def random_state() -> dict[str, Any]:
    """Give the random states of torch, Python and, where it is loaded, numpy.

    Returns:
        The states by library, as values that a payload can hold.
    """
    state: dict[str, Any] = {"torch": torch.get_rng_state(), "python": random.getstate()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        state["cuda"] = torch.cuda.get_rng_state_all()
    if "numpy" in sys.modules:
        state["numpy"] = sys.modules["numpy"].random.get_state()
    return state


def set_random_state(state: Mapping[str, Any]) -> None:
    """Put random states in force, as far as their libraries are here.

    Args:
        state: What `random_state` gave.
    """
    torch.set_rng_state(state["torch"])
    random.setstate(state["python"])
    if "cuda" in state and torch.cuda.is_available() and len(state["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(state["cuda"])
    if "numpy" in state and "numpy" in sys.modules:
        sys.modules["numpy"].random.set_state(state["numpy"])


def _whole(state: Any) -> dict[str, Any]:
    missing = missing_in(state)
    if isinstance(state, dict) and {"model", "random"} <= set(state) and not missing:
        return state
    raise LedgerError(
        f"the stored weights are not whole: {', '.join(missing[:3]) or 'something else was stored'}.",
        why="what does not fit into the limit is left out.",
        fix="gg.Ledger(path, payload=True, snapshot=True, snapshot_limit=2**30)",
    )


def _put_in_force(state: Mapping[str, Any], model: torch.nn.Module | None) -> None:
    odd = (RuntimeError, TypeError, ValueError, KeyError, AttributeError, IndexError, OverflowError)
    try:
        if model is not None and state["model"] is not None:
            model.load_state_dict(state["model"])
    except odd as error:
        raise LedgerError(
            f"the stored weights do not fit the model: {error}",
            why="they are those of the model that the fault happened in.",
            fix="give the model that was trained, or none to replay with the weights that loss_fn has",
        ) from error
    try:
        chance = state["random"]
        # numpy believes whatever position it is given, and reads there.
        if "numpy" in chance and not 0 <= chance["numpy"][2] <= 624:
            raise ValueError(f"numpy's position is {chance['numpy'][2]}")
        set_random_state(chance)
    except odd as error:
        raise LedgerError(
            f"the stored random state cannot be used: {type(error).__name__}: {error}.",
            why="it is damaged, or gradgate did not write it.",
            fix="PRAGMA integrity_check   -- in sqlite3, on the ledger",
        ) from error
