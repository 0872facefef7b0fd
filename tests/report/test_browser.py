"""The page in a real browser: it opens, it answers, it keeps to itself, and hostile texts stay texts."""

import json

import pytest

from gradgate.ledger import Ledger
from gradgate.report import LiveView, render_page
from tests.ledger.made import incident
from tests.report import looks
from tests.report.browsing import chromium, opened, why_not
from tests.report.made import HOSTILE, MemoryBook, diagnosis, large_diagnosis, many

pytestmark = [
    pytest.mark.browser,
    pytest.mark.slow,
    pytest.mark.skipif(bool(why_not()), reason=f"the pages are not looked at: {why_not()}"),
]
COUNT = "#incidents [role=status]"


@pytest.fixture(scope="module")
def browser():
    with chromium() as browser:
        yield browser


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("pages")


def written(folder, name, page):
    path = folder / name
    path.write_text(page, encoding="utf-8")
    return path.as_uri()


@pytest.fixture(scope="module")
def address(folder):
    return written(folder, "page.html", looks.sample_page())


@pytest.fixture(scope="module")
def large(folder):
    return written(
        folder, "large.html", render_page(MemoryBook(many(100_000)), large_diagnosis(18), name="large.ledger")
    )


def test_it_opens_and_shows_every_part(browser, address):
    with opened(browser, address) as page:
        heads = page.locator("h2").all_inner_texts()
        assert heads == [
            "Summary",
            "Findings",
            "Gradient flow",
            "Gradient norm per layer",
            "Incidents over time",
            "Worst samples",
            "Incidents",
        ]
        assert page.locator(".tile").first.inner_text().split() == ["Incidents", "240"]
        assert page.locator(".uplot canvas").count() == 1
        assert page.locator(".worst li").count() == 10
        assert page.locator(COUNT).inner_text() == "240 incidents"
        assert page.title() == "night.ledger · gradgate"


def test_search_filter_and_sort(browser, address):
    with opened(browser, address) as page:
        page.locator("#search").fill("IMG_014")
        page.get_by_text("4 of 240 incidents").wait_for()
        page.locator("#search").fill("")
        page.get_by_label("All causes").select_option("non-finite gradient")
        page.get_by_text("80 of 240 incidents").wait_for()
        page.get_by_label("All stages").select_option("load")
        page.get_by_text("No incident fits").wait_for()
        page.get_by_role("button", name="Clear all").click()
        page.get_by_label("Transient or not").select_option("transient")
        page.get_by_text("12 of 240 incidents").wait_for()
        page.get_by_role("button", name="Clear all").click()
        page.get_by_role("button", name="Sample", exact=True).click()
        shown = page.locator(".viewport .cell.sample").all_inner_texts()
        assert shown == sorted(shown)
        assert shown[0] == "img_000.png"
        page.locator("[data-column=sample][aria-sort=ascending]").wait_for()
        page.get_by_role("button", name="Sample", exact=True).click()
        assert page.locator(".viewport .cell.sample").first.inner_text() == "img_060.png"


def test_a_sample_and_a_span_of_time_narrow_the_table(browser, address):
    with opened(browser, address) as page:
        page.locator(".worst-entry").first.click()
        page.get_by_text("4 of 240 incidents").wait_for()
        page.get_by_role("button", name="Remove the filter sample").click()
        chart = page.locator(".u-over")
        page.wait_for_timeout(800)  # The way down to the table is smooth.
        chart.scroll_into_view_if_needed()
        box = chart.bounding_box()
        page.mouse.move(box["x"] + 5, box["y"] + 50)
        page.mouse.down()
        page.mouse.move(box["x"] + box["width"] / 2, box["y"] + 60, steps=4)
        page.mouse.up()
        page.locator(".chip").first.wait_for()
        shown = int(page.locator(COUNT).inner_text().split()[0])
        assert 80 < shown < 160


def test_details_with_the_stored_sample_as_a_picture(browser, address):
    with opened(browser, address) as page:
        page.get_by_label("All stages").select_option("loss")
        page.locator(".viewport .row").first.click()
        panel = page.locator("aside.details")
        assert "ValueError: could not convert string to float: 'n/a'" in panel.inner_text()
        assert "2 NaN or Inf" in panel.inner_text()
        assert "gradgate ledger show night.ledger 000000ed" in panel.inner_text()
        pixel = "canvas => [...canvas.getContext('2d').getImageData(3, 3, 1, 1).data]"
        assert panel.locator("canvas").evaluate(pixel) == [226, 0, 122, 255]


