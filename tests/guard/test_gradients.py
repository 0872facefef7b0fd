"""What happens to gradients besides being right: accumulation, tied, sparse, complex and foreign parameters."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import gradgate as gg


def twins(model):
    return model, copy.deepcopy(model)


def same_gradients(model, twin):
    pairs = list(zip(model.parameters(), twin.parameters(), strict=True))
    assert any(a.grad is not None for a, _ in pairs)
    return all(
        (a.grad is None and b.grad is None) or torch.equal(a.grad.to_dense(), b.grad.to_dense()) for a, b in pairs
    )


@pytest.mark.parametrize("bad_at", [0, 1, 2])
@pytest.mark.parametrize("set_to_none", [True, False])
def test_only_the_bad_samples_of_the_bad_micro_batch_vanish(bad_at, set_to_none):
    model, twin = twins(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)))
    batches = [torch.randn(8, 3) for _ in range(3)]
    batches[bad_at][5] = float("nan")
    guard = gg.Guard(model)
    model.zero_grad(set_to_none=set_to_none)
    for batch in batches:
        result = guard.backward(batch, lambda x: model(x).square().mean() / 3)
        twin(batch[result.kept]).square().mean().div(3).backward()
    assert same_gradients(model, twin)
    assert all(map(torch.equal, model.buffers(), twin.buffers()))


@pytest.mark.parametrize("way", ["step", "forward"])
def test_a_guard_inside_its_own_step_is_refused_and_no_gradient_is_lost(way):
    model = nn.Linear(3, 1)
    guard = gg.Guard(model)
    x = torch.randn(8, 3)
    guard.backward(x, lambda x: model(x).mean())
    earlier, before = model.weight.grad, model.weight.grad.clone()

    def loss_fn(x):
        if way == "step":
            guard.backward(x, lambda x: model(x).mean())
        else:
            guard.forward(x, model)
        return model(x).mean()

    with pytest.raises(gg.GradgateError, match="used inside one of its own steps"):
        guard.backward(x, loss_fn)
    assert model.weight.grad is earlier
    assert torch.equal(earlier, before)
    guard.backward(x, lambda x: model(x).mean())
    torch.testing.assert_close(model.weight.grad, 2 * before)


def test_the_gradient_stays_the_same_object():
    model = nn.Linear(2, 1)
    model.zero_grad()
    guard = gg.Guard(model)
    guard.backward(torch.ones(2, 2), lambda x: model(x).mean())
    first = model.weight.grad
    guard.backward(torch.tensor([[1.0, 1.0], [float("nan"), 0.0]]), lambda x: model(x).mean())
    assert model.weight.grad is first


def test_earlier_gradients_that_are_not_finite_are_not_this_steps_fault():
    model = nn.Linear(2, 1)
    model.weight.grad = torch.full((1, 2), float("inf"))
    result = gg.Guard(model).backward(torch.ones(4, 2), lambda x: model(x).mean())
    assert not result.dropped
    assert model.weight.grad.isinf().all()


def test_sparse_gradients():
    model, twin = twins(nn.EmbeddingBag(10, 3, sparse=True, mode="sum"))
    x = torch.randint(0, 10, (6, 2))
    weight = torch.ones(6)
    weight[4] = float("inf")
    guard = gg.Guard(model)
    good = [0, 1, 2, 3, 5]
    for _ in range(2):
        result = guard.backward((x, weight), lambda b: (model(b[0]).sum(1) * b[1]).mean())
        assert result.kept == good
        (twin(x[good]).sum(1) * weight[good]).mean().backward()
    assert model.weight.grad.is_sparse
    assert same_gradients(model, twin)


def test_sparse_and_dense_gradients_of_one_weight():
    model, twin = twins(nn.Embedding(5, 2, sparse=True))
    x = torch.randint(0, 5, (4,))
    guard = gg.Guard(model)
    for function in (lambda m, x: m(x).mean(), lambda m, x: (m.weight[x] ** 2).mean(), lambda m, x: m(x).mean()):
        guard.backward(x, lambda x, f=function: f(model, x))
        function(twin, x).backward()
    assert same_gradients(model, twin)


def test_complex_parameters():
    model = nn.Linear(2, 1, dtype=torch.complex64)
    x = torch.randn(5, 2, dtype=torch.complex64)
    x[3, 0] = complex("nan")
    result = gg.Guard(model).backward(x, lambda x: model(x).abs().square().mean())
    assert result.kept == [0, 1, 2, 4]
    assert model.weight.grad.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_other_precisions(dtype):
    model = nn.Linear(3, 2, dtype=dtype)
    x = torch.randn(6, 3, dtype=dtype)
    x[2] = float("inf")
    result = gg.Guard(model).backward(x, lambda x: model(x).square().mean())
    assert result.kept == [0, 1, 3, 4, 5]
    assert result.loss.dtype is dtype


def test_tied_weights_and_unused_ones():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.head, self.unused = nn.Embedding(6, 3), nn.Linear(3, 6, bias=False), nn.Linear(2, 2)
            self.head.weight = self.embed.weight

        def forward(self, x):
            return self.head(self.embed(x))

    model, twin = twins(Tied())
    x, weight = torch.randint(0, 6, (7,)), torch.ones(7)
    weight[0] = float("nan")
    gg.Guard(model).backward(
        (x, weight), lambda b: (F.cross_entropy(model(b[0]), b[0], reduction="none") * b[1]).mean()
    )
    F.cross_entropy(twin(x[1:]), x[1:]).backward()
    assert same_gradients(model, twin)
    assert model.unused.weight.grad is None


def test_frozen_parameters_stay_without_gradient():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
    model[0].requires_grad_(False)
    x = torch.randn(4, 3)
    x[0] = float("nan")
    gg.Guard(model).backward(x, lambda x: model(x).mean())
    assert model[0].weight.grad is None


def test_parameters_that_no_guarded_module_owns_are_taken_in():
    """A margin of the loss, say: its gradient must not keep what a failed try has left in it."""
    model, margin = nn.Linear(3, 2), nn.Parameter(torch.ones(2))
    margin.grad = torch.ones(2)
    x = torch.randn(6, 3)
    zero = torch.ones(6)
    zero[4] = 0

    def loss_fn(batch):
        return ((model(batch[0]) * margin).square().sum(1) * batch[1]).sqrt().mean()

    result = gg.Guard(model).backward((x, zero), loss_fn)
    assert result.kept == [0, 1, 2, 3, 5]
    found, margin.grad = margin.grad.clone(), torch.ones(2)
    model.zero_grad()
    loss_fn((x[result.kept], zero[result.kept])).backward()
    assert torch.equal(margin.grad, found)


def test_inputs_that_take_a_gradient():
    """As for adversarial examples: the gradient of a dropped sample's input is exactly 0."""
    model = nn.Linear(3, 1)
    x, zero = torch.randn(6, 3, requires_grad=True), torch.ones(6)
    zero[4] = 0
    x.grad = torch.ones(6, 3)

    def loss_fn(batch):
        return (model(batch[0]).square()[:, 0] * batch[1]).sqrt().mean()

    result = gg.Guard(model).backward((x, zero), loss_fn)
    found, x.grad = x.grad.clone(), torch.ones(6, 3)
    assert result.kept == [0, 1, 2, 3, 5]
    assert found[4].tolist() == [1, 1, 1]
    model.zero_grad()
    loss_fn((x[result.kept], zero[result.kept])).backward()
    assert torch.equal(x.grad, found)


