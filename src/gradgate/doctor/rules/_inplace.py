"""In-place writes that backward cannot handle, and a graph that is walked twice."""

from __future__ import annotations

from collections.abc import Iterator

from gradgate._source import Location
from gradgate.doctor._case import Case, finding_at
from gradgate.doctor._trace import Overwrite, Trace
from gradgate.records import Finding

# --- in-place writes --------------------------------------------------------------------------------------------------

_REWRITES = {
    "add_": "h = h + value",
    "sub_": "h = h - value",
    "mul_": "h = h * value",
    "div_": "h = h / value",
    "masked_fill_": "h = h.masked_fill(mask, value)",
    "relu_": "h = torch.relu(h)     # nn.ReLU(inplace=False)",
}


def find_overwrites(case: Case) -> Iterator[Finding]:
    """Explain every tensor that was overwritten between forward and backward."""
    found: dict[object, Overwrite] = {}
    for overwrite in case.trace.overwrites:
        found.setdefault((overwrite.saved.location, overwrite.write.location), overwrite)
    for overwrite in found.values():
        yield _overwrite_finding(case, overwrite)


def _overwrite_finding(case: Case, overwrite: Overwrite) -> Finding:
    write, saved = overwrite.write, overwrite.saved.location
    what = f"`{write.location.expression}`" if write.location is not None else write.name
    whose = f"`{saved.expression}` ({saved.text})" if saved is not None else "an operation"
    number = case.trace.op_number_of_node.get(overwrite.saved.node)
    headline = f"error GG601: {what} overwrites a tensor that backward still needs"
    reason = f"{whose} saved a tensor of shape {tuple(overwrite.saved.tensor.shape)} for backward"
    fix = f"{_REWRITES.get(write.name, 'h = gg.at(h)[index].set(value)')}     # a new tensor"
    if write.by_optimizer:
        fix = "loss.backward() before optimizer.step()     # each graph is walked before its weights change"
    if overwrite.silent:
        headline = f"error GG602: {what} overwrites a tensor that backward still needs, and torch does not notice: "
        headline += "the gradient is wrong"
        reason += ". The write goes through `.data` or another alias that autograd does not watch, so backward "
        reason += "computes with the new values."
    else:
        reason += "; this line changed it before backward could read it."
    module = case.module(case.trace.ops[number]) if number is not None else None
    return finding_at(write.location, headline, reason=reason, fix=fix, module=module, also=[saved])


def find_leaf_edits(case: Case) -> Iterator[Finding]:
    """Explain an in-place edit that autograd refuses at once: of a leaf, or of one of several views."""
    for error in case.errors:
        shown = f"`{error.location.source}`" if error.location is not None else "the step"
        if "leaf Variable that requires grad" in error.text and "in-place" in error.text:
            yield finding_at(
                error.location,
                f"{error.severity} GG603: {shown} edits a leaf that requires grad in place",
                reason="A parameter has no history that could be continued: after the edit it would not be clear "
                "what its gradient is the gradient of.",
                fix="w2 = gg.at(w)[index].set(value)     # a new tensor; gradients reach w and value\n"
                "with torch.no_grad(): w[index] = value     # or: change the weight itself, without history",
            )
        elif "is a view" in error.text and "inplace" in error.text:
            yield finding_at(
                error.location,
                f"{error.severity} GG604: {shown} edits a view in place that autograd cannot follow",
                reason="The view was made by a function that returns several views at once, inside no_grad, or by an "
                "autograd Function; autograd cannot carry the edit over to what it is a view of.",
                fix="y = gg.at(x)[index].set(value)     # a new tensor instead of the edit",
            )


# --- a second backward ------------------------------------------------------------------------------------------------


def find_second_backward(case: Case) -> Iterator[Finding]:
    """Explain "Trying to backward through the graph a second time"."""
    error = case.error("backward through the graph a second time")
    if error is None or error.backward < 0:
        return
    last = case.trace.backwards[error.backward]
    before = (*case.previous.backwards, *case.trace.backwards[: error.backward])
    earlier = [b for b in before if b.nodes & last.nodes - {-1}]
    shared = last.nodes & frozenset().union(*(b.nodes for b in earlier)) - {-1}
    made = _shared_line(case.trace, shared) or _shared_line(case.previous, shared)
    if made is not None:
        yield finding_at(
            made,
            f"{error.severity} GG701: backward walks the graph of `{made.expression}` a second time",
            reason="The first backward freed what the graph had saved. What this line made is part of both graphs.",
            fix="h = h.detach()     # start the next step from the value, not from its history\n"
            "(loss_a + loss_b).backward()     # or: one backward for both\n"
            "loss_a.backward(retain_graph=True)     # or: keep the graph for the second",
            also=[earlier[-1].location, last.location],
        )
        return
    # The graph was made before the trace began: name the line where this step picks it up.
    old = [value for value, root in case.trace.roots.items() if root.requires_grad and not root.leaf]
    readers = case.flow.readers_of(old)
    where = case.trace.ops[min(readers)].location if readers else last.location
    shown = where.expression if where is not None else "unknown"
    yield finding_at(
        where,
        f"{error.severity} GG701: backward walks a graph a second time that was made before this step: `{shown}`",
        reason="This line reads a tensor that still carries the graph of an earlier step, which has been freed.",
        fix="h = h.detach()     # at the end of each step: keep the value, not its history",
        also=[last.location],
    )


def _shared_line(trace: Trace, shared: frozenset[int]) -> Location | None:
    numbers = [trace.op_number_of_node[node] for node in shared if node in trace.op_number_of_node]
    return trace.ops[max(numbers)].location if numbers else None
