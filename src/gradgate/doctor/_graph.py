"""The module graph of a step as plain data: modules, what flows between them, and one entry for each parameter.

A norm that is not finite is the text "nan" or "inf", because JSON knows no such numbers.
"""

from __future__ import annotations

import math
from typing import Literal, TypedDict

import torch
from torch.nn.parameter import UninitializedParameter

from gradgate._held import held_elements
from gradgate._torch_compat import undispatched
from gradgate.doctor._case import Case
from gradgate.doctor._cuts import cut_of
from gradgate.doctor._edges import Edge, edges_of
from gradgate.doctor._gradients import Gradient
from gradgate.doctor._looking import is_readable, norm_of
from gradgate.doctor._spread import spread_of
from gradgate.records import Finding

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

`from` and `to` are places in `Graph.modules`; `from` is -1 for what comes from outside the modules, `to` is -2 for the
loss. Only modules that call no other have edges; what is computed between them (a residual sum, a concatenation) is
passed through, and so are modules that hand on the very tensor that they are given. `gradient_norm` is the 2-norm of
the gradient of the tensors that `to` read, as it came back out of `to`; None if none came back or it could not be
read. `nonfinite` says whether that gradient, or a value on its way to a bad loss, is NaN or infinite. At most 2,000
edges are told: of more, those between the nearest modules.
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
    places = {id(module): place for place, (_, module) in enumerate(drawn)}
    spread = spread_of(case, places)
    modules = [
        _module(case, name, module, calls.get(id(module), 0), place in spread.path)
        for place, (name, module) in enumerate(drawn)
    ]
    cuts = {f.where: f.code for f in reversed(findings) if f.where is not None and f.code.startswith(("GG1", "GG2"))}
    edges = [
        _edge(case, source, target, edge, cuts)
        for (source, target), edge in _nearest(edges_of(case, places, spread), len(drawn))
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


def _module(case: Case, name: str, module: torch.nn.Module, calls: int, spoiled: bool) -> GraphModule:
    own = [parameter for parameter in _own(module) if not isinstance(parameter, UninitializedParameter)]
    elements, frozen = sum(p.numel() for p in own), sum(held_elements(p) for p in own)
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


def _edge(case: Case, source: int, target: int, edge: Edge, codes: dict[str, str]) -> GraphEdge:
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
    gradient, held = case.gradient(parameter), held_elements(parameter)
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
