"""Every rank has the whole model (DistributedDataParallel): the guard runs it alone and adds the gradients itself."""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from gradgate._finite import FiniteCheck
from gradgate._torch_compat import Replica, alone_in_replica, replica_obstacle, sync_buffers
from gradgate.errors import ArgumentTypeError
from gradgate.guard._buckets import Buckets
from gradgate.guard._ranks import FAREWELL, Ranks
from gradgate.guard._shares import WIDTH, Share, Totals
from gradgate.guard._state import TrainingState

__all__ = ["Replicas", "scale_and_add", "signature"]


class Replicas(Ranks):
    """The agreement of ranks that hold replicas of a model.

    Gradients are means over each rank's samples. Rank r weighs n_r / N, its share of all samples that take part. N is
    known only when all have spoken, so the sums are made with the N of the last step and corrected afterwards; while
    all steps are alike, the two are the same.

    Args:
        replicas: The models in DistributedDataParallel, all with the same process group.
    """

    has_whole_weights = True

    def __init__(self, replicas: Sequence[Replica]) -> None:
        self._replicas = list(replicas)
        super().__init__(replicas[0].process_group, next(iter(replicas[0].parameters())).device)
        self._parameters = list(dict.fromkeys(p for replica in replicas for p in _reduced(replica)))
        self._buckets = Buckets([], self.group, WIDTH, self.device)
        self._expected = 0
        self._sent = False
        self._factor = 1.0
        self._reduces = True

    @contextmanager
    def apart(self, *, training: bool) -> Iterator[None]:
        """Let the replicas run without collectives, as long as the block lasts.

        Args:
            training: Whether a step is made: all ranks come, and get the buffers of the first where replicas want that.

        Raises:
            ArgumentTypeError: The replica does something with gradients that cannot be done for it.
        """
        for replica in self._replicas:
            if obstacle := replica_obstacle(replica):
                raise ArgumentTypeError(
                    f"Guard: the model has {obstacle}.",
                    why="the guard adds the gradients of all ranks itself, and would not make use of it.",
                    fix="for batch in guard.batches(loader): ...   # instead of a join context; no hooks",
                )
        self._reduces = all(replica.require_backward_grad_sync for replica in self._replicas)
        self._sent = False
        if training:
            self._choose_buckets()
            with self.talking():
                for replica in self._replicas:
                    sync_buffers(replica)
        with ExitStack() as stack:
            for replica in self._replicas:
                stack.enter_context(alone_in_replica(replica))
            yield

    def meet(self, size: int, terms: Any) -> None:
        """Make sure, once, that all ranks have the same parameters and terms, and count their samples.

        Args:
            size: How many samples this rank has.
            terms: What must be the same, as a text.

        Raises:
            ArgumentValueError: They differ.
        """
        if self._expected:
            return
        self.agreed(signature(self._trained()), "parameters")
        self.agreed(terms, "arguments")
        self._expected = max(sum(self.gather(size)), 1)

    def before_backward(self, size: int, state: TrainingState) -> None:
        """Send what is ready while backward runs."""
        if self._reduces:
            self._sent = True
            self._buckets.listen(size / self._expected, state.earlier(), 1 / self.world_size)

    def check(self, usual: FiniteCheck) -> FiniteCheck:
        """Look for NaN and Inf where gradients are copied for sending anyway."""
        return _CheckOfSent(usual, self._buckets) if self._reduces else usual

    def withdraw(self) -> None:
        """Send zeros in place of what has not been sent."""
        if self._sent:
            self._buckets.withdraw()

    def exchange(self, share: Share, state: TrainingState, *, in_haste: bool = False) -> Totals:
        """Add up what all ranks tell, and, unless gradients are being accumulated, the gradients.

        Args:
            share: What this rank tells.
            state: Its gradients.
            in_haste: Whether not to wait long for the others.

        Returns:
            What all ranks tell.

        Raises:
            OtherRankError: Another rank is gone.
        """
        if not self._reduces:
            totals = self.add_up(share, (), in_haste=in_haste)
            self._expected = totals.kept or self._expected
            return totals
        buckets, earlier = self._buckets, state.earlier()
        weight = share.kept / self._expected
        if self._sent:
            buckets.stop(weight)
        else:
            buckets.begin(weight, earlier, 1 / self.world_size)
        share.stale, share.earlier = buckets.stale, bool(earlier)
        share.write(buckets.numbers, [p.grad is not None or p in earlier for p in buckets.parameters])
        with self.talking():
            buckets.finish(empty=share.failed, limit=FAREWELL if in_haste else None)
            totals = Totals.read(buckets.numbers)
            self._factor = self._expected / max(totals.kept, 1)
            if totals.kept and not totals.failed:
                if totals.stale or (totals.earlier and totals.kept != self._expected):
                    buckets.begin(share.kept / totals.kept, earlier, 1 / self.world_size)
                    buckets.finish()
                    self._factor = 1.0
                self._expected = totals.kept
        return totals

    def settle(self, share: Share, totals: Totals, state: TrainingState) -> None:
        """Write the mean gradients of all ranks; while accumulating, this rank's part in them.

        Args:
            share: What this rank told.
            totals: What all ranks told.
            state: Where gradients are.
        """
        if self._reduces:
            self._buckets.collect(self._factor, totals.present)
            state.add_earlier_gradients(without=self._buckets.parameters)
        else:
            scale_and_add(self._trained(), share.kept * self.world_size / totals.kept, state)

    def _choose_buckets(self) -> None:
        """Make buffers for what is trained now; freezing something makes others."""
        trained = self._trained()
        known = self._buckets.parameters
        if len(trained) != len(known) or not all(map(operator.is_, trained, known)):
            self._buckets = Buckets(trained, self.group, WIDTH + len(trained), self.device)

    def _trained(self) -> list[torch.Tensor]:
        return [parameter for parameter in self._parameters if parameter.requires_grad]


