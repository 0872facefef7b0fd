"""The user's own script, unchanged: run once, with a look at its first steps, and once more where it went wrong.

The first steps are traced; that is enough for whatever is wrong with every step. After that the script runs at full
speed, and only the gradients are looked at before each step of an optimizer. If one of them is bad, or the script
raises, it is run again in a new process with the same arguments and seeds, and traced from the step in question on.
"""

from __future__ import annotations

import functools
import io
import json
import os
import random
import subprocess
import sys
import tempfile
import traceback
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from gradgate._source import locate
from gradgate._text import visible
from gradgate.doctor._diagnose import Tracing
from gradgate.doctor._diagnosis import Diagnosis
from gradgate.doctor._watch import all_finite
from gradgate.doctor.rules import fold
from gradgate.errors import ArgumentValueError
from gradgate.records import Finding

_STEPS_TRACED = 2
_SEED = 0


@dataclass(frozen=True)
class ScriptReport:
    """What became of a script.

    Attributes:
        diagnosis: What the doctor found.
        exit_code: How the script itself ended.
        steps: How many optimizer steps it took.
    """

    diagnosis: Diagnosis
    exit_code: int
    steps: int


class _Enough(BaseException):
    """The step in question has been explained; the rest of the script need not run."""


class _Run:
    """One run of a script in this process."""

    def __init__(self, path: Path, first: int, count: int | None, alone: bool) -> None:
        self.path = path
        self.first = first
        self.last = None if count is None else first + count
        self.alone = alone
        self.steps = 0
        self.bad_step: int | None = None
        self.main = types.ModuleType("__main__")
        self.tracing = Tracing(None, [self.main.__dict__], (str(path),))
        self.tracing.after_step = self._after_traced_step
        self.tracing.without_saves = any(word in path.read_bytes() for word in (b"torch.func", b"functorch"))

    def run(self, args: Sequence[str]) -> tuple[int, BaseException | None]:
        """Run the script to its end; give its exit code and what it raised."""
        path = self.path
        self.main.__dict__.update(__file__=str(path), __builtins__=__builtins__)
        saved = sys.argv, sys.path[0], sys.modules["__main__"]
        sys.argv, sys.path[0] = [str(path), *args], str(path.parent)
        sys.modules["__main__"] = self.main
        random.seed(_SEED)
        raised: BaseException | None = None
        exit_code = 0
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
            with io.open_code(str(path)) as file:
                code = compile(file.read(), str(path), "exec")
            exec(code, self.main.__dict__)
        except _Enough:
            exit_code = 0
        except SystemExit as error:
            exit_code = error.code if isinstance(error.code, int) else int(error.code is not None)
        except KeyboardInterrupt as error:
            _show(error)
            exit_code = 130
        except BaseException as error:  # noqa: BLE001 - the script's own fault, shown as Python shows it
            raised, exit_code = error, 1
        finally:
            torch.autograd.backward = backward
            self.tracing.__exit__(type(raised) if raised else None, raised, None)
            for hook in hooks:
                hook.remove()
            sys.argv, sys.path[0], sys.modules["__main__"] = saved
        return exit_code, raised

    def _noting_losses(self, backward: Callable[..., None]) -> Callable[..., None]:
        """Wrap torch.autograd.backward, which every backward pass calls, so that the losses are known."""
        self.tracing.own_losses = False

        @functools.wraps(backward)
        def noting(tensors: Any, *args: Any, **kwargs: Any) -> None:
            loss = tensors.detach() if isinstance(tensors, torch.Tensor) and tensors.numel() == 1 else None
            self.tracing.history.backward(loss, locate(sys._getframe(1)))
            backward(tensors, *args, **kwargs)

        return noting

    def _after_traced_step(self) -> None:
        if self.last is not None and self.first + self.tracing.steps >= self.last:
            self.tracing.pause()
            if self.alone:
                raise _Enough

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
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
        if self.steps == self.first and not self.tracing.tracing:
            self.tracing.resume()


