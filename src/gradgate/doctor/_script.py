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
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from gradgate._source import Owner, locate, owner_of
from gradgate._text import text_of, visible
from gradgate.doctor._diagnose import Tracing
from gradgate.doctor._diagnosis import Diagnosis
from gradgate.doctor._watch import all_finite
from gradgate.doctor.rules import fold
from gradgate.errors import ArgumentValueError
from gradgate.records import Finding

_MOST_STEPS_TRACED = 8  # while an optimizer has not taken its second step
_SEED = 0
_BATCHNORMS = (torch.nn.BatchNorm1d, torch.nn.BatchNorm2d, torch.nn.BatchNorm3d, torch.nn.SyncBatchNorm)


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


class _Enough(BaseException):
    """The run has shown what it had to, or has reached its limit of steps."""


class _Ended(BaseException):
    """The process was asked to end: by SIGTERM, or because the time is up."""

    def __init__(self, exit_code: int) -> None:
        super().__init__(exit_code)
        self.exit_code = exit_code


@dataclass(frozen=True)
class Program:
    """What to run: a file, or a module as in `python -m`."""

    name: str  # as it stands on the command line
    file: str
    package: str | None
    folder: str
    code: Callable[[], types.CodeType]
    spec: Any = None

    @property
    def arguments(self) -> list[str]:
        """The part of a command line that names it."""
        return [self.file] if self.package is None else ["-m", self.name]


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

    return Program(str(file), str(file), None, str(file.parent), code)


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
    return Program(name, spec.origin, spec.parent, os.getcwd(), lambda: loader.get_code(spec.name), spec)


def run_main(program: Program, args: Sequence[str], main: types.ModuleType) -> tuple[int, BaseException | None, str]:
    """Run a program as Python does; return its exit code, what it raised and the message that it ended with."""
    main.__dict__.update(
        __file__=program.file, __builtins__=__builtins__, __package__=program.package, __spec__=program.spec
    )
    saved = sys.argv, sys.path[0], sys.modules["__main__"]
    sys.argv, sys.path[0] = [program.file, *args], program.folder
    sys.modules["__main__"] = main
    random.seed(_SEED)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(_SEED)
    try:
        exec(program.code(), main.__dict__)
    except _Enough:
        return 0, None, ""
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


