"""What holds for the whole house: names, floors, sizes, and what an import may cost."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import gradgate
from tests import truth

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "gradgate"
SOURCES = sorted(PACKAGE.rglob("*.py"))
DOCUMENTED = re.compile(r"^::: (gradgate\.[\w.]+)", re.MULTILINE)


def fresh(code):
    """Run code in a new interpreter and give what it printed."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def public_names():
    """Every name of ours that users may rely on, with its room: those of the root and those of the public rooms."""
    pairs = set(gradgate._PACKAGE_OF.items())
    pairs |= {(name, room) for room in gradgate._PACKAGES for name in getattr(gradgate, room).__all__}
    return {
        f"gradgate.{room}.{name}"
        for name, room in pairs
        if not (getattr(getattr(getattr(gradgate, room), name), "__module__", None) or "").startswith("torch")
    }


# --- names ---------------------------------------------------------------------------------------------------------


def test_the_lazy_table_says_what_the_type_checker_sees():
    tree = ast.parse((PACKAGE / "__init__.py").read_text(encoding="utf-8"))
    typed = {
        alias.name: node.module.removeprefix("gradgate.")
        for block in tree.body
        if isinstance(block, ast.If)
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if node.module.startswith("gradgate.")
    }
    assert typed == gradgate._PACKAGE_OF


def test_every_public_name_can_be_had():
    for name in gradgate.__all__:
        assert getattr(gradgate, name) is not None
    assert set(gradgate.__all__) <= set(dir(gradgate))


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'gradgate' has no attribute 'grad_moed'"):
        gradgate.grad_moed  # noqa: B018


def test_every_public_name_is_documented_and_nothing_else_is():
    pages = (ROOT / "docs" / "packages").glob("*.md")
    documented = [name for page in pages for name in DOCUMENTED.findall(page.read_text(encoding="utf-8"))]
    assert len(documented) == len(set(documented)), "a name is documented twice"
    assert set(documented) == public_names()


def test_no_public_name_is_the_name_of_a_package():
    assert not set(gradgate._PACKAGE_OF) & {path.stem for path in PACKAGE.iterdir()}


def test_every_differentiable_name_is_in_the_truth_table():
    """A function with a Gradient section in its docstring promises something, so it has a row."""
    told = {row.name.rpartition(".")[2] for row in truth.rows()}
    promised = set()
    for full in public_names():
        room, _, name = full.removeprefix("gradgate.").rpartition(".")
        thing = getattr(getattr(gradgate, room), name)
        if not isinstance(thing, type) and "Gradient:" in (getattr(thing, "__doc__", None) or ""):
            promised.add(name)
    assert promised <= told, f"no row in tests/truth for {sorted(promised - told)}"


# --- shape ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("folder", ["src", "tests", "benchmarks", "examples"])
def test_no_file_is_over_900_lines(folder):
    long = {
        str(p.relative_to(ROOT)): n
        for p in (ROOT / folder).rglob("*.py")
        if (n := len(p.read_text(encoding="utf-8").splitlines())) > 900
    }
    assert not long


def test_no_file_has_a_name_that_says_nothing():
    empty_names = {"utils", "common", "helpers", "base", "core", "misc"}
    assert not [path for path in SOURCES if path.stem in empty_names]


# --- imports -------------------------------------------------------------------------------------------------------


def modules_loaded_by(module):
    """How many an import brings along: the cost of an import, without the machine."""
    return int(fresh(f"import sys; before = set(sys.modules); import {module}; print(len(set(sys.modules) - before))"))


PAPER = ["gradgate", "gradgate.records", "gradgate.errors", "gradgate.ledger", "gradgate.report"]


@pytest.mark.parametrize("module", PAPER)
def test_the_root_and_the_packages_without_torch_do_not_load_it(module):
    assert fresh(f"import sys, {module}; print('torch' in sys.modules)") == "False"


@pytest.mark.slow
def test_that_test_can_fail():
    assert fresh("import sys, gradgate._checks; print('torch' in sys.modules)") == "True"


def test_the_import_loads_next_to_nothing():
    assert modules_loaded_by("gradgate") < 20


@pytest.mark.slow
def test_that_count_can_fail():
    assert modules_loaded_by("gradgate._checks") > 100
