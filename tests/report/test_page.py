"""The page as a file: complete, small, sealed, and made without torch."""

import base64
import hashlib
import math
import os
import re
import subprocess
import sys

import pytest

import gradgate as gg
from gradgate.errors import ArgumentTypeError, ArgumentValueError
from gradgate.ledger import Ledger
from gradgate.records import Incident
from gradgate.report import _columns, render_page, write_page
from tests.ledger.made import ROOT, incident
from tests.report.made import HOSTILE, MemoryBook, diagnosis, many
from tests.report.reading import column, data_of

KEPT = {
    "run": "run",
    "step": "step",
    "epoch": "epoch",
    "rank": "rank",
    "row": "row",
    "sample": "sample_id",
    "stage": "stage",
    "cause": "cause",
    "exception": "exception_type",
    "message": "message",
    "where": "where",
    "module": "module",
}


@pytest.fixture
def ledger(tmp_path):
    with Ledger(tmp_path / "run.ledger", run="night", arguments={"lr": math.inf}) as ledger:
        ledger.record(
            incident("a", step=3, epoch=1, loss=math.nan, grad_norm=1 / 3, time=1.7e9, details={"x": math.inf})
        )
        ledger.record(
            incident("b", step=None, row=5, exception_type="ValueError", message="no", where="t.py:1", time=1.7e9 + 1)
        )
        ledger.record(incident("a", step=4, transient=True, stage="load", time=1.7e9 + 2))
        yield ledger


def test_everything_of_the_ledger_is_in_it(ledger):
    data = data_of(render_page(ledger))["ledger"]
    incidents = ledger.incidents()
    for name, attribute in KEPT.items():
        assert column(data["columns"][name]) == [getattr(one, attribute) for one in incidents], name
    assert column(data["columns"]["time"]) == [round(one.time * 1000) for one in incidents]
    assert column(data["columns"]["loss"]) == ["nan", None, None]
    assert column(data["columns"]["norm"]) == [0.3333, None, None]
    assert column(data["columns"]["transient"]) == [0, 0, 1]
    assert column(data["columns"]["details"]) == ['{"x": "inf"}', None, None]
    assert (data["name"], data["total"], data["bad"]) == ("run.ledger", 3, 2)
    assert [data["columns"]["sample"]["words"][place] for place in column(data["bad_words"])] == ["a", "b"]
    assert data["runs"][0]["arguments"] == {"lr": "inf"}


def test_ids_are_as_long_as_needed_and_the_ledger_knows_them(ledger):
    ledger.record_many([incident("c", id=f"00000000000000{number:02}") for number in range(20)])
    ids = data_of(render_page(ledger))["ledger"]["id"]
    assert len(set(ids)) == len(ids)
    assert {len(one) for one in ids} == {16}
    assert [ledger.incident(one).id for one in ids] == [one.id for one in ledger.incidents()]


def test_an_empty_ledger_is_a_page_too(tmp_path):
    data = data_of(render_page(Ledger(tmp_path / "new.ledger")))["ledger"]
    assert (data["id"], data["total"]) == ([], 0)


def test_the_newest_are_on_the_page_and_all_are_counted(monkeypatch):
    monkeypatch.setattr(_columns, "LIMIT", 10)
    data = data_of(render_page(MemoryBook(many(25))))["ledger"]
    assert data["total"] == 25
    assert data["id"] == [one.id[:8] for one in many(25)[15:]]


def test_too_much_text_is_cut_and_it_is_said(monkeypatch):
    monkeypatch.setattr(_columns, "_TEXT", 400)
    data = data_of(render_page(MemoryBook(many(100))))["ledger"]
    assert data["cut"]
    assert max(map(len, data["columns"]["message"]["words"])) == 41
    assert column(data["columns"]["sample"]) == [one.sample_id for one in many(100)]
    assert column(data["columns"]["details"])[0] is not None


def test_times_that_no_calendar_has():
    book = MemoryBook([Incident(stage="load", cause="x", time=time) for time in (math.inf, math.nan, 1e300, 0.0)])
    assert column(data_of(render_page(book))["ledger"]["columns"]["time"]) == [None, None, None, 0]


@pytest.mark.slow
def test_a_hundred_thousand_incidents_stay_under_5_mb_and_an_ordinary_run_under_1_mb():
    assert len(render_page(MemoryBook(many(100_000)), diagnosis())) < 5_000_000
    assert len(render_page(MemoryBook(many(1000)), diagnosis())) < 300_000


# --- sealed --------------------------------------------------------------------------------------------------------


def test_only_its_own_script_and_style_may_run():
    page = render_page(diagnosis=diagnosis())
    policy = re.search(r'http-equiv="Content-Security-Policy" content="([^"]*)"', page)[1]
    parts = dict(part.strip().split(" ", 1) for part in policy.split(";"))
    assert parts["default-src"] == "'none'"
    assert "connect-src" not in parts
    assert "unsafe" not in policy
    for name, element in (("script", r"<script>(.*?)</script>"), ("style", r"<style>(.*?)</style>")):
        digest = base64.b64encode(hashlib.sha256(re.search(element, page, re.DOTALL)[1].encode()).digest()).decode()
        assert parts[f"{name}-src"] == f"'sha256-{digest}'"
    assert page.index("Content-Security-Policy") < page.index("<style>") < page.index("<script")


