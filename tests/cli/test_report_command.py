"""`gradgate report`, and what holds for every command."""

import contextlib
import json
import os
import pty
import re
import signal
import subprocess
import sys
import urllib.request
from importlib import metadata

import click
import pytest
from click.testing import CliRunner

from gradgate.cli import main
from gradgate.ledger import Ledger
from tests.ledger.made import ROOT, incident
from tests.report.made import diagnosis
from tests.report.reading import data_of

GRADGATE = [sys.executable, "-m", "gradgate"]


@pytest.fixture
def path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with Ledger("run.ledger") as ledger:
        ledger.record_many([incident("a"), incident("b")])
    return tmp_path / "run.ledger"


def run(*arguments, code=0):
    done = CliRunner().invoke(main, [str(argument) for argument in arguments])
    assert done.exit_code == code, done.output
    assert done.exception is None or isinstance(done.exception, SystemExit)
    return done.output


def test_the_page_is_written(path):
    assert run("report", path) == f"report.html written: {(path.parent / 'report.html').stat().st_size / 1000:.0f} kB\n"
    assert data_of((path.parent / "report.html").read_text(encoding="utf-8"))["ledger"]["total"] == 2


def test_with_a_diagnosis_and_as_json(path):
    (path.parent / "step.json").write_text(json.dumps(diagnosis()))
    told = json.loads(run("report", path, "--diagnosis", "step.json", "-o", "page.html", "--json"))
    assert told == {"file": "page.html", "bytes": (path.parent / "page.html").stat().st_size, "incidents": 2}
    assert data_of((path.parent / "page.html").read_text(encoding="utf-8"))["diagnosis"] == diagnosis()


