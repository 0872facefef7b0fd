"""ExactMean: the gradient of the whole window's mean, however it is cut into micro-batches and ranks."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F

import gradgate as gg
from gradgate import losses

ROOT = Path(__file__).parents[2]


def model_and_data(n=12):
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.Tanh(), torch.nn.Linear(5, 3)).double()
    return model, torch.randn(n, 4, dtype=torch.float64), torch.randint(0, 3, (n,))


def gradients(model):
    return [p.grad.clone() for p in model.parameters()]


@given(st.lists(st.integers(0, 5), min_size=1, max_size=5))
def test_any_cut_into_micro_batches_gives_the_gradient_of_the_whole(sizes):
    model, x, target = model_and_data(max(sum(sizes), 1))
    exact = losses.ExactMean(model)
    start = 0
    for size in sizes:
        rows = slice(start, start + size)
        exact.backward(F.cross_entropy(model(x[rows]), target[rows], reduction="sum"), size)
        start += size
    mean = exact.finish()
    ours = gradients(model)
    model.zero_grad()
    if not start:
        assert mean == 0
        assert all((g == 0).all() for g in ours)
        return
    whole = F.cross_entropy(model(x[:start]), target[:start])
    whole.backward()
    torch.testing.assert_close(mean, whole.detach().float())
    for a, b in zip(ours, gradients(model), strict=True):
        torch.testing.assert_close(a, b)


def test_one_micro_batch_is_the_gradient_of_the_sum_divided_once_bit_for_bit():
    model, x, target = model_and_data(8)
    exact = losses.ExactMean(model)
    exact.backward(F.cross_entropy(model(x), target, reduction="sum"), 8)
    exact.finish()
    ours = gradients(model)
    model.zero_grad()
    F.cross_entropy(model(x), target, reduction="sum").backward()
    assert all(torch.equal(a, b / 8) for a, b in zip(ours, gradients(model), strict=True))


def test_tokens_and_weights_are_units_too():
    """Seven valid tokens in two micro-batches, six and one: the mean of means is off by 43 %, this is not."""
    model, x, target = model_and_data(9)
    keep = torch.tensor([True] * 6 + [True, False, False])
    exact = losses.ExactMean(model)
    for rows in (slice(0, 6), slice(6, 9)):
        per_token = F.cross_entropy(model(x[rows]), target[rows], reduction="none")
        exact.backward(gg.masked.sum(per_token, keep=keep[rows]), keep[rows].sum())
    exact.finish()
    ours = gradients(model)
    model.zero_grad()
    F.cross_entropy(model(x[:7]), target[:7]).backward()
    for a, b in zip(ours, gradients(model), strict=True):
        torch.testing.assert_close(a, b)


def test_half_precision_counts_beyond_what_it_can_hold():
    model = torch.nn.Linear(2, 1, bias=False).to(torch.bfloat16)
    exact = losses.ExactMean(model)
    for _ in range(3):
        exact.backward(model(torch.ones(1, 2, dtype=torch.bfloat16)).sum() * 100_001, 100_001)
    exact.finish()
    torch.testing.assert_close(model.weight.grad, torch.ones_like(model.weight))


@pytest.mark.slow
def test_with_a_grad_scaler():
    model, x, target = model_and_data(6)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    exact = losses.ExactMean(model)
    exact.backward(F.cross_entropy(model(x), target, reduction="sum"), 6, scaler=scaler)
    exact.finish()
    scaler.unscale_(optimizer)
    ours = gradients(model)
    model.zero_grad()
    F.cross_entropy(model(x), target).backward()
    for a, b in zip(ours, gradients(model), strict=True):
        torch.testing.assert_close(a, b)


def test_wrong_arguments():
    with pytest.raises(gg.errors.ArgumentTypeError, match=r"(?s)`model` is None.*ExactMean\(model\)"):
        losses.ExactMean(None)
    exact = losses.ExactMean(torch.nn.Linear(1, 1))
    with pytest.raises(gg.errors.ArgumentValueError, match=r"(?s)shape \(2,\).*per_sample.sum\(\), len\(per_sample\)"):
        exact.backward(torch.ones(2, requires_grad=True), 2)
    loss = exact.model(torch.ones(1, 1)).sum()
    with pytest.raises(gg.errors.ArgumentTypeError, match=r"(?s)`count` is the str 'two'.*len\(per_sample\)"):
        exact.backward(loss, "two")
    with pytest.raises(
        gg.errors.ArgumentValueError, match=r"(?s)`count` is an int64 tensor of shape \(1,\).*count.sum"
    ):
        exact.backward(loss, torch.tensor([2]))
    with pytest.raises(gg.errors.ArgumentValueError, match=r"(?s)no graph to go back.*model\(batch\).sum\(\) \* 0, 0"):
        exact.backward(torch.zeros(()), 0)
    assert exact.model.weight.grad is None  # nothing was added half
    with pytest.raises(gg.errors.ArgumentValueError, match=r"(?s)no micro-batch was added.*exact.backward"):
        exact.finish()


@pytest.mark.distributed
@pytest.mark.parametrize("wrapper", ["ddp", "fsdp"])
def test_unequal_ranks_give_the_gradient_of_the_union(wrapper):
    """Two ranks with 6 and 1 valid samples, in two micro-batches, the first under no_sync."""
    if wrapper == "fsdp" and torch.__version__ < "2.9":
        pytest.skip(f"FSDP2 takes the mean of gradients over Gloo, not torch {torch.__version__}")
    script = Path(__file__).parent / "exact_mean_ranks.py"
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script), wrapper]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    done = subprocess.run(run, capture_output=True, text=True, env=environment, timeout=200, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("equal to the single process") == 2
