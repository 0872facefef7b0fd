"""The law under odd settings: every=1, lookback beyond every, short loaders, many epochs, spikes in a row, resumes.

The state is the list of batches that were trained on, so that a batch too many, too few or in the wrong place shows.
"""

import copy
import io
import math
import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import gradgate as gg
from gradgate.errors import GradgateWarning, TooManyRewinds


class History:
    """A part whose state is everything that was trained on."""

    def __init__(self):
        self.seen = []

    def state_dict(self):
        return {"seen": list(self.seen)}

    def load_state_dict(self, state):
        self.seen = list(state["seen"])

    def train(self, batch, poison, effect):
        """Give a loss: high for some steps after a poisoned batch, or NaN at once."""
        self.seen.append(batch)
        recent = [poison.get(one) for one in self.seen[-effect:]]
        return math.nan if math.nan in recent else 1000.0 if 1000.0 in recent else 1.0 + 0.1 * math.sin(batch)


def through_a_file(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def run(epochs, options, poison, effect, stop=None):
    """Train; in the middle, if asked, go on with new objects from a checkpoint. Gives all that was done."""
    history, made = History(), 0
    rewind = gg.Rewind(history, **options)
    exact, held = True, 0
    epoch = 0
    while epoch < len(epochs):
        for batch in rewind.batches(epochs[epoch]):
            try:
                done = rewind.observe(history.train(batch, poison, effect))
            except TooManyRewinds as error:
                done = error.rewinds[-1]
            exact = exact and (done is None or done.exact)
            held = max(held, sum(len(step.batches) for step in rewind._steps))
            made += 1
            if made == stop:
                break
        else:
            epoch += 1
            continue
        saved, other = through_a_file(rewind.state_dict()), History()
        other.load_state_dict(copy.deepcopy(history.state_dict()))
        history, rewind = other, gg.Rewind(other, **options)
        rewind.load_state_dict(saved)
    return history.seen, rewind, exact, held


SETTINGS = st.fixed_dictionaries(
    {
        "every": st.integers(1, 9),
        "depth": st.integers(1, 3),
        "lookback": st.integers(0, 12),
        "patience": st.integers(1, 4),
        "window": st.integers(1, 30),
        "max_rewinds": st.integers(0, 4),
    }
)


@st.composite
def streams(draw):
    lengths = draw(st.lists(st.integers(0, 40), min_size=1, max_size=4))
    epochs, first = [], 0
    for length in lengths:
        epochs.append(list(range(first, first + length)))
        first += length
    places = st.integers(0, max(first - 1, 0))
    poison = draw(st.dictionaries(places, st.sampled_from([1000.0, math.nan]), max_size=5))
    return epochs, poison, draw(st.integers(1, 5))


@pytest.mark.slow
@settings(max_examples=120, deadline=None)
@given(streams(), SETTINGS)
def test_what_was_trained_on_is_the_stream_without_the_suspects(stream, options):
    epochs, poison, effect = stream
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", GradgateWarning)
        seen, rewind, exact, held = run(epochs, options, poison, effect)
    skipped = {number for one in rewind.rewinds for number in one.skipped}
    assert seen == [batch for epoch in epochs for batch in epoch if batch not in skipped]
    assert exact
    assert held <= (options["every"] + options["patience"] + options["lookback"]) * 2 + 2
    nan = {batch for batch, kind in poison.items() if math.isnan(kind) and any(batch in epoch for epoch in epochs)}
    assert nan <= skipped  # one that is not finite is never trained on


@pytest.mark.slow
@settings(max_examples=80, deadline=None)
@given(streams(), SETTINGS, st.integers(1, 120))
def test_the_law_after_a_resume_at_any_step(stream, options, stop):
    """Only the first snapshot is in a checkpoint, so a resumed run may go back further; the law is the same."""
    epochs, poison, effect = stream
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", GradgateWarning)
        seen, rewind, exact, _ = run(epochs, options, poison, effect, stop)
    skipped = {number for one in rewind.rewinds for number in one.skipped}
    if exact:  # batches of an earlier epoch are gone after a resume, and that is said
        assert seen == [batch for epoch in epochs for batch in epoch if batch not in skipped]
    else:
        assert len(epochs) > 1


class Broken(torch.utils.data.Dataset):
    """Numbers, some of which cannot be loaded."""

    def __len__(self):
        return 63

    def __getitem__(self, place):
        if place in (5, 17, 44):
            raise OSError(f"{place} is gone")
        return place


def stateful(shuffle, workers):
    library = pytest.importorskip("torchdata.stateful_dataloader")
    generator = torch.Generator().manual_seed(0)
    options = {"batch_size": 1, "shuffle": shuffle, "num_workers": workers, "generator": generator}
    return library.StatefulDataLoader(range(60), **options)


def resilient(shuffle, workers):
    generator = torch.Generator().manual_seed(0)
    options = {"batch_size": 1, "shuffle": shuffle, "num_workers": workers, "generator": generator}
    return gg.resilient(torch.utils.data.DataLoader(Broken(), **options), retries=0)


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
@pytest.mark.parametrize("loader_of", [stateful, resilient])
@pytest.mark.parametrize("shuffle", [False, True])
def test_loaders_that_resume(loader_of, shuffle):
    """Stops before the spike, among the batches that come again, and after them; each batch once, in order."""

    def train(stop=None):
        history, made, spiked = History(), 0, False
        rewind = gg.Rewind(history, every=7)
        running = rewind.batches(loader_of(shuffle, 0))
        while (batch := next(running, None)) is not None:
            history.seen.append(int(batch))
            spikes = not spiked and len(history.seen) == 41
            spiked = spiked or spikes
            assert rewind.observe(math.nan if spikes else 1.0) is None or rewind.rewinds[-1].exact
            made += 1
            if made == stop:
                saved = through_a_file([history.state_dict(), rewind.state_dict()])
                history = History()
                rewind = gg.Rewind(history, every=7)
                for part, state in zip((history, rewind), saved, strict=True):
                    part.load_state_dict(state)
                running = rewind.batches(loader_of(shuffle, 0))
        return history.seen

    whole = train()
    assert len(whole) == len(set(whole)) == 58
    for stop in (3, 40, 41, 43, 50):
        assert train(stop) == whole
