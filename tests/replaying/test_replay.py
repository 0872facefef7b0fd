"""A recorded sample again: the same fault, another one, or none."""

import random
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import pytest
import torch

import gradgate as gg
from gradgate._payload import encode
from gradgate._state import capture
from gradgate.errors import ArgumentTypeError, LedgerError, NothingMatchedError
from gradgate.ledger import Ledger
from gradgate.records import Incident


@dataclass(frozen=True)
class Batch:
    image: torch.Tensor
    names: list

    def pixels(self):
        return self.image.flatten(1)


class Pair(NamedTuple):
    x: torch.Tensor
    y: torch.Tensor


@pytest.fixture
def ledger(tmp_path):
    with Ledger(tmp_path / "run.ledger", payload=True, snapshot=True) as opened:
        yield opened


def recorded(ledger, sample, snapshot=None, **more):
    incident = Incident(**{"stage": "forward", "cause": "exception", "sample_id": "img_17.png", **more})
    ledger.record_many([incident], {incident.id: encode(sample)}, snapshot=snapshot)
    return incident.id


def strict(batch):
    if batch.min() < 0:
        raise ValueError(f"a negative pixel: {batch.min().item()}")
    return batch.mean()


WHERE = f"tests/replaying/test_replay.py:{strict.__code__.co_firstlineno + 2}"


# --- verdicts ------------------------------------------------------------------------------------------------------


def test_the_same_exception_comes_again(ledger):
    name = recorded(ledger, -torch.ones(1, 2), exception_type="ValueError", message="old words", where=WHERE)
    result = gg.replay(ledger, name, strict)
    assert (result.verdict, result.fails, result.rows, result.snapshot) == ("same", True, 1, False)
    assert isinstance(result.fault.exception, ValueError)
    assert result.fault.where == WHERE
    assert str(result) == (
        "Sample 'img_17.png' failed in forward.\n"
        f"  then: ValueError: old words   ({WHERE})\n"
        f"  now:  ValueError: a negative pixel: -1.0   ({WHERE})\n"
        "The same fault came again.\n"
        "The weights were those that loss_fn has now; those of that step were not stored."
    )


def test_the_same_words_at_a_line_that_moved_are_the_same_fault(ledger):
    name = recorded(
        ledger,
        -torch.ones(1, 2),
        exception_type="ValueError",
        message="a negative pixel: -1.0",
        where="tests/replaying/test_replay.py:1",
        step=7,
    )
    result = gg.replay(str(ledger.path), name[:8], strict)
    assert result.verdict == "same"
    assert str(result).startswith("Sample 'img_17.png' failed in forward at step 7.")


def test_a_message_that_was_cut_is_still_recognised(ledger):
    def wordy(batch):
        raise ValueError("x" * 10_000)

    name = recorded(ledger, torch.ones(1), exception_type="ValueError", message="x" * 10_000)
    assert gg.replay(ledger, name, wordy).verdict == "same"


@pytest.mark.parametrize(
    ("exception_type", "message"), [("KeyError", "a negative pixel: -1.0"), ("ValueError", "other")]
)
def test_another_exception_is_another_fault(ledger, exception_type, message):
    name = recorded(ledger, -torch.ones(1, 2), exception_type=exception_type, message=message, where="x.py:1")
    result = gg.replay(ledger, name, strict)
    assert result.verdict == "another"
    assert "It still fails, but with another fault." in str(result)


def test_a_fault_that_was_repaired_is_gone(ledger):
    name = recorded(ledger, -torch.ones(1, 2), exception_type="ValueError", message="a negative pixel")
    result = gg.replay(ledger, name, lambda batch: strict(batch.abs()))
    assert (result.verdict, result.fault, result.fails) == ("passes", None, False)
    assert "  now:  nothing\nIt no longer fails." in str(result)
    told = {
        "incident": name,
        "verdict": "passes",
        "fault": None,
        "rows": 1,
        "snapshot": False,
        "snapshot_stored": False,
    }
    assert result.to_dict() == told


def test_a_loss_that_is_not_finite(ledger):
    weight = torch.ones(2, requires_grad=True)
    name = recorded(ledger, -torch.ones(1, 2), stage="loss", cause="non-finite loss")
    result = gg.replay(ledger, name, lambda batch: (weight * batch).log().mean(1))
    assert (result.verdict, result.fault.cause, result.fault.message) == (
        "same",
        "non-finite loss",
        "non-finite loss: nan",
    )
    assert result.to_dict()["fault"]["stage"] == "loss"


