"""The guard in PyTorch Lightning: `training_step` stays as it was, and the Trainer keeps everything else.

With automatic optimization the guard is around `strategy.training_step`, so that autocast and the wrapper of the ranks
are inside of each try.

Importing this module also lets Lightning prepare the loaders of `gg.resilient`. Without it, every process trains on
all data, and each loader is started once more than it is used.
"""

from __future__ import annotations

import inspect
import math
from collections import OrderedDict
from collections.abc import Callable, Mapping
from functools import partial, wraps
from typing import Any

import lightning as L
import torch
from lightning.pytorch.loops import evaluation_loop, fit_loop, prediction_loop
from lightning.pytorch.loops.optimization.automatic import Closure, ClosureResult
from lightning.pytorch.trainer import call
from lightning.pytorch.trainer.connectors.data_connector import _DataConnector
from lightning.pytorch.trainer.states import RunningStage
from torchmetrics import Metric

from gradgate._loader_link import follow
from gradgate._names import describe
from gradgate.errors import ArgumentTypeError, GradgateError
from gradgate.guard import Guard, GuardResult
from gradgate.guard._trial import NO_LOSS
from gradgate.loading import ResilientLoader
from gradgate.rewind import Rewind

__all__ = ["GuardCallback", "GuardedModule"]

_FUNCTION = "training_step"
_Log = tuple[str, Any, tuple[Any, ...], dict[str, Any]]
_SUMS = ("sum", "SUM", sum, torch.sum)


class GuardedModule(L.LightningModule):
    """A `LightningModule` whose training steps are made without their bad samples; `training_step` stays as it was.

    `training_step` may be called several times with parts of a batch; what it logs, counts in metrics and returns is
    that of the call with the samples that are kept. With manual optimization, call `guarded_backward`. The options of
    the guard are those of a `GuardCallback` in the Trainer; without one, the module adds one itself.

    Examples:
        >>> class Lit(GuardedModule, L.LightningModule):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.layer = torch.nn.Linear(3, 1)
        ...     def training_step(self, batch, batch_idx):
        ...         return self.layer(batch).square().mean()
        ...     def configure_optimizers(self):
        ...         return torch.optim.SGD(self.parameters(), lr=0.1)
        >>> x = torch.randn(8, 3)
        >>> x[5] = float("nan")
        >>> quiet = dict(accelerator="cpu", logger=False, enable_checkpointing=False, enable_model_summary=False)
        >>> trainer = L.Trainer(max_epochs=1, enable_progress_bar=False, **quiet)
        >>> trainer.fit(lit := Lit(), torch.utils.data.DataLoader(x, batch_size=4, num_workers=0))
        >>> lit.guard.summary().dropped, bool(lit.layer.weight.isfinite().all())
        (1, True)
    """

    _logs: list[_Log] | None = None  # the calls of `log` in the try that runs
    _muted = False  # a step that is made again is not logged again

    @property
    def trainer(self) -> Any:
        """The Trainer that this module is in."""
        return super().trainer

    @trainer.setter
    def trainer(self, trainer: Any) -> None:
        L.LightningModule.trainer.fset(self, trainer)
        if isinstance(trainer, L.Trainer):
            if not any(isinstance(callback, GuardCallback) for callback in trainer.callbacks):
                trainer.callbacks.insert(0, GuardCallback())
            loop = trainer.fit_loop.epoch_loop.automatic_optimization
            loop._make_closure = partial(_closure, loop)

    @property
    def guard(self) -> Guard:
        """The guard of the training that this module is in.

        Raises:
            GradgateError: No training has begun.
        """
        return _callback_of(self.trainer).guard

    def guarded_backward(self, batch: Any, loss_fn: Callable[[Any], Any], ids: Any = None) -> GuardResult:
        """Make forward, loss and backward of a batch, in place of `manual_backward(loss)`.

        Args:
            batch: The batch, or what is made of it.
            loss_fn: As for `Guard.backward`. With `(total, count)`, call `self.guard.finish()` before the optimizer's
                step.
            ids: As for `Guard.backward`. Those of `gg.resilient` loaders are found.

        Returns:
            As `Guard.backward`.

        Raises:
            GradgateError: The Trainer makes the backward pass, with automatic optimization.
        """
        if self.automatic_optimization:
            why = "the Trainer guards the whole training_step, and makes the backward pass of the loss it returns."
            fix = "return loss   # or self.automatic_optimization = False in __init__, with optimizer.step() here"
            raise GradgateError("guarded_backward(): the module has automatic optimization.", why=why, fix=fix)
        return _callback_of(self.trainer)._backward(self, batch, loss_fn, ids)[0]

    def log(self, name: str, value: Any, *args: Any, **options: Any) -> None:
        """Log a value as `LightningModule.log` does; in a guarded step, that of the samples that are kept."""
        if self._logs is None:
            if not self._muted:
                super().log(name, value, *args, **options)
            return
        if isinstance(value, torch.Tensor):
            value = value.detach().clone()
        self._logs.append((name, value, args, options))


