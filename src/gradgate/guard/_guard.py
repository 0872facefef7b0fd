"""The guard itself: a step that costs nothing while all is well and drops exactly what is bad when it is not."""

from __future__ import annotations

import os
import sys
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from traceback import walk_stack
from typing import Any

import torch

from gradgate._checks import wrong_type, wrong_value
from gradgate._loader_link import LoaderIds, announce, follow, ids_of
from gradgate._names import listed
from gradgate._state import FiniteCheck, TrainingState, divide_gradients
from gradgate._torch_distributed import Replica
from gradgate._torch_private import without_compiled_wrappers
from gradgate._trees import BatchReader, Ids, ReadIds, Select, read_ids
from gradgate.errors import ArgumentError, ArgumentValueError, GradgateError
from gradgate.guard._clip import ClippedTrial, check_clipping
from gradgate.guard._parts import OutOfMemory, StepInParts
from gradgate.guard._result import GuardResult, LossHistory, Summary, Tally, Wishes
from gradgate.guard._step import LossStep, OutputStep
from gradgate.guard._trial import (
    Catch,
    LossFunction,
    LossTrial,
    OutputTrial,
    Outsiders,
    Scaler,
    check_function,
    refuse_foreign_loop,
)
from gradgate.guard.distributed._ranks import Ranks
from gradgate.guard.distributed._shards import Shards
from gradgate.guard.distributed._shared_step import ReplicatedStep, ShardedStep, agreement_of, even_batches
from gradgate.ledger import Ledger
from gradgate.records import Sink

Log = Callable[[str, float, int], object]


