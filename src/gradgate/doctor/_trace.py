"""The records that the tracer writes and the rules read, and how values flow through them.

A *value* is a number that stands for the content of a tensor at one time: each result has its own, and a tensor that
was written to gets a new one. An operation refers to its inputs by *codes*: twice the value, plus 1 if autograd
connects the operation to it.
"""

from __future__ import annotations

import math
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Any, Literal, NamedTuple

import torch

from gradgate._source import Location
from gradgate._torch_private import is_view, schema_of
from gradgate.doctor._numerics import Kind, is_readable, norm_of
from gradgate.records import Severity

# --- memory: which bytes a tensor covers ------------------------------------------------------------------------------


class Region(NamedTuple):
    storage: int
    start: int
    end: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    size: int  # of an element

    def mark(self, marks: torch.Tensor, low: int) -> torch.Tensor:
        """Return the part of the marks, one for each byte from `low` on, that it covers."""
        strides = [stride * self.size for stride in self.stride]
        return marks.as_strided((*self.shape, self.size), (*strides, 1), self.start - low)


def storage_of(tensor: torch.Tensor) -> int:
    """Return the address of the memory of a tensor; 0 if it has none of its own, as a sparse tensor."""
    try:
        return tensor.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):
        return 0


def region_of(tensor: torch.Tensor) -> Region:
    storage = storage_of(tensor)
    if not storage or not tensor.numel():
        return Region(0, 0, 0, (), (), 1)
    start, size = tensor.data_ptr(), tensor.element_size()
    reach = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    return Region(storage, start, start + (reach + 1) * size, tuple(tensor.shape), tensor.stride(), size)


def overlaps(one: Region, other: Region) -> bool:
    """Return whether two tensors share at least one byte."""
    if not one.storage or one.storage != other.storage or max(one.start, other.start) >= min(one.end, other.end):
        return False
    if all(r.end - r.start == math.prod(r.shape) * r.size for r in (one, other)):
        return True  # dense, as whole weights are
    low, high = min(one.start, other.start), max(one.end, other.end)
    marks = torch.zeros(high - low, dtype=torch.bool)
    one.mark(marks, low).fill_(True)
    return bool(other.mark(marks, low).any())


# --- operators --------------------------------------------------------------------------------------------------------

# Their results have no values yet, or the old ones.
_SILENT = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "lift_fresh", "set_", "resize_"}


