"""The page is made of the results alone: what is behind, where a peer is faster, every row with its noise."""

import re

import pytest

from benchmarks.__main__ import CHARTS, KEPT, PAGES
from benchmarks.charts import charts_of, file_name
from benchmarks.page import page
from benchmarks.record import read
from tests.benchmarks.made import record, result


def section(text, title):
    """The lines of one section."""
    return re.search(rf"^## {re.escape(title)}\n\n(.*?)(?=^## |\Z)", text, re.M | re.S)[1].strip()


def made(*results, **about):
    return page(record(*results, **about), "charts/")


# --- goals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ratio", "goal", "factor"),
    [
        (1.0, {"at_most": 1.1}, 1.0),
        (1.3, {"at_most": 1.1}, 1.3 / 1.1),
        (1.5, {"at_most": 1.1}, 1.5 / 1.1),
        (0.2, {"at_least": 4.0}, 1.0),
        (0.5, {"at_least": 4.0}, 2.0),
        (9.0, {"microseconds": 1.0}, 1.0),  # a time, not a ratio
        (9.0, {}, 1.0),
    ],
)
def test_how_far_a_ratio_is_behind(ratio, goal, factor):
    assert result("a", {"ours": ratio}, **goal).behind == pytest.approx(factor)


def test_ratios_far_behind_are_at_the_top_the_worst_first():
    text = made(
        result("just missed", {"ours": 1.2}, at_most=1.0),
        result("far", {"ours": 1.5}, at_most=1.0),
        result("farther", {"ours": 0.5}, at_least=8.0),
        result("slow machine", {"ours": 50.0}, microseconds=1.0),
    )
    assert section(text, "Behind its goal by more than 25 %").splitlines()[2:] == [
        "| package | farther | >= 8 x faster | 2 x faster (iqr 0.4) | 300% |",
        "| package | far | <= 1 | 1.5 (iqr 0.1) | 50% |",
    ]
    assert text.index("Behind its goal") < text.index("Where a peer") < text.index("## package")


def test_nothing_behind_is_said_too():
    text = made(result("fine", {"ours": 1.0}, at_most=1.0))
    assert section(text, "Behind its goal by more than 25 %") == "Nothing."
    assert section(text, "Where a peer is faster") == "Nowhere."


# --- peers -----------------------------------------------------------------------------------------------------------


def test_a_faster_peer_is_told_and_the_plain_operation_is_none():
    text = made(
        result("a", {"ours": 4.0, "theirs": 2.0, "slower": 9.0}, peers=("theirs", "slower")),
        result("b", {"ours": 4.0, "not a peer": 2.0}),
        result("c", {"ours": 1.02, "theirs": 1.0}, peers=("theirs",)),  # noise
        result("d", {"ours": 3.0}, peers=("plain",)),  # the base may be a peer
    )
    assert section(text, "Where a peer is faster").splitlines()[2:] == [
        "| package | d | plain | 3.00 x | 1 us against 3 us |",
        "| package | a | theirs | 2.00 x | 2 us against 4 us |",
    ]


# --- rows ------------------------------------------------------------------------------------------------------------


def test_a_row_has_its_goal_its_noise_and_the_whole_field():
    text = made(
        result("ratio", {"ours": 1.5, "theirs": 3.0}, at_most=2.0, peers=("theirs",)),
        result("time", {"ours": 7.0}, microseconds=6.0),
        result("count", {"ours": 0.5}, at_most=1.0, counts=True),
        result("without a goal", {"ours": 2.0}),
    )
    assert section(text, "package").splitlines()[2:] == [
        "| ratio | <= 2 | 1.5 (iqr 0.1) | met | plain 1 (1 us), ours 1.5 (1.5 us), theirs 3 (3 us, peer) |",
        "| time | <= 6 us | 7 us (iqr 20%) | MISSED | plain 1 (1 us), ours 7 (7 us) |",
        "| count | <= 1 | 0.5 | met | plain 1 (0), ours 0.5 (0) |",
        "| without a goal | info only | 2 (iqr 0.1) |  | plain 1 (1 us), ours 2 (2 us) |",
    ]
    assert "**2 of 3 goals are met.**" in text
    assert "processor abacus, torch 2.13." in text


def test_what_was_not_run_and_what_failed_is_said():
    failed = result("b", {"ours": 9.0}, at_most=1.0, peers=("plain",))
    failed.error = "ValueError: no"
    text = made(result("a", {"ours": 1.0}, at_most=1.0), failed, rows=3, quick=True)
    assert "`make bench-quick`, 2026-01-02 03:04" in text
    assert "**1 of 1 goals are met.** 1 of 3 rows are not in it." in text
    assert section(text, "Did not run") == "- package: b: ValueError: no"
    assert section(text, "Where a peer is faster") == "Nowhere."


def test_charts_are_shown_where_there_are_two_sizes():
    rows = [result(f"of {size}", {"ours": 2.0}, size=size) for size in (10, 1000)]
    assert section(made(*rows), "How cost grows") == "![a chart](charts/a-chart.svg)"
    assert "How cost grows" not in made(rows[0])


# --- what is in the repository -------------------------------------------------------------------------------------


def test_the_pages_and_charts_are_those_of_the_results():
    kept, again = read(KEPT), "run: python -m benchmarks --pages"
    for path, (written, charts) in PAGES.items():
        assert path.read_text(encoding="utf-8") == written(kept, charts), again
    drawn = {file_name(title): chart for title, chart in charts_of(list(kept.results.values())).items()}
    assert {path.name: path.read_text(encoding="utf-8") for path in CHARTS.glob("*.svg")} == drawn, again
