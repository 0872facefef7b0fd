"""Progress bars of others stay whole under what gradgate logs, and the commands show progress on a terminal only."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import gradgate as gg
from tests.cli.test_report_command import on_a_terminal

ROOT = Path(__file__).parents[1]
GRADGATE = [sys.executable, "-m", "gradgate"]

TRAINING = """
import sys
import torch
import gradgate as gg
from torch.utils.data import DataLoader
{begin}
samples = {{index: torch.ones(2) for index in range(160) if index != 5}}
samples[12] = torch.full((2,), float("nan"))
model = torch.nn.Linear(2, 1)
guard = gg.Guard(model)
rewind = gg.Rewind(model, every=10, patience=1)
steps = 0
loader = gg.resilient(DataLoader(samples, sampler=range(160), batch_size=4))
for batch in {bar}:
    guard.backward(batch, lambda x: model(x).mean())
    steps += 1
    rewind.observe(1e6 if steps == 30 else 1.0 + steps % 3 / 10)
"""
BARS = {
    "tqdm": ("from tqdm import tqdm", "tqdm(rewind.batches(loader), total=40, mininterval=0, ncols=60)"),
    "rich": (
        """from rich.console import Console
from rich.progress import track
console = Console(force_terminal=True, width=200, file=sys.stderr)""",
        "track(rewind.batches(loader), total=40, console=console)",
    ),
}
LOGGED = [
    r"sample 5 left out while loading: KeyError: 5 \(.*\)",
    r"step 3: dropped sample 12 \(row 0\): non-finite loss in forward.*",
    r".*went back to step \d+ without steps .*",
]


def screen(text):
    """Give the lines that a terminal would show: a carriage return goes back, and what follows writes over."""
    lines = []
    text = text.replace("\x1b[2K", "\f")  # erases the line
    for line in re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text).split("\n"):
        shown = ""
        for part in line.rpartition("\f")[2].split("\r"):
            shown = part + shown[len(part) :]
        lines.append(shown.rstrip())
    return lines


@pytest.mark.slow
@pytest.mark.parametrize("kind", BARS)
def test_a_bar_stays_whole(kind, tmp_path):
    begin, bar = BARS[kind]
    script = tmp_path / "train.py"
    script.write_text(TRAINING.format(begin=begin, bar=bar))
    command = [sys.executable, "-W", "error", str(script)]
    done = subprocess.run(command, capture_output=True, check=False, timeout=600)
    assert done.returncode == 0, done.stderr
    lines = screen(done.stderr.decode())
    for wanted in LOGGED:
        assert [line for line in lines if re.fullmatch(wanted, line)], (wanted, lines)
    if kind == "tqdm":
        assert len([line for line in lines if "it/s" in line]) == 1, lines


@pytest.fixture
def stored(tmp_path, monkeypatch):
    """A ledger with three samples, and a loss function for which one of them fails."""
    (tmp_path / "mended.py").write_text(
        "def loss_fn(batch):\n    return batch.nan_to_num(posinf=float('nan')).mean()\n"
    )
    weight = torch.ones(1, requires_grad=True)
    guard = gg.Guard(torch.nn.ParameterList([weight]), ledger=tmp_path / "run.ledger", payload=True)
    batch = torch.tensor([[1.0], [float("nan")], [float("inf")], [2.0], [3.0], [4.0]])
    guard.backward(batch, lambda x: (weight * x).mean(), ids="abcdef")
    monkeypatch.chdir(tmp_path)
    return [*GRADGATE, "replay", str(tmp_path / "run.ledger"), "--entry", "mended:loss_fn"]


@pytest.mark.slow
def test_all_stored_samples_again(stored):
    done = subprocess.run([*stored, "--all"], capture_output=True, text=True, check=False, timeout=600)
    assert done.stderr == ""
    head, *rows = [line.split("\t") for line in done.stdout.splitlines()]
    assert head == ["id", "sample", "stage", "then", "now", "verdict"]
    assert sorted((row[1], row[-1]) for row in rows) == [("b", "passes"), ("c", "same")]
    assert done.returncode == 3


@pytest.mark.parametrize("words", [(), ("5e65948f", "--all"), ("--all", "--doctor")])
def test_all_or_one(stored, words):
    done = subprocess.run([*stored, *words], capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 2
    assert "one incident." in done.stderr or "or --all." in done.stderr


@pytest.mark.slow
def test_progress_is_for_terminals(tmp_path):
    path = tmp_path / "run.ledger"
    gg.Ledger(path).record(gg.Incident(stage="load", cause="exception", sample_id="a"))
    command = [*GRADGATE, "report", str(path), "-o", str(tmp_path / "page.html")]
    plain = {name: value for name, value in os.environ.items() if name != "NO_COLOR"} | {"TERM": "xterm-256color"}
    assert b"writing a page about 1 incidents" in on_a_terminal(command, **plain)
    assert not re.search(rb"\x1b\[[0-9;]*(3[0-7]|38)[;m]", on_a_terminal(command, **plain, NO_COLOR="1"))
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    assert done.stderr == ""
    assert "writing" not in done.stdout


def test_make_demo_says_at_once_what_it_does(tmp_path):
    done = subprocess.run(
        ["make", "-n", "--no-print-directory", "demo", f"VENV={tmp_path}/none"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=False,
    )
    assert done.stdout.startswith('echo "Handwritten digits'), done.stderr
    assert "--quiet" not in done.stdout


def test_make_docs_installs_only_what_the_site_needs(tmp_path):
    command = ["make", "-n", "docs", f"VENV={tmp_path}/none"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert "optional-dependencies" in done.stdout, done.stderr
    assert "torch" not in done.stdout
    assert "--editable" not in done.stdout