@dataclass(frozen=True, slots=True)
class Operator:
    """What the tracer needs to know of an operator."""

    name: str
    written: tuple[tuple[int, str], ...]  # the positions and names of the arguments that it writes to
    view: bool
    silent: bool
    shape_only: bool  # reads the shape, dtype and device of its inputs, not their values

    def targets(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[torch.Tensor]:
        """Yield the tensors that a call writes to."""
        for position, name in self.written:
            yield from tensors_in(args[position] if position < len(args) else kwargs.get(name))


def tensors_in(thing: Any) -> Iterator[torch.Tensor]:
    """Yield a tensor, or the tensors in a list or tuple."""
    if isinstance(thing, torch.Tensor):
        yield thing
    elif isinstance(thing, (list, tuple)):
        yield from (item for item in thing if isinstance(item, torch.Tensor))


@cache
def operator_of(func: Any) -> Operator:
    schema = schema_of(func)
    space, _, name = schema.name.partition("::")
    arguments = [(argument.alias_info, argument.name) for argument in schema.arguments]
    written = tuple((n, name) for n, (alias, name) in enumerate(arguments) if alias is not None and alias.is_write)
    return Operator(
        name=name,
        written=written,
        view=not written and any(result.alias_info is not None for result in schema.returns),
        silent=name in _SILENT or (space not in ("aten", "prims") and not schema.returns),
        shape_only=space == "aten" and (name.endswith("_like") or name.startswith("new_")),
    )


# --- records ----------------------------------------------------------------------------------------------------------

INFERENCE = -2


class Op(NamedTuple):
    """One operation of the forward pass."""

    operator: Operator
    location: Location | None
    module: torch.nn.Module | None
    call: int  # the innermost call in `Trace.calls`; -1 outside of all modules
    records: bool
    switch: int  # the switch in `Trace.switches` that turned recording off; -1 for none, or `INFERENCE`
    inputs: tuple[int, ...]  # codes
    outputs: tuple[int, ...]  # values
    numbers: tuple[float, ...]  # among its arguments
    written_as: str = ""  # what the user wrote, if the operation does not show it

    @property
    def name(self) -> str:
        return self.operator.name

    @property
    def shown(self) -> str:
        """The expression that it stands for in the user's line, or its name."""
        return self.location.expression if self.location is not None else self.name

    @property
    def sources(self) -> list[int]:
        """The values that it reads."""
        return [code >> 1 for code in self.inputs]

    @property
    def connected_sources(self) -> list[int]:
        return [code >> 1 for code in self.inputs if code & 1]


NO_OP = Op(Operator("", (), False, False, False), None, None, -1, True, -1, (), (), ())
"""What made a value that comes from outside the trace."""


@dataclass(slots=True)
class Call:
    """One call of a module. `location` is known for an outermost call only."""

    module: torch.nn.Module
    outer: int = -1
    training: bool = True
    location: Location | None = None
    leaf: bool = True  # no other module was called inside


class Root(NamedTuple):
    """A tensor that existed before the trace, or that came from outside torch."""

    tensor: torch.Tensor | None
    number: int
    leaf: bool
    requires_grad: bool
    inference: bool


class Escape(NamedTuple):
    """A value that left torch for Python or NumPy."""

    kind: str
    value: int
    location: Location | None
    after: int
    floating: bool


class Freeze(NamedTuple):
    """A line that set requires_grad to False; `again` if the tensor had been switched on before."""

    location: Location | None
    again: bool


class Switch(NamedTuple):
    """A switch of recording, and the functions of torch that made it."""

    on: bool
    location: Location | None
    by: str


Stage = Literal["forward", "backward", "arrived"]


@dataclass(slots=True)
class BadValue:
    """A NaN or an infinity, where it was produced or came in."""

    kind: Kind
    stage: Stage
    op: int
    value: int
    rows: tuple[int, ...]
    shape: tuple[int, ...]
    detail: str = ""
    deliberate: bool = False
    node_name: str = ""
    from_value: int = -1
    backward: int = -1


class ZeroGradient(NamedTuple):
    """The operation in whose backward a gradient became all zeros."""

    op: int
    node_name: str


OPTIMIZER_STEP = "optimizer.step()"


class Write(NamedTuple):
    clock: int
    region: Region
    name: str  # of the operation, or `OPTIMIZER_STEP`
    location: Location | None


class Saved(NamedTuple):
    """A tensor that was saved for backward."""

    tensor: torch.Tensor
    version: int
    clock: int
    node: int
    location: Location | None


class Overwrite(NamedTuple):
    """A tensor that was saved for backward and overwritten before backward read it."""

    saved: Saved
    write: Write
    silent: bool


LOSS = -2


@dataclass(slots=True)
class GradientPath:
    """A tensor that a call of a module, or the loss, read, and the gradient that comes back to it, read by read."""

    call: int
    node: int
    leaf: int
    reads: int  # that are still expected
    _sum: torch.Tensor | None = None
    _norm: float | None = None

    @property
    def norm(self) -> float | None:
        """The norm of the gradient that came back, perhaps NaN or Inf; None where none came or it cannot be read."""
        if self._sum is not None:  # some of what was expected never came
            self._norm, self._sum = norm_of(self._sum), None
        return self._norm

    def add(self, gradient: torch.Tensor) -> None:
        self.reads -= 1
        if not is_readable(gradient):
            if not gradient.numel():
                self._norm = self._norm or 0.0
        elif self._sum is None and self.reads == 0:
            self._norm = norm_of(gradient)
        else:  # a copy: autograd goes on with the tensor itself, and may add to it in place
            self._sum = gradient.detach().clone() if self._sum is None else self._sum + gradient.detach()
            if self.reads <= 0:
                self._norm, self._sum = norm_of(self._sum), None


@dataclass(slots=True)
class Backward:
    """One backward pass, and the graph that it walks through."""

    codes: tuple[int, ...]
    location: Location | None
    after: int
    loss: float | None
    inputs: tuple[int, ...] | None = None  # by `id`: what `torch.autograd.grad` was asked for
    missing: frozenset[int] = frozenset()  # by `id`: what it gave no gradient for
    running: bool = True
    completed: bool = False
    nodes: frozenset[int] = frozenset()
    functions: set[type[torch.autograd.Function]] = field(default_factory=set)
    starts: list[int] = field(default_factory=list)
    edges: list[tuple[int, ...]] = field(default_factory=list)  # by node: the nodes that it sends gradients to
    leaves: dict[int, int] = field(default_factory=dict)  # by node: the `id` of the leaf that it adds to
    zeros: set[tuple[int, int]] = field(default_factory=set)  # the edges on which a gradient became zero

    @property
    def is_bad(self) -> bool:
        return self.loss is not None and not math.isfinite(self.loss)

    def leaves_with_gradient(self) -> set[int]:
        """Return the `id` of every leaf that a gradient reached which did not become zero on its path."""

        def following(node: int) -> Iterator[int]:
            for position, other in enumerate(self.edges[node]):
                if other >= 0 and (node, position) not in self.zeros:
                    yield other

        reached = reachable(self.starts, following)
        return {leaf for node, leaf in self.leaves.items() if node in reached}


class OptimizerStep(NamedTuple):
    optimizer: torch.optim.Optimizer
    location: Location | None
    backwards: int  # how many passes ran before it
    idle: bool  # no parameter had a gradient
    again: bool  # it used gradients that it had used before
    old: bool  # it used gradients from before the trace
    cleared: Location | None  # the line that last removed gradients


class Raised(NamedTuple):
    """A call of torch that raised, and the values that it was given; it is an error if the user did not catch it."""

    text: str
    location: Location | None
    backward: int
    values: tuple[int, ...] = ()
    inference: Location | None = None  # the line that made one of them in inference mode, perhaps many steps ago
    severity: Severity = "warning"


@dataclass(slots=True)
class Trace:
    """Everything that was recorded of one step, or of several."""

    ops: list[Op] = field(default_factory=list)
    roots: dict[int, Root] = field(default_factory=dict)
    escapes: list[Escape] = field(default_factory=list)
    switches: list[Switch] = field(default_factory=list)
    bad: list[BadValue] = field(default_factory=list)
    spoiled: dict[int, Kind] = field(default_factory=dict)  # the values that are not finite
    calls: list[Call] = field(default_factory=list)
    paths: list[GradientPath] = field(default_factory=list)
    zeros: list[ZeroGradient] = field(default_factory=list)
    overwrites: list[Overwrite] = field(default_factory=list)
    backwards: list[Backward] = field(default_factory=list)
    optimizer_steps: list[OptimizerStep] = field(default_factory=list)
    rejoined: dict[int, Any] = field(default_factory=dict)  # results of autograd Functions, with their nodes
    op_number_of_node: dict[int, int] = field(default_factory=dict)
    raised: list[Raised] = field(default_factory=list)
    modules: list[torch.nn.Module] = field(default_factory=list)  # the outermost ones that were called
    batch_size: int | None = None
    scaled: bool = False
    functional: bool = False
    updated_by_hand: Location | None = None
    recording_at_start: bool = True
    recording_at_end: bool = True

    @property
    def runs_backward(self) -> bool:
        return bool(self.backwards) and self.backwards[-1].running

    def op(self, number: int | None) -> Op:
        return self.ops[number] if number is not None and number >= 0 else NO_OP

    def op_of_node(self, number: int) -> Op:
        return self.op(self.op_number_of_node.get(number))


# --- numbers for values -----------------------------------------------------------------------------------------------

_SMALL = 64


class Values:
    """The value of each tensor that the tracer has met."""

    # A tensor is known by its identity. Autograd wraps a view in another object, so the result of a view is also known
    # by its memory, shape, strides and whether it is connected.

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self._next = 0
        self._by_identity: dict[int, tuple[weakref.ref[torch.Tensor], int]] = {}
        self._by_memory: dict[tuple[int, torch.Size, tuple[int, ...], bool], int] = {}
        self._latest_write: dict[int, int] = {}
        self.unconnected: set[int] = set()

    def read(self, tensor: torch.Tensor) -> list[int]:
        """Return the codes of a tensor that an operation reads."""
        known = self._by_identity.get(id(tensor))
        connected = tensor.requires_grad
        value = known[1] if known is not None and known[0]() is tensor else self._adopt(tensor, connected)
        codes = [2 * value + connected]
        if connected and value in self.unconnected:
            # Made where autograd does not record, and yet connected: a Function's result, or a leaf made of it.
            self.unconnected.discard(value)
            if tensor.grad_fn is not None:
                self.trace.rejoined[value] = tensor.grad_fn
            elif not is_view(tensor):  # a view of a leaf, made inside no_grad, has no grad_fn and is not a leaf
                self._add_root(tensor, value)
        if self._latest_write:
            write = self._latest_write.get(storage_of(tensor))
            if write is not None and write > value:
                codes.append(2 * write + connected)
        return codes

    def of(self, tensor: torch.Tensor) -> int:
        return self.read(tensor)[-1] >> 1

    def make(self, tensor: torch.Tensor) -> int:
        value = self._next
        self._next = value + 1
        self._by_identity[id(tensor)] = (weakref.ref(tensor), value)
        return value

    def make_view(self, tensor: torch.Tensor, connected: bool) -> int:
        value = self.make(tensor)
        with suppress(RuntimeError, NotImplementedError):  # no memory: known by its identity alone
            self._by_memory[tensor.data_ptr(), tensor.shape, tensor.stride(), connected] = value
        return value

    def write(self, tensor: torch.Tensor) -> int:
        """Give a new value to a tensor that was written to, and to everything that shares its memory."""
        value = self.make(tensor)
        self._latest_write[storage_of(tensor)] = value
        return value

    def _adopt(self, tensor: torch.Tensor, connected: bool) -> int:
        value = None
        with suppress(RuntimeError, NotImplementedError):
            value = self._by_memory.get((tensor.data_ptr(), tensor.shape, tensor.stride(), connected))
        if value is None:
            value = self.make(tensor)
            self._add_root(tensor, value)
        self._by_identity[id(tensor)] = (weakref.ref(tensor), value)
        return value

    def _add_root(self, tensor: torch.Tensor, value: int) -> None:
        leaf, connected, inference = tensor.is_leaf, tensor.requires_grad, tensor.is_inference()
        keep = leaf and (connected or inference or tensor.numel() <= _SMALL)
        self.trace.roots[value] = Root(tensor if keep else None, id(tensor), leaf, connected, inference)


# --- the flow of values -----------------------------------------------------------------------------------------------


def reachable(start: Iterable[int], following: Callable[[int], Iterable[int]]) -> frozenset[int]:
    """Return everything that can be reached from a start, and the start itself."""
    seen = set(start)
    waiting = list(seen)
    while waiting:
        for other in following(waiting.pop()):
            if other not in seen:
                seen.add(other)
                waiting.append(other)
    return frozenset(seen)


class Flow:
    """The graph of values of a trace. It follows the data, also where autograd does not."""

    # A read of shape, dtype or device is no flow: the tracer records no input for it. What runs after the last backward
    # pass belongs to no step.

    def __init__(self, trace: Trace, whole: bool = False) -> None:
        self.trace = trace
        self.maker: dict[int, int] = {}
        self.readers: defaultdict[int, list[int]] = defaultdict(list)
        self.connected: set[int] = set(trace.rejoined)
        end = trace.backwards[-1].after if trace.backwards and not whole else len(trace.ops)
        for number, op in enumerate(trace.ops[:end]):
            for code in op.inputs:
                self.readers[code >> 1].append(number)
                if code & 1:
                    self.connected.add(code >> 1)
            for value in op.outputs:
                self.maker[value] = number
        for backward in trace.backwards:
            self.connected.update(code >> 1 for code in backward.codes if code & 1)
        # A leaf that was computed from something (`h.detach().requires_grad_()`) is a start: nothing flows beyond it.
        self.connected.difference_update(value for value in trace.roots if value in self.maker)

    def made_by(self, value: int) -> Op:
        return self.trace.op(self.maker.get(value))

    @cached_property
    def losses(self) -> frozenset[int]:
        """The values that backward passes started from."""
        return frozenset(code >> 1 for backward in self.trace.backwards for code in backward.codes)

    @cached_property
    def behind_losses(self) -> frozenset[int]:
        """Every value that a loss was computed from, connected or not."""
        return self.sources(self.losses)

    def sources(self, values: Iterable[int]) -> frozenset[int]:
        """Return every value that some values were computed from, and themselves."""
        return reachable(values, lambda value: self.made_by(value).sources)

    def results(self, values: Iterable[int]) -> frozenset[int]:
        """Return every value that was computed from some values, and themselves."""
        ops = self.trace.ops
        return reachable(values, lambda value: (made for n in self.readers.get(value, ()) for made in ops[n].outputs))

    def is_used(self, values: Iterable[int]) -> bool:
        """Return whether the step computes anything with some values; an update under no_grad is no use of them."""
        ops = [self.trace.ops[number] for number in self.readers_of(self.results(values))]
        return any(op.records or not self.behind_losses.isdisjoint(op.outputs) for op in ops)

    def readers_of(self, values: Iterable[int]) -> set[int]:
        """Return the operations that read any of these values."""
        return {number for value in values for number in self.readers.get(value, ())}

    def is_inside_function(self, op: Op) -> bool:
        """Return whether an operation ran inside the forward of an autograd Function, where nothing is recorded."""
        if op.records:
            return False
        if op.switch < 0:
            return self.trace.recording_at_start
        return "Function.forward" in self.trace.switches[op.switch].by

    @cached_property
    def _behind_rejoined(self) -> frozenset[int]:
        """Every value that the result of a Function was computed from, if a loss was computed from that."""
        return self.sources(self.behind_losses.intersection(self.trace.rejoined))

    def _stops(self, value: int) -> bool:
        """Return whether no gradient can be at a value, because its operation did not connect it."""
        inside = value in self._behind_rejoined and self.is_inside_function(self.made_by(value))
        return value not in self.connected and not inside

    def _split(self, value: int, inside: bool) -> tuple[list[int], list[int]]:
        """Return the inputs behind a value that a gradient comes back to, and the others."""
        parts: tuple[list[int], list[int]] = [], []
        for code in self.made_by(value).inputs:
            passes = bool(code & 1) or (inside and self.is_inside_function(self.made_by(code >> 1)))
            parts[not passes].append(code >> 1)
        return parts

    def _behind(self, value: int) -> tuple[list[int], list[int]]:
        stops = self._stops(value)
        return ([], [value]) if stops else self._split(value, self.is_inside_function(self.made_by(value)))

    @cached_property
    def _live(self) -> frozenset[int]:
        """The values that a gradient comes back to, and the losses."""
        return reachable(self.losses, lambda value: self._behind(value)[0])

    @cached_property
    def cuts(self) -> tuple[int, ...]:
        """The operations that cut something off from the losses: on each path the one nearest to the loss."""
        beside = {other for value in self._live for other in self._behind(value)[1]}
        cut_off = reachable(beside, lambda value: self._split(value, inside=False)[1])
        makers = {self.maker[value] for value in cut_off if value in self.maker}
        return tuple(sorted(number for number in makers if self.trace.ops[number].connected_sources))

    def cuts_of(self, values: Iterable[int]) -> list[int]:
        """Return the cuts of some values, the one nearest to the loss first."""
        values = set(values)
        return [number for number in reversed(self.cuts) if not values.isdisjoint(self._before_cut[number])]

    @cached_property
    def _before_cut(self) -> dict[int, frozenset[int]]:
        """For each cut, the values whose gradient it stops."""

        def connected(value: int) -> list[int]:
            return self._split(value, inside=True)[0]

        return {number: reachable(self.trace.ops[number].connected_sources, connected) for number in self.cuts}

    def is_connected(self, values: Iterable[int]) -> bool:
        """Return whether a gradient comes back from a loss to any of these values."""
        return not self._live.isdisjoint(values)

    def is_cut(self, op: Op) -> bool:
        results = self.behind_losses.intersection(op.outputs)
        return bool(results) and all(map(self._stops, results))

    def bare_value(self, value: int) -> int:
        """Return the value that a value is a view or the magnitude of."""
        for _ in range(6):
            op = self.made_by(value)
            if not op.inputs or not (op.operator.view or op.name in ("abs", "lift_fresh")):
                break
            value = op.sources[0]
        return value
