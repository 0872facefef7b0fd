"""What is written down of a bad step: incidents, log, sink, ledger, payload, summary and the guard's own state."""

import logging
import math

import pytest
import torch
from torch import nn

import gradgate as gg
from gradgate._payload import decode
from gradgate.errors import LedgerWarning
from gradgate.records import Incident


class Sink:
    def __init__(self):
        self.incidents, self.payloads = [], {}

    def record_many(self, incidents, payloads=None):
        self.incidents += incidents
        self.payloads.update(payloads or {})


def spoilt(size, *rows):
    x = torch.randn(size, 3)
    x[list(rows)] = float("nan")
    return x


@pytest.fixture
def model():
    return nn.Linear(3, 1)


def loss_of(model):
    return lambda x: model(x).square().mean()


def test_incidents_carry_who_when_and_what(model):
    sink = Sink()
    guard = gg.Guard(model, sink=sink, run="night")
    guard.epoch = 4
    guard.backward(torch.randn(8, 3), loss_of(model))
    result = guard.backward(spoilt(8, 2, 5), loss_of(model), ids=[f"img_{i}.png" for i in range(8)])
    assert list(result.dropped) == sink.incidents
    incident = result.dropped[1]
    assert (incident.sample_id, incident.row, incident.run, incident.step, incident.epoch) == (
        "img_5.png",
        5,
        "night",
        1,
        4,
    )
    assert (incident.rank, incident.world_size, incident.transient) == (0, 1, False)
    assert incident.details["batch"] == 8
    assert incident.details["tried"] == "values that are not finite, in the batch itself"
    assert math.isnan(incident.loss)
    assert len({i.id for i in result.dropped}) == 2


def test_a_sink_that_raises_is_warned_of_once_and_the_training_goes_on(model, tmp_path):
    class Full:
        def record_many(self, incidents, payloads=None):
            raise ValueError("no room")

    guard = gg.Guard(model, ledger=tmp_path / "run.ledger", sink=Full())
    with pytest.warns(LedgerWarning) as said:
        results = [guard.backward(spoilt(8, 2), loss_of(model)) for _ in range(3)]
    (warning,) = said
    assert "Full raised ValueError: no room. The training goes on" in str(warning.message)
    assert warning.filename == __file__
    assert [len(result.dropped) for result in results] == [1, 1, 1]
    assert len(gg.Ledger(tmp_path / "run.ledger", read_only=True).incidents()) == 3


@pytest.mark.parametrize("ids", [range(10, 18), torch.arange(10, 18), [10, 11, 12, 13, 14, 15, 16, 17]])
def test_ids_of_any_kind_become_text(model, ids):
    assert gg.Guard(model).backward(spoilt(8, 3), loss_of(model), ids=ids).dropped[0].sample_id == "13"


def test_a_sample_loss_is_the_samples_own(model):
    weight = torch.ones(6)
    weight[2] = float("inf")
    result = gg.Guard(model).backward((torch.ones(6, 3), weight), lambda b: model(b[0]).square()[:, 0] * b[1])
    assert result.dropped[0].loss == math.inf
    assert result.losses.shape == (5,)
    assert not result.losses.requires_grad
    assert torch.equal(result.losses.mean(), result.loss)


def test_one_line_of_log_for_each_incident(model, caplog):
    caplog.set_level(logging.WARNING, logger="gradgate")  # other tests may have silenced it
    gg.Guard(model).backward(spoilt(8, 2, 5), loss_of(model), ids=list("abcdefgh"))
    lines = [record.getMessage() for record in caplog.records if record.name == "gradgate"]
    assert len(lines) == 2
    assert lines[0].startswith("step 0: dropped sample c (row 2): non-finite loss in forward at ")


def test_a_ledger_by_its_path(model, tmp_path):
    guard = gg.Guard(model, ledger=tmp_path / "run.ledger")
    guard.backward(spoilt(8, 2), loss_of(model), ids=list("abcdefgh"))
    ledger = gg.Ledger(tmp_path / "run.ledger")
    assert [(i.sample_id, i.cause, i.run) for i in ledger.incidents()] == [("c", "non-finite loss", guard.run)]
    assert ledger.bad_ids() == {"c"} or list(ledger.bad_ids()) == ["c"]


def test_a_ledger_and_a_sink_both_get_it(model, tmp_path):
    sink, ledger = Sink(), gg.Ledger(tmp_path / "run.ledger")
    gg.Guard(model, ledger=ledger, sink=sink).backward(spoilt(8, 2), loss_of(model))
    assert len(sink.incidents) == len(list(ledger.incidents())) == 1


def test_samples_themselves_only_when_asked_for(model):
    sink = Sink()
    batch = {"x": spoilt(6, 4), "name": list("abcdef")}
    gg.Guard(model, sink=sink).backward(batch, lambda b: model(b["x"]).mean())
    assert sink.payloads == {}
    gg.Guard(model, sink=sink, payload=True).backward(batch, lambda b: model(b["x"]).mean())
    (payload,) = sink.payloads.values()
    sample = decode(payload)
    assert sample["x"].shape == (1, 3)
    assert sample["x"].isnan().all()
    assert sample["name"] == ["e"]


def test_payloads_reach_the_ledger(model, tmp_path):
    guard = gg.Guard(model, ledger=tmp_path / "run.ledger", payload=True)
    incident = guard.backward(spoilt(6, 4), loss_of(model)).dropped[0]
    assert decode(gg.Ledger(tmp_path / "run.ledger").payload_of(incident.id)).shape == (1, 3)


