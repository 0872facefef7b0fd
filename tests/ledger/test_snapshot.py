"""Weights and random states at a step, put in force again for a while."""

import random
from contextlib import nullcontext

import numpy
import pytest
import torch

from gradgate._payload import encode
from gradgate._state import capture, random_state, restored
from gradgate.errors import LedgerError


def chances():
    return torch.rand(1).item(), random.random(), float(numpy.random.rand())


def test_the_same_state_gives_the_same_chances_and_weights():
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    stored = capture(model)
    expected, output = chances(), model.eval()(torch.ones(1, 2))
    with torch.no_grad():
        model[0].weight.zero_()
    after = torch.get_rng_state()
    with restored(stored, model):
        assert chances() == expected
        assert torch.equal(model(torch.ones(1, 2)), output)
    assert torch.equal(torch.get_rng_state(), after)  # What was is put back.
    assert not model[0].weight.any()


def test_what_was_is_put_back_also_after_a_fault():
    model = torch.nn.Linear(1, 1)
    stored = capture(model)
    torch.nn.init.constant_(model.weight, 7.0)
    with pytest.raises(ZeroDivisionError), restored(stored, model):
        raise ZeroDivisionError
    assert model.weight.item() == 7.0


def test_random_states_alone():
    stored = capture()
    expected = chances()
    with restored(stored):
        assert chances() == expected


def test_weights_that_do_not_fit_are_refused():
    model = torch.nn.Linear(3, 3)
    with (
        pytest.raises(LedgerError, match=r"the stored weights do not fit the model(.|\n)*size mismatch"),
        restored(capture(torch.nn.Linear(2, 2)), model),
    ):
        pass


@pytest.mark.parametrize("data", [capture(torch.nn.Linear(200, 200), limit=20_000), encode([1])])
def test_a_state_that_is_not_whole_is_refused(data):
    with pytest.raises(LedgerError, match=r"not whole(.|\n)*snapshot_limit=2\*\*30"), restored(data):
        pass


def odd_states():
    """Snapshots that are well-formed payloads of the wrong content."""
    good = {"model": None, "random": random_state()}
    chance = good["random"]
    weight = {"weight": torch.ones(1, 2), "bias": torch.ones(1)}
    numpys = chance["numpy"]
    return {
        "a tensor": torch.ones(3),
        "nothing": None,
        "an empty dictionary": {},
        "no random state": {"model": None, "random": None},
        "an empty random state": {"model": None, "random": {}},
        "a random state that is a list": {"model": None, "random": [1, 2]},
        "torch's state of floats": {**good, "random": {**chance, "torch": torch.ones(5)}},
        "torch's state too short": {**good, "random": {**chance, "torch": torch.zeros(5, dtype=torch.uint8)}},
        "torch's state of zeros": {**good, "random": {**chance, "torch": torch.zeros_like(chance["torch"])}},
        "torch's state that is text": {**good, "random": {**chance, "torch": "x"}},
        "Python's state that is a number": {**good, "random": {**chance, "python": 7}},
        "Python's state too short": {**good, "random": {**chance, "python": (3, (1, 2), None)}},
        "numpy's state that is text": {**good, "random": {**chance, "numpy": "MT19937"}},
        "numpy's state of another kind": {**good, "random": {**chance, "numpy": ("PCG64", *numpys[1:])}},
        "numpy's position out of range": {**good, "random": {**chance, "numpy": (*numpys[:2], 10**6, *numpys[3:])}},
        "weights that are a list": {**good, "model": [1, 2]},
        "weights that are numbers": {**good, "model": {"weight": 1, "bias": 2}},
        "weights with names that are numbers": {**good, "model": {1: torch.ones(1)}},
        "weights of another shape": {**good, "model": {**weight, "weight": torch.ones(5)}},
        "weights that are complex": {**good, "model": {**weight, "weight": torch.ones(1, 2, dtype=torch.complex64)}},
        "weights that are missing": {**good, "model": {"weight": torch.ones(1, 2)}},
    }


@pytest.mark.filterwarnings("ignore:Casting complex values to real")
@pytest.mark.parametrize("name", odd_states())
def test_a_state_of_wrong_content_is_an_error_and_changes_nothing(name):
    model = torch.nn.Linear(2, 1)
    before, weights = random_state(), capture(model)
    # torch takes complex weights, with a warning.
    refused = nullcontext() if "complex" in name else pytest.raises(LedgerError, match=r"(.|\n)+Why: .+\nFix: ")
    with refused, restored(encode(odd_states()[name]), model):
        chances()
    assert encode(random_state()) == encode(before)
    assert capture(model) == weights
