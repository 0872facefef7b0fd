"""An interrupt in a diagnosis, a trace or a watch leaves no hook, no mode and no patch behind."""

import random

import pytest
import torch

import gradgate as gg
from gradgate.doctor import _watch
from tests.interrupting import Interrupts, differences, process_state

# Limits that tests state: the moment before a clean-up begins, and leaving torch.no_grad() in a watch.
SPARED = {
    "to_the_end": ("interrupt: BaseException | None = None", "for _ in range(ATTEMPTS):"),
    "stop": ("def clean_up() -> None:", "to_the_end(clean_up)"),
    "local_values": ("with torch.no_grad():",),
    "observe": ("with undispatched(), torch.no_grad():",),
}


def _model():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 1))


def _diagnosed(model, optimizer):
    gg.diagnose(lambda: model(torch.ones(4, 3)).mean(), model=model)


def _traced(model, optimizer):
    with gg.trace(model):
        model(torch.ones(4, 3)).mean().backward()
        optimizer.step()


def _watched(model, optimizer):
    def step():
        loss = (model(torch.ones(4, 3)) * 0).sqrt().mean()
        loss.backward()
        optimizer.step()

    with gg.watch(model, on_bad="warn") as watch, pytest.warns(gg.errors.BadStepWarning):
        watch.step(step)


@pytest.mark.slow
@pytest.mark.parametrize("call", [_diagnosed, _traced, _watched])
def test_an_interrupt_leaves_the_process_as_it_was(call):
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    call(model, optimizer)  # sources are read once
    with Interrupts(spared=SPARED) as counted:
        call(model, optimizer)
    drawn, interrupts = random.Random(call.__name__), 0
    for line in sorted(drawn.sample(range(1, counted.count + 1), 10)):
        for lines in ([line], [line, line + drawn.randint(1, 40)]):
            before = process_state()
            try:
                with Interrupts(*lines, spared=SPARED):
                    call(model, optimizer)
            except KeyboardInterrupt:
                interrupts += 1
            after = process_state()
            assert set(differences(before, after)) <= {"random"}, lines
    assert interrupts > 10
    call(model, optimizer)


def test_limit_an_interrupt_just_before_a_clean_up_leaves_the_hook(monkeypatch):
    """Between the end of a block and the first line that could catch it, nothing can."""

    def interrupted(clean_up):
        raise KeyboardInterrupt

    model = _model()
    before = process_state()
    watch = gg.watch(model).__enter__()
    with monkeypatch.context() as patched:
        patched.setattr(_watch, "to_the_end", interrupted)
        with pytest.raises(KeyboardInterrupt):
            watch.__exit__(None, None, None)
    assert differences(before, process_state()) == ["hooks"]
    watch.__exit__(None, None, None)  # leaving again takes it away
    assert differences(before, process_state()) == []


@pytest.mark.slow
def test_an_interrupted_replay_returns_to_the_weights_of_now():
    model = _model()

    def step():
        loss = (model(torch.ones(4, 3)) * 0).sqrt().mean()
        loss.backward()

    def state():
        gradients = [parameter.grad for parameter in model.parameters()]
        return str([*model.state_dict().values(), *gradients, torch.get_rng_state().tolist()])

    with gg.watch(model, on_bad="warn") as watch:
        replayed = watch._replay(step)
        assert replayed.findings
        watch._snapshot.take()
        with Interrupts(spared=SPARED) as counted:
            watch._replay(step)
        for line in random.Random(3).sample(range(1, counted.count + 1), 10):
            before = state()
            try:
                with Interrupts(line, spared=SPARED):
                    watch._replay(step)
            except KeyboardInterrupt:
                assert state() == before, line
            watch._snapshot.take()
