"""How a NaN or an infinity that does harm went from module to module."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from gradgate.doctor._case import Case
from gradgate.doctor._nonfinite import births_behind_loss, births_in_backward
from gradgate.doctor._trace import BadValue, Op
from gradgate.doctor._traps import bare_value
from gradgate.doctor._ways import LOSS

INPUT = -1


@dataclass(frozen=True)
class Spread:
    """Where it went."""

    path: list[int] = field(default_factory=list)
    values: frozenset[int] = frozenset()


def spread_of(case: Case, places: dict[int, int]) -> Spread:
    """Follow what did harm in a step."""
    births = births_behind_loss(case)
    if births:
        return _forward(case, births, places)
    births = births_in_backward(case)
    if births and any(case.gradient(p).bad for p in case.parameters.values()):
        return Spread(_backward(case, births, places))
    return Spread()


def _forward(case: Case, births: list[BadValue], places: dict[int, int]) -> Spread:
    trace, behind = case.trace, case.flow.behind_losses
    born = {birth.op: birth for birth in births if birth.stage == "forward"}
    bad = {birth.value for birth in births if birth.stage == "arrived"}
    path = dict.fromkeys(INPUT for value in bad if _is_input(case, value))
    for number, op in enumerate(trace.ops):
        if number not in born and not any(code >> 1 in bad for code in op.inputs):
            continue
        made = [value for value in op.outputs if value in behind and (value in trace.spoiled or op.operator.view)]
        bad.update(made)
        place = places.get(id(_module(case, op)))
        if made and place is not None and (number in born or _works(case, op)):
            path.setdefault(place)
    return Spread([*path, LOSS], frozenset(bad))


def _is_input(case: Case, value: int) -> bool:
    root = case.trace.roots.get(bare_value(case.flow, value))
    return root is None or not case.names.has_tensor(root.number)


def _module(case: Case, op: Op) -> torch.nn.Module | None:
    """Give the module that an operation ran for: one that is not drawn does its work for the one that calls it."""
    return case.trace.calls[op.call].module if op.call >= 0 else None


def _works(case: Case, op: Op) -> bool:
    return op.call >= 0 and case.trace.calls[op.call].leaf


def _backward(case: Case, births: list[BadValue], places: dict[int, int]) -> list[int]:
    trace = case.trace
    first = max(births, key=lambda birth: birth.op)
    born = places.get(id(_module(case, trace.ops[first.op])), LOSS) if first.op >= 0 else LOSS
    sent = {id(trace.calls[way.call].module) for way in trace.ways if way.call >= 0 and way.is_bad}
    before = trace.ops[: first.op + 1] if first.op >= 0 else trace.ops
    workers = {id(module): module for op in reversed(before) if _works(case, op) and (module := _module(case, op))}
    went = [
        places[number]
        for number, module in workers.items()
        if number in places and (number in sent or any(case.gradient(p).bad for p in module.parameters(recurse=False)))
    ]
    return list(dict.fromkeys([born, *went]))
