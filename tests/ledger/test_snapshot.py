"""Weights and random states at a step, put in force again for a while."""

import random

import numpy
import pytest
import torch

from gradgate._payload import encode
from gradgate._snapshot import capture, restored
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