class GuardCallback(L.Callback):
    """Passes options to the guard of a `GuardedModule`, logs its counters, and has its state in checkpoints.

    `gradgate/dropped` and `gradgate/kept` (since the last time), `gradgate/dropped_total` and `gradgate/bad_steps` are
    logged at each step with bad samples, every `log_every_n_steps` steps, and at the end of an epoch, where callbacks
    find `gradgate/dropped_total` among the metrics. Incidents have the epoch and the global step of the Trainer.

    Args:
        ledger: As for `Guard`.
        rewind: Options of `gg.Rewind`, `{}` for its defaults: after a loss spike, everything returns to a snapshot, and
            the innocent steps since then are made again at once, without being logged again. `trainer.global_step`
            counts every step that was tried.
        **options: What else `Guard` takes.

    Attributes:
        rewind: The `Rewind` of the training, or None.

    Examples:
        >>> trainer = L.Trainer(callbacks=[GuardCallback("run.ledger", max_bad=0.25)], logger=False)
    """

    def __init__(self, ledger: Any = None, *, rewind: Mapping[str, Any] | None = None, **options: Any) -> None:
        super().__init__()
        self._options = {"ledger": ledger, **options}
        self._rewind_options = rewind
        self.rewind: Rewind | None = None
        self._losses: list[torch.Tensor] = []  # of the optimizer step that is being made
        self._guard: Guard | None = None
        self._state: Mapping[str, Any] | None = None
        self._metrics: list[Metric] = []
        self._logged = (0, 0)  # the samples and drops that were logged

    @property
    def guard(self) -> Guard:
        """The guard.

        Raises:
            GradgateError: No training has begun.
        """
        if self._guard is None:
            why = "it is made when the training begins, around the model that the Trainer has prepared."
            raise GradgateError("GuardCallback.guard: there is none yet.", why=why, fix="trainer.fit(module)")
        return self._guard

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Make the guard, or raise if the module or its strategy cannot be guarded."""
        _check(trainer, pl_module)
        if self._guard is not None:
            self._state = {**(self._state or {}), **self._guard.state_dict()}
        self._guard = Guard(trainer.strategy.model, **self._options)
        if self._state is not None:
            self.load_state_dict(self._state)
        self._metrics = [part for part in pl_module.modules() if isinstance(part, Metric)]

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Let the loaders number what they leave out by the guard's steps, and make the `Rewind`."""
        guard = self.guard
        guard.epoch = trainer.current_epoch
        guard._move_to(trainer.global_step, 0, trainer.accumulate_grad_batches)
        for loader in trainer.fit_loop._combined_loader.flattened:
            follow(loader, None, guard)
        if self._rewind_options is not None:
            self.rewind = self._make_rewind(trainer, pl_module)
        self._state = None

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        """Note the epoch."""
        self.guard.epoch = trainer.current_epoch
        if self.rewind is not None:
            self._losses.clear()
            self.rewind._enter(())

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Keep the batch while its step may have to be made again."""
        if self.rewind is not None:
            self.rewind._pulled = batch_idx
            self.rewind._add(batch)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Log the counters, if there is something new or it is time to log, and observe the loss of a step."""
        if self.guard._tally.dropped != self._logged[1] or trainer._logger_connector.should_update_logs:
            self._log(trainer)
        if self.rewind is not None and self._losses and not trainer.fit_loop._should_accumulate():
            self.rewind.observe(self._loss_of_step())

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Log the counters for callbacks, too."""
        if self.rewind is not None:
            self.rewind._leave()
        if not trainer.barebones:
            self._log(trainer)
            dropped = float(self.guard._tally.dropped)
            pl_module.log("gradgate/dropped_total", dropped, logger=False, sync_dist=trainer.world_size > 1)

    def state_dict(self) -> dict[str, Any]:
        """Return what the guard has counted, for the checkpoint."""
        if self._guard is None:
            return {}
        state = self._guard.state_dict()
        if self.rewind is not None:  # the loader begins anew after a resume, and so do the snapshots
            state["rewind"] = self.rewind._history()
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on counting where a saved guard stopped."""
        self._state = state_dict or None
        if state_dict and self._guard is not None:
            self._guard.load_state_dict({name: value for name, value in state_dict.items() if name != "rewind"})
            self._logged = self._guard._tally.samples, self._guard._tally.dropped

    def _log(self, trainer: Any) -> None:
        tally = self.guard._tally
        samples, dropped = tally.samples - self._logged[0], tally.dropped - self._logged[1]
        counts = {"kept": samples - dropped, "dropped": dropped, "dropped_total": tally.dropped}
        if dropped:
            counts["bad_steps"] = tally.bad_steps
        if samples:
            self._logged = tally.samples, tally.dropped
            step = trainer.fit_loop.epoch_loop._batches_that_stepped
            for logger in trainer.loggers:
                logger.log_metrics({f"gradgate/{name}": count for name, count in counts.items()}, step=step)

    def _make_rewind(self, trainer: Any, module: Any) -> Rewind:
        schedulers = [config.scheduler for config in trainer.lr_scheduler_configs]
        by_metric = [config for config in trainer.lr_scheduler_configs if config.reduce_on_plateau]
        if not module.automatic_optimization:
            what = "GuardCallback(): `rewind` is given, and the module has manual optimization."
            why = "which of its calls end a step of training is known to the module only."
            raise ArgumentTypeError(what, why=why, fix="self.automatic_optimization = True")
        if any(config.interval == "step" for config in by_metric):
            what = "GuardCallback(): `rewind` is given, and a scheduler follows a metric at each step."
            why = "the metrics of steps that are made again do not exist."
            fix = '{"scheduler": scheduler, "interval": "epoch", "monitor": "loss"}   # in configure_optimizers'
            raise ArgumentTypeError(what, why=why, fix=fix)
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        parts = [trainer.strategy.model, *trainer.optimizers, *schedulers, scaler]
        rewind = Rewind._beside(self.guard, parts, self._rewind_options or {})
        if self._state is not None and "rewind" in self._state:
            rewind._load_history(self._state["rewind"])
        rewind._number, rewind._make_step_again = trainer.global_step, partial(self._make_step_again, trainer, module)
        return rewind

    def _make_step_again(self, trainer: Any, module: Any, step: list[Any]) -> torch.Tensor:
        """Make an innocent step again, as the Trainer's loop makes it; nothing is logged or counted."""
        loop, results = trainer.fit_loop.epoch_loop, trainer._results
        optimization, epochs = loop.automatic_optimization, trainer.fit_loop.epoch_progress
        rewind: Any = self.rewind
        counters = [loop.batch_progress, loop.scheduler_progress, optimization.optim_progress, epochs]
        before = [counter.state_dict() for counter in counters]
        metrics = [(metric, _state_of(metric)) for metric in self._metrics]
        batch, module._muted = (results.batch, results.batch_size), True
        try:
            for place, given in enumerate(step, 1):
                loop.batch_progress.current.ready = given.position + 1
                loop.batch_progress.is_last_batch = place == len(step) < trainer.accumulate_grad_batches
                epochs.current.processed = before[-1]["current"]["processed"] + given.epoch - rewind._epoch
                arguments = loop._build_kwargs(OrderedDict(), given.batch, given.position)
                optimization.run(trainer.optimizers[0], given.position, arguments)
                loop.update_lr_schedulers("step", update_plateau_schedulers=False)
                if loop._num_ready_batches_reached():
                    loop.update_lr_schedulers("epoch", update_plateau_schedulers=False)
        finally:
            module._muted, (results.batch, results.batch_size) = False, batch
            for counter, state in zip(counters, before, strict=True):
                counter.load_state_dict(state)
            for metric, values in metrics:
                vars(metric).update(values)
        return self._loss_of_step()

    def _loss_of_step(self) -> torch.Tensor:
        losses, self._losses = self._losses, []
        return torch.stack(losses).mean()

    def _backward(
        self, module: GuardedModule, batch: Any, function: Callable[[Any], Any], ids: Any = None, accumulate: int = 1
    ) -> tuple[GuardResult, Any]:
        """Make a guarded step, and return its result and what the function returned for the samples that are kept."""
        guard, trainer = self.guard, module.trainer
        tries = _Tries(module, function, self._metrics)
        bad = guard._tally.bad_steps
        guard.global_step = trainer.global_step
        precision = trainer.precision_plugin
        if isinstance(batch, list) and not batch:
            batch = None  # what a resilient loader yields, among ranks, if it can load nothing
        try:
            result = guard.backward(batch, tries, ids, scaler=getattr(precision, "scaler", None), accumulate=accumulate)
        except BaseException:
            tries.put_back()
            raise
        if self.rewind is not None:
            self._losses.append(result.loss if result.stepped else torch.zeros_like(result.loss))
        output = tries.conclude(result, guard, bad=guard._tally.bad_steps > bad)
        if result.kept or not math.isnan(result.loss.item()):
            # The hooks, when the gradients are there: before, nobody knows which of the tries counts.
            precision.post_backward(precision.pre_backward(result.loss / accumulate, module), module)
        return result, output


