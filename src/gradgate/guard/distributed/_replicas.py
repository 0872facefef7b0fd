"""Ranks with a whole model each, in DistributedDataParallel; buffers of gradients are sent while backward runs."""

from __future__ import annotations

import math
import operator
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from torch import distributed

from gradgate._state import TrainingState
from gradgate._torch_distributed import Replica, alone_in_replica, replica_obstacle, sync_buffers
from gradgate._torch_private import copy_tensors, memory_holders
from gradgate.errors import ArgumentTypeError
from gradgate.guard.distributed._ranks import FAREWELL, WIDTH, Ranks, Share

# --- Buffers that are sent ------------------------------------------------------------------------------------------


# As DistributedDataParallel does: a small one first, so that the network has something to do early.
FIRST_BYTES = 2**20
BYTES = 25 * 2**20


@dataclass(slots=True)
class _Bucket:
    """One flat buffer, and views of it for the gradients of some parameters, by their numbers."""

    buffer: torch.Tensor
    numbers: list[int]
    views: list[torch.Tensor]


class Buckets:
    """The buffers of some parameters; the last one also has `extra` numbers."""

    def __init__(self, parameters: Sequence[torch.Tensor], group: Any, extra: int, device: torch.device) -> None:
        self.parameters = list(parameters)
        self._group = group
        self._extra = extra
        self._device = device
        self._cuts = _cut(self.parameters)
        self._lay_out()
        self.begin(0.0, {})
        self._hook_parameters()

    def begin(self, weight: float, earlier: Mapping[torch.Tensor, torch.Tensor], *, listen: bool = False) -> None:
        """Start a round: new gradients times `weight`, plus the mean over ranks of earlier ones."""
        # With `listen`, a backward follows, and what is ready is sent while it runs.
        self._weight, self._earlier = weight, earlier
        self.listening = listen
        self._works: list[Any] = []
        self._sums: list[torch.Tensor] = []
        if self._holders() != self._own_holders:
            self._lay_out()  # somebody has kept gradients, or adds to them
        self._error: Exception | None = None
        self._last_is_filled = False
        self.stale = False  # whether something was sent that is not what this rank has to give
        self._missing = [len(bucket.numbers) for bucket in self._buckets]

    def looks_finite(self) -> bool:
        """Send all but the last buffer after backward; return whether all is finite, which a finite sum proves."""
        self.listening = False
        self._send_up_to(len(self._buckets) - 1, look=True)
        self._fill_all(self._buckets[-1], empty=False)
        self._last_is_filled = True
        total = self._gradients_of_last.sum(dtype=_sum_dtype(self._gradients_of_last))
        for one in self._sums:
            total = total + one.to(total.device)
        return math.isfinite(total.item())

    def stop(self, weight: float) -> None:
        """End the backward; what is still to be sent has this weight."""
        self.listening = False
        self._last_is_filled = self._last_is_filled and weight == self._weight
        self._weight = weight

    def withdraw(self) -> None:
        """Send zeros in place of what has not been sent, up to the last buffer, so that no rank has to wait."""
        self.listening = self._last_is_filled = False
        self.stale = len(self._buckets) > 1
        self._send_up_to(len(self._buckets) - 1, empty=True)

    def finish(self, *, empty: bool = False, limit: timedelta | None = None) -> None:
        """Send the rest, and wait for all."""
        self._send_up_to(len(self._buckets), empty=empty)
        if self._error is not None:
            raise self._error
        for work in self._works:
            work.wait() if limit is None else work.wait(limit)

    def collect(self, factor: float, present: Sequence[bool] | None) -> None:
        targets, sources = [], []
        with torch.no_grad():
            for bucket in self._buckets:
                if factor != 1:
                    bucket.buffer.mul_(factor)
                for number, view in zip(bucket.numbers, bucket.views, strict=True):
                    if present is not None and not present[number]:
                        continue
                    parameter = self.parameters[number]
                    earlier = self._earlier.get(parameter) if self._earlier else None
                    if earlier is None or earlier.is_sparse:
                        parameter.grad = view.detach()  # not a copy: it lies in the buffer
                    else:
                        parameter.grad = earlier
                        targets.append(earlier)
                        sources.append(view)
            copy_tensors(targets, sources)
        self._earlier = {}

    def _lay_out(self) -> None:
        """Make new buffers; the old ones belong to whoever has gradients in them."""
        last = len(self._cuts) - 1
        self._buckets = [
            self._made(numbers, self._extra if place == last and _counts(self.parameters[numbers[0]].dtype) else 0)
            for place, numbers in enumerate(self._cuts)
        ]
        tail = self._buckets[-1].buffer if self._buckets else torch.empty(0, device=self._device)
        if not self._buckets or not _counts(tail.dtype):  # half precision cannot count to a thousand
            tail = torch.zeros(self._extra, device=tail.device)
            self._buckets.append(_Bucket(tail, [], []))
        self._gradients_of_last = tail[: tail.numel() - self._extra]
        self.numbers = tail[tail.numel() - self._extra :]
        """What every rank adds to the last buffer; after a round, the sums."""
        self._own_holders = self._holders()

    def _holders(self) -> list[int]:
        """Count the references to each buffer: more than at first while its gradients are in use."""
        return [memory_holders(bucket.buffer) for bucket in self._buckets]

    def _made(self, numbers: list[int], extra: int) -> _Bucket:
        first = self.parameters[numbers[0]]
        parts = 2 if first.is_complex() else 1
        count = parts * sum(self.parameters[number].numel() for number in numbers)
        buffer = torch.zeros(count + extra, dtype=_real(first.dtype), device=first.device)
        views, start = [], 0
        for number in numbers:
            parameter = self.parameters[number]
            flat = buffer[start : start + parts * parameter.numel()]
            if parts == 2:
                flat = torch.view_as_complex(flat.view(-1, 2))
            # The strides of a dense tensor of that kind: copies from and to gradients run straight through memory.
            strides = torch.empty_like(parameter, device="meta").stride()
            views.append(flat.as_strided(parameter.shape, strides))
            start += parts * parameter.numel()
        return _Bucket(buffer, numbers, views)

    def _hook_parameters(self) -> None:
        """Note every gradient that is ready, except those in the last buffer, which `finish` sends."""
        this = weakref.ref(self)

        def ready(place: int, parameter: torch.Tensor) -> None:
            buckets = this()
            if buckets is not None and buckets.listening:
                buckets._ready(place)

        handles = [
            self.parameters[number].register_post_accumulate_grad_hook(partial(ready, place))  # type: ignore[no-untyped-call]
            for place in range(len(self._buckets) - 1)
            for number in self._buckets[place].numbers
        ]
        weakref.finalize(self, lambda: [handle.remove() for handle in handles])

    def _ready(self, place: int) -> None:
        """Note a gradient of a buffer, and send the buffers that are complete, in order."""
        self._missing[place] -= 1
        if place < len(self._works) or self._missing[place] < 0:
            self.stale = True  # a second gradient, after the first was sent
            return
        while len(self._works) < len(self._buckets) - 1 and self._missing[len(self._works)] == 0:
            self._send_up_to(len(self._works) + 1, look=True)

    def _send_up_to(self, stop: int, *, empty: bool = False, look: bool = False) -> None:
        for bucket in self._buckets[len(self._works) : stop]:
            if empty or not (self._last_is_filled and bucket is self._buckets[-1]):
                self._fill_all(bucket, empty)
            if look:
                self._sums.append(bucket.buffer.sum(dtype=_sum_dtype(bucket.buffer)))
            try:
                self._works.append(distributed.all_reduce(bucket.buffer, group=self._group, async_op=True))
            except RuntimeError as error:  # raised in `finish`: in a backward it would be taken for a fault of that
                self._error = self._error or error
                self._works.append(None)

    def _fill_all(self, bucket: _Bucket, empty: bool) -> None:
        # A tensor: making one of a number for every gradient takes as long as multiplying a small gradient.
        weight = torch.full((), self._weight, dtype=_sum_dtype(bucket.buffer))
        with torch.no_grad():
            for number, view in zip(bucket.numbers, bucket.views, strict=True):
                parameter = self.parameters[number]
                gradient = None if empty or self._weight == 0 else parameter.grad
                if gradient is None:
                    view.zero_()
                elif gradient.is_sparse:
                    view.copy_(gradient.to_dense()).mul_(weight)
                else:
                    torch.mul(gradient, weight, out=view)
                if self._earlier and not empty and parameter in self._earlier:
                    view.add_(self._earlier[parameter], alpha=1 / distributed.get_world_size(self._group))


