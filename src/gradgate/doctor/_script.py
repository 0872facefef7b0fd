"""The user's own script, unchanged: run once, with its first steps traced, and once more if a later step goes wrong.

The first steps are traced; that is enough for whatever is wrong with every step. After that the script runs at full
speed: only the gradients are checked before each step of an optimizer, and a validation in train mode is traced. If a
gradient is bad, or the script raises, it is run again in a new process, in the same directory and environment, with
the same arguments and seeds, and traced from the step before the one in question.
"""

from __future__ import annotations

import functools
import importlib.util
import io
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import types
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from subprocess import DEVNULL, PIPE
from types import FrameType
from typing import Any, NoReturn

import torch
from torch.overrides import TorchFunctionMode

from gradgate._patches import Patches
from gradgate._source import Location, Owner, definition, is_foreign, locate, owner_of
from gradgate._text import text_of, visible
from gradgate._torch_private import OPTIMIZER_HOOKS, as_written, compiled_as_written, watched_modules, write_grad_mode
from gradgate.doctor._case import finding_at
from gradgate.doctor._diagnose import Tracing
from gradgate.doctor._diagnosis import Diagnosis
from gradgate.doctor._tracer import parameters_of
from gradgate.doctor._watch import all_finite
from gradgate.doctor.rules import fold
from gradgate.doctor.rules._setup import BATCHNORMS, find_statistics
from gradgate.errors import ArgumentValueError
from gradgate.records import Finding

_MOST_STEPS_TRACED = 8  # while an optimizer has not taken its second step
_SEED = 0

# --- running a script as Python does ----------------------------------------------------------------------------------


class _Ended(BaseException):
    """The run has an end before its own: enough steps were taken, the time is up, or SIGTERM came."""

    def __init__(self, exit_code: int = 0) -> None:
        self.exit_code = exit_code


@dataclass(frozen=True)
class Program:
    """What to run: a file, or a module as in `python -m`."""

    file: str
    folder: str
    arguments: list[str]  # the part of a command line that names it
    code: Callable[[], types.CodeType]
    spec: Any = None  # of a module


def program_at(path: str | os.PathLike[str], module: bool) -> Program:
    if module:
        return _module_program(os.fspath(path))
    file = Path(path).resolve()
    if not file.is_file():
        raise ArgumentValueError(
            f"{file} is not a file.", why="the doctor runs a Python script.", fix="gradgate doctor train.py --epochs 1"
        )

    def code() -> types.CodeType:
        with io.open_code(str(file)) as opened:
            return compile(opened.read(), str(file), "exec")

    return Program(str(file), str(file.parent), [str(file)], code)


def _module_program(name: str) -> Program:
    sys.path.insert(0, os.getcwd())
    try:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.submodule_search_locations is not None:
            spec = importlib.util.find_spec(f"{name}.__main__")
    except (ImportError, ValueError):
        spec = None
    finally:
        sys.path.remove(os.getcwd())
    loader: Any = spec.loader if spec is not None else None
    if spec is None or spec.origin is None or not hasattr(loader, "get_code"):
        raise ArgumentValueError(
            f"there is no module {name} to run.",
            why="a module is looked for as `python -m` does: from the working directory, then where packages are.",
            fix="gradgate doctor -m package.train --epochs 1     # from the folder that holds `package`",
        )
    return Program(spec.origin, os.getcwd(), ["-m", name], lambda: loader.get_code(spec.name), spec)


def run_main(program: Program, args: Sequence[str], main: types.ModuleType) -> tuple[int, BaseException | None, str]:
    """Run a program as Python does; return its exit code, what it raised and the message that it ended with."""
    package = program.spec.parent if program.spec is not None else None
    main.__dict__.update(__file__=program.file, __builtins__=__builtins__, __package__=package, __spec__=program.spec)
    saved = sys.argv, sys.path[0], sys.modules["__main__"]
    sys.argv, sys.path[0] = [program.file, *args], program.folder
    sys.modules["__main__"] = main
    random.seed(_SEED)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(_SEED)
    try:
        exec(program.code(), main.__dict__)
    except _Ended as error:
        return error.exit_code, None, ""
    except SystemExit as error:
        if error.code is None or isinstance(error.code, int):
            return error.code or 0, None, ""
        message = text_of(error.code)
        sys.stderr.write(visible(message, lines=True) + "\n")
        return 1, None, message
    except KeyboardInterrupt as error:
        show_error(error)
        return 130, None, ""
    except BaseException as error:  # noqa: BLE001 - the script's own fault, shown as Python shows it
        return 1, error, ""
    finally:
        sys.argv, sys.path[0], sys.modules["__main__"] = saved
    return 0, None, ""


