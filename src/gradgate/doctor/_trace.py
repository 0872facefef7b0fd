"""What the tracer writes down: plain records that the rules read when the step is over.

A *value* is a number that stands for what a tensor held at one time: each result has its own, and a tensor that was
written to has a new one. The numbers connect the operations: who made what, who used it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch

from gradgate._source import Location
from gradgate.doctor._memory import Region
from gradgate.doctor._operators import Operator
from gradgate.doctor._ways import Way


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
    """One call of a module."""

    module: torch.nn.Module
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


@dataclass(frozen=True, slots=True)
class Switch:
    """Recording was switched."""

    on: bool
    location: Location | None
    by: str


@dataclass(slots=True)
class BadValue:
    """A NaN or an infinity, where it was born or came in."""

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
    inputs: tuple[int, ...] | None = None
    missing: frozenset[int] = frozenset()
    functions: dict[int, type[torch.autograd.Function]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class OptimizerStep:
    """One step of an optimizer."""

    optimizer: torch.optim.Optimizer
    location: Location | None
    backwards: int
    idle: bool
    again: int = 0
    old: int = 0


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
    ways: list[Way] = field(default_factory=list)
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
    recording_at_start: bool = True
    recording_at_end: bool = True
