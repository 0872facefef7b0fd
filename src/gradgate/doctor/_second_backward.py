"""A graph that is walked twice: which tensor the two walks share, and where it was made."""

from __future__ import annotations

from collections.abc import Iterator

from gradgate._source import Location
from gradgate.doctor._case import Case, finding_at
from gradgate.doctor._trace import Trace
from gradgate.records import Finding, Severity


def find_second_backward(case: Case) -> Iterator[Finding]:
    """Explain "Trying to backward through the graph a second time"."""
    errors = [e for e in case.errors if "backward through the graph a second time" in e.text and e.backward >= 0]
    if not errors:
        return
    severity, number = case.severity_of(errors[-1]), errors[-1].backward
    last = case.trace.backwards[number]
    before = (*case.previous.backwards, *case.trace.backwards[:number])
    earlier = [b for b in before if b.nodes & last.nodes - {-1}]
    shared = last.nodes & frozenset().union(*(b.nodes for b in earlier)) - {-1} if earlier else frozenset()
    called = last.location
    first = earlier[-1].location if earlier else None
    made = _made(case.trace, shared) or _made(case.previous, shared)
    if made is not None:
        yield finding_at(
            made,
            "GG701",
            severity,
            f"backward walks the graph of `{made.expression}` a second time",
            reason="The first backward freed what the graph had saved. What this line made is part of both graphs.",
            fix="h = h.detach()     # start the next step from the value, not from its history\n"
            "(loss_a + loss_b).backward()     # or: one backward for both\n"
            "loss_a.backward(retain_graph=True)     # or: keep the graph for the second",
            also=[first, called],
        )
        return
    yield from _from_before(case, called, severity)


def _made(trace: Trace, shared: frozenset[int]) -> Location | None:
    numbers = [trace.op_number_of_node[node] for node in shared if node in trace.op_number_of_node]
    return trace.ops[max(numbers)].location if numbers else None


def _from_before(case: Case, called: Location | None, severity: Severity) -> Iterator[Finding]:
    """The graph was made before the trace began: say where this step picks it up."""
    old = [v for v, root in case.trace.roots.items() if root.requires_grad and not root.leaf]
    readers = sorted(n for value in old for n in case.flow.readers.get(value, ()))
    where = case.trace.ops[readers[0]].location if readers else called
    yield finding_at(
        where,
        "GG701",
        severity,
        f"backward walks a graph a second time that was made before this step: "
        f"`{where.expression if where is not None else 'unknown'}`",
        reason="This line reads a tensor that still carries the graph of an earlier step, which has been freed.",
        fix="h = h.detach()     # at the end of each step: keep the value, not its history",
        also=[called],
    )
