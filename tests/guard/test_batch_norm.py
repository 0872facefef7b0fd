"""BatchNorm is known to let one row's NaN into all others, and only where it surely does."""

import pytest
import torch
from torch import nn

import gradgate as gg

NAN = float("nan")


class Cleaning(nn.BatchNorm1d):
    """Leaves NaN out before it looks at the batch."""

    def forward(self, x):
        return super().forward(x.nan_to_num())


def cleaned_by_a_hook():
    norm = nn.BatchNorm1d(3)
    norm.register_forward_pre_hook(lambda module, args: (args[0].nan_to_num(),))
    return norm


@pytest.mark.parametrize("make", [lambda: Cleaning(3), cleaned_by_a_hook], ids=["its own forward", "a hook"])
def test_a_row_that_is_cleaned_is_innocent(make):
    norm, head = make(), nn.Linear(3, 1)
    x = torch.randn(8, 3)
    x[2] = NAN
    late = torch.zeros(8, 1)
    late[5] = NAN
    result = gg.Guard([norm, head]).backward((x, late), lambda b: (head(norm(b[0])) + b[1]).square().mean())
    assert [incident.row for incident in result.dropped] == [5]


def test_rows_that_batch_norm_mixes_into_all_others_are_known_before_it():
    norm = nn.BatchNorm1d(3)
    x = torch.randn(16, 3)
    x[[1, 4, 9]] = NAN
    result = gg.Guard(norm).backward(x, lambda x: norm(x).square().mean())
    assert [incident.row for incident in result.dropped] == [1, 4, 9]
    assert {incident.details["tests"] for incident in result.dropped} == {6}  # two anchors, three rows, two controls
    assert bool(norm.running_mean.isfinite().all())
