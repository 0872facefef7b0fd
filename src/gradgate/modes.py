"""Is autograd recording? `grad_mode` switches it by a flag: as a call, a block or a decorator, and restores it.

An entry is made when a mode is entered: what was in force before, and whether the new mode is locked. So the modes
themselves have no state: one object can be reused, nested in itself and shared, and blocks that end out of order
still leave in the end what was there in the beginning.

**The lock.** `torch.set_grad_enabled` switches in its constructor, before anybody can say whether it is a block or
a bare call. While at least one lock is alive anywhere, its constructor is replaced by one that, in a locked thread,
only notes what was asked for. Blocks and decorators still work, because they switch in `__enter__`. torch's own
bare calls (`optimizer.step()`, `no_grad.__enter__`) pass: they come in pairs that restore.

**What pauses** in the middle of a thread - a generator, a coroutine, a task - has a mode and entries of its own, in
force only while it runs. A block held over an `await` belongs to its asyncio task; `Handle._run` says when a task
pauses, and is wrapped only as long as such a block is open. Loops without asyncio's own handles (uvloop) are not
covered.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import sys
import threading
import types
from asyncio import _get_running_loop as running_loop
from collections.abc import AsyncGenerator, Callable, Generator
from typing import Any, ParamSpec, TypeVar, overload

import torch
from torch import is_grad_enabled, set_grad_enabled
from torch.compiler import is_dynamo_compiling

from gradgate._checks import wrong_type
from gradgate._names import describe, suggest_names
from gradgate._torch_private import write_grad_mode
from gradgate.errors import ArgumentTypeError

__all__ = ["carry_mode", "grad_mode"]


# --- What is to be restored -----------------------------------------------------------------------------------------


Task = asyncio.Task[Any]
Entry = tuple[bool, bool]
"""Whether autograd recorded before, and whether the mode entered is locked."""


class _Current(threading.local):
    """The entries in force in this thread, and the strand that they belong to, if it is not the thread itself."""

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self.strand: Strand | None = None


current = _Current()


def is_locked() -> bool:
    """Return whether the innermost mode in force here is locked."""
    return bool(current.entries) and current.entries[-1][1]


# --- The lock -------------------------------------------------------------------------------------------------------


locks: list[None] = []
"""One item for each lock that is alive in any thread."""
_switch_at_once = set_grad_enabled.__init__


def _note_only_when_locked(self: set_grad_enabled, mode: bool) -> None:
    if is_locked() and sys._getframe(1).f_globals.get("__name__", "").partition(".")[0] != "torch":
        self.prev = is_grad_enabled()
        self.mode = mode
    else:
        _switch_at_once(self, mode)


def open_lock() -> None:
    locks.append(None)
    _follow_locks()


def close_lock() -> None:
    locks.pop()
    _follow_locks()


def _follow_locks() -> None:
    """Replace torch's constructor with the first lock, and restore it with the last one anywhere."""
    # Without a mutex, which an interrupt could leave locked for ever. Whoever writes looks again afterwards, so that
    # the last one to write, whatever threads did in between, has seen that it fits.
    while (set_grad_enabled.__init__ is _note_only_when_locked) is not bool(locks):
        set_grad_enabled.__init__ = _note_only_when_locked if locks else _switch_at_once  # type: ignore[method-assign]


# --- What pauses: generators, coroutines, tasks ---------------------------------------------------------------------


class Strand:
    """One flow of execution: entered when it goes on, left when it pauses."""

    # `loop` is the event loop that it last went on in, if any: a task of a loop further in is not inside this strand.
    # `task` is the task that it is, if it is one.

    __slots__ = ("_around", "_locked", "_outer", "_own", "loop", "task")

    def __init__(self, recording: bool, entries: list[Entry], locked: bool, task: Task | None = None) -> None:
        self._own = recording, entries
        self._locked = locked
        self.task = task

    def __enter__(self) -> None:
        if self._locked:
            open_lock()
        self.loop = running_loop()
        self._around = current.strand
        self._outer = is_grad_enabled(), current.entries
        current.strand = self
        write_grad_mode(self._own[0])
        current.entries = self._own[1]

    def __exit__(self, *_: object) -> None:
        self._own = is_grad_enabled(), current.entries
        current.strand = self._around
        write_grad_mode(self._outer[0])
        current.entries = self._outer[1]
        if self._locked:
            close_lock()


