"""Who learns, who does not, and why: `trainable`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

from gradgate._names import describe
from gradgate._text import html_table
from gradgate.errors import ArgumentTypeError
from gradgate.freezing._freeze_state import ROWS_TOKEN, FreezeState, freeze_state_of
from gradgate.freezing._layers import (
    bare,
    has_statistics,
    named_modules,
    named_parameters,
    state_bytes,
    stopped,
    ties_of,
)
from gradgate.freezing._pins import rows_of

_COLUMNS = ("parameter", "shape", "state", "learns", "why")


@dataclass(frozen=True)
class Totals:
    """The sums of a `TrainableTable`; a tied parameter counts once.

    Attributes:
        elements: All elements of all parameters.
        learning: Those that learn.
        frozen: Those that do not.
        statistics_held: Names of the modules whose running statistics are stopped.
        statistics_running: Names of those whose statistics run in training mode.
    """

    elements: int
    learning: int
    frozen: int
    statistics_held: tuple[str, ...]
    statistics_running: tuple[str, ...]


class TrainableTable(dict[str, dict[str, Any]]):
    """A plain dictionary, one entry for each parameter, that prints as a table; made by `trainable`.

    Attributes:
        totals: The sums.
    """

    totals: Totals

    def _rows(self) -> list[tuple[str, ...]]:
        rows: list[tuple[str, ...]] = []
        for name, entry in self.items():
            shape = "x".join(map(str, entry["shape"])) or "scalar"
            learns = f"{entry['learning']:,} of {entry['elements']:,}"
            rows.append((name, shape, entry["state"], learns, entry["why"]))
        return rows

    def _caption(self) -> str:
        totals = self.totals
        share = f" ({totals.learning / totals.elements:.2%})" if totals.elements else ""
        caption = f"{totals.learning:,} of {totals.elements:,} elements learn{share}"
        if totals.statistics_held or totals.statistics_running:
            caption += (
                f"; running statistics of {len(totals.statistics_held)} modules stand still, "
                f"of {len(totals.statistics_running)} run"
            )
        return caption

    def __rich__(self) -> Table:
        table = Table(*_COLUMNS, caption=self._caption())
        for row in self._rows():
            table.add_row(*row, style={"learns": "green", "frozen": "blue"}.get(row[2], "yellow"))
        return table

    def _repr_html_(self) -> str:
        rows = self._rows()
        tones = [{"learns": "good", "frozen": "info"}.get(row[2], "warn") for row in rows]
        return html_table(self._caption(), _COLUMNS, rows, tones=tones)

    def __str__(self) -> str:
        console = Console(width=120, color_system=None, force_jupyter=False)  # a notebook would show it at once
        with console.capture() as capture:
            console.print(self)
        return capture.get().rstrip()

    __repr__ = __str__  # in an interactive session the table, too


def trainable(model: nn.Module, *optimizers: torch.optim.Optimizer) -> TrainableTable:
    """List for every parameter whether it learns, how much of it, and why not.

    Args:
        model: The model.
        *optimizers: Its optimizers, to report what is in none of them, and their state of what is frozen.

    Returns:
        A dictionary by name with `shape`, `elements`, `learning` (how many elements learn), `state` ("learns",
        "part frozen", "frozen"), `why`, and `tied` (its other names). It prints as a table, and has `totals`.

    Raises:
        ArgumentTypeError: `model` is no module, or one of the optimizers is none.

    Examples:
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1))
        >>> handle = gg.freeze(model, "0.*")
        >>> table = gg.trainable(model)
        >>> table["0.weight"]["state"], table["0.weight"]["why"]
        ('frozen', "freeze('0.*')")
        >>> table.totals.learning, table.totals.frozen
        (3, 6)
        >>> print(table)
        ┏━━━...
    """
    inner = bare(model, "trainable")
    for optimizer in optimizers:
        if not isinstance(optimizer, torch.optim.Optimizer):
            why = "after the model come its optimizers, to tell what none of them moves."
            fix = "gg.trainable(model, optimizer)"
            raise ArgumentTypeError(f"trainable(): {describe(optimizer)} is no optimizer.", why=why, fix=fix)
    known = named_parameters(inner)
    ties = ties_of(known)
    moved = {id(one) for optimizer in optimizers for group in optimizer.param_groups for one in group["params"]}
    table = TrainableTable({name: _entry(one, ties.get(name, ()), optimizers, moved) for name, one in known.items()})
    modules = {name: module for name, module in named_modules(inner).items() if has_statistics(module)}
    held = tuple(name for name, module in modules.items() if stopped(module))
    running = tuple(name for name in modules if name not in held)
    entries = {id(parameter): table[name] for name, parameter in known.items()}.values()
    # Rows that learn beside their table stand in the table's place: the model has no more elements than before.
    trainings = {id(rows): rows for module in inner.modules() if (rows := rows_of(module)) is not None}
    copies = sum(small.numel() for rows in trainings.values() for small in rows.parameters())
    elements, learning = sum(entry["elements"] for entry in entries) - copies, sum(e["learning"] for e in entries)
    table.totals = Totals(elements, learning, elements - learning, held, running)
    return table


def _entry(
    parameter: nn.Parameter, tied: tuple[str, ...], optimizers: tuple[torch.optim.Optimizer, ...], moved: set[int]
) -> dict[str, Any]:
    frozen = freeze_state_of(parameter) or FreezeState()
    reasons = [*frozen.freezes.values(), *(f"pin of {region.count:,} elements" for region in frozen.pins.values())]
    learning = parameter.numel() - frozen.count
    if not parameter.requires_grad:
        learning = 0
        if not frozen.freezes or not frozen.learned:
            reasons.append("requires_grad is False")
    if optimizers and learning and id(parameter) not in moved:
        learning = 0
        reasons.append("in none of the optimizers")
    kept = 0 if learning else sum(state_bytes(optimizer, parameter) for optimizer in optimizers)
    reasons += [f"optimizer state of {kept:,} bytes"] if kept else []
    reasons += [f"tied: {', '.join(tied)}"] if tied else []
    part = 0 < learning < parameter.numel() or (not learning and ROWS_TOKEN in frozen.freezes)
    return {
        "shape": tuple(parameter.shape),
        "elements": parameter.numel(),
        "learning": learning,
        "state": "part frozen" if part else "learns" if learning else "frozen",
        "why": "; ".join(reasons),
        "tied": list(tied),
    }
