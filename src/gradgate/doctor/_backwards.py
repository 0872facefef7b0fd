"""Backward passes: what they started from, which nodes they walk, and where a gradient went bad or became zero.

Each node is given a hook that sees what came in and what went out. That costs less than seeing every operation of
backward, and it says more: a node whose incoming gradient is finite and whose outgoing one is not is where it was
born, whatever it computed inside.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch

from gradgate._torch_compat import (
    current_node,
    function_class_of,
    node_number,
    nodes_below,
    saved_tensors_of,
    undispatched,
)
from gradgate.doctor._looking import bad_kind, bad_rows, inputs_at, is_all_zero, is_readable, is_suspicious, total
from gradgate.doctor._trace import Backward, BadValue, ZeroGradient
from gradgate.doctor._ways import Way, ways_of

if TYPE_CHECKING:
    from gradgate.doctor._tracer import Tracer


# Nodes that only pass on what they are given, in another shape or place: nothing is born in them.
_CARRIERS = (
    *("AccumulateGrad", "TBackward", "ViewBackward", "TransposeBackward", "PermuteBackward", "UnsqueezeBackward"),
    *(
        "SqueezeBackward",
        "ReshapeAliasBackward",
        "UnsafeViewBackward",
        "AliasBackward",
        "CloneBackward",
        "ExpandBackward",
    ),
)

_AUTOGRAD_BACKWARD = torch.autograd.backward.__code__


def run_backward(
    tracer: Tracer,
    tensors: list[torch.Tensor],
    inputs: tuple[int, ...] | None,
    run: Callable[[], Any],
    options: dict[str, Any],
) -> Any:
    """Run a backward pass and write it down."""
    backward = _start(tracer, tensors, inputs)
    handles = _hook_nodes(tracer, backward, tensors)
    # The operations of backward need not be seen, unless they make a graph of their own.
    hidden = not options.get("create_graph") and tracer.can_hide()
    if hidden:
        tracer.hide()
    try:
        return run()
    finally:
        backward.running = False
        if hidden:
            tracer.show()
        if options.get("retain_graph") or options.get("create_graph"):
            for handle in handles:
                handle.remove()


def start_late(tracer: Tracer) -> Backward:
    """Write down a backward pass that was started by `torch.autograd.backward`, which no mode sees."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not _AUTOGRAD_BACKWARD:
        frame = frame.f_back
    given = frame.f_locals.get("tensors", ()) if frame is not None else ()
    tensors = [given] if isinstance(given, torch.Tensor) else [x for x in given if isinstance(x, torch.Tensor)]
    backward = _start(tracer, tensors, None)
    _hook_nodes(tracer, backward, tensors)
    return backward


def _start(tracer: Tracer, tensors: list[torch.Tensor], inputs: tuple[int, ...] | None) -> Backward:
    codes: list[int] = []
    for tensor in tensors:
        tracer.values.read(tensor, codes)
    trace = tracer.trace
    with undispatched():
        numbers = [total(t.detach()) for t in tensors if is_readable(t)]
    loss = float(sum(x.real for x in numbers)) if numbers else None
    backward = Backward(tuple(codes), tracer.here(), len(trace.ops), loss, inputs=inputs)
    trace.backwards.append(backward)
    return backward


def _hook_nodes(tracer: Tracer, backward: Backward, tensors: list[torch.Tensor]) -> list[Any]:
    handles = []
    numbers = set()
    nodes = list(nodes_below(tensors))
    ways = ways_of(tracer.trace, nodes, [tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None])
    for node in nodes:
        name = node.name()
        number = node_number(node)
        numbers.add(number)
        function = function_class_of(node)
        if function is not None:
            backward.functions[number] = function
        mine = ways.get(node, {})
        if -1 in mine:
            handles.append(node.register_prehook(_LookAtStart(mine.pop(-1))))
        if not name.startswith(_CARRIERS):
            handles.append(node.register_hook(_Look(tracer, number, name, mine)))
        elif mine:
            handles.append(node.register_hook(_LookAtCarrier(mine)))
    backward.nodes = frozenset(numbers)
    return handles


class _LookAtStart:
    """The hook of a node that a pass starts from inside a module: the gradient comes from the loss."""

    __slots__ = ("way",)

    def __init__(self, way: Way) -> None:
        self.way = way

    def __call__(self, incoming: tuple[Any, ...]) -> None:
        with undispatched():
            for tensor in incoming:
                if tensor is not None:
                    self.way.note(tensor)


class _LookAtCarrier:
    """The hook of a node in which nothing is born, where it sends a gradient from one module to another."""

    __slots__ = ("ways",)

    def __init__(self, ways: dict[int, Way]) -> None:
        self.ways = ways

    def __call__(self, outgoing: tuple[Any, ...], incoming: tuple[Any, ...]) -> None:
        with undispatched():
            for place, way in self.ways.items():
                if outgoing[place] is not None:
                    way.note(outgoing[place])


class _Look:
    """The hook of one node."""

    __slots__ = ("name", "number", "tracer", "ways")

    def __init__(self, tracer: Tracer, number: int, name: str, ways: dict[int, Way]) -> None:
        self.tracer = tracer
        self.number = number
        self.name = name
        self.ways = ways

    def __call__(self, outgoing: tuple[Any, ...], incoming: tuple[Any, ...]) -> None:
        with undispatched():
            for place, tensor in enumerate(outgoing):
                if tensor is None:
                    continue
                way = self.ways.get(place)
                # The norm says as much as the sum: it is not finite or zero where an element is bad or all are zero.
                amount: float | complex | None = way.note(tensor) if way is not None else None
                if not is_readable(tensor):
                    continue
                if amount is None:
                    amount = total(tensor)
                if amount - amount != 0:
                    self._maybe_bad(tensor, incoming)
                elif amount == 0:
                    self._maybe_zero(tensor, incoming)

    def _maybe_bad(self, tensor: torch.Tensor, incoming: tuple[Any, ...]) -> None:
        if any(x is not None and is_suspicious(x) for x in incoming):
            return
        kind = bad_kind(tensor)
        if kind is None:
            return
        trace = self.tracer.trace
        op = trace.op_number_of_node.get(self.number, -1)
        saved = saved_tensors_of(current_node())
        source = next((value for x in saved.values() if (value := self.tracer.births.value_in(x)) >= 0), -1)
        detail = inputs_at(tensor, list(saved.values()))
        rows, shape = bad_rows(tensor), tuple(tensor.shape)
        trace.bad.append(
            BadValue(
                kind,
                "backward",
                op,
                -1,
                rows,
                shape,
                detail,
                node_name=self.name,
                from_value=source,
                backward=len(trace.backwards) - 1,
            )
        )

    def _maybe_zero(self, tensor: torch.Tensor, incoming: tuple[Any, ...]) -> None:
        if is_all_zero(tensor) and any(x is not None and is_readable(x) and not is_all_zero(x) for x in incoming):
            trace = self.tracer.trace
            trace.zeros.append(ZeroGradient(trace.op_number_of_node.get(self.number, -1), self.name))