@pytest.mark.slow
def test_to_the_standard_output(path):
    done = subprocess.run([*GRADGATE, "report", str(path), "-o", "-"], capture_output=True, check=True)
    assert data_of(done.stdout.decode())["ledger"]["total"] == 2
    assert done.stderr == b""


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["nothing.ledger"], 1, "there is no ledger nothing.ledger"),
        (["{path}", "-o", "{path}"], 1, "is the ledger itself"),
        (["{path}", "-o", "no/such/folder.html"], 1, "cannot be written: No such file or directory."),
        (["{path}", "--diagnosis", "nothing.json"], 1, "nothing.json cannot be read: No such file or directory."),
        (["{path}", "--diagnosis", "{path}"], 1, "is not JSON"),
        (["{path}", "--diagnosis", "list.json"], 1, "list.json is not a diagnosis."),
        (["{path}", "--diagnosis", "object.json"], 1, "`diagnosis` has no list of findings"),
        (["{path}", "--port", "99999", "--serve"], 2, "99999 is not in the range"),
        (["{path}", "--port", "8000"], 2, "--port goes with --serve."),
        ([], 2, "Missing argument 'LEDGER'"),
        (["list.json"], 1, "not even an SQLite file"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_what_cannot_be_done_is_told_without_a_traceback(path, arguments, code, words):
    (path.parent / "list.json").write_text("[1, 2, 3]")
    (path.parent / "object.json").write_text('{"findings": [7]}', encoding="utf-8")
    output = run("report", *(argument.format(path=path) for argument in arguments), code=code)
    assert words in output.replace(f"{path.parent}/", "")
    assert "Traceback" not in output


@pytest.mark.slow
@pytest.mark.parametrize("as_json", [False, True])
def test_serving_ends_cleanly_at_an_interrupt(path, as_json):
    command = [*GRADGATE, "report", str(path), "--serve", *(["--json"] if as_json else [])]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        said = ""
        while "http://127.0.0.1:" not in said:
            line = process.stdout.readline()
            assert line, process.stderr.read()
            said += line
        with urllib.request.urlopen(re.search(r"http://127\.0\.0\.1:\d+/", said)[0]) as answer:
            assert b"<!doctype html>" in answer.read()
        process.send_signal(signal.SIGINT)
        _, error = process.communicate(timeout=120)
    finally:
        process.kill()
    assert process.returncode == 0, error
    assert error.strip() == ""


# --- every command -------------------------------------------------------------------------------------------------


def commands(command=main, words=()):
    """Every command that does something, with the words that call it."""
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            yield from commands(command.get_command(context, name), (*words, name))
    else:
        yield words, command


def test_the_first_help_fits_one_screen():
    lines = run("--help").splitlines()
    assert len(lines) <= 24
    assert max(map(len, lines)) <= 80
    assert "Example: gradgate report run.ledger" in run("--help")


@pytest.mark.parametrize("words", [words for words, _ in commands()], ids=" ".join)
def test_every_command_has_an_example_that_click_understands_and_json(words):
    help_text = " ".join(run(*words, "--help").split())
    assert "--json" in help_text
    example = re.search(r"Examples?: (gradgate .*?) (?:gradgate|Options:)", help_text)[1]
    line = re.findall(r'"[^"]*"|\S+', example)
    assert tuple(line[1 : 1 + len(words)]) == words
    command = dict(commands())[words]
    command.make_context(words[-1], [word.strip('"') for word in line[1 + len(words) :]], resilient_parsing=True)


def test_the_version_names_torch_only_if_it_is_there(monkeypatch):
    kernels = r"(native|torch) kernels \(.+\)\n"
    assert re.fullmatch(r"gradgate [\d.]+, torch [\w.+]+, Python [\d.]+, " + kernels, run("--version"))
    real = metadata.version

    def version(name):
        if name == "torch":
            raise metadata.PackageNotFoundError(name)
        return real(name)

    monkeypatch.setattr(metadata, "version", version)
    assert re.fullmatch(r"gradgate [\d.]+, Python [\d.]+, " + kernels, run("--version"))


@pytest.mark.parametrize(
    "arguments",
    [["--version"], ["report", "{path}"], ["report", "--help"], ["ledger", "stats", "{path}"], ["doctor", "-h"]],
)
def test_none_of_these_loads_torch(path, arguments):
    arguments = [argument.format(path=path) for argument in arguments]
    code = f"""
import sys
from gradgate.cli import main
try:
    main({arguments!r}, standalone_mode=False)
finally:
    print("torch" in sys.modules, file=sys.stderr)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stderr.strip() == "False", done.stderr


def on_a_terminal(command, **environment):
    """Run a command on a terminal, and give what it wrote there."""
    leader, follower = pty.openpty()
    process = subprocess.Popen(command, stdout=follower, stderr=follower, env=environment, cwd=ROOT)
    os.close(follower)
    written = b""
    with contextlib.suppress(OSError):  # What Linux says when the other end is closed.
        while part := os.read(leader, 65536):
            written += part
    os.close(leader)
    assert process.wait(timeout=120) == 0
    return written


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [["ledger", "list"], ["ledger", "stats"]])
def test_no_colour_on_a_terminal_that_wants_none(path, arguments):
    plain = {name: value for name, value in os.environ.items() if name != "NO_COLOR"} | {"TERM": "xterm-256color"}
    command = [*GRADGATE, *arguments, str(path)]
    assert b"\x1b[" in on_a_terminal(command, **plain)
    assert not re.search(rb"\x1b\[[0-9;]*(3[0-7]|38)[;m]", on_a_terminal(command, **plain, NO_COLOR="1"))


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_as_the_page_says(shell):
    told = (ROOT / "docs" / "packages" / "command_line.md").read_text(encoding="utf-8")
    assert f"_GRADGATE_COMPLETE={shell}_source gradgate" in told
    environment = {**os.environ, "_GRADGATE_COMPLETE": f"{shell}_source"}
    program = f"{os.path.dirname(sys.executable)}/gradgate"
    done = subprocess.run([program], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    assert "_gradgate_completion" in done.stdout


def test_completion_knows_the_commands():
    words = {"_GRADGATE_COMPLETE": "bash_complete", "COMP_WORDS": "gradgate re", "COMP_CWORD": "1"}
    program = f"{os.path.dirname(sys.executable)}/gradgate"
    done = subprocess.run([program], capture_output=True, text=True, env={**os.environ, **words}, check=False)
    assert done.stdout.split() == ["plain,replay", "plain,report"]
