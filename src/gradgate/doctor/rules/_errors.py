"""What torch refuses: in-place writes that backward cannot handle, a graph walked twice, inference tensors."""

from __future__ import annotations

from collections.abc import Iterator

from gradgate._source import Location, locate_traceback
from gradgate._text import text_of
from gradgate.doctor._case import Case, finding_at
from gradgate.doctor._trace import OPTIMIZER_STEP, Overwrite, Trace
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
    for saved, write, silent in found.values():
        what = f"`{write.location.expression}`" if write.location is not None else write.name
        whose = f"`{saved.location.expression}` ({saved.location.text})" if saved.location else "an operation"
        headline = f"{what} overwrites a tensor that backward still needs"
        reason = f"{whose} saved a tensor of shape {tuple(saved.tensor.shape)} for backward"
        fix = f"{_REWRITES.get(write.name, 'h = gg.at(h)[index].set(value)')}     # a new tensor"
        if write.name == OPTIMIZER_STEP:
            fix = "loss.backward() before optimizer.step()     # each graph is walked before its weights change"
        if silent:
            headline = f"error GG602: {headline}, and torch does not notice: the gradient is wrong"
            reason += ". The write goes through `.data` or another alias that autograd does not watch, so backward "
            reason += "computes with the new values."
        else:
            headline = f"error GG601: {headline}"
            reason += "; this line changed it before backward could read it."
        module = case.module(case.trace.op_of_node(saved.node))
        yield finding_at(write.location, headline, reason, fix, module=module, also=[saved.location])


def find_leaf_edits(case: Case) -> Iterator[Finding]:
    """Explain an in-place edit that autograd refuses at once: of a leaf, or of one of several views."""
    for error in case.errors:
        shown = f"`{error.location.source}`" if error.location is not None else "the step"
        if "leaf Variable that requires grad" in error.text and "in-place" in error.text:
            headline = f"{error.severity} GG603: {shown} edits a leaf that requires grad in place"
            reason = "A parameter has no history that could be continued: after the edit it would not be clear what "
            reason += "its gradient is the gradient of."
            fix = "w2 = gg.at(w)[index].set(value)     # a new tensor; gradients reach w and value\n"
            fix += "with torch.no_grad(): w[index] = value     # or: change the weight itself, without history"
            yield finding_at(error.location, headline, reason, fix)
        elif "is a view" in error.text and "inplace" in error.text:
            headline = f"{error.severity} GG604: {shown} edits a view in place that autograd cannot follow"
            reason = "The view was made by a function that returns several views at once, inside no_grad, or by an "
            reason += "autograd Function; autograd cannot carry the edit over to what it is a view of."
            fix = "y = gg.at(x)[index].set(value)     # a new tensor instead of the edit"
            yield finding_at(error.location, headline, reason, fix)


# --- a second backward, and inference tensors -------------------------------------------------------------------------


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
        headline = f"{error.severity} GG701: backward walks the graph of `{made.expression}` a second time"
        reason = "The first backward freed what the graph had saved. What this line made is part of both graphs."
        fix = "h = h.detach()     # start the next step from the value, not from its history\n"
        fix += "(loss_a + loss_b).backward()     # or: one backward for both\n"
        fix += "loss_a.backward(retain_graph=True)     # or: keep the graph for the second"
        yield finding_at(made, headline, reason, fix, also=[earlier[-1].location, last.location])
        return
    # The graph was made before the trace began: name the line where this step picks it up.
    old = [value for value, root in case.trace.roots.items() if root.requires_grad and not root.leaf]
    readers = case.flow.readers_of(old)
    where = case.trace.ops[min(readers)].location if readers else last.location
    shown = where.expression if where is not None else "unknown"
    headline = f"{error.severity} GG701: backward walks a graph a second time that was made before this step: `{shown}`"
    reason = "This line reads a tensor that still carries the graph of an earlier step, which has been freed."
    fix = "h = h.detach()     # at the end of each step: keep the value, not its history"
    yield finding_at(where, headline, reason, fix, also=[last.location])


def _shared_line(trace: Trace, shared: frozenset[int]) -> Location | None:
    numbers = [trace.op_number_of_node[node] for node in shared if node in trace.op_number_of_node]
    return trace.op(max(numbers, default=None)).location


def find_inference_tensors(case: Case) -> Iterator[Finding]:
    """Explain a tensor made in inference mode that training met, and say where it was made."""
    error = case.error("nference tensor")
    if error is None:
        return
    used, made = error.location, error.inference
    roots = [case.trace.roots.get(value) for value in error.values]
    tensors = [root.tensor for root in roots if root is not None and root.inference and root.tensor is not None]
    name = case.names.of_tensor(tensors[-1]) if tensors and made is None else None
    what = f"`{name}`" if name else f"what `{made.expression}` made" if made is not None else "a tensor"
    headline = f"{error.severity} GG804: {what} was made in inference mode and is used in training"
    reason = "Tensors made in inference mode can never be part of a graph. It is used at "
    reason += f"{used.text if used is not None else 'an unknown line'}."
    fix = "with torch.no_grad(): ...     # instead of torch.inference_mode(), where the tensor is kept\n"
    fix += "self.cache = self.cache.clone()     # or: a copy made outside of inference mode"
    yield finding_at(made or used, headline, reason, fix, also=[used])


# --- a step that raised something else, or never called backward ------------------------------------------------------


def find_raised(case: Case) -> Iterator[Finding]:
    """Say in one line what the step raised, if no other rule explains it."""
    error = case.exception
    if error is None:
        return
    where, text = locate_traceback(error.__traceback__), text_of(error).strip()
    if "grad can be implicitly created only for scalar outputs" in text:
        headline = "error GG004: backward() needs one number, and this is a tensor of several"
        reason = "Only a single number has a gradient that is not ambiguous."
        yield finding_at(where, headline, reason, "loss.mean().backward()")
    else:
        module = case.module(case.trace.op(len(case.trace.ops) - 1))
        headline = f"error GG002: the step raised {': '.join((type(error).__name__, *text.splitlines()[:1]))}"
        yield finding_at(where, headline, "This line of your code was running.", module=module)


def find_backward_missing(case: Case) -> Iterator[Finding]:
    """Find a step that never called backward."""
    trace = case.trace
    if case.one_step and case.exception is None and trace.ops and not trace.functional and not trace.backwards:
        reason = "Without backward() no parameter gets a gradient. The step also returned no loss to call it on."
        fix = "loss.backward()     # or: return loss from the step"
        yield finding_at(None, "error GG003: backward() was not called in this step", reason, fix)
