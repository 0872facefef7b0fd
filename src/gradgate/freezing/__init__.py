"""What must not move: layers, rows and single elements that no optimizer moves.

Zeroing a gradient is not freezing: decoupled decay, warm momentum and a stale `.grad` still move the values. So frozen
values are guarded where they change, in the step itself:

1. **A whole parameter** (`freeze`, `train_only`) stops requiring a gradient. A global step hook of torch drops whatever
   `.grad` it has before each step: all optimizers of torch then skip it entirely. For L-BFGS, which moves all
   parameters along one direction, and for optimizers of other libraries the values are written back after the step.
2. **Elements and rows** (`pin`) have a gradient of exactly 0 as soon as it is accumulated, so that clipping does not
   see them. Their values are written back bit by bit after each step. Their optimizer state is set to 0 at the first
   step, so that optimizers that mix elements (Muon) do not mix them in.
3. **Rows that learn** (`train_rows`) are a small parameter beside the frozen table, so that no step touches the table.
4. **Statistics** (BatchNorm) of frozen parts stop because the module stays in evaluation mode, whatever `train()` says.

The state is attached to the parameter itself: optimizers built later respect it, and copies and pickles carry it.
Freezes are counted: what several handles freeze is free without the last of them.
"""

from __future__ import annotations

from gradgate._names import suggest_names
from gradgate.freezing._layers import FreezeHandle, freeze, thaw, train_only
from gradgate.freezing._pins import Pin, RowTraining, merge_rows, pin, train_rows
from gradgate.freezing._routing import Conflict, Routing, route
from gradgate.freezing._schedule import FreezeSchedule
from gradgate.freezing._table import Totals, TrainableTable, trainable
from gradgate.freezing._verify import assert_frozen

__all__ = [
    "freeze",
    "train_only",
    "thaw",
    "FreezeHandle",
    "pin",
    "Pin",
    "train_rows",
    "merge_rows",
    "RowTraining",
    "FreezeSchedule",
    "route",
    "Routing",
    "Conflict",
    "trainable",
    "TrainableTable",
    "Totals",
    "assert_frozen",
]

suggest_names(__name__)