def test_a_loss_whose_gradient_does_not_come_through_a_module():
    """The module runs, but the gradient is born at a weight that the loss uses itself."""
    model = nn.Linear(3, 3)
    x, zero = torch.randn(6, 3), torch.ones(6)
    zero[4] = 0

    def loss_fn(batch):
        x, zero = batch
        return model(x).detach().mean() + ((x @ model.weight).square().sum(1) * zero).sqrt().mean()

    result = gg.Guard(model).backward((x, zero), loss_fn)
    assert result.kept == [0, 1, 2, 3, 5]


def test_several_modules_are_guarded_together():
    encoder, head = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)), nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 1))
    twin_encoder, twin_head = copy.deepcopy(encoder), copy.deepcopy(head)
    x = torch.randn(8, 3)
    x[6] = float("nan")
    result = gg.Guard([encoder, head]).backward(x, lambda x: head(encoder(x)).square().mean())
    good = [row for row in range(8) if row != 6]
    twin_head(twin_encoder(x[good])).square().mean().backward()
    assert result.exact
    assert same_gradients(encoder, twin_encoder)
    assert same_gradients(head, twin_head)
    assert all(map(torch.equal, head.buffers(), twin_head.buffers()))


def test_several_outputs_and_losses():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.trunk, self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 1), nn.BatchNorm1d(4)

        def forward(self, x):
            h = self.trunk(x)
            return {"a": self.a(h), "b": (self.b(h), h.norm(dim=1))}

    model, twin = twins(Two())

    def loss_of(m, x):
        out = m(x)
        return out["a"].square().mean() + 0.5 * out["b"][0].abs().mean() + out["b"][1].mean()

    x = torch.randn(9, 4)
    x[[2, 7]] = float("inf")
    result = gg.Guard(model).backward(x, lambda x: loss_of(model, x))
    loss_of(twin, x[result.kept]).backward()
    assert result.kept == [0, 1, 3, 4, 5, 6, 8]
    assert same_gradients(model, twin)


def test_a_gradient_penalty_that_walks_back_inside_the_loss():
    """Such a loss cannot run without recording; the search must notice that."""
    model, twin = twins(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)))

    def loss_of(m, x):
        x = x.clone().requires_grad_()
        out = m(x)
        if bool((x > 1e3).any()):
            raise ValueError("too large")
        (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        return out.mean() + (slope.norm(dim=1) - 1).square().mean()

    x = torch.randn(8, 3)
    x[1], x[4] = 1e4, float("nan")
    result = gg.Guard(model).backward(x, lambda x: loss_of(model, x))
    assert result.kept == [0, 2, 3, 5, 6, 7]
    loss_of(twin, x[result.kept]).backward()
    assert same_gradients(model, twin)


def test_a_gradient_that_comes_back_to_where_the_way_back_ends_is_seen():
    """The model's own parameter works in its body, so the walk back ends at what its one child gave."""

    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale, self.soft = nn.Parameter(torch.ones(3)), nn.Softplus()

        def forward(self, x):
            return self.soft(x * self.scale)

    model, twin = twins(Scaled())
    x, weight = torch.randn(8, 3), torch.ones(8)
    weight[3] = 0

    def loss_of(model, rows):
        return (model(x[rows]) * weight[rows, None]).sum(1).sqrt().mean()

    result = gg.Guard(model).backward(torch.arange(8), lambda rows: loss_of(model, rows))
    assert [incident.row for incident in result.dropped] == [3]
    assert result.dropped[0].details["tried"] == "gradients that are not finite"
    loss_of(twin, torch.tensor(result.kept)).backward()
    assert same_gradients(model, twin)
