"""In-place writes that backward cannot bear: who saved the tensor, and who overwrote it."""

from __future__ import annotations

from collections.abc import Iterator

from gradgate.doctor._case import Case, finding_at
from gradgate.doctor._trace import Overwrite
from gradgate.records import Finding

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
            yield _finding(case, overwrite)


def _finding(case: Case, overwrite: Overwrite) -> Finding:
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
