"""Questions about the user's source text: what a block or a decorator says, and statements that do nothing."""

from __future__ import annotations

import ast
import linecache
from dataclasses import dataclass
from functools import lru_cache
from types import CodeType

from gradgate._places import written
from gradgate.doctor._places import Place

__all__ = ["Line", "async_with_torch_decorator", "bare_mode_statements", "definition", "region_header"]

_MODES = ("no_grad", "enable_grad", "inference_mode")


@dataclass(frozen=True, slots=True)
class Line:
    """A line of a file.

    Args:
        file: The file as Python knows it.
        line: The line number.
    """

    file: str
    line: int

    @property
    def text(self) -> str:
        """Give the place as "path.py:12"."""
        return written((self.file, self.line))

    @property
    def source(self) -> str:
        """Give the text of the line."""
        return linecache.getline(self.file, self.line).strip()

    @property
    def expression(self) -> str:
        """Give the text of the line without what is said about it."""
        return self.source.partition("#")[0].strip()


@lru_cache(maxsize=64)
def _parsed(file: str, size: int) -> ast.Module | None:
    try:
        return ast.parse("".join(linecache.getlines(file)))
    except SyntaxError:  # a notebook cell with magics, or a file that has changed
        return None


def _tree(file: str) -> ast.Module | None:
    return _parsed(file, len(linecache.getlines(file)))


def _called_name(node: ast.expr) -> str:
    """Give the dotted name that an expression calls or names, such as "torch.no_grad"."""
    if isinstance(node, ast.Call):
        node = node.func
    try:
        return ast.unparse(node)
    except (ValueError, RecursionError):
        return ""


def region_header(place: Place, names: tuple[str, ...]) -> Line | None:
    """Find the `with` line or the decorator around a place that switches a mode.

    Args:
        place: A place in the user's code.
        names: The last parts of names that count.

    Returns:
        The innermost such line, or None.
    """
    return _header(place.file, len(linecache.getlines(place.file)), place.line, names)


@lru_cache(maxsize=1024)
def _header(file: str, size: int, line: int, names: tuple[str, ...]) -> Line | None:
    tree = _parsed(file, size)
    found = None
    for node in ast.walk(tree) if tree is not None else ():
        if isinstance(node, (ast.With, ast.AsyncWith)):
            headers = [item.context_expr for item in node.items]
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            headers = node.decorator_list
        else:
            continue
        if not node.lineno <= line <= (node.end_lineno or node.lineno):
            continue
        for header in headers:
            if _called_name(header).rpartition(".")[2] in names:
                found = Line(file, header.lineno)
    return found


def definition(code: CodeType) -> Line:
    """Find the line of a function's `def`, below its decorators.

    Args:
        code: The code of the function.

    Returns:
        The line.
    """
    line = code.co_firstlineno
    lines = linecache.getlines(code.co_filename)
    while line < len(lines) and not lines[line - 1].lstrip().startswith(("def ", "async def ", "lambda")):
        line += 1
    return Line(code.co_filename, line)


def _names_of_torch(tree: ast.Module) -> set[str]:
    """Give the names by which a file may call torch's modes."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name == "torch":
                    found |= {f"{alias.asname or 'torch'}.{mode}" for mode in _MODES}
        elif isinstance(node, ast.ImportFrom) and node.module in ("torch", "torch.autograd"):
            found |= {alias.asname or alias.name for alias in node.names if alias.name in _MODES}
    return found


def bare_mode_statements(file: str) -> tuple[Line, ...]:
    """Find statements such as `torch.no_grad()` alone on a line, which do nothing.

    Args:
        file: The file as Python knows it.

    Returns:
        Each line.
    """
    return _found(file, len(linecache.getlines(file)))[0]


def async_with_torch_decorator(file: str) -> tuple[Line, ...]:
    """Find `async def` functions under a mode decorator of torch, which is left before the coroutine runs.

    Args:
        file: The file as Python knows it.

    Returns:
        The line of each decorator.
    """
    return _found(file, len(linecache.getlines(file)))[1]


@lru_cache(maxsize=256)
def _found(file: str, size: int) -> tuple[tuple[Line, ...], tuple[Line, ...]]:
    """Read a file once for both questions."""
    tree = _tree(file)
    bare: list[Line] = []
    decorated: list[Line] = []
    if tree is not None:
        names = _names_of_torch(tree)
        switches = names | {name.replace("no_grad", "set_grad_enabled") for name in names}
        for node in ast.walk(tree):
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and _called_name(node.value) in names:
                bare.append(Line(file, node.lineno))
            elif isinstance(node, ast.AsyncFunctionDef):
                decorated += [Line(file, d.lineno) for d in node.decorator_list if _called_name(d) in switches]
    return tuple(bare), tuple(decorated)
