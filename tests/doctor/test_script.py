"""`gradgate doctor SCRIPT`: the user's own script, unchanged."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

import gradgate as gg
from gradgate.cli import main
from gradgate.errors import ArgumentValueError
from tests.report.reading import data_of

HEALTHY = """
import sys, torch
torch.manual_seed(0)
model = torch.nn.Linear(3, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(5):
    optimizer.zero_grad()
    model(torch.randn(4, 3)).pow(2).mean().backward()
    optimizer.step()
print("arguments", sys.argv[1:], __name__, __file__ == sys.argv[0])
"""
CUT = """
import torch
encoder, head = torch.nn.Linear(3, 3), torch.nn.Linear(3, 1)
optimizer = torch.optim.SGD([*encoder.parameters(), *head.parameters()], lr=0.1)
for step in range(4):
    optimizer.zero_grad()
    features = encoder(torch.randn(4, 3)).detach()   # HERE
    head(features).mean().backward()
    optimizer.step()
"""
LATE_NAN = """
import torch
model = torch.nn.Linear(3, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(8):
    optimizer.zero_grad()
    out = model(torch.randn(4, 3))
    if step == 5:
        out = (out * 0).sqrt()   # HERE
    out.mean().backward()
    optimizer.step()
"""
LATE_RAISE = """
import torch
model = torch.nn.Linear(3, 3)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(8):
    optimizer.zero_grad()
    h = torch.sigmoid(model(torch.randn(4, 3)))
    if step == 4:
        h += 1   # HERE
    h.mean().backward()
    optimizer.step()
"""
RANDOM = LATE_NAN.replace("import torch", "import os, torch").replace(
    "step == 5", "step == 5 and not os.path.exists(MARK)"
)


def write(tmp_path, source, name="train.py"):
    path = tmp_path / name
    path.write_text(source)
    return path


def here(path):
    return next(f"{path}:{n}" for n, line in enumerate(path.read_text().splitlines(), 1) if "# HERE" in line)


def run(*args):
    return CliRunner().invoke(main, ["doctor", *map(str, args)])


def test_a_healthy_script_and_its_own_arguments(tmp_path):
    result = run(write(tmp_path, HEALTHY), "--epochs", "3", "--json", "x", "-v")
    assert result.exit_code == 0, result.output
    assert "arguments ['--epochs', '3', '--json', 'x', '-v'] __main__ True" in result.output
    assert "healthy" in result.output
    assert sys.modules["__main__"].__name__ == "__main__"


def test_a_layer_that_is_made_but_never_called_is_unused_and_nothing_else(tmp_path):
    source = HEALTHY.replace(
        "model = torch.nn.Linear(3, 1)", "model = torch.nn.Linear(3, 1)\nmodel.spare = torch.nn.Linear(2, 2)"
    )
    run("--json", tmp_path / "out.json", write(tmp_path, source))
    findings = json.loads((tmp_path / "out.json").read_text())["findings"]
    assert [finding["code"] for finding in findings] == ["GG102"]


def test_a_cut_is_found_in_the_first_step(tmp_path):
    path = write(tmp_path, CUT)
    report, page = tmp_path / "report.json", tmp_path / "page.html"
    result = run("--json", report, "--html", page, path)
    assert result.exit_code == 0
    found = json.loads(report.read_text())
    assert [(f["code"], f["where"]) for f in found["findings"]] == [("GG101", here(path))]
    assert found["findings"][0]["title"].startswith("encoder.weight, encoder.bias get no gradient")
    assert data_of(page.read_text())["diagnosis"] == found
    assert "GG101" in result.output


@pytest.mark.parametrize(("level", "code"), [("error", 1), ("warning", 1), ("info", 1), ("never", 0)])
def test_the_exit_code_for_ci(tmp_path, level, code):
    assert run("--fail-on", level, write(tmp_path, CUT)).exit_code == code
    assert run("--fail-on", level, write(tmp_path, HEALTHY)).exit_code == 0


@pytest.mark.slow
def test_a_nan_in_a_late_step_is_traced_in_a_second_run(tmp_path):
    path = write(tmp_path, LATE_NAN)
    report = gg.doctor.examine_script(path)
    assert (report.exit_code, report.steps) == (0, 8)
    assert [(f.code, f.where) for f in report.diagnosis.findings] == [("GG403", here(path))]
    # The graph is that of the bad step: without a model, that of the modules that the script called.
    assert report.diagnosis.graph["nonfinite_path"]
    assert report.diagnosis.layers[-1]["gradient_norm"] in ("nan", "inf")


@pytest.mark.slow
def test_an_exception_in_a_late_step_is_traced_in_a_second_run(tmp_path, capfd):
    path = write(tmp_path, LATE_RAISE)
    report = gg.doctor.examine_script(path)
    assert (report.exit_code, report.steps) == (1, 4)
    assert (report.diagnosis.findings[0].code, report.diagnosis.findings[0].where) == ("GG601", here(path))
    assert isinstance(report.diagnosis.exception, RuntimeError)
    shown = capfd.readouterr().err
    assert "Traceback" in shown
    assert "h.mean().backward()" in shown
    assert "_script.py" not in shown


@pytest.mark.slow
def test_two_runs_that_differ_are_told(tmp_path):
    mark = tmp_path / "mark"
    path = write(tmp_path, f"MARK = {str(mark)!r}\n" + RANDOM + "\nopen(MARK, 'w').close()\n")
    report = gg.doctor.examine_script(path)
    assert [f.code for f in report.diagnosis.findings] == ["GG005"]
    assert (
        "step 5 had a gradient that is not finite, but not when the script ran again"
        in report.diagnosis.findings[0].title
    )


@pytest.mark.slow
def test_with_trace_it_runs_once(tmp_path):
    path = write(tmp_path, LATE_NAN + "\nopen('ran', 'a').write('x')\n")
    result = subprocess.run(
        [sys.executable, "-m", "gradgate", "doctor", "--trace", path],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert "GG403" in result.stdout, result.stderr
    assert (tmp_path / "ran").read_text() == "x"


@pytest.mark.parametrize(("line", "code"), [("raise SystemExit(7)", 7), ("raise SystemExit('no')", 1), ("exit()", 0)])
def test_it_ends_as_the_script_ends(tmp_path, line, code):
    assert (
        gg.doctor.examine_script(write(tmp_path, f"import sys\n{line.replace('exit()', 'sys.exit()')}\n")).exit_code
        == code
    )


def test_an_ordinary_exception_has_its_line(tmp_path):
    path = write(tmp_path, "import torch\nx = torch.ones(2)\ny = {}['missing']   # HERE\n")
    report = gg.doctor.examine_script(path)
    finding = report.diagnosis.findings[0]
    assert (finding.code, finding.where, report.exit_code) == ("GG002", here(path), 1)
    assert finding.title == "the step raised KeyError: 'missing'"


@pytest.mark.slow
def test_modules_beside_the_script_are_found(tmp_path):
    write(tmp_path, "import torch\nmodel = torch.nn.Linear(2, 1)\n", "beside_the_script.py")
    path = write(
        tmp_path, "from beside_the_script import model\nimport torch\nmodel(torch.ones(3, 2)).mean().backward()\n"
    )
    assert gg.doctor.examine_script(path).diagnosis.healthy


def test_a_mode_that_the_script_leaves_open_does_not_break_it(tmp_path):
    path = write(tmp_path, "import torch\ntorch.set_default_device('cpu')\n" + HEALTHY)
    try:
        assert gg.doctor.examine_script(path).diagnosis.healthy
    finally:
        torch.set_default_device(None)


def test_wrong_arguments(tmp_path):
    with pytest.raises(ArgumentValueError, match=r"nothing.py is not a file.\nWhy: the doctor runs a Python script"):
        gg.doctor.examine_script(tmp_path / "nothing.py")
    assert run(tmp_path / "nothing.py").exit_code == 2
    assert run("--fail-on", "always", write(tmp_path, CUT)).exit_code == 2
    assert "SCRIPT" in run("--help").output


@pytest.mark.slow
@pytest.mark.parametrize("option", ["--json", "--html"])
def test_where_to_write_is_known_before_the_script_runs(tmp_path, option):
    done = run(option, tmp_path / "nowhere" / "page", write(tmp_path, HEALTHY))
    assert done.exit_code == 2
    assert f"there is no folder {tmp_path / 'nowhere'}" in done.output
    assert "arguments" not in done.output  # it was not run
    (tmp_path / "elsewhere").mkdir()
    leaves = write(tmp_path, f"import os\nos.chdir({str(tmp_path / 'elsewhere')!r})\n{HEALTHY}")
    done = subprocess.run(
        [sys.executable, "-m", "gradgate", "doctor", option, "page", str(leaves)],
        cwd=tmp_path,
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "page").exists()


@pytest.mark.slow
@pytest.mark.parametrize("encoding", ["utf-8", "latin-1"])
def test_a_script_that_this_terminal_could_not_show(tmp_path, encoding):
    path = tmp_path / "train.py"
    path.write_text(f"# -*- coding: {encoding} -*-\n{CUT}\nname = 'Bär'\nassert len(name) == 3\n", encoding=encoding)
    done = subprocess.run(
        [sys.executable, "-m", "gradgate", "doctor", str(path)],
        env={**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert b"error GG101" in done.stdout


@pytest.mark.slow
def test_the_module_name_is_the_scripts(tmp_path):
    path = write(tmp_path, HEALTHY)
    done = subprocess.run(
        [sys.executable, "-m", "gradgate", "doctor", path.name, "one"],
        cwd=Path(path).parent,
        capture_output=True,
        text=True,
        check=False,
    )
    assert "arguments ['one'] __main__ True" in done.stdout, done.stderr


# --- odd ends of a script -------------------------------------------------------------------------------------------

STEP = """
import os, torch
encoder, head = torch.nn.Linear(3, 3), torch.nn.Linear(3, 1)
head(encoder(torch.randn(4, 3)).detach()).mean().backward()
torch.optim.SGD([*encoder.parameters(), *head.parameters()], lr=0.1).step()
"""
ODD_ENDS = {
    "a text that raises": ("class Odd(Exception):\n    def __str__(self): raise KeyError('x')\nraise Odd", 1),
    "a text that is a number": ("class Odd(Exception):\n    def __str__(self): return 7\nraise Odd", 1),
    "no Exception": ("class Odd(BaseException): pass\nraise Odd('x')", 1),
    "neither": ("class Odd(BaseException):\n    def __str__(self): raise KeyError('x')\nraise Odd", 1),
    "an interrupt": ("raise KeyboardInterrupt", 130),
    "escapes": ("raise ValueError('\\x1b]0;x\\x07 \\u202e')", 1),
}


def is_diagnosed_once(output, report):
    codes = [finding["code"] for finding in json.loads(report.read_text())["findings"]]
    assert any(code.startswith("GG1") for code in codes)
    assert [output.count(f" {code}:") for code in codes] == [codes.count(code) for code in codes]
    assert output.replace("\n", "").replace("\t", "").isprintable()


@pytest.mark.parametrize("end", ODD_ENDS)
def test_a_script_that_raises_something_odd_is_diagnosed(tmp_path, end):
    lines, code = ODD_ENDS[end]
    script, report = tmp_path / "train.py", tmp_path / "report.json"
    script.write_text(STEP + lines + "\n")
    done = CliRunner().invoke(main, ["doctor", "--json", str(report), str(script)])
    assert done.exit_code == code, done.output
    assert isinstance(done.exception, SystemExit)
    is_diagnosed_once(done.output, report)
    assert ("GG002" in done.output) == (code == 1)


FORKS = """
if os.fork() == 0:
    os._exit(9)
os.wait()
if os.fork() == 0:
    raise ValueError("the child")
print("status", os.wait()[1] >> 8, flush=True)
if os.fork() == 0:
    print("the child has come to the end", flush=True)
else:
    os.wait()
    print("the last words", flush=True)
    os._exit(5)
"""


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
def test_a_script_that_forks_and_ends_by_os_exit_is_diagnosed_once(tmp_path):
    script, report = tmp_path / "train.py", tmp_path / "report.json"
    script.write_text(STEP + FORKS)
    command = [sys.executable, "-m", "gradgate", "doctor", "--json", str(report), str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 5, done.stderr
    is_diagnosed_once(done.stdout, report)
    assert done.stdout.startswith("status 1\nthe child has come to the end\nthe last words\n")
    assert done.stderr.count("ValueError: the child") == 1
    assert "os._exit" not in done.stderr
