"""Text that is safe to print and JSON that is safe to write, whatever a stranger's file or a user's class holds.

Everything that gradgate prints about values that it did not make goes through `visible` or `json_text`: a control
sequence, a bidirectional mark or half a surrogate pair in a sample's name or in an exception's text is shown, and
never reaches the terminal. Nothing here needs more than the standard library.
"""

from __future__ import annotations

import json
import logging
import math
import sys
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

_LARGEST = 2**63 - 1
_LONGEST = 2_000


def visible(value: object, *, lines: bool = False) -> str:
    """Return a value as text in which every character shows, as an escape if need be; `lines` keeps line ends."""
    text = text_of(value)
    if text.isprintable():
        return text
    kept = "\n\t" if lines else ""
    return "".join(c if c.isprintable() or c in kept else c.encode("unicode_escape").decode() for c in text)


def text_of(value: object, write: Callable[[object], str] = str) -> str:
    """Write a value that somebody else made, whatever its class does when it is asked for a text."""
    try:
        return write(value)
    except Exception:  # noqa: BLE001 - a user's own __str__ may raise anything
        return f"a {class_name(type(value))} without a readable text"


def class_name(kind: type) -> str:
    """Write a class with its module, as far as that says something."""
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def as_text(value: object, limit: int | None = None) -> str:
    """Return a value as text that can be encoded, cut to a length."""
    text = value if isinstance(value, str) else text_of(value, _scalar)
    if limit is not None and len(text) > limit:
        text = f"{text[:limit]}... ({len(text) - limit:,} more characters)"
    return text.encode("utf-8", "backslashreplace").decode()


def _scalar(value: Any) -> str:
    return str(value.item() if getattr(value, "shape", None) == () and hasattr(value, "item") else value)


def plain(value: Any, depth: int = 100) -> Any:
    """Return a tree of values as JSON can hold it: numbers that JSON does not have, and everything unknown, as text."""
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int):
        return value if -_LARGEST <= value <= _LARGEST else hex(value)
    if isinstance(value, float):
        return value if math.isfinite(value) else str(float(value))
    if isinstance(value, bytes):
        return f"<{len(value):,} bytes>"
    if depth and isinstance(value, Mapping):
        return {as_text(key): plain(item, depth - 1) for key, item in value.items()}
    if depth and isinstance(value, list | tuple | set | frozenset):
        return [plain(item, depth - 1) for item in value]
    return as_text(value, _LONGEST)


def json_text(value: Any, *, indent: int | None = None, depth: int = 100) -> str:
    """Write a value as JSON in which everything that is not printable is escaped."""
    text = json.dumps(plain(value, depth), ensure_ascii=False, allow_nan=False, indent=indent)
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c == "\n" else _escape(c) for c in text)


def _escape(character: str) -> str:
    units = character.encode("utf-16-be", "surrogatepass").hex()
    return "".join(f"\\u{units[at : at + 4]}" for at in range(0, len(units), 4))


def log_line(text: str) -> None:
    """Log a warning of one line; bars of tqdm are cleared for it and drawn again (rich does so by itself)."""
    bars = getattr(sys.modules.get("tqdm"), "tqdm", None)
    with nullcontext() if bars is None else bars.external_write_mode():
        logging.getLogger("gradgate").warning("%s", visible(text))


def user_level() -> int:
    """Return the `stacklevel` with which `warnings.warn` in the calling function names the line of the user."""
    level, frame = 1, sys._getframe(1)
    inner = {"gradgate", "torch", "contextlib"}
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in inner:
        level, frame = level + 1, frame.f_back
    return level