# --- Blocks held over an await --------------------------------------------------------------------------------------


bound_tasks: dict[Task, Strand] = {}
"""The tasks that hold a block."""
_changing = threading.Lock()
_run_handle = asyncio.Handle._run


def bind_task() -> None:
    """Make the running task a strand of its own, unless it is in one: it is about to enter a block."""
    task = asyncio.current_task()
    if task is None or (current.strand is not None and current.strand.loop is running_loop()):
        return
    strand = Strand(is_grad_enabled(), [], False, task)
    strand.__enter__()
    with _changing:
        bound_tasks[task] = strand
        asyncio.Handle._run = _run_in_its_mode  # type: ignore[assignment, method-assign]


def release_task() -> None:
    """Take the running task out of its strand, if it is in one: it has left its last block."""
    strand = current.strand
    if strand is None or strand.task is None:
        return
    strand.__exit__()
    with _changing:
        del bound_tasks[strand.task]
        if not bound_tasks:
            asyncio.Handle._run = _run_handle  # type: ignore[method-assign]


def _run_in_its_mode(handle: asyncio.Handle) -> None:
    # The step in which a task opened its first block began outside of this wrapper: nobody has paused it yet.
    _pause_task()
    # Each step of a task is a bound method of it, the first one and the wake-ups alike.
    task = getattr(handle._callback, "__self__", None)  # type: ignore[attr-defined]
    strand = bound_tasks.get(task) if isinstance(task, asyncio.Task) else None
    if strand is not None:
        strand.__enter__()
    try:
        _run_handle(handle)
    finally:
        _pause_task()


def _pause_task() -> None:
    if current.strand is not None and current.strand.task is not None:
        current.strand.__exit__()


# --- Functions of every kind ----------------------------------------------------------------------------------------


Function = Callable[..., Any]

DEFERRED = (types.GeneratorType, types.CoroutineType, types.AsyncGeneratorType)
"""What a call can give back before its body has run."""


def in_scope(scope: _Scope, fn: Function) -> Function:
    """Wrap a function of any kind so that its body runs in the mode."""
    for is_kind, wrap in zip(_IS_KIND, _WRAP_KIND, strict=True):
        if is_kind(fn):
            return wrap(scope, fn)

    @functools.wraps(fn)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return run_in(scope, fn, *args, **kwargs)

    return wrapped


def run_in(scope: Any, fn: Function, /, *args: Any, **kwargs: Any) -> Any:
    """Call a function in the mode; a generator or coroutine that it returns runs in the mode, too, step by step."""
    with scope:
        result = fn(*args, **kwargs)
    if type(result) not in DEFERRED:
        return result
    return _WRAP_KIND[DEFERRED.index(type(result))](scope, lambda: result)()


def _strand(scope: _Scope) -> Strand:
    # The first entry stands for the scope itself: what the body enters and leaves comes above it.
    return Strand(scope.flag, [(scope.flag, scope.locked)], scope.locked)


def _steps(strand: Strand, inner: Any) -> Generator[Any, Any, Any]:
    """Pass values, exceptions and close on to something that has send, throw and close, each in its strand."""
    resume: Callable[[], Any] = functools.partial(inner.send, None)
    while True:
        try:
            with strand:
                given = resume()
        except StopIteration as stop:
            return stop.value
        try:
            sent = yield given
        except GeneratorExit:
            with strand:
                inner.close()
            raise
        except BaseException as error:  # noqa: BLE001 - handed to the body, which decides
            resume = functools.partial(inner.throw, error)
        else:
            resume = functools.partial(inner.send, sent)


# What a coroutine awaits is stepped by send, throw and close too.
_awaited_steps = types.coroutine(_steps)


def _generator_in(scope: _Scope, fn: Function) -> Function:
    @functools.wraps(fn)
    def wrapped(*args: Any, **kwargs: Any) -> Generator[Any, Any, Any]:
        return (yield from _steps(_strand(scope), fn(*args, **kwargs)))

    return wrapped


