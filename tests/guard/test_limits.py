"""max_bad, patience, catch, min_kept, and what always passes: what the guard refuses, and what it leaves behind."""

import random

import pytest
import torch
from torch import nn

import gradgate as gg


def model_and_loss():
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Dropout(0.3), nn.Linear(3, 1))
    return model, lambda x: model(x).square().mean()


def spoilt(size, *bad):
    x = torch.randn(size, 3)
    x[list(bad)] = float("nan")
    return x


def everything(model):
    grads = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    tensors = [t.clone() for t in (*model.parameters(), *model.buffers())]
    return tensors, grads, torch.get_rng_state(), random.getstate()


def is_as(model, before):
    tensors, grads, state, python = everything(model)
    same_grads = all(
        (a is None) == (b is None) and (a is None or torch.equal(a, b)) for a, b in zip(grads, before[1], strict=True)
    )
    return (
        all(map(torch.equal, tensors, before[0]))
        and same_grads
        and torch.equal(state, before[2])
        and python == before[3]
    )


def test_more_than_max_bad_is_refused_with_a_table():
    model, loss_fn = model_and_loss()
    guard = gg.Guard(model, max_bad=0.25)
    guard.backward(torch.randn(8, 3), loss_fn)
    batch = spoilt(8, 1, 4, 6)
    before = everything(model)
    with pytest.raises(gg.TooManyBadSamples) as caught:
        guard.backward(batch, loss_fn, ids=list("abcdefgh"))
    assert [incident.row for incident in caught.value.incidents] == [1, 4, 6]
    text = str(caught.value)
    assert text.startswith("Guard: 3 of 8 samples are bad:\nrow  sample  stage")
    assert "\n4    e " in text
    assert "max_bad=0.25" in text
    assert is_as(model, before)


def test_the_last_exception_is_the_cause_of_the_refusal():
    model = nn.Linear(3, 1)
    batch = torch.randn(4, 3), torch.tensor([1, 1, 1, 0])
    with pytest.raises(gg.TooManyBadSamples) as caught:
        gg.Guard(model).backward(batch, raising(model, ValueError("not these")))
    assert str(caught.value.__cause__) == "not these"


def test_exactly_max_bad_is_accepted():
    model, loss_fn = model_and_loss()
    assert len(gg.Guard(model, max_bad=0.25).backward(spoilt(8, 1, 4), loss_fn).dropped) == 2


def test_max_bad_of_zero_accepts_none():
    model, loss_fn = model_and_loss()
    with pytest.raises(gg.TooManyBadSamples, match="1 of 8 samples are bad"):
        gg.Guard(model, max_bad=0).backward(spoilt(8, 1), loss_fn)


def test_the_patience_th_bad_step_in_a_row_is_refused():
    model, loss_fn = model_and_loss()
    guard = gg.Guard(model, patience=3)
    for _ in range(2):
        guard.backward(spoilt(8, 0), loss_fn)
    guard.backward(torch.randn(8, 3), loss_fn)  # a good step in between: the count starts again
    for _ in range(2):
        guard.backward(spoilt(8, 0), loss_fn)
    batch = spoilt(8, 5)
    before = everything(model)
    with pytest.raises(gg.TooManyBadSamples, match="3 steps in a row had bad samples") as caught:
        guard.backward(batch, loss_fn)
    assert [incident.row for incident in caught.value.incidents] == [5]
    assert is_as(model, before)


def test_patience_of_one_refuses_the_first():
    model, loss_fn = model_and_loss()
    with pytest.raises(gg.TooManyBadSamples):
        gg.Guard(model, patience=1).backward(spoilt(8, 0), loss_fn)


def raising(model, error):
    def loss_fn(batch):
        x, bad = batch
        out = model(x)
        if bool(bad.any()):
            raise error
        return out.mean()

    return loss_fn


def test_catch_narrows_what_may_be_blamed():
    model = nn.Linear(3, 1)
    batch = torch.randn(6, 3), torch.tensor([0, 0, 1, 0, 0, 0])
    guard = gg.Guard(model, catch=(ValueError,))
    assert [i.row for i in guard.backward(batch, raising(model, ValueError("x"))).dropped] == [2]
    with pytest.raises(KeyError, match="y"):
        guard.backward(batch, raising(model, KeyError("y")))
    assert [i.row for i in gg.Guard(model, catch=KeyError).backward(batch, raising(model, KeyError("z"))).dropped] == [
        2
    ]


class NeedsFour(nn.Module):
    """Raises what is not to be caught for few rows, as the search has them."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(3, 1)

    def forward(self, x):
        assert len(x) >= 4, "too few rows"
        if bool(x.isnan().any()):
            raise ValueError("nan")
        return self.inner(x)


@pytest.mark.parametrize("inside", [True, False])
def test_what_only_the_search_sets_off_is_not_raised_though_it_is_not_to_be_caught(inside):
    model = NeedsFour()

    def loss_fn(x):
        if not inside:
            assert len(x) >= 4, "too few rows"
            if bool(x.isnan().any()):
                raise ValueError("nan")
        return model(x).mean()

    x = torch.randn(8, 3)
    x[5] = float("nan")
    assert gg.Guard(model, catch=ValueError).backward(x, loss_fn).kept == [0, 1, 2, 3, 4, 6, 7]


@pytest.mark.parametrize(
    "error",
    [
        KeyboardInterrupt(),
        SystemExit(3),
        GeneratorExit(),
        MemoryError("no memory"),
        torch.OutOfMemoryError("CUDA out of memory"),
        RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory"),
        RuntimeError("CUDA error: device-side assert triggered"),
        torch.AcceleratorError("CUDA error: device-side assert triggered"),
    ],
    ids=lambda error: type(error).__name__,
)
@pytest.mark.parametrize("catch", [(Exception,), (BaseException,)])
def test_what_always_passes(error, catch):
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    model(torch.randn(4, 3)).sum().backward()
    batch = torch.randn(6, 3), torch.tensor([0, 0, 1, 0, 0, 0])
    before = everything(model)
    with pytest.raises(type(error)) as caught:
        gg.Guard(model, catch=catch).backward(batch, raising(model, error))
    assert caught.value is error
    if not isinstance(error, torch.AcceleratorError):  # there the device is dead; gradients are put back at least
        assert is_as(model, before)
    assert all(torch.equal(p.grad, grad) for p, grad in zip(model.parameters(), before[1], strict=True))


def test_memory_that_runs_out_in_the_search_passes_as_well():
    model = nn.Linear(3, 1)
    calls = []

    def loss_fn(x):
        calls.append(len(x))
        if len(calls) > 1:
            raise torch.OutOfMemoryError("out of memory")
        return model(x).mean()

    with pytest.raises(torch.OutOfMemoryError):
        gg.Guard(model).backward(spoilt(8, 2), loss_fn)


def test_min_kept_makes_no_step_where_too_few_are_left():
    model, loss_fn = model_and_loss()
    guard = gg.Guard(model, min_kept=2)
    model(torch.randn(4, 3)).sum().backward()
    batch = spoilt(2, 0)
    before = everything(model)
    result = guard.backward(batch, loss_fn)
    assert result.kept == []
    assert [i.row for i in result.dropped] == [0]
    assert result.loss.isnan()
    assert result.loss.shape == ()
    assert not result.exact
    assert result.reason == "only 1 of 2 samples are left, fewer than min_kept=2: no step was made"
    assert is_as(model, before)