def test_the_keyboard_is_enough(browser, address):
    with opened(browser, address) as page:
        page.locator("#search").focus()
        for _ in range(20):
            page.keyboard.press("Tab")
            if page.evaluate("() => document.activeElement.classList.contains('viewport')"):
                break
        page.keyboard.press("ArrowDown")
        page.keyboard.press("ArrowDown")
        page.keyboard.press("Enter")
        assert page.locator("aside.details h3").inner_text() == "Incident 000000ed"
        page.keyboard.press("ArrowDown")
        assert page.locator("aside.details h3").inner_text() == "Incident 000000ec"
        page.keyboard.press("End")
        assert page.locator("aside.details h3").inner_text() == "Incident 00000000"
        page.keyboard.press("Escape")
        assert page.locator("aside.details").is_hidden()
        page.locator("[data-box]").first.focus()
        page.keyboard.press("ArrowDown")
        assert "stem" in page.locator("#graph .about").inner_text()
        page.locator(".heat[tabindex='0']").focus()
        page.keyboard.press("ArrowRight")
        assert "encoder.0.weight" in page.locator("#layers .reading").inner_text()
        outline = page.locator("#layers .heat:focus").evaluate("one => getComputedStyle(one).outlineStyle")
        assert outline == "solid"


def test_the_graph_shows_flow_cuts_frozen_parts_and_the_way_of_a_nan(browser, address):
    with opened(browser, address) as page:
        widths = page.locator("path.line").evaluate_all(
            "all => all.map((one) => Number(one.getAttribute('stroke-width')))"
        )
        assert max(widths) / min(widths) > 4
        assert page.locator("path.line.cut").count() == 1
        assert page.locator(".cut-sign").text_content() == "train.py:31"
        assert page.locator("path.line.bad").count() == 2
        assert page.locator(".box.frozen").get_attribute("aria-label").startswith("stem, Conv2d")
        assert "hatch" in page.locator(".box.frozen .body").evaluate("one => getComputedStyle(one).fill")
        assert page.locator(".box.nonfinite .born").count() == 1
        assert page.locator(".box.no_gradient").count() == 1
        page.locator(".box.no_gradient").hover()
        assert "cut at train.py:31: h = encoder(x).detach()" in page.locator("#graph .about").inner_text()
        page.locator(".frame-title").click()
        assert page.locator(".box.closed").get_attribute("aria-label").startswith("encoder, Sequential")
        page.locator(".box.closed").focus()
        page.keyboard.press("Enter")
        assert page.locator(".box.closed").count() == 0
        page.keyboard.press("-")
        assert page.locator(".box.closed").count() == 1


def test_a_fix_can_be_copied(browser, address):
    with opened(browser, address, permissions=["clipboard-read", "clipboard-write"]) as page:
        page.get_by_label("Copy the fix of GG101").click()
        page.get_by_role("button", name="Copy the fix of GG101").filter(has_text="Copied").wait_for()
        page.locator("#search").focus()
        page.keyboard.press("Control+V")
        assert page.locator("#search").input_value() == "h = encoder(x)"


def test_light_and_dark(browser, address):
    ground = "() => getComputedStyle(document.documentElement).backgroundColor"
    with opened(browser, address, scheme="dark") as page:
        dark = page.evaluate(ground)
        page.emulate_media(color_scheme="light")
        page.locator("html[data-theme=light]").wait_for(state="attached")
        light = page.evaluate(ground)
        page.locator("#theme").click()
        assert page.evaluate(ground) == dark != light
        page.reload()
        page.locator("html[data-ready=yes]").wait_for(state="attached")
        assert page.evaluate(ground) == dark
        page.evaluate("() => dispatchEvent(new Event('beforeprint'))")
        page.emulate_media(media="print")
        assert page.evaluate(ground) == "rgb(255, 255, 255)"
        assert page.locator(".viewport .row").count() == 100
        assert page.locator("nav").is_hidden()
        assert page.locator(".finding").first.is_visible()


@pytest.mark.parametrize("width", [320, 390, 768, 1920])
def test_nothing_runs_over_the_edge(browser, address, width):
    with opened(browser, address, size=(width, 800)) as page:
        page.locator(".viewport .row").first.click()
        assert page.evaluate("() => document.documentElement.scrollWidth") <= width


ATTEMPTS = """async () => {
  const refused = [];
  document.addEventListener("securitypolicyviolation", (event) => refused.push(event.effectiveDirective));
  await fetch("https://example.org").catch(() => 0);
  new Image().src = "https://example.org/x.png";
  const script = document.createElement("script");
  script.textContent = "window.ran = 1";
  document.head.append(script);
  document.body.setAttribute("onclick", "window.ran = 1");
  document.body.click();
  await new Promise((resume) => setTimeout(resume, 200));
  return [refused, window.ran ?? null];
}"""


def test_the_policy_refuses_what_the_page_never_does(browser, address):
    page = browser.new_page()  # Not `opened`, to which each of these would be a failure.
    page.goto(address)
    refused, ran = page.evaluate(ATTEMPTS)
    page.close()
    assert set(refused) >= {"connect-src", "img-src", "script-src-elem", "script-src-attr"}
    assert ran is None


