"""gradgate replay --doctor: the recorded sample again, and where its fault is produced."""

import json
import sys

import pytest
import torch
from click.testing import CliRunner

import gradgate as gg
from gradgate.cli import main

PROGRAM = """
import torch

model = torch.nn.Linear(2, 1)
with torch.no_grad():
    model.weight.fill_(1.0)
    model.bias.zero_()


def loss_fn(batch):
    return torch.log(model(batch)).mean()
"""


@pytest.fixture
def recorded(tmp_path, monkeypatch):
    (tmp_path / "training_with_a_log.py").write_text(PROGRAM)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    import training_with_a_log as training

    with gg.Ledger("run.ledger", payload=True) as ledger:
        guard = gg.Guard(training.model, ledger=ledger)
        result = guard.backward(torch.tensor([[1.0, 1.0], [-1.0, -1.0], [2.0, 2.0]]), training.loss_fn)
    yield result.dropped[0].id
    del sys.modules["training_with_a_log"]


def test_the_doctor_is_asked(recorded):
    command = ["replay", "run.ledger", recorded, "--entry", "training_with_a_log:loss_fn", "--doctor"]
    done = CliRunner().invoke(main, command)
    assert done.exit_code == 3, done.output
    assert "The same fault came again." in done.output
    assert "training_with_a_log.py:11" in done.output
    answer = json.loads(CliRunner().invoke(main, [*command, "--json"]).stdout)
    assert answer["verdict"] == "same"
    assert answer["diagnosis"]["findings"]
