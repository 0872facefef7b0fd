"""The random state of python, numpy, torch and every device: after a step what the reduced batch would have left."""

import random

import numpy as np
import pytest
import torch
from torch import nn

import gradgate as gg
from gradgate import _state
from gradgate._state import RandomState, TrainingState


def draw():
    """Draw from every source, normal numbers included: they come in pairs of which one is stored."""
    return random.random(), random.gauss(0, 1), np.random.rand(), np.random.randn(), torch.rand(()).item()


@pytest.mark.parametrize("warm_up", range(4))
def test_what_is_remembered_comes_back(warm_up):
    for _ in range(warm_up):
        random.gauss(0, 1)
        np.random.randn()
    state = RandomState()
    state.remember()
    first = [draw() for _ in range(3)]
    for _ in range(2):
        state.restore()
        assert [draw() for _ in range(3)] == first


def test_a_stored_normal_number_of_numpy_is_not_forgotten():
    """Drawing the stored one moves nothing but a flag, which the quick look cannot see."""
    state = RandomState()
    np.random.seed(0)
    np.random.randn()  # stores a second one
    state.remember()
    second = np.random.randn()
    state.remember()
    third = np.random.randn()
    state.restore()
    assert np.random.randn() == third != second


def test_the_quick_way_is_the_official_state():
    state = _state._PythonState()
    assert state._readable
    before = random.getstate()
    state.remember()
    random.random()
    state.restore()
    assert random.getstate() == before


TORCH_DRAWS = {
    "uniform": lambda: torch.rand(1),
    "a whole round": lambda: torch.rand(624),
    "normal, of which one waits": lambda: torch.randn(1),
    "many normal": lambda: torch.randn(33),
    "integers": lambda: torch.randint(5, (1,)),
    "a permutation": lambda: torch.randperm(4),
    "dropout": lambda: nn.functional.dropout(torch.ones(2)),
    "a choice": lambda: torch.multinomial(torch.ones(3), 1),
    "exponential": lambda: torch.empty(1).exponential_(),
    "gamma": lambda: torch.distributions.Gamma(1.0, 1.0).sample(),
    "a seed": lambda: torch.manual_seed(torch.initial_seed() + 1),
}


@pytest.mark.parametrize("waiting", [False, True])
@pytest.mark.parametrize("kind", TORCH_DRAWS)
def test_every_draw_of_torch_is_undone(kind, waiting):
    torch.manual_seed(5)
    state = RandomState()
    if waiting:
        torch.randn(1)  # a second one waits
    before = torch.get_rng_state()
    state.remember()
    TORCH_DRAWS[kind]()
    assert not torch.equal(torch.get_rng_state(), before)
    state.restore()
    assert torch.equal(torch.get_rng_state(), before)
    TORCH_DRAWS[kind]()
    after = torch.get_rng_state()
    state.remember()
    torch.rand(3)
    state.restore()
    assert torch.equal(torch.get_rng_state(), after)


def test_where_the_memory_cannot_be_read_the_official_way_is_used(monkeypatch):
    monkeypatch.setattr(_state._PythonState, "_block_is_the_state", lambda self: False)
    monkeypatch.setattr(_state._NumpyState, "look", lambda self: ())
    state = RandomState()
    state.remember()
    first = draw()
    state.restore()
    assert draw() == first


def test_another_generator_in_numpy():
    before = np.random.get_bit_generator()
    try:
        np.random.set_bit_generator(np.random.PCG64(3))
        state = RandomState()
        state.remember()
        first = np.random.rand()
        state.restore()
        assert np.random.rand() == first
    finally:
        np.random.set_bit_generator(before)


def test_every_device_in_use_is_asked(monkeypatch):
    class FakeModule:
        def __init__(self):
            self.states = {"fake:0": torch.tensor([1]), "fake:1": torch.tensor([2])}

        def get_rng_state(self, device):
            return self.states[str(device)].clone()

        def set_rng_state(self, state, device):
            self.states[str(device)] = state

    class FakeDevice:
        type = "fake"

        def __init__(self, index):
            self.index = index

        def __str__(self):
            return f"fake:{self.index}"

    fake = FakeModule()
    monkeypatch.setattr(torch, "get_device_module", lambda device: fake)
    state = RandomState([FakeDevice(0), FakeDevice(1), torch.device("cpu"), torch.device("meta")])
    state.remember()
    fake.states["fake:0"], fake.states["fake:1"] = torch.tensor([7]), torch.tensor([8])
    state.restore()
    assert [value.item() for value in fake.states.values()] == [1, 2]


def test_the_devices_of_a_model_that_was_moved_are_asked(monkeypatch):
    state, asked = TrainingState([nn.Linear(3, 3)]), []
    monkeypatch.setattr(state._random, "watch", asked.append)
    state.remember()
    state.give_back()
    assert not asked
    monkeypatch.setattr(_state, "_device_of", lambda parameters: torch.device("meta"))  # the same parameters
    state.remember()
    assert len(asked) == 1


@pytest.mark.parametrize("fault", ["exception", "value", "gradient"])
def test_after_a_bad_step_all_sources_stand_where_the_reduced_batch_leaves_them(fault):
    model = nn.Linear(3, 1)

    def loss_fn(batch):
        x, bad = batch
        noise = [random.random() + np.random.rand() for _ in range(len(x))]  # as many draws as there are samples
        out = model(x)[:, 0] + torch.tensor(noise) + torch.rand(len(x)) + random.gauss(0, 1) + np.random.randn()
        if fault == "exception" and bool(bad.any()):
            raise ValueError("bad")
        spoilt = torch.where(bad & (fault == "value"), float("nan"), 0.0)
        zero = torch.where(bad & (fault == "gradient"), 0.0, 1.0)
        return ((out.square() * zero).sqrt() + spoilt).mean()

    x, bad = torch.randn(9, 3), torch.zeros(9, dtype=torch.bool)
    bad[[2, 6]] = True
    keep = ~bad
    state = RandomState()
    state.remember()
    result = gg.Guard(model).backward((x, bad), loss_fn)
    assert len(result.dropped) == 2
    after, grad = draw(), model.weight.grad.clone()
    model.zero_grad()
    state.restore()
    loss = loss_fn((x[keep], bad[keep]))
    loss.backward()
    assert draw() == after
    assert torch.equal(model.weight.grad, grad)
    assert torch.equal(result.loss, loss)
