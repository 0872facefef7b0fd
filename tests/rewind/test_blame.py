"""Blame: which of the suspects of a loss spike made it, and the others are released."""

import pytest
import torch
from torch import nn

import gradgate as gg
from gradgate.errors import ArgumentValueError
from tests.rewind.trainings import Training, assert_same, stream

STEPS = 60


def trained(batches, *, ledger=None, blame=True, **options):
    """Train until the first spike; give the training, what was done, and who is to blame."""
    training = Training(options.pop("optimizer", "sgd"))
    rewind = gg.Rewind(*training.parts, every=7, ids="id", ledger=ledger, **options)

    def step(*given):
        total = 0.0
        training.optimizer.zero_grad()
        for batch in given:
            loss = training.loss_of(batch) / len(given)
            loss.backward()
            total += loss.detach()
        training.optimizer.step()
        training.scheduler.step()
        training.average.update_parameters(training.model)
        return total

    for batch in rewind.batches(batches):
        done = rewind.observe(step(batch))
        if done is not None:
            break
    else:
        pytest.fail("no spike")
    before = training.state()
    found = rewind.blame(step) if blame else None
    assert_same(training.state(), before)
    return training, rewind, done, found, step


def poisoned(step, rows, by=1e4):
    batches = stream(STEPS)
    batches[step]["y"][list(rows)] *= by
    return batches


@pytest.mark.parametrize("step", range(25, 41))
def test_the_one_batch_and_its_rows_are_found(step):
    _, _, done, found, _ = trained(poisoned(step, [2]))
    assert step in done.skipped
    assert found.steps == (step,)
    assert found.rows == {step: (2,)}
    assert found.sample_ids == [str(step * 6 + 2)]
    assert not found.together


@pytest.mark.parametrize("optimizer", ["adamw", "rprop"])
def test_other_optimizers(optimizer):
    _, _, _, found, _ = trained(poisoned(33, [0, 5], 1e6), optimizer=optimizer, patience=1)
    assert found.steps == (33,)
    assert found.rows == {33: (0, 5)}


def test_a_batch_that_is_not_finite():
    batches = stream(STEPS)
    batches[30]["x"][4] = torch.inf
    _, _, _, found, _ = trained(batches)
    assert found.steps == (30,)
    assert found.rows == {30: (4,)}
    assert str(found) == "step 30 (rows 4); samples 184; 9 trials"


def test_a_spike_in_the_first_step_has_no_batch_before_it():
    batches = stream(STEPS)
    batches[0]["x"][1] = torch.nan
    _, _, _, found, _ = trained(batches)
    assert found.steps == (0,)
    assert found.rows == {0: (1,)}


@pytest.mark.slow
def test_the_others_are_released(tmp_path):
    with gg.Ledger(tmp_path / "run.ledger") as ledger:
        _, _, done, _, _ = trained(poisoned(31, [3]), ledger=ledger, blame=False)
        suspects = {str(row) for step in done.skipped for row in range(step * 6, step * 6 + 6)}
        assert set(ledger.bad_ids()) == suspects
    with gg.Ledger(tmp_path / "other.ledger") as ledger:
        trained(poisoned(31, [3]), ledger=ledger)
        assert set(ledger.bad_ids()) == {str(31 * 6 + 3)}


def test_without_rows_whole_batches_are_blamed(tmp_path):
    _, rewind, _, _, step = trained(poisoned(31, [3]), blame=False)
    found = rewind.blame(step, rows=False)
    assert found.steps == (31,)
    assert found.rows == {}
    assert found.sample_ids == sorted(str(row) for row in range(186, 192))


def test_a_spike_that_does_not_come_again_is_nobodys(tmp_path):
    with gg.Ledger(tmp_path / "run.ledger") as ledger:
        _, rewind, _, _, _ = trained(poisoned(31, [3]), ledger=ledger, blame=False)
        found = rewind.blame(lambda batch: 0.1)
        assert found.steps == ()
        assert str(found) == "the spike does not come again (1 trial): no batch is to blame"
        assert ledger.bad_ids()


def test_two_that_are_bad_only_together():
    model = nn.Linear(1, 1)
    rewind = gg.Rewind(model, every=10, patience=2)

    def step(batch):  # the weight counts the steps of a kind; two of them ruin the rest
        with torch.no_grad():
            model.weight += batch["kind"]
        return 1.0 + 1e3 * float(model.weight >= 1.9) + 0.01 * batch["noise"]

    with torch.no_grad():
        model.weight.zero_()
    noise = torch.rand(STEPS, generator=torch.Generator().manual_seed(0)).tolist()
    batches = [{"kind": float(number in (40, 41)), "noise": noise[number]} for number in range(STEPS)]
    for batch in rewind.batches(batches):
        if rewind.observe(step(batch)):
            break
    found = rewind.blame(step)
    assert found.together
    assert set(found.steps) == {40, 41}


@pytest.mark.slow
def test_training_goes_on_as_if_nobody_had_been_blamed():
    batches = poisoned(31, [3])

    def run(blame):
        training = Training("adamw")
        rewind = gg.Rewind(*training.parts, every=7)

        def step(batch):
            training.optimizer.zero_grad()
            loss = training.loss_of(batch)
            loss.backward()
            training.optimizer.step()
            training.scheduler.step()
            training.average.update_parameters(training.model)
            return loss

        for batch in rewind.batches(batches):
            if rewind.observe(step(batch)) and blame:
                assert rewind.blame(step).steps == (31,)
        return training.state()

    assert_same(run(True), run(False))


def test_an_interrupt_leaves_everything_as_it_was():
    training, rewind, _, _, step = trained(poisoned(31, [3]), blame=False)
    before, calls = training.state(), []

    def interrupted(batch):
        calls.append(1)
        if len(calls) == 9:
            raise KeyboardInterrupt
        return step(batch)

    with pytest.raises(KeyboardInterrupt):
        rewind.blame(interrupted)
    assert_same(training.state(), before)
    assert rewind.blame(step).steps == (31,)


def test_there_must_be_a_spike_and_its_snapshot():
    training = Training("sgd")
    rewind = gg.Rewind(*training.parts, every=7)
    training.run(rewind.batches(stream(30)), rewind)
    with pytest.raises(ArgumentValueError) as error:
        rewind.blame(training.loss_of)
    assert "there is no spike whose snapshot is still kept" in str(error.value)
    assert "if rewind.observe(loss): print(rewind.blame(step_fn))" in str(error.value)
    rewind = gg.Rewind(*training.parts, every=7)
    training.run(rewind.batches(poisoned(30, [1])), rewind)  # the snapshot from before the spike is gone at the end
    assert rewind.rewinds
    with pytest.raises(ArgumentValueError, match="still kept"):
        rewind.blame(training.loss_of)