class _Tries:
    """The calls of a function in one guarded step; what it logs and counts is put back when the next one begins."""

    def __init__(self, module: GuardedModule, function: Callable[[Any], Any], metrics: list[Metric]) -> None:
        self._module, self._function = module, function
        self._results = module.trainer._results
        self._hook = module._current_fx_name
        self._metrics = [(metric, _state_of(metric)) for metric in metrics]
        self._calls = 0
        self._logs: list[_Log] = []
        self.output: Any = None

    def __call__(self, part: Any) -> Any:
        if self._calls:
            self.put_back()
        self._calls += 1
        if self._results is not None:  # `log` weighs the mean of an epoch with the number of samples
            self._results.batch, self._results.batch_size = part, None
        self._module._logs = self._logs = []
        try:
            self.output = output = self._function(part)
        finally:
            self._module._logs, self._module._current_fx_name = None, self._hook
        if output is None:
            return NO_LOSS
        if not isinstance(output, Mapping):
            return output
        if output.get("loss") is None:
            ClosureResult.from_training_step_output(output)  # raises what Lightning says
        return output["loss"]

    def put_back(self) -> None:
        for metric, state in self._metrics:
            vars(metric).update({name: _copied(value) for name, value in state.items()})

    def conclude(self, result: GuardResult, guard: Guard, *, bad: bool) -> Any:
        """Log what the last try logged, and return what it returned; nothing of it where no sample was kept."""
        skipped = self._calls > 0 and self.output is None  # by the user
        if not result.kept and not skipped:
            self.put_back()
            self._logs, self.output = [], None
        world_size = self._module.trainer.world_size
        if world_size > 1 and (bad or guard._busy_ranks < world_size):
            self._fill_in(guard, nothing_kept=not result.kept and not skipped)
        if self._logs:
            self._module._current_fx_name, hook = _FUNCTION, self._module._current_fx_name
            for name, value, args, options in self._logs:
                self._module.log(name, value, *args, **options)
            self._module._current_fx_name = hook
        return self.output

    def _fill_in(self, guard: Guard, *, nothing_kept: bool) -> None:
        """Log on a rank where nothing is kept what the others log: a value with `sync_dist=True` is waited for."""
        named = [
            (name, float(value), args, {**options, "sync_dist_group": None})
            for name, value, args, options in self._logs
            if not isinstance(value, Metric)
        ]
        agreement: Any = guard._agreement
        others = [logs for logs in agreement.gather(None if nothing_kept else named) if logs is not None]
        if not nothing_kept or not others:
            return
        for alike in zip(*others, strict=False):
            name, _, args, options = alike[0]
            value = 0.0 if options.get("reduce_fx") in _SUMS else sum(one[1] for one in alike) / len(alike)
            # The mean over all ranks is that over the others, and the mean of the epoch has nothing of it.
            self._logs.append((name, value, args, {**options, "batch_size": 0}))


