"""The reductions of gradgate.masked, each on a matrix with a NaN left out and a row with nothing kept."""

import torch

from tests.masked.laws import BY_NAME
from tests.truth import Row

X = torch.tensor([[0.5, -1.5, 2.5, 0.25], [1.75, 3.0, -0.75, 1.0], [2.0, -2.0, 4.0, 1.5]])
KEEP = torch.tensor([[True, True, False, True], [False, False, False, False], [True, True, True, False]])
NONE = (torch.zeros(0, 4), torch.zeros(0, 4, dtype=torch.bool))

NAMES = {
    "sum": "sum",
    "prod": "prod",
    "mean": "mean",
    "var": "var 1",
    "std": "std 1",
    "amin": "amin",
    "amax": "amax",
    "median": "median",
    "quantile": "quantile 0.3 linear",
    "norm": "norm 2",
    "logsumexp": "logsumexp",
    "softmax": "softmax",
    "log_softmax": "log_softmax",
    "normalize": "normalize",
    "cumsum": "cumsum",
}


def _row(public, name):
    law = BY_NAME[name]
    return Row(
        f"masked.{public}",
        lambda x, keep: law.fn(x, 1, keep=keep),
        (X, KEEP),
        empty=NONE,
        oracle=lambda x, keep: law.oracle(x, keep, 1),
        not_asked=() if law.complexes else ("complex",),
    )


ROWS = [_row(public, name) for public, name in NAMES.items()]
