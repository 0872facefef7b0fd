"""The guard in the Trainer of Hugging Face Transformers, and in its subclasses.

The trainer's own `training_step` runs as it is, up to the backward pass, which the guard makes. So whatever a subclass
does there, or in `compute_loss`, stays in force.

**Counts.** A token mean is divided by `num_items_in_batch`, which the trainer counts over all micro-batches and
processes before it runs the first. If one of them drops a sample, the count was too large for those before it. Then the
step of the optimizer is made once more from its beginning, with what was kept and the count of that: the losses are
those that the trainer computes on data without the bad samples, whatever they make of the count.
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers.trainer
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader, IterableDataset
from transformers import Trainer
from transformers.optimization import GreedyLR

from gradgate._loader_link import follow
from gradgate._names import describe
from gradgate._state import TrainingState
from gradgate.errors import ArgumentTypeError, ArgumentValueError, GradgateWarning
from gradgate.guard import Guard
from gradgate.guard.distributed._ranks import SingleProcess
from gradgate.integrations.accelerate import STATE, lending, refuse_own_backward, skip_first_batches
from gradgate.ledger import Ledger
from gradgate.loading import ResilientLoader, resilient
from gradgate.rewind import Rewind

__all__ = ["GuardedTrainer", "GuardedTrainerMixin"]


_AnyTrainer: Any = object  # what a mixin calls of its trainer is not its own


class GuardedTrainerMixin(_AnyTrainer):
    """Lets a subclass of `Trainer` train without its bad samples: `class Mine(GuardedTrainerMixin, SFTTrainer)`.

    The weights are those of the same run on data without the bad samples. What cannot be loaded or collated is left
    out by `gg.resilient`, and what raises or has a loss or gradient that is not finite by the guard. The guard
    (`trainer.guard`) has the trainer's epochs and steps. Its counters are saved with each checkpoint and loaded from
    it, and `log_history` has `gradgate/dropped`, since the last entry, and `gradgate/dropped_total`.

    Args:
        *args: What the trainer takes.
        ledger: Where dropped samples are recorded: a path, or a `Ledger`.
        guard: Further arguments of `Guard`, as a dict. `"ids"` may be the name of a column of the training data, also
            of one that the model does not take; without it, samples have their index as id.
        rewind: Options of `gg.Rewind`, `{}` for its defaults: after a loss spike, everything returns to a snapshot, and
            the innocent steps since then are made again at once. `global_step` counts every step that was tried.
        **options: What the trainer takes.

    Raises:
        ArgumentTypeError: `guard` or `rewind` is no dict.
        ArgumentValueError: It asks for batches to be split that do not fit into memory.

    Examples:
        >>> from transformers import Trainer
        >>> class Mine(GuardedTrainerMixin, Trainer):
        ...     def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        ...         return model(**inputs).logits.square().mean()
        >>> [base.__name__ for base in Mine.__mro__[:3]]
        ['Mine', 'GuardedTrainerMixin', 'Trainer']
    """

    guard: Guard | None = None
    """The guard, from the first step on."""
    rewind: Rewind | None = None
    """The `Rewind`, from the first step on."""

    def __init__(
        self,
        *args: Any,
        ledger: str | os.PathLike[str] | Ledger | None = None,
        guard: Mapping[str, Any] | None = None,
        rewind: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        for name, given, example in (("guard", guard, '{"max_bad": 0.25}'), ("rewind", rewind, '{"every": 50}')):
            if not isinstance(given, Mapping | None):
                why = f"it has further arguments of the {name}, by name; the trainer makes the {name} itself."
                fix = f'{type(self).__name__}(..., ledger="run.ledger", {name}={example})'
                raise ArgumentTypeError(f"{type(self).__name__}(): `{name}` is {describe(given)}.", why=why, fix=fix)
        self._ledger, self._rewind_options = ledger, rewind
        self._guard_options = dict(guard or {})
        if (found := self._guard_options.get("out_of_memory", "raise")) != "raise":
            what = f'{type(self).__name__}(): `guard` has "out_of_memory": {found!r}.'
            why = "whether a loss is a mean over samples or a part of one over tokens is known to the model only."
            raise ArgumentValueError(what, why=why, fix="TrainingArguments(..., auto_find_batch_size=True)")
        column = self._guard_options.get("ids")
        self._id_column: str | None = self._guard_options.pop("ids") if isinstance(column, str) else None
        self._guarded: Any = None
        self._loader: Any = None
        self._saved: dict[str, Any] | None = None
        self._saved_rewind: dict[str, Any] | None = None
        self._logged = self._dropped = 0
        self._made: list[_MicroBatch] = []
        self._losses: list[torch.Tensor] = []  # of the step of the optimizer that is being made
        self._epoch_iterator: Any = None
        self._rewound: Any = None
        self._start: TrainingState
        super().__init__(*args, **options)
        self._keys: Any = {getattr(self.model, "main_input_name", "input_ids"), *self.label_names}  # of a batch

    # --- Loading --------------------------------------------------------------------------------------------------

    def get_train_dataloader(self) -> Any:
        """Return the loader of the trainer, in which a sample that cannot be loaded or collated costs only itself."""
        loader = super().get_train_dataloader()
        try:
            if isinstance(getattr(loader, "base_dataloader", loader), DataLoader):
                loader = resilient(loader, ids=self._names(), ledger=self._ledger)
            obstacle = f"The loader is {describe(loader)}."
        except ArgumentTypeError as error:
            obstacle = str(error)
        if isinstance(inner := getattr(loader, "base_dataloader", loader), ResilientLoader):
            # The number of steps is fixed already: a batch of which nothing can be loaded stays one, with no samples.
            inner._even = True
        else:
            message = f"{type(self).__name__}: samples that cannot be loaded will stop the training. {obstacle}"
            warnings.warn(message, GradgateWarning, stacklevel=2)
        self._loader = loader
        return loader

    def _names(self) -> Callable[[int], object] | None:
        """Return the function that names samples by the column of ids; by their index where it cannot be read."""
        data, column = self.train_dataset, self._id_column
        if column is None:
            return None
        if isinstance(data, IterableDataset):
            what = f'{type(self).__name__}(): `guard` has "ids": {column!r}, and the training data is a stream.'
            why = "a sample of a stream has no index that its column could be looked up by."
            fix = 'guard={"ids": lambda batch: batch["input_ids"][:, 0].tolist()}   # from what is in the batch'
            raise ArgumentValueError(what, why=why, fix=fix)
        if hasattr(data, "select_columns"):  # of `datasets`: nothing else is decoded
            data = data.select_columns([column])

        def name(index: int) -> object:
            try:
                return data[index][column]
            except Exception:  # noqa: BLE001 - perhaps it is this very sample that cannot be loaded
                return index

        return name

    def get_batch_samples(self, epoch_iterator: Iterator[Any], *args: Any, **options: Any) -> Any:
        """Get the micro-batches of the next step of the optimizer, and their count."""
        guard = self._begin(self.model_wrapped)
        batches, count = super().get_batch_samples(map(self._some, epoch_iterator), *args, **options)
        if self._rewind_options is not None:
            if self.rewind is None or self._rewound is not self.optimizer:
                self.rewind, self._rewound = self._make_rewind(guard, self._rewind_options), self.optimizer
            if self._epoch_iterator is not epoch_iterator:
                self._epoch_iterator = epoch_iterator
                self.rewind._enter(())
            for batch in batches:
                self.rewind._add(batch)
        return batches, count

    def _some(self, batch: Any) -> Any:
        """Return a batch as it is; for one of no samples, one that the trainer can count as it counts the others."""
        if batch is None:
            return _NoSamples({key: torch.empty(0, dtype=torch.long, device=self.args.device) for key in self._keys})
        if isinstance(batch, Mapping):
            self._keys = batch.keys()
        return batch

    # --- Steps ----------------------------------------------------------------------------------------------------

    def _begin(self, model: Any) -> Guard:
        """Begin a step of the optimizer."""
        if self.guard is None or self._guarded is not model:
            where = f"{type(self).__name__}()"
            refuse_own_backward(self.accelerator, where)
            if self.is_fsdp_enabled:
                why = "the gradients of a step that is made once more would have to be taken out of the shards."
                fix = 'TrainingArguments(..., fsdp="")   # DistributedDataParallel'
                raise ArgumentTypeError(f"{where}: the model is sharded by FSDP.", why=why, fix=fix)
            if "lomo" in str(self.args.optim).lower():
                what = f"{where}: the optimizer is {self.args.optim}."
                why = "it changes the weights while backward runs, so nothing can be taken back."
                raise ArgumentTypeError(what, why=why, fix='TrainingArguments(..., optim="adamw_torch")')
            self.guard, self._guarded = Guard(model, self._ledger, **self._guard_options), model
            self._start = TrainingState(self.guard._modules)
        guard = self.guard
        if self._saved is not None:
            guard.load_state_dict(self._saved)
            self._saved, self._logged = None, guard.summary().dropped
        if self._start.open:  # a step that did not come to its end, such as one that was interrupted
            self._start.add_earlier_gradients()
        guard.epoch = int(self.state.epoch or 0)
        guard._move_to(self.state.global_step, 0, self.args.gradient_accumulation_steps)
        follow(self._loader, None, guard)
        self._made, self._losses = [], []
        return guard

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        """Make forward, loss and backward of a micro-batch without its bad samples; as `Trainer.training_step`."""
        guard = self._begin(model) if self.guard is None or self._guarded is not model else self.guard
        batch = None if isinstance(inputs, _NoSamples) else inputs
        alone = num_items_in_batch is None or (self.args.gradient_accumulation_steps == 1 and _processes(guard) == 1)
        if not alone and not self._made:
            self._start.remember(guard._state.adopted)
            self._dropped = guard._tally.dropped
        made = self._make(guard, model, batch, num_items_in_batch, recount=alone)
        loss = made.loss
        if not alone:
            self._made.append(made)
            if self.accelerator.sync_gradients:
                before = _total(self._made)
                while guard._tally.dropped > self._dropped:  # by any process
                    self._make_again(guard, model)
                    loss = loss - before + (before := _total(self._made))
                self._start.add_earlier_gradients()
        self._losses.append(loss)
        return loss

    def _make(self, guard: Guard, model: Any, batch: Any, count: Any, *, recount: bool = False) -> _MicroBatch:
        """Make one micro-batch; with `recount`, the count is that of the samples that take part."""
        run, processes = super().training_step, _processes(guard)

        def loss_fn(part: Any) -> Any:
            own = count
            if recount and count is not None and part is not batch:
                own = self._get_num_items_in_batch([part], self.args.device)
            losses: list[torch.Tensor] = []
            with lending(self.accelerator, lambda loss, **_: losses.append(loss), processes):
                run(model, part, own)
            loss = losses[0] if len(losses) == 1 else sum(losses)
            # As in DistributedDataParallel, the gradient is the mean of the processes', however many samples they have.
            return loss if processes == 1 else (loss / processes, 1 / processes)

        guard._move_to(self.state.global_step, 0, self.args.gradient_accumulation_steps)
        result = guard.backward(batch, loss_fn, scaler=self.accelerator.scaler)
        loss = result.loss if result.kept or processes > 1 else torch.zeros((), device=self.args.device)
        return _MicroBatch(batch, result.kept, loss)

    def _make_again(self, guard: Guard, model: Any) -> None:
        """Make the step of the optimizer from its beginning, with what was kept in it and the count of that."""
        self._dropped, log = guard._tally.dropped, guard._log
        batches = [made.kept_of(guard) for made in self._made]
        count = self._get_num_items_in_batch(list(map(self._some, batches)), self.args.device)
        self._start.restore()
        self._made = []
        guard._log = None
        try:
            for place, batch in enumerate(batches):
                tally, last = guard._tally, place == len(batches) - 1
                with nullcontext() if last else self.accelerator.no_sync(model):
                    self._made.append(self._make(guard, model, batch, count))
                if guard._tally.dropped == tally.dropped:
                    guard._tally = tally  # these steps have been counted
        finally:
            guard._log = log

    # --- Loss spikes ----------------------------------------------------------------------------------------------

    def _make_rewind(self, guard: Guard, options: Mapping[str, Any]) -> Rewind:
        if isinstance(self.lr_scheduler, ReduceLROnPlateau | GreedyLR):
            what = f"{type(self).__name__}(): `rewind` is given, and the scheduler is {describe(self.lr_scheduler)}."
            why = "it follows the results of evaluations, and those of steps that are made again do not exist."
            raise ArgumentTypeError(what, why=why, fix='TrainingArguments(..., lr_scheduler_type="cosine")')
        optimizer = getattr(self.optimizer, "optimizer", self.optimizer)
        parts = [self.model_wrapped, optimizer, self.lr_scheduler, self.accelerator.scaler]
        rewind = Rewind._beside(guard, parts, options)
        if self._saved_rewind is not None:
            rewind._load_history(self._saved_rewind)
            self._saved_rewind = None
        rewind._number, rewind._make_step_again = self.state.global_step, self._make_step_again
        return rewind

    def _maybe_log_save_evaluate(self, *args: Any, **options: Any) -> None:
        """Observe the step that was just made, or note the end of the epoch, before anything is logged or saved."""
        losses, self._losses = self._losses, []
        if self.rewind is not None and losses and self.accelerator.sync_gradients:
            self.rewind.observe(torch.stack(losses).sum())
        elif self.rewind is not None:
            self.rewind._leave()
        super()._maybe_log_save_evaluate(*args, **options)

    def _make_step_again(self, step: list[Any]) -> torch.Tensor:
        """Make an innocent step of the optimizer again, as the trainer's loop makes it; nothing is logged."""
        model, accelerator = self.model_wrapped, self.accelerator
        batches = [given.batch for given in step]
        count = self._get_num_items_in_batch(batches, self.args.device)
        self._begin(model)
        self.current_gradient_accumulation_steps = len(batches)
        for place, batch in enumerate(batches, 1):
            accelerator.gradient_state._set_sync_gradients(place == len(batches))
            with nullcontext() if place == len(batches) else accelerator.no_sync(model):
                self.training_step(model, batch, count)
        if self.args.max_grad_norm > 0:
            self._clip_grad_norm(model)
        callbacks, state = self.callback_handler, (self.args, self.state, self.control)
        callbacks.on_pre_optimizer_step(*state)
        self.optimizer.step()
        callbacks.on_optimizer_step(*state)
        if not accelerator.optimizer_step_was_skipped:
            self.lr_scheduler.step()
        model.zero_grad()
        losses, self._losses = self._losses, []
        return torch.stack(losses).sum()

    # --- Logs and checkpoints -------------------------------------------------------------------------------------

    def log(self, logs: dict[str, float], *args: Any, **options: Any) -> None:
        """Log, and with each loss of the training how many samples were dropped."""
        if self.guard is not None and "loss" in logs:
            total = self.guard.summary().dropped
            logs |= {"gradgate/dropped": total - self._logged, "gradgate/dropped_total": total}
            self._logged = total
            if unloaded := sum(not incident.transient for incident in getattr(self._loader, "incidents", ())):
                logs["gradgate/unloaded_total"] = unloaded
        super().log(logs, *args, **options)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        super()._save_optimizer_and_scheduler(output_dir)
        if self.guard is not None and self.args.should_save:
            state = self.guard.state_dict()
            if self.rewind is not None:  # the loader begins anew after a resume, and so do the snapshots
                state["rewind"] = self.rewind._history()
            (Path(output_dir) / STATE).write_text(json.dumps(state), encoding="utf-8")

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is not None and (path := Path(checkpoint) / STATE).exists():
            self._saved = json.loads(path.read_text(encoding="utf-8"))
            self._saved_rewind = self._saved.pop("rewind", None)


