"""Where something happened, in the user's words: the line of the user's code and the path of the module."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from types import FrameType, TracebackType
from typing import Any

import torch

from gradgate._places import Line, nearest_line, written

__all__ = ["definition_line", "module_path", "raising_spot", "running_line"]


def raising_spot(traceback: TracebackType | None) -> Line | None:
    """Give the innermost line of any code, to tell whether two exceptions are of the same origin."""
    spot = None
    while traceback is not None:
        spot = traceback.tb_frame.f_code.co_filename, traceback.tb_lineno
        traceback = traceback.tb_next
    return spot


def running_line() -> Line | None:
    """Give the innermost line of the user's code that is running now, to be written by `written`."""
    return nearest_line(_lines_from(sys._getframe(1)))


def _lines_from(frame: FrameType | None) -> Iterator[Line]:
    while frame is not None:
        yield frame.f_code.co_filename, frame.f_lineno
        frame = frame.f_back


def definition_line(function: Callable[..., Any]) -> str | None:
    """Give the line where a function is defined."""
    code = getattr(function, "__code__", None) or getattr(getattr(function, "__call__", None), "__code__", None)  # noqa: B004
    line = None if code is None else nearest_line([(code.co_filename, code.co_firstlineno)])
    return None if line is None else written(line)


def module_path(sought: torch.nn.Module, roots: Sequence[torch.nn.Module]) -> str:
    """Name a module as the user does.

    Args:
        sought: The module.
        roots: The guarded modules.

    Returns:
        Its path; the name of its class for a root, or where no root has it.
    """
    for number, root in enumerate(roots):
        for path, module in root.named_modules():
            if module is sought:
                path = path.replace("_orig_mod.", "").removesuffix("_orig_mod")
                return f"{number}.{path}" if path and len(roots) > 1 else path or type(module).__name__
    return type(sought).__name__
