"""The examples for several ranks, started by torchrun on two, keep their claims."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

# What FSDP2 over Gloo sometimes prints when the interpreter ends, with gradgate and without.
ABORTED_AT_EXIT = "terminate called without an active exception"
EXAMPLES = Path(__file__).parents[2] / "examples"


def without_digits(line):
    return re.sub(r"\s*\d[\d.,e-]*", " 0", line.rstrip())


@pytest.mark.distributed
@pytest.mark.parametrize("name", ["ddp_train", "fsdp_train"])
def test_the_example_keeps_its_claim_and_prints_what_is_shown(tmp_path, name):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    for _ in range(3):
        done = subprocess.run(
            [*command, str(EXAMPLES / f"{name}.py")],
            capture_output=True, text=True, cwd=tmp_path, env=environment, check=False, timeout=400,
        )  # fmt: skip
        if ABORTED_AT_EXIT not in done.stderr:
            break
    assert done.returncode == 0, done.stdout + done.stderr
    (shown,) = re.findall(
        rf"^## {name}\.py\n.*?^```text\n(.*?)^```", (EXAMPLES / "README.md").read_text(encoding="utf-8"), re.M | re.S
    )
    printed = {without_digits(line) for line in done.stdout.splitlines()}
    assert {without_digits(line) for line in shown.splitlines()} <= printed
    assert not list(tmp_path.iterdir()), "the example left a file behind"
