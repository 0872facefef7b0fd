"""Modes that are not what the user thinks: recording off, blocks that are none, inference tensors, eval and train."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from gradgate._names import listed
from gradgate._source import Owner, modes_without_effect, owner_of
from gradgate.doctor._case import Case, finding_at
from gradgate.doctor._trace import Flow, Op
from gradgate.records import Finding

_BATCH_NORMS = ("native_batch_norm", "cudnn_batch_norm", "_native_batch_norm_legit", "_batch_norm_with_update")
_DROPOUTS = (torch.nn.Dropout, torch.nn.Dropout1d, torch.nn.Dropout2d, torch.nn.Dropout3d, torch.nn.AlphaDropout)
BATCHNORMS = (torch.nn.BatchNorm1d, torch.nn.BatchNorm2d, torch.nn.BatchNorm3d, torch.nn.SyncBatchNorm)
_MODAL = (*_DROPOUTS, *BATCHNORMS)


def find_recording_off(case: Case) -> Iterator[Finding]:
    """Find recording that is off at the end of the step, and the line that switched it."""
    trace = case.trace
    if trace.recording_at_end or (case.exception is not None and trace.recording_at_start):
        return
    where = next((switch.location for switch in reversed(trace.switches) if not switch.on), None)
    at = f"at `{where.expression}` " if where is not None else ""
    yield finding_at(
        where,
        f"error GG801: recording was switched off {at}and stays off",
        reason="From here on nothing has a gradient, in this thread."
        + ("" if trace.recording_at_start else " It was off already when the step began."),
        fix="with gg.grad_mode(False): ...     # a block restores what was before, also when it raises",
    )


def find_written_modes(case: Case) -> Iterator[Finding]:
    """Find modes in the user's files that do nothing as they are written."""
    locations = [op.location for op in case.trace.ops] + [backward.location for backward in case.trace.backwards]
    for file in dict.fromkeys([*case.files, *(location.file for location in locations if location is not None)]):
        if owner_of(file) in (Owner.PACKAGE, Owner.TORCH):
            continue
        bare, decorated = modes_without_effect(file)
        for line in bare:
            yield finding_at(
                line,
                f"warning GG802: `{line.expression}` alone on a line does nothing",
                reason="It creates a block that is never entered; recording goes on as before.",
                fix=f"with {line.expression}:\n    ...",
            )
        for line in decorated:
            yield finding_at(
                line,
                f"warning GG803: `{line.expression}` on an async def does nothing",
                reason="The decorator is left as soon as the coroutine is made, before a line of it has run.",
                fix="@gg.grad_mode(False)     # in force while the coroutine runs, and only then",
            )


def find_inference_tensors(case: Case) -> Iterator[Finding]:
    """Explain a tensor made in inference mode that training met, and say where it was made."""
    error = case.error("nference tensor")
    if error is None:
        return
    used, made, name = error.location, None, None
    for value in error.values:
        root = case.trace.roots.get(value)
        if value in case.trace.inference_values:
            made = case.trace.inference_values[value]
        elif root is not None and root.inference:
            name = case.names.of_tensor(root.tensor) if root.tensor is not None else None
    what = f"`{name}`" if name else f"what `{made.expression}` made" if made is not None else "a tensor"
    yield finding_at(
        made or used,
        f"{error.severity} GG804: {what} was made in inference mode and is used in training",
        reason=f"Tensors made in inference mode can never be part of a graph. It is used at "
        f"{used.text if used is not None else 'an unknown line'}.",
        fix="with torch.no_grad(): ...     # instead of torch.inference_mode(), where the tensor is kept\n"
        "self.cache = self.cache.clone()     # or: a copy made outside of inference mode",
        also=[used],
    )


def find_eval_left_on(case: Case) -> Iterator[Finding]:
    """Find a model that is trained while it is in eval mode."""
    if case.exception is not None:
        return
    learners = {id(p) for p in case.parameters.values() if p.requires_grad and case.gradient(p).present}
    calls, behind = case.trace.calls, case.flow.behind_losses
    trained = {case.outermost(op.call) for op in case.trace.ops if op.records and not behind.isdisjoint(op.outputs)}
    for number in sorted(trained - {-1}):
        root = calls[number]
        affected = [c for n, c in enumerate(calls) if isinstance(c.module, _MODAL) and case.outermost(n) == number]
        if root.training or not affected or any(call.training for call in affected):
            continue
        if not any(id(parameter) in learners for parameter in root.module.parameters()) or _takes_learned_input(case):
            continue
        kinds = sorted({type(call.module).__name__ for call in affected})
        yield finding_at(
            root.location,
            f"warning GG805: the model is trained in eval mode: {', '.join(kinds)} stays as it is",
            reason="After model.eval() dropout drops nothing and BatchNorm uses its stored statistics.",
            fix="model.train()     # before the training step",
            module=case.names.of_module(root.module),
        )
        return


def _takes_learned_input(case: Case) -> bool:
    """Return whether a gradient is wanted for data: a saliency map, an adversarial example."""
    roots = [root for value, root in case.trace.roots.items() if value in case.flow.behind_losses]
    return any(r.leaf and r.requires_grad and not isinstance(r.tensor, torch.nn.Parameter) for r in roots)


def find_statistics(case: Case) -> Iterator[Finding]:
    """Find a validation under no_grad in train mode, which changes the running statistics of BatchNorm."""
    ops = [op for op in case.trace.ops if id(op.module) in case.trained_modules and _moves_statistics(case, op)]
    if not ops or _is_sampling(case, ops):
        return
    names = list(dict.fromkeys(case.module(op) or "BatchNorm" for op in ops))
    yield finding_at(
        ops[0].location,
        f"warning GG806: BatchNorm is in train mode under no_grad: {listed(names, 3)} changes its running statistics",
        reason="no_grad stops gradients, not the running mean and variance: the validation data leak into the model.",
        fix="model.eval()     # before validation, and model.train() after it",
        module=names[0],
        also=[case.trace.switches[ops[0].switch].location if ops[0].switch >= 0 else None],
    )


def _is_sampling(case: Case, ops: list[Op]) -> bool:
    """Return whether the results leave torch as arrays, as the images of a generator do, and not as a score."""
    flow = Flow(case.trace, whole=True)
    made = flow.results(value for op in ops for value in op.outputs)
    kinds = {escape.kind for escape in case.trace.escapes if escape.value in made}
    return bool(kinds & {"numpy", "tolist"}) and not kinds & {"item", "float"}


def _moves_statistics(case: Case, op: Op) -> bool:
    module = op.module
    if op.records or op.name not in _BATCH_NORMS or not isinstance(module, BATCHNORMS):
        return False
    # Another momentum than its own is a recalibration (`update_bn`), and meant.
    learns = True in op.arguments and module.track_running_stats and module.momentum in op.arguments
    return bool(learns) and not case.flow.is_inside_function(op)
