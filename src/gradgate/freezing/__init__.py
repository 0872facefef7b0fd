"""What must not move: layers, rows and single elements that no optimizer moves.

Zeroing a gradient is not freezing: decoupled decay, warm momentum and a stale `.grad` go on moving the values. So
frozen things are guarded where values change, in the step itself:

1. **A whole parameter** (`freeze`, `train_only`) stops requiring a gradient and loses the one it has. Before each step
   of any `torch.optim.Optimizer` a global step hook (torch's own, no patching) takes away whatever `.grad` it has got
   since. All optimizers of torch skip a parameter without gradient entirely - decay, momentum and state - so nothing
   is copied and nothing is paid. Only L-BFGS, which moves all parameters along one direction, and optimizers of
   other libraries, of which nothing is known, get the values put back after the step.
2. **Elements and rows** (`pin`) cannot do without a gradient. It is made exactly 0 there as soon as it is accumulated,
   so clipping and scaling do not see them. Their values are kept once, and written back bit by bit after each step;
   they are read again if something other than a step has changed the parameter. What an optimizer remembers of them
   is set to 0 at its first step, so that optimizers that mix elements (Muon) do not mix them in.
3. **Rows that learn** (`train_rows`) are the opposite: nearly all of a table is frozen. The rows live in a small
   parameter beside the frozen table, laid over its output, so that no step ever touches the table.
4. **Statistics** (BatchNorm) of frozen parts stop because the module stays in evaluation mode, whatever `train()` says.

What is held is written on the parameter itself, so optimizers built later meet it, and copies and pickles of the model
carry it along. Holds are counted: what several handles frozen is free when the last one lets go. Every handle keeps a
checksum, and `verify` proves with it that nothing moved, by whatever way.
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
