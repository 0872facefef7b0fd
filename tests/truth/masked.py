"""The reductions of gradgate.masked, each on a matrix with a NaN left out and a row with nothing kept."""

import torch

from gradgate import masked
from tests.masked.laws import BY_NAME
from tests.masked.normalization import batch_norm_oracle, layer_norm_oracle
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


def _layer_norm(x, keep):
    return masked.layer_norm(x, [4], keep=keep)


def _layer_norm_oracle(x, keep):
    return layer_norm_oracle(x, torch.ones(4, dtype=x.dtype), torch.zeros(4, dtype=x.dtype), keep)


def _batch_norm(x, keep):
    return masked.batch_norm(x, None, None, training=True, keep=keep)


def _batch_norm_oracle(x, keep):
    ones, zeros = torch.ones(4, dtype=x.dtype), torch.zeros(4, dtype=x.dtype)
    return batch_norm_oracle(x, None, None, ones, zeros, keep, True)


ROWS = [
    *[_row(public, name) for public, name in NAMES.items()],
    Row("masked.batch_norm", _batch_norm, (X.double(), KEEP), NONE, not_asked=("complex",), oracle=_batch_norm_oracle),
    Row("masked.layer_norm", _layer_norm, (X, KEEP), NONE, not_asked=("complex",), oracle=_layer_norm_oracle),
]