class Guard:
    """Keeps a training going when single samples are bad, and leaves it exactly as if they had never been there.

    A sample is bad if it makes the forward pass or the loss raise, or the loss or a gradient NaN or infinite. The bad
    samples are found and dropped, and the step is made with the others: gradients, buffers, random state (python's,
    numpy's, torch's) and the loss are bit-identical to those of the same call on the batch without them.

    A fault of the code is no sample's: if every sample fails, the exception is raised as it was, and everything is
    as it was before the step. Interrupts, exits, missing memory and device-side asserts always pass.

    With a model in DistributedDataParallel or FSDP2 (`fully_shard`), every rank makes the same step: the gradients are
    those of the mean over the good samples of all ranks.

    Args:
        model: The module that is trained, or several; with its wrapper, where ranks share it.
        ledger: Where dropped samples are written down: a path, or a `Ledger`.
        catch: The exceptions that may be blamed on samples.
        max_bad: The share of a batch that may be bad.
        patience: How many steps in a row may have bad samples; the last of them raises.
        select: `select(batch, rows)` returns a batch of these rows only, for batches that the guard cannot cut.
        count: `count(batch)` returns the number of samples, where the guard cannot tell.
        batch_dim: The dimension that samples are stacked along; or such by key or position: `{"position_ids": 1}`.
        shared: Keys (attributes, positions) of what is not per sample, and goes with each part of a batch as it is.
        ids: Where a batch has its ids: a key, an attribute or a function. Batches of `gg.resilient(loader)` need none.
        payload: Give the bad samples themselves to the ledger or sink, too.
        sink: Takes the incidents, besides or instead of a ledger.
        log: `log(tag, value, step)` takes the counters of each step (`gradgate/kept`, `dropped`, `dropped_total`, and
            of a bad one `bad_steps`). Of several ranks, the first logs for all.
        min_kept: With fewer good samples left, no step is made: gradients stay as they are and `result.kept` is empty.
            2 suits BatchNorm, which cannot work with one sample.
        run: The name of the run in incidents.
        out_of_memory: What happens where a batch does not fit into memory: "raise", "skip" it, or "split" it in halves
            as often as it takes; `result.exact` says whether samples meet then. With several ranks only "raise".
        history: Write the loss of every sample into the ledger (`ledger.hardest()`, `ledger.suspicious()`), where the
            loss function returns them and ids are known: every 64 steps, with `state_dict`, at the end of `loop`.
        clip_samples: The largest 2-norm of the gradient of one sample; longer ones are scaled down before the mean is
            taken. The loss of a sample is that of a batch of it alone: not with BatchNorm in training, nor over ranks.

    Raises:
        ArgumentTypeError: The model is no module, or one that ranks share in a way that is not supported; `catch` holds
            no exceptions; or the sink cannot take incidents.
        ArgumentValueError: A number is out of range.
        LedgerError: The ledger cannot be opened.

    Examples:
        >>> model = torch.nn.Linear(3, 1)
        >>> guard = gg.Guard(model)
        >>> x = torch.randn(8, 3)
        >>> x[5] = float("nan")
        >>> result = guard.backward(x, lambda x: model(x).square().mean(), ids=range(100, 108))
        >>> result.kept, result.dropped[0].sample_id, bool(model.weight.grad.isfinite().all())
        ([0, 1, 2, 3, 4, 6, 7], '105', True)
    """

    def __init__(
        self,
        model: torch.nn.Module | Iterable[torch.nn.Module],
        ledger: str | os.PathLike[str] | Ledger | None = None,
        catch: type[BaseException] | Catch = (Exception,),
        max_bad: float = 0.5,
        patience: int = 20,
        *,
        select: Select | None = None,
        count: Callable[[Any], int] | None = None,
        batch_dim: int | Mapping[Any, int] = 0,
        shared: Iterable[Any] = (),
        ids: ReadIds | None = None,
        payload: bool = False,
        sink: Sink | None = None,
        log: Log | None = None,
        min_kept: int = 1,
        run: str | None = None,
        out_of_memory: OutOfMemory = "raise",
        history: bool = False,
        clip_samples: float | None = None,
    ) -> None:
        self._arguments = dict(locals())
        del self._arguments["self"]
        some: Any = model if isinstance(model, Iterable) and not isinstance(model, torch.nn.Module) else [model]
        given = list(some)
        self._catch: Catch = catch if isinstance(catch, tuple) else (catch,)
        if not given or not all(isinstance(module, torch.nn.Module) for module in given):
            why = "the guard puts back the buffers and gradients of the modules that a step runs."
            raise wrong_type(model, "model", "Guard", why, "gg.Guard(model)   # or gg.Guard([encoder, head])")
        self._modules: list[torch.nn.Module] = [m.module if isinstance(m, Replica) else m for m in given]
        self._state = TrainingState(self._modules)
        self._agreement = agreement_of(given, self._state)
        self._check = self._agreement if isinstance(self._agreement, Ranks) else FiniteCheck()
        _check_arguments(self._arguments, self._catch, ranks=isinstance(self._agreement, Ranks))
        self._closed: str | os.PathLike[str] | None = None
        if isinstance(ledger, str | os.PathLike):
            # Where ranks share a model, the first of them writes for all.
            if isinstance(self._agreement, Ranks) and self._agreement.rank:
                self._closed, ledger = ledger, None
            else:
                ledger = Ledger(ledger, payload=payload)
        self._sinks: list[Sink] = [taker for taker in (ledger, sink) if taker is not None]
        self.max_bad = max_bad
        self.patience = patience
        self.payload = payload
        self.min_kept = min_kept
        self.out_of_memory = out_of_memory
        self.clip_samples = None if clip_samples is None else float(clip_samples)
        self.epoch: int | None = None
        """The epoch that incidents are recorded with, those of a resilient loader too; set it at the start of each."""
        self.global_step = 0
        """The step that incidents are recorded with. Each `backward` adds 1; set it to count otherwise."""
        self.run = run or (ledger.run if ledger is not None else uuid.uuid4().hex[:12])
        self._reader = BatchReader(batch_dim, select, count, shared)
        self._read_ids = ids
        self._log = log
        announce(self, self._sinks if self._closed is None else [*self._sinks, self._closed])
        self._tally = Tally()
        self._first: bool = True
        self._outsiders: Outsiders = Outsiders(self._modules)
        self._wishes: Wishes | None = None  # of all ranks
        self._more = False
        self._others_have_more: bool | None = None
        self._window = (0, 1)
        self._busy_ranks = 1  # that had samples in the last step
        # Of ranks, each writes the losses of its own samples.
        of_losses = Ledger(self._closed) if history and self._closed is not None else ledger
        self._loss_history = LossHistory(of_losses) if history and of_losses is not None else None

    def __repr__(self) -> str:
        names = [type(without_compiled_wrappers(module)).__name__ for module in self._modules]
        made = f"steps={self._tally.steps}, samples={self._tally.samples}, dropped={self._tally.dropped}"
        return ", ".join([f"Guard({listed(names)}", made, *map(repr, self._sinks)]) + ")"

    def backward(
        self,
        batch: Any,
        loss_fn: LossFunction,
        ids: Ids | None = None,
        *,
        scaler: Scaler | None = None,
        accumulate: int = 1,
    ) -> GuardResult:
        """Make forward, loss and backward of a batch without its bad samples; gradients are added to those there.

        Args:
            batch: Tensors, and lists, tuples, dicts, dataclasses and named tuples of them; lists of anything; objects
                with `__getitem__`; whatever else with `Guard(select=...)`. None is a batch of no samples.
            loss_fn: Runs the model on a batch, or several times on parts of it, and returns the mean loss, one loss for
                each sample, or `(total, count)`: the sum of the loss and of how much (tokens, pixels), see `finish`.
            ids: The ids of the samples, one for each row, where the guard cannot find them by itself.
            scaler: A `torch.amp.GradScaler`; an overflow that is gone without scaling is left for it to see.
            accumulate: How many micro-batches make one step of the optimizer: a mean loss is divided by it before
                backward. `result.loss` is not. A total is divided by `finish` only.

        Returns:
            The loss, who took part, and who did not and why.

        Raises:
            TooManyBadSamples: More than `max_bad` of the batch is bad, it is the `patience`-th bad step in a row, or
                no sample can be blamed for a value that is not finite. Everything is as before the step.
            OtherRankError: Another rank of the training raised something, or cannot be reached.
            ArgumentTypeError: The batch or what the loss function gave cannot be used.
            ArgumentValueError: Parts of the batch, or the ids, do not fit together.
        """
        if scaler is not None and not scaler.is_enabled():
            scaler = None
        if self._first:
            refuse_foreign_loop()
        how = (loss_fn, self._state, self._check, self._catch, scaler, accumulate)
        if isinstance(self._agreement, Ranks):
            kind = ShardedStep if isinstance(self._agreement, Shards) else ReplicatedStep
            return kind(self, self._agreement, batch, ids).run(LossTrial(*how))
        if batch is None:  # none of its samples could be loaded
            tally = replace(self._tally, steps=self._tally.steps + 1)
            self._log_counts(0, tally)
            self._tally, self.global_step = tally, self.global_step + 1
            return GuardResult(torch.tensor(float("nan")), None, [])
        if self.out_of_memory != "raise":
            return StepInParts(self, batch, ids, how).run()
        return self._own_step(batch, ids, how)

    def _own_step(self, batch: Any, ids: Ids | None, how: tuple[Any, ...], first_row: int = 0) -> GuardResult:
        """Make a step without other ranks; `how` are the arguments of its trial."""
        check_function(batch, how[0], "guard.backward(batch, loss_fn)")
        step = LossStep(self, batch, ids, first_row)
        self._refuse_nesting()
        if self.clip_samples is None:
            return step.run(LossTrial(*how))
        check_clipping(self._modules, how[4], step.guests)
        return step.run(ClippedTrial(*how, modules=self._modules, reader=self._reader, largest=self.clip_samples))

    def loop(
        self,
        loader: Iterable[Any],
        loss_fn: LossFunction,
        optimizer: torch.optim.Optimizer,
        scheduler: Any = None,
        *,
        scaler: Any = None,
    ) -> Iterator[GuardResult]:
        """Train for one epoch: zero_grad, backward and step for each batch; the scheduler follows the optimizer.

        A step of which nothing is kept is not made, and the scheduler does not count it. `epoch` grows by 1 at the end.

        Args:
            loader: The batches; over ranks, those of `guard.batches(loader)`.
            loss_fn: As for `backward`; for a total and its count, `finish` is called.
            optimizer: Steps after each batch.
            scheduler: Steps with the optimizer, if one is given.
            scaler: A `torch.amp.GradScaler`, which steps the optimizer then.

        Returns:
            The result of each step, after the optimizer has made it: iterate over them.

        Examples:
            >>> model = torch.nn.Linear(3, 1)
            >>> optimizer = torch.optim.SGD(model.parameters(), 0.1)
            >>> guard = gg.Guard(model)
            >>> for result in guard.loop([torch.ones(4, 3)], lambda x: model(x).square().mean(), optimizer):
            ...     print(result.stepped, guard.epoch)
            True 0
        """
        self.epoch = self.epoch or 0
        for batch in self.batches(loader):
            optimizer.zero_grad()
            result = self.backward(batch, loss_fn, scaler=scaler)
            if self._tally.window is not None and not self._tally.has_means:
                self.finish()
            if result.stepped:
                if scaler is None:
                    optimizer.step()
                else:
                    scaler.step(optimizer)
                    scaler.update()
                if scheduler is not None:
                    scheduler.step()
            yield result
        self.epoch += 1
        if self._loss_history is not None:
            self._loss_history.write()

    def finish(self) -> torch.Tensor:
        """Divide the gradients by the count of all that was kept since the last call; then the optimizer may step.

        Only where the loss function returns `(total, count)`: the gradients of totals are added over micro-batches and
        ranks, and the mean is exact, however unequal the counts are. Every rank calls it, once before each
        `optimizer.step()`. A call that is forgotten is not noticed: the optimizer gets the gradient of the sum.

        Returns:
            The mean loss over everything kept since the last call, on all ranks; 0 if the count is 0.

        Raises:
            ArgumentValueError: There was no step since the last call, or one whose loss function gave a mean.

        Examples:
            >>> model = torch.nn.Linear(3, 1)
            >>> guard = gg.Guard(model)
            >>> for size in (4, 2):
            ...     x = torch.ones(size, 3)
            ...     x[0] = float("nan")
            ...     result = guard.backward(x, lambda x: (model(x).sum(), len(x)))
            >>> mean = guard.finish()  # over 3 samples and 1; then optimizer.step()
            >>> model.weight.grad
            tensor([[1., 1., 1.]])
        """
        tally = self._tally
        if tally.has_means or tally.window is None:
            given = "a mean loss" if tally.has_means else "nothing: there was no step"
            what = f"Guard.finish(): since the last call, `loss_fn` gave {given}."
            why = "it divides the gradients of totals by their counts, and there are none."
            fix = "guard.backward(batch, lambda batch: (losses.sum(), len(losses)))   # a total and its count"
            raise ArgumentValueError(what, why=why, fix=fix)
        parameters = [parameter for module in self._modules for parameter in module.parameters()]
        sums = tally.window
        if isinstance(self._agreement, Ranks):
            self._agreement.add(sums := sums.to(self._agreement.device, copy=True))
        self._tally = replace(tally, window=None)
        return divide_gradients(dict.fromkeys([*parameters, *self._state.adopted]), sums)

    def forward(
        self, batch: Any, fn: Callable[[Any], Any], fill_value: float = float("nan"), *, ids: Ids | None = None
    ) -> tuple[Any, torch.Tensor]:
        """Run a function on a batch, with the rows of bad samples filled: no backward, in the mode that is in force.

        A sample is bad if it makes the function raise or gives an output row that is not finite. The other rows are
        those of the same call without the bad samples. Outputs that have no row for each sample are given as they are.

        Args:
            batch: As for `backward`.
            fn: Any function of the batch; its outputs have one row for each sample.
            fill_value: What stands in the rows of bad samples; 0 in integer outputs if they cannot hold it.
            ids: As for `backward`.

        Returns:
            The outputs, and a boolean tensor that is True where a row is real.

        Raises:
            TooManyBadSamples: More than `max_bad` of the batch is bad, or no sample can be blamed.
        """
        check_function(batch, fn, "guard.forward(batch, fn)")
        step = OutputStep(self, batch, ids)
        step.fill_value = fill_value
        trial = OutputTrial(fn, self._catch, self._reader.batch_dim)
        if not isinstance(self._agreement, Ranks):
            self._refuse_nesting()
            return step.run(trial)
        if self._closed is not None:
            self._sinks.insert(0, Ledger(self._closed, payload=self.payload, run=self.run))
            self._closed = None
        with self._agreement.apart(training=False):
            return step.run(trial)

    def batches(self, loader: Iterable[Any]) -> Iterator[Any]:
        """Return the batches of a loader until no rank has any more, so that all ranks make equally many steps.

        Args:
            loader: This rank's batches.

        Returns:
            The batches, for one loop with a `backward` for each. A rank whose loader has come to its end gets batches
            of 0 rows, or None where `select=` cannot take 0 rows. In one process these are just the batches.
        """
        follow(loader, None, self)
        return even_batches(self, self._agreement, loader) if isinstance(self._agreement, Ranks) else iter(loader)

    def summary(self) -> Summary:
        """Return the run in numbers; prints as a table.

        Returns:
            How many samples were dropped in how many steps, and for what.
        """
        return self._tally.summary()

    def state_dict(self) -> dict[str, Any]:
        """Return what the guard has counted, to be saved with a checkpoint.

        Returns:
            Plain values.
        """
        if self._loss_history is not None:
            self._loss_history.write()
        return {**self._tally.state_dict(), "epoch": self.epoch, "global_step": self.global_step}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on counting where a saved guard stopped.

        Args:
            state: What `state_dict` gave.

        Raises:
            ArgumentValueError: It is something else.
        """
        rest = dict(state)
        epoch, step = rest.pop("epoch", None), rest.pop("global_step", None)
        self._tally = Tally.from_state(rest)
        self.epoch, self.global_step = epoch, self._tally.steps if step is None else step

    @property
    def _steps_made(self) -> int:
        return self._tally.steps

    def _step_after(self, batches: int) -> int:
        """Return the step that a later batch belongs to: the next one, or several in a window of accumulation."""
        made, per_step = self._window
        return self.global_step + (made + batches) // per_step

    def _move_to(self, step: int, made: int, per_step: int) -> None:
        """Follow a framework's count: the optimizer's steps, and the micro-batches made towards the next of them."""
        self.global_step, self._window = step, (made, per_step)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle and copy a guard as what it was made of and what it has counted."""
        now = {name: vars(self).get(name, given) for name, given in self._arguments.items()}
        return _rebuilt, (type(self), now, self.state_dict())

    def _log_counts(self, kept: int, tally: Tally) -> None:
        """Pass the counters of a step to the logger, before the step counts: if that raises, no step was made."""
        if self._log is None:
            return
        dropped = tally.dropped - self._tally.dropped
        counts = {"kept": kept, "dropped": dropped, "dropped_total": tally.dropped}
        if dropped:
            counts["bad_steps"] = tally.bad_steps
        for name, count in counts.items():
            self._log(f"gradgate/{name}", count, self.global_step)

    def _sums_of_nothing(self) -> torch.Tensor | None:
        """Return the total and the count of a step that keeps nothing, unless the steps before it gave means."""
        if self._tally.has_means:
            return None
        return torch.zeros(2, dtype=torch.float64, device=self._state.parameters[0].device)

    def _common(self) -> dict[str, Any]:
        ranks = {"rank": self._agreement.rank, "world_size": self._agreement.world_size}
        return {"run": self.run, "step": self.global_step, "epoch": self.epoch, **ranks}

    def _ids_of(self, batch: Any, size: int, ids: Ids | None) -> Ids | None:
        """Find the ids of a batch that has bad samples: those given, those in the batch, or those of its loader."""
        if ids is not None and not isinstance(ids, LoaderIds):
            return ids
        if ids is None and self._read_ids is not None:
            return read_ids(self._read_ids, batch, size)
        found = ids_of(batch, size)
        return ids.if_current(self, size) if found is None and ids is not None else found

    def _refuse_nesting(self) -> None:
        """Raise where a step of this guard is running, in this thread or another; one that was interrupted is not."""
        if self._state.open and _calls_of(self) > 1:
            what = "Guard: a guard was used inside one of its own steps, or by two threads at once."
            why = "the gradients and buffers that it put aside for the first step would be lost."
            fix = "out, keep = guard.forward(batch, fn)   # before guard.backward; or another Guard inside"
            raise GradgateError(what, why=why, fix=fix)


