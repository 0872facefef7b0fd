"""Write the truth table into LIMITATIONS.md: `python -m tests.truth`."""

from pathlib import Path

from tests.truth import table

START, END = "<!-- table: python -m tests.truth -->\n", "<!-- end of table -->"
PAGE = Path(__file__).parents[2] / "LIMITATIONS.md"


def with_table(text: str) -> str:
    """Give the page's text with the table of today between its marks."""
    head, rest = text.split(START)
    _, tail = rest.split(END)
    return head + START + table() + END + tail


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
