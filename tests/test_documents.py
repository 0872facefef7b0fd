"""Every Python block of the README and the documentation runs by itself, and prints what the page shows.

A block is a fenced ```python; a fenced ```text directly after it is its output.
"""

import contextlib
import io
import re
import sys
import types
from pathlib import Path

import pytest
import torch

from tests.compat import PINNED

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^```python\n(.*?)^```\n(?:\n?```text\n(.*?)^```\n)?", re.DOTALL | re.MULTILINE)


def blocks():
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for match in BLOCK.finditer(text):
            line = text[: match.start(1)].count("\n") + 1
            yield pytest.param(page, line, match[1], match[2], id=f"{page.relative_to(ROOT)}:{line}")


def run(page, line, code):
    """Run a block as a script of its own, with the line numbers of the page, and return what it prints."""
    script = types.ModuleType("__main__")
    printed = io.StringIO()
    before = sys.modules["__main__"]
    sys.modules["__main__"] = script
    try:
        with contextlib.redirect_stdout(printed):
            exec(compile("\n" * (line - 1) + code, str(page), "exec"), script.__dict__)
    finally:
        sys.modules["__main__"] = before
    return printed.getvalue()


@pytest.mark.slow
@pytest.mark.parametrize(("page", "line", "code", "shown"), list(blocks()))
def test_a_block_runs_and_prints_what_is_shown(page, line, code, shown, tmp_path, monkeypatch):
    if page.parent.name == "frameworks":
        for module in re.findall(r"^(?:from|import) ([\w.]+)", code, re.MULTILINE):
            pytest.importorskip(module)
    monkeypatch.chdir(tmp_path)
    printed = run(page, line, code)
    if page.parent.name == "troubles" and not torch.__version__.startswith(PINNED):
        pytest.skip(f"it runs; the page shows the messages of torch {PINNED}")
    if shown is not None:
        assert [text.rstrip() for text in printed.splitlines()] == [text.rstrip() for text in shown.splitlines()]


def test_a_wrong_block_is_found():
    with pytest.raises(ZeroDivisionError):
        run(ROOT / "README.md", 1, "1 / 0\n")
    matches = BLOCK.findall("```python\nprint(1)\n```\n\n```text\n1\n```\n")
    assert matches == [("print(1)\n", "1\n")]
