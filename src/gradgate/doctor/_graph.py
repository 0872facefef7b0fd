"""The module graph of a step as plain data: modules, what flows between them, and one entry for each parameter.

A norm that is not finite is the text "nan" or "inf", because JSON knows no such numbers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal, TypedDict

import torch
from torch.nn.parameter import UninitializedParameter

from gradgate._state import frozen_elements
from gradgate._torch_private import node_number, undispatched
from gradgate.doctor._backward_hooks import LOSS, GradientPath
from gradgate.doctor._case import Case
from gradgate.doctor._numerics import Gradient, is_readable, norm_of
from gradgate.doctor._trace import BadValue, Op
from gradgate.doctor.rules._gradients import cut_of
from gradgate.doctor.rules._nonfinite import bare_value, births_behind_loss, births_in_backward
from gradgate.records import Finding

# --- the graph as plain data ------------------------------------------------------------------------------------------


_MOST_EDGES = 2_000

Norm = float | Literal["nan", "inf"] | None


class GraphModule(TypedDict):
    """A module that ran or has parameters."""

    name: str
    kind: str
    calls: int
    parameters: int
    frozen: int
    gradient_norm: Norm
    state: Literal["ok", "frozen", "no_gradient", "nonfinite"]


class Cut(TypedDict):
    """A line that cuts an edge: what flowed there is used, and no gradient comes back."""

    code: str
    where: str | None
    source: str | None


GraphEdge = TypedDict(
    "GraphEdge", {"from": int, "to": int, "gradient_norm": Norm, "cut": Cut | None, "nonfinite": bool}
)
"""What one module gives another, as the step ran; all calls of the two together.

