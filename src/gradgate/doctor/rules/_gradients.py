"""Parameters without a gradient (frozen, unused or cut off, and by which line), and gradients that do nothing."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch.nn.parameter import UninitializedParameter

from gradgate._names import listed
from gradgate._source import Location, SourceLine, definition, region_header
from gradgate._text import text_of
from gradgate._torch_private import undispatched
from gradgate.doctor._case import Case, Unused, finding_at, module_of_names
from gradgate.doctor._numerics import is_readable, norm_of
from gradgate.doctor._trace import Escape, Op, ZeroGradient
from gradgate.records import Finding, Severity

# --- no gradient ------------------------------------------------------------------------------------------------------


Cut = tuple[str, Location | SourceLine | None, Location | None]
_ON_PURPOSE = ("detach", "data", "no_grad", "inference_mode")


_COMPARISONS = {
    "gt",
    "ge",
    "lt",
    "le",
    "eq",
    "ne",
    "isnan",
    "isfinite",
    "isinf",
    "logical_and",
    "logical_or",
    "logical_not",
}
_INDEX_OPS = {"argmax", "argmin", "argsort", "nonzero", "bucketize", "searchsorted", "bincount", "histc", "multinomial"}

# How a value leaves autograd, why that is so, and what to write instead.
_CUTS: dict[str, tuple[str, str]] = {
    "detach": ("`.detach()` gives the value without its history.", "h = h          # without .detach()"),
    "data": (
        "`.data` gives the value without its history, and lets writes pass unnoticed.",
        "h = h          # without .data",
    ),
    "torch.tensor": (
        "`torch.tensor(x)` copies the value into a new leaf; its history is not copied.",
        "h = x          # or x.clone(); a list of tensors: torch.stack(list_of_tensors)",
    ),
    "item": (
        "`.item()` gives a Python number; autograd ends there.",
        "loss = loss + value     # keep the tensor; .item() is for logs",
    ),
    "float": (
        "`float(x)` gives a Python number; autograd ends there.",
        "loss = loss + value     # keep the tensor; float() is for logs",
    ),
    "int": ("`int(x)` gives a Python number; autograd ends there.", "keep the tensor; an index has no gradient"),
    "tolist": (
        "`.tolist()` gives Python numbers; autograd ends there.",
        "keep the tensor; torch.stack(list_of_tensors) joins tensors",
    ),
    "numpy": (
        "NumPy knows nothing of autograd; the way through it ends the history.",
        "torch has the same function; or write a torch.autograd.Function",
    ),
    "no_grad": (
        "nothing is recorded inside this block, so what is computed there has no history.",
        "with torch.enable_grad():     # around what has to learn, or take it out of the block",
    ),
    "inference_mode": (
        "nothing is recorded inside inference mode, so what is computed there has no history.",
        "compute what has to learn outside of torch.inference_mode()",
    ),
    "off": (
        "recording was switched off before this step began, and nobody switched it on again.",
        "torch.set_grad_enabled(True)",
    ),
    "checkpoint": (
        "a re-entrant checkpoint records only if one of its inputs requires grad, and none does.",
        "checkpoint(fn, x, use_reentrant=False)",
    ),
    "function": (
        "inside an autograd Function nothing is recorded, and its result was not connected.",
        "return the result itself from forward(), and do not mark it as non-differentiable",
    ),
    "argmax": (
        "the place of a value is a whole number: small changes of the value do not move it, so it has no gradient.",
        "p = torch.softmax(scores, dim=-1)     # soft choice; gg.straight_through(hard, soft) keeps the hard value",
    ),
    "comparison": (
        "a comparison answers yes or no; it has no gradient.",
        "gg.straight_through((x > 0).float(), torch.sigmoid(x))     # hard value, soft gradient",
    ),
    "integer": (
        "whole numbers have no gradient.",
        "keep x a float; gg.straight_through(x.round(), x) rounds and keeps the gradient",
    ),
    "operator": ("this operation has no derivative.", "use an operation that has one, or a torch.autograd.Function"),
}


def find_cuts(case: Case) -> Iterator[Finding]:
    """Explain every parameter that ought to learn and got no gradient."""
    passes = case.trace.backwards
    if not passes or case.trace.functional:
        return
    # An update by hand that meets a gradient of None raises; what took the gradient away comes first.
    if case.exception is not None and not (passes[-1].completed and "NoneType" in text_of(case.exception)):
        return
    yield from _frozen(case)
    lost = {name: p for name, p in case.parameters.items() if p.requires_grad and _is_lost(case, p)}
    yield from explain_parameters(case, lost)


def find_loss_without_graph(case: Case) -> Iterator[Finding]:
    """Explain "element 0 of tensors does not require grad": where the whole loss lost its graph."""
    errors = [e for e in case.errors if "does not require grad and does not have a grad_fn" in e.text]
    if not errors or not case.trace.backwards:
        return
    title = "the loss is not connected to any parameter: element 0 of tensors does not require grad"
    severity, backward = case.severity_of(errors[-1]), case.trace.backwards[errors[-1].backward].location
    learners = {name: p for name, p in case.parameters.items() if p.requires_grad}
    frozen = [name for name, p in case.parameters.items() if not p.requires_grad]
    used = [n for n in frozen if _is_read_after_cuts(case, case.parameters[n])]
    switched = [case.frozen_at[id(case.parameters[n])] for n in used if id(case.parameters[n]) in case.frozen_at]
    if switched or (frozen and not learners):
        yield finding_at(
            switched[0].location if switched else backward,
            "GG201",
            severity,
            title,
            reason=f"{listed(used or frozen, 4)} {_are(used or frozen)} frozen: requires_grad is False"
            + (", switched off at this line and not on again." if switched else "."),
            fix="model.requires_grad_(True)     # before the step that trains it",
            module=module_of_names(used or frozen),
            also=[backward],
        )
        return
    cuts = [cause for cause in explain_parameters(case, learners) if cause.code == "GG101"]
    if cuts:
        first = cuts[0]
        yield Finding(
            code="GG201",
            severity=severity,
            title=title,
            where=first.where,
            source=first.source,
            module=first.module,
            reason=f"Every path from the parameters to the loss is cut. Here: {first.reason}",
            fix=first.fix,
            also=(*((backward.text,) if backward else ()), *(cut.where for cut in cuts[1:] if cut.where)),
        )
        return
    yield finding_at(
        backward,
        "GG201",
        severity,
        title,
        reason="No tensor that requires grad takes part in the loss.",
        fix="loss = loss_fn(model(x), y)     # computed from the model's output",
    )


def _is_read_after_cuts(case: Case, parameter: torch.Tensor) -> bool:
    """Return whether a loss was computed from a parameter, and nearer to the loss than any cut."""
    values = case.values_of.get(id(parameter), [])
    last = max((number for value in values for number in case.flow.readers.get(value, ())), default=-1)
    return case.flow.reaches_loss(values) and last > max(case.flow.cuts, default=-1)


def _is_lost(case: Case, parameter: torch.Tensor) -> bool:
    passes = [backward for backward in case.trace.backwards if backward.inputs is not None]
    if any(id(parameter) in (b.inputs or ()) and id(parameter) not in b.missing for b in passes):
        return False
    if passes and len(passes) == len(case.trace.backwards):
        # Only torch.autograd.grad was called: what was asked for and not given.
        return any(id(parameter) in backward.missing for backward in passes)
    gradient = case.gradient(parameter)
    if gradient.present and not gradient.zero:
        return False
    connected = case.flow.is_connected(case.values_of.get(id(parameter), []))
    # zero_grad(set_to_none=False) leaves zeros if no gradient arrives; zero_grad() after backward takes all away.
    return not connected if gradient.present or case.is_cleared else True


def _frozen(case: Case) -> Iterator[Finding]:
    frozen = [name for name, p in case.parameters.items() if not p.requires_grad]
    if not frozen:
        return
    switched = [case.frozen_at[id(p)] for name in frozen if id(p := case.parameters[name]) in case.frozen_at]
    held = [[p for g in step.optimizer.param_groups for p in g["params"]] for step in case.trace.optimizer_steps]
    everything = len(frozen) == len(case.parameters) or any(ps and not any(p.requires_grad for p in ps) for ps in held)
    again = [switch for switch in switched if switch.again or case.one_step]
    yield finding_at(
        switched[0].location if switched else None,
        "GG104",
        "error" if everything else "warning" if again else "info",
        f"{'all parameters are' if everything else f'{listed(frozen, 4)} {_are(frozen)}'} frozen",
        reason="requires_grad is False, so no gradient is computed for it."
        + (" This line switched it off, and no line switched it on again before the step." if switched else ""),
        fix="parameter.requires_grad_(True)     # if it ought to learn",
        module=module_of_names(frozen),
    )


def explain_parameters(case: Case, lost: dict[str, torch.Tensor]) -> Iterator[Finding]:
    """Say why parameters get no gradient."""
    by_cut: defaultdict[Cut, list[str]] = defaultdict(list)
    unused, aside, refused = [], [], []
    for name, parameter in lost.items():
        values = case.values_of.get(id(parameter), [])
        cuts = case.flow.cuts_of(values)
        if not case.flow.is_used(values):
            unused.append(name)
        elif cuts:
            for cut in _decisive([cut_of(case, case.trace.ops[number]) for number in cuts]):
                by_cut[cut].append(name)
        elif case.flow.is_connected(values):
            refused.append(name)
        elif (escape := _escape_of(case, values)) is not None:
            by_cut[escape.kind, escape.location, None].append(name)
        else:
            aside.append(name)
    yield from _cut_findings(case, by_cut)
    yield from _refused_by_function(case, refused)
    if aside:
        yield _aside(case, aside)
    found = [Unused(n, lost[n], case.call_of(lost[n]), _is_routed(case, n)) for n in unused]
    if case.one_step:
        yield from unused_findings(found)
    else:  # another step may use it
        case.unused.extend(found)


def unused_findings(unused: list[Unused]) -> Iterator[Finding]:
    """Say that parameters are not used; an expert that got no sample in this step is no fault."""
    for routed in (False, True):
        group = [entry for entry in unused if entry.routed is routed]
        names = [entry.name for entry in group]
        shown = [repr(name) for name in names[:2]]
        if group:
            yield finding_at(
                group[0].location,
                "GG102",
                "info" if routed else "warning",
                f"{listed(names, 4)} {_are(names)} not used in this step",
                reason="Others of the same list are used: the samples of this step were routed to them."
                if routed
                else "No operation of the step reads it, so it gets no gradient and does not learn.",
                fix=""
                if routed
                else f"use it in forward(), or take it out of the model: gg.freeze(model, {', '.join(shown)})",
                module=module_of_names(names),
            )


_ROUTING = {"topk", "max", "argmax", "sort", "argsort", "multinomial", "nonzero", "kthvalue"}


def _is_routed(case: Case, name: str) -> bool:
    """Return whether a sibling in the same list learned, and the step chose something by learned scores."""
    parts, own = name.split("."), case.parameters[name]
    for position, part in enumerate(parts):
        if not part.isdigit() or isinstance(own, UninitializedParameter):
            continue
        for other, parameter in case.parameters.items():
            there = other.split(".")
            sibling = len(there) == len(parts) and there[position].isdigit() and there[position] != part
            same = sibling and parts[:position] + parts[position + 1 :] == there[:position] + there[position + 1 :]
            if same and case.gradient(parameter).present and parameter.numel() == own.numel():
                return any(op.operator.name in _ROUTING and any(c & 1 for c in op.inputs) for op in case.trace.ops)
    return False


def _decisive(cuts: list[Cut]) -> list[Cut]:
    """Leave out a mask or an index computed from a value, if the value itself is cut off as well."""
    return [cut for cut in cuts if cut[0] not in ("comparison", "argmax", "integer", "operator")] or cuts


def _targets(case: Case, names: list[str]) -> list[str]:
    """Return those names that belong to a copy of a module that learns (a target network of BYOL, DQN, MoCo)."""
    # A copy has the shapes and, up to a moving average, the values of the module that learns, and that module does not
    # compute with what the copy gives.
    copies: dict[str, bool] = {}
    owner: dict[str, str] = {}
    for name in names:
        twins = [twin for other in case.parameters if (twin := _twin_prefix(case, name, other)) is not None]
        if twins:
            owner[name] = twins[0]
            copies.setdefault(twins[0], True)
        for prefix in copies if not twins and case.parameters[name].dim() > 1 else ():
            copies[prefix] &= not name.startswith(f"{prefix}.")
    return [name for name in names if name in owner and copies[owner[name]]]


def _twin_prefix(case: Case, name: str, other: str) -> str | None:
    """Return the path of the module that a parameter belongs to, if another parameter is its counterpart elsewhere."""
    one, two = case.parameters[name], case.parameters[other]
    parts, others = name.split("."), other.split(".")
    differing = [i for i, (x, y) in enumerate(zip(parts, others, strict=False)) if x != y]
    alike = len(parts) == len(others) and len(differing) == 1 and differing[0] < len(parts) - 1
    if not (alike and case.gradient(two).present and one.shape == two.shape):
        return None
    with undispatched(), torch.no_grad():
        if not (is_readable(one) and is_readable(two)) or (one.dim() > 1 and norm_of(one - two) > 0.5 * norm_of(two)):
            return None
    results = case.flow.results(case.values_of.get(id(one), []))
    readers = [n for value in case.values_of.get(id(two), []) for n in case.flow.readers.get(value, ())]
    if any(code >> 1 in results for number in readers for code in case.trace.ops[number].inputs):
        return None
    return ".".join(parts[: differing[0] + 1])


def _severity(case: Case) -> Severity:
    return "error" if case.known_model else "warning"


def _cut_findings(case: Case, by_cut: dict[Cut, list[str]]) -> Iterator[Finding]:
    merged: dict[tuple[str, str | None], tuple[Location | SourceLine | None, list[Location | None], list[str]]] = {}
    for (kind, where, inner), names in by_cut.items():
        entry = merged.setdefault((kind, where.text if where is not None else None), (where, [], []))
        entry[1].append(inner)
        entry[2].extend(name for name in names if name not in entry[2])
    for (kind, _), (where, inside, names) in merged.items():
        targets = _targets(case, names) if kind in _ON_PURPOSE else []
        for group in ([name for name in names if name not in targets], targets):
            if group:
                yield _cut_finding(case, kind, where, inside, group, on_purpose=group is targets)


def _cut_finding(
    case: Case,
    kind: str,
    where: Location | SourceLine | None,
    inside: list[Location | None],
    names: list[str],
    on_purpose: bool,
) -> Finding:
    why, fix = _CUTS[kind]
    learned = any(case.gradient(p).present for p in case.parameters.values())
    # Nobody said what ought to learn: another network under no_grad may well be a teacher.
    on_purpose |= kind in ("no_grad", "inference_mode") and not case.known_model and learned
    them = "it" if len(names) == 1 else "them"
    return finding_at(
        where,
        "GG101",
        "info" if on_purpose else _severity(case),
        f"{listed(names, 4)} {_gets(names)} no gradient: cut at `{_short(where)}`",
        reason=f"The loss is computed from {them}, but {why}"
        + (" That is as it should be for a target network, the copy of one that learns." if on_purpose else ""),
        fix="" if on_purpose else fix,
        module=module_of_names(names),
        also=inside,
    )


def _are(names: list[str]) -> str:
    return "is" if len(names) == 1 else "are"


def _gets(names: list[str]) -> str:
    return "gets" if len(names) == 1 else "get"


def _short(where: Location | SourceLine | None) -> str:
    text = where.expression if where is not None else "an unknown line"
    return text if len(text) <= 80 else text[:77] + "..."


def cut_of(case: Case, op: Op) -> Cut:
    """Say how an operation cuts."""
    where = op.location
    if not op.records:
        return _region_of(case, op, where)
    name = op.operator.name
    if op.arguments and op.arguments[0] in _CUTS:
        return op.arguments[0], where, None
    if name in ("detach", "detach_"):
        return "detach", where, None
    if name in _COMPARISONS or name.startswith("logical_"):
        return "comparison", where, None
    if name in _INDEX_OPS or name.startswith(("arg", "topk")):
        return "argmax", where, None
    if name in ("_to_copy", "to"):
        return "integer", where, None
    return "operator", where, None


def _region_of(case: Case, op: Op, where: Location | None) -> Cut:
    if op.switch >= 0:
        switch = case.trace.switches[op.switch]
        begun: Location | SourceLine | None = switch.location
        if "heckpoint" in switch.by:
            return "checkpoint", begun, None
        if isinstance(begun, Location) and where is not None and begun.code is not where.code:
            # A decorator: the line that called the decorated function is not the line that cuts.
            begun = region_header(where, ("no_grad", "set_grad_enabled", "inference_mode")) or begun
        return "no_grad", begun, where
    if any(value in case.trace.inference_values for value in op.outputs):
        header = region_header(where, ("inference_mode",)) if where is not None else None
        return "inference_mode", header or where, where
    if not case.trace.recording_at_start:
        return "off", where, None
    return "function", where, None


def _escape_of(case: Case, values: list[int]) -> Escape | None:
    """Find where values left torch, if something that came from outside later entered the loss."""
    made = case.flow.results(values)
    brought = [value for value in case.flow.behind_losses if value in case.trace.roots and value not in made]
    last = max((case.flow.readers[value][0] for value in brought if case.flow.readers.get(value)), default=-1)
    end = case.trace.backwards[-1].after if case.trace.backwards else len(case.trace.ops)
    left = [e for e in case.trace.escapes if e.value in made and e.kind in _CUTS and e.after <= end]
    # A number in a formula (`x * h.item()`) comes in with the operation itself, not with a tensor.
    entered = [e for e in left if e.after <= last] or left
    return next((e for e in reversed(entered) if e.floating), entered[-1] if entered else None)


def _refused_by_function(case: Case, names: list[str]) -> Iterator[Finding]:
    if not names or case.errors:
        return
    functions = {f for backward in case.trace.backwards for f in backward.functions.values()}
    own = sorted((f for f in functions if not f.__module__.startswith("torch.")), key=lambda f: f.__qualname__)
    for function in own[:1]:
        yield finding_at(
            definition(function.backward.__code__),
            "GG105",
            _severity(case),
            f"{listed(names, 4)} {_gets(names)} no gradient: {function.__name__}.backward() gives None",
            reason="An autograd Function that returns None for an input stops the gradient there.",
            fix="return a gradient for each tensor that forward() takes, in the same order",
            module=module_of_names(names),
        )
    if not own:
        yield finding_at(
            None,
            "GG103",
            "warning",
            f"{listed(names, 4)} {_gets(names)} no gradient, though connected to the loss",
            reason="The loss does not depend on it by any way that has a derivative, or a hook took the gradient away.",
            fix="look at the hooks on it and on what it is used in",
            module=module_of_names(names),
        )


def _aside(case: Case, names: list[str]) -> Finding:
    last = None
    for name in names:
        for value in case.flow.results(case.values_of.get(id(case.parameters[name]), [])):
            number = case.flow.maker.get(value)
            if number is not None and (last is None or number > last):
                last = number
    where = case.trace.ops[last].location if last is not None else None
    them = "it" if len(names) == 1 else "them"
    return finding_at(
        where,
        "GG103",
        "warning",
        f"{listed(names, 4)} {_are(names)} used, but the loss does not depend on {them}",
        reason="What is computed from it ends here; it never enters the loss, so it gets no gradient.",
        fix="loss = loss + weight * auxiliary_loss     # or leave the computation out",
        module=module_of_names(names),
    )


# --- gradients that are zero, vanish or explode -----------------------------------------------------------------------


class Flat(NamedTuple):
    """One flat to lose a gradient: the beginnings of the names of its nodes, and what to say about it."""

    nodes: tuple[str, ...]
    code: str
    severity: Severity
    why: str
    fix: str


_FLAT = (
    Flat(
        ("Round", "Sign", "Floor", "Ceil", "Trunc", "Heaviside", "Frac", "Sgn"),
        "GG301",
        "error",
        "a step function is flat everywhere, so its gradient is zero.",
        "y = gg.straight_through(x.round(), x)     # the value of the first, the gradient of the second",
    ),
    Flat(
        ("Relu", "Threshold", "LeakyRelu", "Hardtanh", "Relu6"),
        "GG302",
        "warning",
        "every unit is at zero for every sample (dead ReLU), so no gradient comes back through it.",
        "nn.LeakyReLU(0.01)     # or a smaller learning rate, or another initialisation of the bias",
    ),
    Flat(
        ("Sigmoid", "Tanh", "Softmax", "LogSoftmax", "Hardsigmoid", "Gelu", "Erf"),
        "GG303",
        "warning",
        "every unit is saturated: the function is flat there in floating point.",
        "normalise what goes in (nn.LayerNorm), or use the loss that takes logits",
    ),
    Flat(
        ("Clamp", "Minimum", "Maximum", "Hardswish"),
        "GG303",
        "warning",
        "every value lies outside the range of the clamp, where it is flat.",
        "y = gg.straight_through(x.clamp(low, high), x)     # clamps the value, keeps the gradient",
    ),
    Flat(
        ("Where", "MaskedFill", "MaskedScatter", "IndexPut", "Index", "MaskedSelect"),
        "GG305",
        "warning",
        "the mask throws everything away in this step.",
        "losses.reduce(per_element, keep=keep)     # and look at how the mask is made",
    ),
    Flat(
        ("Mul", "Mm", "Addmm", "Bmm", "Convolution", "Div", "Dot", "Mv", "Einsum", "Linear", "NativeDropout"),
        "GG304",
        "warning",
        "it is multiplied by zero.",
        "look at the factor: a loss weight, a mask or a layer that gives only zeros",
    ),
)
_UNKNOWN = Flat((), "GG305", "info", "nothing of it is left.", "look at what this line gives")
_LINEAR = _FLAT[-1].nodes
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
    # Gradients that came by several paths and cancel each other (a bias under D(fake) - D(real)) are no fault.
    cancelled = set().union(*(backward.leaves_with_gradient() for backward in case.trace.backwards)) if idle else set()
    for name, parameter in idle.items():
        values = set(case.values_of.get(id(parameter), []))
        if not flow.is_connected(values) or id(parameter) in cancelled:
            continue
        births = [z for z in case.trace.zeros if z.op >= 0 and values & flow.sources(_inputs_of(case, z))]
        birth = _culprit(case, births)
        if birth is not None:
            blamed[birth].append(name)
    for birth, names in blamed.items():
        yield _zero_finding(case, birth, names)


def _inputs_of(case: Case, zero: ZeroGradient) -> list[int]:
    return [code >> 1 for code in case.trace.ops[zero.op].inputs]


def _culprit(case: Case, births: list[ZeroGradient]) -> ZeroGradient | None:
    """Choose the cause: what flattens goes before what multiplies, and a factor that learns is no fault."""
    flat = [z for z in births if not z.node_name.startswith(_LINEAR)]
    if flat:
        return flat[-1]
    for zero in births:
        if _is_factor_that_learns(case, zero):
            return None
        behind = case.flow.sources(_inputs_of(case, zero))
        for other in case.trace.zeros:
            made = set(case.trace.ops[other.op].outputs) if other.op >= 0 else set()
            if not other.node_name.startswith(_LINEAR) and made & behind:
                return other
    return births[-1] if births else None


def _is_factor_that_learns(case: Case, zero: ZeroGradient) -> bool:
    """Return whether the zero is a parameter that starts at zero and has a gradient (LoRA, zero-initialised layers)."""
    leaves: dict[int, torch.Tensor] = {id(p): p for p in case.parameters.values()}
    for value in case.flow.sources(_inputs_of(case, zero)):
        root = case.trace.roots.get(value)
        leaf = leaves.get(root.number) if root is not None else None
        gradient = case.gradient(leaf) if leaf is not None else None
        if gradient is not None and gradient.present and not gradient.zero and gradient.weight_norm == 0:
            return True
    return False


def _zero_finding(case: Case, zero: ZeroGradient, names: list[str]) -> Finding:
    op = case.trace.ops[zero.op]
    where = op.location
    shown = where.expression if where is not None else op.operator.name
    flat = next((flat for flat in _FLAT if zero.node_name.startswith(flat.nodes)), _UNKNOWN)
    return finding_at(
        where,
        flat.code,
        flat.severity,
        f"the gradient of {listed(names, 4)} is zero: lost at `{shown}`",
        reason=f"In the backward of this line ({zero.node_name}) the gradient becomes zero: {flat.why}",
        fix=flat.fix,
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
            reason="On the flat back each layer made it smaller (saturated units, too small weights, many layers).",
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
            reason="On the flat back each layer made it larger, or the loss itself is that large.",
            fix="torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)",
            module=exploded[0],
        )
