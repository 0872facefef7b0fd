"""The guard in a loop of Hugging Face Accelerate: its precision, accumulation and processes stay in force.

Importing this module also lets `accelerator.prepare` prepare the loaders of `gg.resilient`. Without it, Accelerate
returns them as they are, and every process trains on all data. `skip_first_batches` leaves them resilient.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import accelerate
import torch
from accelerate import Accelerator, DistributedType
from accelerate.utils import recursively_apply

from gradgate._loader_link import follow
from gradgate._patches import Patches
from gradgate.errors import ArgumentTypeError
from gradgate.guard import Guard, GuardResult
from gradgate.loading import ResilientLoader
from gradgate.rewind import Rewind

__all__ = ["AcceleratedGuard"]

STATE = "gradgate.json"
"""The file of the guard's state, in the folder of `accelerator.save_state`."""


class AcceleratedGuard(Guard):
    """A `Guard` whose `backward` stands in place of `accelerator.backward(loss)`.

    The model's autocast and the accelerator's scaler are in force, a mean loss is divided by
    `gradient_accumulation_steps`, and processes in DistributedDataParallel or FSDP2 make every step together.
    `global_step` counts the steps of the optimizer; `accelerator.save_state` and `load_state` keep the counters.

    Args:
        accelerator: The accelerator.
        model: The model that `accelerator.prepare` returned, or several.
        ledger: As for `Guard`.
        rewind: Options of `gg.Rewind`, `{}` for its defaults: after a loss spike, model, optimizers, schedulers, scaler
            and guard return to a snapshot. Prepare them before, and take batches from `guard.batches(loader)`.
        **options: What else `Guard` takes.

    Attributes:
        rewind: The `Rewind`, or None.

    Raises:
        ArgumentTypeError: DeepSpeed or Megatron-LM has the backward pass, or the model is not prepared, or there is a
            `rewind` and no optimizer is prepared.

    Examples:
        >>> accelerator = Accelerator(cpu=True)
        >>> model = torch.nn.Linear(3, 1)
        >>> model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        >>> guard = AcceleratedGuard(accelerator, model)
        >>> x = torch.randn(8, 3)
        >>> x[5] = float("nan")
        >>> guard.backward(x, lambda x: model(x).square().mean(), ids=range(100, 108)).dropped[0].sample_id
        '105'
    """

    def __init__(
        self,
        accelerator: Accelerator,
        model: Any,
        ledger: Any = None,
        *,
        rewind: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        refuse_own_backward(accelerator, "AcceleratedGuard()")
        modules = [model] if isinstance(model, torch.nn.Module) else list(model)
        if not all(getattr(module, "_is_accelerate_prepared", False) for module in modules):
            what = "AcceleratedGuard(): `model` was not prepared by this accelerator."
            why = "the processes would not share its gradients, and no precision would be in force."
            fix = "model = accelerator.prepare(model)   # then AcceleratedGuard(accelerator, model)"
            raise ArgumentTypeError(what, why=why, fix=fix)
        super().__init__(model, ledger, **options)
        self._arguments = {"accelerator": accelerator, **self._arguments}
        self._accelerator = accelerator
        self._move_to(0, 0, accelerator.gradient_accumulation_steps)
        for loader in accelerator._dataloaders:
            follow(loader, None, self)
        accelerator.register_save_state_pre_hook(self._save)
        accelerator.register_load_state_pre_hook(self._load)
        self._losses: list[torch.Tensor] = []  # of the optimizer step that is being made
        self.rewind: Rewind | None = None
        if rewind is not None:
            if not accelerator._optimizers:
                what = "AcceleratedGuard(): `rewind` is given, and no optimizer is prepared."
                why = "its state has to return to the snapshot together with the model's."
                fix = "model, optimizer, loader = accelerator.prepare(model, optimizer, loader)   # before the guard"
                raise ArgumentTypeError(what, why=why, fix=fix)
            accumulated = SimpleNamespace(  # how many batches the accelerator has accumulated
                state_dict=lambda: {"step": accelerator.step},
                load_state_dict=lambda state: setattr(accelerator, "step", state["step"]),
            )
            parts = [*modules, *(one.optimizer for one in accelerator._optimizers)]
            parts += [*(one.scheduler for one in accelerator._schedulers), accelerator.scaler, accumulated]
            self.rewind = Rewind._beside(self, parts, rewind)

    def backward(self, batch: Any, loss_fn: Callable[[Any], Any], ids: Any = None, **_: Any) -> GuardResult:
        """Make forward, loss and backward of a batch, in place of `accelerator.backward(loss)`.

        Args:
            batch: A batch of the prepared loader.
            loss_fn: As for `Guard.backward`; with `(total, count)`, call `finish` before `optimizer.step()` where
                `accelerator.sync_gradients` is True.
            ids: As for `Guard.backward`. Those of `gg.resilient` loaders are found, moved and loaded ahead or not.

        Returns:
            As `Guard.backward`.
        """
        accelerator, step = self._accelerator, self.global_step
        made, per_step = self._window[0], accelerator.gradient_accumulation_steps
        result = super().backward(batch, loss_fn, ids, scaler=accelerator.scaler, accumulate=per_step)
        self._losses.append(result.loss if result.stepped else torch.zeros_like(result.loss))
        self._move_to(*(step + 1, 0) if accelerator.sync_gradients else (step, made + 1), per_step)
        return result

    def batches(self, loader: Iterable[Any]) -> Iterator[Any]:
        """Yield the batches of a prepared loader; with `rewind`, after a spike, the innocent ones again.

        Args:
            loader: The prepared loader.

        Returns:
            The batches, for one loop. The loss of a step is observed when the loop asks for the batch after it, or
            saves a checkpoint.
        """
        return super().batches(loader) if self.rewind is None else self._observed(self.rewind, loader)

    def _observed(self, rewind: Rewind, loader: Iterable[Any]) -> Iterator[Any]:
        self._losses.clear()
        for batch in rewind.batches(loader):
            yield batch
            self._observe()

    def _observe(self) -> None:
        """Observe the step that was just made, unless that is done."""
        if self.rewind is not None and self._losses and self._accelerator.sync_gradients:
            losses, self._losses = self._losses, []
            self.rewind.observe(torch.stack(losses).mean())

    def _save(self, models: Any, weights: Any, folder: str) -> None:
        self._observe()  # a checkpoint lies between two steps
        if self._accelerator.is_main_process:
            (Path(folder) / STATE).write_text(json.dumps(self.state_dict()), encoding="utf-8")
        if self.rewind is not None:
            torch.save(self.rewind.state_dict(), self._rewind_file(folder))

    def _load(self, models: Any, folder: str) -> None:
        if (path := Path(folder) / STATE).exists():  # it does not in checkpoints from before there was a guard
            self.load_state_dict(json.loads(path.read_text(encoding="utf-8")))
        if self.rewind is not None and (path := self._rewind_file(folder)).exists():
            self.rewind.load_state_dict(torch.load(path, map_location="cpu", weights_only=True))

    def _rewind_file(self, folder: str) -> Path:
        """Return the file of this process: each has its own shards, losses and random state."""
        return Path(folder) / f"gradgate-rewind-{self._accelerator.process_index}.pt"


def refuse_own_backward(accelerator: Accelerator, where: str) -> None:
    """Refuse an engine that has the backward pass."""
    if accelerator.distributed_type in (DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM):
        what = f"{where}: the accelerator uses {accelerator.distributed_type.value}."
        why = "it makes the backward pass itself, with partial gradients that cannot be taken back."
        fix = "Accelerator()   # DistributedDataParallel; or FSDP2 by FullyShardedDataParallelPlugin"
        raise ArgumentTypeError(what, why=why, fix=fix)


@contextmanager
def lending(accelerator: Accelerator, backward: Callable[..., None], processes: int) -> Iterator[None]:
    """Pass the loss to `backward` instead of running it; nothing waits for other processes, which may not come."""

    def repeated(data: Any, *_: Any, **__: Any) -> Any:
        return recursively_apply(lambda part: torch.cat([part.reshape(part.shape or (1,))] * processes), data)

    patches = Patches()
    with patches.block():
        patches.put(vars(accelerator), "backward", backward)
        for name in ("gather", "gather_for_metrics") if processes > 1 else ():
            patches.put(vars(accelerator), name, repeated)
        yield


_prepare, _skip = Accelerator.prepare, accelerate.skip_first_batches


@wraps(_prepare)
def _prepare_resilient(self: Accelerator, *args: Any, **options: Any) -> Any:
    """Take resilient loaders, too: the loader in one is prepared, and it loads inside of that."""
    prepared = _prepare(self, *(arg._loader if isinstance(arg, ResilientLoader) else arg for arg in args), **options)
    for arg, made in zip(args, prepared if len(args) > 1 else (prepared,), strict=True):
        if isinstance(arg, ResilientLoader):
            arg._inside(made)
    return prepared


@wraps(_skip)
def skip_first_batches(loader: Any, num_batches: int = 0) -> Any:
    """Return a resilient loader for a resilient one; `accelerate` makes a new loader, which is not."""
    rest = _skip(loader, num_batches)
    given = getattr(loader, "base_dataloader", loader)
    if not isinstance(given, ResilientLoader) or isinstance(rest, ResilientLoader):
        return rest
    return given._inside(rest) if hasattr(rest, "base_dataloader") else given._like(rest)


Accelerator.prepare = _prepare_resilient
for _module in (accelerate, accelerate.accelerator, accelerate.data_loader):
    _module.skip_first_batches = skip_first_batches
