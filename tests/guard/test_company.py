"""In company of torch's other machinery: autocast, GradScaler, torch.compile, checkpointing, moved models."""

import copy
import warnings

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import gradgate as gg


def net():
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))


def same(model, twin):
    gradients = all(torch.equal(a.grad, b.grad) for a, b in zip(model.parameters(), twin.parameters(), strict=True))
    return gradients and all(map(torch.equal, model.buffers(), twin.buffers()))


class Refusing(nn.Module):
    def forward(self, x):
        if bool((x.detach().abs() > 1e4).any()):
            raise ValueError("too large")
        return x


def spoilt(value, *rows):
    x = torch.randn(10, 4)
    x[list(rows)] = value
    return x


@pytest.mark.parametrize("value", [float("nan"), 1e6])
@pytest.mark.parametrize("outside", [True, False])
def test_autocast(value, outside):
    model = nn.Sequential(nn.Linear(4, 4), Refusing(), *net())
    twin = copy.deepcopy(model)
    x = spoilt(value, 3, 8)

    def loss_of(m, x):
        with torch.autocast("cpu", torch.bfloat16):
            return m(x).square().mean()

    def step():
        return gg.Guard(model).backward(x, lambda x: loss_of(model, x))

    if outside:
        with torch.autocast("cpu", torch.bfloat16):
            found = step()
    else:
        found = step()
    assert found.kept == [0, 1, 2, 4, 5, 6, 7, 9]
    loss_of(twin, x[found.kept]).backward()
    assert same(model, twin)


def test_a_bad_sample_does_not_halve_the_scale():
    model = net()
    twin = copy.deepcopy(model)
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), torch.amp.GradScaler("cpu", init_scale=16.0)
    x = spoilt(float("inf"), 7)
    result = gg.Guard(model).backward(x, lambda x: model(x).square().mean(), scaler=scaler)
    assert [incident.row for incident in result.dropped] == [7]
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 16.0
    twin_optimizer, twin_scaler = (
        torch.optim.SGD(twin.parameters(), lr=0.1),
        torch.amp.GradScaler("cpu", init_scale=16.0),
    )
    loss = twin(x[result.kept]).square().mean()
    twin_scaler.scale(loss).backward()
    twin_scaler.step(twin_optimizer)
    assert same(model, twin)
    assert torch.equal(result.loss, loss.detach())
    assert all(map(torch.equal, model.parameters(), twin.parameters()))


def test_an_overflow_of_the_scale_is_left_to_the_scaler():
    model = nn.Linear(4, 2)
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), torch.amp.GradScaler("cpu", init_scale=2.0**126)
    before = model.weight.detach().clone()
    result = gg.Guard(model).backward(torch.randn(8, 4) * 100, lambda x: model(x).square().mean(), scaler=scaler)
    assert result.dropped == ()
    assert result.exact
    assert result.loss.isfinite()
    assert not model.weight.grad.isfinite().all()
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 2.0**125
    assert torch.equal(model.weight, before)


def test_a_bad_sample_and_an_overflow_of_the_scale_at_once():
    model = nn.Linear(4, 2)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**126)
    x = torch.randn(8, 4) * 100
    zero = torch.ones(8)
    zero[3] = 0
    loss_fn = lambda b: (model(b[0]).square().sum(1) * b[1]).sqrt().mean() * 1e3  # noqa: E731
    result = gg.Guard(model).backward((x, zero), loss_fn, scaler=scaler)
    assert [incident.row for incident in result.dropped] == [3]
    assert not model.weight.grad.isfinite().all()  # for the scaler to see


def test_a_scaler_that_is_switched_off():
    model = nn.Linear(4, 2)
    result = gg.Guard(model).backward(
        spoilt(float("nan"), 0), lambda x: model(x).mean(), scaler=torch.amp.GradScaler("cpu", enabled=False)
    )
    assert len(result.dropped) == 1


