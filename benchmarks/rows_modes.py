"""How light a mode is: entering and leaving it, and working inside it."""

from __future__ import annotations

from collections.abc import Callable

import torch

import gradgate as gg
from benchmarks.harness import Candidate, Row

# Each loop enters and leaves a hundred times: one entry is too short for the clock. They are written out, because a
# function around the block would cost as much as the block.


def _torch_block(make: Callable[[], object]) -> Candidate:
    def run() -> None:
        for _ in range(100):
            with make():  # type: ignore[attr-defined]
                pass

    return run


def _torch_set_grad_enabled() -> None:
    set_grad_enabled = torch.set_grad_enabled
    for _ in range(100):
        with set_grad_enabled(False):
            pass


def _unlocked_block() -> None:
    grad_mode = gg.grad_mode
    for _ in range(100):
        with grad_mode(False, locked=False):
            pass


def _locked_block() -> None:
    grad_mode = gg.grad_mode
    for _ in range(100):
        with grad_mode(False):
            pass


def _nothing() -> None:
    pass


def _unlocked_call() -> None:
    grad_mode = gg.grad_mode
    for _ in range(100):
        grad_mode(False, _nothing, locked=False)


def _locked_call() -> None:
    grad_mode = gg.grad_mode
    for _ in range(100):
        grad_mode(False, _nothing)


def _entering(ours: Candidate) -> Callable[[], dict[str, Candidate]]:
    return lambda: {
        "torch.no_grad": _torch_block(torch.no_grad),
        "torch.set_grad_enabled": _torch_set_grad_enabled,
        "torch.inference_mode": _torch_block(torch.inference_mode),
        "gradgate": ours,
    }


def _inside() -> dict[str, Candidate]:
    x = torch.ones(64)

    def ops() -> None:
        for _ in range(200):
            x + x

    def locked() -> None:
        with gg.grad_mode(False):
            ops()

    def unlocked() -> None:
        with torch.no_grad():
            ops()

    return {"torch.no_grad": unlocked, "gradgate": locked}


TORCH = ("torch.no_grad", "torch.set_grad_enabled", "torch.inference_mode")

ROWS = [
    Row(
        "modes",
        "unlocked block, 100 x enter and leave",
        _entering(_unlocked_block),
        ours="gradgate",
        base="torch.no_grad",
        peers=TORCH,
        at_most=1.0,
    ),
    Row(
        "modes",
        "unlocked call of a function, 100 x",
        _entering(_unlocked_call),
        ours="gradgate",
        base="torch.no_grad",
        peers=TORCH,
        at_most=1.0,
    ),
    Row(
        "modes",
        "locked block, 100 x enter and leave",
        _entering(_locked_block),
        ours="gradgate",
        base="torch.no_grad",
        peers=TORCH,
        at_most=1.0,
    ),
    Row(
        "modes",
        "locked call of a function, 100 x",
        _entering(_locked_call),
        ours="gradgate",
        base="torch.no_grad",
        peers=TORCH,
    ),
    Row(
        "modes",
        "200 small additions inside a lock",
        _inside,
        ours="gradgate",
        base="torch.no_grad",
        at_most=1.02,
        peers=TORCH[:1],
    ),
]
