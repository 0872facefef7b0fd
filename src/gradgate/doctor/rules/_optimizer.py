"""The optimizer and the model: who holds what, and in which order things were called."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator

import torch

from gradgate._names import listed
from gradgate.doctor._case import Case, finding_at, module_of_names
from gradgate.doctor._numerics import is_all_zero, is_readable
from gradgate.doctor._tracer import parameters_of
from gradgate.records import Finding


def find_optimizer_faults(case: Case) -> Iterator[Finding]:
    """Find what is wrong between the optimizer and the model."""
    if case.trace.optimizer_steps:
        yield from _early_steps(case)
        if case.exception is None:
            yield from _not_held(case)
            yield from _strangers(case)
            yield from _growing(case)


def live_optimizers() -> list[torch.optim.Optimizer]:
    return [thing for thing in gc.get_objects() if issubclass(type(thing), torch.optim.Optimizer)]


def _held_by(optimizers: Iterable[torch.optim.Optimizer]) -> set[int]:
    return {id(parameter) for optimizer in optimizers for parameter in parameters_of(optimizer)}


def _not_held(case: Case) -> Iterator[Finding]:
    """Find parameters that get a gradient and that no optimizer holds."""
    known = _held_by(step.optimizer for step in case.trace.optimizer_steps) | case.names.unregistered.keys()
    missing = [name for name, p in case.parameters.items() if case.gradient(p).present and id(p) not in known]
    # It may belong to an optimizer that takes its step elsewhere.
    held = _held_by(live_optimizers()) if missing else set()
    missing = [name for name in missing if id(case.parameters[name]) not in held]
    aside = [name for name in missing if _is_feature_extractor(case, case.parameters[name], held)]
    for names in ([name for name in missing if name not in aside], aside):
        if names:
            yield finding_at(
                case.trace.optimizer_steps[-1].location,
                f"{'info' if names is aside else 'warning'} GG901: no optimizer holds {listed(names, 4)}",
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
    names, containers = case.names, case.names.unregistered
    leaves = {root.number: root.tensor for root in case.trace.roots.values() if root.number in containers}
    learned = [leaf for leaf in leaves.values() if leaf is not None and leaf.grad is not None]
    held = _held_by(live_optimizers()) if learned else set()
    hidden = [leaf for leaf in learned if id(leaf) not in held]
    outermost = [call for call in case.trace.calls if call.outer < 0]
    for container in dict.fromkeys(containers[id(leaf)] for leaf in hidden):
        inside = [names.of_tensor(leaf) for leaf in hidden if containers[id(leaf)] == container]
        yield finding_at(
            next((call.location for call in outermost if container.startswith(names.path_of(call.module))), None),
            f"error GG908: the layers in `{container}` are not registered: a plain Python list or dict holds them",
            reason=f"model.parameters() does not list {listed(inside, 3)}: no optimizer updates them, and they are "
            "missing in state_dict(), to() and train().",
            fix="self.layers = nn.ModuleList(layers)     # nn.ModuleDict for a dict, nn.ParameterList for parameters",
            module=container.rpartition(".")[0] or None,
        )


def _strangers(case: Case) -> Iterator[Finding]:
    """Find an optimizer that holds parameters of an old model or layer."""
    own = {id(p) for p in case.parameters.values()}
    for step in case.trace.optimizer_steps[:1] if case.known_model else ():
        held = parameters_of(step.optimizer)
        strangers = [p for p in held if id(p) not in own and p.grad is None and p.requires_grad]
        if not strangers:
            continue
        numbers = {id(p) for p in held}
        replaced = any(case.gradient(p).present and id(p) not in numbers for p in case.parameters.values())
        headline = f"{'warning' if replaced else 'info'} GG902: the optimizer holds {len(strangers)} parameters that "
        headline += "are not in the model and get no gradient"
        reason = f"A layer was {'replaced' if replaced else 'tied or replaced'} after the optimizer was created; "
        reason += "the optimizer still holds the old one."
        if len(strangers) == len(held):
            headline = f"error GG902: the optimizer holds {len(held)} parameters, and none of them is in the model"
            reason = "The model was created, copied or replaced after the optimizer, which updates the old one."
        fix = "optimizer = torch.optim.AdamW(model.parameters())     # when the model is in its final form"
        yield finding_at(step.location, headline, reason=reason, fix=fix)


def _growing(case: Case) -> Iterator[Finding]:
    gradients = [p.grad for p in case.parameters.values() if p.grad is not None]
    left = any(not is_readable(gradient) or not is_all_zero(gradient) for gradient in gradients)
    for step in case.trace.optimizer_steps:
        if step.again or (step.old and left):
            yield finding_at(
                step.location,
                "warning GG903: gradients grow from step to step: zero_grad is missing",
                reason="backward() adds to the gradients that are there; those of the step before were still there.",
                fix="optimizer.zero_grad()     # once before each backward()",
                also=[backward.location for backward in case.trace.backwards[:1]],
            )
            return


def _early_steps(case: Case) -> Iterator[Finding]:
    step = next((step for step in case.trace.optimizer_steps if step.idle), None)
    if step is None:
        return
    later = len(case.trace.backwards) > step.backwards
    cleared = step.cleared if step.backwards and not later else None
    reason = "backward() was not called before it, or gave no gradient to what the optimizer holds."
    if later:
        reason = "It was called before backward()."
    elif cleared is not None:
        reason = "zero_grad() came between backward() and step()."
    severity = "error" if later or step.backwards else "warning"
    yield finding_at(
        step.location,
        f"{severity} GG904: optimizer.step() found no gradient at all",
        reason=reason,
        fix="optimizer.zero_grad(); loss.backward(); optimizer.step()     # in this order",
        also=[case.trace.backwards[-1].location if later else cleared],
    )
