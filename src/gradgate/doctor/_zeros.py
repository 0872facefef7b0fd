"""Gradients that are there and do nothing: all zero, vanishing or exploding, with the line that made them so."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from typing import NamedTuple

import torch

from gradgate._names import listed
from gradgate.doctor._case import Case, finding_at, module_of_names
from gradgate.doctor._trace import ZeroGradient
from gradgate.records import Finding, Severity


class Way(NamedTuple):
    """One way to lose a gradient: the beginnings of the names of its nodes, and what to say about it."""

    nodes: tuple[str, ...]
    code: str
    severity: Severity
    why: str
    fix: str


_WAYS = (
    Way(
        ("Round", "Sign", "Floor", "Ceil", "Trunc", "Heaviside", "Frac", "Sgn"),
        "GG301",
        "error",
        "a step function is flat everywhere, so its gradient is zero.",
        "y = gg.straight_through(x.round(), x)     # the value of the first, the gradient of the second",
    ),
    Way(
        ("Relu", "Threshold", "LeakyRelu", "Hardtanh", "Relu6"),
        "GG302",
        "warning",
        "every unit is at zero for every sample (dead ReLU), so no gradient comes back through it.",
        "nn.LeakyReLU(0.01)     # or a smaller learning rate, or another initialisation of the bias",
    ),
    Way(
        ("Sigmoid", "Tanh", "Softmax", "LogSoftmax", "Hardsigmoid", "Gelu", "Erf"),
        "GG303",
        "warning",
        "every unit is saturated: the function is flat there in floating point.",
        "normalise what goes in (nn.LayerNorm), or use the loss that takes logits",
    ),
    Way(
        ("Clamp", "Minimum", "Maximum", "Hardswish"),
        "GG303",
        "warning",
        "every value lies outside the range of the clamp, where it is flat.",
        "y = gg.straight_through(x.clamp(low, high), x)     # clamps the value, keeps the gradient",
    ),
    Way(
        ("Where", "MaskedFill", "MaskedScatter", "IndexPut", "Index", "MaskedSelect"),
        "GG305",
        "warning",
        "the mask throws everything away in this step.",
        "losses.reduce(per_element, keep=keep)     # and look at how the mask is made",
    ),
    Way(
        ("Mul", "Mm", "Addmm", "Bmm", "Convolution", "Div", "Dot", "Mv", "Einsum", "Linear", "NativeDropout"),
        "GG304",
        "warning",
        "it is multiplied by zero.",
        "look at the factor: a loss weight, a mask or a layer that gives only zeros",
    ),
)
_UNKNOWN = Way((), "GG305", "info", "nothing of it is left.", "look at what this line gives")
_LINEAR = _WAYS[-1].nodes
_VANISHED = 1e-8
_EXPLODED = 1e8


def find_zeros(case: Case) -> Iterator[Finding]:
    """Explain every parameter whose gradient is all zero."""
    if case.exception is not None or case.trace.overwrites:
        return
    flow = case.flow
    idle = {
        name: p
        for name, p in case.parameters.items()
        if case.gradient(p).present and case.gradient(p).zero and p.requires_grad and p.numel()
    }
    blamed: defaultdict[ZeroGradient, list[str]] = defaultdict(list)
    for name, parameter in idle.items():
        values = set(case.values_of.get(id(parameter), []))
        if not flow.is_connected(values):
            continue
        births = [z for z in case.trace.zeros if z.op >= 0 and values & flow.sources(_read(case, z))]
        birth = _culprit(case, births)
        if birth is not None:
            blamed[birth].append(name)
    for birth, names in blamed.items():
        yield _finding(case, birth, names)


def _read(case: Case, zero: ZeroGradient) -> list[int]:
    return [code >> 1 for code in case.trace.ops[zero.op].inputs]


def _culprit(case: Case, births: list[ZeroGradient]) -> ZeroGradient | None:
    """Choose the cause: what flattens goes before what multiplies, and a factor that learns is no fault."""
    flat = [z for z in births if not z.node_name.startswith(_LINEAR)]
    if flat:
        return flat[-1]
    for zero in births:
        if _is_factor_that_learns(case, zero):
            return None
        behind = case.flow.sources(_read(case, zero))
        for other in case.trace.zeros:
            made = set(case.trace.ops[other.op].outputs) if other.op >= 0 else set()
            if not other.node_name.startswith(_LINEAR) and made & behind:
                return other
    return births[-1] if births else None


def _is_factor_that_learns(case: Case, zero: ZeroGradient) -> bool:
    """Tell whether the zero is a parameter that starts at zero and has a gradient (LoRA, zero-initialised layers)."""
    leaves: dict[int, torch.Tensor] = {id(p): p for p in case.parameters.values()}
    for value in case.flow.sources(_read(case, zero)):
        root = case.trace.roots.get(value)
        leaf = leaves.get(root.number) if root is not None else None
        gradient = case.gradient(leaf) if leaf is not None else None
        if gradient is not None and gradient.present and not gradient.zero and gradient.weight_norm == 0:
            return True
    return False


def _finding(case: Case, zero: ZeroGradient, names: list[str]) -> Finding:
    op = case.trace.ops[zero.op]
    where = op.location
    shown = where.expression if where is not None else op.operator.name
    way = next((way for way in _WAYS if zero.node_name.startswith(way.nodes)), _UNKNOWN)
    return finding_at(
        where,
        way.code,
        way.severity,
        f"the gradient of {listed(names, 4)} is zero: lost at `{shown}`",
        reason=f"In the backward of this line ({zero.node_name}) the gradient becomes zero: {way.why}",
        fix=way.fix,
        module=case.module(op) or module_of_names(names),
    )


def find_sizes(case: Case) -> Iterator[Finding]:
    """Find layers whose gradient is out of all proportion."""
    if case.exception is not None:
        return
    squares: defaultdict[str, float] = defaultdict(float)
    counts: defaultdict[str, int] = defaultdict(int)
    for name, parameter in case.parameters.items():
        gradient = case.gradient(parameter)
        if gradient.present and gradient.bad is None and not gradient.zero and math.isfinite(gradient.norm):
            layer = name.rpartition(".")[0] or name
            squares[layer] += gradient.norm**2
            counts[layer] += parameter.numel()
    sizes = {layer: math.sqrt(squares[layer] / counts[layer]) for layer in squares}
    if len(sizes) < 2:
        return
    largest = max(sizes, key=lambda layer: sizes[layer])
    vanished = [layer for layer, size in sizes.items() if size < _VANISHED * sizes[largest] and size < _VANISHED]
    if vanished:
        yield finding_at(
            None,
            "GG306",
            "warning",
            f"the gradient vanishes: {listed(vanished, 3)} gets {sizes[vanished[0]]:.1e} where {largest} gets "
            f"{sizes[largest]:.1e}",
            reason="On the way back each layer made it smaller (saturated units, too small weights, many layers).",
            fix="residual connections, nn.LayerNorm, or another initialisation (nn.init.kaiming_normal_)",
            module=vanished[0],
        )
    exploded = [layer for layer in sizes if math.sqrt(squares[layer]) > _EXPLODED]
    if exploded:
        yield finding_at(
            None,
            "GG307",
            "warning",
            f"the gradient explodes: the norm at {listed(exploded, 3)} is {math.sqrt(squares[exploded[0]]):.1e}",
            reason="On the way back each layer made it larger, or the loss itself is that large.",
            fix="torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)",
            module=exploded[0],
        )
