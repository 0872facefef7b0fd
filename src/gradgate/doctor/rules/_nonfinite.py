"""NaN and infinities: which operation produced them, from what, in which samples; and `where` that does not guard."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import replace

from gradgate._names import listed
from gradgate.doctor._case import Case, finding_at
from gradgate.doctor._trace import BadValue, Flow, Op
from gradgate.records import Finding, Severity

# --- values that reach the loss or a gradient -------------------------------------------------------------------------

_WORDS = {"nan": "NaN", "inf": "Inf"}
_FIXES = {
    "log": "masked.safe_log(x)",
    "sqrt": "masked.safe_sqrt(x)",
    "rsqrt": "masked.safe_divide(1, masked.safe_sqrt(x))",
    "div": "masked.safe_divide(x, y)",
    "reciprocal": "masked.safe_divide(1, x)",
    "pow": "masked.safe_pow(x, exponent)",
    "linalg_vector_norm": "masked.safe_norm(x)",
    "acos": "masked.safe_acos(x)",
    "asin": "masked.safe_asin(x)",
    "exp": "torch.exp(x.clamp(max=80))     # or stay with the logarithm: torch.logsumexp",
    "_softmax": "masked.softmax(x, dim=-1, keep=keep)     # a row with nothing kept gives zeros",
    "_log_softmax": "masked.log_softmax(x, dim=-1, keep=keep)",
    "nll_loss_forward": "losses.masked_loss(F.cross_entropy, logits, target, exclude=-100)     # nothing kept gives 0",
    "mean": "masked.mean(x, keep=keep, empty=0)     # an empty mean is NaN",
}
_GUARD = "y = gg.apply_where(keep, (x,), fn, otherwise)     # fn runs only where keep"
_NO_FIX = "guard = gg.Guard(model)     # drops the bad samples and keeps the rest of the batch"


def find_nonfinite(case: Case) -> Iterator[Finding]:
    """Explain every NaN and infinity that reached the loss or a gradient."""
    hurt = [name for name, p in case.parameters.items() if case.gradient(p).bad]
    losses = [backward.loss for backward in case.trace.backwards if backward.is_bad]
    births = births_in_backward(case)
    if losses:
        yield from _behind_the_loss(case, _word_of(losses), hurt if not births else [])
    if hurt and (births or not losses):
        yield from _behind_the_gradient(case, hurt, births)
    if not losses and not hurt and case.exception is None:
        harmless = [b for b in case.trace.bad if b.stage == "forward" and b.kind == "nan"]
        for birth in _first_per_operation(harmless)[:3]:
            harm = "It does no harm in this step: loss and gradients are finite."
            found = _forward_finding(case, birth, "info", harm)
            yield replace(found, code="GG407", title=f"{found.title}, masked away later")


def _word_of(losses: Iterable[float | None]) -> str:
    return "NaN" if any(loss is not None and math.isnan(loss) for loss in losses) else "Inf"


def births_behind_loss(case: Case) -> list[BadValue]:
    """Return what made a loss bad."""
    started = [backward for backward in case.trace.backwards if backward.is_bad]
    behind = case.flow.sources(code >> 1 for backward in started for code in backward.codes)
    births = [b for b in case.trace.bad if b.stage != "backward" and b.value in behind and not b.deliberate]
    wanted = _word_of(backward.loss for backward in started).lower()
    return [cause for b in births if b.kind == wanted for cause in _causes(case, b, births)] or births


def _causes(case: Case, birth: BadValue, births: list[BadValue]) -> list[BadValue]:
    """Return what a NaN was made of: an Inf that was produced before it, or came in with it; else itself."""
    behind = case.flow.sources(case.trace.ops[birth.op].sources)
    infinite = [b for b in births if b.kind == "inf" and b.value in behind]
    return [b for b in infinite if b.stage == "forward" or b.op == birth.op] or [birth]


def births_in_backward(case: Case) -> list[BadValue]:
    """Return what went bad on the way back from losses that were finite."""
    return [b for b in case.trace.bad if b.stage == "backward" and not case.trace.backwards[b.backward].is_bad]


def _behind_the_loss(case: Case, word: str, hurt: list[str]) -> Iterator[Finding]:
    severity: Severity = "error" if hurt or not case.gradients or case.exception is not None else "warning"
    harm = f"The loss is {word}" + (f", and so is the gradient of {listed(hurt, 3)}." if hurt else ".")
    if severity == "warning":
        harm = f"The loss is {word}, but every gradient is finite: this value is not what the model learns from."
    births = births_behind_loss(case)
    for birth in _first_per_operation(births):
        yield _forward_finding(case, birth, severity, harm)
    if not births:
        reason = harm + " The operation that produced it was not traced."
        yield finding_at(None, f"{severity} GG401: the loss is {word}", reason, _NO_FIX)


def _behind_the_gradient(case: Case, hurt: list[str], births: list[BadValue]) -> Iterator[Finding]:
    severity: Severity = "info" if case.trace.scaled else "error"
    harm = f"The loss is finite, but the gradient of {listed(hurt, 3)} is not."
    if case.trace.scaled:
        harm += " The gradients are scaled (AMP), and the scaler skips such a step."
    for birth in _first_per_operation(births):
        yield _gradient_finding(case, birth, severity, harm)
    arrived = [b for b in case.trace.bad if b.stage == "arrived"]
    for birth in _first_per_operation(arrived if not births else []):
        yield _forward_finding(case, birth, severity, harm)
    if not births and not arrived:
        headline = f"{severity} GG403: the gradient of {listed(hurt, 3)} is not finite"
        reason = harm + " It was not produced in this step: it may have been there before, or a hook made it."
        yield finding_at(None, headline, reason, "optimizer.zero_grad()     # before backward()")


def _gradient_finding(case: Case, birth: BadValue, severity: Severity, harm: str) -> Finding:
    source = next((b for b in case.trace.bad if b.value == birth.from_value and b.value >= 0), None)
    op = case.trace.op((source if source is not None and not source.deliberate else birth).op)
    shown, word = op.shown if op.location is not None else birth.node_name, _WORDS[birth.kind]
    detail = f" At the first bad element {birth.detail}." if birth.detail else ""
    selecting = selecting_op(case, op)
    if selecting is None:
        headline = f"{severity} GG403: {word} gradient produced in the backward of `{shown}`"
        reason = f"{harm} It is produced in {birth.node_name}: what arrived there was finite.{detail}"
        return case.finding(op, headline, reason, _fix(op), samples=_samples(case, birth))
    headline = f"{severity} GG502: unsafe where: the gradient of `{shown}` is {word} in elements that are discarded"
    reason = (
        f"{harm} `{selecting.shown}` discards those values, but not their gradient: 0 times infinity is NaN.{detail}"
    )
    return case.finding(op, headline, reason, _GUARD, samples=_samples(case, birth), also=[selecting.location])


def _forward_finding(case: Case, birth: BadValue, severity: Severity, harm: str) -> Finding:
    op, word, samples = case.trace.ops[birth.op], _WORDS[birth.kind], _samples(case, birth)
    if birth.stage == "forward":
        headline = f"{severity} {'GG401' if birth.kind == 'nan' else 'GG402'}: {word} produced in `{op.shown}`"
        free = "finite" if birth.kind == "inf" else "free of NaN"
        detail = f" There {birth.detail}." if birth.detail else ""
        reason = f"{harm} Everything that `{op.name}` read was {free}; its result was not.{detail}"
        return case.finding(op, headline, reason, _fix(op), samples=samples)
    root = case.trace.roots.get(case.flow.bare_value(birth.value))
    name = case.names.of_tensor(root.tensor) if root is not None and root.tensor is not None else None
    code, kind, source, fix = "GG404", "the tensor", "the data", _NO_FIX
    if root is not None and root.leaf and root.requires_grad:
        code, kind, source, samples = "GG405", "the parameter", "the weights", ()
        fix = "model.load_state_dict(last_good_state)"
    what = f"{kind} {name or f'of shape {birth.shape}'} holds {word} before `{op.shown}` reads it"
    reason = f"{harm} It is not from this step: it came in with {source}."
    return case.finding(op, f"{severity} {code}: {what}", reason, fix, samples=samples)


def _first_per_operation(births: list[BadValue]) -> list[BadValue]:
    first = {birth.op: birth for birth in reversed(births)}
    return [first[number] for number in dict.fromkeys(birth.op for birth in births)][:5]


def _samples(case: Case, birth: BadValue) -> tuple[int, ...]:
    size = case.trace.batch_size
    return birth.rows if birth.shape and size in (None, birth.shape[0]) else ()


def _fix(op: Op) -> str:
    fix = _FIXES.get(op.name.removesuffix("_"), _NO_FIX)
    return f"{fix}     # from gradgate import masked" if fix.startswith("masked.safe_") else fix


# --- an unsafe `where` ------------------------------------------------------------------------------------------------

_FILLING = {"where", "masked_fill", "masked_fill_", "index_put", "index_put_"}
_SELECTING = {*_FILLING, "nan_to_num", "index", "masked_select", "select"}
_COMPARING = {"gt", "ge", "lt", "le", "eq", "ne"}
_ASKING = {"isnan", "isinf", "isfinite"}
_JOINING = {"mul", "logical_and", "logical_or", "logical_not", "bitwise_and", "bitwise_or", "bitwise_not"}
# Where each operation has no finite derivative.
_EDGES: dict[str, tuple[float, ...]] = {
    **dict.fromkeys(("sqrt", "log", "log2", "log10", "rsqrt", "reciprocal", "div", "pow"), (0.0,)),
    **dict.fromkeys(("acos", "asin", "atanh"), (-1.0, 1.0)),
    "log1p": (-1.0,),
    **dict.fromkeys(("exp", "expm1"), ()),
}
_NEAR = 1e-3
_PASSING = {
    *("mul", "add", "sub", "neg", "_to_copy", "clone", "abs", "rsub", "add_", "mul_", "sub_", "nan_to_num"),
    *_EDGES,
}


def find_traps(case: Case) -> Iterator[Finding]:
    """Find every `where` whose guard does not guard."""
    for op in case.trace.ops:
        risky = _unguarded(case.flow, op) if op.name in _FILLING and op.records and len(op.inputs) > 1 else None
        if risky is not None:
            headline = f"warning GG501: unsafe where: `{op.shown}` does not guard the gradient of `{risky.shown}`"
            reason = f"`{risky.name}` is computed for all elements, also where it has no finite derivative. The values "
            reason += "are discarded, their gradient is not: 0 times infinity is NaN. It has not happened in this step."
            yield case.finding(op, headline, reason, _GUARD, also=[risky.location])


def _unguarded(flow: Flow, op: Op) -> Op | None:
    guard, branches = (op.sources[0], op.sources[1:]) if op.name == "where" else (op.sources[1], op.sources[:1])
    tests = list(_tests(flow, guard, 4))
    for branch in branches:
        for risky, path in _risky(flow, branch, (), 4):
            if any(_guards(flow, test, risky, path) for test in tests):
                return risky
    return None


def _tests(flow: Flow, value: int, depth: int) -> Iterator[Op]:
    """Yield the comparisons that a condition was made of."""
    op = flow.made_by(value)
    if op.name in _COMPARING | _ASKING:
        yield op
    elif depth > 1 and (op.name in _JOINING or op.operator.view):
        for source in op.sources:
            yield from _tests(flow, source, depth - 1)


def _risky(flow: Flow, value: int, path: tuple[int, ...], depth: int) -> Iterator[tuple[Op, tuple[int, ...]]]:
    """Yield the operations close behind a branch that have a point without derivative, with the values in between."""
    op = flow.made_by(value)
    if op.name.removesuffix("_") in _EDGES and _is_risky(op, op.name.removesuffix("_")):
        yield op, (*path, value)
    if depth > 1 and (op.name in _PASSING or op.operator.view):
        for source in op.sources:
            yield from _risky(flow, source, (*path, value), depth - 1)


def _is_risky(op: Op, name: str) -> bool:
    if name == "pow":
        return bool(op.numbers) and (op.numbers[0] < 0 or op.numbers[0] % 1 != 0) and bool(op.inputs[0] & 1)
    if name == "div":
        return len(op.inputs) > 1 and bool(op.connected_sources)
    return bool(op.inputs) and bool(op.inputs[0] & 1)


def _guards(flow: Flow, test: Op, risky: Op, path: tuple[int, ...]) -> bool:
    """Return whether a test is about the very value that a risky operation reads, or about its result."""
    name = risky.name.removesuffix("_")
    read = risky.sources[1 if name == "div" else 0]
    tested = {flow.bare_value(source) for source in test.sources}
    limits = [number for number in test.numbers if not isinstance(number, bool)]
    if test.name in _ASKING or not all(map(math.isfinite, limits)) or len(test.inputs) > 1:
        # `isfinite(y)`, which is `y == y` and `abs(y) != inf`: a question about the result.
        return bool(tested & {flow.bare_value(value) for value in (*path, read)})
    if flow.bare_value(read) not in tested:
        return False
    edges = _EDGES[name]
    return not edges or any(abs(limit - edge) <= _NEAR for limit in limits for edge in edges)


def selecting_op(case: Case, op: Op) -> Op | None:
    """Find the operation that discards some of another one's values."""
    flow = case.flow
    waiting = [(value, 5) for value in op.outputs]
    seen = set(op.outputs)
    while waiting:
        value, depth = waiting.pop(0)
        for number in flow.readers.get(value, ()):
            reader = case.trace.ops[number]
            if reader.name in _SELECTING:
                return reader
            if depth and (reader.name in _PASSING or reader.operator.view):
                fresh = [result for result in reader.outputs if result not in seen]
                seen.update(fresh)
                waiting.extend((result, depth - 1) for result in fresh)
    return None