def show_error(error: BaseException) -> None:
    """Print a traceback as Python does, without the frames of the doctor."""
    shown = traceback.TracebackException.from_exception(error)
    each: traceback.TracebackException | None = shown
    while each is not None:
        kept = [frame for frame in each.stack if owner_of(frame.filename) is not Owner.OURS]
        each.stack = traceback.StackSummary.from_list(kept)
        each = each.__cause__ or each.__context__
    sys.stderr.write(visible("".join(shown.format()), lines=True))


# --- the training of a script -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ScriptReport:
    """What became of a script.

    Attributes:
        diagnosis: What the doctor found.
        exit_code: How the script itself ended.
        steps: How many optimizer steps it took.
        losses: The loss of each backward pass, if it is one number.
    """

    diagnosis: Diagnosis
    exit_code: int
    steps: int
    losses: tuple[float, ...] = ()


Progress = Callable[[int, float, str], None]


class _Run(Tracing):
    """One run of a script in this process."""

    steps_in_full = _MOST_STEPS_TRACED

    def __init__(self, program: Program, first: int, whole: bool, most_steps: int | None) -> None:
        self.main = types.ModuleType("__main__")
        super().__init__(None, [self.main.__dict__], files=(program.file,))
        source = Path(program.file).read_bytes()
        # torch.func.grad cannot run while what is saved for backward is checked.
        self.tracer.saves = not any(word in source for word in (b"torch.func", b"functorch"))
        self.program = program
        self.first = first
        self.whole = whole
        self.most_steps = most_steps
        self.on_traced: Callable[[Diagnosis], None] | None = None
        self.progress: Progress | None = None
        self.taken = 0
        self.bad_step: int | None = None
        self.message = ""
        self.at_exit: Callable[[ScriptReport], None] | None = None
        self.process = os.getpid()
        self._exit = os._exit
        self._patches = Patches()
        self._validating = self._validated = False
        self._steps_of: Counter[int] = Counter()
        self._started = self._shown = time.monotonic()

    def run(self, args: Sequence[str]) -> tuple[int, BaseException | None]:
        """Run the script to its end; return its exit code and what it raised."""
        raised: BaseException | None = None
        self.__enter__()
        try:
            # After the tracer's own, so that a step that only begins to be traced here is not taken for one that was.
            for table, hook in zip(OPTIMIZER_HOOKS, (self._before_step, self._after_step), strict=True):
                self._patches.put(table, self, hook)
            self._patches.put(vars(torch.autograd), "backward", self._noting_losses(torch.autograd.backward))
            self._patches.put(vars(os), "_exit", self._leave)
            if self.first:
                self.pause()
            exit_code, raised, self.message = run_main(self.program, args, self.main)
        finally:
            self.end(raised)
        return exit_code, raised

    def end(self, raised: BaseException | None = None) -> None:
        self._end_validation()
        self._patches.undo()
        self.__exit__(type(raised) if raised else None, raised, None)

    def _leave(self, status: int) -> NoReturn:
        """Pass on the report before `os._exit`, after which nothing runs any more; children of the script just end."""
        try:
            if self.at_exit is not None and os.getpid() == self.process:
                self.end()
                self.at_exit(self.report(status))
                sys.stdout.flush()
                sys.stderr.flush()
        finally:
            self._exit(status)

    def report(self, exit_code: int, raised: BaseException | None = None) -> ScriptReport:
        """Return what is known now."""
        diagnosis = self.diagnosis
        if not (self.history.backwards or self.history.updates or self._functional):
            hint = _module_hint(self.program, raised)
            found = [replace(f, fix=hint) if f.code == "GG002" and hint else f for f in diagnosis.findings]
            reason = f"The script ended with exit code {exit_code} before any backward pass."
            reason += f" Its own message: {self.message}" if self.message else ""
            fix = "gradgate doctor train.py --epochs 1     # with the arguments that the script needs"
            found.append(finding_at(None, "warning GG006: no training step ran", reason, fix))
            diagnosis = replace(diagnosis, findings=fold(found))
        return ScriptReport(replace(diagnosis, exception=raised), exit_code, self.taken, tuple(self.history.losses()))

    def covers(self, step: int) -> bool:
        """Return whether the step of this number was traced."""
        return step < self.steps or self._exception is not None

    def _noting_losses(self, backward: Callable[..., None]) -> Callable[..., None]:
        """Wrap torch.autograd.backward, which every backward pass calls, so that the losses are known."""

        @functools.wraps(backward)
        def noting(tensors: Any, *args: Any, **kwargs: Any) -> None:
            loss = tensors.detach() if isinstance(tensors, torch.Tensor) and tensors.numel() == 1 else None
            self.history.backward(loss, locate(sys._getframe(1)))
            self._end_validation()
            backward(tensors, *args, **kwargs)

        return noting

    def note_backward(self, loss: float | None, location: Location | None) -> None:
        """Called only for traced passes, while the losses of all are noted."""

    def after_update(self, optimizer: torch.optim.Optimizer | None) -> None:
        super().after_update(optimizer)
        if optimizer is not None and not self.tracer.can_pause():
            return
        self._steps_of[id(optimizer)] += 1
        traced = self._steps_of.total()
        enough = min(self._steps_of.values()) > 1 or traced >= _MOST_STEPS_TRACED
        if not self.whole and (enough if not self.first else traced >= 2):
            self.pause()
            if self.first:
                raise _Ended
            # Trace a later validation in which BatchNorm learns.
            layers = {m for root in self.tracer.trace.modules for m in root.modules() if isinstance(m, BATCHNORMS)}
            for layer in layers:
                self._patches.later(layer.register_forward_pre_hook(self._before_statistics).remove)
            if self.on_traced is not None:
                self.on_traced(self.diagnosis)

    def _before_statistics(self, module: torch.nn.Module, inputs: Any) -> None:
        if module.training and not torch.is_grad_enabled() and not self.tracing and not self._validated:
            self.resume()
            self._validating = True
            self.tracer.begin_module(module)

    def _end_validation(self) -> None:
        """Stop tracing a validation, and report it if BatchNorm learned from it."""
        if self._validating:
            self._validating = False
            self.stop_tracing()
            found = dict.fromkeys(find_statistics(self.case(None)))
            self._validated = bool(found)
            self._findings.update(found)
            self._end_step()

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self._end_validation()
        if self.tracing:
            return
        self.history.update(optimizer, locate(sys._getframe(1)))
        unused = [entry.parameter for entry in self.unused.values()]
        self._learned.update(id(parameter) for parameter in unused if parameter.grad is not None)
        gradients = (p.grad for p in parameters_of(optimizer) if p.grad is not None)
        if self.bad_step is None and not all_finite(gradients):
            self.bad_step = self.taken

    def _after_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self.taken += 1
        now = time.monotonic()
        if self.progress is not None and now - self._shown > 0.25:
            self._shown = now
            self.progress(self.taken, now - self._started, "traced" if self.tracing else "at full speed")
        if self.taken == self.most_steps:
            raise _Ended
        if self.taken == self.first and not self.tracing:
            self.resume()


