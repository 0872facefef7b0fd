"""Who gives what to whom: the flow of data between the modules that do the work, and the gradient that came back.

Every value carries the set of modules that it comes from, as the bits of a number: what a module makes comes from that
module alone, what is made between modules (a residual sum, a concatenation) from all that went into it. A second set
says from which of them it is still connected, so that a gradient finds its way back.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

from gradgate._torch_compat import node_number
from gradgate.doctor._case import Case
from gradgate.doctor._spread import INPUT, Spread
from gradgate.doctor._trace import Op
from gradgate.doctor._ways import LOSS, Way

_OUTSIDE = -1

Lost = tuple[tuple[int, int], ...]


@dataclass(slots=True)
class Edge:
    """What one module gives another."""

    connected: bool = False
    cut: int = -1
    nonfinite: bool = False
    norms: list[float] = field(default_factory=list)

    @property
    def norm(self) -> float | None:
        """Give the norm of all gradients that came back together; None where none did."""
        return math.hypot(*self.norms) if self.norms else None


@dataclass(frozen=True, slots=True)
class _Origin:
    """Where a value comes from."""

    modules: int = 0
    connected: int = 0
    lost: Lost = ()
    call: int = _OUTSIDE


_NOWHERE = _Origin()


def edges_of(case: Case, places: dict[int, int], spread: Spread) -> dict[tuple[int, int], Edge]:
    """Find the edges of a step."""
    found = _Edges(case, places, spread)
    for number, op in enumerate(case.trace.ops):
        found.follow(number, op)
    for code in sorted({code for backward in case.trace.backwards for code in backward.values}):
        found.arrive(LOSS, code, connected=bool(code & 1), cut=-1)
    for way in case.trace.ways:
        found.measure(way)
    found.edges.pop((INPUT, LOSS), None)
    return found.edges


class _Edges:
    def __init__(self, case: Case, places: dict[int, int], spread: Spread) -> None:
        self.case = case
        self.places = places
        self.spread = spread
        self.edges: dict[tuple[int, int], Edge] = {}
        self.origins: dict[int, _Origin] = {}
        self._functions = {node_number(node): value for value, node in case.trace.rejoined.items()}

    def follow(self, number: int, op: Op) -> None:
        """Take in one operation."""
        call, calls, place = op.call, self.case.trace.calls, _OUTSIDE
        if call >= 0 and calls[call].leaf:
            place = self.places.get(id(calls[call].module), _OUTSIDE)
        flow = self.case.flow
        cut = any(code & 1 for code in op.inputs) and flow.is_cut(op)
        inside = flow.is_inside_function(op)  # connected as a whole, if at all
        living = [value for value in op.outputs if inside or value in flow.connected]
        if place == _OUTSIDE:
            self._between(number, op, living, cut)
            return
        own, loses = 2 << place, False
        lost: Lost = ()
        for code in op.inputs:
            origin = self._origin(code)
            if origin.call == call:
                lost = _merged(lost, origin.lost)
                loses |= bool(code & 1)
            elif origin.modules:
                self.arrive(place, code, connected=bool(code & 1) and not cut, cut=number if cut else -1)
            else:  # a parameter of its own
                loses |= bool(code & 1)
        if cut and loses:
            lost = _merged(lost, ((number, own),))
        for value in op.outputs:
            self.origins[value] = _Origin(own, own if value in living else 0, lost, call)

    def _between(self, number: int, op: Op, living: list[int], cut: bool) -> None:
        """Let what is made outside of modules that do the work come from all that went into it."""
        modules = connected = 0
        lost: Lost = ()
        for code in op.inputs:
            origin = self._origin(code)
            modules |= origin.modules
            connected |= origin.connected
            lost = _merged(lost, origin.lost)
        if not op.inputs and op.call < 0:
            modules = 1  # data that the step makes itself
        if cut and connected:
            lost = _merged(lost, ((number, connected),))
        for value in op.outputs:
            self.origins[value] = _Origin(modules, connected if value in living else 0, lost)

    def arrive(self, place: int, code: int, *, connected: bool, cut: int) -> None:
        """Note that a module reads a value."""
        origin = self._origin(code)
        bad = code >> 1 in self.spread.values
        lost = {bit: op for op, mask in origin.lost for bit in _bits(mask)}
        for bit in _bits(origin.modules):
            edge = self.edges.setdefault((bit - 1, place), Edge())
            edge.nonfinite |= bad
            whole = origin.connected >> bit & 1
            if whole and connected:
                edge.connected = True
            else:
                edge.cut = max(edge.cut, lost.get(bit, -1), cut if whole else -1)

    def measure(self, way: Way) -> None:
        """Note a gradient that came back."""
        norm, trace = way.norm, self.case.trace
        if norm is None:
            return
        place = LOSS if way.call == LOSS else self.places.get(id(trace.calls[way.call].module))
        if place is None:
            return
        for bit in _bits(self._reached(way)):
            edge = self.edges.get((bit - 1, place))
            if edge is not None:
                edge.norms.append(norm)
                edge.nonfinite |= not math.isfinite(norm)

    def _reached(self, way: Way) -> int:
        """Give the modules that the gradient of a way goes on to."""
        trace = self.case.trace
        if way.node < 0:
            values = self.case.values_of.get(way.leaf, [])
        elif way.node in self._functions:
            values = [self._functions[way.node]]
        else:
            number = trace.op_number_of_node.get(way.node)
            values = list(trace.ops[number].outputs) if number is not None else []
        reached = 0
        for value in values:
            reached |= self._origin(2 * value + 1).connected
        return reached

    def _origin(self, code: int) -> _Origin:
        known = self.origins.get(code >> 1)
        if known is None:
            known = self.origins[code >> 1] = self._origin_of_root(code)
        return known

    def _origin_of_root(self, code: int) -> _Origin:
        root = self.case.trace.roots.get(code >> 1)
        if root is None or self.case.names.has_tensor(root.number) or isinstance(root.tensor, torch.nn.Parameter):
            return _NOWHERE
        return _Origin(modules=1, connected=int(root.requires_grad))


def _bits(mask: int) -> Iterator[int]:
    while mask:
        lowest = mask & -mask
        yield lowest.bit_length() - 1
        mask ^= lowest


def _merged(one: Lost, other: Lost) -> Lost:
    if not one or not other or one is other:
        return one or other
    told = 0
    for _, mask in one:
        told |= mask
    return (*one, *((op, mask & ~told) for op, mask in other if mask & ~told))