def _calls_of(guard: Guard) -> int:
    """Count the steps of a guard that are running: the stacks of all threads know, whatever was interrupted."""
    steps = {Guard.backward.__code__, Guard.forward.__code__}
    frames = (frame for top in sys._current_frames().values() for frame, _ in walk_stack(top))
    return sum(frame.f_code in steps and frame.f_locals.get("self") is guard for frame in frames)


def _rebuilt(kind: type[Guard], arguments: dict[str, Any], counted: dict[str, Any]) -> Guard:
    guard = kind(**arguments)
    guard.load_state_dict(counted)
    return guard


# --- Checks of the arguments ----------------------------------------------------------------------------------------


def _check_arguments(given: Mapping[str, Any], catch: tuple[Any, ...], *, ranks: bool) -> None:
    """Refuse arguments of a guard that cannot be used; each has a condition, a reason and a line that is right."""

    def check(name: str, good: object, why: str, fix: str, error: Callable[..., ArgumentError] = wrong_value) -> None:
        if not good:
            line = fix if fix.startswith(("gg.", "torch.")) else f"gg.Guard(model, {fix})"
            raise error(given[name], name, "Guard", why, line)

    dims = given["batch_dim"].values() if isinstance(given["batch_dim"], Mapping) else (given["batch_dim"],)
    shared, sink, log, clip = (given[name] for name in ("shared", "sink", "log", "clip_samples"))
    why, fix = "it lists the exceptions that may be blamed on a sample.", "catch=(ValueError, RuntimeError)"
    good = catch and all(isinstance(kind, type) and issubclass(kind, BaseException) for kind in catch)
    check("catch", good, why, fix, wrong_type)
    check("max_bad", 0 <= given["max_bad"] <= 1, "it is a share of the batch, from 0 to 1.", "max_bad=0.5")
    check("patience", given["patience"] >= 1, "it is a number of steps, 1 or more.", "patience=20")
    check("min_kept", given["min_kept"] >= 1, "it is a number of samples, 1 or more.", "min_kept=1")
    why = "it is a dimension counted from the front, or such a dimension for each of some keys."
    fix = 'gg.Guard(model, batch_dim=0)   # or batch_dim={"position_ids": 1}'
    check("batch_dim", all(isinstance(dim, int) and dim >= 0 for dim in dims), why, fix)
    why, fix = "it lists the keys of a batch that are not per sample.", f"gg.Guard(model, shared=({shared!r},))"
    check("shared", isinstance(shared, Iterable) and not isinstance(shared, str), why, fix, wrong_type)
    why = "a sink takes incidents with `record_many(incidents, payloads=None)`."
    check("sink", sink is None or isinstance(sink, Sink), why, 'ledger="run.ledger"', wrong_type)
    why = "it is called with a tag, a value and a step."
    fix = "gg.Guard(model, log=writer.add_scalar)   # writer = torch.utils.tensorboard.SummaryWriter()"
    check("log", log is None or callable(log), why, fix, wrong_type)
    why = "the losses of samples are written into a ledger, and there is no `ledger`."
    check("history", not given["history"] or given["ledger"] is not None, why, 'ledger="run.ledger", history=True')
    good = given["out_of_memory"] in ("raise", "split", "skip")
    check("out_of_memory", good, "it is one of 'raise', 'split', 'skip'.", 'out_of_memory="split"')
    good = clip is None or (isinstance(clip, int | float) and not isinstance(clip, bool) and 0 < clip < float("inf"))
    check("clip_samples", good, "it is the largest 2-norm of the gradient of one sample.", "clip_samples=1.0")
    if ranks:
        why = "several ranks share the model: the others wait in collectives that this one makes again, or not at all."
        fix = 'gg.Guard(model, out_of_memory="raise")   # and smaller batches'
        check("out_of_memory", given["out_of_memory"] == "raise", why, fix)
        why = "several ranks share the model: its wrapper adds gradients of batches, and never sees that of one sample."
        fix = "torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)   # clips the gradient of the batch"
        check("clip_samples", clip is None, why, fix)
