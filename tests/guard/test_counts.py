"""How many forwards a step takes: none more while all is well, O(k log(n / k)) at worst.

With a hint that proves right: the step, a replay, two rows that pass, two control groups, one for each bad row, and the
step without them. All but three of them have a handful of rows.
"""

import math

import pytest
import torch
from torch import nn

import gradgate as gg


class Counting(nn.Module):
    def __init__(self, *layers):
        super().__init__()
        self.layers = nn.Sequential(*layers)
        self.calls = 0

    def forward(self, *args):
        self.calls += 1
        return self.layers(*args)


class Refusing(nn.Module):
    def forward(self, x):
        if bool((x[:, 0] > 1e4).any()):
            raise ValueError("too large")
        return x


def counted(*layers):
    model = Counting(*layers)
    return model, gg.Guard(model)


def test_a_healthy_step_runs_the_model_once():
    model, guard = counted(nn.Linear(3, 1))
    for size in (1, 8, 64):
        model.calls = 0
        guard.backward(torch.randn(size, 3), lambda x: model(x).mean())
        assert model.calls == 1


@pytest.mark.parametrize("bad", [1, 4, 16])
def test_a_fault_in_a_module_takes_few_forwards(bad):
    """Only the module that raised is searched; what it shows is then tested."""
    model, guard = counted(Refusing(), nn.Linear(3, 3), nn.BatchNorm1d(3))
    x = torch.randn(128, 3)
    x[torch.randperm(128)[:bad], 0] = 1e6
    assert len(guard.backward(x.clone(), lambda x: model(x).mean()).dropped) == bad
    assert model.calls == 6 + bad


@pytest.mark.parametrize("bad", [1, 4, 16])
def test_values_take_few_forwards(bad):
    model, guard = counted(nn.Linear(3, 3), nn.BatchNorm1d(3))
    x = torch.randn(128, 3)
    x[torch.randperm(128)[:bad]] = float("nan")
    assert len(guard.backward(x, lambda x: model(x).square().mean()).dropped) == bad
    assert model.calls == 6 + bad


@pytest.mark.parametrize("bad", [1, 4, 16])
def test_gradients_take_few_forwards(bad):
    model, guard = counted(nn.Linear(3, 3), nn.BatchNorm1d(3))
    zero = torch.ones(128)
    zero[torch.randperm(128)[:bad]] = 0
    batch = torch.randn(128, 3), zero
    model(batch[0])
    model.calls = 0
    result = guard.backward(batch, lambda b: (model(b[0]).square().sum(1) * b[1]).sqrt().mean())
    assert len(result.dropped) == bad
    assert model.calls == 6 + bad


@pytest.mark.parametrize("size", [64, 256])
@pytest.mark.parametrize("bad", [1, 4, 8])
def test_the_search_with_the_whole_function_keeps_its_bound(size, bad):
    """A gradient that is spoilt in the weight alone leaves only this search."""
    model = nn.Linear(2, 1, bias=False)
    model.weight.data.fill_(1e-30)
    calls = []
    x, scale = torch.ones(size, 2), torch.ones(size)
    marked = torch.randperm(size)[:bad]
    x[marked], scale[marked] = 1e30, 1e20

    def loss_fn(batch):
        calls.append(len(batch[0]))
        return (model(batch[0])[:, 0] * batch[1]).mean()

    result = gg.Guard(model).backward((x, scale), loss_fn)
    assert sorted(i.row for i in result.dropped) == sorted(marked.tolist())
    assert len(calls) <= 2 * bad * (math.log2(size / bad) + 2) + 12
    assert sum(calls) <= 4 * size + 2 * bad * size  # most probes are small


def test_counters_are_logged_in_every_step():
    model, logged = nn.Linear(3, 1), []
    guard = gg.Guard(model, log=lambda tag, value, step: logged.append((step, tag.removeprefix("gradgate/"), value)))
    x = torch.ones(4, 3)
    for bad in ([], [2], [0, 1]):
        guard.backward(x.index_fill(0, torch.tensor(bad, dtype=torch.int64), float("nan")), lambda x: model(x).mean())
    assert logged == [
        *[(0, "kept", 4), (0, "dropped", 0), (0, "dropped_total", 0)],
        *[(1, "kept", 3), (1, "dropped", 1), (1, "dropped_total", 1), (1, "bad_steps", 1)],
        *[(2, "kept", 2), (2, "dropped", 2), (2, "dropped_total", 3), (2, "bad_steps", 2)],
    ]


def test_a_logger_that_raises_leaves_everything_as_before_the_step():
    def log(tag, value, step):
        raise OSError("the network is gone")

    model = nn.Linear(3, 1)
    guard = gg.Guard(model, log=log)
    with pytest.raises(OSError, match="the network is gone"):
        guard.backward(torch.ones(4, 3), lambda x: model(x).mean())
    assert model.weight.grad is None
    assert guard.summary().steps == guard.global_step == 0


def test_a_logger_that_is_none():
    with pytest.raises(gg.GradgateError, match=r"`log` is (?s:.*)log=writer.add_scalar"):
        gg.Guard(nn.Linear(3, 1), log="tensorboard")
