"""Backward passes: where each starts, which nodes it visits, and where a gradient becomes non-finite or zero.

Each node gets a hook that sees what came in and what goes out. That costs less than tracing every operation of
backward, and it says more: a node with a finite incoming and a non-finite outgoing gradient is the cause, whatever it
computed inside.
"""

from __future__ import annotations

import math
import sys
from collections import Counter, defaultdict
from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch

from gradgate._torch_private import (
    current_node,
    function_class_of,
    leaf_of,
    node_number,
    nodes_below,
    saved_tensors_of,
    undispatched,
)
from gradgate.doctor._numerics import (
    bad_kind,
    bad_rows,
    inputs_at,
    is_all_zero,
    is_readable,
    is_suspicious,
    norm_of,
    total,
)
from gradgate.doctor._trace import Backward, BadValue, ZeroGradient

if TYPE_CHECKING:
    from gradgate.doctor._trace import Trace
    from gradgate.doctor._tracer import Tracer

# --- the gradient between modules -------------------------------------------------------------------------------------


LOSS = -2
_START = -1  # the path that enters a node, not one of those that leave it
_BETWEEN = -3


class GradientPath:
    """One tensor that one call read."""

    __slots__ = ("_amount", "_sum", "_waiting", "call", "leaf", "node")

    def __init__(self, call: int, node: int, leaf: int, reads: int) -> None:
        self.call = call
        self.node = node
        self.leaf = leaf
        self._waiting = reads
        self._sum: torch.Tensor | None = None
        self._amount: float | None = None

    @property
    def norm(self) -> float | None:
        """Return the norm of the gradient that came back: it may be NaN or Inf; None where none came or can be read."""
        if self._sum is not None:  # some of what was expected never came
            self._amount, self._sum = norm_of(self._sum), None
        return self._amount

    def note(self, gradient: torch.Tensor) -> float | None:
        """Note what came back for one read."""
        self._waiting -= 1
        if not is_readable(gradient):
            if not gradient.numel():
                self._amount = self._amount or 0.0
            return None
        if self._sum is None and self._waiting == 0:
            self._amount = norm_of(gradient)
            return self._amount
        if self._sum is None:
            # A copy: autograd goes on with the tensor itself, and may add to it in place.
            self._sum = gradient.detach().clone()
        else:
            self._sum += gradient.detach()
        if self._waiting <= 0:
            self._amount, self._sum = norm_of(self._sum), None
        return None

    @property
    def is_bad(self) -> bool:
        """Return whether what came back is not finite."""
        return self.norm is not None and not math.isfinite(self.norm)


def paths_of(trace: Trace, nodes: list[Any], started: list[Any]) -> dict[Any, dict[int, GradientPath]]:
    """Find the paths of a backward pass."""
    calls = _calls_of(trace, nodes)
    reads: Counter[tuple[int, Any, int]] = Counter()
    places: list[tuple[Any, int, tuple[int, Any, int]]] = []
    for node in nodes:
        call = calls[node]
        if call == _BETWEEN:
            continue
        for place, (following, output) in enumerate(node.next_functions):
            if following is None or calls[following] == call or isinstance(leaf_of(following), torch.nn.Parameter):
                continue
            key = (call, following, output)
            reads[key] += 1
            places.append((node, place, key))
    places += [(node, _START, (LOSS, node, 0)) for node in started if calls[node] != LOSS]
    known: dict[tuple[int, Any, int], GradientPath] = {}
    found: defaultdict[Any, dict[int, GradientPath]] = defaultdict(dict)
    for node, place, key in places:
        path = known.get(key)
        if path is None:
            path = known[key] = GradientPath(key[0], node_number(key[1]), id(leaf_of(key[1])), reads[key] or 1)
            trace.paths.append(path)
        found[node][place] = path
    return found


