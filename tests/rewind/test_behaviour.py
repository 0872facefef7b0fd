"""What a spike is, who is suspected, what is recorded, what is refused, and checkpoints."""

import copy
import logging
import random

import pytest
import torch
from torch import nn

import gradgate as gg
from gradgate.errors import ArgumentTypeError, ArgumentValueError, TooManyRewinds
from gradgate.rewind._spikes import Level
from tests.rewind.trainings import Training, assert_same, stream, without


def linear(**options):
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return gg.Rewind(model, optimizer, **options), model, optimizer


def feed(rewind, losses, norms=None):
    """Show a Rewind some losses, one for each batch; gives what was done after which batch."""
    done, seen = [], []
    losses = list(losses)
    for batch in rewind.batches(range(len(losses))):
        seen.append(batch)
        rewound = rewind.observe(losses[batch], None if norms is None else norms[batch])
        if rewound is not None:
            done.append((batch, rewound))
    return done, seen


def wavy(count):
    return [1 + 0.1 * (step % 5) for step in range(count)]


# --- what a spike is ------------------------------------------------------------------------------------------------


def test_the_level_is_the_median_and_the_mad():
    generator = torch.Generator().manual_seed(0)
    for count in range(1, 60):
        values = torch.randn(count, generator=generator, dtype=torch.float64).round(decimals=1) + 0.0  # no -0
        level = Level(count, 8.0)
        for value in values.tolist():
            level.add(value)
        middle = values.quantile(0.5).item()
        deviations = (values - middle).abs().sort().values
        spread = max(deviations[(count - 1) // 2].item(), 0.01 * abs(middle)) or values.abs().max().item()
        expected = f"the loss is 1e+06, above {middle:.4g} + 8 x {spread:.3g}" if spread else ""
        assert level.above("loss", 1e6) == expected


@pytest.mark.slow
def test_high_observations_in_a_row_are_a_spike_and_single_ones_are_not():
    losses = wavy(60)
    losses[30] = losses[40] = losses[41] = 100.0
    assert feed(linear(every=5)[0], losses)[0] == []
    losses[42] = 100.0
    (batch, rewound), *more = feed(linear(every=5)[0], losses)[0]
    assert (batch, rewound.skipped, more) == (42, (39, 40, 41, 42), [])
    assert rewound.to_step == 35
    assert rewound.reason == "step 42: the loss is 100, above 1.2 + 8 x 0.1"


def test_the_innocents_come_again_and_the_suspects_do_not():
    losses = wavy(60)
    losses[40:43] = [100.0] * 3
    _, seen = feed(linear(every=5)[0], losses)
    assert seen == [*range(43), *range(35, 39), *range(43, 60)]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_loss_that_is_not_finite_is_a_spike_at_once_even_in_the_first_steps(bad):
    losses = wavy(10)
    losses[2] = bad
    (batch, rewound), *_ = feed(linear()[0], losses)[0]
    assert (batch, rewound.to_step, rewound.skipped) == (2, 0, (1, 2))


def test_the_first_steps_and_a_slow_drift_are_no_spike():
    assert feed(linear()[0], [10.0 / (step + 1) ** 2 for step in range(30)])[0] == []
    assert feed(linear(window=30)[0], [1 + 0.02 * step + 0.05 * (step % 3) for step in range(300)])[0] == []


def test_an_announced_change_is_no_spike():
    rewind, *_ = linear()
    losses = wavy(40) + [50 + value for value in wavy(40)]
    for batch in rewind.batches(range(80)):
        if batch == 40:
            rewind.announce_change()
        assert rewind.observe(losses[batch]) is None


def test_a_gradient_norm_may_spike_too():
    norms = wavy(60)
    norms[40:43] = [900.0] * 3
    (_, rewound), *_ = feed(linear(every=5)[0], wavy(60), norms)[0]
    assert "the gradient norm is 900" in rewound.reason


def test_a_constant_loss_may_wander_a_little():
    assert feed(linear()[0], [1.0] * 30 + [1.05] * 30)[0] == []


# --- what is kept ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("every", [1, 4, 20])
def test_batches_are_kept_only_while_they_may_be_needed(every, depth):
    rewind, *_ = linear(every=every, depth=depth, patience=3, lookback=2)
    for batch in rewind.batches(range(200)):
        rewind.observe(wavy(200)[batch])
        assert len(rewind._steps) <= every + rewind.patience + rewind.lookback + 1
        assert len(rewind._snapshots) + len(rewind._spare) <= max(depth, 2)


def test_a_snapshot_uses_its_memory_again():
    model = nn.Linear(50, 50)
    optimizer = torch.optim.AdamW(model.parameters())
    rewind = gg.Rewind(model, optimizer, every=2)
    places = set()
    for batch in rewind.batches(torch.randn(60, 4, 50).unbind()):
        optimizer.zero_grad()
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        rewind.observe(loss)
        if batch is not None and len(rewind._steps) > 20:
            continue
        for snapshot in (*rewind._snapshots, *rewind._spare):
            places.add(snapshot.kept[0]["tensors"]["weight"].data_ptr())
    assert len(places) == 2
    assert repr(rewind).startswith("Rewind(step 60, 0 rewinds, snapshots of 29.9 KiB")


def test_a_loader_that_draws_from_the_global_random_state_is_not_exact():
    losses = wavy(60)
    losses[40:43] = [100.0] * 3
    rewind, *_ = linear(every=5)
    drawing = (torch.rand(1).mul(0).add(step).long().item() for step in range(60))
    done = [rewound for batch in rewind.batches(drawing) if (rewound := rewind.observe(losses[batch]))]
    assert [one.exact for one in done] == [False]


def test_an_epoch_that_ends_inside_a_spike_is_rewound_in_the_next():
    rewind, *_ = linear(every=7)
    losses = [*wavy(41), 100.0]
    feed(rewind, losses)
    seen, done = [], []
    for batch in rewind.batches([100, 101, 102]):
        seen.append(batch)
        if rewound := rewind.observe(100.0 if batch in (100, 101) else 1.0):
            done.append(rewound)
    assert [one.skipped for one in done] == [(40, 41, 42, 43)]
    assert seen == [100, 101, *range(35, 40), 102]


# --- records --------------------------------------------------------------------------------------------------------


def test_suspects_are_incidents_with_their_ids(tmp_path):
    training = Training()
    path = tmp_path / "run.ledger"
    rewind = gg.Rewind(*training.parts, every=7, ledger=path, ids="id")
    (rewound,) = training.run(rewind.batches(stream(60, [40])), rewind)
    with gg.Ledger(path) as ledger:
        kept = ledger.incidents()
    assert [one.sample_id for one in kept] == [str(6 * step + row) for step in rewound.skipped for row in range(6)]
    assert {(one.stage, one.cause, one.step in rewound.skipped) for one in kept} == {("step", "loss spike", True)}
    assert kept[0].details == {"rewound_to": rewound.to_step, "suspects": list(rewound.skipped)}
    assert "the loss is" in kept[0].message


def test_the_batches_of_a_resilient_loader_have_their_ids():
    class Numbers(torch.utils.data.Dataset):
        def __len__(self):
            return 120

        def __getitem__(self, index):
            return torch.tensor(float(index))

    losses = wavy(60)
    losses[40:43] = [100.0] * 3
    rewind, *_ = linear(every=5)
    loader = gg.resilient(torch.utils.data.DataLoader(Numbers(), batch_size=2))
    done = [seen for batch in rewind.batches(loader) if (seen := rewind.observe(losses[int(batch[0]) // 2]))]
    assert [one.sample_id for one in done[0].incidents] == [str(number) for number in range(78, 86)]


def test_the_log_has_one_line(caplog):
    losses = wavy(60)
    losses[40:43] = [100.0] * 3
    with caplog.at_level(logging.WARNING, "gradgate"):
        feed(linear(every=5)[0], losses)
    assert [record.getMessage() for record in caplog.records] == [
        "step 42: the loss is 100, above 1.2 + 8 x 0.1; went back to step 35 without steps 39, 40, 41, 42"
    ]


def test_too_many_rewinds_say_what_was_tried_and_leave_the_last_good_state():
    rewind, model, _ = linear(every=1000)
    start = copy.deepcopy(model.state_dict())

    def train():
        for _ in rewind.batches(range(100)):
            with torch.no_grad():
                model.weight.add_(1)
            rewind.observe(float("nan") if rewind._number % 10 == 9 else 1.0)

    with pytest.raises(TooManyRewinds) as raised, pytest.warns(gg.errors.GradgateWarning):
        train()
    assert_same(model.state_dict(), start)
    assert len(raised.value.rewinds) == 3
    assert str(raised.value) == (
        "Rewind: step 29: the loss is nan; 3 rewinds led to step 0.\n"
        "to step 0, without 8, 9: step 9: the loss is nan\n"
        "to step 0, without 18, 19: step 19: the loss is nan\n"
        "to step 0, without 28, 29: step 29: the loss is nan\n"
        "Why: spikes that come again are an instability of the recipe, not of some batches; everything is as before "
        "step 0.\n"
        "Fix: a lower learning rate, a longer warm-up, or gradient clipping: gg.clip_grad, clip_grad_norm_"
    )


# --- checkpoints ----------------------------------------------------------------------------------------------------


class Stateful:
    """A loader with a state, as torchdata's StatefulDataLoader has."""

    def __init__(self, batches):
        self.batches, self.at = batches, 0

    def __iter__(self):
        while self.at < len(self.batches):
            self.at += 1
            yield self.batches[self.at - 1]
        self.at = 0

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


@pytest.mark.slow
@pytest.mark.parametrize("loader_of", [list, Stateful], ids=["list", "stateful loader"])
@pytest.mark.parametrize("stop", [3, 30, 41, 42, 43, 44, 46, 55])
def test_a_run_that_was_killed_goes_on_as_if_it_had_not_been(stop, loader_of):
    """The stops lie before, inside and after the spike, and in the middle of the batches that are given again."""
    batches = stream(60, [40])

    def interrupted(training):
        taken.append(None)
        if len(taken) == stop:
            raise KeyboardInterrupt

    whole = Training()
    rewind = gg.Rewind(*whole.parts, every=7)
    wanted = whole.run(rewind.batches(batches), rewind)

    taken, first = [], Training()
    rewind = gg.Rewind(*first.parts, every=7)
    loader = loader_of(batches)
    with pytest.raises(KeyboardInterrupt):
        first.run(rewind.batches(loader), rewind, at_step=interrupted)
    saved, kept = first.state(), copy.deepcopy(rewind.state_dict())

    second = Training()
    for part, name in zip(second.parts, ("model", "optimizer", "scheduler", "average", "scaler"), strict=True):
        part.load_state_dict(saved[name])
    torch.set_rng_state(saved["torch"])
    random.setstate(saved["python"])
    rewind = gg.Rewind(*second.parts, every=7)
    rewind.load_state_dict(kept)
    found = second.run(rewind.batches(loader_of(batches)), rewind)
    assert_same(second.state(), whole.state())
    assert [one.skipped for one in rewind.rewinds] == [one.skipped for one in wanted]
    assert all(one.exact for one in found)


# --- what is refused ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda m, o: gg.Rewind(), ArgumentTypeError, "Rewind(): there is nothing to rewind."),
        (lambda m, o: gg.Rewind(m, 3), ArgumentTypeError, "Rewind(): the int 3 has no state_dict and load_state_dict."),
        (lambda m, o: gg.Rewind(m, every=0), ArgumentValueError, "Rewind(): `every` is the int 0."),
        (lambda m, o: gg.Rewind(m, lookback=-1), ArgumentValueError, "Rewind(): `lookback` is the int -1."),
        (lambda m, o: gg.Rewind(m, patience=True), ArgumentValueError, "Rewind(): `patience` is the bool True."),
        (lambda m, o: gg.Rewind(m, threshold=torch.nan), ArgumentValueError, "Rewind(): `threshold` is the float nan."),
        (lambda m, o: gg.Rewind(m).observe(1.0), ArgumentValueError, "Rewind.observe(): `batches` gave no batch"),
        (lambda m, o: gg.Rewind(m).load_state_dict({}), ArgumentValueError, "Rewind.load_state_dict(): the entries"),
    ],
)
def test_what_is_refused(call, error, message):
    model = nn.Linear(1, 1)
    with pytest.raises(error) as raised:
        call(model, torch.optim.SGD(model.parameters()))
    assert str(raised.value).startswith(message)


def test_a_loss_that_is_no_number_is_refused():
    rewind, *_ = linear()
    for _ in rewind.batches([0]):
        with pytest.raises(ArgumentTypeError, match="`loss` is"):
            rewind.observe(torch.ones(3))


def test_without_is_the_stream_of_the_law():
    assert len(without(stream(10), [])) == 10


def test_each_suspect_is_recorded_with_the_loss_of_its_step(tmp_path):
    model = torch.nn.Linear(2, 1)
    ledger = gg.Ledger(tmp_path / "run.ledger")
    rewind = gg.Rewind(model, every=10, patience=2, ledger=ledger)
    seen = []
    for _ in rewind.batches([torch.ones(1, 2)] * 60):
        seen.append(50.0 + len(seen) if len(seen) in (40, 41) else 1.0 + len(seen) % 3 / 10)
        rewind.observe(seen[-1])
    recorded = {incident.step: incident.loss for incident in ledger.incidents()}
    assert recorded == {39: seen[39], 40: 90.0, 41: 91.0}


def test_limit_a_drop_of_the_guard_in_a_step_that_comes_again_is_recorded_again(tmp_path):
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    ledger = gg.Ledger(tmp_path / "run.ledger")
    guard = gg.Guard(model, ledger)
    rewind = gg.Rewind(model, optimizer, guard, every=4, ledger=ledger)
    batches = [(number, torch.randn(4, 3)) for number in range(16)]
    batches[9][1][2] = float("nan")
    for number, x in rewind.batches(batches):
        optimizer.zero_grad()
        loss = guard.backward(x, lambda x: model(x).square().mean(1)).loss
        optimizer.step()
        rewind.observe(float("nan") if number == 11 else loss)
    assert [one.step for one in ledger.incidents() if one.cause == "non-finite loss"] == [9, 9]
    assert guard.summary().dropped == 1
