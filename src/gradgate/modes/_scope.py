"""`grad_mode`: one switch in all its forms; and `carry_mode`, which takes the mode along to another thread."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from types import TracebackType
from typing import Any, ParamSpec, TypeVar, overload

import torch
from torch.compiler import is_dynamo_compiling

from gradgate._names import describe
from gradgate._torch_compat import read_grad_mode, write_grad_mode
from gradgate.errors import ArgumentTypeError
from gradgate.modes._driving import DEFERRED, drive, in_scope
from gradgate.modes._entries import current, is_locked
from gradgate.modes._lock import close_lock, locks, open_lock
from gradgate.modes._tasks import bind_task, bound_tasks, release_task, running_loop

__all__ = ["carry_mode", "grad_mode"]

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


# One item for each unlocked entry that was pushed, in any thread: mostly there is none.
_unlocked_entries: list[None] = []


class _Scope:
    """A mode, ready to be entered; what to restore is kept apart, so one object serves everybody."""

    __slots__ = ("flag",)
    locked = False

    def __init__(self, flag: bool) -> None:
        self.flag = flag

    def __enter__(self) -> None:
        # The short way, outside of locks and loops and from a mode that records, has nothing to remember; it is not
        # taken while anybody has something to remember, so that __exit__ can tell the two apart.
        if locks or _unlocked_entries or running_loop() is not None or not read_grad_mode():
            _unlocked_entries.append(None)
            _push(self)
        write_grad_mode(self.flag)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if _unlocked_entries and current.entries and current.entries[-1][2] is self:
            _unlocked_entries.pop()
            _pop()
        else:
            write_grad_mode(True)

    def __call__(self, fn: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
        _check_decorated(fn, self.flag)
        return in_scope(self, fn)

    def __repr__(self) -> str:
        return f"grad_mode({self.flag}, locked={self.locked})"


class _LockedScope(_Scope):
    """The same, and a bare `torch.set_grad_enabled(...)` inside does not change the mode."""

    __slots__ = ()
    locked = True

    def __enter__(self) -> None:
        open_lock()
        _push(self)
        write_grad_mode(self.flag)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _pop()
        close_lock()


def _push(scope: _Scope) -> None:
    if running_loop() is not None:
        bind_task()
    current.entries.append((read_grad_mode(), scope.locked, scope))


def _pop() -> None:
    entries = current.entries
    # There is none when a paused generator is thrown away and whoever finds it closes its blocks.
    if entries:
        write_grad_mode(entries.pop()[0])
    if not entries and bound_tasks:
        release_task()


_ON, _OFF = _Scope(True), _Scope(False)
_LOCKED_ON, _LOCKED_OFF = _LockedScope(True), _LockedScope(False)


class _TracedScope:
    """The same inside `torch.compile`, where Dynamo follows the switch; there are no threads, tasks or locks there."""

    def __init__(self, flag: bool) -> None:
        self.flag = flag

    def __enter__(self) -> None:
        self.recording = read_grad_mode()
        write_grad_mode(self.flag)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        write_grad_mode(self.recording)


@overload
def grad_mode(flag: bool, fn: None = None, *, locked: bool = True) -> _Scope: ...
@overload
def grad_mode(flag: bool, fn: Callable[[], Result], *, locked: bool = True) -> Result: ...
def grad_mode(flag: bool, fn: Callable[[], Any] | None = None, *, locked: bool = True) -> Any:
    """Switch gradient recording by a flag, for one call, one block or one function, and restore it afterwards.

    `grad_mode(flag, fn)` runs `fn()` in the mode and gives its result; `with grad_mode(flag):` is the same as a block;
    `@grad_mode(flag)` the same on a function, generator, `async def` or async generator.

    The mode that was in force comes back also when the body raises. Blocks nest and the innermost wins; one object may
    be reused, nested in itself and shared between threads. The mode belongs to this thread - and inside asyncio to this
    task: another task never sees it, not even while this one awaits. As with `torch.no_grad()`, factory functions with
    `requires_grad=True` and forward-mode AD are not affected.

    Args:
        flag: True to record, False not to. Only a bool: a module, a string or a number would be a guess.
        fn: What to run. If it gives a generator or a coroutine, that runs in the mode too, whenever it is stepped.
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
        if is_dynamo_compiling():
            return _TracedScope(flag)
        if locked:
            return _LOCKED_ON if flag else _LOCKED_OFF
        return _ON if flag else _OFF
    try:
        if locked or locks:
            with grad_mode(flag, locked=locked):
                result = fn()
        else:
            # The same in one piece: nothing can be awaited in between, and nobody else holds this entry.
            recording = read_grad_mode()
            write_grad_mode(flag)
            try:
                result = fn()
            finally:
                write_grad_mode(recording)
    except TypeError:
        # Looked at only now: the check would be a tenth of the whole call.
        if callable(fn):
            raise
        raise ArgumentTypeError(
            f"grad_mode(): `fn` is {describe(fn)}.",
            why="it is called in the mode, so it has to be a function, not what one has already given.",
            fix=f"gg.grad_mode({flag}, lambda: model(x))",
        ) from None
    if type(result) in DEFERRED:
        return drive(grad_mode(flag, locked=locked), result)
    return result


def carry_mode(fn: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Make a function run in this thread's mode wherever it is called.

    Modes belong to threads: what an executor or a thread runs starts with recording on, whatever holds here. The
    function that this gives can be pickled if fn can.

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
        raise ArgumentTypeError(
            f"carry_mode(): `fn` is {describe(fn)}.",
            why="it is called later, in another thread, so it has to be a function.",
            fix="executor.submit(gg.carry_mode(model), x)   # not gg.carry_mode(model(x))",
        )
    return functools.update_wrapper(functools.partial(_run_carried, fn, read_grad_mode(), is_locked()), fn)


def _run_carried(fn: Callable[..., Any], flag: bool, locked: bool, /, *args: Any, **kwargs: Any) -> Any:
    return grad_mode(flag, functools.partial(fn, *args, **kwargs), locked=locked)


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
        fix = _as_flag(flag)
    return ArgumentTypeError(
        f"grad_mode(): `flag` is {describe(flag)}.",
        why="recording is either on or off; anything but True or False would be a guess.",
        fix=fix,
    )


_NO = {"", "0", "false", "no", "off", "none", "eval", "val", "valid", "validation", "test", "predict", "inference"}


def _as_flag(flag: object) -> str:
    try:
        return f"gg.grad_mode({bool(flag)})"
    except (TypeError, ValueError, RuntimeError):  # a tensor or an array of several
        return ""


def _check_decorated(fn: object, flag: bool) -> None:
    if inspect.isclass(fn):
        raise ArgumentTypeError(
            f"@grad_mode({flag}) stands on {describe(fn)}.",
            why="it could mean its constructor or all of its methods.",
            fix=f"@gg.grad_mode({flag})\ndef forward(self, x): ...   # on each method that is meant",
        )
    if isinstance(fn, classmethod | staticmethod):
        names = ", ".join(inspect.signature(fn.__func__).parameters)
        raise ArgumentTypeError(
            f"@grad_mode({flag}) stands on a {type(fn).__name__}.",
            why="that is not a function yet.",
            fix=f"@{type(fn).__name__}\n@gg.grad_mode({flag})\ndef {fn.__func__.__name__}({names}): ...",
        )
    if not callable(fn):
        raise ArgumentTypeError(
            f"@grad_mode({flag}) was given {describe(fn)}.",
            why="only a function can be decorated.",
            fix=f"gg.grad_mode({flag}, lambda: model(x))   # or: with gg.grad_mode({flag}): ...",
        )
