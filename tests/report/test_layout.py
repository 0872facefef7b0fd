"""The layout of the page at three widths, light and dark: nothing overlaps, is cut, or is too small to read."""

import re
from dataclasses import replace

import pytest

from gradgate.ledger import Ledger
from gradgate.records import Incident
from gradgate.report import render_page
from tests.report import looks
from tests.report.browsing import chromium, opened, why_not
from tests.report.made import MemoryBook, large_diagnosis, many

pytestmark = [
    pytest.mark.browser,
    pytest.mark.slow,
    pytest.mark.skipif(bool(why_not()), reason=f"the pages are not looked at: {why_not()}"),
]
SUSPECTS = {119: 1.1, 120: 5.2, 121: 9.0, 122: 12.5}

# Texts that must be seen whole; those that end in dots on purpose (`clip`) need not.
CUT = """() => [...document.querySelectorAll(
    "h2, .lead, .tile dt, .tile dd, .facts dd, .finding h3, .chip, .note, .row.head .cell, .hard td, thead th")]
  .filter((one) => one.offsetParent && !one.closest(".clip, .scroll") && !one.classList.contains("clip"))
  .filter((one) => one.scrollWidth > one.clientWidth + 1 && getComputedStyle(one).display !== "inline")
  .map((one) => one.outerHTML.slice(0, 120))"""
OVERLAPS = """() => {
  const boxes = [...document.querySelectorAll("main > section")].filter((one) => one.offsetParent)
    .map((one) => [one.id, one.getBoundingClientRect()]);
  return boxes.slice(1).filter(([, box], at) => box.top < boxes[at][1].bottom - 1).map(([id]) => id);
}"""
GRAPH_TEXTS = """() => [...document.querySelectorAll("svg.graph text")].map((one) => {
  const picture = one.ownerSVGElement;
  const zoom = picture.getBoundingClientRect().width / picture.viewBox.baseVal.width;
  return parseFloat(getComputedStyle(one).fontSize) * zoom;
})"""
CHART_TEXTS = GRAPH_TEXTS.replace("svg.graph", "svg.rewind-chart")
OUT_OF_BOX = """() => [...document.querySelectorAll("g.box, g.cut-sign")].filter((box) => {
  const body = box.querySelector(".body, rect").getBoundingClientRect();
  return [...box.querySelectorAll(".title, .kind, .norm, .cut-sign text")].some((text) => {
    const seen = text.getBoundingClientRect();
    return seen.left < body.left - 1 || seen.right > body.right + 1;
  });
}).map((box) => box.getAttribute("aria-label"))"""


@pytest.fixture(scope="module")
def browser():
    with chromium() as browser:
        yield browser


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    spikes = [
        Incident(
            run="night",
            step=step,
            stage="step",
            cause="loss spike",
            loss=loss,
            message="the loss is 12.5, above 1.1 + 8 x 0.1",
            details={"rewound_to": 100, "suspects": list(SUSPECTS)},
            time=1.7e9 + step,
        )
        for step, loss in SUSPECTS.items()
    ]
    ranks = [replace(one, rank=place % 4, world_size=4) for place, one in enumerate(many(200))]
    with Ledger(tmp_path_factory.mktemp("hard") / "hard.ledger", run="night") as hard:
        hard.record_many(ranks)
        names = [f"{ranks[place].sample_id}" for place in range(3)] + [f"data/{place:04}.png" for place in range(60)]
        wrong = set(names[:2])
        hard.record_losses(
            [
                (name, 5.0 if name in wrong else 2 / (epoch + 1) + len(names[0]) / 100)
                for epoch in range(8)
                for name in names
            ]
        )
        with_history = render_page(hard)
    made = {
        "ranks": with_history,
        "small": looks.sample_page(),
        "large": render_page(MemoryBook(many(2_000)), large_diagnosis(18), name="large.ledger"),
        "rewind": render_page(MemoryBook(spikes), name="night.ledger"),
    }
    folder = tmp_path_factory.mktemp("layouts")
    for name, text in made.items():
        (folder / f"{name}.html").write_text(text, encoding="utf-8")
    return {name: (folder / f"{name}.html").as_uri() for name in made}


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 768, 1400])
def test_nothing_overlaps_or_is_cut(browser, pages, width, scheme):
    for name, address in pages.items():
        with opened(browser, address, size=(width, 844), scheme=scheme) as page:
            page.locator(".viewport .row").first.click()
            assert page.evaluate("() => document.documentElement.scrollWidth") <= width, name
            assert page.evaluate(OVERLAPS) == [], name
            assert page.evaluate(CUT) == [], name
            assert min(page.evaluate(GRAPH_TEXTS), default=12) >= 12, name
            assert page.evaluate(OUT_OF_BOX) == [], name
            assert min(page.evaluate(CHART_TEXTS), default=12) >= 12, name
            assert page.locator("aside.details").bounding_box()["height"] <= 844, name


