"""The module graph of a step as plain data: modules, what flows between them, and one entry for each parameter.

A norm that is not finite is the text "nan" or "inf", because JSON knows no such numbers.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch.nn.parameter import UninitializedParameter

from gradgate._state import frozen_elements
from gradgate._torch_private import node_number, undispatched
from gradgate.doctor._case import Case
from gradgate.doctor._numerics import Gradient, is_readable, norm_of
from gradgate.doctor._trace import LOSS, BadValue, GradientPath, Op
from gradgate.doctor.rules._gradients import cut_of
from gradgate.doctor.rules._nonfinite import births_behind_loss, births_in_backward
from gradgate.records import Finding

# --- the graph as plain data ------------------------------------------------------------------------------------------

INPUT = -1
_MOST_EDGES = 2_000

Norm = float | Literal["nan", "inf"] | None
Ends = tuple[int, int]  # of an edge: indices in `modules`, or `INPUT` and `LOSS`
Entry = dict[str, Any]  # what each holds is in docs/packages/doctor.md
Graph = dict[str, list[Any]]


def draw(case: Case, findings: tuple[Finding, ...]) -> tuple[Graph | None, tuple[Entry, ...]]:
    """Draw the graph of a step."""
    calls = Counter(id(call.module) for call in case.trace.calls)
    drawn = [(name, module) for name, module in case.names.named_modules() if calls[id(module)] or _own(module)]
    if case.trace.functional or not drawn:
        return None, ()
    indices = {id(module): place for place, (_, module) in enumerate(drawn)}
    owners = {id(p): place for place, (_, module) in reversed([*enumerate(drawn)]) for p in _own(module)}
    path, bad_values = _path_of_nonfinite(case, indices)
    modules = [
        _module_entry(case, name, module, calls[id(module)], place in path)
        for place, (name, module) in enumerate(drawn)
    ]
    cuts = {f.where: f.code for f in reversed(findings) if f.where is not None and f.code.startswith(("GG1", "GG2"))}
    found = _Edges(case, indices, bad_values).find()
    edges = [_edge_entry(case, *ends, found[ends], cuts) for ends in _nearest(found, len(drawn))]
    initialized = {n: p for n, p in case.parameters.items() if not isinstance(p, UninitializedParameter)}
    layers = tuple(_layer(case, name, p, owners.get(id(p))) for name, p in initialized.items())
    return {"modules": modules, "edges": edges, "nonfinite_path": path}, layers


def _own(module: torch.nn.Module) -> list[torch.nn.Parameter]:
    return list(module.parameters(recurse=False))


def _norm(amount: float | None) -> Norm:
    if amount is None or math.isfinite(amount):
        return amount
    return "nan" if math.isnan(amount) else "inf"


def _gradient_norm(gradients: list[Gradient]) -> Norm:
    # A gradient whose values are elsewhere (sharded, meta) has no norm here.
    known = [g for g in gradients if g.present and (g.zero or g.bad is not None or not math.isnan(g.norm))]
    for kind in ("nan", "inf"):
        if any(gradient.bad == kind for gradient in known):
            return kind
    return _norm(math.hypot(*(0.0 if g.zero else g.norm for g in known))) if known else None


def _module_entry(case: Case, name: str, module: torch.nn.Module, calls: int, spoiled: bool) -> Entry:
    own = [parameter for parameter in _own(module) if not isinstance(parameter, UninitializedParameter)]
    elements, frozen = sum(p.numel() for p in own), sum(frozen_elements(p) for p in own)
    norm = _gradient_norm([case.gradient(p) for p in own])
    state = "ok"
    if spoiled or isinstance(norm, str):
        state = "nonfinite"
    elif elements and frozen == elements:
        state = "frozen"
    elif elements and not any(case.gradient(p).present for p in own):
        state = "no_gradient"
    entry: Entry = {"name": name, "kind": type(module).__name__, "calls": calls, "parameters": elements}
    return entry | {"frozen": frozen, "gradient_norm": norm, "state": state}


def _nearest(edges: Iterable[Ends], modules: int) -> list[Ends]:
    """Return the ends of the edges in the order of modules; of too many, those between the nearest modules."""

    def positions(ends: Ends) -> Ends:
        return ends[0], ends[1] if ends[1] != LOSS else modules

    near = sorted(sorted(edges, key=positions), key=lambda ends: abs(positions(ends)[1] - ends[0]))
    return sorted(near[:_MOST_EDGES], key=positions)


def _edge_entry(case: Case, source: int, target: int, edge: Edge, codes: dict[str, str]) -> Entry:
    cut: Entry | None = None
    if edge.cut >= 0 and not edge.connected:
        where = cut_of(case, case.trace.ops[edge.cut]).where
        place, line = (where.text, where.source) if where is not None else (None, None)
        cut = {"code": codes.get(place or "", "GG101"), "where": place, "source": line}
    norm = _norm(math.hypot(*edge.norms)) if edge.norms else None
    return {"from": source, "to": target, "gradient_norm": norm, "cut": cut, "nonfinite": edge.nonfinite}


def _layer(case: Case, name: str, parameter: torch.Tensor, module: int | None) -> Entry:
    gradient, frozen = case.gradient(parameter), frozen_elements(parameter)
    weight: float | None = gradient.weight_norm
    if not is_readable(parameter):
        weight = 0.0 if not parameter.numel() else None
    elif math.isnan(gradient.weight_norm):
        with undispatched(), torch.no_grad():
            weight = norm_of(parameter)
    norms = {"gradient_norm": _gradient_norm([gradient]), "weight_norm": _norm(weight)}
    learns = not frozen if frozen in (0, parameter.numel()) else "part"
    return {"name": name, "module": module, "shape": list(parameter.shape), **norms, "learns": learns}


# --- edges: what flows between modules --------------------------------------------------------------------------------

LIVE, NEVER = -2, -1  # a gradient comes back to the module; it was never connected; else the operation that cut it off


@dataclass(slots=True)
class Edge:
    """What flows from one module to another."""

    connected: bool = False
    cut: int = -1
    nonfinite: bool = False
    norms: list[float] = field(default_factory=list)


class _Edges:
    def __init__(self, case: Case, indices: dict[int, int], bad_values: frozenset[int]) -> None:
        self.case = case
        self.indices = indices
        self.bad_values = bad_values
        self.edges: dict[Ends, Edge] = {}
        # By value: the modules that it comes from, each `LIVE`, `NEVER` or cut off, and the call that made it.
        self.origins: dict[int, tuple[dict[int, int], int]] = {}
        self._functions = {node_number(node): value for value, node in case.trace.rejoined.items()}

    def find(self) -> dict[Ends, Edge]:
        trace = self.case.trace
        for number, op in enumerate(trace.ops):
            self.follow(number, op)
        for code in sorted({code for backward in trace.backwards for code in backward.codes}):
            self.arrive(LOSS, code, connected=bool(code & 1), cut=-1)
        for path in trace.paths:
            self.measure(path)
        self.edges.pop((INPUT, LOSS), None)
        return self.edges

    def follow(self, number: int, op: Op) -> None:
        """Take in one operation: its results come from the module it runs in; outside of one, from all its inputs."""
        call, calls, flow = op.call, self.case.trace.calls, self.case.flow
        place = self.indices.get(id(calls[call].module)) if call >= 0 and calls[call].leaf else None
        cut = number if op.connected_sources and flow.is_cut(op) else -1
        found = {place: NEVER} if place is not None else dict[int, int]()
        for code in op.inputs:
            modules, maker = self._origin(code >> 1)
            if place is not None and modules and maker != call:
                self.arrive(place, code, connected=bool(code & 1) and cut < 0, cut=cut)
                continue
            if place is not None:  # a parameter, or a result of the same call
                modules = {place: LIVE if code & 1 else modules.get(place, NEVER)}
            for module, state in modules.items():
                if state == LIVE or found.get(module, NEVER) == NEVER:
                    found[module] = state
        if not op.inputs and call < 0 and not op.operator.shape_only:
            found[INPUT] = NEVER  # data that the step makes itself
        inside = flow.is_inside_function(op)  # connected as a whole, if at all
        for value in op.outputs:
            modules = found
            if cut >= 0 or not (inside or value in flow.connected):
                modules = {module: cut if state == LIVE else state for module, state in found.items()}
            elif place is not None:
                modules = {place: LIVE}
            self.origins[value] = modules, call if place is not None else -1

    def arrive(self, place: int, code: int, *, connected: bool, cut: int) -> None:
        """Record that a module reads a value."""
        bad = code >> 1 in self.bad_values
        for module, state in self._origin(code >> 1)[0].items():
            edge = self.edges.setdefault((module, place), Edge())
            edge.nonfinite |= bad
            if state == LIVE and connected:
                edge.connected = True
            else:
                edge.cut = max(edge.cut, cut if state == LIVE else state)

    def measure(self, path: GradientPath) -> None:
        """Add a gradient that came back to the edges that it came along."""
        norm, trace = path.norm, self.case.trace
        place = LOSS if path.call == LOSS else self.indices.get(id(trace.calls[path.call].module))
        if norm is None or place is None:
            return
        if path.node < 0:
            values = self.case.values_of(path.leaf)
        elif path.node in self._functions:
            values = [self._functions[path.node]]
        else:
            values = list(trace.op_of_node(path.node).outputs)
        origins = [self._origin(value)[0].items() for value in values]
        for module in {module for modules in origins for module, state in modules if state == LIVE}:
            if (edge := self.edges.get((module, place))) is not None:
                edge.norms.append(norm)
                edge.nonfinite |= not math.isfinite(norm)

    def _origin(self, value: int) -> tuple[dict[int, int], int]:
        case = self.case
        if value not in self.origins:
            root, modules = case.trace.roots.get(value), dict[int, int]()
            if root and not case.names.has_tensor(root.number) and not isinstance(root.tensor, torch.nn.Parameter):
                modules = {INPUT: LIVE if root.requires_grad else NEVER}
            self.origins[value] = modules, -1
        return self.origins[value]


# --- the path of a non-finite value -----------------------------------------------------------------------------------


def _path_of_nonfinite(case: Case, indices: dict[int, int]) -> tuple[list[int], frozenset[int]]:
    """Return the modules that the cause of a bad loss or gradient went through, and the bad values of forward."""
    births = births_behind_loss(case)
    if births:
        return _forward_path(case, births, indices)
    births = births_in_backward(case)
    if births and any(case.gradient(p).bad for p in case.parameters.values()):
        return _backward_path(case, births, indices), frozenset()
    return [], frozenset()


def _forward_path(case: Case, births: list[BadValue], indices: dict[int, int]) -> tuple[list[int], frozenset[int]]:
    trace, behind = case.trace, case.flow.behind_losses
    born = {birth.op for birth in births if birth.stage == "forward"}
    bad = {birth.value for birth in births if birth.stage == "arrived"}
    roots = [trace.roots.get(case.flow.bare_value(value)) for value in bad]
    path = dict.fromkeys(INPUT for root in roots if root is None or not case.names.has_tensor(root.number))
    for number, op in enumerate(trace.ops):
        if number not in born and bad.isdisjoint(op.sources):
            continue
        made = [value for value in op.outputs if value in behind and (value in trace.spoiled or op.operator.view)]
        bad.update(made)
        place = _place_of(case, op, indices)
        if made and place is not None and (number in born or trace.calls[op.call].leaf):
            path.setdefault(place)
    return [*path, LOSS], frozenset(bad)


def _place_of(case: Case, op: Op, indices: dict[int, int]) -> int | None:
    """Return the module that an operation ran for: one that is not drawn does its work for the one that calls it."""
    return indices.get(id(case.trace.calls[op.call].module)) if op.call >= 0 else None


def _backward_path(case: Case, births: list[BadValue], indices: dict[int, int]) -> list[int]:
    trace = case.trace
    first = max(birth.op for birth in births)
    born = _place_of(case, trace.op(first), indices)
    path = {born if born is not None else LOSS: None}
    sent = {
        id(trace.calls[path.call].module)
        for path in trace.paths
        if path.call >= 0 and not math.isfinite(path.norm or 0)
    }
    before = trace.ops[: first + 1] if first >= 0 else trace.ops
    worked = [trace.calls[op.call] for op in reversed(before) if op.call >= 0]
    for module in {call.module: None for call in worked if call.leaf and id(call.module) in indices}:
        if id(module) in sent or any(case.gradient(p).bad for p in _own(module)):
            path.setdefault(indices[id(module)])
    return list(path)
