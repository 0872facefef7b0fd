"""Where something happened, in the user's words: the line of the user's code and the path of the module."""

from __future__ import annotations

import inspect
import os
import sys
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import torch

__all__ = [
    "Line",
    "best_line",
    "definition_line",
    "module_paths",
    "raising_line",
    "raising_spot",
    "running_line",
    "written",
]

Line = tuple[str, int]

# Frames in the first folders are never the user's; those in the second only where there is nothing better.
NEVER = tuple(f"{Path(path).parent}{os.sep}" for path in (inspect.getfile(torch), Path(__file__).parent))
# The demonstration ships with the package, but what it shows is a user's training.
DEMO = f"{Path(__file__).parents[1] / 'cli' / 'demo'}{os.sep}"
SELDOM = tuple(f"{path}{os.sep}" for path in dict.fromkeys(map(sysconfig.get_path, ("stdlib", "purelib", "platlib"))))
OWN, LIBRARY, MACHINERY = range(3)


def raising_line(traceback: TracebackType | None) -> str | None:
    """Give the innermost line of the user's code that an exception came through.

    Args:
        traceback: The exception's traceback.

    Returns:
        The line as "path.py:12".
    """
    lines = []
    while traceback is not None:
        lines.append((traceback.tb_frame.f_code.co_filename, traceback.tb_lineno))
        traceback = traceback.tb_next
    return best_line(reversed(lines))


def raising_spot(traceback: TracebackType | None) -> tuple[str, int] | None:
    """Give the innermost line of any code, to tell whether two exceptions are of the same origin."""
    spot = None
    while traceback is not None:
        spot = traceback.tb_frame.f_code.co_filename, traceback.tb_lineno
        traceback = traceback.tb_next
    return spot


def running_line() -> Line | None:
    """Give the innermost line of the user's code that is running now, to be written by `written`."""
    return _nearest(_lines_from(sys._getframe(1)))


def _lines_from(frame: FrameType | None) -> Iterator[Line]:
    while frame is not None:
        yield frame.f_code.co_filename, frame.f_lineno
        frame = frame.f_back


def definition_line(function: Callable[..., Any]) -> str | None:
    """Give the line where a function is defined."""
    code = getattr(function, "__code__", None) or getattr(getattr(function, "__call__", None), "__code__", None)  # noqa: B004
    return None if code is None else best_line([(code.co_filename, code.co_firstlineno)])


def module_paths(roots: Sequence[torch.nn.Module]) -> dict[int, str]:
    """Name modules as the user does.

    Args:
        roots: The guarded modules.

    Returns:
        The path of each module by its identity; a root has the name of its class.
    """
    paths: dict[int, str] = {}
    for number, root in enumerate(roots):
        prefix = f"{number}." if len(roots) > 1 else ""
        for path, module in root.named_modules():
            path = path.replace("_orig_mod.", "").removesuffix("_orig_mod")
            paths.setdefault(id(module), f"{prefix}{path}" if path else type(module).__name__)
    return paths


def best_line(lines: Iterable[Line]) -> str | None:
    """Choose among lines, innermost first, and write the chosen one."""
    chosen = _nearest(lines)
    return None if chosen is None else written(chosen)


def _nearest(lines: Iterable[Line]) -> Line | None:
    """Choose among lines, innermost first: the first of the user's own code, else the first of a library's."""
    of_library = None
    for line in lines:
        nearness = _nearness(line[0])
        if nearness == OWN:
            return line
        if nearness == LIBRARY and of_library is None:
            of_library = line
    return of_library


@lru_cache(maxsize=4096)
def _nearness(filename: str) -> int:
    """Tell whose code a file holds; asked for every frame, so it is remembered."""
    if not filename.startswith(DEMO) and filename.startswith((*NEVER, "<frozen")):
        return MACHINERY
    return LIBRARY if filename.startswith(SELDOM) else OWN


def written(line: Line) -> str:
    """Write a place as "path.py:12", relative to the working directory where it lies inside it."""
    here = f"{os.getcwd()}{os.sep}"
    return f"{line[0].removeprefix(here)}:{line[1]}"
