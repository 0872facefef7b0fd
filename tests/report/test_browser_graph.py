"""The graph in a real browser, with models that are not simple."""

import pytest

from gradgate.report import render_page
from tests.report.browsing import chromium, opened, why_not
from tests.report.made import CUT, diagnosis, edge, module

pytestmark = [
    pytest.mark.browser,
    pytest.mark.slow,
    pytest.mark.skipif(bool(why_not()), reason=f"the pages are not looked at: {why_not()}"),
]


@pytest.fixture(scope="module")
def browser():
    with chromium() as browser:
        yield browser


@pytest.fixture
def show(browser, tmp_path):
    """Open a page with a graph of these modules and edges."""

    def show(modules, edges, nonfinite_path=(), **more):
        graph = {"modules": modules, "edges": edges, "nonfinite_path": list(nonfinite_path)}
        path = tmp_path / "page.html"
        path.write_text(render_page(diagnosis=diagnosis(graph=graph, **more)))
        return opened(browser, path.as_uri())

    return show


def test_lines_that_skip_modules_are_left_out_where_they_are_many(show):
    """Sums of everything before, as in a transformer: a chain is drawn, and the rest on request."""
    modules = [module("", "Net"), *(module(f"blocks.{number}", "Block", 4, 1.0) for number in range(8))]
    edges = [edge(start, end, 1.0) for start in range(1, 9) for end in range(start + 1, 9)]
    edges += [edge(-1, 1, None), edge(-1, 8, None), edge(8, -2, 1.0), edge(3, -2, None, CUT)]
    with show(modules, edges) as page:
        lines = page.locator("path.line")
        assert lines.count() == 7 + 1 + 1 + 1  # The chain, the input, the loss, and the cut, which is no mere skip.
        assert page.locator("path.line.cut").count() == 1
        assert page.locator("[data-box='1']").get_attribute("aria-label").startswith("blocks.0, Block")
        page.get_by_role("button", name="Also the 22 lines that skip modules").click()
        assert lines.count() == len(edges)
        page.get_by_role("button", name="Without the lines that skip modules").click()
        assert lines.count() == 10


def test_few_lines_are_all_drawn(show):
    modules = [module("", "Net"), *(module(name, "Linear", 4, 1.0) for name in "abc")]
    with show(modules, [edge(1, 2, 1.0), edge(2, 3, 1.0), edge(1, 3, 1.0), edge(3, -2, 1.0)]) as page:
        assert page.locator("path.line").count() == 4
        assert page.get_by_role("button", name="skip").count() == 0


@pytest.mark.parametrize(
    ("edges", "path"),
    [
        ([edge(1, 2, 1.0), edge(2, 1, 1.0), edge(1, 1, 1.0), edge(2, -2, 1.0)], []),  # a module that is called twice
        ([], []),
        ([edge(-1, -2, "inf", None, True)], [-1, -2]),
        ([edge(-1, 1, 0), edge(1, -2, 1e300), edge(2, -2, 5e-324)], [0, 1]),
        ([edge(0, 1, 1.0), edge(1, 0, 1.0)], [0]),  # the model itself takes part
    ],
    ids=["loop", "nothing", "no module", "extremes", "root"],
)
def test_odd_graphs_are_drawn(show, edges, path):
    modules = [module("", "Net", 3, 1.0), module("a", "Linear", 4, "inf", "nonfinite"), module("b.c.d", "Linear")]
    with show(modules, edges, path) as page:
        assert page.locator("[data-box]").count() >= 2
        page.locator("[data-box='1']").hover()
        assert "a Linear" in page.locator("#graph .about").inner_text()


@pytest.mark.parametrize("graph", [{"modules": [1]}, {"modules": [module("", "Net")], "edges": [edge(7, 9, 1.0)]}])
def test_a_part_that_cannot_be_drawn_does_not_cost_the_others(browser, tmp_path, graph):
    path = tmp_path / "page.html"
    path.write_text(render_page(diagnosis=diagnosis(graph=graph)))
    with opened(browser, path.as_uri()) as page:
        assert page.get_by_text("This part cannot be shown").is_visible()
        assert page.locator(".finding").count() == 1
        assert page.locator(".strip").count() > 1


def test_a_model_that_is_one_module(show):
    with show([module("", "Linear", 3, 1.0)], [edge(-1, 0, None), edge(0, -2, 1.0)], layers=[]) as page:
        assert page.locator("[data-box='0']").get_attribute("aria-label").startswith("model, Linear")
        assert page.get_by_text("No parameters", exact=True).is_visible()
        assert page.get_by_label("Show more detail").count() == 0