class _CheckOfSent(FiniteCheck):
    """Looks at gradients in the buffers that they are sent in; at other times and for others the usual way.

    Args:
        usual: The usual way.
        buckets: The buffers.
    """

    def __init__(self, usual: FiniteCheck, buckets: Buckets) -> None:
        super().__init__()
        self._usual = usual
        self._buckets = buckets

    def has_nonfinite(self, gradients: list[torch.Tensor], loss: torch.Tensor | None = None) -> bool:
        """Tell whether anything is not finite; arguments as for `FiniteCheck.has_nonfinite`."""
        if not self._buckets.listening:
            return self._usual.has_nonfinite(gradients, loss)
        if not self._buckets.looks_finite():
            # If the gradients are not to blame, their weight is, or the sum; the next round has smaller weights.
            self._buckets.stale = True
            return self._usual.has_nonfinite(gradients, loss)
        own = {id(parameter.grad) for parameter in self._buckets.parameters}
        others = [gradient for gradient in gradients if id(gradient) not in own]
        return bool(others or loss is not None) and self._usual.has_nonfinite(others, loss)


def _reduced(replica: Replica) -> list[torch.nn.Parameter]:
    ignored = replica.parameters_to_ignore
    return [parameter for name, parameter in replica.module.named_parameters() if name not in ignored]


def scale_and_add(parameters: Sequence[torch.Tensor], factor: float, state: TrainingState) -> None:
    """Multiply new gradients, then add the earlier ones.

    Args:
        parameters: Whose gradients.
        factor: What they are multiplied with.
        state: Knows the earlier ones.
    """
    if factor != 1:
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.grad.mul_(factor)
    state.add_earlier_gradients()


def signature(parameters: Sequence[torch.Tensor]) -> str:
    """Give a short text that is the same for parameters of the same shapes and dtypes."""
    shapes = [(tuple(parameter.shape), str(parameter.dtype)) for parameter in parameters]
    elements = sum(parameter.numel() for parameter in parameters)
    return f"{len(shapes)} tensors, {elements} elements, {hashlib.sha256(repr(shapes).encode()).hexdigest()[:8]}"
