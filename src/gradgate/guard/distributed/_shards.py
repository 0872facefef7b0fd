"""Ranks that each have a part of every parameter, in FSDP2 (`fully_shard`)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import distributed

from gradgate._finite import FiniteCheck
from gradgate._state import TrainingState
from gradgate._torch_private import alone_in_shards, reduce_shards
from gradgate.guard.distributed._ranks import Ranks, RankTotals, Share
from gradgate.guard.distributed._replicas import scale_and_add, signature


class Shards(Ranks):
    """The agreement of ranks that hold shards of a model."""

    has_whole_weights = False  # between steps; and `state_dict` in the middle of one would take them apart

    def __init__(self, roots: Sequence[Any], group: distributed.ProcessGroup | None, state: TrainingState) -> None:
        self._roots = list(roots)
        self._state = state
        super().__init__(group, next(iter(roots[0].parameters())).device)
        self._met = False

    @contextmanager
    def apart(self, *, training: bool) -> Iterator[None]:
        """Gather the whole parameters; from then on the model runs without collectives, as long as the block lasts."""
        with ExitStack() as stack:
            with self.talking():
                stack.enter_context(alone_in_shards(self._roots))
            self._state.refresh()
            yield

    def meet(self, size: int, terms: Any) -> None:
        """Make sure, once, that all ranks have the same parameters and terms."""
        if not self._met:
            self.agreed(signature(self._trained()), "parameters")
            self.agreed(terms, "arguments")
            self._met = True

    def before_backward(self, size: int, state: TrainingState, *, by_total: bool) -> None:
        """Send nothing while backward runs: how much each rank weighs is not known yet."""

    def check(self, usual: FiniteCheck) -> FiniteCheck:
        """Look for NaN and Inf in the usual way."""
        return usual

    def withdraw(self) -> None:
        """Do nothing: nothing was sent."""

    def exchange(self, share: Share, state: TrainingState, *, in_haste: bool = False) -> RankTotals:
        """Add up what all ranks tell."""
        return self.add_up(share, [parameter.grad is not None for parameter in self._trained()], in_haste=in_haste)

    def settle(self, share: Share, totals: RankTotals, state: TrainingState) -> None:
        """Reduce the mean gradients of all ranks to their shards; while accumulating, keep this rank's part in them."""
        trained = self._trained()
        for place, parameter in enumerate(trained):
            if parameter.grad is None and (totals.present is None or totals.present[place]):
                parameter.grad = torch.zeros_like(parameter)
        # FSDP divides by the number of ranks.
        scale_and_add(trained, share.weight(totals.kept, self.world_size), state)
        with self.talking():
            reduce_shards(self._roots)

    def _trained(self) -> list[torch.Tensor]:
        return [parameter for root in self._roots for parameter in root.parameters() if parameter.requires_grad]
