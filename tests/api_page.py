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
# In the order in which a reader meets them; packages that are not listed come after these.
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

Every public name, with one line. A name links to its full entry: arguments, errors, gradient and an example. `gg` is
`import gradgate as gg`; import the other names from their module, as in `from gradgate import masked`.

The same words mean the same thing everywhere: `keep=` is a boolean mask, and True takes part; `exclude=` is a value, or
several, that do not; `frozen=` marks what must not move; `dim`, `keepdim` and `dtype` are torch's; `empty=` is the
result of a slice with nothing kept.
"""


def places():
    """Give the page of every documented name."""
    pages = sorted((ROOT / "docs" / "packages").glob("*.md"))
    return {name: page.name for page in pages for name in ENTRY.findall(page.read_text(encoding="utf-8"))}


def sentence(room, name):
    """Give the first line of what a name says of itself: its docstring, or the text beneath its assignment."""
    thing = getattr(room, name)
    if str(getattr(thing, "__module__", "")).startswith("torch"):
        return f"`torch.{name}`, torch's own."
    if inspect.isclass(thing) or inspect.isfunction(thing):
        found = inspect.getdoc(thing)
    else:
        body = ast.parse(inspect.getsource(room)).body
        found = next(
            after.value.value
            for before, after in pairwise(body)
            if isinstance(before, ast.Assign) and before.targets[0].id == name
        )
    return found.strip().splitlines()[0].replace("|", "\\|")


def page():
    """Give the text of the page."""
    entries = places()
    parts = [HEAD]
    for room_name in sorted(gradgate._PACKAGES, key=lambda room: (*ORDER, room).index(room)):
        room = getattr(gradgate, room_name)
        parts.append(f"\n## {room_name}\n\n{room.__doc__.strip().splitlines()[0]}\n\n| name | |\n|---|---|\n")
        at_root = [name for name in room.__all__ if gradgate._PACKAGE_OF.get(name) == room_name]
        for name in [*at_root, *(name for name in room.__all__ if name not in at_root)]:
            shown = f"gg.{name}" if name in at_root else f"{room_name}.{name}"
            full = f"gradgate.{room_name}.{name}"
            # torch's own names have no entry.
            target = f"packages/{entries[full]}#{full}" if full in entries else "packages/modes.md"
            parts.append(f"| [`{shown}`]({target}) | {sentence(room, name)} |\n")
    return "".join(parts)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