def _state_of(metric: Metric) -> dict[str, Any]:
    """Copy what a metric has counted."""
    names = (*metric._defaults, "_update_count", "_computed", "_forward_cache")
    return {name: _copied(getattr(metric, name)) for name in names}


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else list(value) if isinstance(value, list) else value


def _check(trainer: Any, module: Any) -> None:
    kind = type(module)
    if not isinstance(module, GuardedModule):
        what = f"GuardCallback: the module is {describe(module)}, no GuardedModule."
        why = "the guard must be around training_step, where no callback can be."
        raise ArgumentTypeError(what, why=why, fix=f"class {kind.__name__}(GuardedModule, L.LightningModule):")
    if trainer.strategy.handles_gradient_accumulation:
        what = f"GuardedModule: the strategy is {type(trainer.strategy).__name__}."
        why = "it makes the backward pass itself, with partial gradients that cannot be taken back."
        raise ArgumentTypeError(what, why=why, fix='L.Trainer(strategy="ddp")')
    if not module.automatic_optimization:
        return
    if kind.backward is not L.LightningModule.backward:
        why = "the guard makes the backward pass, and would not call it."
        fix = "self.automatic_optimization = False   # and self.guarded_backward(batch, loss_fn) in training_step"
        raise ArgumentTypeError(f"GuardedModule: {kind.__name__} has a `backward` of its own.", why=why, fix=fix)
    if "dataloader_iter" in inspect.signature(module.training_step).parameters:
        what = "GuardedModule: `training_step` takes a `dataloader_iter`."
        why = "a bad step is made again with parts of its batch, so the batch must be given to it."
        raise ArgumentTypeError(what, why=why, fix="def training_step(self, batch, batch_idx):")


