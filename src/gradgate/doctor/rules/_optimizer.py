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


def live_optimizers() -> list[torch.optim.Optimizer]:
    """Return every optimizer that there is."""
    return [thing for thing in gc.get_objects() if issubclass(type(thing), torch.optim.Optimizer)]


def _held_by(optimizers: list[torch.optim.Optimizer]) -> set[int]:
    return {id(p) for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}


def _not_held(case: Case) -> Iterator[Finding]:
    """Find parameters that get a gradient and that no optimizer holds."""
    held = _held_by([step.optimizer for step in case.trace.optimizer_steps])
    missing = [name for name, p in case.parameters.items() if case.gradient(p).present and id(p) not in held]
    if missing:
        # It may belong to an optimizer that takes its step elsewhere.
        held = _held_by(live_optimizers())
        missing = [name for name in missing if id(case.parameters[name]) not in held]
    missing = [name for name in missing if id(case.parameters[name]) not in case.names.unregistered]
    aside = [name for name in missing if _is_feature_extractor(case, case.parameters[name], held)]
    missing = [name for name in missing if name not in aside]
    for names in (missing, aside):
        if names:
            yield finding_at(
                case.trace.optimizer_steps[-1].location,
                "GG901",
                "info" if names is aside else "warning",
                f"no optimizer holds {listed(names, 4)}",
                reason="It gets a gradient that nothing uses: it was created after the optimizer, or left out of it.",
                fix='optimizer.add_param_group({"params": layer.parameters()})     # or create the optimizer last',
                module=module_of_names(names),
            )


def _is_feature_extractor(case: Case, parameter: torch.Tensor, held: set[int]) -> bool:
    """Return whether a parameter belongs to a network in eval mode of which no optimizer holds anything."""
    calls = [call for call in case.trace.calls if call.outer < 0]
    mine = [call for call in calls if any(parameter is other for other in call.module.parameters())]
    return bool(mine) and not any(
        call.training or any(id(other) in held for other in call.module.parameters()) for call in mine
    )


def find_unregistered(case: Case) -> Iterator[Finding]:
    """Find layers in a plain Python container, in which nn.Module does not see them."""
    leaves = {root.number: root.tensor for root in case.trace.roots.values() if root.number in case.names.unregistered}
    learned = [leaf for leaf in leaves.values() if leaf is not None and leaf.grad is not None]
    held = _held_by(live_optimizers()) if learned else set()
    hidden = [leaf for leaf in learned if id(leaf) not in held]
    for container in dict.fromkeys(case.names.unregistered[id(leaf)] for leaf in hidden):
        names = [case.names.of_tensor(p) for p in hidden if case.names.unregistered[id(p)] == container]
        yield finding_at(
            case.call_of_module(container),
            "GG908",
            "error",
            f"the layers in `{container}` are not registered: a plain Python list or dict holds them",
            reason=f"model.parameters() does not list {listed(names, 3)}: no optimizer updates them, and they are "
            "missing in state_dict(), to() and train().",
            fix="self.layers = nn.ModuleList(layers)     # nn.ModuleDict for a dict, nn.ParameterList for parameters",
            module=container.rpartition(".")[0] or None,
        )


def _strangers(case: Case) -> Iterator[Finding]:
    """Find an optimizer that holds parameters of an old model or layer."""
    own = {id(p) for p in case.parameters.values()}
    for step in case.trace.optimizer_steps[:1] if case.known_model else ():
        held = [p for group in step.optimizer.param_groups for p in group["params"]]
        strangers = [p for p in held if id(p) not in own and p.grad is None and p.requires_grad]
        if held and len(strangers) == len(held):
            yield finding_at(
                step.location,
                "GG902",
                "error",
                f"the optimizer holds {len(held)} parameters, and none of them is in the model",
                reason="The model was created, copied or replaced after the optimizer, which updates the old one.",
                fix="optimizer = torch.optim.AdamW(model.parameters())     # when the model is in its final form",
            )
        elif strangers:
            replaced = any(case.gradient(p).present and id(p) not in _held_by([step.optimizer]) for p in case.learners)
            yield finding_at(
                step.location,
                "GG902",
                "warning" if replaced else "info",
                f"the optimizer holds {len(strangers)} parameters that are not in the model and get no gradient",
                reason=f"A layer was {'replaced' if replaced else 'tied or replaced'} after the optimizer was created; "
                "the optimizer still holds the old one.",
                fix="optimizer = torch.optim.AdamW(model.parameters())     # when the model is in its final form",
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
            cleared = step.cleared if step.backwards and not later else None
            yield finding_at(
                step.location,
                "GG904",
                "error" if later or step.backwards else "warning",
                "optimizer.step() found no gradient at all",
                reason="It was called before backward()."
                if later
                else "zero_grad() came between backward() and step()."
                if cleared is not None
                else "backward() was not called before it, or gave no gradient to what the optimizer holds.",
                fix="optimizer.zero_grad(); loss.backward(); optimizer.step()     # in this order",
                also=[case.trace.backwards[-1].location if later else cleared],
            )
            return
