"""What a guarded call returns, the counts of a run, and incidents: recorded, logged, handed over, shown, refused."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from gradgate._loader_link import give_to
from gradgate._payload import LIMIT
from gradgate._text import html_table, incident_html, log_line, user_level
from gradgate.errors import ArgumentValueError, GradgateError, LedgerError, LedgerWarning
from gradgate.guard._trial import StepFault
from gradgate.ledger import Ledger
from gradgate.records import Incident, Sink

if TYPE_CHECKING:
    from gradgate.guard._guard import Guard

# --- Tables ---------------------------------------------------------------------------------------------------------


SHOWN = 20
WIDEST = 60


def incident_table(incidents: Sequence[Incident]) -> str:
    ranks = any(incident.world_size > 1 for incident in incidents)
    head = ("rank",) * ranks + ("row", "sample", "stage", "cause", "where", "what")
    table = text_table(head, [(str(one.rank),) * ranks + _cells(one) for one in incidents[:SHOWN]])
    more = len(incidents) - SHOWN
    return f"{table}\n... and {more} more" if more > 0 else table


def text_table(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(head, *lines, strict=True)]
    return "\n".join("  ".join(map(str.ljust, line, widths)).rstrip() for line in [head, *lines])


def incident_line(incident: Incident) -> str:
    row, sample, stage, cause, where, what = _cells(incident)
    who = f"sample {sample} (row {row})" if incident.sample_id is not None else f"row {row}"
    who = f"refused because of {who}" if "refused" in incident.details else f"dropped {who}"
    if incident.transient and "refused" not in incident.details:
        who = "a fault that did not come again, nothing dropped"
    place = "" if incident.where is None else f" at {where}"
    step = "" if incident.step is None else f"step {incident.step}: "
    return f"{step}{who}: {cause} in {incident.module or stage}{place}{': ' if what else ''}{what}"


def _cells(incident: Incident) -> tuple[str, ...]:
    message = " ".join(incident.message.split())
    if incident.exception_type is not None:
        message = f"{incident.exception_type.rpartition('.')[2]}: {message}"
    return (
        "-" if incident.row is None else str(incident.row),
        incident.sample_id or "-",
        incident.stage,
        incident.cause,
        incident.where or "-",
        message if len(message) <= WIDEST else f"{message[: WIDEST - 3]}...",
    )


# --- Results --------------------------------------------------------------------------------------------------------


class GuardResult:
    """What `Guard.backward` returns.

    Attributes:
        loss: The mean loss over the kept samples, detached, 0-dim.
        losses: One loss for each kept sample, detached, if the loss function gave them.
        kept: The rows that took part; index with it: `batch[result.kept]`.
        dropped: One incident for each row that did not.
        stepped: Whether the optimizer, and a scheduler with it, should step: a sample was kept, on any rank.
        exact: Whether gradients, buffers, random state and loss are bit-identical to those of the same call on the
            batch without the dropped samples. Where a batch was split for lack of memory: equal to those of the whole
            batch up to the rounding of sums.
        reason: Why they may not be; empty where they are.
        transient: What went wrong once and did not come again; nothing was dropped for it.
        clipped: How many samples had a gradient longer than `Guard(clip_samples=...)`.
    """

    # Made in every step, so by hand: a frozen dataclass takes five times as long, a list of all rows even longer.
    __slots__ = ("_kept", "_loss", "clipped", "dropped", "exact", "losses", "reason", "transient")

    def __init__(
        self,
        loss: torch.Tensor,
        losses: torch.Tensor | None,
        kept: Sequence[int],
        incidents: Sequence[Incident] = (),
        reasons: Iterable[str] = (),
        clipped: int = 0,
    ) -> None:
        self._loss = loss
        self.losses = losses
        self._kept = kept
        self.dropped = tuple(incident for incident in incidents if not incident.transient) if incidents else ()
        self.transient = tuple(incident for incident in incidents if incident.transient) if incidents else ()
        self.reason = "; ".join(dict.fromkeys(reasons))
        self.exact = not self.reason
        self.clipped = clipped

    @property
    def loss(self) -> torch.Tensor:
        self._loss.__dict__.update(_LOSS_HAS)
        return self._loss

    @property
    def kept(self) -> list[int]:
        if not isinstance(self._kept, list):
            self._kept = list(self._kept)
        return self._kept

    @property
    def stepped(self) -> bool:
        return len(self._kept) > 0 or not self._loss.isnan().item()

    def __repr__(self) -> str:
        kept = f"kept={len(self._kept)} rows, dropped={len(self.dropped)}"
        return f"GuardResult(loss={self.loss.item():g}, {kept}, exact={self.exact})"

    def _repr_html_(self) -> str:
        kept, dropped = len(self._kept), len(self.dropped)
        exact = "exact" if self.exact else f"not exact: {self.reason}"
        title = f"loss {self.loss.item():g}; {kept} of {kept + dropped} samples kept; {exact}"
        return incident_html(title, self.dropped) if dropped else html_table(title)


def _backward(*args: object, **kwargs: object) -> NoReturn:
    raise GradgateError(
        "result.loss.backward(): the gradients are already there.",
        why="guard.backward(batch, loss_fn) has run forward, loss and backward; result.loss is detached.",
        fix="optimizer.step()   # right after result = guard.backward(batch, loss_fn)",
    )


# On the tensor itself, which stays a plain one. Its state is empty, so that torch.save writes no function with it.
_LOSS_HAS = {"backward": _backward, "__getstate__": lambda: None}


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
        line, rows = self._line(), self._rows()
        return f"{line}\n{text_table(('cause', 'dropped'), rows)}" if rows else line

    def _repr_html_(self) -> str:
        rows = self._rows()
        return html_table(self._line(), ("cause", "dropped") if rows else (), rows, tones=["bad"] * len(rows))

    def _rows(self) -> list[tuple[str, str]]:
        return [(cause, str(count)) for cause, count in sorted(self.causes.items(), key=lambda item: -item[1])]

    def _line(self) -> str:
        share = 100 * self.dropped / max(self.samples, 1)
        return (
            f"{_many(self.steps, 'step')} with {_many(self.samples, 'sample')}: "
            f"{_many(self.dropped, 'sample')} dropped in {_many(self.bad_steps, 'step')} ({share:.3g} %), "
            f"{_many(self.transient, 'transient fault')}"
        )


def _many(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"


# --- Counts of a run ------------------------------------------------------------------------------------------------


_OF_WINDOW = {"window", "has_means"}


def mean_of(sums: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return the mean of a total and its count; 0 where the count is 0."""
    total, count = sums.unbind()
    return (total / count).nan_to_num_(0.0, 0.0, 0.0).to(like.dtype)  # both are finite


