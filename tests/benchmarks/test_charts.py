"""A chart is a whole, safe SVG, with each point where it belongs and no name over another."""

import itertools
import xml.etree.ElementTree as ElementTree

import pytest

from benchmarks.charts import chart, charts_of, file_name
from benchmarks.harness import duration
from tests.benchmarks.made import result

SVG = "{http://www.w3.org/2000/svg}"


def drawn(*results):
    return ElementTree.fromstring(chart(results))


def test_every_candidate_has_a_line_through_its_points_and_a_name():
    picture = drawn(*[result(f"of {size}", {"ours": 2.0, "theirs": 9.0}, size=size) for size in (1000, 10, 100)])
    groups = picture.findall(f"{SVG}g")
    assert [group.find(f"{SVG}text").text for group in groups] == ["plain", "ours", "theirs"]
    for group in groups:
        across = [float(circle.get("cx")) for circle in group.findall(f"{SVG}circle")]
        down = [float(circle.get("cy")) for circle in group.findall(f"{SVG}circle")]
        assert len(across) == 3
        assert across == sorted(across)
        assert down == sorted(down, reverse=True)  # more elements, more time, higher up
    assert picture.find(f"{SVG}title").text == "a chart"


def test_equal_steps_are_equal_distances():
    picture = drawn(*[result(f"of {size}", {"ours": 2.0}, size=size) for size in (10, 100, 1000)])
    first, second, third = (float(circle.get("cx")) for circle in picture.find(f"{SVG}g").findall(f"{SVG}circle"))
    assert second - first == pytest.approx(third - second, abs=0.2)


def test_names_do_not_cover_each_other():
    same = {f"candidate {number}": 1.0 for number in range(6)}
    picture = drawn(*[result(f"of {size}", same, size=size, ours="candidate 0") for size in (10, 100)])
    heights = sorted(float(group.find(f"{SVG}text").get("y")) for group in picture.findall(f"{SVG}g"))
    assert all(low + 14 <= high for low, high in itertools.pairwise(heights))


def test_names_are_text_whatever_is_in_them():
    picture = drawn(*[result(f"of {size}", {"<script>&": 2.0}, size=size, ours="<script>&") for size in (10, 100)])
    assert picture.findall(f"{SVG}g")[1].find(f"{SVG}text").text == "<script>&"
    assert not list(picture.iter(f"{SVG}script"))


def test_light_and_dark_have_a_ground_of_their_own():
    text = chart([result(f"of {size}", {"ours": 2.0}, size=size) for size in (10, 100)])
    light, dark = text.split("prefers-color-scheme:dark")
    assert "background:" in light
    assert "background:" in dark


def test_one_size_or_a_row_that_failed_gives_no_chart():
    one, two = (result(f"of {size}", {"ours": 2.0}, size=size) for size in (10, 100))
    assert list(charts_of([one, two])) == ["a chart"]
    assert charts_of([one]) == {}
    two.error = "no"
    assert charts_of([one, two]) == {}


def test_names_of_files_and_units():
    assert file_name("masked.mean of 1e6, forward & back") == "masked-mean-of-1e6-forward-back.svg"
    assert [duration(seconds) for seconds in (2.0, 0.0321, 4.5e-5, 7e-9)] == ["2 s", "32.1 ms", "45 us", "7 ns"]