def examine_script(
    path: str | os.PathLike[str],
    args: Sequence[str] = (),
    *,
    whole: bool = False,
    from_step: int | None = None,
    at_exit: Callable[[ScriptReport], None] | None = None,
) -> ScriptReport:
    """Run a script and say what is wrong with its training.

    Args:
        path: The script.
        args: Its arguments.
        whole: Trace all of it, from the start to the end.
        from_step: Trace only the optimizer step of this number, and end there.
        at_exit: Takes the report if the script ends the process itself, by `os._exit`; without it there is none then.

    Returns:
        The diagnosis, how the script ended and how many steps it took.

    Raises:
        ArgumentValueError: There is no such file.

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
    path = Path(path).resolve()
    if not path.is_file():
        raise ArgumentValueError(
            f"{path} is not a file.", why="the doctor runs a Python script.", fix="gradgate doctor train.py --epochs 1"
        )
    alone = from_step is not None
    run = _Run(path, from_step or 0, None if whole else 1 if alone else _STEPS_TRACED, alone)
    process = os.getpid()
    with _exits_told(run, at_exit):
        exit_code, raised = run.run(args)
    diagnosis = run.tracing.diagnosis
    if raised is not None and not alone:
        _show(raised)
    if os.getpid() != process:  # The script forked, and this is its child, which has come to its end.
        sys.exit(exit_code)
    if whole or alone:
        return ScriptReport(replace(diagnosis, exception=raised), exit_code, run.steps)
    step = run.bad_step if run.bad_step is not None else run.steps if raised is not None else None
    explained = any(finding.code.startswith(("GG4", "GG502")) for finding in diagnosis.at_least("error"))
    if step is not None and step >= _STEPS_TRACED and not (explained and raised is None):
        again = _again(path, args, step, raised)
        drawn = again if again.graph is not None else diagnosis
        diagnosis = replace(drawn, findings=fold((*diagnosis.findings, *again.findings)))
    return ScriptReport(replace(diagnosis, exception=raised), exit_code, run.steps)


@contextmanager
def _exits_told(run: _Run, at_exit: Callable[[ScriptReport], None] | None) -> Iterator[None]:
    """Give the report before `os._exit`, after which nothing runs any more; children of the script just end."""
    leave, process = os._exit, os.getpid()

    def leave_told(status: int) -> NoReturn:
        try:
            if at_exit is not None and os.getpid() == process:
                os._exit = leave
                run.tracing.__exit__(None, None, None)
                at_exit(ScriptReport(run.tracing.diagnosis, status, run.steps))
                sys.stdout.flush()
                sys.stderr.flush()
        finally:
            leave(status)

    os._exit = leave_told
    try:
        yield
    finally:
        os._exit = leave


def _show(error: BaseException) -> None:
    """Print a traceback as Python does, from the script's own frame on."""
    inner = error.__traceback__.tb_next if error.__traceback__ is not None else None
    sys.stderr.write(visible("".join(traceback.format_exception(type(error), error, inner)), lines=True))


def _again(path: Path, args: Sequence[str], step: int, raised: BaseException | None) -> Diagnosis:
    """Run the script in a new process, trace one step and give what was found."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        command = [sys.executable, "-m", "gradgate", "doctor", "--from-step", str(step), "--json", str(report)]
        subprocess.run(
            [*command, str(path), *args],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            stdin=subprocess.DEVNULL,
            env=dict(os.environ),
            check=False,
        )
        told = json.loads(report.read_text(encoding="utf-8")) if report.exists() else Diagnosis().to_dict()
    findings = tuple(
        Finding(**{**finding, **{key: tuple(finding[key]) for key in ("samples", "also", "consequences")}})
        for finding in told["findings"]
    )
    diagnosis = Diagnosis(findings, None, told["graph"], tuple(told["layers"]))
    if diagnosis.at_least("error"):
        return diagnosis
    happened = f"raised {type(raised).__name__}" if raised is not None else "had a gradient that is not finite"
    differing = Finding(
        code="GG005",
        severity="error",
        title=f"step {step} {happened}, but not when the script ran again",
        reason="The two runs were not the same: something in the script is random and not seeded, or depends on "
        "files, time or other machines.",
        fix="torch.manual_seed(0); random.seed(0); np.random.seed(0)     # at the start of the script, or: --trace",
    )
    return replace(diagnosis, findings=(*findings, differing))
