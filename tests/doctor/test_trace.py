"""The tracer, always on: over many steps, and through exceptions."""

import contextlib

import pytest
import torch
from torch import nn

import gradgate as gg

X = torch.linspace(-1, 1, 24).reshape(6, 4)


def loop(m, optimizer, steps, body):
    for number in range(steps):
        optimizer.zero_grad()
        body(number).backward()
        optimizer.step()


def test_a_healthy_loop():
    m = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
    with gg.trace(m) as traced:
        loop(m, torch.optim.Adam(m.parameters()), 5, lambda number: m(X).pow(2).mean())
    assert traced.steps == 5
    assert traced.diagnosis.healthy
    assert not traced.diagnosis.findings


def test_a_fault_in_a_late_step_is_found():
    m = nn.Linear(4, 1)
    with gg.trace(m) as traced:
        loop(
            m,
            torch.optim.SGD(m.parameters(), lr=0.1),
            6,
            lambda number: (m(X) * (number != 4)).sqrt().nan_to_num().mean() if number == 4 else m(X).mean(),
        )
    assert {"GG502"} <= {finding.code for finding in traced.diagnosis.findings}


def test_a_finding_of_every_step_is_told_once():
    m = nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Linear(4, 1)})
    with gg.trace(m) as traced:
        loop(m, torch.optim.SGD(m.parameters(), lr=0.1), 4, lambda number: m.b(m.a(X).detach()).mean())
    assert [finding.code for finding in traced.diagnosis.findings] == ["GG101"]


@pytest.mark.slow
def test_an_exception_is_explained_and_goes_on_its_way():
    m = nn.Linear(4, 1)

    def twice():
        loss = m(X).mean()
        loss.backward()
        loss.backward()

    with pytest.raises(RuntimeError, match="a second time"), gg.trace(m) as traced:
        twice()
    assert traced.diagnosis.findings[0].code == "GG701"
    assert isinstance(traced.diagnosis.exception, RuntimeError)


def test_a_graph_kept_from_the_step_before():
    m = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(m.parameters(), lr=0.1)

    def train():
        hidden = torch.zeros(6, 4)
        for _ in range(2):
            optimizer.zero_grad()
            hidden = torch.tanh(m(X) + hidden)  # HERE
            hidden.mean().backward()
            optimizer.step()

    with pytest.raises(RuntimeError, match="a second time"), gg.trace(m) as traced:
        train()
    finding = traced.diagnosis.findings[0]
    assert finding.code == "GG701"
    assert finding.source == "hidden = torch.tanh(m(X) + hidden)  # HERE"


def test_passes_that_no_mode_sees_are_followed_one_by_one():
    m = nn.ModuleDict({"a": nn.Linear(4, 1), "b": nn.Linear(4, 1)})

    def step():
        torch.autograd.backward(m.a(X).mean())
        torch.autograd.backward([(m.b(X) * 0).sqrt().mean()])

    diagnosis = gg.diagnose(step, model=m)
    assert [finding.code for finding in diagnosis.findings] == ["GG403"]
    assert diagnosis.findings[0].module is None


def test_a_tensor_made_in_inference_mode_some_steps_ago():
    m = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(m.parameters(), lr=0.1)
    cache = {}

    def train():
        with torch.inference_mode():
            cache["scale"] = torch.arange(4.0)  # HERE
        for number in range(4):
            optimizer.zero_grad()
            (m(X) * (cache["scale"] if number == 3 else 1)).mean().backward()
            optimizer.step()

    with pytest.raises(RuntimeError, match="Inference tensors"), gg.trace(m) as traced:
        train()
    assert traced.diagnosis.findings[0].source == 'cache["scale"] = torch.arange(4.0)  # HERE'


def test_an_optimizer_that_raises_does_not_blind_it():
    class Moody(torch.optim.SGD):
        moods = iter([True, False, True, True])

        def step(self, closure=None):
            if next(self.moods):
                return super().step(closure)
            raise ValueError("not today")

    m = nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Linear(4, 1)})
    optimizer = Moody(m.parameters(), lr=0.1)
    with gg.trace(m) as traced:
        for number in range(4):
            optimizer.zero_grad()
            h = m.a(X)
            m.b(h.detach() if number == 3 else h).mean().backward()
            with contextlib.suppress(ValueError):
                optimizer.step()
    assert traced.steps == 3
    assert torch.overrides._get_current_function_mode() is None
    assert traced.diagnosis.healthy


def test_modes_of_the_user_inside_it():
    m = nn.Linear(4, 1)
    with gg.trace(m) as traced, torch.device("cpu"):
        loop(m, torch.optim.SGD(m.parameters(), lr=0.1), 3, lambda number: m(torch.ones(6, 4)).mean())
    assert traced.diagnosis.healthy


def test_nothing_is_left_behind():
    from torch.nn.modules import module as modules
    from torch.optim import optimizer as optimizers

    m, before = nn.Linear(4, 1), dict(optimizers._global_optimizer_pre_hooks)
    with gg.trace(m):
        m(X).mean().backward()
    assert not modules._global_forward_pre_hooks
    assert not modules._global_forward_hooks
    assert dict(optimizers._global_optimizer_pre_hooks) == before
    assert torch.overrides._get_current_function_mode() is None
