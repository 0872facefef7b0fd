"""Every script of examples/ runs, proves its claim, and prints the lines that examples/README.md shows.

Digits may differ from one processor to another, so they are not compared; each script checks its own numbers, and ends
with an error if they do not hold.
"""

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"
FRAMEWORKS = {"lightning_digits.py": "lightning"}
STARTED_BY_TORCHRUN = {"ddp_train.py", "fsdp_train.py"}  # with a test of its own, beside the guard's
SHOWN = dict(
    re.findall(
        r"^## (\S+\.py)\n.*?^```text\n(.*?)^```", (EXAMPLES / "README.md").read_text(encoding="utf-8"), re.M | re.S
    )
)


def run(script, folder):
    """Run a script in an empty folder, on one core."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "error"}
    command = [sys.executable, str(script)]
    return subprocess.run(command, capture_output=True, text=True, cwd=folder, env=environment, check=False)


def without_digits(line):
    return re.sub(r"\s*\d[\d.,]*", " 0", line.rstrip())


def test_every_example_is_in_the_readme():
    assert set(SHOWN) - STARTED_BY_TORCHRUN == {path.name for path in EXAMPLES.glob("*.py")} - STARTED_BY_TORCHRUN


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(set(SHOWN) - STARTED_BY_TORCHRUN))
def test_an_example_keeps_its_claim_and_prints_what_is_shown(name, tmp_path):
    if name in FRAMEWORKS and find_spec(FRAMEWORKS[name]) is None:
        pytest.skip(f"{FRAMEWORKS[name]} is not installed")
    done = run(EXAMPLES / name, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    printed = {without_digits(line) for line in done.stdout.splitlines()}
    assert {without_digits(line) for line in SHOWN[name].splitlines()} <= printed
    assert not list(tmp_path.iterdir()), "an example left a file behind"


@pytest.mark.slow
def test_an_example_whose_claim_does_not_hold_ends_with_an_error(tmp_path):
    source = (EXAMPLES / "segmentation_votes.py").read_text(encoding="utf-8")
    broken = source.replace("masked.mode(votes, 0, exclude=SILENT, empty=SILENT)", "masked.mode(votes, 0)")
    assert broken != source
    script = tmp_path / "broken.py"
    script.write_text(broken, encoding="utf-8")
    done = run(script, tmp_path)
    assert (done.returncode, done.stderr) == (1, "")
