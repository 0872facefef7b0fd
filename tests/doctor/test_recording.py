"""gradgate modes: every line that switched recording off, how often, over what, and whether it was left off."""

import json

import pytest
import torch
from click.testing import CliRunner

import gradgate as gg
from gradgate.cli import main

SCRIPT = """\
import sys
import torch
import gradgate as gg

model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Dropout(), torch.nn.Linear(3, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)

@torch.no_grad()
def validate():
    return model(torch.ones(3, 2)).mean()

class Head(torch.nn.Linear):
    @torch.inference_mode()
    def predict(self, x):
        return self(x)

for step in range(4):
    optimizer.zero_grad()
    model(torch.ones(4, 2)).mean().backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    validate()
    with torch.no_grad():
        with torch.no_grad():
            model[0](torch.ones(4, 2)) + 1
    with gg.grad_mode(False):
        torch.ones(3) * 2
    with torch.set_grad_enabled(step % 2 == 0):
        torch.ones(3) * 3
Head(2, 1).predict(torch.ones(1, 2))
with torch.inference_mode():
    model(torch.ones(1, 2))
    torch.nn.functional.relu(torch.ones(2))
try:
    with torch.no_grad():
        model(torch.ones(1, 7))
except RuntimeError:
    pass
torch.nn.Linear(2, 2)(torch.ones(1, 2)).sum().backward()
sys.stdout.write(sys.argv[1])
"""

EXPECTED = {  # the text of the line: how often, and which modules
    "def validate():": [(4, ["Sequential"])],
    "def predict(self, x):": [(1, ["Head"])],
    "with torch.no_grad():": [(1, ["Sequential"]), (4, ["Linear"])],
    "with gg.grad_mode(False):": [(4, [])],
    "with torch.set_grad_enabled(step % 2 == 0):": [(2, [])],
    "with torch.inference_mode():": [(1, ["Sequential"])],
}


@pytest.fixture
def script(tmp_path):
    def write(text):
        path = tmp_path / "train.py"
        path.write_text(text)
        return str(path)

    return write


def test_every_line_is_listed(script, capfd):
    report = gg.doctor.examine_modes(script(SCRIPT), ["hello"])
    assert capfd.readouterr().out == "hello"
    assert report.exit_code == 0
    assert torch.is_grad_enabled()
    lines = SCRIPT.splitlines()
    found = {}
    for gap in report.gaps[:-1]:
        assert lines[int(gap.where.rpartition(":")[2]) - 1].strip() == gap.source
        assert 0 <= gap.seconds <= report.seconds
        assert not gap.left
        found.setdefault(gap.source, []).append((gap.times, gap.modules))
    assert {source: sorted(gaps) for source, gaps in found.items()} == EXPECTED
    own = report.gaps[-1]
    assert own.where == "inside torch"
    assert own.times >= 4  # each step of the optimizer, and what initialises layers
    by_source = {gap.source: gap for gap in report.gaps}
    assert by_source["with gg.grad_mode(False):"].operations >= 4


def test_what_is_left_off_is_said_and_put_back(script):
    text = "import torch\ntorch.set_grad_enabled(False)\ntorch.nn.Linear(1, 1)(torch.ones(1, 1))\n"
    report = gg.doctor.examine_modes(script(text))
    (gap,) = [gap for gap in report.gaps if gap.where != "inside torch"]
    assert (gap.source, gap.left, gap.modules) == ("torch.set_grad_enabled(False)", True, ["Linear"])
    assert torch.is_grad_enabled()


def test_the_command(script, tmp_path):
    path = script("import torch, sys\nwith torch.no_grad():\n    torch.ones(2) + 1\nsys.exit(3)\n")
    result = CliRunner().invoke(main, ["modes", "--json", str(tmp_path / "out.json"), path, "--epochs", "1"])
    assert result.exit_code == 3, result.output
    header, line = result.output.splitlines()
    assert header.split("\t") == ["where", "times", "seconds", "calls", "modules", "line"]
    assert line.split("\t")[1] == "1"
    assert line.split("\t")[3:] == ["2", "", "with torch.no_grad():"]
    (gap,) = json.loads((tmp_path / "out.json").read_text())["gaps"]
    assert gap["where"].endswith("train.py:2")
    result = CliRunner().invoke(main, ["modes", "nowhere.py"])
    assert result.exit_code == 2
    assert "File 'nowhere.py' does not exist." in result.output


def test_a_script_that_raises(script, capfd):
    report = gg.doctor.examine_modes(script("import torch\nwith torch.no_grad():\n    raise KeyError('data')\n"))
    assert report.exit_code == 1
    assert "KeyError: 'data'" in capfd.readouterr().err
    assert [gap.left for gap in report.gaps] == [False]