@dataclass(slots=True)
class Tally:
    """The counts of a run."""

    steps: int = 0
    samples: int = 0
    bad_steps: int = 0
    in_a_row: int = 0
    dropped: int = 0
    transient: int = 0
    causes: dict[str, int] = field(default_factory=dict)
    window: torch.Tensor | None = None
    has_means: bool = False

    def after_step(
        self, size: int, *, bad: bool, incidents: Sequence[Incident] = (), sums: torch.Tensor | None = None
    ) -> Tally:
        """Return the counts after a step; these stay as they are, so that a step is counted in one assignment."""
        return replace(
            self.after_incidents(incidents),
            window=self.window if sums is None else sums if self.window is None else self.window + sums,
            has_means=sums is None or (self.has_means and self.window is not None),
            steps=self.steps + 1,
            samples=self.samples + size,
            bad_steps=self.bad_steps + bad,
            in_a_row=self.in_a_row + 1 if bad else 0,
        )

    def after_incidents(self, incidents: Sequence[Incident]) -> Tally:
        """Return the counts with what was dropped, and with what was not because it did not come again."""
        if not incidents:
            return self
        causes = Counter(incident.cause for incident in incidents if not incident.transient)
        dropped = causes.total()
        return replace(
            self,
            dropped=self.dropped + dropped,
            transient=self.transient + len(incidents) - dropped,
            causes=dict(Counter(self.causes) + causes),
        )

    def summary(self) -> Summary:
        counts = self.steps, self.samples, self.bad_steps, self.dropped, self.transient
        return Summary(*counts, causes=dict(self.causes))

    def state_dict(self) -> dict[str, Any]:
        """Return the counts as plain values; a window that is open ends with its gradients, which no checkpoint has."""
        return {name: value for name, value in asdict(self).items() if name not in _OF_WINDOW}

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Tally:
        expected = {entry.name for entry in fields(cls)} - _OF_WINDOW
        if set(state) != expected:
            what = f"Guard.load_state_dict(): the entries are {sorted(map(str, state))}."
            fix = 'guard.load_state_dict(checkpoint["guard"])   # saved as guard.state_dict()'
            raise ArgumentValueError(what, why=f"the state of a guard has the entries {sorted(expected)}.", fix=fix)
        return cls(**{**state, "causes": dict(state["causes"])})


