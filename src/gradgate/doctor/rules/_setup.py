"""What a step runs in: modes that are not what the user thinks, and an optimizer that holds something else."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator

import torch

from gradgate._names import listed
from gradgate._source import Owner, modes_without_effect, owner_of
from gradgate.doctor._case import Case, finding_at, module_of_names
from gradgate.doctor._numerics import is_all_zero, is_readable
from gradgate.doctor._trace import Flow, Op
from gradgate.doctor._tracer import parameters_of
from gradgate.records import Finding

# --- modes ------------------------------------------------------------------------------------------------------------

_BATCH_NORMS = ("native_batch_norm", "cudnn_batch_norm", "_native_batch_norm_legit", "_batch_norm_with_update")
_DROPOUTS = (torch.nn.Dropout, torch.nn.Dropout1d, torch.nn.Dropout2d, torch.nn.Dropout3d, torch.nn.AlphaDropout)
BATCHNORMS = (torch.nn.BatchNorm1d, torch.nn.BatchNorm2d, torch.nn.BatchNorm3d, torch.nn.SyncBatchNorm)


def find_recording_off(case: Case) -> Iterator[Finding]:
    """Find recording that is off at the end of the step, and the line that switched it."""
    trace = case.trace
    if trace.recording_at_end or (case.exception is not None and trace.recording_at_start):
        return
    where = next((switch.location for switch in reversed(trace.switches) if not switch.on), None)
    at = f"at `{where.expression}` " if where is not None else ""
    reason = "From here on nothing has a gradient, in this thread."
    reason += "" if trace.recording_at_start else " It was off already when the step began."
    fix = "with gg.grad_mode(False): ...     # a block restores what was before, also when it raises"
    yield finding_at(where, f"error GG801: recording was switched off {at}and stays off", reason, fix)


def find_written_modes(case: Case) -> Iterator[Finding]:
    """Find modes in the user's files that do nothing as they are written."""
    locations = [op.location for op in case.trace.ops] + [backward.location for backward in case.trace.backwards]
    for file in dict.fromkeys([*case.files, *(location.file for location in locations if location is not None)]):
        if owner_of(file) in (Owner.PACKAGE, Owner.TORCH):
            continue
        bare, decorated = modes_without_effect(file)
        for line in bare:
            headline = f"warning GG802: `{line.expression}` alone on a line does nothing"
            reason = "It creates a block that is never entered; recording goes on as before."
            yield finding_at(line, headline, reason, f"with {line.expression}:\n    ...")
        for line in decorated:
            headline = f"warning GG803: `{line.expression}` on an async def does nothing"
            reason = "The decorator is left as soon as the coroutine is made, before a line of it has run."
            fix = "@gg.grad_mode(False)     # in force while the coroutine runs, and only then"
            yield finding_at(line, headline, reason, fix)


def find_eval_left_on(case: Case) -> Iterator[Finding]:
    """Find a model that is trained while it is in eval mode."""
    calls, behind = case.trace.calls, case.flow.behind_losses
    roots = [root for value, root in case.trace.roots.items() if value in behind]
    # A gradient may be wanted for data: a saliency map, an adversarial example.
    data = any(r.leaf and r.requires_grad and not isinstance(r.tensor, torch.nn.Parameter) for r in roots)
    if case.exception is not None or data:
        return
    learners = {id(p) for p in case.parameters.values() if p.requires_grad and case.gradient(p).present}
    trained = {case.outermost(op.call) for op in case.trace.ops if op.records and not behind.isdisjoint(op.outputs)}
    modal = [n for n, call in enumerate(calls) if isinstance(call.module, (*_DROPOUTS, *BATCHNORMS))]
    for number in sorted(trained - {-1}):
        root = calls[number]
        affected = [calls[n] for n in modal if case.outermost(n) == number]
        if root.training or not affected or any(call.training for call in affected):
            continue
        if any(id(parameter) in learners for parameter in root.module.parameters()):
            kinds = sorted({type(call.module).__name__ for call in affected})
            headline = f"warning GG805: the model is trained in eval mode: {', '.join(kinds)} stays as it is"
            reason = "After model.eval() dropout drops nothing and BatchNorm uses its stored statistics."
            fix, module = "model.train()     # before the training step", case.names.of_module(root.module)
            yield finding_at(root.location, headline, reason, fix, module=module)
            return


def find_statistics(case: Case) -> Iterator[Finding]:
    """Find a validation under no_grad in train mode, which changes the running statistics of BatchNorm."""
    ops = [op for op in case.trace.ops if id(op.module) in case.trained_modules and _moves_statistics(case, op)]
    if not ops or _is_sampling(case, ops):
        return
    names = list(dict.fromkeys(case.module(op) or "BatchNorm" for op in ops))
    headline = f"BatchNorm is in train mode under no_grad: {listed(names, 3)} changes its running statistics"
    reason = "no_grad stops gradients, not the running mean and variance: the validation data leak into the model."
    fix = "model.eval()     # before validation, and model.train() after it"
    also = [case.trace.switches[ops[0].switch].location if ops[0].switch >= 0 else None]
    yield finding_at(ops[0].location, f"warning GG806: {headline}", reason, fix, module=names[0], also=also)


def _moves_statistics(case: Case, op: Op) -> bool:
    module = op.module
    if op.records or op.name not in _BATCH_NORMS or not isinstance(module, BATCHNORMS):
        return False
    # Another momentum than its own is a recalibration (`update_bn`), and meant.
    learns = True in op.numbers and module.track_running_stats and module.momentum in op.numbers
    return bool(learns) and not case.flow.is_inside_function(op)


