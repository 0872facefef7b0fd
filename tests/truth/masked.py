"""The reductions of gradgate.masked, each on a matrix with a NaN left out and a row with nothing kept."""

import torch

from gradgate import masked
from tests.masked import oracles
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
    "cumprod": "cumprod",
    "cummax": "cummax",
    "cummin": "cummin",
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


def _normal(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(11))


EDGES = torch.tensor([-2.0, 0.0, 1.0, 3.0])
QUERY, KEY, VALUE, PAIRS = _normal(2, 3, 4), _normal(2, 5, 4), _normal(2, 5, 2), _normal(2, 3, 5) > 0
PAIRS[0, 1] = PAIRS[1, :, 2] = False
SIGNAL, KERNEL, BIAS = _normal(2, 2, 6), _normal(2, 2, 3), _normal(2)
PLACES = torch.tensor([True, True, False, False, False, True])
NO_SIGNAL = (torch.zeros(0, 2, 6), PLACES)


def _counted(weights, keep):
    return masked.histogram(X.to(weights.dtype), EDGES.to(weights.dtype), weights=weights, keep=keep).hist


def _counted_oracle(weights, keep):
    return oracles.histogram(X, keep, EDGES, weights)


def _conv(x, weight, bias, keep):
    return masked.conv(x, weight, bias, padding=1, keep=keep)


def _conv_oracle(x, weight, bias, keep):
    return oracles.conv(x, weight, bias, keep, padding=1)


MORE = [
    Row("masked.histogram", _counted, (X + 5, KEEP), not_asked=("complex", "empty"), oracle=_counted_oracle),
    Row("masked.cov", lambda x, keep: masked.cov(x, keep=keep), (X, KEEP), NONE, oracle=oracles.cov),
    Row("masked.corrcoef", lambda x, keep: masked.corrcoef(x, keep=keep), (X, KEEP), NONE, oracle=oracles.corrcoef),
    Row(
        "masked.avg_pool",
        lambda x, keep: masked.avg_pool(x, 2, keep=keep),
        (SIGNAL, PLACES),
        NO_SIGNAL,
        not_asked=("complex",),
        oracle=lambda x, keep: oracles.pool(x, keep, (2,), torch.mean),
    ),
    Row(
        "masked.max_pool",
        lambda x, keep: masked.max_pool(x, 2, keep=keep),
        (SIGNAL, PLACES),
        NO_SIGNAL,
        not_asked=("complex",),
        oracle=lambda x, keep: oracles.pool(x, keep, (2,), oracles.largest),
    ),
    Row(
        "masked.conv",
        _conv,
        (SIGNAL, KERNEL, BIAS, PLACES),
        (torch.zeros(0, 2, 6), KERNEL, BIAS, PLACES),
        not_asked=("complex",),
        oracle=_conv_oracle,
    ),
    Row(
        "masked.attention",
        lambda query, key, value, keep: masked.attention(query, key, value, keep=keep),
        (QUERY, KEY, VALUE, PAIRS),
        tuple(each[:0] for each in (QUERY, KEY, VALUE, PAIRS)),
        not_asked=("complex",),
        oracle=oracles.attention,
    ),
]

ROWS = [
    *[_row(public, name) for public, name in NAMES.items()],
    Row("masked.batch_norm", _batch_norm, (X.double(), KEEP), NONE, not_asked=("complex",), oracle=_batch_norm_oracle),
    Row("masked.layer_norm", _layer_norm, (X, KEEP), NONE, not_asked=("complex",), oracle=_layer_norm_oracle),
    *MORE,
]
