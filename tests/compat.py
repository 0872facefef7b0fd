"""Run the tests on this torch and write the result into docs/compatibility.md: `python -m tests.compat`.

`make compat TORCH=2.15.0 PYTHON=python3.13` makes an environment and calls this in it. Arguments are given to pytest:
they choose a part of the suite, and the table counts the rest as not run. `--again` runs what failed last time. What
each test did is kept in the environment, so that parts and repetitions add up; day and commit are of the latest run.
"""

import datetime
import json
import os
import platform
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "compatibility.md"
OUTCOMES = Path(sys.prefix) / "gradgate-compat.json"
HEAD = "| torch | Python | run on | commit | passed | skipped | failed | not run |\n|---|---|---|---|---|---|---|---|\n"
TABLE = re.compile(re.escape(HEAD) + r"((?:\|.*\|\n)*)")


PINNED = re.search(r"^TORCH \?= (\S+)$", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)[1]
"""The torch of the Makefile, whose words and tables the pages show."""


class Results:
    """A plugin of pytest that notes the outcome of every test."""

    def __init__(self, outcomes):
        self.outcomes = outcomes

    def pytest_xdist_node_collection_finished(self, node, ids):
        for name in ids:
            self.outcomes.setdefault(name, "not run")

    def pytest_runtest_logreport(self, report):
        """Take the call; of the set-up and the end only what did not pass."""
        if report.when == "call" or report.outcome != "passed":
            before = self.outcomes.get(report.nodeid)
            worse = before == "failed" and report.when == "teardown"
            self.outcomes[report.nodeid] = "failed" if worse else report.outcome


def known_outcomes():
    return json.loads(OUTCOMES.read_text(encoding="utf-8")) if OUTCOMES.exists() else {}


def collected():
    """List the whole suite."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "--quiet", "--disable-warnings"]
    listed = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT).stdout
    return [line for line in listed.splitlines() if "::" in line]


def commit():
    command = ["git", "rev-parse", "--short=10", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT).stdout.strip()


def row(torch_version, python_version, day, commit, outcomes):
    """Write one row of the table."""
    found = list(outcomes.values())
    counts = [found.count(outcome) for outcome in ("passed", "skipped", "failed", "not run")]
    cells = [torch_version, python_version, day, commit, *map(str, counts)]
    return f"| {' | '.join(cells)} |\n"


def with_row(page, new):
    """Put a row into the table of a page, in the place of that of the same versions, the newest versions first."""
    key = new.split("|")[1:3]
    rows = [line for line in TABLE.search(page)[1].splitlines(keepends=True) if line.split("|")[1:3] != key]
    rows.append(new)
    rows.sort(key=lambda line: [[int(n) for n in cell.split(".")] for cell in line.split("|")[1:3]], reverse=True)
    return TABLE.sub(lambda _: HEAD + "".join(rows), page)


def main():
    import pytest
    import torch

    arguments, outcomes = sys.argv[1:], {}
    if arguments:  # a part; of tests that exist no longer, nothing is counted
        known = known_outcomes()
        outcomes = {name: known.get(name, "not run") for name in collected()}
    if "--again" in arguments:
        failed = [name for name, outcome in outcomes.items() if outcome == "failed"]
        if not failed:
            sys.exit("Nothing failed last time.")
        arguments.remove("--again")
        arguments += failed
    os.chdir(ROOT)
    results = Results(outcomes)
    parallel = ["--numprocesses", os.environ.get("COMPAT_PROCESSES", "2"), "--dist", "worksteal"]
    code = pytest.main([*parallel, *arguments], plugins=[results])
    OUTCOMES.write_text(json.dumps(outcomes, indent=0), encoding="utf-8")
    day = datetime.datetime.now(datetime.UTC).date().isoformat()
    new = row(torch.__version__.partition("+")[0], platform.python_version(), day, commit(), outcomes)
    PAGE.write_text(with_row(PAGE.read_text(encoding="utf-8"), new), encoding="utf-8")
    print(new, end="")
    return int(code)


if __name__ == "__main__":
    sys.exit(main())
