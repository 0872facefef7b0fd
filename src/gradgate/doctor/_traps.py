"""The `where` trap: a branch that is thrown away still sends its gradient back, and 0 times infinity is NaN.

It is recognised by its structure, before it bites: a guard (`x > 0`) on the very tensor that the guarded operation
(`sqrt(x)`) reads unguarded.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from gradgate.doctor._case import Case, finding_at
from gradgate.doctor._flow import Flow
from gradgate.doctor._trace import Op
from gradgate.records import Finding

_SELECTING = {
    "where",
    "masked_fill",
    "masked_fill_",
    "index_put",
    "index_put_",
    "nan_to_num",
    "index",
    "masked_select",
    "select",
}
_COMPARING = {"gt", "ge", "lt", "le", "eq", "ne"}
_ASKING = {"isnan", "isinf", "isfinite"}
_JOINING = {"mul", "logical_and", "logical_or", "logical_not", "bitwise_and", "bitwise_or", "bitwise_not"}
# Where each operation has no finite derivative, and which of its arguments that is about.
_EDGES: dict[str, tuple[float, ...]] = {
    **dict.fromkeys(("sqrt", "log", "log2", "log10", "rsqrt", "reciprocal", "div", "pow"), (0.0,)),
    **dict.fromkeys(("acos", "asin", "atanh"), (-1.0, 1.0)),
    "log1p": (-1.0,),
    **dict.fromkeys(("exp", "expm1"), ()),
}
_NEAR = 1e-3
_PASSING = {
    "mul",
    "add",
    "sub",
    "neg",
    "_to_copy",
    "clone",
    "abs",
    "rsub",
    "add_",
    "mul_",
    "sub_",
    "nan_to_num",
    *_EDGES,
}


def find_traps(case: Case) -> Iterator[Finding]:
    """Find every `where` whose guard does not guard."""
    flow = case.flow
    for op in case.trace.ops:
        if op.operator.name in ("where", "masked_fill", "masked_fill_", "index_put", "index_put_") and op.records:
            risky = _unguarded(flow, op)
            if risky is not None:
                yield _finding(case, op, risky)


def _unguarded(flow: Flow, op: Op) -> Op | None:
    codes = op.inputs
    if len(codes) < 2:
        return None
    guard, branches = (codes[0], codes[1:]) if op.operator.name == "where" else (codes[1], codes[:1])
    tests = list(_tests(flow, guard >> 1, 4))
    for branch in branches:
        for risky, path in _risky(flow, branch >> 1, (), 4):
            if any(_guards(flow, test, risky, path) for test in tests):
                return risky
    return None


def _tests(flow: Flow, value: int, depth: int) -> Iterator[Op]:
    """Give the comparisons that a condition was made of."""
    number = flow.maker.get(value)
    if number is None or not depth:
        return
    op = flow.trace.ops[number]
    if op.operator.name in _COMPARING | _ASKING:
        yield op
    elif op.operator.name in _JOINING or op.operator.view:
        for code in op.inputs:
            yield from _tests(flow, code >> 1, depth - 1)


def _risky(flow: Flow, value: int, path: tuple[int, ...], depth: int) -> Iterator[tuple[Op, tuple[int, ...]]]:
    """Give the operations close behind a branch that have a point without derivative, with the values on the way."""
    number = flow.maker.get(value)
    if number is None or not depth:
        return
    op = flow.trace.ops[number]
    name = op.operator.name.removesuffix("_")
    if name in _EDGES and _is_risky(op, name):
        yield op, (*path, value)
    if op.operator.name in _PASSING or op.operator.view:
        for code in op.inputs:
            yield from _risky(flow, code >> 1, (*path, value), depth - 1)


def _is_risky(op: Op, name: str) -> bool:
    if name == "pow":
        exponents = [a for a in op.arguments if isinstance(a, (int, float))]
        return bool(exponents) and (exponents[0] < 0 or exponents[0] % 1 != 0) and bool(op.inputs[0] & 1)
    if name == "div":
        return len(op.inputs) > 1 and any(code & 1 for code in op.inputs)
    return bool(op.inputs) and bool(op.inputs[0] & 1)


def _guards(flow: Flow, test: Op, risky: Op, path: tuple[int, ...]) -> bool:
    """Tell whether a test is about the very value that a risky operation reads, or about what it gave."""
    name = risky.operator.name.removesuffix("_")
    read = risky.inputs[1 if name == "div" else 0] >> 1
    tested = {bare_value(flow, code >> 1) for code in test.inputs}
    limits = [a for a in test.arguments if isinstance(a, (int, float)) and not isinstance(a, bool)]
    if test.operator.name in _ASKING or not all(map(math.isfinite, limits)) or len(test.inputs) > 1:
        # `isfinite(y)`, which is `y == y` and `abs(y) != inf`: a question about the result.
        return bool(tested & {bare_value(flow, value) for value in (*path, read)})
    if bare_value(flow, read) not in tested:
        return False
    edges = _EDGES[name]
    return not edges or any(abs(limit - edge) <= _NEAR for limit in limits for edge in edges)


def bare_value(flow: Flow, value: int) -> int:
    """Give the value that a value is a view or the magnitude of."""
    for _ in range(6):
        number = flow.maker.get(value)
        if number is None:
            break
        op = flow.trace.ops[number]
        if not (op.operator.view or op.operator.name in ("abs", "lift_fresh")) or not op.inputs:
            break
        value = op.inputs[0] >> 1
    return value


def selecting_op(case: Case, op: Op) -> Op | None:
    """Find the operation that throws some of another one's values away."""
    flow = case.flow
    waiting = [(value, 5) for value in op.outputs]
    seen = set(op.outputs)
    while waiting:
        value, depth = waiting.pop(0)
        for number in flow.readers.get(value, ()):
            reader = case.trace.ops[number]
            if reader.operator.name in _SELECTING:
                return reader
            if depth and (reader.operator.name in _PASSING or reader.operator.view):
                fresh = [result for result in reader.outputs if result not in seen]
                seen.update(fresh)
                waiting.extend((result, depth - 1) for result in fresh)
    return None


def _finding(case: Case, op: Op, risky: Op) -> Finding:
    where, guarded = op.location, risky.location
    shown = where.expression if where is not None else op.operator.name
    unguarded = guarded.expression if guarded is not None else risky.operator.name
    return finding_at(
        where,
        "GG501",
        "warning",
        f"unsafe where: `{shown}` does not guard the gradient of `{unguarded}`",
        reason=f"`{risky.operator.name}` is computed for all elements, also where it has no finite derivative. The "
        "values are thrown away, their gradient is not: 0 times infinity is NaN. It has not happened in this step.",
        fix="y = gg.apply_where(keep, (x,), fn, otherwise)     # fn runs only where keep",
        module=case.module(op),
        also=[guarded],
    )
