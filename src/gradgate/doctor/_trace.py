"""What the tracer writes down: plain records that the rules read when the step is over.

A *value* is a number that stands for what a tensor held at one time: each result has its own, and a tensor that was
written to has a new one. The numbers connect the operations: who made what, who used it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from types import CodeType
from typing import Any, Literal, NamedTuple

import torch

from gradgate.doctor._memory import Region
from gradgate.doctor._operators import Operator
from gradgate.doctor._places import Place
from gradgate.doctor._ways import Way

__all__ = [
    "Backward",
    "BadValue",
    "Call",
    "Escape",
    "OptimizerStep",
    "Raised",
    "Overwrite",
    "Root",
    "Switch",
    "Trace",
    "ZeroGradient",
    "Op",
    "Spot",
    "Write",
]

Spot = tuple[CodeType, int] | None


class Op(NamedTuple):
    """One operation of the forward pass.

    Args:
        operator: What it was.
        spot: Where the user called it, as `Place` takes it.
        module: The module that was running.
        call: The place in `Trace.calls` of the innermost call that was running; -1 outside of all.
        node: The number of the graph node that was newest when it ran; its own if it has one.
        records: Whether autograd recorded.
        switch: The place in `Trace.switches` of the switch that turned recording off; -1 where none did.
        inputs: Values that it read, each as 2 * value + 1 if the tensor required grad when it was read, else 2 * value.
        outputs: Values that it made.
        arguments: Its arguments that are not tensors, where a rule wants them.
    """

    operator: Operator
    spot: Spot
    module: torch.nn.Module | None
    call: int
    node: int
    records: bool
    switch: int
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    arguments: tuple[Any, ...]

    @property
    def place(self) -> Place | None:
        """Give the user's place."""
        return Place(*self.spot) if self.spot is not None else None


@dataclass(slots=True)
class Call:
    """One call of a module.

    Args:
        module: The module.
        leaf: Whether it called no other module while it ran, and so did the work itself.
    """

    module: torch.nn.Module
    leaf: bool = True


@dataclass(frozen=True, slots=True)
class Root:
    """A tensor that was there before the trace, or that came from outside torch.

    Args:
        tensor: The tensor, kept only where it is a leaf that requires grad or is small.
        number: Its `id`.
        leaf: Whether it is a leaf of the graph.
        requires_grad: Whether it requires grad.
        inference: Whether it was made in inference mode.
        shape: Its shape.
    """

    tensor: torch.Tensor | None
    number: int
    leaf: bool
    requires_grad: bool
    inference: bool
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Escape:
    """A value that left torch for Python or NumPy, or a leaf switched by hand.

    Args:
        kind: What was called, such as "item", "numpy", "requires_grad_".
        value: The value that left.
        spot: Where.
        after: How many operations there were before it.
    """

    kind: str
    value: int
    spot: Spot
    after: int


@dataclass(frozen=True, slots=True)
class Switch:
    """Recording was switched.

    Args:
        on: To what.
        spot: The user's line.
        by: The function of torch that did it, such as "no_grad.__enter__", or "" when the user called it directly.
    """

    on: bool
    spot: Spot
    by: str


@dataclass(slots=True)
class BadValue:
    """A NaN or an infinity, where it was born or came in.

    Args:
        kind: "nan" or "inf".
        stage: Born in "forward", in "backward", or it "arrived" with the data or a parameter.
        op: The number of the operation: the one that made it, or whose backward did; -1 where it is not known.
        value: The value that holds it; -1 in backward.
        rows: Places along the first dimension that have it; empty for 0-dim values.
        shape: The shape of what holds it.
        detail: What the operation read at the first bad element.
        node_name: The node whose backward it was born in.
        deliberate: Whether the user's own argument was infinite (a mask).
        from_value: In backward: a saved value of the forward pass that was bad already; -1 where there was none.
        backward: In backward: the number of the pass.
    """

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
    """A gradient that became nothing but zeros.

    Args:
        op: The number of the forward operation whose backward did it; -1 where it is not known.
        node_name: The node, such as "ReluBackward0".
    """

    op: int
    node_name: str


@dataclass(frozen=True, slots=True)
class Overwrite:
    """A tensor that was saved for backward and overwritten before backward read it.

    Args:
        saved_spot: Where it was saved.
        saved_node: The node that saved it.
        write_spot: Where it was overwritten.
        write_name: The operation that did it.
        by_optimizer: Whether an optimizer's step did it.
        silent: Whether torch does not notice, so that the gradient is wrong.
        shape: The shape of the saved tensor.
    """

    saved_spot: Spot
    saved_node: int
    write_spot: Spot
    write_name: str
    by_optimizer: bool
    silent: bool
    shape: tuple[int, ...]


class Write(NamedTuple):
    """One write to memory."""

    region: Region
    name: str
    spot: Spot
    by_optimizer: bool


@dataclass(slots=True)
class Backward:
    """One call of backward.

    Args:
        values: The values it started from, as `Op.inputs` has them.
        spot: Where it was called.
        after: How many operations there were before it.
        loss: The sum of what it started from.
        nodes: Numbers of the graph nodes below it.
        running: Whether it has not come back yet.
        inputs: `id`s of the tensors that `torch.autograd.grad` was asked for; None for `backward`.
        missing: `id`s of the tensors that `torch.autograd.grad` gave None for.
        functions: Numbers of the nodes that the user's own Functions made, with their classes.
    """

    values: tuple[int, ...]
    spot: Spot
    after: int
    loss: float | None
    nodes: frozenset[int] = frozenset()
    running: bool = True
    inputs: tuple[int, ...] | None = None
    missing: frozenset[int] = frozenset()
    functions: dict[int, type[torch.autograd.Function]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class OptimizerStep:
    """One step of an optimizer.

    Args:
        optimizer: The optimizer.
        spot: Where it was called.
        backwards: How many backward calls there had been.
        idle: Whether none of its parameters had a gradient.
        again: How many gradients it used that it had used before and that nobody zeroed since.
        old: How many gradients it used that were there before the trace began and that nobody zeroed.
    """

    optimizer: torch.optim.Optimizer
    spot: Spot
    backwards: int
    idle: bool
    again: int = 0
    old: int = 0


@dataclass(frozen=True, slots=True)
class Raised:
    """A call of torch that raised.

    Args:
        text: What the exception said.
        values: Values of the tensors that it was called with.
        spot: Where.
        backward: The number of the newest backward pass; -1 before the first.
    """

    text: str
    values: tuple[int, ...]
    spot: Spot
    backward: int

    @property
    def place(self) -> Place | None:
        """Give the user's place."""
        return Place(*self.spot) if self.spot is not None else None


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
    inference_values: dict[int, Spot] = field(default_factory=dict)
    op_number_of_node: dict[int, int] = field(default_factory=dict)
    raised: list[Raised] = field(default_factory=list)
    modules: list[torch.nn.Module] = field(default_factory=list)
    batch_size: int | None = None
    scaled: bool = False
    functional: bool = False
    gradients_left: bool = False
    recording_at_start: bool = True
    recording_at_end: bool = True