def test_a_gradient_that_is_not_finite_under_a_finite_loss(ledger):
    model = torch.nn.Linear(2, 1, bias=False)
    name = recorded(ledger, torch.zeros(1, 2), stage="backward", cause="non-finite gradient")

    def loss_fn(batch):
        return model(batch).sqrt().mean() * 0 + (model.weight * 0).sqrt().sum()

    result = gg.replay(ledger, name, loss_fn, model=model)
    assert result.verdict == "same"
    assert result.fault.message == "non-finite gradient of weight"
    assert model.weight.grad is None
    assert gg.replay(ledger, name, lambda batch: model(batch).log().mean()).verdict == "another"  # An infinite loss.


def test_an_exception_in_backward(ledger):
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            raise RuntimeError("no way back")

    name = recorded(ledger, torch.ones(1), stage="backward", exception_type="RuntimeError", message="no way back")
    weight = torch.ones(1, requires_grad=True)
    result = gg.replay(ledger, name, lambda batch: Fails.apply(weight * batch).sum())
    assert (result.verdict, result.fault.stage) == ("same", "backward")


def test_a_fault_of_several_samples_together_is_known_by_its_kind(ledger):
    name = recorded(ledger, torch.ones(1), cause="together", details={"fault": "non-finite loss"})
    assert gg.replay(ledger, name, lambda batch: batch.log().log().sum()).verdict == "same"


# --- alone ---------------------------------------------------------------------------------------------------------


def test_a_sample_that_fails_only_for_being_alone_is_given_twice(ledger):
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))
    sample = {
        "x": torch.ones(1, 2),
        "name": ["a"],
        "pair": Pair(torch.ones(1, 2), torch.ones(1)),
        "scale": torch.tensor(2.0),
    }
    name = recorded(ledger, sample, exception_type="ValueError", message="a negative pixel")

    def loss_fn(batch):
        assert len(batch["x"]) == len(batch["name"]) == len(batch["pair"].y)
        return model(batch["x"]).sum() * batch["scale"]

    before = {key: value.clone() for key, value in model.state_dict().items()}
    result = gg.replay(ledger, name, loss_fn, model=model)
    assert (result.verdict, result.rows) == ("passes", 2)
    assert "given twice in one batch" in str(result)
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())


def test_a_fault_behind_batch_norm_is_found_with_two_rows(ledger):
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))
    name = recorded(ledger, torch.full((1, 2), -1.0), exception_type="ValueError", message="a negative pixel: -1.0")
    result = gg.replay(ledger, name, lambda batch: model(batch).sum() + strict(batch))
    assert (result.verdict, result.rows) == ("same", 2)


@pytest.mark.parametrize("wrap", [lambda b: b, list, lambda b: Batch(b[0], b[1])], ids=["tuple", "list", "dataclass"])
def test_every_kind_of_batch_can_be_given_twice(ledger, wrap):
    name = recorded(ledger, wrap((torch.ones(1, 1, 2), ["a"])), exception_type="KeyError", message="x")

    def loss_fn(batch):
        image, names = (batch.image, batch.names) if isinstance(batch, Batch) else batch
        if len(image) < 2:
            raise ValueError("alone")
        assert image.shape == (2, 1, 2)
        assert names == ["a", "a"]
        return image.sum()

    assert gg.replay(ledger, name, loss_fn).rows == 2


def test_a_record_whose_class_is_not_at_hand_can_be_given_twice(ledger):
    class Elsewhere(NamedTuple):
        image: torch.Tensor
        names: list

    name = recorded(ledger, {"in": Elsewhere(torch.ones(1, 2), ["a"])}, exception_type="KeyError", message="x")

    def loss_fn(batch):
        if len(batch["in"].image) < 2:
            raise ValueError("alone")
        assert batch["in"].names == ["a", "a"]
        return batch["in"].image.sum()

    assert gg.replay(ledger, name, loss_fn).rows == 2


def test_another_batch_dimension(ledger):
    name = recorded(ledger, torch.ones(3, 1), exception_type="KeyError", message="x")

    def loss_fn(batch):
        if batch.shape[1] < 2:
            raise ValueError("alone")
        return batch.sum()

    assert gg.replay(ledger, name, loss_fn, batch_dim=1).verdict == "passes"


# --- states and samples --------------------------------------------------------------------------------------------


