"""What the user wrote that leaves no operation behind: `.data`, `.item()`, `no_grad`, `backward`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch

from gradgate._source import is_foreign
from gradgate._torch_compat import write_grad_mode
from gradgate.doctor._backwards import run_backward
from gradgate.doctor._trace import Escape, Switch

if TYPE_CHECKING:
    from gradgate.doctor._tracer import Tracer


Handler = Callable[["Tracer", Any, tuple[Any, ...], dict[str, Any]], Any]


def _named(name: str) -> Handler:
    """Make a handler that lets the operations of a call know what the user wrote."""

    def handler(tracer: Tracer, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        tracer.call = name
        try:
            return func(*args, **kwargs)
        finally:
            tracer.call = ""

    return handler


def _escape(kind: str) -> Handler:
    """Make a handler that notes that a value leaves torch."""

    def handler(tracer: Tracer, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        tensor = args[0]
        value = tracer.values.of(tensor)
        trace = tracer.trace
        trace.escapes.append(Escape(kind, value, tracer.here(), len(trace.ops)))
        return _named(kind)(tracer, func, args, kwargs)

    return handler


def _detach_in_place(tracer: Tracer, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    codes: list[int] = []
    tracer.values.read(args[0], codes)
    result = func(*args, **kwargs)
    tracer.note_detached(args[0], codes[-1])
    return result


def _switch(tracer: Tracer, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    on, by = bool(args[0]), _switched_by()
    trace = tracer.trace
    if ".__exit__" in by:
        tracer.off_switch = tracer.off_switches.pop() if tracer.off_switches else -1
    else:
        tracer.off_switches.append(tracer.off_switch)
        if on or tracer.off_switch < 0:
            tracer.off_switch = -1 if on else len(trace.switches)
    trace.switches.append(Switch(on, tracer.here(), by))
    return func(*args, **kwargs)


def _switched_by() -> str:
    """Name the functions of torch between the user and the switch."""
    names = []
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and is_foreign(frame.f_code.co_filename):
        names.append(frame.f_code.co_qualname)
        frame = frame.f_back
    return " < ".join(name for name in names if not name.startswith(("_Calls.", "Tracer.")))


def _backward(tracer: Tracer, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return run_backward(tracer, [args[0]], None, lambda: func(*args, **kwargs), kwargs)


def _grad(tracer: Tracer, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    outputs, inputs = (*args, kwargs.get("outputs"), kwargs.get("inputs"))[:2]
    wanted = [inputs] if isinstance(inputs, torch.Tensor) else list(inputs or ())
    started = [outputs] if isinstance(outputs, torch.Tensor) else list(outputs or ())
    result = run_backward(tracer, started, tuple(id(x) for x in wanted), lambda: func(*args, **kwargs), kwargs)
    missing = frozenset(id(x) for x, gradient in zip(wanted, result, strict=True) if gradient is None)
    tracer.trace.backwards[-1].missing = missing
    return result


CALLS: dict[Any, Handler] = {
    torch.Tensor.data.__get__: _named("data"),  # type: ignore[attr-defined]
    torch.Tensor.detach: _named("detach"),
    torch.Tensor.detach_: _detach_in_place,
    torch.tensor: _named("torch.tensor"),
    torch.Tensor.item: _escape("item"),
    torch.Tensor.tolist: _escape("tolist"),
    torch.Tensor.numpy: _escape("numpy"),
    torch.Tensor.__array__: _escape("numpy"),
    torch.Tensor.__float__: _escape("float"),
    torch.Tensor.__int__: _escape("int"),
    torch.Tensor.requires_grad_: _escape("requires_grad_"),
    torch.Tensor.requires_grad.__set__: _escape("requires_grad"),  # type: ignore[attr-defined]
    torch.Tensor.backward: _backward,
    torch.autograd.grad: _grad,
    write_grad_mode: _switch,
}
