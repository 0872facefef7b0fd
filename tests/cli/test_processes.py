"""The command as a process: what it loads, what it costs, how it behaves in a pipe."""

import json
import os
import subprocess
import sys
import tomllib
from importlib import import_module

import pytest

from gradgate.cli import main
from gradgate.ledger import Ledger
from tests.ledger.made import ROOT, incident

pytestmark = pytest.mark.slow
GRADGATE = [sys.executable, "-m", "gradgate"]


@pytest.fixture
def path(tmp_path):
    with Ledger(tmp_path / "run.ledger") as ledger:
        ledger.record_many([incident(f"日{number}", message="m" * 500) for number in range(2000)])
    return str(tmp_path / "run.ledger")


def run(*command, **options):
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False, **options)


def test_the_command_is_installed_under_its_name():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    module, _, name = settings["project"]["scripts"]["gradgate"].partition(":")
    assert getattr(import_module(module), name) is main


@pytest.mark.parametrize(
    "arguments",
    [["--help"], ["ledger", "list", "{path}"], ["ledger", "stats", "{path}", "--json"], ["replay", "--help"]],
)
def test_the_paper_commands_do_not_load_torch(path, arguments):
    arguments = [argument.format(path=path) for argument in arguments]
    code = f"""
import sys
from gradgate.cli import main
main({arguments!r}, standalone_mode=False)
print("torch" in sys.modules, file=sys.stderr)
"""
    done = run(sys.executable, "-c", code)
    assert done.stderr.strip() == "False", done.stderr


def test_that_test_can_fail(path):
    code = "import sys; from gradgate import replaying; print('torch' in sys.modules)"
    assert run(sys.executable, "-c", code).stdout.strip() == "True"


def test_help_loads_little():
    """What takes the time of a command is what it loads; that does not hang on the machine."""
    code = "import sys; from gradgate.cli import main; main(['--help'], standalone_mode=False); print(*sys.modules)"
    loaded = {name.partition(".")[0] for name in run(sys.executable, "-c", code).stdout.splitlines()[-1].split()}
    assert {"click", "gradgate"} <= loaded
    assert not loaded & {"torch", "numpy", "rich", "safetensors", "sqlite3", "asyncio"}


def test_a_pipe_that_closes_early_is_no_fault(path):
    head = f"'{sys.executable}' -m gradgate ledger list '{path}' --limit 2000 | head -n 2"
    done = run("bash", "-c", head)
    assert len(done.stdout.splitlines()) == 2
    assert "Traceback" not in done.stderr
    assert "Exception" not in done.stderr


@pytest.mark.parametrize(("encoding", "shown"), [("ascii", "日"), ("latin-1", "\\u65e5"), ("utf-8", "日")])
def test_names_that_the_terminal_cannot_show_are_no_fault(path, encoding, shown):
    plain = {**os.environ, "PYTHONUTF8": "0", "PYTHONIOENCODING": encoding}
    done = run(*GRADGATE, "ledger", "list", path, "--limit", "3", env=plain)
    assert done.returncode == 0, done.stderr
    assert shown in done.stdout
    done = run(*GRADGATE, "ledger", "list", path, "--limit", "3", "--json")
    assert json.loads(done.stdout)[0]["sample_id"].startswith("日")


def test_errors_go_to_stderr(tmp_path):
    done = run(*GRADGATE, "ledger", "list", str(tmp_path / "nothing"))
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("Error: there is no ledger")


def test_a_closed_output_is_no_fault(path):
    for command in (f"ledger list '{path}'", f"ledger export '{path}' -", "--help"):
        done = run("bash", "-c", f"'{sys.executable}' -m gradgate {command} >&-")
        assert (done.returncode, done.stderr) == (0, ""), command


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="a disk without room is simulated by Linux only")
@pytest.mark.parametrize("buffered", [True, False])
@pytest.mark.parametrize("command", ["list '{path}' --limit 2000", "stats '{path}'", "export '{path}' -"])
def test_a_full_disk_is_told_without_a_traceback(path, command, buffered):
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    if not buffered:
        environment["PYTHONUNBUFFERED"] = "1"
    line = f"'{sys.executable}' -m gradgate ledger {command.format(path=path)} > /dev/full"
    done = run("bash", "-c", line, env=environment)
    assert done.returncode == 1
    assert done.stderr == "Error: [Errno 28] No space left on device\n"
