"""One ledger into another, and into other formats."""

import csv
import json
import math
import sys

import pytest

from gradgate.errors import ArgumentTypeError, ArgumentValueError, LedgerError
from gradgate.ledger import Ledger
from gradgate.ledger import _writer as merging
from tests.ledger.made import incident


@pytest.fixture
def ranks(tmp_path):
    """Two ledgers of two ranks of one run."""
    ledgers = []
    for rank in range(2):
        ledger = Ledger(tmp_path / f"rank{rank}.ledger", payload=True, snapshot=True, run="night", arguments={"lr": 1})
        one = incident(f"sample {rank}", rank=rank, id=f"rank{rank}", loss=math.nan)
        ledger.record_many(
            [one, incident("both", rank=rank)], {one.id: f"payload {rank}".encode()}, snapshot=b"weights"
        )
        ledger.release("both", reason=f"rank {rank}")
        ledgers.append(ledger)
    return ledgers


def everything(ledger):
    """All rows of all tables."""
    names = ("run", "incident", "payload", "snapshot", "decision")
    return {name: sorted(map(repr, ledger.sql(f"SELECT * FROM {name}").rows)) for name in names}


def test_ranks_become_one_file(tmp_path, ranks):
    with Ledger(tmp_path / "all.ledger") as merged:
        assert [merged.merge(ranks[0]), merged.merge(str(ranks[1].path))] == [2, 2]
        assert sorted(found.sample_id for found in merged.incidents()) == ["both", "both", "sample 0", "sample 1"]
        assert merged.payload_of("rank1") == b"payload 1"
        assert merged.snapshot_of("rank0") == b"weights"
        assert [run.name for run in merged.runs()] == ["night"]
        assert {decision.reason for decision in merged.decisions()} == {"rank 0", "rank 1"}
        assert merged.bad_ids() == {"sample 0", "sample 1"}
        assert math.isnan(merged.incident("rank0").loss)


def test_merging_again_changes_nothing(tmp_path, ranks, monkeypatch):
    monkeypatch.setattr(merging, "PAGE", 1)
    with Ledger(tmp_path / "all.ledger") as merged:
        for ledger in ranks:
            merged.merge(ledger)
        before = everything(merged)
        assert [merged.merge(ledger) for ledger in (*ranks, merged)] == [0, 0, 0]
        assert everything(merged) == before


def test_the_end_of_a_run_is_the_last_one(tmp_path, ranks):
    with Ledger(tmp_path / "all.ledger") as merged:
        merged.merge(ranks[0])
        assert merged.runs()[0].ended is None
        for ledger in ranks:
            ledger.close()
            merged.merge(ledger)
        assert merged.runs()[0].ended == ranks[1].runs()[0].ended


def test_what_is_no_ledger_is_not_merged(tmp_path, ranks):
    with pytest.raises(LedgerError, match="there is no ledger"):
        ranks[0].merge(tmp_path / "nothing")


# --- export --------------------------------------------------------------------------------------------------------


@pytest.fixture
def ledger(tmp_path):
    with Ledger(tmp_path / "run.ledger", run="night") as opened:
        opened.record_many(
            [
                incident("a,b\n'\"", message="é", loss=math.nan, step=3, details={"shape": [1, 2]}, time=1.0),
                incident(None, stage="loss", cause="non-finite loss", loss=math.inf, transient=True, time=2.0),
            ]
        )
        yield opened


def test_csv(ledger, tmp_path):
    assert ledger.export(tmp_path / "out.csv") == 2
    with open(tmp_path / "out.csv", newline="", encoding="utf-8") as file:
        first, second = csv.DictReader(file)
    assert (first["sample_id"], first["message"], first["loss"], first["step"]) == ("a,b\n'\"", "é", "nan", "3")
    assert json.loads(first["details"]) == {"shape": [1, 2]}
    assert (second["sample_id"], second["loss"], second["transient"]) == ("", "inf", "True")


def test_json_lines(ledger, tmp_path):
    assert ledger.export(tmp_path / "out.jsonl", cause="exception") == 1

    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    (line,) = (tmp_path / "out.jsonl").read_text().splitlines()
    found = json.loads(line, parse_constant=refuse)
    assert (found["sample_id"], found["loss"], found["details"]) == ("a,b\n'\"", "nan", {"shape": [1, 2]})


def test_parquet(ledger, tmp_path):
    from pyarrow import parquet

    assert ledger.export(tmp_path / "out.parquet") == 2
    first, second = parquet.read_table(tmp_path / "out.parquet").to_pylist()
    assert (first["sample_id"], first["step"], first["transient"]) == ("a,b\n'\"", 3, False)
    assert math.isnan(first["loss"])
    assert second["loss"] == math.inf


def test_parquet_without_pyarrow_says_what_to_install(ledger, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(LedgerError, match=r"parquet needs pyarrow(.|\n)*pip install 'gradgate\[parquet\]'"):
        ledger.export(tmp_path / "out.parquet")
    assert [file.name for file in tmp_path.iterdir() if "out" in file.name] == []


def test_an_unknown_format_lists_the_known_ones(ledger, tmp_path):
    with pytest.raises(ArgumentValueError, match=r"no format 'xlsx'(.|\n)*csv, jsonl, parquet"):
        ledger.export(tmp_path / "out.xlsx")
    assert ledger.export(tmp_path / "out.txt", format="csv") == 2


def test_a_file_that_cannot_be_written_is_an_error(ledger, tmp_path):
    with pytest.raises(LedgerError, match=r"out.csv cannot be written: No such file or directory"):
        ledger.export(tmp_path / "nowhere" / "out.csv")


def test_the_ledger_itself_is_not_overwritten(ledger):
    with pytest.raises(ArgumentValueError, match="is the ledger itself"):
        ledger.export(ledger.path, format="csv")
    assert len(ledger.incidents()) == 2


def test_what_is_no_ledger_is_refused(ranks):
    with pytest.raises(ArgumentTypeError, match=r"`other` is 5(.|\n)*the path of one"):
        ranks[0].merge(5)