def _calls_of(trace: Trace, nodes: list[Any]) -> dict[Any, int]:
    """Say of each node to which call it belongs, to the loss, or between modules."""
    found: dict[Any, int] = {}
    before_modules: set[Any] = set()
    # A node that uses what another one made was made after it.
    for node in sorted(nodes, key=node_number, reverse=True):
        op = trace.op_number_of_node.get(node_number(node))
        call = trace.ops[op].call if op is not None else -1
        if call < 0 or not trace.calls[call].leaf:
            call = _BETWEEN if node in before_modules else LOSS
        found[node] = call
        if call != LOSS:
            before_modules.update(following for following, _ in node.next_functions)
    return found


# --- backward passes --------------------------------------------------------------------------------------------------


# Nodes that only pass on what they are given, in another shape or place: nothing is produced in them.
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
        result = run()
        backward.completed = True
        return result
    finally:
        backward.running = False
        tracer.reuse.refill()
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
    backward.completed = True
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
    index = {node: place for place, node in enumerate(nodes)}
    backward.starts = [index[tensor.grad_fn] for tensor in tensors if tensor.grad_fn is not None]
    backward.edges = [tuple(index.get(following, -1) for following, _ in node.next_functions) for node in nodes]
    backward.leaves = {index[node]: id(leaf) for node in nodes if (leaf := leaf_of(node)) is not None}
    paths = paths_of(tracer.trace, nodes, [tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None])
    for node in nodes:
        name = node.name()
        number = node_number(node)
        numbers.add(number)
        function = function_class_of(node)
        if function is not None:
            backward.functions[number] = function
        hook = _NodeHook(tracer, backward, index[node], number, name, paths.get(node, {}))
        if _START in hook.paths:
            handles.append(node.register_prehook(hook.first_gradient))
        if hook.paths or not hook.carrier:
            handles.append(node.register_hook(hook))
    backward.nodes = frozenset(numbers)
    return handles


class _NodeHook:
    """Sees what one node sends back; nothing becomes non-finite or zero in a carrier, only paths are measured there."""

    __slots__ = ("backward", "carrier", "index", "name", "number", "paths", "tracer")

    def __init__(
        self, tracer: Tracer, backward: Backward, index: int, number: int, name: str, paths: dict[int, GradientPath]
    ) -> None:
        self.tracer = tracer
        self.backward = backward
        self.index = index
        self.number = number
        self.name = name
        self.paths = paths
        self.carrier = name.startswith(_CARRIERS)

    def __call__(self, outgoing: tuple[Any, ...], incoming: tuple[Any, ...]) -> None:
        with undispatched():
            for index, tensor in enumerate(outgoing):
                if tensor is None:
                    continue
                path = self.paths.get(index)
                # The norm shows as much as the sum: it is non-finite if an element is, and zero if all are.
                amount: float | complex | None = path.note(tensor) if path is not None else None
                if self.carrier or not is_readable(tensor):
                    continue
                if amount is None:
                    amount = total(tensor)
                if amount - amount != 0:
                    self._maybe_bad(tensor, incoming)
                elif amount == 0:
                    self._maybe_zero(tensor, incoming, index)

    def first_gradient(self, incoming: tuple[Any, ...]) -> None:
        """The prehook of a node that a pass starts from inside a module: measure what comes from the loss."""
        with undispatched():
            for tensor in incoming:
                if tensor is not None:
                    self.paths[_START].note(tensor)

    def _maybe_bad(self, tensor: torch.Tensor, incoming: tuple[Any, ...]) -> None:
        if any(x is not None and is_suspicious(x) for x in incoming):
            return
        kind = bad_kind(tensor)
        if kind is None:
            return
        trace = self.tracer.trace
        op = trace.op_number_of_node.get(self.number, -1)
        saved = saved_tensors_of(current_node())
        source = next((value for x in saved.values() if (value := self.tracer.nonfinite.value_in(x)) >= 0), -1)
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

    def _maybe_zero(self, tensor: torch.Tensor, incoming: tuple[Any, ...], position: int) -> None:
        if is_all_zero(tensor) and any(x is not None and is_readable(x) and not is_all_zero(x) for x in incoming):
            trace = self.tracer.trace
            self.backward.zeros.add((self.index, position))
            trace.zeros.append(ZeroGradient(trace.op_number_of_node.get(self.number, -1), self.name))
