"""Losses as totals and counts: the mean of a window is that of the same run on data without the bad samples."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import gradgate as gg
from gradgate import losses

FAULTS = ("nan", "raise", "gradient", "count")


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))


def rows_of(size, faults, seed):
    """Give rows of features, a token count, and a fault."""
    x = torch.randn(size, 3, generator=torch.Generator().manual_seed(seed))
    counts = torch.arange(1.0, size + 1)
    marks = torch.zeros(size)
    for row, fault in faults.items():
        marks[row] = 1 + FAULTS.index(fault)
        if fault == "nan":
            x[row, 1] = float("nan")
        if fault == "count":
            counts[row] = float("inf")
    return x, counts, marks


def total_of(model, batch):
    x, counts, marks = batch
    if bool((marks == 2).any()):
        raise ValueError("a bad row")
    safe = torch.where(marks == 3, 0.0, 1.0)
    squares = model(x)[:, 0].square() * (safe * (1 + 0 * model(x)[:, 0])).sqrt()
    return (squares * counts.nan_to_num(posinf=0.0)).sum(), counts.sum()


micro_batches = st.lists(
    st.tuples(st.integers(4, 7), st.dictionaries(st.integers(0, 3), st.sampled_from(FAULTS), max_size=2)),
    min_size=1,
    max_size=3,
)


@pytest.mark.slow
@settings(deadline=None, max_examples=25)
@given(micro_batches)
def test_the_law_over_windows(cut):
    model = network()
    reference = copy.deepcopy(model)
    guard, exact = gg.Guard(model), losses.ExactMean(reference)
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for net in (model, reference)]
    for turn in range(2):
        for optimizer in optimizers:
            optimizer.zero_grad()
        for number, (size, faults) in enumerate(cut):
            batch = rows_of(size, faults, seed=10 * turn + number)
            kept = [row for row in range(size) if row not in faults]
            result = guard.backward(batch, lambda batch: total_of(model, batch))
            total, count = total_of(reference, tuple(part[kept] for part in batch))
            exact.backward(total, count)
            assert result.kept == kept
            assert torch.equal(result.loss, (total.detach().double() / count).float())
        assert torch.equal(guard.finish(), exact.finish())
        for optimizer in optimizers:
            optimizer.step()
    for ours, theirs in zip(model.state_dict().values(), reference.state_dict().values(), strict=True):
        assert torch.equal(ours, theirs)


def test_a_window_in_which_nothing_is_kept():
    model = nn.Linear(3, 1)
    guard = gg.Guard(model, max_bad=1.0, min_kept=2)
    x = torch.ones(2, 3)
    x[0] = float("nan")
    assert guard.backward(x, lambda x: (model(x).sum(), len(x))).kept == []
    assert guard.finish() == 0
    assert model.weight.grad is None
    result = guard.backward(x[1:].repeat(2, 1), lambda x: (model(x).sum(), 0))
    assert result.loss == 0
    assert guard.finish() == 0
    assert bool(model.weight.grad.isfinite().all())


def test_with_a_scaler():
    model = nn.Linear(3, 1)
    reference = copy.deepcopy(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    guard = gg.Guard(model)
    x = torch.randn(6, 3)
    for part in (x[:4], x[4:]):
        guard.backward(part, lambda x: (model(x).square().sum(), len(x)), scaler=scaler)
    guard.finish()
    scaler.unscale_(optimizer)
    reference(x).square().mean().backward()
    torch.testing.assert_close(model.weight.grad, reference.weight.grad)


def test_a_parameter_that_no_module_owns_is_divided_too():
    model, scale = nn.Linear(3, 1), nn.Parameter(torch.ones(()))
    guard = gg.Guard(model)
    guard.backward(torch.ones(4, 3), lambda x: ((model(x) * scale).sum(), len(x)))
    guard.finish()
    torch.testing.assert_close(scale.grad, model(torch.ones(1, 3)).squeeze().detach())


@pytest.mark.parametrize("steps", [[], ["mean"], ["total", "mean"], ["total", "finish"]])
def test_finish_without_totals(steps):
    model = nn.Linear(3, 1)
    guard = gg.Guard(model)
    for step in steps:
        if step == "finish":
            guard.finish()
        else:
            guard.backward(torch.ones(4, 3), lambda x: model(x).mean() if step == "mean" else (model(x).sum(), len(x)))  # noqa: B023
    words = "a mean loss" if "mean" in steps else "nothing: there was no step"
    with pytest.raises(gg.GradgateError, match=rf"`loss_fn` gave {words}(?s:.*)losses.sum\(\), len\(losses\)"):
        guard.finish()


def test_totals_after_means():
    model = nn.Linear(3, 1)
    guard = gg.Guard(model)
    guard.backward(torch.ones(4, 3), lambda x: model(x).mean())
    guard.backward(torch.ones(4, 3), lambda x: (model(x).sum(), len(x)))
    assert guard.finish() == model(torch.ones(1, 3)).detach()


@pytest.mark.parametrize("count", [None, "4", torch.ones(4)])
def test_a_count_that_is_none(count):
    model = nn.Linear(3, 1)
    with pytest.raises(gg.GradgateError, match=r"a tuple of (?s:.*)return losses.sum\(\), len\(losses\)"):
        gg.Guard(model).backward(torch.ones(4, 3), lambda x: (model(x).sum(), count))


def test_a_saved_guard_has_no_open_window():
    model = nn.Linear(3, 1)
    guard = gg.Guard(model)
    guard.backward(torch.ones(4, 3), lambda x: (model(x).sum(), len(x)))
    assert not any(isinstance(value, torch.Tensor) for value in guard.state_dict().values())
    assert copy.deepcopy(guard).summary() == guard.summary()


def test_limit_a_forgotten_finish_leaves_the_gradient_of_the_sum():
    model = nn.Linear(3, 1)
    gg.Guard(model).backward(torch.ones(4, 3), lambda x: (model(x).sum(), len(x)))
    assert model.bias.grad == 4


def test_a_sample_of_a_total_is_replayed(tmp_path):
    model = nn.Linear(3, 1)
    ledger = gg.Ledger(tmp_path / "run.ledger", payload=True)
    x = torch.ones(4, 3)
    x[2] = float("nan")

    def total(x):
        return model(x).sum(), len(x)

    result = gg.Guard(model, ledger=ledger, payload=True).backward(x, total)
    assert gg.replay(ledger, result.dropped[0].id, total).verdict == "same"


def test_a_mean_is_divided_by_the_micro_batches_and_the_result_is_not():
    """As `(loss / 4).backward()`, bit by bit; losses are those of the samples, and totals are left to `finish`."""
    model, plain = network(), network()
    guard = gg.Guard(model)
    for seed in range(4):
        x = torch.randn(5, 3, generator=torch.Generator().manual_seed(seed))
        bad = torch.cat([x, torch.full((1, 3), float("nan"))])
        result = guard.backward(bad, lambda x: model(x).square().flatten(), accumulate=4)
        loss = plain(x).square().flatten().mean()
        (loss / 4).backward()
        assert torch.equal(result.loss, loss.detach())
        assert torch.equal(result.losses.mean(), loss.detach())
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(model.parameters(), plain.parameters(), strict=True))
    model.zero_grad()
    guard.backward(x, lambda x: (model(x).sum(), len(x)), accumulate=4)
    guard.finish()
    assert model[2].bias.grad.item() == pytest.approx(1.0)


def test_none_is_a_step_without_samples():
    model, logged = network(), []
    guard = gg.Guard(model, log=lambda *entry: logged.append(entry))
    guard.backward(rows_of(4, {}, 0), lambda batch: total_of(model, batch))
    before = copy.deepcopy([parameter.grad for parameter in model.parameters()])
    result = guard.backward(None, lambda batch: total_of(model, batch))
    assert (result.kept, result.dropped) == ([], ())
    assert all(torch.equal(parameter.grad, grad) for parameter, grad in zip(model.parameters(), before, strict=True))
    assert (guard.summary().steps, guard.summary().samples, guard.global_step) == (2, 4, 2)
    assert logged[3:] == [("gradgate/kept", 0, 1), ("gradgate/dropped", 0, 1), ("gradgate/dropped_total", 0, 1)]
    guard.finish()
