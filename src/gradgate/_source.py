"""Lines of source code: whose they are, which one a message names, where a frame stands, and what is written there."""

from __future__ import annotations

import ast
import linecache
import os
import sys
import sysconfig
from collections.abc import Callable, Iterable
from enum import Enum
from functools import lru_cache
from itertools import islice
from traceback import walk_stack, walk_tb
from types import CodeType, FrameType, TracebackType
from typing import Any, NamedTuple

import torch

Line = tuple[str, int]


# --- whose code a file holds ------------------------------------------------------------------------------------------


class Owner(Enum):
    """Whose code a file holds."""

    USER = "the user"
    PACKAGE = "an installed package"
    PYTHON = "the standard library, or code that Python generates itself"
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
_GENERATED = ("<frozen", "<string>", "<__array_function__")


@lru_cache(maxsize=4096)
def owner_of(file: str) -> Owner:
    """Return whose code a file holds; a notebook cell and executed text under a name of its own are the user's."""
    if file.startswith(_OURS):
        return Owner.USER if file.startswith(_DEMO) else Owner.OURS
    if file.startswith(_TORCH):
        return Owner.TORCH
    if file.startswith(_PACKAGES):
        return Owner.PACKAGE
    return Owner.PYTHON if file.startswith((_PYTHON, *_GENERATED)) else Owner.USER


# --- the line that a message names ------------------------------------------------------------------------------------


def shown_path(file: str) -> str:
    """Return a path as messages show it: relative if it lies below the working directory; the number of a cell."""
    notebook = sys.modules.get("IPython")
    if notebook is not None and (shell := notebook.get_ipython()) and (cell := shell.compile.format_code_name(file)):
        return " ".join(cell)
    return file.removeprefix(f"{os.getcwd()}{os.sep}")


def written(line: Line) -> str:
    return f"{shown_path(line[0])}:{line[1]}"


def nearest_line(lines: Iterable[Line]) -> Line | None:
    """Choose from a stack, innermost first, the first line of the user, else of a package or of Python."""
    other = None
    for line in lines:
        owner = owner_of(line[0])
        if owner is Owner.USER:
            return line
        if other is None and owner in (Owner.PACKAGE, Owner.PYTHON):
            other = line
    return other


def raising_line(traceback: TracebackType | None) -> str | None:
    """Return the innermost line of the user's code that an exception passed through, as "path.py:12"."""
    chosen = nearest_line(reversed(_lines_of(traceback)))
    return None if chosen is None else written(chosen)


def raising_spot(traceback: TracebackType | None) -> Line | None:
    """Return the innermost line of any code, to compare the origins of two exceptions."""
    return next(reversed(_lines_of(traceback)), None)


def _lines_of(traceback: TracebackType | None) -> list[Line]:
    return [(frame.f_code.co_filename, line) for frame, line in walk_tb(traceback)]


def running_line() -> Line | None:
    """Return the innermost line of the user's code that is running now."""
    return nearest_line((frame.f_code.co_filename, line) for frame, line in walk_stack(sys._getframe(1)))


def definition_line(function: Callable[..., Any]) -> str | None:
    """Return the line where a function is defined, as "path.py:12"."""
    code = getattr(function, "__code__", None) or getattr(getattr(function, "__call__", None), "__code__", None)  # noqa: B004
    line = None if code is None else nearest_line([(code.co_filename, code.co_firstlineno)])
    return None if line is None else written(line)


# --- a position in running code ---------------------------------------------------------------------------------------


class Location(NamedTuple):
    """A position in running code. File, line and expression are worked out only when a message needs them."""

    code: CodeType
    instruction: int  # as in `frame.f_lasti`

    @property
    def file(self) -> str:
        return self.code.co_filename

    @property
    def line(self) -> int:
        return _span(self)[0]

    @property
    def text(self) -> str:
        return written((self.file, self.line))

    @property
    def source(self) -> str:
        return linecache.getline(self.file, self.line).strip()

    @property
    def expression(self) -> str:
        line, end_line, start, end = _span(self)
        if end_line != line or start is None or end is None:
            return self.source
        text = linecache.getline(self.file, line).encode()[start:end].decode(errors="replace").strip()
        return text or self.source