def test_nothing_of_a_ledger_is_markup(tmp_path):
    with Ledger(tmp_path / "run.ledger") as ledger:
        ledger.record_many([incident(text, message=text, cause=text, where=text, module=text) for text in HOSTILE])
        page = render_page(ledger, diagnosis(), name=HOSTILE[1])
    plain = render_page(diagnosis=diagnosis(), name="x")
    tags = re.compile(r"<[a-zA-Z!/][^>]*>")
    script = re.compile(r"<script>.*?</script>|data-live.*?</script>", re.DOTALL)
    assert len(tags.findall(script.sub("", page))) == len(tags.findall(script.sub("", plain)))
    assert "<title>&lt;/script&gt;" in page
    told = column(data_of(page)["ledger"]["columns"]["sample"])
    assert told == [one.sample_id for one in ledger.incidents()]


def test_no_handlers_and_no_addresses_in_the_markup():
    page = render_page(MemoryBook(many(3)), diagnosis())
    markup = re.sub(r"<(script|style)[^>]*>.*?</\1>", "", page, flags=re.DOTALL)
    assert not re.search(r"\bon\w+=|src=|href=|https?:", markup)


# --- wrong uses ----------------------------------------------------------------------------------------------------


def test_what_cannot_be_shown_is_told(ledger, tmp_path):
    with pytest.raises(ArgumentValueError, match="there is neither a ledger nor a diagnosis"):
        render_page()
    with pytest.raises(ArgumentTypeError, match=r"`ledger` is 'run.ledger'(.|\n)*not of its path"):
        render_page("run.ledger")
    with pytest.raises(ArgumentValueError, match="`diagnosis` has no list of findings"):
        render_page(diagnosis={"no": "findings"})
    for odd in ({"findings": [1]}, {"findings": [{"code": "GG101"}]}, {"findings": None}):
        with pytest.raises(ArgumentValueError, match="each with a code, a severity and a title"):
            render_page(diagnosis=odd)
    with pytest.raises(ArgumentValueError, match=r"run\.ledger is the ledger itself"):
        write_page(ledger.path, ledger)
    assert len(ledger.incidents()) == 3


def test_what_a_finding_does_not_say_is_empty():
    short = {"code": "GG101", "severity": "error", "title": "cut"}
    (finding,) = data_of(render_page(diagnosis={"findings": [short]}))["diagnosis"]["findings"]
    assert finding == {**gg.Finding(**short).to_dict(), "samples": [], "also": [], "consequences": []}


def test_a_page_is_replaced_in_one_go(ledger, tmp_path):
    path = tmp_path / "report.html"
    assert write_page(path, ledger) == path.stat().st_size
    path.write_text("old")
    write_page(str(path), ledger, diagnosis())
    assert data_of(path.read_text())["diagnosis"] == diagnosis()
    with pytest.raises(FileNotFoundError):
        write_page(tmp_path / "nowhere" / "report.html", ledger)
    assert sorted(os.listdir(tmp_path))[0] == "report.html"
    assert not list(tmp_path.glob("*.unfinished"))


def test_torch_is_not_needed(ledger, tmp_path):
    code = """
import sys
sys.modules["torch"] = None
from gradgate.ledger import Ledger
from gradgate.report import write_page
print(write_page(sys.argv[2], Ledger(sys.argv[1], read_only=True)))
"""
    command = [sys.executable, "-c", code, str(ledger.path), str(tmp_path / "page.html")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) == (tmp_path / "page.html").stat().st_size


def test_a_ledger_fits_and_other_things_do_not(ledger):
    assert isinstance(ledger, gg.report.Book)
    assert isinstance(MemoryBook([]), gg.report.Book)
    assert not isinstance([], gg.report.Book)


def test_hard_samples_come_with_their_losses_and_the_median_of_all(ledger):
    assert data_of(render_page(ledger))["ledger"]["hard"] is None
    ledger.record_losses([(f"s{place}", float(place)) for _ in range(4) for place in range(40)])
    ledger.record_losses([("wrong", 500.0)] * 4)
    hard = data_of(render_page(ledger))["ledger"]["hard"]
    assert (hard["samples"], hard["suspicious"], hard["median"]) == (41, 1, 20)
    assert [one["sample"] for one in hard["listed"]] == ["wrong", *(f"s{place}" for place in range(39, 28, -1))]
    assert hard["listed"][0] == {"sample": "wrong", "losses": [500.0] * 4, "recent": 500.0, "suspicious": True}
    assert data_of(render_page(MemoryBook(many(3))))["ledger"]["hard"] is None


def test_how_columns_are_written():
    assert _columns.words(["b", "a", None, "b"]) == {"words": ["b", "a"], "index": [0, 1, -1, 0]}
    assert _columns.deltas([100, 101, None, 105]) == {"deltas": [100, 1, None, 4]}
    assert [_columns.number(value) for value in (0.123456789, math.nan, None)] == [0.1235, "nan", None]
    assert [_columns.number(value) for value in (-math.inf, 1 / 3)] == ["-inf", 0.3333]