class GuardedTrainer(GuardedTrainerMixin, Trainer):
    """A `Trainer` with `GuardedTrainerMixin`: `GuardedTrainer(model, args, ..., ledger="run.ledger")`.

    Args:
        *args: What `Trainer` takes.
        ledger: As for `GuardedTrainerMixin`.
        guard: As for `GuardedTrainerMixin`.
        rewind: As for `GuardedTrainerMixin`.
        **options: What `Trainer` takes.

    Raises:
        ArgumentTypeError: `guard` or `rewind` is no dict.

    Examples:
        >>> GuardedTrainer(guard="max_bad=0.25")
        Traceback (most recent call last):
        ...
        gradgate.errors.ArgumentTypeError: GuardedTrainer(): `guard` is ...
    """


class _NoSamples(dict[str, Any]):
    """Stands in for a batch of which nothing could be loaded."""


@dataclass(frozen=True, slots=True)
class _MicroBatch:
    """A micro-batch that was made: which rows took part, and the loss."""

    batch: Any
    kept: list[int]
    loss: torch.Tensor

    def kept_of(self, guard: Guard) -> Any:
        """Return the samples that took part; None for none of them."""
        if self.batch is None or not self.kept:
            return None
        size = guard._reader.count(self.batch)
        return self.batch if len(self.kept) == size else guard._reader.select(self.batch, self.kept, size)


def _total(made: Iterable[_MicroBatch]) -> torch.Tensor:
    return torch.stack([each.loss for each in made]).sum()


def _processes(guard: Guard) -> int:
    return 1 if isinstance(guard._agreement, SingleProcess) else guard._agreement.world_size


transformers.trainer.skip_first_batches = skip_first_batches  # the one that leaves loaders resilient
