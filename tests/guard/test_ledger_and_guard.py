"""What the guard gives to a ledger: the samples up to its limit, and the state as it was before the step."""

import pytest
import torch

import gradgate as gg
from gradgate import replaying


class Noisy(torch.nn.Module):
    """A model whose fault depends on its weights, its statistics and its dropout."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Dropout(0.5))

    def forward(self, x):
        return self.layers(x)


def loss_of(model):
    return lambda x: model(x).square().mean()


def bad_batch():
    batch = torch.randn(6, 3)
    batch[2, 1] = float("nan")
    return batch


def test_a_ledger_that_keeps_samples_gets_them_without_being_asked_twice(tmp_path):
    model = Noisy()
    with gg.Ledger(tmp_path / "run.ledger", payload=True, payload_limit=2**20) as ledger:
        result = gg.Guard(model, ledger=ledger).backward(bad_batch(), loss_of(model))
        assert ledger.payload_of(result.dropped[0].id) is not None
        result = gg.replay(ledger, result.dropped[0].id, loss_of(model))
    assert result.verdict == "same"
    assert not result.snapshot


@pytest.mark.slow
def test_a_larger_limit_of_the_ledger_is_used(tmp_path):
    batch = torch.zeros(3, 2**23, dtype=torch.float32)  # 32 MiB a sample, over the usual limit
    batch[1, 0] = float("nan")
    weight = torch.nn.Parameter(torch.ones(()))
    holder = torch.nn.ParameterList([weight])
    with gg.Ledger(tmp_path / "run.ledger", payload=True, payload_limit=2**26) as ledger:
        result = gg.Guard(holder, ledger=ledger).backward(batch, lambda x: (x.mean(1) * weight).mean())
        stored = ledger.payload_of(result.dropped[0].id)
    assert len(stored) > 2**25


def test_a_snapshot_is_the_state_before_the_step(tmp_path):
    model = Noisy()
    guard = gg.Guard(model, ledger=(ledger := gg.Ledger(tmp_path / "run.ledger", payload=True, snapshot=True)))
    guard.backward(torch.randn(6, 3), loss_of(model))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    random = torch.get_rng_state()
    result = guard.backward(bad_batch(), loss_of(model))
    (incident,) = result.dropped
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)
    seen = {}

    def looking(x):
        seen.update({name: value.clone() for name, value in model.state_dict().items()}, random=torch.get_rng_state())
        return loss_of(model)(x)

    result = gg.replay(ledger, incident.id, looking, model=model)
    ledger.close()
    assert result.snapshot
    assert torch.equal(seen.pop("random"), random) or result.rows > 1
    weights = [name for name in before if "weight" in name or "bias" in name]
    assert all(torch.equal(seen[name], before[name]) for name in weights)


def test_the_doctor_says_where_a_recorded_fault_is_born(tmp_path):
    model = torch.nn.Linear(2, 1)
    with torch.no_grad():
        model.weight.fill_(1.0)
        model.bias.zero_()

    def loss_fn(x):
        return torch.log(model(x)).mean()

    ledger = gg.Ledger(tmp_path / "run.ledger", payload=True)
    result = gg.Guard(model, ledger=ledger).backward(torch.tensor([[1.0, 1.0], [-1.0, -1.0], [2.0, 2.0]]), loss_fn)
    diagnosis = replaying.examine(ledger, result.dropped[0].id, loss_fn, model=model)
    ledger.close()
    assert not diagnosis.healthy
    assert any("log" in (finding.source or "") for finding in diagnosis.findings)
