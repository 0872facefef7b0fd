"""In-place writes that backward cannot handle, and a graph that is walked twice."""

from __future__ import annotations

from collections.abc import Iterator

from gradgate._source import Location
from gradgate.doctor._case import Case, finding_at
from gradgate.doctor._trace import Overwrite, Trace
from gradgate.records import Finding, Severity

# --- in-place writes --------------------------------------------------------------------------------------------------


_REWRITES = {
    "add_": "h = h + value",
    "sub_": "h = h - value",
    "mul_": "h = h * value",
    "div_": "h = h / value",
    "copy_": "h = gg.at(h)[index].set(value)",
    "fill_": "h = gg.at(h)[index].set(value)",
    "index_put_": "h = gg.at(h)[index].set(value)",
    "masked_fill_": "h = h.masked_fill(mask, value)",
    "relu_": "h = torch.relu(h)     # nn.ReLU(inplace=False)",
}


def find_overwrites(case: Case) -> Iterator[Finding]:
    """Explain every tensor that was overwritten between forward and backward."""
    seen = set()
    for overwrite in case.trace.overwrites:
        key = (overwrite.saved_spot, overwrite.write_spot)
        if key not in seen:
            seen.add(key)
            yield _overwrite_finding(case, overwrite)


def _overwrite_finding(case: Case, overwrite: Overwrite) -> Finding:
    written, saved = overwrite.write_spot, overwrite.saved_spot
    what = f"`{written.expression}`" if written is not None else overwrite.write_name
    whose = f"`{saved.expression}` ({saved.text})" if saved is not None else "an operation"
    number = case.trace.op_number_of_node.get(overwrite.saved_node)
    module = case.module(case.trace.ops[number]) if number is not None else None
    if overwrite.by_optimizer:
        fix = "loss.backward() before optimizer.step()     # each graph is walked before its weights change"
    else:
        fix = f"{_REWRITES.get(overwrite.write_name, 'h = gg.at(h)[index].set(value)')}     # a new tensor"
    if overwrite.silent:
        return finding_at(
            written,
            "GG602",
            "error",
            f"{what} overwrites a tensor that backward still needs, and torch does not notice: the gradient is wrong",
            reason=f"{whose} saved a tensor of shape {overwrite.shape} for backward. The write goes through "
            "`.data` or another alias that autograd does not watch, so backward computes with the new values.",
            fix=fix,
            module=module,
            also=[saved],
        )
    return finding_at(
        written,
        "GG601",
        "error",
        f"{what} overwrites a tensor that backward still needs",
        reason=f"{whose} saved a tensor of shape {overwrite.shape} for backward; this line changed it before backward "
        "could read it.",
        fix=fix,
        module=module,
        also=[saved],
    )


def find_leaf_edits(case: Case) -> Iterator[Finding]:
    """Explain an in-place edit that autograd refuses at once: of a leaf, or of one of several views."""
    for error in case.errors:
        shown = f"`{error.location.source}`" if error.location is not None else "the step"
        if "leaf Variable that requires grad" in error.text and "in-place" in error.text:
            yield finding_at(
                error.location,
                "GG603",
                case.severity_of(error),
                f"{shown} edits a leaf that requires grad in place",
                reason="A parameter has no history that could be continued: after the edit nobody could say "
                "what its gradient is the gradient of.",
                fix="w2 = gg.at(w)[index].set(value)     # a new tensor; gradients reach w and value\n"
                "with torch.no_grad(): w[index] = value     # or: change the weight itself, without history",
            )
        elif "is a view" in error.text and "inplace" in error.text:
            yield finding_at(
                error.location,
                "GG604",
                case.severity_of(error),
                f"{shown} edits a view in place that autograd cannot follow",
                reason="The view was made by a function that gives several views at once, inside no_grad, or by an "
                "autograd Function; autograd cannot carry the edit over to what it is a view of.",
                fix="y = gg.at(x)[index].set(value)     # a new tensor instead of the edit",
            )


# --- a second backward ------------------------------------------------------------------------------------------------


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
    made = _shared_line(case.trace, shared) or _shared_line(case.previous, shared)
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


def _shared_line(trace: Trace, shared: frozenset[int]) -> Location | None:
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
