"""How far the losses go."""

import math

import torch
from torch.nn import functional

from gradgate import losses
from tests.truth import Row

X = torch.tensor([[0.3, -2.0, 1.4], [0.8, 4.0, -0.6]])
KEEP = torch.tensor([[True, False, True], [True, True, False]])
EMPTY = (torch.zeros(0, 3), torch.zeros(0, 3, dtype=torch.bool))
LABELS = torch.tensor([1, 255])


def _robust(name):
    loss = getattr(losses, name)
    return Row(f"losses.{name}", lambda x, m: loss(x, keep=m), (X, KEEP), empty=EMPTY, not_asked=("complex",))


ROWS = [
    Row(
        "losses.reduce",
        lambda x, m: losses.reduce(x, keep=m),
        (X, KEEP),
        empty=EMPTY,
    ),
    Row(
        "losses.masked_loss",
        lambda x: losses.masked_loss(functional.cross_entropy, x, LABELS[: len(x)], exclude=255),
        (X,),
        empty=(torch.zeros(0, 3),),
        not_asked=("complex",),
        oracle=lambda x: functional.cross_entropy(x[:1], LABELS[:1]) if len(x) else x.sum(),
    ),
    Row(
        "losses.trimmed",
        lambda x: losses.trimmed(x, 0.25),
        (X,),
        empty=(torch.zeros(0),),
        not_asked=("complex",),
        oracle=lambda x: (
            x.flatten().topk(math.ceil(x.numel() * 0.75) if x.numel() else 0, largest=False).values.sum()
            / max(math.ceil(x.numel() * 0.75), 1)
        ),
    ),
    *[
        _robust(name)
        for name in ("huber", "cauchy", "welsch", "geman_mcclure", "tukey", "charbonnier", "barron", "adaptive")
    ],
]
