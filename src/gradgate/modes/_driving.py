"""Functions of every kind in a mode: what pauses (generators, coroutines) has it only while it runs.

The mode is entered at each step and left at each pause, so that whoever runs in between never sees it.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import AsyncGenerator, Callable, Generator
from typing import Any, Protocol

from gradgate.modes._strands import Strand

__all__ = ["DEFERRED", "drive", "in_scope"]

Function = Callable[..., Any]

DEFERRED = frozenset({types.GeneratorType, types.CoroutineType, types.AsyncGeneratorType})
"""What a call can give back before its body has run."""


class Scope(Protocol):
    """A mode: it can be entered any number of times."""

    @property
    def flag(self) -> bool: ...
    @property
    def locked(self) -> bool: ...
    def __enter__(self) -> None: ...
    def __exit__(self, *_: Any) -> None: ...


def in_scope(scope: Scope, fn: Function) -> Function:
    """Wrap a function of any kind so that its body runs in the mode.

    Args:
        scope: The mode.
        fn: A function, generator function, `async def`, async generator function, or any other callable.

    Returns:
        A function of the same kind.
    """
    if inspect.iscoroutinefunction(fn):
        return _coroutine_in(scope, fn)
    if inspect.isasyncgenfunction(fn):
        return _async_generator_in(scope, fn)
    if inspect.isgeneratorfunction(fn):
        return _generator_in(scope, fn)

    @functools.wraps(fn)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        with scope:
            result = fn(*args, **kwargs)
        return drive(scope, result) if type(result) in DEFERRED else result

    return wrapped


def drive(scope: Scope, deferred: Any) -> Any:
    """Run a generator, a coroutine or an async generator in the mode, step by step.

    Args:
        scope: The mode.
        deferred: One of the kinds in DEFERRED.

    Returns:
        One of the same kind.
    """
    kinds = {types.GeneratorType: _generator_in, types.CoroutineType: _coroutine_in}
    wrap = kinds.get(type(deferred), _async_generator_in)
    return wrap(scope, lambda: deferred)()


def _strand(scope: Scope) -> Strand:
    # The first entry stands for the scope itself: what the body enters and leaves comes above it.
    return Strand(scope.flag, [(scope.flag, scope.locked, None)], locked=scope.locked)


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


def _generator_in(scope: Scope, fn: Function) -> Function:
    @functools.wraps(fn)
    def wrapped(*args: Any, **kwargs: Any) -> Generator[Any, Any, Any]:
        return (yield from _steps(_strand(scope), fn(*args, **kwargs)))

    return wrapped


def _coroutine_in(scope: Scope, fn: Function) -> Function:
    @functools.wraps(fn)
    async def wrapped(*args: Any, **kwargs: Any) -> Any:
        return await _awaited_steps(_strand(scope), fn(*args, **kwargs))

    return wrapped


def _async_generator_in(scope: Scope, fn: Function) -> Function:
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