def test_the_graph_uses_its_width(browser, pages):
    """A small graph lies across a wide screen, and stands on a narrow one."""
    for width, across in ((1400, True), (390, False)):
        with opened(browser, pages["small"], size=(width, 844)) as page:
            box, canvas = page.locator("svg.graph").bounding_box(), page.locator(".canvas").bounding_box()
            assert (box["width"] > box["height"]) == across
            if across:
                assert box["width"] > 0.6 * canvas["width"]


def test_closing_a_part_changes_the_depth_that_is_shown(browser, pages):
    with opened(browser, pages["small"]) as page:
        depth = page.locator("#graph output")
        assert depth.inner_text() == "2 of 2"
        page.locator(".frame-title").click()
        assert depth.inner_text() == "1 of 2"
        page.locator(".box.closed").click()
        assert depth.inner_text() == "2 of 2"


def test_a_range_stays_on_the_chart_until_it_is_removed(browser, pages):
    with opened(browser, pages["small"]) as page:
        chart = page.locator(".u-over")
        chart.scroll_into_view_if_needed()
        box = chart.bounding_box()
        page.mouse.move(box["x"] + 100, box["y"] + 50)
        page.mouse.down()
        page.mouse.move(box["x"] + 300, box["y"] + 60, steps=4)
        page.mouse.up()
        page.locator(".chip").first.wait_for()
        mark = page.locator(".u-select").bounding_box()
        assert abs(mark["width"] - 200) < 6
        assert abs(mark["x"] - box["x"] - 100) < 4
        page.get_by_role("button", name="Remove the filter").first.click()
        assert page.locator(".u-select").evaluate("one => one.clientWidth") == 0


def test_ties_and_zones_are_said(browser, pages):
    with opened(browser, pages["small"]) as page:
        assert re.search(
            r"the 10 with most incidents, of 61; \d+ more have 4 incidents too",
            page.locator("#worst .lead").inner_text(),
        )
        assert page.locator("#summary .lead").inner_text().startswith("incidents from 2023-11-14 22:13 to 2023-11-15")
        assert " UTC · " in page.locator("#summary .lead").inner_text()
        page.locator(".viewport .row").first.click()
        assert re.search(r"\d\d:\d\d:\d\d UTC", page.locator("aside.details .facts").inner_text())


def test_a_rewind_is_drawn_with_its_loss_and_its_arc_back(browser, pages):
    with opened(browser, pages["rewind"]) as page:
        entry = page.locator("#rewinds li")
        assert entry.count() == 1
        assert "Back to step 100 without steps 119 to 122" in entry.inner_text()
        heights = page.locator(".rewind-chart .spike").evaluate_all(
            "all => all.map((one) => one.getBoundingClientRect().height)"
        )
        assert heights == sorted(heights)
        assert len(heights) == 4
        assert page.locator(".rewind-chart .back").count() == 1
    with opened(browser, pages["small"]) as page:
        assert page.locator("#rewinds").count() == 0


def test_ranks_have_a_column_and_a_filter_only_where_there_are_several(browser, pages):
    with opened(browser, pages["ranks"], size=(1400, 900)) as page:
        assert page.locator(".row.head .cell.rank").is_visible()
        assert "incidents on 4 ranks" in page.locator(".tiles").inner_text()
        page.get_by_label("All ranks").select_option("rank 2")
        page.get_by_text("50 of 200 incidents").wait_for()
        assert set(page.locator(".viewport .cell.rank").all_inner_texts()) == {"2"}
        page.get_by_role("button", name="Clear all").click()
        page.get_by_role("button", name="Rank", exact=True).click()
        assert page.locator(".viewport .cell.rank").first.inner_text() == "0"
        page.locator(".viewport .row").first.click()
        assert "Rank\n0" in page.locator("aside.details .facts").inner_text()
    with opened(browser, pages["small"], size=(1400, 900)) as page:
        assert not page.locator(".row.head .cell.rank").is_visible()
        assert page.get_by_label("All ranks").count() == 0


def test_hard_samples_are_listed_with_their_losses_only_where_a_history_exists(browser, pages):
    with opened(browser, pages["ranks"], size=(1400, 900)) as page:
        assert "2 samples have a loss that is high and does not fall" in page.locator("#hard .lead").inner_text()
        rows = page.locator("#hard tbody tr")
        assert rows.count() == 12
        assert [row.split("\t")[-1] for row in rows.all_inner_texts()] == ["not falling"] * 2 + [""] * 10
        assert page.locator("#hard .curve").count() == 12
        assert page.locator("#hard .curve polyline").first.get_attribute("points").count(",") == 8
        page.locator("#hard .link").first.click()
        page.get_by_text("1 of 200 incidents").wait_for()
    with opened(browser, pages["small"]) as page:
        assert page.locator("#hard").count() == 0


def test_samples_with_one_incident_each_are_not_ranked(browser, pages):
    with opened(browser, pages["ranks"]) as page:
        assert page.locator("#worst .lead").inner_text() == "no sample has more than one incident, of 200"
        assert page.locator("#worst li").count() == 0
