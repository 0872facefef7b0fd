"""What is wrong is said: what, why, and the fix."""

import pytest
import torch
from torch import nn

import gradgate as gg
from gradgate.errors import ArgumentIndexError, ArgumentTypeError, ArgumentValueError, NothingMatchedError


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Linear(2, 2)
        self.head = nn.Linear(2, 2)


NET = Net()
PARAMETER = nn.Parameter(torch.ones(3, 2))
CASES = [
    (lambda: gg.pin(nn.LazyLinear(2).weight, rows=[0]), ArgumentValueError, r"has no values yet(.|\n)*before the pin"),
    (lambda: gg.pin(torch.ones(2, 2, device="meta"), rows=[0]), ArgumentValueError, r"has no values yet"),
    (
        lambda: gg.freeze(NET, "encdoer.*"),
        NothingMatchedError,
        r"freeze\(\): 'encdoer\.\*' matches no parameter of Net",
    ),
    (lambda: gg.freeze(NET, "encdoer.*"), NothingMatchedError, r"Fix: 'encoder'   # did you mean 'encoder'"),
    (lambda: gg.freeze(NET, "head.*", "encoder.wieght"), NothingMatchedError, r"did you mean 'encoder\.weight'"),
    (lambda: gg.freeze(NET, lambda n, p: False), NothingMatchedError, r"<lambda>\(\) matches no parameter"),
    (lambda: gg.freeze(NET, "zzz"), NothingMatchedError, r"Why: the parameters are encoder\.weight, .*\nFix: print"),
    (lambda: gg.freeze(NET, nn.Linear(2, 2)), ArgumentValueError, "the module Linear does not belong to this Net"),
    (lambda: gg.freeze(NET, PARAMETER), ArgumentValueError, r"shape \(3, 2\) does not belong to this Net"),
    (lambda: gg.freeze(NET, 3), ArgumentTypeError, r"freeze\(\): the int 3 selects nothing"),
    (lambda: gg.freeze(PARAMETER), ArgumentTypeError, r"freeze\(\): `model` is a float32 tensor"),
    (lambda: gg.freeze(NET, statistics="yes"), ArgumentTypeError, "`statistics` is the str 'yes'"),
    (lambda: gg.freeze(nn.Sequential(nn.LazyLinear(2))), ArgumentValueError, r"0\.weight, 0\.bias has no values yet"),
    (lambda: gg.freeze(nn.Linear(2, 2, device="meta")), ArgumentValueError, "weight, bias has no values yet"),
    (lambda: gg.train_only(NET), ArgumentValueError, r"train_only\(\): nothing is named that should learn"),
    (lambda: gg.train_only(NET, "haed.*"), NothingMatchedError, r"train_only\(\): 'haed\.\*' matches no parameter"),
    (lambda: gg.freezing.thaw(NET, "haed.*"), NothingMatchedError, r"thaw\(\): 'haed\.\*' matches no parameter"),
    (lambda: gg.pin(PARAMETER), ArgumentValueError, r"pin\(\): neither `frozen` nor `rows` is given"),
    (lambda: gg.pin([1.0], rows=[0]), ArgumentTypeError, r"pin\(\): `parameter` is the list \[1\.0\]"),
    (lambda: gg.pin(torch.arange(3), rows=[0]), ArgumentTypeError, "is an int64 tensor .* of type Tensor"),
    (lambda: gg.pin(PARAMETER[0], rows=[0]), ArgumentValueError, "is no leaf, it was computed by SelectBackward0"),
    (lambda: gg.pin(PARAMETER, rows=[0, 3]), ArgumentIndexError, r"row 3 does not exist .*\nWhy: its rows are 0 to 2"),
    (lambda: gg.pin(PARAMETER, rows=[-4]), ArgumentIndexError, "row -4 does not exist"),
    (lambda: gg.pin(PARAMETER, rows=[0.5]), ArgumentTypeError, r"`rows` is the list \[0\.5\]"),
    (lambda: gg.pin(PARAMETER, rows=5), ArgumentTypeError, "`rows` is the int 5"),
    (lambda: gg.pin(PARAMETER, rows="ab"), ArgumentTypeError, "`rows` is the str 'ab'"),
    (lambda: gg.freeze(nn.ReLU()), NothingMatchedError, r"matches no parameter of ReLU\.\nWhy: the model has no"),
    (lambda: gg.pin(PARAMETER, rows=torch.tensor([True])), ArgumentTypeError, "`rows` is a bool tensor"),
    (lambda: gg.pin(PARAMETER, rows=torch.tensor([[0]])), ArgumentTypeError, "`rows` is an int64 tensor"),
    (lambda: gg.pin(nn.Parameter(torch.tensor(1.0)), rows=[0]), ArgumentIndexError, "Why: it has no rows"),
    (
        lambda: gg.pin(PARAMETER, frozen=torch.ones(3, 2)),
        ArgumentTypeError,
        r"Fix: frozen=frozen != 0",
    ),
    (lambda: gg.pin(PARAMETER, frozen=[True]), ArgumentTypeError, r"`frozen` is the list \[True\]"),
    (
        lambda: gg.pin(PARAMETER, frozen=torch.ones(3, dtype=torch.bool)),
        ArgumentValueError,
        r"`frozen` has shape \(3,\), the parameter \(3, 2\)\.\nWhy: .*\nFix: gg\.pin\(parameter, rows=frozen\.nonzero",
    ),
    (
        lambda: gg.pin(PARAMETER, frozen=torch.ones(2, 2, dtype=torch.bool)),
        ArgumentValueError,
        r"`frozen` has shape \(2, 2\), the parameter \(3, 2\)",
    ),
    (lambda: gg.trainable(PARAMETER), ArgumentTypeError, r"trainable\(\): `model` is"),
    (lambda: gg.trainable(NET, NET), ArgumentTypeError, r"trainable\(\): the module .* is no optimizer"),
    (lambda: gg.freezing.merge_rows("net"), ArgumentTypeError, r"merge_rows\(\): `model` is the str 'net'"),
]


@pytest.mark.parametrize(("call", "kind", "text"), CASES, ids=range(len(CASES)))
def test_messages(call, kind, text):
    with pytest.raises(kind, match=text):
        call()
    assert all(parameter.requires_grad for parameter in NET.parameters()), "a refused call froze something"
    assert not hasattr(PARAMETER, "_gradgate_watchers")


def test_a_module_without_parameters_is_told():
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    with pytest.raises(NothingMatchedError, match=r"module ReLU matches no parameter of Sequential\.\nWhy: it has no"):
        gg.freeze(model, model[1])
