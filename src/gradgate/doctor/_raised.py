"""What the step raised and no other rule explains."""

from __future__ import annotations

import re
from collections.abc import Iterator

from gradgate._source import locate_traceback
from gradgate.doctor._case import Case, finding_at
from gradgate.doctor._cuts import explain_parameters
from gradgate.records import Finding


def find_unused_in_grad(case: Case) -> Iterator[Finding]:
    """Explain "appears to not have been used in the graph", which torch.autograd.grad says without a name."""
    errors = [e for e in case.errors if "appears to not have been used in the graph" in e.text and e.backward >= 0]
    if not errors:
        return
    inputs = case.trace.backwards[errors[-1].backward].inputs or ()
    found = re.search(r"at index (\d+)", errors[-1].text)
    wanted = inputs[int(found[1]) : int(found[1]) + 1] if found else inputs
    asked = {name: p for name, p in case.parameters.items() if id(p) in wanted}
    yield from explain_parameters(case, asked)


def find_backward_missing(case: Case) -> Iterator[Finding]:
    """Tell when a step never came to backward."""
    if not case.one_step or case.exception is not None or case.trace.functional:
        return
    if not case.trace.backwards and case.trace.ops:
        yield finding_at(
            None,
            "GG003",
            "error",
            "backward() was not called in this step",
            reason="Without backward() no parameter gets a gradient. The step also returned no loss to call it on.",
            fix="loss.backward()     # or: return loss from the step",
        )


def find_raised(case: Case) -> Iterator[Finding]:
    """Tell what the step raised, in one line."""
    error = case.exception
    if error is None:
        return
    where = locate_traceback(error.__traceback__)
    if "grad can be implicitly created only for scalar outputs" in str(error):
        yield finding_at(
            where,
            "GG004",
            "error",
            "backward() needs one number, and this is a tensor of several",
            reason="Only a single number has a gradient that is not ambiguous.",
            fix="loss.mean().backward()",
        )
        return
    module = case.trace.ops[-1].module if case.trace.ops else None
    text = str(error).strip().splitlines()
    yield finding_at(
        where,
        "GG002",
        "error",
        f"the step raised {type(error).__name__}{': ' + text[0] if text else ''}",
        reason="This line of your code was running.",
        fix="",
        module=case.names.of_module(module),
    )