# --- Records --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Wishes:
    """What those who keep incidents want besides."""

    payload: int | None
    snapshot: int | None

    @classmethod
    def of(cls, sinks: Sequence[Sink], payload: bool) -> Wishes:
        ledgers = [sink for sink in sinks if isinstance(sink, Ledger)]
        samples = [ledger.payload_limit for ledger in ledgers if payload or ledger.payload]
        if payload and len(ledgers) < len(sinks):
            samples.append(LIMIT)
        weights = [ledger.snapshot_limit for ledger in ledgers if ledger.snapshot]
        return cls(max(samples, default=None), max(weights, default=None))


def log(incidents: Iterable[Incident]) -> None:
    for incident in incidents:
        log_line(incident_line(incident))


def hand_over(
    guard: Guard, incidents: Sequence[Incident], samples: dict[str, bytes] | None, snapshot: bytes | None
) -> None:
    for sink in guard._sinks:
        if isinstance(sink, Ledger):
            wanted = samples if guard.payload or sink.payload else None
            sink.record_many(incidents, wanted, snapshot=snapshot if sink.snapshot else None)
        else:
            give_to(sink, incidents, samples if guard.payload else None)


def incident_of(fault: StepFault, common: Mapping[str, Any], **more: Any) -> Incident:
    """Make the incident of a fault, with what is known besides, or better."""
    known = {name: getattr(fault, name) for name in ("stage", "cause", "exception_type", "message", "where")}
    return Incident(**{**known, **common, **more})


# --- Losses of samples ----------------------------------------------------------------------------------------------


class LossHistory:
    """Gathers the losses of samples for a ledger; they are read by the host when they are written."""

    EVERY = 64

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._waiting: list[tuple[list[Any], torch.Tensor]] = []

    def add(self, ids: Sequence[Any] | torch.Tensor | None, kept: Sequence[int], losses: torch.Tensor) -> None:
        """Take the losses of the kept samples of a step, if it is known who they are."""
        if ids is None:
            return
        names = ids.tolist() if isinstance(ids, torch.Tensor) else ids
        self._waiting.append(([names[row] for row in kept], losses))
        if len(self._waiting) >= self.EVERY:
            self.write()

    def write(self) -> None:
        """Write what is waiting; a ledger that fails costs these losses and a warning, not the training."""
        waiting, self._waiting = self._waiting, []
        if not waiting:
            return
        pairs = [pair for names, losses in waiting for pair in zip(names, losses.tolist(), strict=True)]
        try:
            self._ledger.record_losses(pairs)
        except LedgerError as error:
            warnings.warn(f"losses of {len(waiting)} steps are lost: {error}", LedgerWarning, stacklevel=user_level())