@pytest.mark.slow
@pytest.mark.parametrize("value", [float("nan"), 1e6])
def test_a_compiled_model(value):
    torch.compiler.reset()
    model = nn.Sequential(net(), nn.Tanh())
    compiled = torch.compile(model, backend="aot_eager")
    guard = gg.Guard(compiled)

    def loss_fn(batch):
        out = compiled(batch)
        if bool((batch > 1e4).any()):
            raise ValueError("too large")
        return out.square().mean()

    start = copy.deepcopy(model.state_dict())
    x = spoilt(value, 2, 5)
    result = guard.backward(x, loss_fn)
    assert result.kept == [0, 1, 3, 4, 6, 7, 8, 9]
    found = [p.grad.clone() for p in model.parameters()] + [b.clone() for b in model.buffers()]
    model.zero_grad()
    model.load_state_dict(start)
    loss_fn(x[result.kept]).backward()
    wanted = [p.grad for p in model.parameters()] + list(model.buffers())
    assert all(map(torch.equal, found, wanted))
    torch.compiler.reset()


@pytest.mark.slow
def test_a_fault_inside_compiled_code_is_found_in_the_module_as_written():
    torch.compiler.reset()
    model = nn.Sequential(nn.Linear(9, 9), nn.Unflatten(1, (3, 3)))
    model[0].weight.data, model[0].bias.data = torch.eye(9), torch.zeros(9)

    @torch.compile(backend="eager")
    def solve(x):
        return torch.linalg.inv(model(x)).square().mean()

    x = torch.randn(8, 9)
    x[6] = 0
    assert [i.row for i in gg.Guard(model).backward(x, solve).dropped] == [6]
    torch.compiler.reset()


@pytest.mark.slow
@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("value", [float("nan"), 1e6, 0.0])
def test_gradient_checkpointing(reentrant, value):
    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.block, self.last = (
                nn.Linear(4, 4, bias=False),
                nn.Sequential(Refusing(), nn.Linear(4, 4), nn.Dropout(0.2)),
                net(),
            )

        def forward(self, x):
            h = checkpoint(self.block, self.first(x), use_reentrant=reentrant)
            return self.last(h) + self.first(x).square().sum(1, keepdim=True).sqrt()

    model = Checkpointed()
    model.first.weight.data = torch.eye(4)
    twin = copy.deepcopy(model)
    x = spoilt(value, 1, 6)
    start = torch.get_rng_state()
    result = gg.Guard(model).backward(x, lambda x: model(x).square().mean())
    assert result.kept == [0, 2, 3, 4, 5, 7, 8, 9]
    after = torch.get_rng_state()
    torch.set_rng_state(start)
    twin(x[result.kept]).square().mean().backward()
    assert same(model, twin)
    assert torch.equal(torch.get_rng_state(), after)


def test_a_model_that_is_converted_after_the_guard_was_made():
    model = net()
    guard = gg.Guard(model)
    guard.backward(torch.randn(4, 4), lambda x: model(x).square().mean())
    model.double()
    model.zero_grad()
    twin = copy.deepcopy(model)
    x = spoilt(float("nan"), 0).double()
    result = guard.backward(x, lambda x: model(x).square().mean())
    twin(x[result.kept]).square().mean().backward()
    assert same(model, twin)


def test_lazy_modules():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that they are under development
        model = nn.Sequential(nn.LazyLinear(3), nn.LazyBatchNorm1d())
    model(torch.randn(2, 4))
    x = spoilt(float("nan"), 0)
    assert len(gg.Guard(model).backward(x, lambda x: model(x).square().mean()).dropped) == 1


def test_forward_hooks_of_the_user_act_once_in_every_try():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    model[0].register_forward_hook(lambda module, args, output: output * 2)
    twin = copy.deepcopy(model)
    x, bad = torch.randn(10, 4), torch.zeros(10)
    bad[4] = 1

    def loss_of(m, batch):
        out = m(batch[0])
        if bool(batch[1].any()):
            raise ValueError("bad")
        return out.mean()

    result = gg.Guard(model).backward((x, bad), lambda b: loss_of(model, b))
    loss_of(twin, (x[result.kept], bad[result.kept])).backward()
    assert result.kept == [row for row in range(10) if row != 4]
    assert same(model, twin)
    assert not any("forward" in module.__dict__ for module in model.modules())


def test_a_model_in_eval_mode_keeps_its_mode_and_buffers():
    model = net().eval()
    before = copy.deepcopy(model.state_dict())
    gg.Guard(model).backward(spoilt(float("nan"), 2), lambda x: model(x).mean())
    assert not model.training
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
