"""From a training that met a bad sample to a test that remembers it, each step a process of its own."""

import ast
import os
import subprocess
import sys

import pytest
import torch

from gradgate._payload import encode
from gradgate.errors import ArgumentValueError, LedgerError
from gradgate.ledger import Ledger
from gradgate.records import Incident
from gradgate.replaying import assert_passes, write_test

TRAIN = '''
import sys
import torch
from torch import nn
import gradgate as gg


class CountTable(nn.Module):
    """Refuses tokens that it does not know."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(10, 8)

    def forward(self, tokens):
        if int(tokens.max()) >= 10:  # repaired: if False:
            raise ValueError(f"unknown token {int(tokens.max())}")
        return self.table(tokens.clamp(max=9)).mean(1)


torch.manual_seed(0)
model = nn.Sequential(CountTable(), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))


def loss_fn(batch):
    return nn.functional.cross_entropy(model(batch["tokens"]), batch["label"])


if __name__ == "__main__":
    guard = gg.Guard(model, ledger="run.ledger", payload=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        tokens, label = torch.randint(0, 10, (6, 4)), torch.randint(0, 2, (6,))
        if step == 1:
            tokens[3, 2] = 77
        optimizer.zero_grad()
        guard.backward({"tokens": tokens, "label": label}, loss_fn, ids=[f"line {step}/{row}" for row in range(6)])
        optimizer.step()
'''


def run(folder, *command):
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, cwd=folder, check=False, env=environment
    )


@pytest.mark.slow
def test_train_replay_test_repair(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(TRAIN)
    done = run(tmp_path, "train.py")
    assert done.returncode == 0, done.stderr

    (bad,) = Ledger(tmp_path / "run.ledger", read_only=True).incidents()
    line = 1 + TRAIN.splitlines().index('            raise ValueError(f"unknown token {int(tokens.max())}")')
    assert (bad.sample_id, bad.where) == ("line 1/3", f"train.py:{line}")

    replay = ["-m", "gradgate", "replay", "run.ledger", bad.id[:8], "--entry", "train:loss_fn", "--as-test"]
    done = run(tmp_path, *replay, "test_line.py")
    assert done.returncode == 3, done.stderr
    assert "The same fault came again." in done.stdout
    assert f"ValueError: unknown token 77   (train.py:{line})" in done.stdout

    pytest_run = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "test_line.py"]
    done = run(tmp_path, *pytest_run)
    assert done.returncode == 1, done.stdout
    assert "the sample in test_line.safetensors still fails: ValueError: unknown token 77" in done.stdout

    script.write_text(TRAIN.replace("if int(tokens.max()) >= 10:  # repaired: if False:", "if False:"))
    done = run(tmp_path, *pytest_run)
    assert done.returncode == 0, done.stdout  # Alone it cannot pass batch norm: it was given twice.


# --- the file ------------------------------------------------------------------------------------------------------


@pytest.fixture
def ledger(tmp_path):
    with Ledger(tmp_path / "run.ledger", payload=True, snapshot=True) as opened:
        yield opened


def record(ledger, sample=None, **more):
    incident = Incident(**{"stage": "forward", "cause": "exception", "sample_id": "img_17.png", **more})
    payload = encode(torch.ones(1, 2) if sample is None else sample)
    ledger.record_many([incident], {incident.id: payload}, snapshot=b"state")
    return incident


def test_the_written_files(ledger, tmp_path):
    bad = record(ledger, exception_type="ValueError", message="bad", where="train.py:3", id="0123abcd")
    written = write_test(tmp_path / "test_it.py", ledger, "0123", "pkg.train:Loss.call", model="pkg.train:model")
    assert [file.name for file in written] == ["test_it.py", "test_it.safetensors", "test_it.snapshot.safetensors"]
    assert written[0].read_text() == (
        "# The sample img_17.png failed in forward:\n"
        "# ValueError: bad   (train.py:3)\n"
        "# From incident 0123abcd, by `gradgate replay --as-test`: this test fails while that fault is there.\n"
        "\n"
        "from pathlib import Path\n"
        "\n"
        "from gradgate.replaying import assert_passes\n"
        "from pkg.train import Loss\n"
        "from pkg.train import model\n"
        "\n"
        'SAMPLE = Path(__file__).with_suffix(".safetensors")\n'
        "\n"
        "\n"
        "def test_sample_img_17_png():\n"
        "    assert_passes(SAMPLE, Loss.call, model=model)\n"
    )
    assert written[1].read_bytes() == ledger.payload_of(bad.id)
    assert written[2].read_bytes() == b"state"


@pytest.mark.parametrize(
    "text", ['"""\nimport os\nos.abort()\n"""', "\rimport os", "\u2028import os", "'; import os #", "\\\nx"]
)
def test_a_ledger_cannot_write_code_into_the_test(ledger, tmp_path, text):
    bad = record(ledger, sample_id=text, message=text, exception_type=text, where=text)
    (file, _) = write_test(tmp_path / "test_it.py", ledger, bad.id, "train:loss_fn")
    tree = ast.parse(file.read_text())
    assert [type(node).__name__ for node in tree.body] == [
        "ImportFrom",
        "ImportFrom",
        "ImportFrom",
        "Assign",
        "FunctionDef",
    ]
    assert [node.module for node in tree.body[:3]] == ["pathlib", "gradgate.replaying", "train"]


@pytest.mark.parametrize("entry", ["train", "train:", ":f", "train:f()", "train:f\nimport os", "a b:c", "train;x:f"])
def test_an_entry_that_is_no_name_is_refused(ledger, tmp_path, entry):
    with pytest.raises(ArgumentValueError, match="is not of the form module:function"):
        write_test(tmp_path / "test_it.py", ledger, record(ledger).id, entry)
    assert not (tmp_path / "test_it.py").exists()


def test_a_test_that_is_there_is_not_replaced(ledger, tmp_path):
    bad = record(ledger)
    (tmp_path / "test_it.py").write_text("mine")
    with pytest.raises(ArgumentValueError, match=r"test_it\.py is there already"):
        write_test(tmp_path / "test_it.py", ledger, bad.id, "train:loss_fn")
    with pytest.raises(ArgumentValueError, match=r"does not end in \.py"):
        write_test(tmp_path / "test_it", ledger, bad.id, "train:loss_fn")
    with pytest.raises(LedgerError, match=r"cannot be written: No such file(.|\n)*a folder that exists"):
        write_test(tmp_path / "nowhere" / "test_it.py", ledger, bad.id, "train:loss_fn")


def test_a_sample_without_payload_makes_no_test(tmp_path):
    with Ledger(tmp_path / "run.ledger") as ledger:
        bad = record(ledger)
        with pytest.raises(LedgerError, match="was not stored"):
            write_test(tmp_path / "test_it.py", ledger.path, bad.id, "train:loss_fn")


def test_the_assertion_names_the_fault_and_keeps_its_cause(tmp_path):
    file = tmp_path / "bad.safetensors"
    file.write_bytes(encode(torch.zeros(1, 2)))
    assert_passes(file, lambda batch: batch.sum())
    with pytest.raises(AssertionError, match=r"bad.safetensors still fails: ZeroDivisionError") as caught:
        assert_passes(file, lambda batch: torch.tensor(1 / int(batch.sum())))
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    with pytest.raises(AssertionError, match="still fails: non-finite loss: -inf"):
        assert_passes(file, lambda batch: batch.log().sum())