def examine_script(
    path: str | os.PathLike[str],
    args: Sequence[str] = (),
    *,
    module: bool = False,
    whole: bool = False,
    from_step: int | None = None,
    steps: int | None = None,
    timeout: float | None = None,
    at_exit: Callable[[ScriptReport], None] | None = None,
    on_traced: Callable[[Diagnosis], None] | None = None,
    progress: Progress | None = None,
) -> ScriptReport:
    """Run a script and say what is wrong with its training.

    Args:
        path: The script; with `module`, the name of a module to run as `python -m` does.
        args: Its arguments.
        module: Whether `path` names a module.
        whole: Trace all of it, from the start to the end.
        from_step: Trace only two steps from the optimizer step of this number on, and end there.
        steps: End after so many optimizer steps.
        timeout: End after so many seconds; only in the main thread.
        at_exit: Takes the report if the script ends the process itself, by `os._exit`; without it there is none then.
        on_traced: Takes the findings as soon as the traced steps are over, while the script goes on.
        progress: Takes the step, the seconds and what is being done, a few times a second.

    Returns:
        The diagnosis, how the script ended and how many steps it took.

    Raises:
        ArgumentValueError: There is no such file or module.

    Examples:
        >>> import tempfile, pathlib
        >>> script = pathlib.Path(tempfile.mkdtemp()) / "train.py"
        >>> _ = script.write_text('''
        ... import torch
        ... model = torch.nn.Linear(2, 1)
        ... optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        ... for step in range(3):
        ...     model(torch.ones(4, 2)).mean().backward()
        ...     optimizer.step()
        ... ''')
        >>> report = gg.doctor.examine_script(script)
        >>> report.exit_code, report.steps, report.diagnosis.findings[0].title
        (0, 3, 'gradients grow from step to step: zero_grad is missing')
    """
    program = program_at(path, module)
    surroundings = os.getcwd(), dict(os.environ)
    alone = from_step is not None
    run = _Run(program, from_step or 0, whole, steps)
    run.at_exit, run.on_traced, run.progress = at_exit, on_traced, progress
    with _ending(timeout):
        exit_code, raised = run.run(args)
    if raised is not None and not alone:
        show_error(raised)
    if os.getpid() != run.process:  # The script forked, and this is its child, which has come to its end.
        sys.exit(exit_code)
    report = run.report(exit_code, raised)
    step = run.bad_step if run.bad_step is not None else run.taken if raised is not None else None
    explained = any(finding.code.startswith(("GG4", "GG502")) for finding in report.diagnosis.at_least("error"))
    if whole or alone or step is None or run.covers(step) or (explained and raised is None):
        return report
    again = _again(program, args, step, raised, report, *surroundings)
    drawn = again if again.graph is not None else report.diagnosis
    findings = fold((*report.diagnosis.findings, *again.findings))
    return replace(report, diagnosis=replace(drawn, findings=findings, exception=raised))


