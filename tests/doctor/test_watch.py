"""The watch: raises before the optimizer writes, replays a bad step, and leaves everything as it was."""

import copy
import random

import numpy as np
import pytest
import torch
from torch import nn

import gradgate as gg
from gradgate.errors import ArgumentTypeError, ArgumentValueError, BadStepError, BadStepWarning

X = torch.linspace(-1, 1, 24).reshape(6, 4)


def model():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 1))


def bad_step(m, optimizer):
    """A step whose gradient is infinite: the square root of nothing."""

    def step():
        optimizer.zero_grad()
        (m(X) * 0).sqrt().mean().backward()  # HERE
        optimizer.step()

    return step


def good_step(m, optimizer):
    def step():
        optimizer.zero_grad()
        m(X).pow(2).mean().backward()
        optimizer.step()

    return step


def state(m, optimizer):
    return copy.deepcopy(m.state_dict()), copy.deepcopy(optimizer.state_dict()["state"])


def equal(one, other):
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, tuple):
        return all(map(equal, one, other))
    return one == other


@pytest.mark.parametrize("given", [True, False], ids=["optimizer given", "any optimizer"])
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam])
def test_it_raises_before_the_optimizer_writes(kind, given):
    m = model()
    optimizer = kind(m.parameters(), lr=0.1)
    with gg.watch(m, optimizer if given else None) as watch:
        good_step(m, optimizer)()
        weights = [p.clone() for p in m.parameters()]
        memory = copy.deepcopy(optimizer.state_dict()["state"])
        with pytest.raises(
            BadStepError, match=r"gradient of 0.weight, .* is not finite; 3.bias is the nearest to the loss"
        ):
            bad_step(m, optimizer)()
    assert watch.bad_steps == 1
    assert all(map(torch.equal, weights, m.parameters()))
    assert equal(memory, optimizer.state_dict()["state"])


def test_outside_the_block_it_does_not_look():
    m = model()
    optimizer = torch.optim.SGD(m.parameters(), lr=0.1)
    with gg.watch(m):
        pass
    bad_step(m, optimizer)()
    assert m[0].weight.isnan().any()


def test_another_model_is_none_of_its_business():
    m, other = model(), model()
    with gg.watch(m) as watch:
        bad_step(other, torch.optim.SGD(other.parameters(), lr=0.1))()
    assert watch.bad_steps == 0


def test_warn_goes_on():
    m = model()
    optimizer = torch.optim.SGD(m.parameters(), lr=0.1)
    with gg.watch(m, on_bad="warn") as watch, pytest.warns(BadStepWarning, match="is not finite"):
        bad_step(m, optimizer)()
    assert watch.bad_steps == 1
    assert m[0].weight.isnan().any()


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam, torch.optim.RMSprop])
def test_skip_leaves_weights_and_state_bit_identical(kind):
    m = model()
    optimizer = kind(m.parameters(), lr=0.1, weight_decay=0.1)
    with gg.watch(m, on_bad="skip"):
        good_step(m, optimizer)()
        weights, memory = [p.clone() for p in m.parameters()], copy.deepcopy(optimizer.state_dict()["state"])
        with pytest.warns(BadStepWarning):
            bad_step(m, optimizer)()
        assert all(map(torch.equal, weights, m.parameters()))
        assert equal(memory, optimizer.state_dict()["state"])
        good_step(m, optimizer)()
        assert all(p.isfinite().all() for p in m.parameters())


def test_a_closure_is_watched_too():
    m = nn.Linear(4, 1)
    optimizer = torch.optim.LBFGS(m.parameters(), max_iter=2)

    def closure():
        optimizer.zero_grad()
        loss = (m(X) * 0).sqrt().mean()
        loss.backward()
        return loss

    before = m.weight.clone()
    with gg.watch(m), pytest.raises(BadStepError):
        optimizer.step(closure)
    assert torch.equal(before, m.weight)
    with gg.watch(m), pytest.raises(BadStepError):
        optimizer.step(closure=closure)


def test_step_replays_and_names_the_line():
    m = model()
    optimizer = torch.optim.Adam(m.parameters())
    with gg.watch(m) as watch:
        watch.step(good_step(m, optimizer))
        assert watch.diagnosis is None
        with pytest.raises(BadStepError, match=r"produced in the backward of `\(m\(X\) \* 0\).sqrt\(\)`") as caught:
            watch.step(bad_step(m, optimizer))
    finding = watch.diagnosis.findings[0]
    assert caught.value.diagnosis is watch.diagnosis
    assert finding.source == "(m(X) * 0).sqrt().mean().backward()  # HERE"
    assert finding.code == "GG403"


def test_the_replay_starts_from_the_same_state_and_leaves_no_trace():
    m = model()
    optimizer = torch.optim.Adam(m.parameters())
    outputs = []

    def step():
        optimizer.zero_grad()
        outputs.append(m(X).detach().clone())
        (m(X) * 0).sqrt().mean().backward()
        optimizer.step()

    with gg.watch(m) as watch:
        watch.step(good_step(m, optimizer))
        once = copy.deepcopy(m)
        torch.manual_seed(7)
        with pytest.raises(BadStepError):
            watch.step(step)
        after, random = state(m, optimizer), torch.get_rng_state()
    assert torch.equal(outputs[0], outputs[1])
    torch.manual_seed(7)
    once(X)
    once(X)
    assert equal(after[0], once.state_dict())
    assert torch.equal(random, torch.get_rng_state())


