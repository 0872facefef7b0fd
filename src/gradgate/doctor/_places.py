"""Where in the user's code something happened: the innermost frame outside torch, gradgate and the standard library.

A place is noted as the code object and the position in it, which costs next to nothing; file, line and the very
expression are worked out when somebody asks. Python keeps the columns of every instruction, so several operations on
one line can be told apart. Sources come from `linecache`, so notebooks and executed strings work as files do.
"""

from __future__ import annotations

import linecache
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from types import CodeType, FrameType, TracebackType

from gradgate._places import Owner, owner_of, written

__all__ = ["Place", "is_foreign", "locate", "place_of_traceback", "stack_of"]

_inside: dict[str, bool] = {}  # by file: code that is the same in two files is equal for Python


def is_foreign(code: CodeType) -> bool:
    """Tell whether code belongs to torch, gradgate or the standard library, not to the user or a library in use.

    Args:
        code: A code object.

    Returns:
        Whether its frames are passed over.
    """
    known = _inside.get(code.co_filename)
    if known is None:
        known = _inside[code.co_filename] = owner_of(code.co_filename) in (Owner.OURS, Owner.TORCH, Owner.PYTHON)
    return known


@dataclass(frozen=True, eq=True)
class Place:
    """One place in the user's code.

    Args:
        code: The code that ran.
        instruction: The instruction in it, as in `frame.f_lasti`.
    """

    code: CodeType
    instruction: int

    @cached_property
    def _span(self) -> tuple[int, int | None, int | None, int | None]:
        span = next(islice(self.code.co_positions(), self.instruction // 2, None), None)
        line = self.code.co_firstlineno if span is None or span[0] is None else span[0]
        return (line, span[1], span[2], span[3]) if span is not None else (line, None, None, None)

    @property
    def file(self) -> str:
        """Give the file as Python knows it."""
        return self.code.co_filename

    @property
    def line(self) -> int:
        """Give the line number."""
        return self._span[0]

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
        """Give the expression that ran, where it lies on one line and is not the whole of it; else the line."""
        line, end_line, start, end = self._span
        if end_line != line or start is None or end is None:
            return self.source
        text = linecache.getline(self.file, line).encode()[start:end].decode(errors="replace").strip()
        return text or self.source


def locate(frame: FrameType | None) -> tuple[CodeType, int] | None:
    """Find the innermost frame of the user.

    Args:
        frame: Where to start.

    Returns:
        Its code and instruction, for a `Place`; None where the user is not on the stack.
    """
    inside = _inside
    while frame is not None:
        code = frame.f_code
        foreign = inside.get(code.co_filename)
        if foreign is None:
            foreign = is_foreign(code)
        if not foreign:
            return code, frame.f_lasti
        frame = frame.f_back
    return None


def stack_of(frame: FrameType | None) -> list[Place]:
    """Give every frame of the user, the innermost first.

    Args:
        frame: Where to start.

    Returns:
        The places.
    """
    found = []
    while frame is not None:
        if not is_foreign(frame.f_code):
            found.append(Place(frame.f_code, frame.f_lasti))
        frame = frame.f_back
    return found


def place_of_traceback(traceback: TracebackType | None) -> Place | None:
    """Find the innermost frame of the user in a traceback.

    Args:
        traceback: The traceback of an exception.

    Returns:
        The place, or None where the user is not in it.
    """
    found = None
    while traceback is not None:
        if not is_foreign(traceback.tb_frame.f_code):
            found = Place(traceback.tb_frame.f_code, traceback.tb_lasti)
        traceback = traceback.tb_next
    return found
