"""Write docs/api.md, every public name on one page: `python -m tests.api_page`."""

import ast
import inspect
import re
from itertools import pairwise
from pathlib import Path

import gradgate

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "api.md"
ENTRY = re.compile(r"^::: (gradgate\.[\w.]+)", re.MULTILINE)
# In reading order; packages that are not listed come after these.
ORDER = (
    "modes",
    "gates",
    "masked",
    "edits",
    "freezing",
    "losses",
    "guard",
    "rewind",
    "loading",
    "ledger",
    "replaying",
    "doctor",
)

HEAD = """\
---
hide: [navigation]
---

# The public API

Every public name links to its full entry: arguments, errors, gradient and an example. `gg` is `import gradgate as gg`;
import the other names from their module, as in `from gradgate import masked`.

The same words mean the same thing everywhere: `keep=` is a boolean mask, and True takes part; `exclude=` is a value, or
several, that do not; `frozen=` marks what must not move; `dim`, `keepdim` and `dtype` are torch's; `empty=` is the
result of a slice with nothing kept.
"""


def entries():
    """Return the page of every documented name."""
    pages = sorted((ROOT / "docs" / "packages").glob("*.md"))
    return {name: page.name for page in pages for name in ENTRY.findall(page.read_text(encoding="utf-8"))}


def sentence(package, name):
    """Return the first line of the documentation of a name: its docstring, or the text below its assignment."""
    thing = getattr(package, name)
    if inspect.isclass(thing) or inspect.isfunction(thing):
        found = inspect.getdoc(thing)
    else:
        body = ast.parse(inspect.getsource(package)).body
        found = next(
            after.value.value
            for before, after in pairwise(body)
            if isinstance(before, ast.Assign) and before.targets[0].id == name
        )
    return found.strip().splitlines()[0].replace("|", "\\|")


def page():
    """Return the text of the page: names of the root with a line each, the others as a list."""
    pages = entries()
    parts = [HEAD]
    for package_name in sorted(gradgate._PACKAGES, key=lambda package: (*ORDER, package).index(package)):
        package = getattr(gradgate, package_name)

        def link(shown, name, package_name=package_name):
            full = f"gradgate.{package_name}.{name}"
            return f"[`{shown}`](packages/{pages[full]}#{full})"

        parts.append(f"\n## {package_name}\n\n{package.__doc__.strip().splitlines()[0]}\n")
        at_root = [name for name in package.__all__ if gradgate._PACKAGE_OF.get(name) == package_name]
        if at_root:
            rows = [f"| {link(f'gg.{name}', name)} | {sentence(package, name)} |\n" for name in at_root]
            parts += ["\n| name | |\n|---|---|\n", *rows]
        if others := [link(f"{package_name}.{name}", name) for name in package.__all__ if name not in at_root]:
            parts.append("\n" + ",\n".join(others) + "\n")
    return "".join(parts)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
