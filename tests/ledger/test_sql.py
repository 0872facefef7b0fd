"""Plain SQL: the documented views, and nothing but reading."""

import sqlite3

import pytest

from gradgate.errors import ArgumentValueError, LedgerError
from gradgate.ledger import Ledger
from tests.ledger.made import incident


@pytest.fixture
def ledger(tmp_path):
    with Ledger(tmp_path / "run.ledger", payload=True, run="night") as opened:
        one = incident("a", step=1, where="train.py:12", time=0.0)
        opened.record_many([one, incident("b", step=2)], {one.id: b"x"})
        yield opened


def test_the_views_are_there_for_any_program(ledger):
    """With nothing but sqlite3: no gradgate, no torch."""
    connection = sqlite3.connect(ledger.path)
    assert connection.execute("SELECT sample_id, place, at, has_payload FROM incidents WHERE step = 1").fetchall() == [
        ("a", "train.py:12", "1970-01-01 00:00:00", 1)
    ]
    assert connection.execute("SELECT sample_id, incidents, causes FROM samples ORDER BY 1").fetchall() == [
        ("a", 1, "exception"),
        ("b", 1, "exception"),
    ]
    assert connection.execute("SELECT name, incidents FROM runs").fetchall() == [("night", 2)]
    connection.close()


def test_a_question_has_columns_and_rows(ledger):
    answer = ledger.sql("SELECT sample_id AS who, step FROM incidents WHERE step > ? ORDER BY step", [0], limit=1)
    assert (answer.columns, answer.rows) == (("who", "step"), [("a", 1)])


@pytest.mark.parametrize(
    "question",
    [
        "DELETE FROM incident",
        "UPDATE incident SET message = ''",
        "INSERT INTO run (name, started) VALUES ('x', 1)",
        "DROP TABLE incident",
        "CREATE TABLE x (y)",
        "CREATE TEMP TABLE x (y)",
        "ATTACH '{folder}/new.db' AS new",
        "VACUUM INTO '{folder}/new.db'",
        "PRAGMA query_only = OFF",
        "PRAGMA journal_mode = DELETE",
        "BEGIN",
        "SELECT 1; DELETE FROM incident",
        "SELECT load_extension('x')",
        "SELEKT 1",
        "SELECT nothing FROM incidents",
        "SELECT ?",
        "",
    ],
)
def test_whatever_does_more_than_read_is_refused(ledger, question):
    before = sorted(file.name for file in ledger.path.parent.iterdir())
    if question == "":
        assert ledger.sql(question).rows == []
    else:
        with pytest.raises(ArgumentValueError, match="the question cannot be asked"):
            ledger.sql(question.format(folder=ledger.path.parent))
    assert len(ledger.incidents()) == 2
    assert sorted(file.name for file in ledger.path.parent.iterdir()) == before


def test_a_question_without_an_end_is_stopped(ledger):
    with pytest.raises(LedgerError, match=r"took longer than 0\.1 seconds(.|\n)*seconds=1\)"):
        ledger.sql("WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n) SELECT max(x) FROM n", seconds=0.1)


def test_a_nan_loss_is_a_text_in_sql(ledger):
    ledger.record(incident("nan", loss=float("nan")))
    answer = ledger.sql("SELECT sample_id FROM incidents WHERE loss = 'nan' OR loss > 1e9")
    assert answer.rows == [("nan",)]


@pytest.mark.parametrize("question", [5, None, "SELECT '\ud800'"])
def test_what_is_no_text_is_no_question(ledger, question):
    with pytest.raises(ArgumentValueError, match="the question cannot be asked"):
        ledger.sql(question)