def test_the_replay_draws_the_same_numbers_from_python_and_numpy():
    m = nn.Linear(4, 1)
    drawn = []

    def draw():
        return random.random(), np.random.rand(), torch.rand(()).item()

    def step():
        drawn.append(draw())
        (m(X) * 0).sqrt().mean().backward()

    def seed():
        random.seed(3)
        np.random.seed(3)
        torch.manual_seed(3)

    seed()
    first, second = draw(), draw()
    seed()
    with gg.watch(m) as watch, pytest.raises(BadStepError):
        watch.step(step)
    assert drawn == [first, first]
    assert draw() == second, "what follows goes on as if there had been no replay"


def test_weights_that_the_step_moved_before_it_failed_are_put_back_for_the_replay():
    m = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(m.parameters(), lr=0.5, momentum=0.9)
    seen = []

    def step():
        seen.append(m[1].weight.detach().clone())
        loss = m(X).pow(2).mean()
        m(X).mean().backward()
        optimizer.step()
        loss.backward()

    with gg.watch(m) as watch, pytest.raises(RuntimeError, match="inplace operation") as caught:
        watch.step(step)
    assert torch.equal(seen[0], seen[1])
    assert watch.diagnosis.findings[0].code == "GG601"
    assert any("GG601" in note and "optimizer.step()" in note for note in caught.value.__notes__)
    assert not torch.equal(m[1].weight, seen[0])


def test_a_step_without_optimizer_is_looked_at_too():
    m = model()
    with gg.watch(m) as watch, pytest.raises(BadStepError):
        watch.step(lambda: (m(X) * 0).sqrt().mean().backward())
    assert watch.bad_steps == 1
    with gg.watch(m, on_bad="warn") as watch, pytest.warns(BadStepWarning):
        assert watch.step(lambda: (m(X) * 0).sqrt().mean().backward() or 5) == 5


def test_gradients_of_any_kind():
    table = nn.Embedding(10, 4, sparse=True)
    optimizer = torch.optim.SGD(table.parameters(), lr=0.1)
    with gg.watch(table):
        table(torch.tensor([1, 2])).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        (table(torch.tensor([1, 2])) / 0).sum().backward()
        with pytest.raises(BadStepError, match="weight"):
            optimizer.step()


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda: gg.watch(lambda x: x), ArgumentTypeError, r"watch\(\): `model` is the function"),
        (lambda: gg.watch(model(), "adam"), ArgumentTypeError, r"watch\(\): `optimizer` is the str 'adam'"),
        (
            lambda: gg.watch(model(), on_bad="ignore"),
            ArgumentValueError,
            r"`on_bad` is the str 'ignore'.\nWhy: it is one of",
        ),
        (lambda: gg.trace(5), ArgumentTypeError, r"trace\(\): `model` is the int 5"),
        (lambda: gg.diagnose(torch.ones(1)), ArgumentTypeError, r"diagnose\(\): `step_fn` is a float32 tensor"),
        (lambda: gg.diagnose(print, model=3), ArgumentTypeError, r"diagnose\(\): `model` is the int 3"),
    ],
)
def test_wrong_arguments(call, error, text):
    with pytest.raises(error, match=text):
        call()


def watched(steps, change=lambda number, m: None, lr=0.01):
    torch.manual_seed(0)
    m = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(m.parameters(), lr=lr)
    with gg.watch(m, optimizer) as watch:
        for number in range(steps):
            optimizer.zero_grad()
            scale = change(number, m) or 1.0
            ((m(torch.randn(8, 4)) - 1).pow(2).mean() * scale).backward()
            optimizer.step()
    return watch.findings


def test_a_steady_training_is_left_alone():
    assert watched(250) == ()


def test_a_gradient_norm_out_of_its_own_range_is_named():
    found = watched(60, lambda number, m: 1e3 if number == 40 else 1.0, lr=1e-6)
    assert [finding.code for finding in found] == ["GG308"]
    assert found[0].title.startswith("the gradient norm left its range at step 40: ")
    assert "most of it in 2." in found[0].title


def test_weights_that_do_not_move_are_named():
    def stop(number, m):
        m[0].weight.register_hook(torch.zeros_like) if not number else None

    found = watched(210, stop)
    assert [finding.code for finding in found] == ["GG309", "GG309"]
    assert found[0].title == "0.weight has not moved for 100 steps"


def test_the_update_since_which_a_training_runs_away_is_named():
    torch.manual_seed(0)
    m = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(m.parameters(), lr=5.0)
    with gg.watch(m, optimizer) as watch:
        for _ in range(12):
            optimizer.zero_grad()
            m(torch.ones(8, 4)).pow(2).mean().backward()
            optimizer.step()
    assert [finding.code for finding in watch.findings] == ["GG907"]
    assert "with a learning rate of 5" in watch.findings[0].title
