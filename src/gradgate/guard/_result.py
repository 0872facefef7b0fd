"""What a guarded step gives back, and what a guarded run looked like."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

import torch

from gradgate.errors import GradgateError
from gradgate.guard._tables import text_table
from gradgate.records import Incident

__all__ = ["GuardResult", "Summary"]


class GuardResult:
    """What `Guard.backward` gives back.

    Attributes:
        loss: The mean loss over the kept samples, detached, 0-dim.
        losses: One loss for each kept sample, detached, if the loss function gave them.
        kept: The rows that took part; index with it: `batch[result.kept]`.
        dropped: One incident for each row that did not.
        exact: Whether gradients, buffers, random state and loss are bit-identical to those of the same call on the
            batch without the dropped samples.
        reason: Why they may not be; empty where they are.
        transient: What went wrong once and did not come again; nothing was dropped for it.
    """

    # Made in every step, so by hand: a frozen dataclass takes five times as long, a list of all rows even longer.
    __slots__ = ("_kept", "_loss", "dropped", "exact", "losses", "reason", "transient")

    def __init__(
        self,
        loss: torch.Tensor,
        losses: torch.Tensor | None,
        kept: Sequence[int],
        dropped: tuple[Incident, ...] = (),
        exact: bool = True,
        reason: str = "",
        transient: tuple[Incident, ...] = (),
    ) -> None:
        self._loss = loss
        self.losses = losses
        self._kept = kept
        self.dropped = dropped
        self.exact = exact
        self.reason = reason
        self.transient = transient

    @property
    def loss(self) -> torch.Tensor:
        """The mean loss over the kept samples, detached, 0-dim."""
        self._loss.__dict__.update(_LOSS_HAS)
        return self._loss

    @property
    def kept(self) -> list[int]:
        """The rows that took part; index with it: `batch[result.kept]`."""
        if not isinstance(self._kept, list):
            self._kept = list(self._kept)
        return self._kept

    def __repr__(self) -> str:
        kept = f"kept={len(self._kept)} rows, dropped={len(self.dropped)}"
        return f"GuardResult(loss={self.loss.item():g}, {kept}, exact={self.exact})"


def _backward(*args: object, **kwargs: object) -> NoReturn:
    raise GradgateError(
        "result.loss.backward(): the gradients are already there.",
        why="guard.backward(batch, loss_fn) has run forward, loss and backward; result.loss is detached.",
        fix="optimizer.step()   # right after result = guard.backward(batch, loss_fn)",
    )


def _no_state() -> None:
    return None


# On the tensor itself, which stays a plain one. Its state is empty, so that torch.save writes no function with it.
_LOSS_HAS = {"backward": _backward, "__getstate__": _no_state}


@dataclass(frozen=True, slots=True)
class Summary:
    """A guarded run in numbers; prints as a table.

    Attributes:
        steps: How many steps were made.
        samples: How many samples they had.
        bad_steps: How many steps had a bad sample.
        dropped: How many samples were dropped.
        transient: How many faults did not come again.
        causes: How many samples were dropped for each cause.

    Examples:
        >>> print(Summary(steps=10, samples=640, bad_steps=1, dropped=2, transient=0, causes={"exception": 2}))
        10 steps with 640 samples: 2 samples dropped in 1 step (0.312 %), 0 transient faults
        cause      dropped
        exception  2
    """

    steps: int
    samples: int
    bad_steps: int
    dropped: int
    transient: int
    causes: dict[str, int]

    def __str__(self) -> str:
        share = 100 * self.dropped / max(self.samples, 1)
        line = (
            f"{_many(self.steps, 'step')} with {_many(self.samples, 'sample')}: "
            f"{_many(self.dropped, 'sample')} dropped in {_many(self.bad_steps, 'step')} ({share:.3g} %), "
            f"{_many(self.transient, 'transient fault')}"
        )
        if not self.causes:
            return line
        rows = [(cause, str(count)) for cause, count in sorted(self.causes.items(), key=lambda item: -item[1])]
        return f"{line}\n{text_table(('cause', 'dropped'), rows)}"


def _many(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"
