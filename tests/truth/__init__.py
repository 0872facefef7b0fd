"""The truth table of LIMITATIONS.md as data: each public function x each way of using it, each cell backed by a test.

A room's rows live in `tests/truth/<room>.py` as `ROWS`. `python -m tests.truth` writes the table into LIMITATIONS.md.
A cell says "yes" (the check passes), "no" (the check fails; a test states that it does), or "-" (the question makes
no sense there: an index has no gradient). A "no" needs a note that says why.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from tests import witness

COLUMNS = ("compile", "func.grad", "vmap", "jvp", "double backward", "AMP", "complex", "bf16", "empty")


@dataclass(frozen=True)
class Row:
    """One public function and how far it goes.

    Args:
        name: The public name, as "gg.gate" or "masked.mean".
        fn: A call of it, as a function of tensors.
        inputs: Tensors for that call.
        empty: Tensors for the same call with a dimension of size 0.
        no: The columns that do not work, each with the reason.
        not_asked: The columns that make no sense here.
        oracle: A slow and obvious equivalent; the function itself, run eagerly, where there is none.
    """

    name: str
    fn: Callable[..., Any]
    inputs: Sequence[Any]
    empty: Sequence[Any] = ()
    no: dict[str, str] = field(default_factory=dict)
    not_asked: tuple[str, ...] = ()
    oracle: Callable[..., Any] | None = None

    def cell(self, column: str) -> str:
        """Give what the table says."""
        return "-" if column in self.not_asked else "no" if column in self.no else "yes"

    def check(self, column: str) -> None:
        """Raise unless the function works in that way."""
        CHECKS[column](self)


def rows() -> list[Row]:
    """Collect the rows of all rooms, in the order of the rooms' names."""
    found: list[Row] = []
    for module in sorted(info.name for info in pkgutil.iter_modules(__path__)):
        if not module.startswith(("test_", "__")):
            found += importlib.import_module(f"{__name__}.{module}").ROWS
    return found


def _by_witness(name: str) -> Callable[[Row], None]:
    def check(row: Row) -> None:
        witness.CHECKS[name](row.fn, row.oracle or row.fn, row.inputs)

    return check


def _double_backward(row: Row) -> None:
    witness.check_against(row.fn, row.oracle or row.fn, row.inputs)


def _autocast(row: Row) -> None:
    """Under autocast it runs, keeps the gradient's dtype, and agrees with float32 as far as bfloat16 can tell."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        ours, gradients = witness.value_and_gradients(row.fn, row.inputs)
    theirs, expected = witness.value_and_gradients(row.fn, row.inputs)
    witness.assert_same(
        [o.to(t.dtype) for o, t in zip(ours, theirs, strict=True)], theirs, what="AMP", dtype=torch.bfloat16
    )
    witness.assert_same(gradients, expected, what="AMP gradient", dtype=torch.bfloat16)
    assert all(a.dtype == b.dtype for a, b in zip(gradients, expected, strict=True))


def _empty(row: Row) -> None:
    assert row.empty, f"{row.name} has no empty inputs to try"
    witness.check_against(row.fn, row.oracle or row.fn, row.empty)


CHECKS: dict[str, Callable[[Row], None]] = {
    "compile": _by_witness("compile"),
    "func.grad": _by_witness("func_grad"),
    "vmap": _by_witness("vmap"),
    "jvp": _by_witness("jvp"),
    "double backward": _double_backward,
    "AMP": _autocast,
    "complex": _by_witness("complex"),
    "bf16": _by_witness("bfloat16"),
    "empty": _empty,
}


def table() -> str:
    """Write the table and its notes as Markdown."""
    lines = ["| function | " + " | ".join(COLUMNS) + " |", "|---|" + "---|" * len(COLUMNS)]
    notes: list[str] = []
    for row in rows():
        cells = []
        for column in COLUMNS:
            cell = row.cell(column)
            if cell == "no":
                note = row.no[column]
                if note not in notes:
                    notes.append(note)
                cell = f"no [{notes.index(note) + 1}]"
            cells.append(cell)
        lines.append(f"| `{row.name}` | " + " | ".join(cells) + " |")
    lines += [""] + [f"[{number}] {note}" + "  " for number, note in enumerate(notes, 1)]
    return "\n".join(lines).rstrip() + "\n"
