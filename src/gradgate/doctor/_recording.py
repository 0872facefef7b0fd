"""Where a script switches recording off: which line, how often, how long, and over what."""

from __future__ import annotations

import os
import sys
import time
import types
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from types import FrameType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from gradgate._patches import Patches
from gradgate._source import definition, is_foreign, locate
from gradgate._torch_private import as_written, compiled_as_written, read_grad_mode, watched_modules, write_grad_mode
from gradgate.doctor._script import program_at, run_main, show_error

_TORCHS_OWN = "inside torch"
_SWITCHES = ("no_grad.", "set_grad_enabled.", "inference_mode.")  # what a user's line calls


@dataclass(slots=True)
class RecordingGap:
    """A line that switched recording off.

    Attributes:
        where: The line, as "path.py:12"; "inside torch" for all that torch does by itself, as in an optimizer's step.
        source: The text of that line.
        times: How often it did.
        seconds: How long recording was off, in all.
        operations: How many calls of torch ran meanwhile.
        modules: The modules that were called meanwhile, by class, the outermost ones.
        left: Whether recording was still off when the script ended.
    """

    where: str
    source: str
    times: int = 0
    seconds: float = 0.0
    operations: int = 0
    modules: list[str] = field(default_factory=list)
    left: bool = False


@dataclass(frozen=True)
class ModesReport:
    """Where a script switched recording off, and how it ended.

    Attributes:
        gaps: The lines, the longest time first; torch's own last.
        exit_code: How the script itself ended.
        seconds: How long it ran.
    """

    gaps: tuple[RecordingGap, ...]
    exit_code: int
    seconds: float


def examine_modes(path: str | os.PathLike[str], args: Sequence[str] = (), *, module: bool = False) -> ModesReport:
    """Run a script and list the lines that switched recording off, for how long, and over what.

    Args:
        path: The script; with `module`, the name of a module to run as `python -m` does.
        args: Its arguments.
        module: Whether `path` names a module.

    Returns:
        The lines, and how the script ended. Only its main thread is seen.

    Raises:
        ArgumentValueError: There is no such file or module.

    Examples:
        >>> import tempfile, pathlib
        >>> script = pathlib.Path(tempfile.mkdtemp()) / "validate.py"
        >>> _ = script.write_text('''
        ... import torch
        ... model = torch.nn.Linear(2, 1)
        ... for batch in torch.ones(3, 4, 2):
        ...     with torch.no_grad():
        ...         model(batch).mean()
        ... ''')
        >>> gap = gg.doctor.examine_modes(script).gaps[0]
        >>> gap.source, gap.times, gap.modules, gap.left
        ('with torch.no_grad():', 3, ['Linear'], False)
    """
    program = program_at(path, module)
    watch, started, patches = _Modes(), time.perf_counter(), Patches()
    recording = read_grad_mode()
    with compiled_as_written(patches), watched_modules(patches, watch.enter_module, watch.leave_module):
        for name, wrapped in (("__enter__", watch.inference), ("__exit__", watch.after_inference)):
            original = getattr(torch.inference_mode, name)
            patches.later(partial(setattr, torch.inference_mode, name, original))
            setattr(torch.inference_mode, name, wrapped(original))
        with watch:
            exit_code, raised, _ = run_main(program, args, types.ModuleType("__main__"))
    watch.end(left=True)
    write_grad_mode(recording)
    if raised is not None:
        show_error(raised)
    gaps = sorted(watch.gaps.values(), key=lambda gap: (gap.where == _TORCHS_OWN, -gap.seconds))
    return ModesReport(tuple(gaps), exit_code, time.perf_counter() - started)


class _Modes(TorchFunctionMode):
    """Sees every call of torch in this thread, the switches of recording among them."""

    def __init__(self) -> None:
        super().__init__()
        self.gaps: dict[tuple[str, str], RecordingGap] = {}
        self._open: RecordingGap | None = None
        self._since = 0.0
        self._calls = 0  # of modules that have not returned

    def __torch_function__(self, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is write_grad_mode:
            self._switch(bool(args[0]))
        elif self._open is not None:
            self._open.operations += 1
        return func(*args, **(kwargs or {}))

    def _switch(self, on: bool) -> None:
        if on:
            self.end()
        elif self._open is None and read_grad_mode():
            self._begin(sys._getframe(2))

    def _begin(self, frame: FrameType | None) -> None:
        where, source = _switched_at(frame)
        self._open = self.gaps.setdefault((where, source), RecordingGap(where, source))
        self._open.times += 1
        self._since, self._calls = time.perf_counter(), 0

    def end(self, *, left: bool = False) -> None:
        if self._open is not None:
            self._open.seconds += time.perf_counter() - self._since
            self._open.left |= left
        self._open = None

    def inference(self, entering: Any) -> Any:
        def enter(block: Any) -> Any:
            if self._open is None and block.mode and read_grad_mode():
                self._begin(sys._getframe(1))
            return entering(block)

        return enter

    def after_inference(self, leaving: Any) -> Any:
        def leave(block: Any, *error: Any) -> Any:
            result = leaving(block, *error)
            if read_grad_mode():
                self.end()
            return result

        return leave

    def enter_module(self, module: torch.nn.Module, args: Any, kwargs: Any = None) -> None:
        name = as_written(type(module).__name__)
        if self._calls == 0 and self._open is not None and name not in self._open.modules:
            self._open.modules.append(name)
        self._calls += 1

    def leave_module(self, *args: Any) -> None:
        self._calls = max(self._calls - 1, 0)


def _switched_at(frame: FrameType | None) -> tuple[str, str]:
    """Give the line that switches and its text: of a block, a call, or the function that a decorator is on."""
    place = locate(frame)
    while frame is not None and is_foreign(frame.f_code.co_filename):
        name = frame.f_code.co_qualname
        decorated = frame.f_locals.get("func") if name.startswith("context_decorator.") else None
        if isinstance(decorated, types.FunctionType):
            line = definition(decorated.__code__)
            return (_TORCHS_OWN, "") if is_foreign(line.file) else (line.text, line.source)
        if not name.startswith(_SWITCHES) and frame.f_globals.get("__name__") not in ("gradgate.modes", __name__):
            return _TORCHS_OWN, ""
        frame = frame.f_back
    return (_TORCHS_OWN, "") if place is None else (place.text, place.source)