@lru_cache(maxsize=4096)
def _span(location: Location) -> tuple[int, int | None, int | None, int | None]:
    spans = islice(location.code.co_positions(), location.instruction // 2, None)
    line, end_line, start, end = next(spans, (None, None, None, None))
    return location.code.co_firstlineno if line is None else line, end_line, start, end


class SourceLine(NamedTuple):
    """A line of a file, with the same properties as a `Location`."""

    file: str
    line: int

    @property
    def text(self) -> str:
        return written(self)

    @property
    def source(self) -> str:
        return linecache.getline(self.file, self.line).strip()

    @property
    def expression(self) -> str:
        return self.source.partition("#")[0].strip()


def is_foreign(file: str) -> bool:
    """Return whether a file belongs to torch, gradgate or the standard library, not to the user or a library in use."""
    return owner_of(file) in (Owner.OURS, Owner.TORCH, Owner.PYTHON)


def locate(frame: FrameType | None, owner: Owner = Owner.PACKAGE) -> Location | None:
    """Return the innermost frame of the user or of a library in use; with `Owner.USER`, of the user if there is one."""
    found = None
    while frame is not None:
        if not is_foreign(frame.f_code.co_filename):
            found = found or Location(frame.f_code, frame.f_lasti)
            if owner is not Owner.USER or owner_of(frame.f_code.co_filename) is Owner.USER:
                return Location(frame.f_code, frame.f_lasti)
        frame = frame.f_back
    return found


def locate_traceback(traceback: TracebackType | None) -> Location | None:
    """Return the innermost frame of the user in a traceback."""
    found = None
    while traceback is not None:
        if not is_foreign(traceback.tb_frame.f_code.co_filename):
            found = Location(traceback.tb_frame.f_code, traceback.tb_lasti)
        traceback = traceback.tb_next
    return found


# --- what is written in a file ----------------------------------------------------------------------------------------

_MODES = ("no_grad", "enable_grad", "inference_mode")


def _nodes_of(file: str) -> list[ast.AST]:
    return _parsed("".join(linecache.getlines(file)))


@lru_cache(maxsize=64)
def _parsed(text: str) -> list[ast.AST]:
    try:
        return list(ast.walk(ast.parse(text)))
    except SyntaxError:  # a notebook cell with magics, or a file that has changed
        return []


def _called_name(node: ast.expr) -> str:
    """Return the dotted name that an expression calls or is, such as "torch.no_grad"."""
    try:
        return ast.unparse(node.func if isinstance(node, ast.Call) else node)
    except (ValueError, RecursionError):
        return ""


def region_header(location: Location, names: tuple[str, ...]) -> SourceLine | None:
    """Find the innermost `with` line or decorator around a location that calls one of these functions."""
    found = None
    for node in _nodes_of(location.file):
        if isinstance(node, (ast.With, ast.AsyncWith)):
            headers = [item.context_expr for item in node.items]
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            headers = node.decorator_list
        else:
            continue
        if node.lineno <= location.line <= (node.end_lineno or node.lineno):
            for header in headers:
                if _called_name(header).rpartition(".")[2] in names:
                    found = SourceLine(location.file, header.lineno)
    return found


def definition(code: CodeType) -> SourceLine:
    """Find the line of a function's `def`, below its decorators."""
    line = code.co_firstlineno
    lines = linecache.getlines(code.co_filename)
    while line < len(lines) and not lines[line - 1].lstrip().startswith(("def ", "async def ", "lambda")):
        line += 1
    return SourceLine(code.co_filename, line)


def _names_of_torch(nodes: list[ast.AST]) -> set[str]:
    """Return the names by which a file may call torch's modes."""
    found = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            names = [alias.asname or "torch" for alias in node.names if alias.name == "torch"]
            found |= {f"{name}.{mode}" for name in names for mode in _MODES}
        elif isinstance(node, ast.ImportFrom) and node.module in ("torch", "torch.autograd"):
            found |= {alias.asname or alias.name for alias in node.names if alias.name in _MODES}
    return found


def modes_without_effect(file: str) -> tuple[list[SourceLine], list[SourceLine]]:
    """Find `torch.no_grad()` alone on a line, and torch's mode decorators on `async def`: neither does anything."""
    nodes, bare, decorated = _nodes_of(file), list[SourceLine](), list[SourceLine]()
    names = _names_of_torch(nodes)
    switches = names | {name.replace("no_grad", "set_grad_enabled") for name in names}
    for node in nodes:
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and _called_name(node.value) in names:
            bare.append(SourceLine(file, node.lineno))
        elif isinstance(node, ast.AsyncFunctionDef):
            decorated += [SourceLine(file, d.lineno) for d in node.decorator_list if _called_name(d) in switches]
    return bare, decorated
