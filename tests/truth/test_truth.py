"""Each cell of the truth table is tried: a "yes" must work, a "no" must not (or the table is out of date)."""

import pytest
import torch

from tests.truth import COLUMNS, rows
from tests.truth.__main__ import PAGE, with_table

CELLS = [pytest.param(row, column, id=f"{row.name}-{column}") for row in rows() for column in COLUMNS]


@pytest.mark.slow
@pytest.mark.parametrize(("row", "column"), CELLS)
def test_cell(row, column):
    said = row.cell(column)
    if column == "compile" and row.name in ("gg.apply_rows", "gg.apply_where") and torch.__version__ < "2.9":
        pytest.skip(f"the Dynamo of torch {torch.__version__} takes no rows into one graph")
    if said == "yes":
        row.check(column)
    elif said == "no":
        # Any exception counts: wrong values are an AssertionError, a refusal may be of any class.
        with pytest.raises(Exception):  # noqa: B017, PT011
            row.check(column)


def test_the_page_shows_the_table_of_today():
    assert with_table(PAGE.read_text(encoding="utf-8")) == PAGE.read_text(encoding="utf-8"), (
        "run: python -m tests.truth"
    )
