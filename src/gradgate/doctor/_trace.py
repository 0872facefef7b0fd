"""The records that the tracer writes and the rules read, and how values flow through them.

A *value* is a number that stands for the content of a tensor at one time: each result has its own, and a tensor that
was written to gets a new one. The numbers connect the operations: which one computed a value, which ones read it.
"""

from __future__ import annotations

import math
import weakref
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch

from gradgate._source import Location
from gradgate._torch_private import is_view, schema_of

if TYPE_CHECKING:
    from gradgate.doctor._backward_hooks import GradientPath

# --- memory: which bytes a tensor covers ------------------------------------------------------------------------------


class Region(NamedTuple):
    """The memory of a tensor."""

    storage: int
    start: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    size: int


def region_of(tensor: torch.Tensor) -> Region:
    """Describe the memory of a tensor."""
    try:
        storage = tensor.untyped_storage().data_ptr()
        return Region(storage, tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.element_size())
    except (RuntimeError, NotImplementedError):
        return Region(0, 0, (), (), 1)


def overlaps(one: Region, other: Region) -> bool:
    """Return whether two tensors share at least one byte."""
    if not one.storage or one.storage != other.storage or 0 in one.shape or 0 in other.shape:
        return False
    first, last = _byte_range(one)
    begin, end = _byte_range(other)
    if last <= begin or end <= first:
        return False
    if _is_dense(one) and _is_dense(other):
        return True
    low, high = min(first, begin), max(last, end)
    marks = torch.zeros(high - low, dtype=torch.bool)
    _bytes(marks, one, low).fill_(True)
    return bool(_bytes(marks, other, low).any())


def _byte_range(region: Region) -> tuple[int, int]:
    reach = sum((size - 1) * stride for size, stride in zip(region.shape, region.stride, strict=True))
    return region.start, region.start + (reach + 1) * region.size


def _is_dense(region: Region) -> bool:
    first, last = _byte_range(region)
    return last - first == math.prod(region.shape) * region.size


def _bytes(marks: torch.Tensor, region: Region, low: int) -> torch.Tensor:
    strides = [stride * region.size for stride in region.stride]
    return marks.as_strided((*region.shape, region.size), (*strides, 1), region.start - low)


# --- operators --------------------------------------------------------------------------------------------------------


# Reading these says nothing about where a value was made: what they give has no values yet, or the old ones.
_SILENT = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "lift_fresh", "set_", "resize_"}
_KEEPS_ARGUMENTS = {
    *("gt", "ge", "lt", "le", "eq", "ne", "pow", "pow_", "clamp", "clamp_min", "clamp_max", "native_batch_norm"),
    *("cudnn_batch_norm", "_native_batch_norm_legit", "_batch_norm_with_update", "_to_copy", "to", "div", "div_"),
}