@pytest.mark.parametrize("limit", [{"max_bad": 0.1}, {"patience": 1}], ids=str)
def test_what_was_refused_is_written_down_and_marked(model, tmp_path, limit):
    sink = Sink()
    guard = gg.Guard(model, tmp_path / "run.ledger", sink=sink, **limit)
    with pytest.raises(gg.TooManyBadSamples) as caught:
        guard.backward(spoilt(6, 1, 2), loss_of(model), ids=list("abcdef"))
    assert sink.incidents == list(caught.value.incidents)
    assert [(one.sample_id, one.details["refused"]) for one in sink.incidents] == [("b", True), ("c", True)]
    ledger = gg.Ledger(tmp_path / "run.ledger")
    assert {one.sample_id for one in ledger.incidents()} == {"b", "c"}
    # Where a whole batch seems bad, the code or the weights are: later epochs do not leave its samples out.
    assert set(ledger.bad_ids()) == (set() if "max_bad" in limit else {"b", "c"})
    assert guard.summary().dropped == 0  # nothing was dropped: there was no step


def test_a_fault_that_does_not_come_again_is_nobodys(model):
    calls = []
    sink = Sink()

    def loss_fn(x):
        calls.append(len(x))
        if len(calls) == 1:
            raise OSError("a cosmic ray")
        return model(x).mean()

    guard = gg.Guard(model, sink=sink)
    result = guard.backward(torch.randn(6, 3), loss_fn)
    assert result.kept == list(range(6))
    assert result.dropped == ()
    (incident,) = result.transient
    assert sink.incidents == [incident]
    assert (incident.transient, incident.row, incident.message) == (True, None, "a cosmic ray")
    assert guard.summary().transient == 1
    assert guard.summary().dropped == guard.summary().bad_steps == 0


def test_a_value_that_does_not_come_again_is_nobodys(model):
    calls = []

    def loss_fn(x):
        calls.append(len(x))
        return model(x).mean() * (float("nan") if len(calls) == 1 else 1.0)

    result = gg.Guard(model).backward(torch.randn(6, 3), loss_fn)
    assert result.dropped == ()
    assert result.transient[0].cause == "non-finite loss"
    assert result.loss.isfinite()


def test_a_fault_that_comes_and_goes_is_raised(model):
    calls = []

    def loss_fn(x):
        calls.append(len(x))
        if len(calls) in (1, 4):  # not in the replays in between
            raise OSError("loose contact")
        return model(x).mean()

    with pytest.raises(OSError, match="loose contact") as caught:
        gg.Guard(model).backward(torch.randn(6, 3), loss_fn)
    assert "it comes and goes" in caught.value.__notes__[-1]


def test_the_summary_prints_as_a_table(model):
    guard = gg.Guard(model)
    guard.backward(torch.randn(8, 3), loss_of(model))
    guard.backward(spoilt(8, 1, 2), loss_of(model))
    assert str(guard.summary()) == (
        "2 steps with 16 samples: 2 samples dropped in 1 step (12.5 %), 0 transient faults\n"
        "cause            dropped\n"
        "non-finite loss  2"
    )
    assert (
        str(gg.Guard(model).summary())
        == "0 steps with 0 samples: 0 samples dropped in 0 steps (0 %), 0 transient faults"
    )


def test_the_state_goes_through_a_checkpoint(model, tmp_path):
    guard = gg.Guard(model, patience=3)
    guard.epoch = 7
    for _ in range(2):
        guard.backward(spoilt(8, 1), loss_of(model))
    torch.save(guard.state_dict(), tmp_path / "guard.pt")
    resumed = gg.Guard(model, patience=3)
    resumed.load_state_dict(torch.load(tmp_path / "guard.pt", weights_only=True))
    assert resumed.state_dict() == guard.state_dict()
    assert resumed.epoch == 7
    with pytest.raises(gg.TooManyBadSamples, match="3 steps in a row"):
        resumed.backward(spoilt(8, 1), loss_of(model))


def test_a_state_of_something_else_is_refused(model):
    with pytest.raises(gg.GradgateError, match=r"the entries are \['lr'\]"):
        gg.Guard(model).load_state_dict({"lr": 0.1})


def test_a_long_table_is_cut():
    incidents = [gg.Incident(stage="loss", cause="non-finite loss", row=i, message="x" * 100) for i in range(30)]
    from gradgate.guard._result import incident_table

    lines = incident_table(incidents).splitlines()
    assert len(lines) == 22
    assert lines[-1] == "... and 10 more"
    assert lines[1].endswith("x...")


def test_a_step_lists_its_rows_and_prints_in_one_line():
    linear = nn.Linear(2, 1)
    result = gg.Guard(linear).backward(torch.ones(3, 2), lambda x: linear(x).sum() * 0 + 0.5)
    assert result.kept == [0, 1, 2]
    assert result.kept is result.kept
    assert repr(result) == "GuardResult(loss=0.5, kept=3 rows, dropped=0, exact=True)"


def test_an_incident_as_a_table_and_as_a_line():
    from gradgate.guard._result import incident_line, incident_table

    known = {"stage": "loss", "cause": "non-finite loss", "row": 3}
    assert incident_table([Incident(**known, message="inf")]).splitlines() == [
        "row  sample  stage  cause            where  what",
        "3    -       loss   non-finite loss  -      inf",
    ]
    line = incident_line(Incident(**known, sample_id="a.png", step=7))
    assert line == "step 7: dropped sample a.png (row 3): non-finite loss in loss"