@contextmanager
def _ending(timeout: float | None) -> Iterator[None]:
    """Let SIGTERM and the end of the time end the script, not the report; only the main thread gets signals."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(number: int, frame: Any) -> NoReturn:
        raise _Ended(128 + number if number == signal.SIGTERM else 0)

    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGALRM)}
    if before[signal.SIGTERM] is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, end)
    if timeout is not None:
        signal.signal(signal.SIGALRM, end)
        signal.setitimer(signal.ITIMER_REAL, timeout)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in before.items():
            if signal.getsignal(number) is end:
                signal.signal(number, handler)


def _module_hint(program: Program, raised: BaseException | None) -> str:
    """Return the command for a script with relative imports, which is a module of a package."""
    if not isinstance(raised, ImportError) or "relative import" not in text_of(raised) or program.spec is not None:
        return ""
    file = Path(program.file)
    parts, folder = [file.stem], file.parent
    while (folder / "__init__.py").exists() or len(parts) == 1:
        parts.insert(0, folder.name)
        folder = folder.parent
    return f"cd {folder} && gradgate doctor -m {'.'.join(parts)}"


def _again(
    program: Program,
    args: Sequence[str],
    step: int,
    raised: BaseException | None,
    first: ScriptReport,
    folder: str,
    environment: dict[str, str],
) -> Diagnosis:
    """Run the script in a new process as the first time, trace the step in question and return what was found."""
    with tempfile.TemporaryDirectory() as place:
        report = Path(place) / "report.json"
        # The step before it is traced as well: it may have frozen, freed or overwritten something.
        options = ["--from-step", str(max(step - 1, 1)), "--rerun", str(report)]
        command = [sys.executable, "-m", "gradgate", "doctor", *options, *program.arguments, *args]
        done = subprocess.run(
            command, cwd=folder, env=environment, check=False, stdin=DEVNULL, stdout=DEVNULL, stderr=PIPE
        )
        second: dict[str, Any] = {}
        with suppress(OSError, ValueError):  # it did not come to its end
            second = json.loads(report.read_text(encoding="utf-8"))
    happened = f"raised {type(raised).__name__}" if raised is not None else "had a gradient that is not finite"
    if not second:
        last = done.stderr.decode(errors="replace").strip().splitlines()[-1:]
        why = f"It ended with exit code {done.returncode}{f': {visible(last[0])}' if last else '.'}"
        return Diagnosis((_not_repeated(f"step {step} {happened}; the second run, to trace it, did not start", why),))
    findings = tuple(
        Finding(**{**finding, **{key: tuple(finding[key]) for key in ("samples", "also", "consequences")}})
        for finding in second["findings"]
    )
    diagnosis = Diagnosis(findings, None, second["graph"], tuple(second["layers"]))
    if diagnosis.at_least("error"):
        return diagnosis
    both = list(zip(first.losses, second["losses"], strict=False))
    differs = next((n for n, (one, two) in enumerate(both) if one != two and not (one != one and two != two)), None)
    why = "The losses were the same up to there: it depends on files, time or other machines."
    if differs is not None:
        why = f"The runs differ from backward pass {differs} on: the loss is {both[differs][0]:g}, then "
        why += f"{both[differs][1]:g}. Something in the script is random and not seeded, or depends on files or time."
    title = f"step {step} {happened}, but not when the script ran again"
    return replace(diagnosis, findings=(*findings, _not_repeated(title, why)))


def _not_repeated(title: str, why: str) -> Finding:
    fix = "torch.manual_seed(0); random.seed(0); np.random.seed(0)     # at the start of the script, or: --trace"
    return finding_at(None, f"error GG005: {title}", why, fix)


# --- where a script switches recording off ----------------------------------------------------------------------------

_TORCHS_OWN = "inside torch"
_SWITCHES = ("no_grad.", "set_grad_enabled.", "inference_mode.")  # what a user's line calls
_DECORATORS = torch.no_grad.__call__.__code__.co_filename  # its frames have other names in each version of torch


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
        >>> _ = script.write_text("import torch; torch.set_grad_enabled(False); torch.nn.ReLU()(torch.ones(2))")
        >>> gap = gg.doctor.examine_modes(script).gaps[0]
        >>> gap.times, gap.modules, gap.left
        (1, ['ReLU'], True)
    """
    program = program_at(path, module)
    watch, started, patches = _Modes(), time.perf_counter(), Patches()
    recording = torch.is_grad_enabled()
    with compiled_as_written(patches), watched_modules(patches, watch.enter_module, watch.leave_module):
        watch.follow_inference(patches)
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
        if func is write_grad_mode and args[0]:
            self.end()
        elif func is write_grad_mode:
            self._begin(sys._getframe(1))
        elif self._open is not None:
            self._open.operations += 1
        return func(*args, **(kwargs or {}))

    def _begin(self, frame: FrameType | None) -> None:
        if self._open is not None or not torch.is_grad_enabled():
            return
        where, source = _switched_at(frame)
        self._open = self.gaps.setdefault((where, source), RecordingGap(where, source))
        self._open.times += 1
        self._since, self._calls = time.perf_counter(), 0

    def end(self, *, left: bool = False) -> None:
        if self._open is not None:
            self._open.seconds += time.perf_counter() - self._since
            self._open.left |= left
        self._open = None

    def follow_inference(self, patches: Patches) -> None:
        """See the blocks of torch.inference_mode, which no mode sees, until the patches are undone."""
        mode: Any = torch.inference_mode
        entering, leaving = mode.__enter__, mode.__exit__

        def enter(block: Any) -> Any:
            if block.mode:
                self._begin(sys._getframe(1))
            return entering(block)

        def leave(block: Any, *error: Any) -> None:
            leaving(block, *error)
            if torch.is_grad_enabled():
                self.end()

        for name, original, wrapped in (("__enter__", entering, enter), ("__exit__", leaving, leave)):
            patches.later(partial(setattr, mode, name, original))
            setattr(mode, name, wrapped)

    def enter_module(self, module: torch.nn.Module, args: Any, kwargs: Any = None) -> None:
        name = as_written(type(module).__name__)
        if self._calls == 0 and self._open is not None and name not in self._open.modules:
            self._open.modules.append(name)
        self._calls += 1

    def leave_module(self, *args: Any) -> None:
        self._calls = max(self._calls - 1, 0)


def _switched_at(frame: FrameType | None) -> tuple[str, str]:
    """Return the line that switches and its text: of a block, a call, or the function that a decorator is on."""
    place = locate(frame)
    while frame is not None and is_foreign(frame.f_code.co_filename):
        name = frame.f_code.co_qualname
        decorated = frame.f_locals.get("func") if frame.f_code.co_filename == _DECORATORS else None
        if isinstance(decorated, types.FunctionType):
            line = definition(decorated.__code__)
            return (_TORCHS_OWN, "") if is_foreign(line.file) else (line.text, line.source)
        if not name.startswith(_SWITCHES) and frame.f_globals.get("__name__") not in ("gradgate.modes", __name__):
            return _TORCHS_OWN, ""
        frame = frame.f_back
    return (_TORCHS_OWN, "") if place is None else (place.text, place.source)
