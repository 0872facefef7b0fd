"""The law: after a rewind everything is bit-identical to the same training on the stream without the suspects."""

import contextlib
import warnings

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import gradgate as gg
from gradgate.errors import TooManyRewinds
from tests.rewind.trainings import OPTIMIZERS, Training, assert_same, stream, without


def check_law(batches, options, **training):
    ours, theirs = Training(**training), None
    rewind = gg.Rewind(*ours.parts, **options)
    rewound = ours.run(rewind.batches(batches), rewind)
    found = ours.state()
    theirs = Training(**training)
    theirs.run(without(batches, rewound, training.get("accumulate", 1)))
    assert_same(found, theirs.state())
    assert all(one.exact for one in rewound)
    return rewound


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_each_optimizer(optimizer):
    rewound = check_law(stream(60, [40]), {"every": 7}, optimizer=optimizer)
    assert 40 in rewound[0].skipped
    assert rewound[0].to_step <= 39


@pytest.mark.slow
def test_a_gradient_scaler():
    assert check_law(stream(60, [40]), {"every": 7}, optimizer="sgd", scaled=True)


@pytest.mark.slow
def test_gradient_accumulation():
    rewound = check_law(stream(120, [80, 83]), {"every": 7}, accumulate=2)
    assert 40 in rewound[0].skipped


@pytest.mark.slow
def test_a_guard_whose_own_drops_stay():
    batches = stream(60, [40])
    for step, row in ((3, 2), (36, 1), (44, 5)):
        batches[step]["x"][row] = float("nan")
    rewound = check_law(batches, {"every": 7}, guarded=True)
    assert len(rewound) == 1


@pytest.mark.slow
def test_two_spikes_and_a_warning_at_the_second():
    with pytest.warns(gg.errors.GradgateWarning, match="the second loss spike of this run"):
        rewound = check_law(stream(110, [40, 80]), {"every": 10})
    assert len(rewound) == 2


def test_nan_decides_at_once():
    batches = stream(30)
    batches[12]["y"][0] = float("nan")
    rewound = check_law(batches, {"every": 4})
    assert rewound[0].skipped == (11, 12)
    assert "the loss is nan" in rewound[0].reason


@pytest.mark.slow
@settings(max_examples=20, deadline=None)
@given(
    st.data(),
    st.integers(1, 30),
    st.integers(1, 4),
    st.integers(0, 4),
    st.integers(1, 4),
    st.sampled_from(list(OPTIMIZERS)),
    st.sampled_from([{}, {"scaled": True}, {"accumulate": 2}, {"guarded": True}]),
)
def test_random_streams(data, every, depth, lookback, patience, optimizer, more):
    poisoned = data.draw(st.sets(st.integers(0, 59), max_size=2))
    options = {"every": every, "depth": depth, "lookback": lookback, "patience": patience}
    with warnings.catch_warnings(), contextlib.suppress(TooManyRewinds):
        warnings.simplefilter("ignore", gg.errors.GradgateWarning)
        check_law(stream(60, poisoned, seed=every), options, optimizer=optimizer, **more)


def test_a_healthy_training_is_the_plain_one():
    assert check_law(stream(60), {"every": 5}) == []