def test_the_weights_and_chances_of_that_step_are_in_force(ledger):
    model = torch.nn.Linear(1, 1)
    torch.nn.init.constant_(model.weight, float("nan"))
    state = capture(model)
    chance = torch.rand(1).item(), random.random()
    name = recorded(ledger, torch.ones(1, 1), snapshot=state, stage="loss", cause="non-finite loss")
    torch.nn.init.constant_(model.weight, 1.0)
    seen = []

    def loss_fn(batch):
        seen.append((torch.rand(1).item(), random.random()))
        return model(batch).mean()

    result = gg.replay(ledger, name, loss_fn, model=model)
    assert (result.verdict, result.snapshot) == ("same", True)
    assert seen == [chance]
    assert model.weight.item() == 1.0
    assert "those of that step were not stored" not in str(result)
    assert gg.replay(ledger, name, loss_fn).verdict == "passes"  # With the weights of today it is well.


def test_random_numbers_of_the_caller_are_not_spent(ledger):
    name = recorded(ledger, torch.ones(1))
    before = torch.get_rng_state()
    gg.replay(ledger, name, lambda batch: (batch * torch.rand(1)).sum())
    assert torch.equal(torch.get_rng_state(), before)


def test_classes_of_the_loss_function_come_back(ledger):
    name = recorded(ledger, Batch(torch.ones(1, 2, 2), ["a"]))
    assert gg.replay(ledger, name, lambda batch: batch.pixels().sum()).verdict == "passes"
    assert gg.replay(ledger, name, partial(lambda scale, batch: batch.pixels().sum() * scale, 2)).verdict == "passes"

    class Loss:
        def __call__(self, batch):
            return batch.pixels().sum()

        def method(self, batch):
            return batch.pixels().sum()

    assert gg.replay(ledger, name, Loss()).verdict == "passes"
    assert gg.replay(ledger, name, Loss().method).verdict == "passes"


def test_a_loss_function_that_changes_its_batch_gets_a_new_one_each_time(ledger):
    name = recorded(ledger, torch.ones(1, 2), exception_type="KeyError", message="x")

    def loss_fn(batch):
        batch.neg_()
        if len(batch) == 1:
            raise ValueError("alone")
        assert (batch == -1).all()
        return batch.sum()

    assert gg.replay(ledger, name, loss_fn).verdict == "passes"


def test_a_mode_of_the_caller_does_not_hide_the_gradient(ledger):
    weight = torch.zeros(1, requires_grad=True)
    name = recorded(ledger, torch.ones(1), stage="backward", cause="non-finite gradient")
    for mode in (torch.no_grad(), torch.inference_mode()):
        with mode:
            assert gg.replay(ledger, name, lambda batch: (weight * batch).sqrt().sum()).verdict == "same"


def test_a_sample_that_could_not_be_loaded_is_said(ledger):
    incident = Incident(stage="load", cause="exception", sample_id="7")
    ledger.record(incident)
    with pytest.raises(LedgerError, match=r"it failed while it was loaded(.|\n)*dataset\[7\]"):
        gg.replay(ledger, incident.id, strict)


def test_a_sample_that_was_not_stored_is_said(tmp_path):
    with Ledger(tmp_path / "run.ledger") as ledger:
        incident = Incident(stage="forward", cause="exception")
        ledger.record(incident, b"sample")
        with pytest.raises(LedgerError, match=r"was not stored: .*opened without it(.|\n)*payload=True"):
            gg.replay(ledger, incident.id, strict)
        with pytest.raises(NothingMatchedError, match="there is no incident 'nothing'"):
            gg.replay(ledger, "nothing", strict)


def test_a_sample_that_was_not_stored_whole_is_said(ledger):
    name = recorded(ledger, {"x": torch.ones(1), "picture": object()})
    with pytest.raises(LedgerError, match=r"not stored whole; missing: builtins.object(.|\n)*payload_limit"):
        gg.replay(ledger, name, strict)


def test_a_loss_function_that_returns_no_tensor_is_refused(ledger):
    with pytest.raises(ArgumentTypeError, match=r"`loss_fn` returned the float 1.0(.|\n)*return loss"):
        gg.replay(ledger, recorded(ledger, torch.ones(1)), lambda batch: 1.0)


def test_a_loss_function_that_cannot_be_called_is_no_fault_of_the_sample(ledger):
    with pytest.raises(ArgumentTypeError, match=r"`loss_fn` is None(.|\n)*gg.replay"):
        gg.replay(ledger, "none", None)


def test_gradients_that_are_sparse_and_losses_that_have_none(ledger):
    table = torch.nn.Embedding(3, 2, sparse=True)
    name = recorded(ledger, torch.tensor([1]), cause="non-finite loss", stage="loss")
    assert gg.replay(ledger, name, lambda batch: table(batch).sum()).verdict == "passes"
    assert gg.replay(ledger, name, lambda batch: torch.ones(2)).verdict == "passes"
    assert gg.replay(ledger, name, lambda batch: (table(batch) * 0).sqrt().sum()).fault.cause == "non-finite gradient"
