"""Every row can run: each of its candidates once, on small data where the row lets us; no time is looked at."""

import logging
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import cited, rows_command_line, rows_freezing, rows_guard, rows_ledger, rows_masked
from benchmarks.__main__ import all_rows

ROWS = all_rows()
APART = {"ranks"}  # joins a process group, so it gets a process of its own
PACKAGES = sorted({row.package for row in ROWS} - APART)


@pytest.fixture
def small(monkeypatch):
    """Shrink what is large, and put back what rows switch for the rest of their process."""
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
@pytest.mark.parametrize("package", PACKAGES)
def test_every_row_runs(package, small):
    for row in ROWS:
        if row.package == package:
            torch.manual_seed(0)
            candidates = row.candidates()
            assert {row.ours, row.base, *row.peers} <= candidates.keys(), row.name
            for candidate in candidates.values():
                candidate()


def test_a_quick_run_has_every_row_that_a_page_cites():
    quick = {row.title for row in ROWS if row.in_a_quick_run}
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