def _cut(parameters: Sequence[torch.Tensor]) -> list[list[int]]:
    """Cut parameters into buffers of one device and dtype each, in the order in which gradients become ready."""
    cuts: list[list[int]] = []
    open_: dict[tuple[torch.device, torch.dtype], tuple[list[int], int]] = {}
    for number in reversed(range(len(parameters))):
        parameter = parameters[number]
        kind = parameter.device, parameter.dtype
        numbers, size = open_.pop(kind, ([], 0))
        if not numbers:
            cuts.append(numbers)
        numbers.append(number)
        size += parameter.numel() * parameter.element_size()
        if size < (FIRST_BYTES if numbers is cuts[0] else BYTES):
            open_[kind] = numbers, size
    # A buffer is complete with its last parameter; the one that is complete last is sent last.
    return sorted(cuts, key=lambda numbers: -numbers[-1])


def _counts(dtype: torch.dtype) -> bool:
    """Return whether a dtype stores counts of samples without rounding."""
    return _real(dtype) in (torch.float32, torch.float64)


def _sum_dtype(buffer: torch.Tensor) -> torch.dtype:
    return torch.float32 if buffer.element_size() < 4 else buffer.dtype


def _real(dtype: torch.dtype) -> torch.dtype:
    return dtype.to_real() if dtype.is_complex else dtype


