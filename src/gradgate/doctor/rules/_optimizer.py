"""The optimizer and the model: who holds what, and in which order things were called."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import torch

from gradgate._names import listed
from gradgate.doctor._case import Case, finding_at, module_of_names
from gradgate.records import Finding


def find_optimizer_faults(case: Case) -> Iterator[Finding]:
    """Find what is wrong between the optimizer and the model."""
    steps = case.trace.optimizer_steps
    if not steps:
        return
    yield from _early_steps(case)
    if case.exception is None:
        yield from _not_held(case)
        yield from _strangers(case)
        yield from _growing(case)


def _held_by(optimizers: list[torch.optim.Optimizer]) -> set[int]:
    return {id(p) for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}


def _not_held(case: Case) -> Iterator[Finding]:
    held = _held_by([step.optimizer for step in case.trace.optimizer_steps])
    missing = [name for name, p in case.parameters.items() if case.gradient(p).present and id(p) not in held]
    if missing:
        # It may belong to an optimizer that takes its step elsewhere.
        everybody = [x for x in gc.get_objects() if issubclass(type(x), torch.optim.Optimizer)]
        held = _held_by(everybody)
        missing = [name for name in missing if id(case.parameters[name]) not in held]
    if missing:
        yield finding_at(
            case.trace.optimizer_steps[-1].location,
            "GG901",
            "warning",
            f"no optimizer holds {listed(missing, 4)}",
            reason="It gets a gradient, but nobody uses it: it was made after the optimizer, or left out of it.",
            fix='optimizer.add_param_group({"params": layer.parameters()})     # or make the optimizer after the model',
            module=module_of_names(missing),
        )


def _strangers(case: Case) -> Iterator[Finding]:
    if not case.known_model:
        return
    own = {id(p) for p in case.parameters.values()}
    for step in case.trace.optimizer_steps[:1]:
        held = [p for group in step.optimizer.param_groups for p in group["params"]]
        strangers = [p for p in held if id(p) not in own and p.grad is None and p.requires_grad]
        if held and len(strangers) == len(held):
            yield finding_at(
                step.location,
                "GG902",
                "error",
                f"the optimizer holds {len(held)} parameters, and none of them is in the model",
                reason="The model was made, copied or replaced after the optimizer; the optimizer moves the old one.",
                fix="optimizer = torch.optim.AdamW(model.parameters())     # after the model is as it will stay",
            )
        elif strangers:
            yield finding_at(
                step.location,
                "GG902",
                "warning",
                f"the optimizer holds {len(strangers)} parameters that are not in the model and get no gradient",
                reason="A layer was replaced after the optimizer was made; the optimizer still holds the old one.",
                fix="optimizer = torch.optim.AdamW(model.parameters())     # after the model is as it will stay",
            )


def _growing(case: Case) -> Iterator[Finding]:
    for step in case.trace.optimizer_steps:
        if step.again or (step.old and case.trace.gradients_left):
            yield finding_at(
                step.location,
                "GG903",
                "warning",
                "gradients grow from step to step: zero_grad is missing",
                reason="backward() adds to the gradients that are there; those of the step before were still there.",
                fix="optimizer.zero_grad()     # once before each backward()",
                also=[backward.location for backward in case.trace.backwards[:1]],
            )
            return


def _early_steps(case: Case) -> Iterator[Finding]:
    for step in case.trace.optimizer_steps:
        if step.idle:
            later = len(case.trace.backwards) > step.backwards
            yield finding_at(
                step.location,
                "GG904",
                "error" if later else "warning",
                "optimizer.step() found no gradient at all",
                reason="It was called before backward()."
                if later
                else "backward() was not called, or zero_grad() came after.",
                fix="optimizer.zero_grad(); loss.backward(); optimizer.step()     # in this order",
                also=[case.trace.backwards[-1].location] if later else [],
            )
            return
