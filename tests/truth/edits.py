"""The rows of the truth table for gradgate.edits: each edit with an index tensor that names a place twice, and more."""

import torch

import gradgate as gg
from tests.edits import oracle
from tests.truth import Row

INDEX = torch.tensor([2, 0, 2])
KEEP = torch.tensor([True, False, True])
COUNTED = "A mask with a separate value for each True needs their number, which vmap and fullgraph do not know."
ORDER = "Complex numbers have no order; torch has no minimum or maximum of them."
NAMED = "It reads how often each index occurs; unique_indices=True makes it work."


def edited(name):
    return Row(
        name=f"gg.at[index].{name}" if name != "set" else "gg.at",
        fn=lambda x, v: getattr(gg.at(x)[INDEX], name)(v),
        oracle=lambda x, v: oracle.edit(x, (INDEX,), name, v),
        inputs=(torch.rand(3, 2) + 0.5, torch.rand(3, 2) + 0.5),
        empty=(torch.zeros(3, 0), torch.zeros(3, 0)),
        no={"complex": ORDER} if name in ("min", "max") else {},
    )


ROWS = [
    *(edited(name) for name in oracle.NAMES),
    Row(
        name="gg.at[index].apply",
        fn=lambda x: gg.at(x)[INDEX].apply(torch.sin),
        oracle=lambda x: torch.stack([x[0].sin(), x[1], x[2].sin().sin()]),
        inputs=(torch.rand(3, 2),),
        empty=(torch.zeros(3, 0),),
        no={"compile": NAMED},
    ),
    Row(
        name="gg.at[index].get",
        fn=lambda x: gg.at(x)[INDEX].get(),
        oracle=lambda x: x[INDEX],
        inputs=(torch.rand(3, 2),),
        empty=(torch.zeros(3, 0),),
    ),
    Row(
        name="gg.at[mask].set (one value)",
        fn=lambda x, v: gg.at(x)[KEEP].set(v),
        oracle=lambda x, v: oracle.edit(x, KEEP, "set", v),
        inputs=(torch.rand(3, 2), torch.tensor(2.0)),
        empty=(torch.zeros(3, 0), torch.tensor(2.0)),
    ),
    Row(
        name="gg.at[mask].set (one value for each True)",
        fn=lambda x, keep, v: gg.at(x)[keep].set(v),
        oracle=lambda x, keep, v: oracle.edit(x, keep, "set", v),
        inputs=(torch.rand(3, 2), KEEP, torch.rand(2, 2)),
        empty=(torch.zeros(3, 0), KEEP, torch.zeros(2, 0)),
        no={"compile": COUNTED, "vmap": COUNTED},
    ),
]
