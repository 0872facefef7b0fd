"""Every row can run: each of its candidates once, on small data where the row lets us; no time is looked at."""

import importlib
import logging
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import benchmarks
from benchmarks import cited
from benchmarks.__main__ import all_rows

# The files of rows import every peer, which takes seconds: a test imports them, not pytest when it looks for tests.
APART = "rows_ranks"  # joins a process group, so it gets a process of its own
FILES = sorted(each.name for each in pkgutil.iter_modules(benchmarks.__path__) if each.name.startswith("rows_"))


@pytest.fixture
def small(monkeypatch):
    """Shrink what is large, and put back what rows switch for the rest of their process."""
    from benchmarks import rows_command_line, rows_freezing, rows_guard, rows_ledger, rows_masked

    data, training, holding = rows_masked.data, rows_guard.training, rows_ledger.holding
    monkeypatch.setattr(rows_masked, "data", lambda shape, **more: data(tuple(min(n, 50) for n in shape), **more))
    monkeypatch.setattr(
        rows_guard,
        "training",
        lambda kind, size, bad, *options: training(kind, min(size, 16), min(bad, 2), *options),
    )
    for module in (rows_ledger, rows_command_line):
        monkeypatch.setattr(module, "holding", lambda count: holding(min(count, 1_000)))
    monkeypatch.setattr(rows_freezing, "TABLE", (200, 8))
    monkeypatch.setattr(rows_freezing, "IDS", rows_freezing.IDS % 200)
    logger = logging.getLogger("gradgate")
    level = logger.level
    yield
    logger.setLevel(level)


@pytest.mark.slow
@pytest.mark.parametrize("file", [each for each in FILES if each != APART])
def test_every_row_runs(file, small):
    rows = importlib.import_module(f"benchmarks.{file}").ROWS
    if file == "rows_frameworks" and not rows:
        pytest.skip("no framework is installed")
    assert rows
    for row in rows:
        torch.manual_seed(0)
        candidates = row.candidates()
        assert {row.ours, row.base, *row.peers} <= candidates.keys(), row.name
        for candidate in candidates.values():
            candidate()


@pytest.mark.slow
def test_a_quick_run_has_every_row_that_a_page_cites():
    quick = {row.title for row in all_rows() if row.in_a_quick_run}
    cited_rows = {match[1] for path in cited.PAGES for match in cited.MARK.finditer(path.read_text(encoding="utf-8"))}
    assert cited_rows
    assert cited_rows <= quick


@pytest.mark.slow
@pytest.mark.distributed
def test_the_rows_of_ranks_run():
    code = (
        "from benchmarks import rows_ranks\n"
        "if __name__ == '__main__':\n"
        "    for row in rows_ranks.ROWS:\n"
        "        [candidate() for candidate in row.candidates().values()]\n"
    )
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=root, check=False)
    assert done.returncode == 0, done.stderr
