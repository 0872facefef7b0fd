"""Parameters without a gradient (frozen, unused or cut off, and by which line), and gradients that do nothing."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import torch
from torch.nn.parameter import UninitializedParameter

from gradgate._names import listed
from gradgate._source import Location, SourceLine, definition, region_header
from gradgate._text import text_of
from gradgate._torch_private import undispatched
from gradgate.doctor._case import Case, Unused, finding_at, module_of_names
from gradgate.doctor._numerics import is_readable, norm_of
from gradgate.doctor._trace import INFERENCE, Escape, Freeze, Op, ZeroGradient
from gradgate.doctor._tracer import parameters_of
from gradgate.records import Finding, Severity

# --- no gradient ------------------------------------------------------------------------------------------------------


class CutPoint(NamedTuple):
    """How and where a value leaves autograd, and the line inside of a block that does it."""

    kind: str
    where: Location | SourceLine | None
    inside: Location | None = None


_ON_PURPOSE = ("detach", "data", "no_grad", "inference_mode")
_COMPARISONS = {"gt", "ge", "lt", "le", "eq", "ne", "isnan", "isfinite", "isinf"}
_INDEX_OPS = {"nonzero", "bucketize", "searchsorted", "bincount", "histc", "multinomial"}
_ROUTING = {"topk", "max", "argmax", "sort", "argsort", "multinomial", "nonzero", "kthvalue"}

_NUMBER = "returns a Python number; autograd ends there."
# How a value leaves autograd, why that is so, and what to write instead.
_CUTS: dict[str, tuple[str, str]] = {
    "detach": ("`.detach()` returns the value without its history.", "h = h          # without .detach()"),
    "data": (
        "`.data` returns the value without its history, and autograd does not notice writes to it.",
        "h = h          # without .data",
    ),
    "torch.tensor": (
        "`torch.tensor(x)` copies the value into a new leaf; its history is not copied.",
        "h = x          # or x.clone(); a list of tensors: torch.stack(list_of_tensors)",
    ),
    "item": (f"`.item()` {_NUMBER}", "loss = loss + value     # keep the tensor; .item() is for logs"),
    "float": (f"`float(x)` {_NUMBER}", "loss = loss + value     # keep the tensor; float() is for logs"),
    "int": (f"`int(x)` {_NUMBER}", "keep the tensor; an index has no gradient"),
    "tolist": (
        "`.tolist()` returns Python numbers; autograd ends there.",
        "keep the tensor; torch.stack(list_of_tensors) joins tensors",
    ),
    "numpy": (
        "autograd does not record NumPy, so the history ends there.",
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
        "recording was switched off before this step began, and not switched on again.",
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
        "an index is a whole number: small changes of the values do not change it, so it has no gradient.",
        "p = torch.softmax(scores, dim=-1)     # soft choice; gg.straight_through(hard, soft) keeps the hard value",
    ),
    "comparison": (
        "a comparison is True or False; it has no gradient.",
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
    yield from _explain(case, {name: p for name, p in case.parameters.items() if p.requires_grad and _is_lost(case, p)})


def find_unused_in_grad(case: Case) -> Iterator[Finding]:
    """Explain "appears to not have been used in the graph", which torch.autograd.grad says without a name."""
    error = case.error("appears to not have been used in the graph")
    if error is None or error.backward < 0:
        return
    inputs = case.trace.backwards[error.backward].inputs or ()
    found = re.search(r"at index (\d+)", error.text)
    wanted = inputs[int(found[1]) : int(found[1]) + 1] if found else inputs
    yield from _explain(case, {name: p for name, p in case.parameters.items() if id(p) in wanted})


def find_loss_without_graph(case: Case) -> Iterator[Finding]:
    """Explain "element 0 of tensors does not require grad": where the whole loss lost its graph."""
    error = case.error("does not require grad and does not have a grad_fn")
    if error is None or not case.trace.backwards:
        return
    backward = case.trace.backwards[error.backward].location
    title = "the loss is not connected to any parameter: element 0 of tensors does not require grad"
    headline = f"{error.severity} GG201: {title}"
    learners = {name: p for name, p in case.parameters.items() if p.requires_grad}
    frozen = [name for name in case.parameters if name not in learners]
    used = [name for name in frozen if _is_read_after_cuts(case, case.parameters[name])]
    switched = _switched_off(case, used)
    if switched or (frozen and not learners):
        names, where = used or frozen, switched[0].location if switched else backward
        reason = f"{listed(names, 4)} {_are(names)} frozen: requires_grad is False"
        reason += ", switched off at this line and not on again." if switched else "."
        fix = "model.requires_grad_(True)     # before the step that trains it"
        yield finding_at(where, headline, reason, fix, module=module_of_names(names), also=[backward])
    elif cuts := [cause for cause in _explain(case, learners) if cause.code == "GG101"]:
        reason = f"Every path from the parameters to the loss is cut. Here: {cuts[0].reason}"
        also = tuple(filter(None, (backward.text if backward else None, *(cut.where for cut in cuts[1:]))))
        yield replace(cuts[0], code="GG201", severity=error.severity, title=title, reason=reason, also=also)
    else:
        reason = "No tensor that requires grad takes part in the loss."
        fix = "loss = loss_fn(model(x), y)     # computed from the model's output"
        yield finding_at(backward, headline, reason, fix)


def _switched_off(case: Case, names: list[str]) -> list[Freeze]:
    """Return the lines that froze parameters."""
    numbers = [id(case.parameters[name]) for name in names]
    return [case.frozen_at[number] for number in numbers if number in case.frozen_at]


def _is_read_after_cuts(case: Case, parameter: torch.Tensor) -> bool:
    """Return whether a loss was computed from a parameter, and nearer to the loss than any cut."""
    values = case.values_of(parameter)
    last = max(case.flow.readers_of(values), default=-1)
    return not case.flow.behind_losses.isdisjoint(values) and last > max(case.flow.cuts, default=-1)


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
    # zero_grad(set_to_none=False) leaves zeros if no gradient arrives; zero_grad() after backward takes all away.
    cleared = any(step.idle and step.backwards for step in case.trace.optimizer_steps)
    return not (gradient.present or cleared) or not case.flow.is_connected(case.values_of(parameter))


def _frozen(case: Case) -> Iterator[Finding]:
    frozen = [name for name, p in case.parameters.items() if not p.requires_grad]
    if not frozen:
        return
    switched = _switched_off(case, frozen)
    held = [parameters_of(step.optimizer) for step in case.trace.optimizer_steps]
    everything = len(frozen) == len(case.parameters) or any(ps and not any(p.requires_grad for p in ps) for ps in held)
    again = any(switch.again or case.one_step for switch in switched)
    severity = "error" if everything else "warning" if again else "info"
    who = "all parameters are" if everything else f"{listed(frozen, 4)} {_are(frozen)}"
    reason = "requires_grad is False, so no gradient is computed for it."
    reason += " This line switched it off, and no line switched it on again before the step." if switched else ""
    where, fix = switched[0].location if switched else None, "parameter.requires_grad_(True)     # if it ought to learn"
    yield finding_at(where, f"{severity} GG104: {who} frozen", reason, fix, module=module_of_names(frozen))


def _explain(case: Case, lost: dict[str, torch.Tensor]) -> Iterator[Finding]:
    """Explain why parameters get no gradient."""
    cut_off: list[tuple[CutPoint, str]] = []
    unused, aside, refused = [], [], []
    for name, parameter in lost.items():
        values = case.values_of(parameter)
        cuts = [cut_of(case, case.trace.ops[number]) for number in case.flow.cuts_of(values)]
        if not case.flow.is_used(values):
            calls = case.calls_with(parameter)
            location = calls[0].location if calls else None
            unused.append(Unused(name, parameter, location, _is_routed(case, name)))
        elif cuts:
            # A mask or an index computed from a value says less than the line that cuts off the value itself.
            decisive = [cut for cut in cuts if cut.kind not in ("comparison", "argmax", "integer", "operator")]
            cut_off += [(cut, name) for cut in decisive or cuts]
        elif case.flow.is_connected(values):
            refused.append(name)
        elif (escape := _escape_of(case, values)) is not None:
            cut_off.append((CutPoint(escape.kind, escape.location), name))
        else:
            aside.append(name)
    yield from _cut_findings(case, cut_off)
    if refused and not case.errors:
        yield _refused(case, refused)
    if aside:
        yield _aside(case, aside)
    if case.one_step:
        yield from unused_findings(unused)
    else:  # another step may use it
        case.unused.extend(unused)


def unused_findings(unused: list[Unused]) -> Iterator[Finding]:
    """Report parameters that are not used; an expert that got no sample in this step is no fault."""
    for routed in (False, True):
        group = [entry for entry in unused if entry.routed is routed]
        names = [entry.name for entry in group]
        if not group:
            continue
        reason = "No operation of the step reads it, so it gets no gradient and does not learn."
        fix = "use it in forward(), or take it out of the model: "
        fix += f"gg.freeze(model, {', '.join(repr(name) for name in names[:2])})"
        if routed:
            reason, fix = "Others of the same list are used: the samples of this step were routed to them.", ""
        headline = f"{'info' if routed else 'warning'} GG102: {listed(names, 4)} {_are(names)} not used in this step"
        yield finding_at(group[0].location, headline, reason, fix, module=module_of_names(names))


def _is_routed(case: Case, name: str) -> bool:
    """Return whether a sibling in the same list learned, and the step chose something by learned scores."""
    own = case.parameters[name]
    if isinstance(own, UninitializedParameter):
        return False
    for other, parameter in case.parameters.items():
        siblings = [x.isdigit() and y.isdigit() for _, x, y in _differing(name, other)] == [True]
        if siblings and case.gradient(parameter).present and parameter.numel() == own.numel():
            return any(op.name in _ROUTING and op.connected_sources for op in case.trace.ops)
    return False


def _differing(name: str, other: str) -> list[tuple[int, str, str]]:
    """Return the parts in which two paths of the same length differ."""
    parts, others = name.split("."), other.split(".")
    both = zip(range(len(parts)), parts, others, strict=False)
    return [(n, x, y) for n, x, y in both if x != y] if len(parts) == len(others) else []


def _targets(case: Case, names: list[str]) -> list[str]:
    """Return those names that belong to a copy of a module that learns (a target network of BYOL, DQN, MoCo)."""
    # A copy has the shapes and, up to a moving average, the values of the module that learns, and that module does not
    # compute with the results of the copy.
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
    one, two, parts = case.parameters[name], case.parameters[other], name.split(".")
    differing = _differing(name, other)
    alike = len(differing) == 1 and differing[0][0] < len(parts) - 1
    if not (alike and case.gradient(two).present and one.shape == two.shape):
        return None
    with undispatched(), torch.no_grad():
        if not (is_readable(one) and is_readable(two)) or (one.dim() > 1 and norm_of(one - two) > 0.5 * norm_of(two)):
            return None
    results = case.flow.results(case.values_of(one))
    readers = [case.trace.ops[number] for number in case.flow.readers_of(case.values_of(two))]
    if any(not results.isdisjoint(reader.sources) for reader in readers):
        return None
    return ".".join(parts[: differing[0][0] + 1])


def _cut_findings(case: Case, cut_off: list[tuple[CutPoint, str]]) -> Iterator[Finding]:
    lines: defaultdict[object, list[tuple[CutPoint, str]]] = defaultdict(list)
    for cut, name in cut_off:
        lines[cut.kind, cut.where.text if cut.where is not None else None].append((cut, name))
    learned = any(case.gradient(p).present for p in case.parameters.values())
    for group in lines.values():
        cut, found = group[0][0], list(dict.fromkeys(name for _, name in group))
        why, fix = _CUTS[cut.kind]
        line = cut.where.expression if cut.where is not None else "an unknown line"
        line = line if len(line) <= 80 else line[:77] + "..."
        targets = _targets(case, found) if cut.kind in _ON_PURPOSE else []
        # Nobody said what ought to learn: another network under no_grad may well be a teacher.
        teacher = cut.kind in ("no_grad", "inference_mode") and not case.known_model and learned
        for names in filter(None, ([name for name in found if name not in targets], targets)):
            on_purpose = teacher or names is targets
            headline = f"{'info' if on_purpose else _severity(case)} GG101: {_who(names)}: cut at `{line}`"
            reason = f"The loss is computed from {_form(names, 'it', 'them')}, but {why}"
            reason += " That is correct for a target network, the copy of one that learns." if on_purpose else ""
            also, module = [cut.inside for cut, _ in group], module_of_names(names)
            yield finding_at(cut.where, headline, reason, "" if on_purpose else fix, module=module, also=also)


def _severity(case: Case) -> Severity:
    return "error" if case.known_model else "warning"


def _form(names: list[str], one: str, several: str) -> str:
    return one if len(names) == 1 else several


def _are(names: list[str]) -> str:
    return _form(names, "is", "are")


def _who(names: list[str]) -> str:
    return f"{listed(names, 4)} {_form(names, 'gets', 'get')} no gradient"


def cut_of(case: Case, op: Op) -> CutPoint:
    """Return how an operation cuts."""
    if not op.records:
        return _unrecorded(case, op)
    if op.written_as in _CUTS:
        kind = op.written_as
    elif op.name in ("detach", "detach_"):
        kind = "detach"
    elif op.name in _COMPARISONS or op.name.startswith("logical_"):
        kind = "comparison"
    elif op.name in _INDEX_OPS or op.name.startswith(("arg", "topk")):
        kind = "argmax"
    else:
        kind = "integer" if op.name in ("_to_copy", "to") else "operator"
    return CutPoint(kind, op.location)


def _unrecorded(case: Case, op: Op) -> CutPoint:
    where = op.location
    if op.switch >= 0:
        switch = case.trace.switches[op.switch]
        begun: Location | SourceLine | None = switch.location
        if "heckpoint" in switch.by:
            return CutPoint("checkpoint", begun)
        if isinstance(begun, Location) and where is not None and begun.code is not where.code:
            # A decorator: the line that called the decorated function is not the line that cuts.
            begun = region_header(where, ("no_grad", "set_grad_enabled", "inference_mode")) or begun
        return CutPoint("no_grad", begun, where)
    if op.switch == INFERENCE:
        header = region_header(where, ("inference_mode",)) if where is not None else None
        return CutPoint("inference_mode", header or where, where)
    return CutPoint("function" if case.trace.recording_at_start else "off", where)


def _escape_of(case: Case, values: list[int]) -> Escape | None:
    """Find where values left torch, if something that came from outside later entered the loss."""
    made = case.flow.results(values)
    brought = [value for value in case.flow.behind_losses if value in case.trace.roots and value not in made]
    last = max((min(case.flow.readers_of([value]), default=-1) for value in brought), default=-1)
    end = case.trace.backwards[-1].after if case.trace.backwards else len(case.trace.ops)
    left = [e for e in case.trace.escapes if e.value in made and e.kind in _CUTS and e.after <= end]
    # A number in a formula (`x * h.item()`) comes in with the operation itself, not with a tensor.
    entered = [e for e in left if e.after <= last] or left
    return next((e for e in reversed(entered) if e.floating), entered[-1] if entered else None)


def _refused(case: Case, names: list[str]) -> Finding:
    """Explain parameters that are connected to the loss and get no gradient all the same."""
    functions = {function for backward in case.trace.backwards for function in backward.functions}
    own = sorted((f for f in functions if not f.__module__.startswith("torch.")), key=lambda f: f.__qualname__)
    if own:
        where = definition(own[0].backward.__code__)
        headline = f"{_severity(case)} GG105: {_who(names)}: {own[0].__name__}.backward() returns None"
        reason = "An autograd Function that returns None for an input stops the gradient there."
        fix = "return a gradient for each tensor that forward() takes, in the same order"
        return finding_at(where, headline, reason, fix, module=module_of_names(names))
    headline = f"warning GG103: {_who(names)}, though connected to the loss"
    reason = "The loss does not depend on it by any path that has a derivative, or a hook took the gradient away."
    fix = "look at the hooks on it and on what it is used in"
    return finding_at(None, headline, reason, fix, module=module_of_names(names))


def _aside(case: Case, names: list[str]) -> Finding:
    results = case.flow.results(v for name in names for v in case.values_of(case.parameters[name]))
    last = max(results, key=lambda value: case.flow.maker.get(value, -1), default=-1)
    where = case.flow.made_by(last).location
    who = f"{listed(names, 4)} {_are(names)} used, but the loss does not depend on {_form(names, 'it', 'them')}"
    reason = "What is computed from it ends here; it never enters the loss, so it gets no gradient."
    fix = "loss = loss + weight * auxiliary_loss     # or leave the computation out"
    return finding_at(where, f"warning GG103: {who}", reason, fix, module=module_of_names(names))


# --- gradients that are zero, vanish or explode -----------------------------------------------------------------------


class Flat(NamedTuple):
    """One way to lose a gradient."""

    nodes: tuple[str, ...]  # the beginnings of their names
    kind: str
    why: str
    fix: str


_FLAT = (
    Flat(
        ("Round", "Sign", "Floor", "Ceil", "Trunc", "Heaviside", "Frac", "Sgn"),
        "error GG301",
        "a step function is flat everywhere, so its gradient is zero.",
        "y = gg.straight_through(x.round(), x)     # the value of the first, the gradient of the second",
    ),
    Flat(
        ("Relu", "Threshold", "LeakyRelu", "Hardtanh", "Relu6"),
        "warning GG302",
        "every unit is at zero for every sample (dead ReLU), so no gradient comes back through it.",
        "nn.LeakyReLU(0.01)     # or a smaller learning rate, or another initialisation of the bias",
    ),
    Flat(
        ("Sigmoid", "Tanh", "Softmax", "LogSoftmax", "Hardsigmoid", "Gelu", "Erf"),
        "warning GG303",
        "every unit is saturated: the function is flat there in floating point.",
        "normalise what goes in (nn.LayerNorm), or use the loss that takes logits",
    ),
    Flat(
        ("Clamp", "Minimum", "Maximum", "Hardswish"),
        "warning GG303",
        "every value lies outside the range of the clamp, where it is flat.",
        "y = gg.straight_through(x.clamp(low, high), x)     # clamps the value, keeps the gradient",
    ),
    Flat(
        ("Where", "MaskedFill", "MaskedScatter", "IndexPut", "Index", "MaskedSelect"),
        "warning GG305",
        "the mask drops everything in this step.",
        "losses.reduce(per_element, keep=keep)     # and look at how the mask is made",
    ),
    Flat(
        ("Mul", "Mm", "Addmm", "Bmm", "Convolution", "Div", "Dot", "Mv", "Einsum", "Linear", "NativeDropout"),
        "warning GG304",
        "it is multiplied by zero.",
        "look at the factor: a loss weight, a mask or a layer whose output is all zeros",
    ),
)
_UNKNOWN = Flat((), "info GG305", "nothing of it is left.", "look at the output of this line")
_LINEAR = _FLAT[-1].nodes
_VANISHED = 1e-8
_EXPLODED = 1e8


def find_zeros(case: Case) -> Iterator[Finding]:
    """Explain every parameter whose gradient is all zero."""
    if case.exception is not None or case.trace.overwrites:
        return
    learners = {name: p for name, p in case.parameters.items() if p.requires_grad and case.gradient(p).present}
    idle = {name: p for name, p in learners.items() if case.gradient(p).zero and p.numel()}
    blamed: defaultdict[ZeroGradient, list[str]] = defaultdict(list)
    zeros = [zero for zero in case.trace.zeros if zero.op >= 0]
    causes: dict[ZeroGradient, ZeroGradient | None] = {}
    # Gradients that came by several paths and cancel each other (a bias under D(fake) - D(real)) are no fault.
    cancelled = set().union(*(backward.leaves_with_gradient() for backward in case.trace.backwards)) if idle else set()
    for name, parameter in idle.items():
        values = case.values_of(parameter)
        if not case.flow.is_connected(values) or id(parameter) in cancelled:
            continue
        results = case.flow.results(values)
        births = [zero for zero in zeros if not results.isdisjoint(case.trace.ops[zero.op].sources)]
        birth = _culprit(case, births, causes)
        if birth is not None:
            blamed[birth].append(name)
    for birth, names in blamed.items():
        op = case.trace.ops[birth.op]
        flat = next((flat for flat in _FLAT if birth.node_name.startswith(flat.nodes)), _UNKNOWN)
        headline = f"{flat.kind}: the gradient of {listed(names, 4)} is zero: lost at `{op.shown}`"
        reason = f"In the backward of this line ({birth.node_name}) the gradient becomes zero: {flat.why}"
        module = case.module(op) or module_of_names(names)
        yield finding_at(op.location, headline, reason, flat.fix, module=module)


def _culprit(
    case: Case, births: list[ZeroGradient], causes: dict[ZeroGradient, ZeroGradient | None]
) -> ZeroGradient | None:
    """Choose the cause: what flattens goes before what multiplies, and a factor that learns is no fault."""
    flat = [zero for zero in births if not zero.node_name.startswith(_LINEAR)]
    for zero in births if not flat else ():
        if zero not in causes:
            causes[zero] = _cause_of_factor(case, zero)
        if causes[zero] is not zero:
            return causes[zero]
    return next(reversed(flat or births), None)


def _cause_of_factor(case: Case, zero: ZeroGradient) -> ZeroGradient | None:
    """Return what made a factor zero, perhaps the multiplication itself; None for a factor that learns."""
    behind = case.flow.sources(case.trace.ops[zero.op].sources)
    leaves: dict[int, torch.Tensor] = {id(p): p for p in case.parameters.values()}
    roots = [root for value in behind if (root := case.trace.roots.get(value)) is not None]
    for gradient in (case.gradient(leaves[root.number]) for root in roots if root.number in leaves):
        # A parameter that starts at zero and has a gradient: LoRA, zero-initialised layers.
        if gradient.present and not gradient.zero and gradient.weight_norm == 0:
            return None
    for other in case.trace.zeros:
        made = case.trace.ops[other.op].outputs if other.op >= 0 else ()
        if not other.node_name.startswith(_LINEAR) and not behind.isdisjoint(made):
            return other
    return zero


def find_sizes(case: Case) -> Iterator[Finding]:
    """Find layers whose gradient is out of all proportion."""
    if case.exception is not None:
        return
    layers: defaultdict[str, list[torch.Tensor]] = defaultdict(list)
    for name, parameter in case.parameters.items():
        gradient = case.gradient(parameter)
        if gradient.present and gradient.bad is None and not gradient.zero and math.isfinite(gradient.norm):
            layers[name.rpartition(".")[0] or name].append(parameter)
    norms = {layer: math.hypot(*(case.gradient(p).norm for p in own)) for layer, own in layers.items()}
    sizes = {layer: norms[layer] / math.sqrt(sum(p.numel() for p in own)) for layer, own in layers.items()}
    if len(sizes) < 2:
        return
    largest = max(sizes, key=lambda layer: sizes[layer])
    vanished = [layer for layer, size in sizes.items() if size < _VANISHED * sizes[largest] and size < _VANISHED]
    if vanished:
        change = f"{listed(vanished, 3)} gets {sizes[vanished[0]]:.1e} where {largest} gets {sizes[largest]:.1e}"
        reason = "On the way back each layer made it smaller (saturated units, too small weights, many layers)."
        fix = "residual connections, nn.LayerNorm, or another initialisation (nn.init.kaiming_normal_)"
        yield finding_at(None, f"warning GG306: the gradient vanishes: {change}", reason, fix, module=vanished[0])
    exploded = [layer for layer, norm in norms.items() if norm > _EXPLODED]
    if exploded:
        headline = f"the gradient explodes: the norm at {listed(exploded, 3)} is {norms[exploded[0]]:.1e}"
        reason = "On the way back each layer made it larger, or the loss itself is that large."
        fix = "torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)"
        yield finding_at(None, f"warning GG307: {headline}", reason, fix, module=exploded[0])