# --- Replicas -------------------------------------------------------------------------------------------------------


class Replicas(Ranks):
    """The agreement of ranks that have replicas of a model."""

    # Gradients are means over each rank's samples. Rank r weighs n_r / N, its share of all samples that take part. N is
    # known only at the end of a step, so the sums are made with the N of the last step and corrected afterwards; while
    # all steps are alike, the two are the same. Totals of a loss are just added.

    has_whole_weights = True

    def __init__(self, replicas: Sequence[Replica]) -> None:
        self._replicas = list(replicas)
        super().__init__(replicas[0].process_group, next(iter(replicas[0].parameters())).device)
        named = [(name, p, r) for r in replicas for name, p in r.module.named_parameters()]
        self._parameters = list(dict.fromkeys(p for name, p, r in named if name not in r.parameters_to_ignore))
        self._buckets = Buckets([], self.group, WIDTH, self.device)
        self._sent = False
        self._factor = 1.0
        self._reduces = True

    @contextmanager
    def apart(self, *, training: bool) -> Iterator[None]:
        """Let the replicas run without collectives, as long as the block lasts."""
        for replica in self._replicas:
            if obstacle := replica_obstacle(replica):
                why = "the guard adds the gradients of all ranks itself, and would not make use of it."
                fix = "for batch in guard.batches(loader): ...   # instead of a join context; no hooks"
                raise ArgumentTypeError(f"Guard: the model has {obstacle}.", why=why, fix=fix)
        self._reduces = all(replica.require_backward_grad_sync for replica in self._replicas)
        self._sent = False
        if training:
            trained, known = self.trained(), self._buckets.parameters
            if len(trained) != len(known) or not all(map(operator.is_, trained, known)):  # something froze or thawed
                self._buckets = Buckets(trained, self.group, WIDTH + len(trained), self.device)
            with self.talking():
                for replica in self._replicas:
                    sync_buffers(replica)
        with ExitStack() as stack:
            for replica in self._replicas:
                stack.enter_context(alone_in_replica(replica))
            yield

    def before_backward(self, size: int, state: TrainingState, *, by_total: bool) -> None:
        if self._reduces:
            self._sent = True
            weight = Share(kept=size, by_total=by_total).weight(self._expected)
            self._buckets.begin(weight, state.earlier(), listen=True)

    def has_nonfinite(self, gradients: list[torch.Tensor], loss: torch.Tensor | None = None) -> bool:
        """Look for NaN and Inf in the buffers that gradients are sent in, and in what is in none."""
        buckets = self._buckets
        if buckets.listening:
            if buckets.looks_finite():
                own = {id(parameter.grad) for parameter in buckets.parameters}
                gradients = [gradient for gradient in gradients if id(gradient) not in own]
            else:  # if not the gradients, their weight or their sum is to blame; the next round has smaller weights
                buckets.stale = True
        return bool(gradients or loss is not None) and super().has_nonfinite(gradients, loss)

    def withdraw(self) -> None:
        if self._sent:
            self._buckets.withdraw()

    def exchange(self, share: Share, state: TrainingState, *, in_haste: bool = False) -> Share:
        """Add the shares of all ranks and, unless gradients are being accumulated, the gradients."""
        if not self._reduces:
            totals = self.add_up(share, (), in_haste=in_haste)
            self._expected = totals.kept or self._expected
            return totals
        buckets, earlier = self._buckets, state.earlier()
        weight = share.weight(self._expected)
        if self._sent:
            buckets.stop(weight)
        else:
            buckets.begin(weight, earlier)
        share.stale, share.earlier = buckets.stale, bool(earlier)
        share.write(buckets.numbers, [p.grad is not None or p in earlier for p in buckets.parameters])
        with self.talking():
            buckets.finish(empty=share.failed, limit=FAREWELL if in_haste else None)
            totals = Share.read(buckets.numbers)
            expected = totals.kept if totals.by_total else self._expected
            self._factor = expected / max(totals.kept, 1)
            if totals.kept and not totals.failed:
                if totals.stale or (totals.earlier and totals.kept != expected):
                    buckets.begin(share.weight(totals.kept), earlier)
                    buckets.finish()
                    self._factor = 1.0
                self._expected = totals.kept
        return totals

    def settle(self, share: Share, totals: Share, state: TrainingState) -> None:
        """Write the mean gradients of all ranks; while accumulating, this rank's part in them."""
        if self._reduces:
            self._buckets.collect(self._factor, totals.present)
            state.add_earlier_gradients(without=self._buckets.parameters)
        else:
            factor = share.weight(totals.kept, self.world_size)
            for parameter in self.trained() if factor != 1 else ():
                if parameter.grad is not None:
                    parameter.grad.mul_(factor)
            state.add_earlier_gradients()

    def trained(self) -> list[torch.Tensor]:
        return [parameter for parameter in self._parameters if parameter.requires_grad]
