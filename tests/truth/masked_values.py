"""The functions of `gradgate.masked` that choose, replace or protect values."""

import torch

import gradgate as gg
from gradgate import masked
from tests.truth import Row

GENERATOR = torch.Generator().manual_seed(5)
X = torch.randn(3, 4, generator=GENERATOR)
Y = torch.randn(4, generator=GENERATOR).abs() + 0.5
POSITIVE = torch.rand(3, 4, generator=GENERATOR) + 0.2
ZEROS = X * torch.tensor([[0.0], [1.0], [1.0]])
INSIDE = torch.rand(3, 4, generator=GENERATOR) * 1.4 - 0.7
KEEP = torch.tensor([[True, False, True, True], [False, True, True, False], [True, True, False, True]])
ROWS_KEPT = torch.tensor([True, False, True])
REPEATED = torch.tensor([[1.0, 2.0, 2.0, 1.0], [3.0, 3.0, 0.5, 3.0], [4.0, 4.0, 5.0, 5.0]])
REAL_ONLY = {"complex": "Its bad points are those of real numbers; complex tensors are refused."}


def most_frequent(x, keep):
    """Count in Python; every row has something kept."""
    chosen = []
    for row, kept in zip(x, keep, strict=True):
        own = [(value.item(), i) for i, value in enumerate(row) if kept[i]]
        values = [value for value, _ in own]
        winner = max(sorted(set(values)), key=values.count)
        chosen.append(row[max(i for value, i in own if value == winner)])
    return torch.stack(chosen) if chosen else x.sum(1)


def fill_with_mean(x, keep):
    """The mean of the kept elements of each column, by multiplication: X is finite."""
    return torch.where(keep, x, (x * keep).sum(0) / keep.sum(0))


ROWS = [
    Row(
        "gg.apply_where",
        lambda keep, x, y: gg.apply_where(keep, (x, y), lambda a, b: (a * b).sin(), lambda a, b: a / b),
        (KEEP, X, Y),
        empty=(KEEP[:0], X[:0], Y),
        oracle=lambda keep, x, y: torch.where(keep, (x * y).sin(), x / y),
    ),
    Row(
        "gg.apply_rows",
        lambda keep, x: gg.apply_rows(keep, x, torch.sin),
        (ROWS_KEPT, X),
        empty=(ROWS_KEPT[:0], X[:0]),
        no={"vmap": "The number of rows depends on `keep`; a batched `keep` is refused."},
        oracle=lambda keep, x: torch.where(keep.unsqueeze(1), x.sin(), 0),
    ),
    Row(
        "masked.mode",
        lambda x, keep: masked.mode(x, keep=keep, empty=0).values,
        (REPEATED, KEEP),
        empty=(REPEATED[:0], KEEP[:0]),
        no={"complex": "Complex numbers have no order, so ties have no smallest value."},
        oracle=most_frequent,
    ),
    Row(
        "masked.impute",
        lambda x, keep: masked.impute(x, keep=keep, dim=0, through_statistic=True),
        (X, KEEP),
        empty=(X[:, :0], KEEP[:, :0]),
        oracle=fill_with_mean,
    ),
    Row("masked.safe_divide", masked.safe_divide, (X, Y), empty=(X[:0], Y), oracle=torch.div),
    Row("masked.safe_log", masked.safe_log, (POSITIVE,), empty=(POSITIVE[:0],), oracle=torch.log),
    Row("masked.safe_sqrt", masked.safe_sqrt, (POSITIVE,), empty=(POSITIVE[:0],), oracle=torch.sqrt),
    Row("masked.safe_pow", masked.safe_pow, (POSITIVE, Y), (POSITIVE[:0], Y), no=REAL_ONLY, oracle=torch.pow),
    Row("masked.safe_norm", lambda x: masked.safe_norm(x, 1), (X,), empty=(X[:0],), oracle=lambda x: x.norm(dim=1)),
    Row("masked.safe_normalize", masked.safe_normalize, (ZEROS,), empty=(X[:0],)),
    Row("masked.safe_acos", masked.safe_acos, (INSIDE,), empty=(INSIDE[:0],), no=REAL_ONLY, oracle=torch.acos),
    Row("masked.safe_asin", masked.safe_asin, (INSIDE,), empty=(INSIDE[:0],), no=REAL_ONLY, oracle=torch.asin),
]