def test_hostile_texts_are_texts(browser, folder, tmp_path):
    with Ledger(tmp_path / "run.ledger") as ledger:
        ledger.record_many(
            [
                incident(
                    text,
                    message=text,
                    cause=text,
                    where=text,
                    module=text,
                    exception_type=text,
                    run=text,
                    details={text: text},
                )
                for text in HOSTILE
            ]
        )
        finding = {
            **diagnosis()["findings"][0],
            **dict.fromkeys(("title", "where", "source", "module", "reason", "fix"), HOSTILE[1]),
        }
        told = diagnosis(findings=[finding], exception={"type": HOSTILE[0], "message": HOSTILE[2]})
        told["graph"]["modules"][1] |= {"name": HOSTILE[0], "kind": HOSTILE[2]}
        told["graph"]["edges"][3]["cut"] = {"code": "GG101", "where": HOSTILE[0], "source": HOSTILE[2]}
        told["layers"][0]["name"] = HOSTILE[3]
        page_text = render_page(ledger, told, name=HOSTILE[1])
    with opened(browser, written(folder, "hostile.html", page_text)) as page:
        for place in range(len(HOSTILE)):
            page.locator(f".viewport [data-at='{place}']").click()
            assert page.locator("aside.details .facts").is_visible()
        page.locator("#search").fill("<img src=x")
        page.get_by_text(f"1 of {len(HOSTILE)} incidents").wait_for()
        assert "owned" not in page.title().removeprefix(HOSTILE[1])
        assert page.locator("script").count() == 2
        assert (
            page.locator(
                "main img, main iframe, main object, main embed, main link, main form, main a[href^=http]"
            ).count()
            == 0
        )
        names = "all => all.flatMap((one) => [...one.attributes]).map((one) => one.name)"
        assert not [name for name in page.locator("*").evaluate_all(names) if name.startswith("on")]
        assert HOSTILE[1] in page.locator(".finding h3").inner_text()


def test_an_empty_ledger_and_a_healthy_step(browser, folder):
    healthy = {"version": 1, "healthy": True, "exception": None, "findings": [], "graph": None, "layers": []}
    with opened(browser, written(folder, "empty.html", render_page(MemoryBook([]), healthy))) as page:
        assert page.get_by_text("Nothing was dropped").is_visible()
        assert page.get_by_text("Healthy", exact=True).is_visible()
        assert page.locator("#timeline").is_hidden()


def test_a_hundred_thousand_incidents_and_five_hundred_modules(browser, folder, large):
    with opened(browser, large) as page:
        assert page.locator("#graph .lead").inner_text().startswith("509 modules")
        assert 4 <= page.locator("[data-box]").count() <= 20
        page.get_by_label("Show more detail").click()
        assert page.locator("[data-box]").count() == 74
        page.get_by_label("Show more detail").click()
        assert "open the parts of interest one by one" in page.locator("#graph .about").inner_text()
        page.locator(".box.closed").first.click()
        assert page.locator("[data-box]").count() == 79
        page.locator("#search").fill("img_077777.png")
        page.get_by_text("1 of 100,000 incidents").wait_for()
        assert page.locator(".viewport .row").count() == 1
        page.locator("#search").fill("")
        page.get_by_text("100,000 incidents", exact=True).wait_for()
        page.locator(".viewport").focus()
        page.keyboard.press("End")
        assert page.locator(".viewport .row").count() < 60
        assert page.locator(".viewport [data-at='99999']").is_visible()


def test_the_live_page_follows_and_keeps_what_is_typed(browser, tmp_path):
    with Ledger(tmp_path / "run.ledger") as ledger:
        ledger.record(incident("first"))
        with LiveView(Ledger(ledger.path, read_only=True)) as view, opened(browser, view.url) as page:
            page.locator(COUNT).get_by_text("1 incident").wait_for()
            page.locator("#search").fill("second")
            page.get_by_text("0 of 1 incident").wait_for()
            ledger.record(incident("second"))
            page.get_by_text("1 of 2 incidents").wait_for(timeout=30_000)
            assert page.locator("#search").input_value() == "second"
            assert page.evaluate("() => document.activeElement.id") == "search"
            assert "live" in page.locator(".live").inner_text()


@pytest.mark.parametrize("scene", looks.SCENES)
def test_it_looks_as_it_should(browser, address, scene):
    """Loosely: fonts and scrollbars may differ."""
    golden = {name: list(bytes.fromhex(text)) for name, text in json.loads(looks.FILE.read_text()).items()}
    seen = looks.look(browser, address, scene)
    assert looks.distance(seen, golden[scene]) < 8
    for other in looks.SCENES.keys() - {scene}:
        assert looks.distance(seen, golden[other]) > 8
