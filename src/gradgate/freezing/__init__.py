"""What must not move: layers, rows and single elements that no optimizer moves.

Zeroing a gradient is not freezing: decoupled decay, warm momentum and a stale `.grad` still move the values. So frozen
values are guarded where they change, in the step itself:

1. **A whole parameter** (`freeze`, `train_only`) stops requiring a gradient and loses the one it has. Before each step
   of any `torch.optim.Optimizer` a global step hook of torch drops whatever `.grad` it has got since. All optimizers of
   torch skip a parameter without gradient entirely - decay, momentum and state - so this copies nothing. Only for
   L-BFGS, which moves all parameters along one direction, and for optimizers of other libraries, of which nothing is
   known, the values are written back after the step.
2. **Elements and rows** (`pin`) need a gradient. It becomes exactly 0 there as soon as it is accumulated, so that
   clipping and scaling do not see them. Their values are kept once, written back bit by bit after each step, and read
   again if something other than a step has changed the parameter. Their optimizer state is set to 0 at the first step,
   so that optimizers that mix elements (Muon) do not mix them in.
3. **Rows that learn** (`train_rows`) are the opposite: nearly all of a table is frozen. The rows are a small parameter
   beside the frozen table, so that no step ever touches the table.
4. **Statistics** (BatchNorm) of frozen parts stop because the module stays in evaluation mode, whatever `train()` says.

The state is attached to the parameter itself, so that it holds for optimizers built later, and copies and pickles of
the model carry it. Freezes are counted: what several handles freeze is free without the last of them. Every handle
keeps a checksum, with which `verify` proves that nothing moved.
"""

from __future__ import annotations

from gradgate._names import suggest_names
from gradgate.freezing._layers import FreezeHandle, freeze, thaw, train_only
from gradgate.freezing._pins import Pin, pin
from gradgate.freezing._routing import Conflict, Routing, route
from gradgate.freezing._schedule import FreezeSchedule
from gradgate.freezing._table import Totals, TrainableTable, trainable
from gradgate.freezing._train_rows import RowTraining, merge_rows, train_rows
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