def _is_sampling(case: Case, ops: list[Op]) -> bool:
    """Return whether the results leave torch as arrays, as the images of a generator do, and not as a score."""
    made = Flow(case.trace, whole=True).results(value for op in ops for value in op.outputs)
    kinds = {escape.kind for escape in case.trace.escapes if escape.value in made}
    return bool(kinds & {"numpy", "tolist"}) and not kinds & {"item", "float"}


# --- who holds what ---------------------------------------------------------------------------------------------------


def live_optimizers() -> list[torch.optim.Optimizer]:
    return [thing for thing in gc.get_objects() if issubclass(type(thing), torch.optim.Optimizer)]


def _held_by(optimizers: Iterable[torch.optim.Optimizer]) -> set[int]:
    return {id(parameter) for optimizer in optimizers for parameter in parameters_of(optimizer)}


def find_unregistered(case: Case) -> Iterator[Finding]:
    """Find layers in a plain Python container, in which nn.Module does not see them."""
    names, containers = case.names, case.names.unregistered
    leaves = {root.number: root.tensor for root in case.trace.roots.values() if root.number in containers}
    learned = [leaf for leaf in leaves.values() if leaf is not None and leaf.grad is not None]
    held = _held_by(live_optimizers()) if learned else set()
    hidden = [leaf for leaf in learned if id(leaf) not in held]
    for container in dict.fromkeys(containers[id(leaf)] for leaf in hidden):
        inside = [names.of_tensor(leaf) for leaf in hidden if containers[id(leaf)] == container]
        calls = [call for call in case.outermost_calls if container.startswith(names.path_of(call.module))]
        headline = f"the layers in `{container}` are not registered: a plain Python list or dict holds them"
        reason = f"model.parameters() does not list {listed(inside, 3)}: no optimizer updates them, and they are "
        reason += "missing in state_dict(), to() and train()."
        fix = "self.layers = nn.ModuleList(layers)     # nn.ModuleDict for a dict, nn.ParameterList for parameters"
        where, module = calls[0].location if calls else None, container.rpartition(".")[0] or None
        yield finding_at(where, f"error GG908: {headline}", reason, fix, module=module)


def find_optimizer_faults(case: Case) -> Iterator[Finding]:
    """Find what is wrong between the optimizer and the model."""
    if case.trace.optimizer_steps:
        yield from _early_steps(case)
        if case.exception is None:
            yield from _not_held(case)
            yield from _strangers(case)
            yield from _growing(case)


def _early_steps(case: Case) -> Iterator[Finding]:
    step = next((step for step in case.trace.optimizer_steps if step.idle), None)
    if step is None:
        return
    later = len(case.trace.backwards) > step.backwards
    also = case.trace.backwards[-1].location if later else step.cleared if step.backwards else None
    reason = "backward() was not called before it, or gave no gradient to what the optimizer holds."
    if later or also is not None:
        reason = "It was called before backward()." if later else "zero_grad() came between backward() and step()."
    headline = f"{'error' if later or step.backwards else 'warning'} GG904: optimizer.step() found no gradient at all"
    fix = "optimizer.zero_grad(); loss.backward(); optimizer.step()     # in this order"
    yield finding_at(step.location, headline, reason, fix, also=[also])


def _not_held(case: Case) -> Iterator[Finding]:
    """Find parameters that get a gradient and that no optimizer holds."""
    known = _held_by(step.optimizer for step in case.trace.optimizer_steps) | case.names.unregistered.keys()
    missing = [name for name, p in case.parameters.items() if case.gradient(p).present and id(p) not in known]
    # It may belong to an optimizer that takes its step elsewhere.
    held = _held_by(live_optimizers()) if missing else set()
    missing = [name for name in missing if id(case.parameters[name]) not in held]
    aside = [name for name in missing if _is_feature_extractor(case, case.parameters[name], held)]
    for names in filter(None, ([name for name in missing if name not in aside], aside)):
        headline = f"{'info' if names is aside else 'warning'} GG901: no optimizer holds {listed(names, 4)}"
        reason = "It gets a gradient that nothing uses: it was created after the optimizer, or left out of it."
        fix = 'optimizer.add_param_group({"params": layer.parameters()})     # or create the optimizer last'
        where = case.trace.optimizer_steps[-1].location
        yield finding_at(where, headline, reason, fix, module=module_of_names(names))


def _is_feature_extractor(case: Case, parameter: torch.Tensor, held: set[int]) -> bool:
    """Return whether a parameter belongs to a network in eval mode of which no optimizer holds anything."""
    mine = case.calls_with(parameter)
    own = {id(other) for call in mine for other in call.module.parameters()}
    return bool(mine) and own.isdisjoint(held) and not any(call.training for call in mine)


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
        yield finding_at(step.location, headline, reason, fix)


def _growing(case: Case) -> Iterator[Finding]:
    gradients = [p.grad for p in case.parameters.values() if p.grad is not None]
    left = any(not is_readable(gradient) or not is_all_zero(gradient) for gradient in gradients)
    step = next((step for step in case.trace.optimizer_steps if step.again or (step.old and left)), None)
    if step is not None:
        headline = "warning GG903: gradients grow from step to step: zero_grad is missing"
        reason = "backward() adds to the gradients that are there; those of the step before were still there."
        fix, also = "optimizer.zero_grad()     # once before each backward()", case.trace.backwards[:1]
        yield finding_at(step.location, headline, reason, fix, also=[backward.location for backward in also])
