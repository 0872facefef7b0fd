"""`Guard(clip_samples=...)`: each sample's gradient is clipped, then the mean is taken; bad samples leave no trace."""

import copy
import math
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

import gradgate as gg

NAN = float("nan")


@pytest.fixture
def mlp():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)).double()


def gradients_of(model):
    return {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}


def clipped_by_hand(model, samples, loss_fn, largest):
    """Loop over the samples with autograd: the gradient of each, scaled to at most `largest`, and the mean of all."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    totals, clipped = [torch.zeros_like(p) for p in parameters], 0
    for sample in samples:
        gradients = torch.autograd.grad(loss_fn(sample), parameters, allow_unused=True)
        norm = math.sqrt(sum(g.abs().square().sum().item() for g in gradients if g is not None))
        clipped += norm > largest
        for total, gradient in zip(totals, gradients, strict=True):
            if gradient is not None:
                total += gradient * min(1.0, largest / norm if norm else 1.0) / len(samples)
    return totals, clipped


def rows(batch):
    return [{key: value[row : row + 1] for key, value in batch.items()} for row in range(len(batch["x"]))]


def assert_close(model, totals):
    for (name, parameter), total in zip(model.named_parameters(), totals, strict=True):
        torch.testing.assert_close(parameter.grad, total, msg=lambda text, name=name: f"{name}: {text}")


def cross_entropy(model):
    return lambda batch: F.cross_entropy(model(batch["x"]), batch["y"])


def one_by_one(loss_fn):
    """The same loss, of which vmap knows nothing: it reads a number."""

    def loss(batch):
        assert batch["x"].sum().item() is not None
        return loss_fn(batch)

    return loss


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(
    size=st.integers(1, 9),
    largest=st.sampled_from([1e-3, 0.1, 0.5, 1.0, 100.0]),
    bad=st.sets(st.integers(0, 8)),
    single=st.booleans(),
    accumulate=st.sampled_from([1, 3]),
    seed=st.integers(0, 1000),
)
def test_equal_to_the_loop_over_the_good_samples(size, largest, bad, single, accumulate, seed):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)).double()
    batch = {"x": 3 * torch.randn(size, 3, dtype=torch.float64), "y": torch.randint(0, 2, (size,))}
    bad = {row for row in bad if row < size}
    batch["x"][list(bad)] = NAN
    good = [sample for row, sample in enumerate(rows(batch)) if row not in bad]
    loss_fn = one_by_one(cross_entropy(model)) if single else cross_entropy(model)
    guard = gg.Guard(model, clip_samples=largest, max_bad=1.0)
    if not good:
        with pytest.raises(gg.errors.TooManyBadSamples):
            guard.backward(batch, loss_fn)
        assert all(p.grad is None for p in model.parameters())
        return
    totals, clipped = clipped_by_hand(model, good, loss_fn, largest)
    result = guard.backward(batch, loss_fn, accumulate=accumulate)
    assert result.kept == [row for row in range(size) if row not in bad]
    assert (result.clipped, result.exact) == (clipped, True)
    assert_close(model, [total / accumulate for total in totals])
    losses = torch.stack([loss_fn(sample).detach() for sample in good])
    torch.testing.assert_close(result.losses, losses)
    torch.testing.assert_close(result.loss, losses.mean())


class Picky(nn.Module):
    """Raises for marked rows, gives a NaN gradient for others, and draws numbers."""

    def __init__(self, dropout):
        super().__init__()
        self.first, self.drop, self.last = nn.Linear(3, 4), nn.Dropout(dropout), nn.Linear(4, 1)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x, read):
        self.calls += 1
        if read and bool((x > 1e6).any()):
            raise ValueError("out of range")
        hidden = self.drop(self.first(x.clamp(-10, 10)))
        marks = torch.where(x[:, :1] < -1e6, 0.0, 1.0)
        return self.last((marks * (1 + hidden.square())).sqrt())


@pytest.mark.slow
@pytest.mark.parametrize("read", [True, False])
@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_bit_identical_to_the_step_without_the_bad_samples(read, dropout):
    def step(batch):
        torch.manual_seed(1)
        random.seed(1)
        model = Picky(dropout)
        guard = gg.Guard(model, clip_samples=0.5)
        result = guard.backward(batch, lambda x: model(x, read).square().mean())
        result = guard.backward(batch, lambda x: model(x, read).square().mean())
        return result, gradients_of(model), model.calls, torch.get_rng_state()

    batch = torch.randn(12, 3)
    bad = [1, 4, 7] if read else [4, 7]
    batch[7], batch[4] = NAN, -1e9
    if read:
        batch[1] = 1e9
    keep = [row for row in range(12) if row not in bad]
    result, gradients, calls, chance = step(batch)
    clean, expected, clean_calls, clean_chance = step(batch[keep])
    assert result.kept == keep
    assert torch.equal(result.loss, clean.loss)
    assert torch.equal(result.losses, clean.losses)
    assert (result.clipped, calls.item()) == (clean.clipped, clean_calls.item())
    assert torch.equal(chance, clean_chance)
    assert all(torch.equal(gradients[name], expected[name]) for name in expected)
    causes = (
        {"exception", "non-finite loss", "non-finite gradient"} if read else {"non-finite loss", "non-finite gradient"}
    )
    assert {incident.cause for incident in result.dropped} == causes


def test_a_sample_that_only_fails_alone_is_bad(mlp):
    """All labels ignored: NaN for the sample, although the mean over the batch is finite."""
    batch = {"x": torch.randn(4, 3, dtype=torch.float64), "y": torch.tensor([0, -100, 1, 0])}
    loss_fn = cross_entropy(mlp)
    totals, _ = clipped_by_hand(mlp, [s for row, s in enumerate(rows(batch)) if row != 1], loss_fn, 0.1)
    assert gg.Guard(mlp, clip_samples=0.1).backward(batch, loss_fn).kept == [0, 2, 3]
    assert_close(mlp, totals)


def test_gradients_are_added_and_hooks_run_once(mlp):
    batch = {"x": torch.randn(4, 3, dtype=torch.float64), "y": torch.tensor([0, 1, 1, 0])}
    totals, _ = clipped_by_hand(mlp, rows(batch), cross_entropy(mlp), 0.1)
    calls = []
    mlp[0].bias.register_hook(lambda grad: calls.append(1) or 2 * grad)
    for _ in range(2):
        gg.Guard(mlp, clip_samples=0.1).backward(batch, one_by_one(cross_entropy(mlp)))
        gg.Guard(mlp, clip_samples=0.1).backward(batch, cross_entropy(mlp))
    assert len(calls) == 4
    assert_close(mlp, [total * (8 if number == 1 else 4) for number, total in enumerate(totals)])


@pytest.mark.parametrize("single", [True, False])
def test_what_is_not_used_or_frozen_has_no_gradient(single):
    model = nn.ModuleDict({"used": nn.Linear(3, 2), "unused": nn.Linear(3, 2), "frozen": nn.Linear(2, 2)})
    model["frozen"].requires_grad_(False)
    loss_fn = cross_entropy(lambda x: model["frozen"](model["used"](x)))
    batch = {"x": torch.randn(4, 3), "y": torch.tensor([0, 1, 1, 0])}
    gg.Guard(model, clip_samples=0.1).backward(batch, one_by_one(loss_fn) if single else loss_fn)
    assert {name for name, grad in gradients_of(model).items() if grad is not None} == {"used.weight", "used.bias"}


def test_recurrent_models_tied_weights_and_batches_of_lists():
    torch.manual_seed(0)
    lstm, head = nn.LSTM(4, 4, batch_first=True), nn.Linear(4, 6)
    words = nn.Embedding(6, 4)
    words.weight = head.weight
    model = nn.ModuleList([words, lstm, head])

    def loss_fn(batch):
        tokens = torch.stack([tokens for tokens, _ in batch])
        return F.cross_entropy(head(lstm(words(tokens))[0][:, -1]), torch.tensor([label for _, label in batch]))

    batch = [(torch.randint(0, 6, (5,)), row % 6) for row in range(7)]
    totals, clipped = clipped_by_hand(model, [[sample] for sample in batch], loss_fn, 0.8)
    result = gg.Guard([words, lstm, head], clip_samples=0.8).backward(batch, loss_fn)
    assert 0 < clipped == result.clipped
    assert_close(model, totals)


def test_many_parameters_go_in_several_passes(mlp, monkeypatch):
    monkeypatch.setattr("gradgate.guard._clip.AT_ONCE", 70)
    batch = {"x": torch.randn(7, 3, dtype=torch.float64), "y": torch.randint(0, 2, (7,))}
    totals, _ = clipped_by_hand(mlp, rows(batch), cross_entropy(mlp), 0.1)
    gg.Guard(mlp, clip_samples=0.1).backward(batch, cross_entropy(mlp))
    assert_close(mlp, totals)


def test_large_gradients_in_single_precision_are_clipped_and_not_dropped():
    model = nn.Linear(2, 1, bias=False)
    x = torch.tensor([[1e30, 1e30], [1e-3, 0.0]])
    result = gg.Guard(model, clip_samples=1.0).backward(x, lambda x: model(x).mean())
    assert (result.kept, result.clipped) == ([0, 1], 1)
    torch.testing.assert_close(model.weight.grad, torch.tensor([[0.5**1.5 + 5e-4, 0.5**1.5]]))


def test_a_buffer_that_is_assigned_is_what_single_passes_leave():
    class Counts(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(3, 1)
            self.register_buffer("seen", torch.zeros(()))

        def forward(self, x):
            self.seen = self.seen + x.detach().sum()
            return self.linear(x)

    model, x = Counts(), torch.randn(5, 3)
    gg.Guard(model, clip_samples=0.1).backward(x, lambda x: model(x).square().mean())
    torch.testing.assert_close(model.seen, x.sum())


def test_batches_split_for_lack_of_memory(mlp):
    batch = {"x": torch.randn(6, 3, dtype=torch.float64), "y": torch.randint(0, 2, (6,))}
    totals, clipped = clipped_by_hand(mlp, rows(batch), cross_entropy(mlp), 0.4)
    guard = gg.Guard(mlp, clip_samples=0.4, out_of_memory="split")
    select, failed = guard._reader.taking, []

    def limited(batch, size):
        if size > 4 and not failed:
            failed.append(size)
            raise torch.OutOfMemoryError("out of memory")
        return select(batch, size)

    guard._reader.taking = limited
    result = guard.backward(batch, cross_entropy(mlp))
    assert (failed, result.clipped, result.exact) == ([6], clipped, True)
    assert_close(mlp, totals)


def test_nothing_in_a_batch(mlp):
    guard = gg.Guard(mlp, clip_samples=1.0)
    assert not guard.backward(torch.zeros(0, 3), lambda x: mlp(x).mean()).stepped
    assert not guard.backward(None, lambda x: mlp(x).mean()).stepped
    assert all(p.grad is None for p in mlp.parameters())


def test_copies_and_no_clipping(mlp):
    assert copy.deepcopy(gg.Guard(mlp, clip_samples=2)).clip_samples == 2.0
    result = gg.Guard(mlp).backward(torch.ones(2, 3).double(), lambda x: mlp(x).mean())
    assert result.clipped == 0


def test_an_interrupt_leaves_the_parameters_in_their_modules(mlp, monkeypatch):
    parameters = list(mlp.parameters())

    def torn(module, values, arguments):
        mlp[0]._parameters["weight"] = torch.zeros(5, 3)
        raise KeyboardInterrupt

    monkeypatch.setattr("gradgate.guard._clip.functional_call", torn)
    with pytest.raises(KeyboardInterrupt):
        gg.Guard(mlp, clip_samples=1.0).backward(torch.ones(2, 3).double(), lambda x: mlp(x).mean())
    assert all(one is other for one, other in zip(mlp.parameters(), parameters, strict=True))


# --- Refusals -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("given", [0, -1.0, NAN, math.inf, "1", True])
def test_a_norm_that_is_none(given):
    with pytest.raises(ValueError, match=r"`clip_samples` is .*\nWhy: it is the largest 2-norm of the gradient"):
        gg.Guard(nn.Linear(1, 1), clip_samples=given)


def test_samples_that_meet_in_a_batch_norm():
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    guard, x = gg.Guard(model, clip_samples=1.0), torch.randn(4, 3)
    text = "`1` \\(BatchNorm1d\\) is in training mode, and the guard has `clip_samples`.\nWhy: it mixes the samples"
    with pytest.raises(ValueError, match=text):
        guard.backward(x, lambda x: model(x).mean())
    model[1].eval()
    assert guard.backward(x, lambda x: model(x).mean()).kept == [0, 1, 2, 3]
    model[1] = nn.BatchNorm1d(4, track_running_stats=False).eval()
    with pytest.raises(ValueError, match="mixes the samples"):
        guard.backward(x, lambda x: model(x).mean())


def test_a_scaler_a_total_and_a_batch_with_gradients(mlp):
    guard, x = gg.Guard(mlp.float(), clip_samples=1.0), torch.randn(4, 3)
    with pytest.raises(ValueError, match="`scaler` is given, and the guard has `clip_samples`"):
        guard.backward(x, lambda x: mlp(x).mean(), scaler=torch.amp.GradScaler("cpu"))
    with pytest.raises(TypeError, match="returned a total and its count, and the guard has `clip_samples`"):
        guard.backward(x, lambda x: (mlp(x).sum(), 4))
    with pytest.raises(ValueError, match=r"the batch has .* that requires a gradient"):
        guard.backward(x.requires_grad_(), lambda x: mlp(x).mean())
    assert all(p.grad is None for p in mlp.parameters())


def test_parameters_that_are_not_taken_from_the_model(mlp):
    x, other, kept = torch.randn(4, 3).double(), nn.Linear(2, 1).double(), list(mlp.parameters())
    with pytest.raises(ValueError, match=r"does not take from the guarded model: `2.bias`, `2.weight`, `0.bias` and 1"):
        gg.Guard(mlp, clip_samples=1.0).backward(x, lambda x: mlp(x).mean() + sum(p.square().sum() for p in kept))
    with pytest.raises(ValueError, match=r"guarded model: a float64 tensor(.|\n)*Fix: gg.Guard\(\[model, head\]"):
        gg.Guard(mlp, clip_samples=1.0).backward(x, lambda x: other(mlp(x)).mean())
    guard = gg.Guard(mlp, clip_samples=1.0)
    guard.backward(x, lambda x: mlp(x).mean() + sum(p.square().sum() for p in mlp.parameters()))
    totals, _ = clipped_by_hand(
        mlp, list(x.split(1)), lambda x: mlp(x).mean() + sum(p.square().sum() for p in mlp.parameters()), 1.0
    )
    assert_close(mlp, totals)


def test_sparse_gradients():
    model = nn.Embedding(5, 2, sparse=True)
    with pytest.raises(ValueError, match="the gradient of `weight` is sparse"):
        gg.Guard(model, clip_samples=1.0).backward(torch.arange(4), lambda i: model(i).mean())


def test_recording_is_off_and_nothing_learns(mlp):
    x = torch.randn(4, 3).double()
    with torch.no_grad(), pytest.raises(RuntimeError, match="does not require grad"):
        gg.Guard(mlp, clip_samples=1.0).backward(x, lambda x: mlp(x).mean())
    mlp.requires_grad_(False)
    with pytest.raises(RuntimeError, match="does not require grad"):
        gg.Guard(mlp, clip_samples=1.0).backward(x, lambda x: mlp(x).mean())