# --- What is changed in a Trainer -----------------------------------------------------------------------------------


def _callback_of(trainer: Any) -> GuardCallback:
    return next(one for one in trainer.callbacks if isinstance(one, GuardCallback))


def _closure(loop: Any, kwargs: Any, optimizer: Any, batch_idx: int) -> Any:
    """Make the closure of a step: in place of training_step, zero_grad and backward, zero_grad and a guarded step."""
    trainer = loop.trainer
    module = trainer.lightning_module
    if not isinstance(module, GuardedModule):
        return type(loop)._make_closure(loop, kwargs, optimizer, batch_idx)
    zero_grad = loop._make_zero_grad_fn(batch_idx, optimizer)
    batch, *rest = kwargs.values()
    per_step = trainer.accumulate_grad_batches

    def training_step(part: Any) -> Any:
        return call._call_strategy_hook(trainer, _FUNCTION, part, *rest)

    def step() -> Any:
        if zero_grad is not None:
            zero_grad()
        callback, done = _callback_of(trainer), trainer.global_step
        result, output = callback._backward(module, batch, training_step, accumulate=per_step)
        made = batch_idx % per_step + 1
        more = trainer.fit_loop._should_accumulate()
        callback.guard._move_to(done if more else done + 1, made if more else 0, per_step)
        loss = _loss_of(result, output)
        given = {**output, "loss": loss} if isinstance(output, Mapping) else loss
        return ClosureResult.from_training_step_output(given, per_step)

    return Closure(step)


def _loss_of(result: GuardResult, output: Any) -> torch.Tensor | None:
    """Return the loss for callbacks: this rank's, as without a guard, or that of all if nothing is kept here."""
    loss = output.get("loss") if isinstance(output, Mapping) else output
    if isinstance(loss, torch.Tensor) and loss.numel() == 1:
        return loss.detach()
    return None if not result.kept and math.isnan(result.loss.item()) else result.loss


_prepare, _check_iterable = _DataConnector._prepare_dataloader, fit_loop._check_dataloader_iterable


@wraps(_prepare)
def _prepare_resilient(self: Any, dataloader: Any, shuffle: bool, mode: Any) -> Any:
    """Prepare the loader inside of a resilient one: it gets a distributed sampler where it needs one."""
    if not isinstance(dataloader, ResilientLoader):
        return _prepare(self, dataloader, shuffle, mode)
    trainer = self.trainer
    guarded = mode is RunningStage.TRAINING and isinstance(trainer.lightning_module, GuardedModule)
    made = _prepare(self, dataloader._loader, shuffle, mode)
    return dataloader._again_around(made, several=guarded and trainer.world_size > 1, nothing=[])


@wraps(_check_iterable)
def _trust_resilient(dataloader: Any, *args: Any) -> None:
    """Take a resilient loader for an iterable without starting it, which would draw a seed."""
    if not isinstance(dataloader, ResilientLoader):
        _check_iterable(dataloader, *args)


_DataConnector._prepare_dataloader = _prepare_resilient
for _loop in (evaluation_loop, fit_loop, prediction_loop):
    _loop._check_dataloader_iterable = _trust_resilient
