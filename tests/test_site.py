"""The documentation as a whole: its navigation, its links, its numbers and its length."""

import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import click
import pytest

from benchmarks import cited
from gradgate.cli import main
from tests import api_page

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = {str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md")}
SECTIONS = [
    "Start",
    "Questions",
    "Packages",
    "Frameworks",
    "Troubles",
    "How it works",
    "API",
    "Limits",
    "Compared",
    "Benchmarks",
]
LINK = re.compile(r"\]\(([^)#]+\.(?:md|svg|png))(?:#[^)]*)?\)")


def navigation():
    """Return the lines of the navigation, which are plain enough to read without a parser."""
    return (ROOT / "mkdocs.yml").read_text(encoding="utf-8").split("\nnav:\n")[1].split("\n\n")[0]


def without_front_matter(text):
    return re.sub(r"\A---\n.*?\n---\n\n", "", text, flags=re.DOTALL)


def test_the_sections_are_in_reading_order():
    assert re.findall(r"^  - ([^:]+):", navigation(), re.MULTILINE) == SECTIONS


def test_every_page_is_in_the_navigation_once():
    assert sorted(re.findall(r"[\w/-]+\.md$", navigation(), re.MULTILINE)) == sorted(PAGES)


def test_every_trouble_is_in_the_list_of_troubles_under_its_own_title():
    listed = (DOCS / "troubles" / "index.md").read_text(encoding="utf-8")
    for page in (DOCS / "troubles").glob("*.md"):
        if page.name != "index.md":
            (shown,) = re.findall(rf"^- \[(.+)\]\({re.escape(page.name)}\)$", listed, re.MULTILINE)
            title = page.read_text(encoding="utf-8").splitlines()[0].removeprefix("# ")
            assert shown.split(";")[0] in title, page.name


def test_a_trouble_is_shown_explained_and_solved():
    """A page runs its symptom, explains it, and runs a solution."""
    for page in (DOCS / "troubles").glob("*.md"):
        text = page.read_text(encoding="utf-8")
        if page.name not in ("index.md", "loss-divided-by-the-wrong-number.md"):  # that one has three troubles
            assert "## Why" in text, page.name
            assert text.index("```python") < text.index("## Why") < text.rindex("```python"), page.name


def test_every_limit_names_a_test_that_exists():
    limits = (ROOT / "LIMITATIONS.md").read_text(encoding="utf-8")
    tests = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("*.py"))
    assert not [name for name in re.findall(r"`(test_\w+)`", limits) if f"def {name}(" not in tests]


@pytest.mark.parametrize(
    ("page", "source"), [("limits.md", "LIMITATIONS.md"), ("start/examples.md", "examples/README.md")]
)
def test_a_page_that_includes_another_file_contains_nothing_else(page, source):
    assert without_front_matter((DOCS / page).read_text(encoding="utf-8")) == f'--8<-- "{source}"\n'
    assert (ROOT / source).is_file()


def test_the_list_of_public_names_is_the_one_of_the_code():
    assert api_page.PAGE.read_text(encoding="utf-8") == api_page.page(), "run: python -m tests.api_page"


@pytest.mark.parametrize("page", sorted(PAGES))
def test_links_between_pages_have_a_target(page):
    for target in LINK.findall((DOCS / page).read_text(encoding="utf-8")):
        if "://" not in target:
            assert (DOCS / page).parent.joinpath(target).resolve().is_file(), target


class Page(HTMLParser):
    """The links of a built page, and its anchors."""

    def __init__(self, path):
        super().__init__()
        self.links, self.anchors = [], set()
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        self.anchors |= {attributes[name] for name in ("id", "name") if attributes.get(name)}
        self.links += [attributes[name] for name in ("href", "src") if attributes.get(name)]


@pytest.mark.slow
def test_the_built_site_has_no_dead_link_and_every_page_is_near(tmp_path):
    """Every link and anchor has a target, and every page is at most three clicks from the first."""
    pytest.importorskip("zensical")
    shutil.copy(ROOT / "mkdocs.yml", tmp_path)  # Not a link: the site is built beside the file.
    shutil.copytree(DOCS, tmp_path / "docs")
    for name in ("src", "examples", "LIMITATIONS.md"):
        (tmp_path / name).symlink_to(ROOT / name)
    build = [sys.executable, "-m", "zensical", "build", "--strict"]
    done = subprocess.run(build, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    site = tmp_path / "site"
    pages = {path: Page(path) for path in site.rglob("*.html") if path.name != "404.html"}
    assert len(pages) >= len(PAGES)
    leads, dead = {path: set() for path in pages}, []
    for path, page in pages.items():
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            target = target / "index.html" if target.is_dir() else target
            anchor = unquote(parts.fragment)
            if not target.is_file() or (anchor and target in pages and anchor not in pages[target].anchors):
                dead.append((str(path.relative_to(site)), link))
            leads[path].add(target)
    assert not dead
    near, edge = {site / "index.html"}, {site / "index.html"}
    for _ in range(3):
        edge = {target for path in edge for target in leads[path] if target in pages} - near
        near |= edge
    assert set(pages) <= near
    assert "recipes" in (site / "search.json").read_text(encoding="utf-8").lower()


def test_the_documentation_stays_short():
    """A page that grows replaces something: at most 28,000 words beside code and the generated list of names."""
    pages = "\n".join((DOCS / page).read_text(encoding="utf-8") for page in PAGES - {"api.md"})
    prose = re.sub(r"^```.*?^```$", "", pages, flags=re.DOTALL | re.MULTILINE)
    assert len(prose.split()) < 28_000


def commands(group, words):
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        yield from commands(command, [*words, name]) if isinstance(command, click.Group) else [" ".join([*words, name])]


def test_every_command_is_on_the_page_of_commands():
    page = (DOCS / "packages" / "command_line.md").read_text(encoding="utf-8")
    assert not [command for command in commands(main, ["gradgate"]) if not re.search(rf"`{command}[ `]", page)]


def test_the_measured_numbers_are_those_that_the_benchmark_printed():
    rows = cited.measured(cited.RESULTS.read_text(encoding="utf-8"))
    pages = [page for page in cited.PAGES if "<!-- bench:" in page.read_text(encoding="utf-8")]
    assert pages
    for page in pages:
        assert cited.with_numbers(page.read_text(encoding="utf-8"), rows) == page.read_text(encoding="utf-8"), (
            "run: python -m benchmarks.cited"
        )
        assert "\n<!-- bench:" not in page.read_text(encoding="utf-8"), (
            "a comment that begins a line ends the paragraph"
        )


def test_a_number_that_was_not_measured_is_found():
    rows = cited.measured(
        "| what | goal | measured | | the field |\n|---|---|---|---|---|\n| a | 1 | 2 (iqr 0) | met | b 3 (4 us) |\n"
    )
    assert rows == {"a": ("2", "b 3 (4 us)")}
    assert cited.with_numbers("<!-- bench: a -->7<!-- -->", rows) == "<!-- bench: a -->2<!-- -->"
    assert cited.with_numbers("<!-- bench: a -> b -->7<!-- -->", rows) == "<!-- bench: a -> b -->3<!-- -->"
    for unknown in ("<!-- bench: c -->7<!-- -->", "<!-- bench: a -> c -->7<!-- -->"):
        with pytest.raises(KeyError):
            cited.with_numbers(unknown, rows)


def test_pages_name_no_machine():
    for page in [ROOT / "README.md", *(DOCS / name for name in PAGES)]:
        assert not re.search(r"/(?:work|tmp|root|home)/\w", page.read_text(encoding="utf-8")), page