def _coroutine_in(scope: _Scope, fn: Function) -> Function:
    @functools.wraps(fn)
    async def wrapped(*args: Any, **kwargs: Any) -> Any:
        return await _awaited_steps(_strand(scope), fn(*args, **kwargs))

    return wrapped


def _async_generator_in(scope: _Scope, fn: Function) -> Function:
    @functools.wraps(fn)
    async def wrapped(*args: Any, **kwargs: Any) -> AsyncGenerator[Any, Any]:
        inner, strand = fn(*args, **kwargs), _strand(scope)
        step = inner.asend(None)
        while True:
            try:
                given = await _awaited_steps(strand, step)
            except StopAsyncIteration:
                return
            try:
                sent = yield given
            except GeneratorExit:
                await _awaited_steps(strand, inner.aclose())
                raise
            except BaseException as error:  # noqa: BLE001 - handed to the body, which decides
                step = inner.athrow(error)
            else:
                step = inner.asend(sent)

    return wrapped


_IS_KIND = (inspect.isgeneratorfunction, inspect.iscoroutinefunction, inspect.isasyncgenfunction)
_WRAP_KIND = (_generator_in, _coroutine_in, _async_generator_in)


# --- What users call ------------------------------------------------------------------------------------------------


Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


class _Scope:
    """A mode, ready to be entered; what to restore is kept apart, so one object serves everybody."""

    # In a lock, a bare `torch.set_grad_enabled(...)` does not change the mode.

    __slots__ = ("flag", "locked")

    def __init__(self, flag: bool, locked: bool) -> None:
        self.flag = flag
        self.locked = locked

    def __enter__(self) -> None:
        if self.locked:
            open_lock()
        if running_loop() is not None:
            bind_task()
        current.entries.append((is_grad_enabled(), self.locked))
        write_grad_mode(self.flag)

    def __exit__(self, *_: object) -> None:
        entries = current.entries
        # There is none when a paused generator is thrown away and whoever finds it closes its blocks.
        if entries:
            write_grad_mode(entries.pop()[0])
        if not entries and bound_tasks:
            release_task()
        if self.locked:
            close_lock()

    def __call__(self, fn: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
        _check_decorated(fn, self.flag)
        return in_scope(self, fn)

    def __repr__(self) -> str:
        return f"grad_mode({self.flag}, locked={self.locked})"


_SCOPES = {(flag, locked): _Scope(flag, locked) for flag in (True, False) for locked in (True, False)}


@overload
def grad_mode(flag: bool, fn: None = None, *, locked: bool = True) -> _Scope: ...
@overload
def grad_mode(flag: bool, fn: Callable[[], Result], *, locked: bool = True) -> Result: ...
def grad_mode(flag: bool, fn: Callable[[], Any] | None = None, *, locked: bool = True) -> Any:
    """Switch gradient recording by a flag, for one call, one block or one function, and restore it afterwards.

    `grad_mode(flag, fn)` runs `fn()` in the mode and returns its result; `with grad_mode(flag):` does the
    same for a block, `@grad_mode(flag)` for a function, generator, `async def` or async generator.

    The mode that was in force comes back also when the body raises. Blocks nest, and one object may be reused, nested
    in itself and shared between threads. The mode belongs to this thread, and inside asyncio to this task, also while
    it awaits. As with `torch.no_grad()`, factory functions with `requires_grad=True` and forward-mode AD are not
    affected.

    Args:
        flag: True to record, False not to. Only a bool: a module, a string or a number would be a guess.
        fn: What to run. If it returns a generator or a coroutine, that runs in the mode too, whenever it is stepped.
        locked: While the mode is in force, a bare `torch.set_grad_enabled(...)` call in this thread, whoever makes it,
            does not change it; blocks and decorators inside still work as such. False gives torch's own behaviour, also
            for a stretch inside a lock.

    Returns:
        What fn returned; without fn the mode itself, to be used as a block or a decorator.

    Raises:
        ArgumentTypeError: The flag is not a bool, fn cannot be called, or a class was decorated.

    Examples:
        >>> weight = torch.ones(2, requires_grad=True)
        >>> gg.grad_mode(False, lambda: (weight * 2).requires_grad)
        False
        >>> with gg.grad_mode(False):
        ...     _ = torch.set_grad_enabled(True)  # somebody's bare call: locked, no effect
        ...     print((weight * 2).requires_grad)
        False
    """
    if flag is not True and flag is not False:
        raise _flag_error(flag)
    if fn is None:
        if is_dynamo_compiling():  # which follows torch's own modes; there are no threads, tasks or locks there
            return torch.enable_grad() if flag else torch.no_grad()
        return _SCOPES[flag, bool(locked)]
    if not callable(fn):
        why = "it is called in the mode, so it has to be a function, not what one has returned."
        raise wrong_type(fn, "fn", "grad_mode", why, f"gg.grad_mode({flag}, lambda: model(x))")
    return run_in(grad_mode(flag, locked=locked), fn)


def carry_mode(fn: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Make a function run in this thread's mode wherever it is called.

    Modes belong to threads: what an executor or a thread runs starts with recording on, whatever holds here. The
    returned function can be pickled if fn can.

    Args:
        fn: A function of any kind.

    Returns:
        A function that runs fn in the mode (and the lock) that was in force when `carry_mode` was called.

    Raises:
        ArgumentTypeError: fn cannot be called.

    Examples:
        >>> from concurrent.futures import ThreadPoolExecutor
        >>> weight = torch.ones(2, requires_grad=True)
        >>> with ThreadPoolExecutor(1) as pool, gg.grad_mode(False):
        ...     pool.submit(gg.carry_mode(lambda: (weight * 2).requires_grad)).result()
        False
    """
    if not callable(fn):
        why = "it is called later, in another thread, so it has to be a function."
        fix = "executor.submit(gg.carry_mode(model), x)   # not gg.carry_mode(model(x))"
        raise wrong_type(fn, "fn", "carry_mode", why, fix)
    return functools.update_wrapper(functools.partial(run_in, _SCOPES[is_grad_enabled(), is_locked()], fn), fn)


def _flag_error(flag: object) -> ArgumentTypeError:
    if isinstance(flag, torch.nn.Module):
        fix = "gg.grad_mode(model.training)"
    elif isinstance(flag, str):  # bool("False") is True
        fix = f"gg.grad_mode({flag.strip().lower() not in _NO})"
    elif inspect.isroutine(flag):
        fix = "@gg.grad_mode(False)   # the decorator needs its flag, also where it is the only argument"
    elif flag is None:
        fix = "gg.grad_mode(False)   # or True"
    else:
        try:
            fix = f"gg.grad_mode({bool(flag)})"
        except (TypeError, ValueError, RuntimeError):  # a tensor or an array of several
            fix = ""
    why = "recording is either on or off; anything but True or False would be a guess."
    return wrong_type(flag, "flag", "grad_mode", why, fix)


_NO = {"", "0", "false", "no", "off", "none", "eval", "val", "valid", "validation", "test", "predict", "inference"}


def _check_decorated(fn: object, flag: bool) -> None:
    mode = f"gg.grad_mode({flag})"
    if inspect.isclass(fn):
        what, why = f"stands on {describe(fn)}", "it could mean its constructor or all of its methods."
        fix = f"@{mode}\ndef forward(self, x): ...   # on each method that is meant"
    elif isinstance(fn, (classmethod, staticmethod)):
        what, why = f"stands on a {type(fn).__name__}", "that is not a function yet."
        names = ", ".join(inspect.signature(fn.__func__).parameters)
        fix = f"@{type(fn).__name__}\n@{mode}\ndef {fn.__func__.__name__}({names}): ..."
    elif not callable(fn):
        what, why = f"was given {describe(fn)}", "only a function can be decorated."
        fix = f"gg.grad_mode({flag}, lambda: model(x))   # or: with {mode}: ..."
    else:
        return
    raise ArgumentTypeError(f"@grad_mode({flag}) {what}.", why=why, fix=fix)


suggest_names(__name__)
