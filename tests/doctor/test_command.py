"""`gradgate doctor` as a command: modules, limits, signals, and a second run that is like the first."""

import json
import os
import signal
import subprocess
import sys
import time
import warnings

import pytest

import gradgate as gg
from tests.doctor.test_script import CUT, HEALTHY, run, write


def codes(path):
    return [finding["code"] for finding in json.loads(path.read_text())["findings"]]


def test_a_module_of_a_package(tmp_path, monkeypatch):
    package = tmp_path / "somepackage"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "parts.py").write_text("import torch\nhead = torch.nn.Linear(3, 1)\n")
    (package / "train.py").write_text("from .parts import head\n" + CUT.replace("torch.nn.Linear(3, 1)", "head"))
    monkeypatch.chdir(tmp_path)
    result = run("-m", "--json", tmp_path / "out.json", "somepackage.train", "--epochs", "3")
    assert result.exit_code == 0, result.output
    assert codes(tmp_path / "out.json") == ["GG101"]
    # The same file as a script cannot import its neighbours: the command to use is in the fix.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ImportWarning)  # as Python does by itself
        result = run("somepackage/train.py")
    assert result.exit_code == 1
    assert f"fix: cd {tmp_path} && gradgate doctor -m somepackage.train" in result.output


def test_a_module_that_is_not_there(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = run("-m", "somewhere.else_")
    assert result.exit_code != 0
    assert "there is no module somewhere.else_ to run" in result.output


def test_a_script_without_a_step_is_not_healthy(tmp_path):
    result = run("--json", tmp_path / "out.json", write(tmp_path, "import sys\nsys.exit('give me data')\n"))
    assert result.exit_code == 1
    assert codes(tmp_path / "out.json") == ["GG006"]
    assert "no training step ran" in result.output
    assert "Its own message: give me data" in result.output


def test_it_ends_after_so_many_steps_and_seconds(tmp_path):
    endless = HEALTHY.replace("range(5)", "iter(int, 1)")
    report = gg.doctor.examine_script(write(tmp_path, endless), steps=4)
    assert (report.exit_code, report.steps) == (0, 4)
    slow = HEALTHY.replace("optimizer.step()", "optimizer.step(); import time; time.sleep(0.05)")
    report = gg.doctor.examine_script(write(tmp_path, slow.replace("range(5)", "iter(int, 1)")), timeout=2.0)
    assert report.exit_code == 0
    assert report.diagnosis.healthy


@pytest.mark.slow
def test_findings_come_early_and_survive_a_signal(tmp_path):
    sleeping = CUT + "    if step == 2:\n        print('waiting', flush=True)\n        import time; time.sleep(300)\n"
    process = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "gradgate",
            "doctor",
            "--json",
            str(tmp_path / "out.json"),
            str(write(tmp_path, sleeping)),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )
    seen = []
    for line in process.stdout:
        seen.append(line)
        if "waiting" in line:
            break
    assert any("error GG101" in line for line in seen), seen
    time.sleep(0.2)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=120)
    assert process.returncode == 143
    assert codes(tmp_path / "out.json") == ["GG101"]


@pytest.mark.slow
def test_the_second_run_starts_where_the_first_did(tmp_path):
    late = HEALTHY.replace(
        "import sys, torch", "import os, sys, torch\nassert open('here').read() and not os.environ.get('MOVED')"
    )
    late = late.replace("optimizer.zero_grad()", "optimizer.zero_grad(); os.chdir('/'); os.environ['MOVED'] = '1'")
    late = late.replace(".mean().backward()", ".mean().mul(1.0 if step < 4 else float('nan')).backward()")
    (tmp_path / "here").write_text("x")
    done = subprocess.run(
        [sys.executable, "-m", "gradgate", "doctor", "--json", "out.json", str(write(tmp_path, late))],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "GG005" not in codes(tmp_path / "out.json")
    assert codes(tmp_path / "out.json")[0].startswith("GG4")


@pytest.mark.slow
def test_a_second_run_that_does_not_start_is_told(tmp_path):
    source = "import os\nif os.path.exists('ran'): raise SystemExit(3)\nopen('ran', 'w').close()\n" + HEALTHY
    source = source.replace(".mean().backward()", ".mean().mul(1.0 if step < 4 else float('nan')).backward()")
    done = subprocess.run(
        [sys.executable, "-m", "gradgate", "doctor", "--json", "out.json", str(write(tmp_path, source))],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert codes(tmp_path / "out.json")[0] == "GG005", done.stdout