@dataclass(frozen=True, slots=True)
class Operator:
    """One operator, as the tracer needs it."""

    name: str
    written: tuple[int, ...]
    written_names: tuple[str, ...]
    view: bool
    silent: bool
    shape_only: bool  # reads the shape, dtype and device of its inputs, not their values
    zeroes: bool
    unscales: bool
    keeps_arguments: bool

    def targets(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[torch.Tensor]:
        """Return the tensors that a call writes to."""
        named = (kwargs[name] for name in self.written_names if name in kwargs)
        for target in (*(args[position] for position in self.written if position < len(args)), *named):
            if isinstance(target, torch.Tensor):
                yield target
            elif isinstance(target, (list, tuple)):
                yield from (tensor for tensor in target if isinstance(tensor, torch.Tensor))


_known: dict[Any, Operator] = {}


def operator_of(func: Any) -> Operator:
    """Describe an operator."""
    known = _known.get(func)
    if known is None:
        known = _known[func] = _read_schema(func)
    return known


def _read_schema(func: Any) -> Operator:
    schema = schema_of(func)
    space, _, name = schema.name.partition("::")
    arguments = schema.arguments
    written = [
        (position, argument)
        for position, argument in enumerate(arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    returns = [result.alias_info for result in schema.returns if result.alias_info is not None]
    return Operator(
        name=name,
        written=tuple(position for position, argument in written if not argument.kwarg_only),
        written_names=tuple(argument.name for _, argument in written),
        view=bool(returns) and not written,
        silent=name in _SILENT or (space not in ("aten", "prims") and not schema.returns),
        shape_only=space == "aten" and (name.endswith("_like") or name.startswith("new_")),
        zeroes=name in ("zero_", "_foreach_zero_"),
        unscales=name == "_amp_foreach_non_finite_check_and_unscale_",
        keeps_arguments=name in _KEEPS_ARGUMENTS,
    )


# --- records ----------------------------------------------------------------------------------------------------------


class Op(NamedTuple):
    """One operation of the forward pass."""

    operator: Operator
    location: Location | None
    module: torch.nn.Module | None
    call: int
    node: int
    records: bool
    switch: int
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    arguments: tuple[Any, ...]


@dataclass(slots=True)
class Call:
    """One call of a module: inside which other call, in which mode and, for an outermost one, from which line."""

    module: torch.nn.Module
    outer: int = -1
    training: bool = True
    location: Location | None = None
    leaf: bool = True


@dataclass(frozen=True, slots=True)
class Root:
    """A tensor that was there before the trace, or that came from outside torch."""

    tensor: torch.Tensor | None
    number: int
    leaf: bool
    requires_grad: bool
    inference: bool
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Escape:
    """A value that left torch for Python or NumPy, or a leaf switched by hand."""

    kind: str
    value: int
    location: Location | None
    after: int
    floating: bool


@dataclass(frozen=True, slots=True)
class Freeze:
    """A line that set requires_grad to False, and whether the tensor had been switched on again before."""

    location: Location | None
    again: bool


@dataclass(frozen=True, slots=True)
class Switch:
    """Recording was switched."""

    on: bool
    location: Location | None
    by: str


@dataclass(slots=True)
class BadValue:
    """A NaN or an infinity, where it was produced or came in."""

    kind: Literal["nan", "inf"]
    stage: Literal["forward", "backward", "arrived"]
    op: int
    value: int
    rows: tuple[int, ...]
    shape: tuple[int, ...]
    detail: str
    node_name: str = ""
    deliberate: bool = False
    from_value: int = -1
    backward: int = -1


@dataclass(frozen=True, slots=True)
class ZeroGradient:
    """A gradient that became nothing but zeros."""

    op: int
    node_name: str


@dataclass(frozen=True, slots=True)
class Overwrite:
    """A tensor that was saved for backward and overwritten before backward read it."""

    saved_spot: Location | None
    saved_node: int
    write_spot: Location | None
    write_name: str
    by_optimizer: bool
    silent: bool
    shape: tuple[int, ...]


class Write(NamedTuple):
    """One write to memory."""

    region: Region
    name: str
    location: Location | None
    by_optimizer: bool


@dataclass(slots=True)
class Backward:
    """One call of backward."""

    values: tuple[int, ...]
    location: Location | None
    after: int
    loss: float | None
    nodes: frozenset[int] = frozenset()
    running: bool = True
    completed: bool = False
    inputs: tuple[int, ...] | None = None
    missing: frozenset[int] = frozenset()
    functions: dict[int, type[torch.autograd.Function]] = field(default_factory=dict)
    starts: list[int] = field(default_factory=list)
    edges: list[tuple[int, ...]] = field(default_factory=list)  # by node: the nodes that it sends gradients to
    leaves: dict[int, int] = field(default_factory=dict)  # by node: the `id` of the leaf that it adds to
    zeros: set[tuple[int, int]] = field(default_factory=set)  # the edges on which a gradient became zero

    def leaves_with_gradient(self) -> set[int]:
        """Return the `id` of every leaf that some gradient came to that was not made zero on the way."""
        seen, waiting = set(self.starts), list(self.starts)
        while waiting:
            node = waiting.pop()
            for position, following in enumerate(self.edges[node]):
                if following >= 0 and following not in seen and (node, position) not in self.zeros:
                    seen.add(following)
                    waiting.append(following)
        return {leaf for node, leaf in self.leaves.items() if node in seen}


@dataclass(frozen=True, slots=True)
class OptimizerStep:
    """One step of an optimizer."""

    optimizer: torch.optim.Optimizer
    location: Location | None
    backwards: int
    idle: bool
    again: int = 0
    old: int = 0
    cleared: Location | None = None  # who took the gradients away after backward


@dataclass(frozen=True, slots=True)
class Raised:
    """A call of torch that raised."""

    text: str
    values: tuple[int, ...]
    location: Location | None
    backward: int


@dataclass(slots=True)
class Trace:
    """All that was seen of one step (or of several)."""

    ops: list[Op] = field(default_factory=list)
    roots: dict[int, Root] = field(default_factory=dict)
    escapes: list[Escape] = field(default_factory=list)
    switches: list[Switch] = field(default_factory=list)
    bad: list[BadValue] = field(default_factory=list)
    spoiled: set[int] = field(default_factory=set)
    calls: list[Call] = field(default_factory=list)
    paths: list[GradientPath] = field(default_factory=list)
    zeros: list[ZeroGradient] = field(default_factory=list)
    overwrites: list[Overwrite] = field(default_factory=list)
    backwards: list[Backward] = field(default_factory=list)
    optimizer_steps: list[OptimizerStep] = field(default_factory=list)
    rejoined: dict[int, Any] = field(default_factory=dict)
    inference_values: dict[int, Location | None] = field(default_factory=dict)
    op_number_of_node: dict[int, int] = field(default_factory=dict)
    raised: list[Raised] = field(default_factory=list)
    modules: list[torch.nn.Module] = field(default_factory=list)
    batch_size: int | None = None
    scaled: bool = False
    functional: bool = False
    gradients_left: bool = False
    updated_by_hand: Location | None = None
    recording_at_start: bool = True
    recording_at_end: bool = True


# --- numbers for values -----------------------------------------------------------------------------------------------


_SMALL = 64


class Values:
    """Knows the value of each tensor that the tracer has met."""

    # A tensor is known by its identity. Autograd gives views a new identity on their way up, so the result of a view is
    # also known by its memory, shape, strides and whether it is connected.

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self._next = 0
        self._by_identity: dict[int, tuple[weakref.ref[torch.Tensor], int]] = {}
        self._by_memory: dict[tuple[int, torch.Size, tuple[int, ...], bool], int] = {}
        self._latest_write: dict[int, int] = {}
        self.unconnected: set[int] = set()

    def read(self, tensor: torch.Tensor, codes: list[int]) -> None:
        """Record that an operation reads a tensor."""
        known = self._by_identity.get(id(tensor))
        connected = tensor.requires_grad
        value = known[1] if known is not None and known[0]() is tensor else self._adopt(tensor, connected)
        codes.append(2 * value + connected)
        if connected and value in self.unconnected:
            # Made where autograd does not look, and yet connected: a Function's result, or a leaf made of it.
            self.unconnected.discard(value)
            if tensor.grad_fn is not None:
                self.trace.rejoined[value] = tensor.grad_fn
            elif not is_view(tensor):  # a view of a leaf, made inside no_grad, only looks like a leaf
                self._add_root(tensor, value)
        if self._latest_write:
            write = self._latest_write.get(_storage_of(tensor))
            if write is not None and write > value:
                codes.append(2 * write + connected)

    def of(self, tensor: torch.Tensor) -> int:
        """Return the value that a tensor holds now."""
        codes: list[int] = []
        self.read(tensor, codes)
        return codes[-1] >> 1

    def make(self, tensor: torch.Tensor) -> int:
        """Return a new value to a tensor."""
        value = self._next
        self._next = value + 1
        self._by_identity[id(tensor)] = (weakref.ref(tensor), value)
        return value

    def make_view(self, tensor: torch.Tensor, connected: bool) -> int:
        """Return a new value to the result of a view, which will come back under another identity."""
        value = self.make(tensor)
        # A tensor without memory of this kind is known by its identity alone.
        with suppress(RuntimeError, NotImplementedError):
            self._by_memory[tensor.data_ptr(), tensor.shape, tensor.stride(), connected] = value
        return value

    def write(self, tensor: torch.Tensor) -> int:
        """Return a new value to a tensor that was written to, and let everything that shares its memory know."""
        value = self.make(tensor)
        self._latest_write[_storage_of(tensor)] = value
        return value

    def _adopt(self, tensor: torch.Tensor, connected: bool) -> int:
        try:
            value = self._by_memory.get((tensor.data_ptr(), tensor.shape, tensor.stride(), connected))
        except (RuntimeError, NotImplementedError):
            value = None
        if value is None:
            value = self._next
            self._next = value + 1
            self._add_root(tensor, value)
        self._by_identity[id(tensor)] = (weakref.ref(tensor), value)
        return value

    def _add_root(self, tensor: torch.Tensor, value: int) -> None:
        leaf, connected, inference = tensor.is_leaf, tensor.requires_grad, tensor.is_inference()
        keep = leaf and (connected or inference or tensor.numel() <= _SMALL)
        self.trace.roots[value] = Root(
            tensor if keep else None, id(tensor), leaf, connected, inference, tuple(tensor.shape)
        )


def _storage_of(tensor: torch.Tensor) -> int:
    try:
        return tensor.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):
        return 0


# --- the flow of values -----------------------------------------------------------------------------------------------


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
            self.connected.update(code >> 1 for code in backward.values if code & 1)
        # A leaf that was computed from something (`h.detach().requires_grad_()`) is a start: nothing flows beyond it.
        self.connected.difference_update(value for value in trace.roots if value in self.maker)

    @cached_property
    def losses(self) -> frozenset[int]:
        """Return the values that backward passes started from."""
        return frozenset(code >> 1 for backward in self.trace.backwards for code in backward.values)

    @cached_property
    def behind_losses(self) -> frozenset[int]:
        """Return every value that a loss was computed from, connected or not."""
        return self.sources(self.losses)

    def sources(self, values: Iterable[int], connected: bool = False) -> frozenset[int]:
        """Return every value that some values were computed from, and themselves; only what is connected, if asked."""
        seen = set(values)
        waiting = list(seen)
        while waiting:
            number = self.maker.get(waiting.pop())
            for code in self.trace.ops[number].inputs if number is not None else ():
                if code >> 1 not in seen and (not connected or code & 1 or self._is_made_inside_function(code >> 1)):
                    seen.add(code >> 1)
                    waiting.append(code >> 1)
        return frozenset(seen)

    def results(self, values: Iterable[int]) -> frozenset[int]:
        """Return every value that was computed from some values, and themselves."""
        seen = set(values)
        waiting = list(seen)
        while waiting:
            for number in self.readers.get(waiting.pop(), ()):
                for value in self.trace.ops[number].outputs:
                    if value not in seen:
                        seen.add(value)
                        waiting.append(value)
        return frozenset(seen)

    def is_used(self, values: Iterable[int]) -> bool:
        """Return whether the step computes anything with some values; an update under no_grad is no use of them."""
        readers = {number for value in self.results(values) for number in self.readers.get(value, ())}
        ops = [self.trace.ops[number] for number in readers]
        return any(op.records or not self.behind_losses.isdisjoint(op.outputs) for op in ops)

    def is_inside_function(self, op: Op) -> bool:
        """Return whether an operation ran inside the forward of an autograd Function, where nothing is recorded."""
        if op.records:
            return False
        if op.switch < 0:
            return self.trace.recording_at_start
        return "Function.forward" in self.trace.switches[op.switch].by

    def _is_made_inside_function(self, value: int) -> bool:
        number = self.maker.get(value)
        return number is not None and self.is_inside_function(self.trace.ops[number])

    @cached_property
    def _live(self) -> tuple[frozenset[int], frozenset[int]]:
        """Return the values that a gradient comes back to, and the unconnected ones that are read right beside them."""
        live, beside = set(self.losses), set()
        waiting = list(live)
        while waiting:
            value = waiting.pop()
            number = self.maker.get(value)
            if number is None:
                continue
            op = self.trace.ops[number]
            inside = self.is_inside_function(op)
            if not (value in self.connected or (inside and value in self._behind_rejoined)):
                beside.add(value)
                continue
            for code in op.inputs:
                read = code >> 1
                if not (code & 1 or (inside and self._is_made_inside_function(read))):
                    beside.add(read)
                elif read not in live:
                    live.add(read)
                    waiting.append(read)
        return frozenset(live), frozenset(beside)

    @cached_property
    def cuts(self) -> tuple[int, ...]:
        """Return the operations that cut something off from the losses: on each path the one nearest to the loss."""
        seen = set(self._live[1])
        waiting, found = list(seen), set()
        while waiting:
            number = self.maker.get(waiting.pop())
            for code in self.trace.ops[number].inputs if number is not None else ():
                if code & 1:
                    found.add(number)
                elif code >> 1 not in seen:
                    seen.add(code >> 1)
                    waiting.append(code >> 1)
        return tuple(sorted(number for number in found if number is not None))

    def cuts_of(self, values: Iterable[int]) -> list[int]:
        """Return the cuts of some values, the one nearest to the loss first."""
        values = set(values)
        return [number for number in reversed(self.cuts) if not values.isdisjoint(self._before_cut[number])]

    @cached_property
    def _before_cut(self) -> dict[int, frozenset[int]]:
        """Return for each cut the values whose gradient it stops."""
        return {
            number: self.sources((code >> 1 for code in self.trace.ops[number].inputs if code & 1), connected=True)
            for number in self.cuts
        }

    def is_connected(self, values: Iterable[int]) -> bool:
        """Return whether a gradient comes back from a loss to any of these values."""
        return not self._live[0].isdisjoint(values)

    def is_cut(self, op: Op) -> bool:
        """Return whether an operation cuts."""
        results = [value for value in op.outputs if value in self.behind_losses]
        if not results or any(value in self.connected for value in results):
            return False
        return not (self.is_inside_function(op) and any(value in self._behind_rejoined for value in results))

    @cached_property
    def _behind_rejoined(self) -> frozenset[int]:
        """Return every value that the result of a Function was computed from, if a loss was computed from that."""
        return self.sources(self.behind_losses.intersection(self.trace.rejoined))

    def reaches_loss(self, start: Iterable[int]) -> bool:
        """Return whether a loss was computed from any of these values, connected or not."""
        return not self.behind_losses.isdisjoint(start)