`from` and `to` are indices in `Graph.modules`; `from` is -1 for what comes from outside the modules, `to` is -2 for the
loss. Only modules that call no other have edges; what is computed between them (a residual sum, a concatenation) is
passed through, and so are modules that hand on the very tensor that they are given. `gradient_norm` is the 2-norm of
the gradient of the tensors that `to` read, as it came back out of `to`; None if none came back or it could not be
read. `nonfinite` says whether that gradient, or a value on its path to a bad loss, is NaN or infinite. At most 2,000
edges are shown: of more, those between the nearest modules.
"""


class Graph(TypedDict):
    """The modules of a step and what flowed between them."""

    modules: list[GraphModule]
    edges: list[GraphEdge]
    nonfinite_path: list[int]


class Layer(TypedDict):
    """A parameter after the step. Those of lazy modules that never ran have neither shape nor values, and no layer."""

    name: str
    module: int | None
    shape: list[int]
    gradient_norm: Norm
    weight_norm: Norm
    learns: bool | Literal["part"]


def draw(case: Case, findings: tuple[Finding, ...]) -> tuple[Graph | None, tuple[Layer, ...]]:
    """Draw the graph of a step."""
    calls: dict[int, int] = {}
    for call in case.trace.calls:
        calls[id(call.module)] = calls.get(id(call.module), 0) + 1
    drawn = [(name, module) for name, module in case.names.named_modules() if id(module) in calls or _own(module)]
    if case.trace.functional or not drawn:
        return None, ()
    indices = {id(module): place for place, (_, module) in enumerate(drawn)}
    spread = spread_of(case, indices)
    modules = [
        _module_entry(case, name, module, calls.get(id(module), 0), place in spread.path)
        for place, (name, module) in enumerate(drawn)
    ]
    cuts = {f.where: f.code for f in reversed(findings) if f.where is not None and f.code.startswith(("GG1", "GG2"))}
    edges = [
        _edge_entry(case, source, target, edge, cuts)
        for (source, target), edge in _nearest(edges_of(case, indices, spread), len(drawn))
    ]
    owners: dict[int, int] = {}
    for place, (_, module) in enumerate(drawn):
        for parameter in _own(module):
            owners.setdefault(id(parameter), place)
    layers = tuple(
        _layer(case, name, parameter, owners.get(id(parameter)))
        for name, parameter in case.parameters.items()
        if not isinstance(parameter, UninitializedParameter)
    )
    return Graph(modules=modules, edges=edges, nonfinite_path=spread.path), layers


def _own(module: torch.nn.Module) -> list[torch.nn.Parameter]:
    return list(module.parameters(recurse=False))


def _norm(amount: float | None, bad: str | None = None) -> Norm:
    if bad == "nan" or (amount is not None and math.isnan(amount)):
        return "nan"
    if bad == "inf" or (amount is not None and math.isinf(amount)):
        return "inf"
    return amount


def _gradient_norm(gradients: list[Gradient]) -> Norm:
    # A gradient whose values are elsewhere (sharded, meta) has no norm here.
    known = [g for g in gradients if g.present and (g.zero or g.bad is not None or not math.isnan(g.norm))]
    if not known:
        return None
    kinds = {gradient.bad for gradient in known}
    return _norm(
        math.hypot(*(0.0 if g.zero else g.norm for g in known)),
        "nan" if "nan" in kinds else "inf" if "inf" in kinds else None,
    )


def _module_entry(case: Case, name: str, module: torch.nn.Module, calls: int, spoiled: bool) -> GraphModule:
    own = [parameter for parameter in _own(module) if not isinstance(parameter, UninitializedParameter)]
    elements, frozen = sum(p.numel() for p in own), sum(frozen_elements(p) for p in own)
    norm = _gradient_norm([case.gradient(p) for p in own])
    state: Literal["ok", "frozen", "no_gradient", "nonfinite"] = "ok"
    if spoiled or isinstance(norm, str):
        state = "nonfinite"
    elif elements and frozen == elements:
        state = "frozen"
    elif elements and not any(case.gradient(p).present for p in own):
        state = "no_gradient"
    return GraphModule(
        name=name,
        kind=type(module).__name__,
        calls=calls,
        parameters=elements,
        frozen=frozen,
        gradient_norm=norm,
        state=state,
    )


def _nearest(edges: dict[tuple[int, int], Edge], modules: int) -> list[tuple[tuple[int, int], Edge]]:
    ends = sorted(edges, key=lambda ends: (ends[0], ends[1] if ends[1] >= 0 else modules))
    if len(ends) > _MOST_EDGES:
        near = sorted(ends, key=lambda ends: abs((ends[1] if ends[1] >= 0 else modules) - ends[0]))
        kept = set(near[:_MOST_EDGES])
        ends = [pair for pair in ends if pair in kept]
    return [(pair, edges[pair]) for pair in ends]


def _edge_entry(case: Case, source: int, target: int, edge: Edge, codes: dict[str, str]) -> GraphEdge:
    cut: Cut | None = None
    if edge.cut >= 0 and not edge.connected:
        _, where, _ = cut_of(case, case.trace.ops[edge.cut])
        place = where.text if where is not None else None
        cut = Cut(code=codes.get(place or "", "GG101"), where=place, source=where.source if where else None)
    return {
        "from": source,
        "to": target,
        "gradient_norm": _norm(edge.norm),
        "cut": cut,
        "nonfinite": edge.nonfinite,
    }


def _layer(case: Case, name: str, parameter: torch.Tensor, module: int | None) -> Layer:
    gradient, held = case.gradient(parameter), frozen_elements(parameter)
    weight = gradient.weight_norm
    if math.isnan(weight) and is_readable(parameter):
        with undispatched(), torch.no_grad():
            weight = norm_of(parameter)
    readable = is_readable(parameter)
    return Layer(
        name=name,
        module=module,
        shape=list(parameter.shape),
        gradient_norm=_gradient_norm([gradient]),
        weight_norm=_norm(weight) if readable else 0.0 if not parameter.numel() else None,
        learns=not held if held in (0, parameter.numel()) else "part",
    )


# --- edges: what one module gives another -----------------------------------------------------------------------------


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
        """Return the norm of all gradients that came back together; None where none did."""
        return math.hypot(*self.norms) if self.norms else None


@dataclass(frozen=True, slots=True)
class _Origin:
    """Where a value comes from."""

    modules: int = 0
    connected: int = 0
    lost: Lost = ()
    call: int = _OUTSIDE


_NOWHERE = _Origin()


def edges_of(case: Case, indices: dict[int, int], spread: Spread) -> dict[tuple[int, int], Edge]:
    """Find the edges of a step."""
    found = _Edges(case, indices, spread)
    for number, op in enumerate(case.trace.ops):
        found.follow(number, op)
    for code in sorted({code for backward in case.trace.backwards for code in backward.values}):
        found.arrive(LOSS, code, connected=bool(code & 1), cut=-1)
    for path in case.trace.paths:
        found.measure(path)
    found.edges.pop((INPUT, LOSS), None)
    return found.edges


class _Edges:
    def __init__(self, case: Case, indices: dict[int, int], spread: Spread) -> None:
        self.case = case
        self.indices = indices
        self.spread = spread
        self.edges: dict[tuple[int, int], Edge] = {}
        self.origins: dict[int, _Origin] = {}
        self._functions = {node_number(node): value for value, node in case.trace.rejoined.items()}

    def follow(self, number: int, op: Op) -> None:
        """Take in one operation."""
        call, calls, place = op.call, self.case.trace.calls, _OUTSIDE
        if call >= 0 and calls[call].leaf:
            place = self.indices.get(id(calls[call].module), _OUTSIDE)
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
        if not op.inputs and op.call < 0 and not op.operator.shape_only:
            modules = 1  # data that the step makes itself
        if cut and connected:
            lost = _merged(lost, ((number, connected),))
        for value in op.outputs:
            self.origins[value] = _Origin(modules, connected if value in living else 0, lost)

    def arrive(self, place: int, code: int, *, connected: bool, cut: int) -> None:
        """Record that a module reads a value."""
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

    def measure(self, path: GradientPath) -> None:
        """Note a gradient that came back."""
        norm, trace = path.norm, self.case.trace
        if norm is None:
            return
        place = LOSS if path.call == LOSS else self.indices.get(id(trace.calls[path.call].module))
        if place is None:
            return
        for bit in _bits(self._reached(path)):
            edge = self.edges.get((bit - 1, place))
            if edge is not None:
                edge.norms.append(norm)
                edge.nonfinite |= not math.isfinite(norm)

    def _reached(self, path: GradientPath) -> int:
        """Return the modules that the gradient of a path goes on to."""
        trace = self.case.trace
        if path.node < 0:
            values = self.case.values_of.get(path.leaf, [])
        elif path.node in self._functions:
            values = [self._functions[path.node]]
        else:
            number = trace.op_number_of_node.get(path.node)
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
    covered = 0
    for _, mask in one:
        covered |= mask
    return (*one, *((op, mask & ~covered) for op, mask in other if mask & ~covered))


# --- the path of a non-finite value -----------------------------------------------------------------------------------


INPUT = -1


@dataclass(frozen=True)
class Spread:
    """Where it went."""

    path: list[int] = field(default_factory=list)
    values: frozenset[int] = frozenset()


def spread_of(case: Case, indices: dict[int, int]) -> Spread:
    """Follow what did harm in a step."""
    births = births_behind_loss(case)
    if births:
        return _forward_path(case, births, indices)
    births = births_in_backward(case)
    if births and any(case.gradient(p).bad for p in case.parameters.values()):
        return Spread(_backward_path(case, births, indices))
    return Spread()


def _forward_path(case: Case, births: list[BadValue], indices: dict[int, int]) -> Spread:
    trace, behind = case.trace, case.flow.behind_losses
    born = {birth.op: birth for birth in births if birth.stage == "forward"}
    bad = {birth.value for birth in births if birth.stage == "arrived"}
    path = dict.fromkeys(INPUT for value in bad if _is_input(case, value))
    for number, op in enumerate(trace.ops):
        if number not in born and not any(code >> 1 in bad for code in op.inputs):
            continue
        made = [value for value in op.outputs if value in behind and (value in trace.spoiled or op.operator.view)]
        bad.update(made)
        place = indices.get(id(_module_of(case, op)))
        if made and place is not None and (number in born or _works(case, op)):
            path.setdefault(place)
    return Spread([*path, LOSS], frozenset(bad))


def _is_input(case: Case, value: int) -> bool:
    root = case.trace.roots.get(bare_value(case.flow, value))
    return root is None or not case.names.has_tensor(root.number)


def _module_of(case: Case, op: Op) -> torch.nn.Module | None:
    """Return the module that an operation ran for: one that is not drawn does its work for the one that calls it."""
    return case.trace.calls[op.call].module if op.call >= 0 else None


def _works(case: Case, op: Op) -> bool:
    return op.call >= 0 and case.trace.calls[op.call].leaf


def _backward_path(case: Case, births: list[BadValue], indices: dict[int, int]) -> list[int]:
    trace = case.trace
    first = max(births, key=lambda birth: birth.op)
    born = indices.get(id(_module_of(case, trace.ops[first.op])), LOSS) if first.op >= 0 else LOSS
    sent = {id(trace.calls[path.call].module) for path in trace.paths if path.call >= 0 and path.is_bad}
    before = trace.ops[: first.op + 1] if first.op >= 0 else trace.ops
    workers = {id(module): module for op in reversed(before) if _works(case, op) and (module := _module_of(case, op))}
    went = [
        indices[number]
        for number, module in workers.items()
        if number in indices and (number in sent or any(case.gradient(p).bad for p in module.parameters(recurse=False)))
    ]
    return list(dict.fromkeys([born, *went]))