class _Run:
    """One run of a script in this process."""

    def __init__(
        self,
        program: Program,
        first: int,
        count: int | None,
        steps: int | None,
        on_traced: Callable[[Diagnosis], None] | None,
        progress: Progress | None,
    ) -> None:
        self.program = program
        self.first = first
        self.count = count
        self.most_steps = steps
        self.on_traced = on_traced
        self.progress = progress
        self.steps = 0
        self.traced = 0
        self.bad_step: int | None = None
        self.message = ""
        self.main = types.ModuleType("__main__")
        self.tracing = Tracing(None, [self.main.__dict__], (program.file,))
        self.tracing.after_step = self._after_traced_step
        self.tracing.steps_in_full = _MOST_STEPS_TRACED
        source = Path(program.file).read_bytes()
        self.tracing.without_saves = any(word in source for word in (b"torch.func", b"functorch"))
        self._steps_of: Counter[int] = Counter()
        self._started = self._shown = time.monotonic()

    def run(self, args: Sequence[str]) -> tuple[int, BaseException | None]:
        """Run the script to its end; return its exit code and what it raised."""
        raised: BaseException | None = None
        self.tracing.__enter__()
        # After the tracer's own, so that a step that only begins to be traced here is not taken for one that was.
        hooks = (
            register_optimizer_step_pre_hook(self._before_step),
            register_optimizer_step_post_hook(self._after_step),
        )
        backward, torch.autograd.backward = torch.autograd.backward, self._noting_losses(torch.autograd.backward)
        try:
            if self.first:
                self.tracing.pause()
            exit_code, raised, self.message = run_main(self.program, args, self.main)
        finally:
            torch.autograd.backward = backward
            self.tracing.__exit__(type(raised) if raised else None, raised, None)
            for hook in hooks:
                hook.remove()
        return exit_code, raised

    def report(self, exit_code: int, raised: BaseException | None = None) -> ScriptReport:
        """Return what is known now."""
        diagnosis = self.tracing.diagnosis
        if not self.tracing.trained:
            hint = _module_hint(self.program, raised)
            found = [replace(f, fix=hint) if f.code == "GG002" and hint else f for f in diagnosis.findings]
            diagnosis = replace(diagnosis, findings=fold((*found, *self._without_step(exit_code))))
        losses = tuple(self.tracing.history.losses())
        return ScriptReport(replace(diagnosis, exception=raised), exit_code, self.steps, losses)

    def _without_step(self, exit_code: int) -> Iterator[Finding]:
        yield Finding(
            code="GG006",
            severity="warning",
            title="no training step ran",
            reason=f"The script ended with exit code {exit_code} before any backward pass."
            + (f" Its own message: {self.message}" if self.message else ""),
            fix="gradgate doctor train.py --epochs 1     # with the arguments that the script needs",
        )

    # --- what it sees -----------------------------------------------------------------------------------------------

    def _noting_losses(self, backward: Callable[..., None]) -> Callable[..., None]:
        """Wrap torch.autograd.backward, which every backward pass calls, so that the losses are known."""
        self.tracing.own_losses = False

        @functools.wraps(backward)
        def noting(tensors: Any, *args: Any, **kwargs: Any) -> None:
            loss = tensors.detach() if isinstance(tensors, torch.Tensor) and tensors.numel() == 1 else None
            self.tracing.history.backward(loss, locate(sys._getframe(1)))
            self.tracing.end_validation()
            backward(tensors, *args, **kwargs)

        return noting

    def _after_traced_step(self, optimizer: torch.optim.Optimizer | None) -> None:
        self.traced += 1
        self._steps_of[id(optimizer)] += 1
        enough = min(self._steps_of.values()) > 1 or self.traced >= _MOST_STEPS_TRACED
        if self.count is not None and (enough if not self.first else self.traced >= self.count):
            self.tracing.pause()
            if self.first:
                raise _Enough
            self._watch_statistics()
            if self.on_traced is not None:
                self.on_traced(self.tracing.diagnosis)

    def _watch_statistics(self) -> None:
        """Trace a later validation in which BatchNorm learns."""
        layers = {id(m): m for root in self.tracing.modules for m in root.modules() if isinstance(m, _BATCHNORMS)}
        for layer in layers.values():
            handle = layer.register_forward_pre_hook(self._before_statistics)
            self.tracing.at_end.append(handle.remove)

    def _before_statistics(self, module: torch.nn.Module, inputs: Any) -> None:
        if module.training and not torch.is_grad_enabled() and not self.tracing.tracing:
            self.tracing.begin_validation(module)

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self.tracing.end_validation()
        if self.tracing.tracing:
            return
        self.tracing.untraced_step(optimizer, locate(sys._getframe(1)))
        if self.bad_step is not None:
            return
        held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        if not all_finite(p.grad for p in held if p.grad is not None):
            self.bad_step = self.steps

    def _after_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self.steps += 1
        now = time.monotonic()
        if self.progress is not None and now - self._shown > 0.25:
            self._shown = now
            self.progress(self.steps, now - self._started, "traced" if self.tracing.tracing else "at full speed")
        if self.steps == self.most_steps:
            raise _Enough
        if self.steps == self.first and not self.tracing.tracing:
            self.tracing.resume()


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
    run = _Run(program, from_step or 0, None if whole else 2, steps, on_traced, progress)
    process = os.getpid()
    with _exits_told(run, at_exit), _ending(timeout):
        exit_code, raised = run.run(args)
    if raised is not None and not alone:
        show_error(raised)
    if os.getpid() != process:  # The script forked, and this is its child, which has come to its end.
        sys.exit(exit_code)
    report = run.report(exit_code, raised)
    step = run.bad_step if run.bad_step is not None else run.steps if raised is not None else None
    explained = any(finding.code.startswith(("GG4", "GG502")) for finding in report.diagnosis.at_least("error"))
    if whole or alone or step is None or run.tracing.covers(step) or (explained and raised is None):
        return report
    again = _again(program, args, step, raised, report, *surroundings)
    drawn = again if again.graph is not None else report.diagnosis
    findings = fold((*report.diagnosis.findings, *again.findings))
    return replace(report, diagnosis=replace(drawn, findings=findings, exception=raised))


@contextmanager
def _exits_told(run: _Run, at_exit: Callable[[ScriptReport], None] | None) -> Iterator[None]:
    """Give the report before `os._exit`, after which nothing runs any more; children of the script just end."""
    leave, process = os._exit, os.getpid()

    def leave_told(status: int) -> NoReturn:
        try:
            if at_exit is not None and os.getpid() == process:
                os._exit = leave
                run.tracing.__exit__(None, None, None)
                at_exit(run.report(status))
                sys.stdout.flush()
                sys.stderr.flush()
        finally:
            leave(status)

    os._exit = leave_told
    try:
        yield
    finally:
        os._exit = leave


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


def show_error(error: BaseException) -> None:
    """Print a traceback as Python does, without the frames of the doctor."""
    shown = traceback.TracebackException.from_exception(error)
    each: traceback.TracebackException | None = shown
    while each is not None:
        kept = [frame for frame in each.stack if owner_of(frame.filename) is not Owner.OURS]
        each.stack = traceback.StackSummary.from_list(kept)
        each = each.__cause__ or each.__context__
    sys.stderr.write(visible("".join(shown.format()), lines=True))


def _module_hint(program: Program, raised: BaseException | None) -> str:
    """Return the command for a script with relative imports, which is a module of a package."""
    if not isinstance(raised, ImportError) or "relative import" not in text_of(raised) or program.package is not None:
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
            command,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            stdin=subprocess.DEVNULL,
            cwd=folder,
            env=environment,
            check=False,
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
    return Finding(
        code="GG005",
        severity="error",
        title=title,
        reason=why,
        fix="torch.manual_seed(0); random.seed(0); np.random.seed(0)     # at the start of the script, or: --trace",
    )
