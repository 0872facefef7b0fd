"""Exceptions that cannot be printed or written to are faults like any other, and come out as they are."""

import pytest
import torch
from torch import nn

import gradgate as gg
from tests.odd_exceptions import Mute, Sealed


class Strict(nn.Module):
    def __init__(self, error):
        super().__init__()
        self.inner = nn.Linear(3, 1)
        self.error = error

    def forward(self, x):
        if bool(x.isnan().any()):
            raise self.error()
        return self.inner(x)


def spoilt():
    x = torch.randn(8, 3)
    x[2] = float("nan")
    return x


ERRORS = pytest.mark.parametrize("error", [Mute, Sealed])


@ERRORS
def test_it_costs_one_sample(error):
    model = Strict(error)
    result = gg.Guard(model).backward(spoilt(), lambda x: model(x).mean())
    assert result.kept == [0, 1, 3, 4, 5, 6, 7]
    assert result.dropped[0].exception_type.endswith(error.__name__)
    if error is not Sealed:
        assert result.dropped[0].message.endswith(f"{error.__name__} without a readable text")


@ERRORS
def test_a_fault_of_the_code_is_raised_as_it_is(error):
    model = Strict(error)
    with pytest.raises(error) as caught:
        gg.Guard(model).backward(torch.full((8, 3), float("nan")), lambda x: model(x).mean())
    assert "every sample that was tried fails in the same way" in str(caught.value.__cause__)
