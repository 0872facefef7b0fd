"""Clipping of single samples: the gradient of each is scaled to a largest norm before the mean is taken.

The loss of a sample is the loss of a batch of it alone. The gradients of all samples come from one pass under
`torch.func.vmap`; where the model or the batch does not allow that, from one pass for each sample. Both put tensors of
their own in the place of the parameters, so that hooks on a parameter run once, on the mean.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch.func import functional_call, grad_and_value, vmap

from gradgate._names import describe, listed
from gradgate._torch_private import leaf_of, nodes_below, parameters_of
from gradgate._trees import BatchReader, index_of, with_own_containers
from gradgate.errors import ArgumentTypeError, ArgumentValueError
from gradgate.guard._trial import LossTrial, Outcome, StepFault, must_pass

Gradients = dict[str, torch.Tensor]
AT_ONCE = 2**26  # elements of the gradients of single samples that are in memory at a time
BATCH_NORMS = (torch.nn.BatchNorm1d, torch.nn.BatchNorm2d, torch.nn.BatchNorm3d, torch.nn.SyncBatchNorm)


def check_clipping(modules: Sequence[torch.nn.Module], scaler: object, guests: Sequence[torch.Tensor]) -> None:
    """Refuse a step in which samples meet, or whose gradients cannot be clipped."""
    if scaler is not None:
        what = "Guard.backward(): `scaler` is given, and the guard has `clip_samples`."
        why = "the norm of a scaled gradient is not the one to clip, and an overflow of the scale is no bad sample."
        fix = "guard.backward(batch, loss_fn)   # with torch.autocast(device, dtype=torch.bfloat16), no scaler"
        raise ArgumentValueError(what, why=why, fix=fix)
    if guests:
        what = f"Guard.backward(): the batch has {describe(guests[0])} that requires a gradient."
        why = "`clip_samples` clips the gradients of parameters, and makes no others."
        raise ArgumentValueError(what, why=why, fix="guard.backward(batch, loss_fn)   # after batch.detach()")
    for path, module in (pair for root in modules for pair in root.named_modules()):
        if isinstance(module, BATCH_NORMS) and (module.training or module.running_mean is None):
            name = f"`{path}` ({type(module).__name__})" if path else type(module).__name__
            what = f"Guard.backward(): {name} is in training mode, and the guard has `clip_samples`."
            why = "it mixes the samples of a batch, so that no sample has a gradient of its own."
            fix = "torch.nn.GroupNorm(...) in its place, or module.eval() on it before the step"
            raise ArgumentValueError(what, why=why, fix=fix)


class ClippedTrial(LossTrial):
    """The tries of `Guard.backward` where the gradient of each sample is clipped."""

    def __init__(self, *how: Any, modules: Sequence[torch.nn.Module], reader: BatchReader, largest: float) -> None:
        super().__init__(*how)
        self._reader = reader
        self._largest = largest
        self._model = _WithLoss(modules)
        self._parameters = {name: p for name, p in self._model.named_parameters() if p.requires_grad}
        self._failed: dict[int, StepFault] = {}

    def forward(self, batch: Any, size: int) -> Outcome:
        self._failed = {}
        with self._parameters_in_place():
            losses = [loss for loss, _ in self._one_by_one(batch, size, backward=False)]
        return self._judged(losses, [], size)

    def run(self, batch: Any, size: int) -> Outcome:
        """Compute the gradient of each sample, clip it, and take the mean."""
        if not size:
            return Outcome()
        with self._parameters_in_place():
            if self.first:
                self._check_parameters(batch, size)
            try:
                return self._clipped(self._all_at_once(batch, size), size)
            except Exception as error:  # whatever it is, it shows again in a pass of single samples
                if must_pass(error):
                    raise
                self.state.restore()
            return self._clipped(self._one_by_one(batch, size, backward=True), size)

    @contextmanager
    def _parameters_in_place(self) -> Iterator[None]:
        """Put the parameters back into their modules in the end, where an interrupt tears `functional_call` apart."""
        patches = self.state.patches
        with patches.block():
            for module in self._model.modules():
                table = parameters_of(module)
                for name, parameter in table.items():
                    patches.later(partial(table.__setitem__, name, parameter))
            yield

    def _clipped(self, parts: Iterator[tuple[torch.Tensor, Gradients]], size: int) -> Outcome:
        """Take the mean of clipped gradients, which come for some samples at a time."""
        losses, norms, totals = list[torch.Tensor](), list[torch.Tensor](), dict[str, torch.Tensor]()
        self._failed = {}
        for of_samples, gradients in parts:
            flat = [g.reshape(len(g), g[0].numel()) for g in gradients.values()]
            # In double precision: squares of gradients in single precision overflow.
            wide = [torch.complex128 if g.is_complex() else torch.float64 for g in flat]
            of_parts = [torch.linalg.vector_norm(g, dim=1, dtype=w) for g, w in zip(flat, wide, strict=True)]
            norm = torch.linalg.vector_norm(torch.stack([part.to(of_samples.device) for part in of_parts]), dim=0)
            share = (self._largest / norm).clamp(max=1) / (size * self.accumulate)
            for name, gradient in gradients.items():
                part = torch.tensordot(share.to(gradient), gradient, 1)
                totals[name] = totals[name] + part if name in totals else part
            losses.append(of_samples)
            norms.append(norm)
        outcome = self._judged(losses, norms, size)
        if outcome.fault is None and not outcome.skipped:
            torch.autograd.backward([self._parameters[name] for name in totals], list(totals.values()))
        return outcome

    def _judged(self, losses: list[torch.Tensor], norms: list[torch.Tensor], size: int) -> Outcome:
        """Return the mean loss, or the fault and the rows that have it."""
        if self._failed:
            return Outcome(next(iter(self._failed.values())), bad_rows=frozenset(self._failed))
        if sum(map(len, losses)) < size:
            return Outcome()  # the loss function skips a sample, and the batch with it
        of_samples = torch.cat(losses)
        loss = of_samples.mean()
        of_gradients = torch.cat(norms) if norms else torch.zeros_like(of_samples)
        bad_loss, bad_gradient = ~of_samples.isfinite(), ~of_gradients.isfinite()
        counts = torch.stack([bad_loss.sum(), bad_gradient.sum(), (of_gradients > self._largest).sum()]).tolist()
        outcome = Outcome(None, loss, of_samples, clipped=counts[2])
        if counts[0]:
            outcome.fault = StepFault("non-finite loss", "loss", loss=loss.item())
        elif counts[1]:
            outcome.fault = StepFault("non-finite gradient", "backward", loss=loss.item())
        if outcome.fault is not None:
            outcome.bad_rows = frozenset((bad_loss if counts[0] else bad_gradient).nonzero().flatten().tolist())
        return outcome

    def _all_at_once(self, batch: Any, size: int) -> Iterator[tuple[torch.Tensor, Gradients]]:
        """Compute losses and gradients of many samples in one pass; raise where that cannot be done."""
        if not torch.is_grad_enabled():
            raise RuntimeError("vmap would record all the same")
        take = self._reader.taking(with_own_containers(batch), size)
        used: set[str] = set()

        def loss_of(parameters: Gradients, index: torch.Tensor) -> torch.Tensor:
            outcome = self._alone(parameters, take((), index))
            if outcome.fault is not None or outcome.skipped:
                raise RuntimeError("a sample fails or is skipped")
            leaves = {id(leaf_of(node)) for node in nodes_below([outcome.value])}
            used.update(name for name, parameter in parameters.items() if id(parameter) in leaves)
            loss: torch.Tensor = outcome.value
            return loss

        values = {name: parameter.detach() for name, parameter in self._parameters.items()}
        gradient = vmap(grad_and_value(loss_of), in_dims=(None, 0), randomness="different")
        rows = max(1, AT_ONCE // max(1, sum(value.numel() for value in values.values())))
        for index in torch.split(torch.arange(size, device="cpu"), rows):
            gradients, losses = gradient(values, index.unsqueeze(1))
            yield losses.detach(), {name: of_samples for name, of_samples in gradients.items() if name in used}
        if self.state.was_rebound():
            raise RuntimeError("the model has assigned a buffer, which is of no use after vmap")

    def _alone(self, parameters: Gradients, sample: Any) -> Outcome:
        """Compute the loss of a sample with tensors in the place of the parameters."""
        outcome: Outcome = functional_call(self._model, parameters, (self._call, sample))
        if outcome.count is not None:
            what = "Guard.backward(): `loss_fn` returned a total and its count, and the guard has `clip_samples`."
            why = "the mean is taken over samples, each with a clipped gradient; no count divides it."
            raise ArgumentTypeError(what, why=why, fix="return losses.mean()   # or one loss for each sample")
        return outcome

    def _leaves(self) -> Gradients:
        return {name: parameter.detach().requires_grad_() for name, parameter in self._parameters.items()}

    def _one_by_one(self, batch: Any, size: int, *, backward: bool) -> Iterator[tuple[torch.Tensor, Gradients]]:
        """Compute the loss of one sample after the other, and its gradient; note who fails."""
        take = self._reader.taking(batch, size)
        for row in range(size):
            values = self._leaves()
            outcome = self._alone(values, take([row], index_of([row])))
            if outcome.fault is not None:
                self._failed[row] = outcome.fault
                continue
            if outcome.skipped:
                continue
            found: dict[str, torch.Tensor | None] = {}
            if backward:
                inputs = list(values.values()) or [outcome.value]  # with no inputs torch would not name the cause
                try:
                    gradients = torch.autograd.grad(outcome.value, inputs, allow_unused=True)
                except self.catch as error:
                    self._failed[row] = self._fault(error, "backward")
                    continue
                found = dict(zip(values, gradients, strict=True))
            yield outcome.value.detach().reshape(1), {n: _dense(n, g)[None] for n, g in found.items() if g is not None}

    def _check_parameters(self, batch: Any, size: int) -> None:
        """Refuse, in the first step, a loss with parameters that are not reached through the guarded modules."""
        take = self._reader.taking(with_own_containers(batch), size)
        for row in range(size):
            outcome = self._alone(self._leaves(), take([row], index_of([row])))
            if outcome.fault is None:
                break
        self.state.restore()
        if outcome.fault is not None or outcome.skipped:
            return
        leaves = [leaf_of(node) for node in nodes_below([outcome.value])]
        if strange := [leaf for leaf in leaves if isinstance(leaf, torch.nn.Parameter)]:
            names = {id(parameter): name.split(".", 2)[2] for name, parameter in self._parameters.items()}
            shown = listed([f"`{names[id(p)]}`" if id(p) in names else describe(p) for p in strange], 3)
            what = f"Guard.backward(): the loss uses parameters that it does not take from the guarded model: {shown}."
            why = "`clip_samples` puts tensors in the place of the parameters of guarded modules, for each sample."
            fix = "gg.Guard([model, head], clip_samples=1.0)   # and read parameters from the modules inside loss_fn"
            raise ArgumentValueError(what, why=why, fix=fix)
        if self.before_backward is not None:
            self.before_backward(outcome)


class _WithLoss(torch.nn.Module):
    """The guarded modules, which a loss function calls: `functional_call` reaches the parameters of all."""

    def __init__(self, modules: Sequence[torch.nn.Module]) -> None:
        super().__init__()
        self.guarded = torch.nn.ModuleList(modules)

    def forward(self, call: Callable[[Any, int], Outcome], sample: Any) -> Outcome:
        return call(sample, 1)


def _dense(name: str, gradient: torch.Tensor) -> torch.Tensor:
    if gradient.layout is torch.strided:
        return gradient
    what = f"Guard.backward(): the gradient of `{name.split('.', 2)[2]}` is sparse, and the guard has `clip_samples`."
    why = "the gradients of samples are added as dense tensors, which optimizers of sparse gradients do not take."
    raise ArgumentValueError(what, why=why, fix="torch.nn.Embedding(..., sparse=False)")
