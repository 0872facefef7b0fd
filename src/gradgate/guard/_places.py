"""Where something happened, in the user's words: the line of the user's code and the path of the module."""

from __future__ import annotations

import inspect
import os
import sys
import sysconfig
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import torch

__all__ = ["Line", "best_line", "definition_line", "module_paths", "raising_line", "raising_spot", "running_lines"]

Line = tuple[str, int]

# Frames in the first folders are never the user's; those in the second only where there is nothing better.
NEVER = tuple(f"{Path(path).parent}{os.sep}" for path in (inspect.getfile(torch), Path(__file__).parent))
# The demonstration ships with the package, but what it shows is a user's training.
DEMO = f"{Path(__file__).parents[1] / 'cli' / 'demo'}{os.sep}"
SELDOM = tuple(f"{path}{os.sep}" for path in dict.fromkeys(map(sysconfig.get_path, ("stdlib", "purelib", "platlib"))))


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


def running_lines() -> list[Line]:
    """Give the lines that are running now, innermost first; cheap, to be read by `best_line` if it comes to that."""
    lines = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        lines.append((frame.f_code.co_filename, frame.f_lineno))
        frame = frame.f_back
    return lines


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
    """Choose among lines, innermost first: the first of the user's own code, else the first of a library's."""
    possible = [line for line in lines if line[0].startswith(DEMO) or not line[0].startswith((*NEVER, "<frozen"))]
    own = [line for line in possible if not line[0].startswith(SELDOM)]
    chosen = next(iter(own or possible), None)
    return None if chosen is None else _written(*chosen)


def _written(filename: str, line: int) -> str:
    """Write a place relative to the working directory where it lies inside it."""
    here = f"{os.getcwd()}{os.sep}"
    return f"{filename.removeprefix(here)}:{line}"
