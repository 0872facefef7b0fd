"""The user's line: whose code a file holds, and which line of several a message names."""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Iterable
from enum import Enum
from functools import lru_cache
from types import TracebackType

import torch

__all__ = ["Line", "Owner", "nearest_line", "owner_of", "raising_line", "shown_path", "written"]

Line = tuple[str, int]


class Owner(Enum):
    """Whose code a file holds."""

    USER = "the user"
    PACKAGE = "an installed package"
    PYTHON = "the standard library, or code that Python makes itself"
    TORCH = "torch"
    OURS = "gradgate"


def _folder(path: str) -> str:
    return f"{os.path.abspath(path)}{os.sep}"


_OURS = _folder(os.path.dirname(__file__))
# The demonstration ships with the package, but what it shows is a user's training.
_DEMO = _folder(os.path.join(_OURS, "cli", "demo"))
_TORCH = _folder(os.path.dirname(torch.__file__))
_PYTHON = _folder(sysconfig.get_path("stdlib"))
_PACKAGES = tuple({_folder(sysconfig.get_path(name)) for name in ("purelib", "platlib")})
_MADE = ("<frozen", "<string>", "<__array_function__")


@lru_cache(maxsize=4096)
def owner_of(file: str) -> Owner:
    """Tell whose code a file holds; asked for every frame, so it is remembered.

    Args:
        file: The file as Python knows it.

    Returns:
        Whose it is. A notebook's cell and a text that was executed under a name of its own are the user's.
    """
    if file.startswith(_OURS):
        return Owner.USER if file.startswith(_DEMO) else Owner.OURS
    if file.startswith(_TORCH):
        return Owner.TORCH
    if file.startswith(_PACKAGES):
        return Owner.PACKAGE
    return Owner.PYTHON if file.startswith((_PYTHON, *_MADE)) else Owner.USER


def shown_path(file: str) -> str:
    """Give a path as it is shown: relative where it lies below the working directory.

    Args:
        file: The file as Python knows it.

    Returns:
        The path.
    """
    return file.removeprefix(f"{os.getcwd()}{os.sep}")


def written(line: Line) -> str:
    """Write a line as "path.py:12".

    Args:
        line: The file and the number.

    Returns:
        The text.
    """
    return f"{shown_path(line[0])}:{line[1]}"


def nearest_line(lines: Iterable[Line]) -> Line | None:
    """Choose the line that a message names.

    Args:
        lines: Lines of a stack, the innermost first.

    Returns:
        The first of the user's own code, else the first of a package or of Python, never one of torch or gradgate.
    """
    other = None
    for line in lines:
        owner = owner_of(line[0])
        if owner is Owner.USER:
            return line
        if other is None and owner in (Owner.PACKAGE, Owner.PYTHON):
            other = line
    return other


def raising_line(traceback: TracebackType | None) -> str | None:
    """Give the innermost line of the user's code that an exception came through.

    Args:
        traceback: The exception's traceback.

    Returns:
        The line as "path.py:12", or None where there is none that says something.
    """
    lines = []
    while traceback is not None:
        lines.append((traceback.tb_frame.f_code.co_filename, traceback.tb_lineno))
        traceback = traceback.tb_next
    chosen = nearest_line(reversed(lines))
    return None if chosen is None else written(chosen)
