"""The measured numbers in README and docs: `python -m benchmarks.cited` takes them from results.md.

A number stands between two marks. The first names its row, and a candidate of the field if it is not ours:
`<!-- bench: healthy step, batch 64, CNN -->1.01<!-- -->`, `<!-- bench: a row -> a candidate -->0.45<!-- -->`.
"""

from __future__ import annotations

import re
from pathlib import Path

__all__ = ["PAGES", "measured", "with_numbers"]

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results.md"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
MARK = re.compile(r"<!-- bench: (.+?)(?: -> (.+?))? -->(.*?)<!-- -->")


def measured(results: str) -> dict[str, tuple[str, str]]:
    """Read the rows of the results.

    Args:
        results: The text of results.md.

    Returns:
        For each title the figure, without its noise, and the field.
    """
    table = [[cell.strip() for cell in line.strip("|").split("|")] for line in results.splitlines() if line[:1] == "|"]
    found: dict[str, tuple[str, str]] = {}
    heads: list[str] = []
    for cells, below in zip(table, [*table[1:], [""]], strict=True):
        if below[0].startswith("---"):
            heads = cells
        elif "goal" in heads and heads[-1].startswith("the field") and not cells[0].startswith("---"):
            row = dict(zip(heads, cells, strict=True))
            found[row["what"]] = row["measured"].partition(" (")[0], cells[-1]
    return found


def with_numbers(text: str, rows: dict[str, tuple[str, str]]) -> str:
    """Give a page with the numbers of today between its marks.

    Args:
        text: The page.
        rows: What was measured.

    Returns:
        The page.

    Raises:
        KeyError: A mark names a row or a candidate that was not measured.
    """

    def number(match: re.Match[str]) -> str:
        figure, field = rows[match[1]]
        if match[2]:
            candidate = re.search(rf"(?:^|, ){re.escape(match[2])} ([\d.e+-]+) \(", field)
            if candidate is None:
                raise KeyError(f"{match[1]} -> {match[2]}")
            figure = candidate[1]
        return match[0].replace(f"-->{match[3]}<!--", f"-->{figure}<!--")

    return MARK.sub(number, text)


if __name__ == "__main__":
    today = measured(RESULTS.read_text(encoding="utf-8"))
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        try:
            if (fresh := with_numbers(text, today)) != text:
                page.write_text(fresh)
        except KeyError as missing:  # a short run leaves rows out
            print(f"{page.relative_to(ROOT)} keeps its numbers; this run has no row {missing}")
