"""A training run over many steps: its losses, its learning rates, and what only several steps together show."""

from __future__ import annotations

import gc
import math
from collections import defaultdict, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from statistics import median

import torch

from gradgate._names import listed
from gradgate._source import Location
from gradgate._torch_private import undispatched
from gradgate.doctor._case import finding_at
from gradgate.doctor._numerics import is_readable, local_values, norm_of, total
from gradgate.records import Finding

_WINDOW = 20  # the losses that a loss is compared with
_RUNS_AWAY = 1e3  # times the recent ones: whatever the update was
_GROWS = 10.0  # times the recent ones: if the update was larger than half of the weights, or the loss ends as NaN
_LARGE_UPDATE = 0.5


@dataclass
class _Rates:
    """The learning rates of one optimizer."""

    location: Location | None
    steps: int = 0
    last: float = 0.0
    largest: float = 0.0
    scheduled: bool = False


@dataclass(frozen=True)
class Runaway:
    """A loss that ran away: the update since which it did, and the loss before and after."""

    update: int
    before: float
    after: float


@dataclass
class History:
    """Collects one run."""

    updates: int = 0
    backwards: int = 0
    last_backward: Location | None = None
    last_update: Location | None = None
    scaled: bool = False
    largest_move: float = 0.0  # the largest update, relative to the weights
    _losses: defaultdict[Location | None, list[tuple[int, float | torch.Tensor]]] = field(
        default_factory=lambda: defaultdict(list)
    )
    _rates: dict[int, _Rates] = field(default_factory=dict)
    _before: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)

    def backward(self, loss: float | torch.Tensor | None, location: Location | None) -> None:
        """Record a backward pass; a tensor is read later, so that nothing waits for it."""
        self.backwards += 1
        self.last_backward = location
        if loss is not None:
            self._losses[location].append((self.updates, loss))

    def update(self, optimizer: torch.optim.Optimizer | None, location: Location | None) -> None:
        """Record an update: a step of an optimizer, or one by hand."""
        self.updates += 1
        self.last_update = location or self.last_update
        if optimizer is None:
            return
        rates = self._rates.setdefault(id(optimizer), _Rates(location))
        groups = [group for group in optimizer.param_groups if any(p.grad is not None for p in group["params"])]
        rates.steps += bool(groups)
        rates.last = max((float(group.get("lr", math.nan)) for group in groups), default=rates.last)
        rates.largest = max(rates.largest, abs(rates.last)) if not math.isnan(rates.last) else math.nan
        rates.scheduled |= any("initial_lr" in group for group in groups)

    def weights_before(self, optimizer: torch.optim.Optimizer) -> None:
        """Copy the weights that an optimizer is about to change."""
        held = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None and is_readable(p)]
        with undispatched(), torch.no_grad():
            self._before = [(p, p.detach().clone()) for p in held]

    def weights_after(self) -> None:
        """Measure the update against the weights."""
        with undispatched(), torch.no_grad():
            moved = math.hypot(*(norm_of(p - old) for p, old in self._before))
            size = math.hypot(*(norm_of(old) for _, old in self._before))
        self._before = []
        if size and math.isfinite(moved):
            self.largest_move = max(self.largest_move, moved / size)

    def losses(self) -> Iterator[float]:
        """Yield the loss of each backward pass, line by line."""
        for losses in self._losses.values():
            yield from (float(loss) for _, loss in losses)

    def findings(self, learned: set[int]) -> Iterator[Finding]:
        """Yield what only the whole run shows; `learned` has the `id` of what got a gradient, if the run has ended."""
        yield from self._never_updated(learned)
        yield from self._without_rate()
        yield from self._running_away()

    def _never_updated(self, learned: set[int]) -> Iterator[Finding]:
        if self.updates or not self.backwards or self.scaled:
            return
        optimizers = [thing for thing in gc.get_objects() if issubclass(type(thing), torch.optim.Optimizer)]
        if any(id(p) in learned for x in optimizers for group in x.param_groups for p in group["params"]):
            yield finding_at(
                self.last_backward,
                "GG905",
                "error",
                "optimizer.step() is never called",
                reason=f"backward() ran {self.backwards} time{'s' * (self.backwards > 1)} and gave gradients to what "
                "the optimizer holds, but nothing changed the weights.",
                fix="optimizer.step()     # after loss.backward()",
            )

    def _without_rate(self) -> Iterator[Finding]:
        for rates in self._rates.values():
            if rates.steps and rates.largest == 0 and (rates.steps > 2 or not rates.scheduled):
                yield finding_at(
                    rates.location,
                    "GG906",
                    "error",
                    "the learning rate is 0: no weight changes",
                    reason=f"It was 0 in {'each of the' if rates.steps > 1 else 'the'} {rates.steps} "
                    f"step{'s' * (rates.steps > 1)} of this optimizer"
                    + (", as its scheduler set it." if rates.scheduled else "."),
                    fix="torch.optim.AdamW(model.parameters(), lr=1e-3)"
                    if not rates.scheduled
                    else "look at the scheduler: what it multiplies the learning rate by, and how often step() runs",
                )

    def _running_away(self) -> Iterator[Finding]:
        for losses in self._losses.values():
            found = runaway([(n, float(loss)) for n, loss in losses], self.largest_move)
            if found is None:
                continue
            lr = max((rates.last for rates in self._rates.values()), default=None)
            what = f"the learning rate {lr:g} is too large" if lr is not None else "the update is too large"
            yield finding_at(
                self.last_update,
                "GG907",
                "error",
                f"the loss runs away since step {found.update} ({found.before:.3g} -> {found.after:.3g}): {what}",
                reason=f"After update {found.update} the loss grows from step to step: each update goes too far."
                + (
                    f" An update was {self.largest_move:.3g} times as large as the weights." * (self.largest_move > 0.5)
                ),
                fix=f"lr={lr / 100:g}     # and torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)"
                if lr is not None
                else "param -= 0.01 * lr * param.grad     # a learning rate a hundred times smaller",
            )
            return


def runaway(losses: list[tuple[int, float]], largest_move: float = 0.0) -> Runaway | None:
    """Find the update since which a loss ran away; None for a loss that only wanders."""
    sizes = [abs(loss) for _, loss in losses]
    for number in range(1, len(sizes)):
        recent = sizes[max(0, number - _WINDOW) : number]
        early = max(1.0, median(recent[: max(1, len(recent) // 2)]))
        size = sizes[number]
        ends_bad = not math.isfinite(size) and recent[-1] > _GROWS * early
        moved = largest_move > _LARGE_UPDATE and all(x > _GROWS * early for x in sizes[number : number + 3])
        if size > _RUNS_AWAY * early or ends_bad or (moved and size > _GROWS * early):
            first = next(i for i in range(max(0, number - _WINDOW), number + 1) if not sizes[i] <= 3 * early)
            peak = max((x for x in sizes[first:] if math.isfinite(x)), default=math.inf)
            return Runaway(losses[first][0], early if first == 0 else sizes[first - 1], peak)
    return None


# --- what a watch sees ------------------------------------------------------------------------------------------------

_ENOUGH = 20  # norms before a norm can be out of their range
_OUT_OF_RANGE = 10.0  # times 1.4826 MAD over the median, and times the median itself
_STILL = 100  # steps after which weights are compared with what they were


class GradientLog:
    """The gradient norm of each step and, now and then, the weights: one more pass over the gradients."""

    def __init__(self) -> None:
        self.updates = 0
        self._norms: deque[float] = deque(maxlen=100)
        self._series: list[tuple[int, float]] = []
        self._weights: dict[int, float] = {}
        self._ran_away = False

    def observe(self, held: list[torch.Tensor], names: dict[int, str], lr: float | None) -> Iterator[Finding]:
        """Record the gradients before an update, and yield what is new: a norm out of range, or weights that stay."""
        local = [local_values(p.grad) for p in held if p.grad is not None]
        with undispatched(), torch.no_grad():
            norm = float(torch.nn.utils.get_total_norm([x for x in local if is_readable(x)]))
        if math.isfinite(norm):
            yield from self._out_of_range(norm, held, names)
            yield from self._running_away(norm, lr)
            self._norms.append(norm)
        self.updates += 1
        if self.updates % _STILL == 1:
            yield from self._not_moved(held, names)

    def _out_of_range(self, norm: float, held: list[torch.Tensor], names: dict[int, str]) -> Iterator[Finding]:
        if len(self._norms) < _ENOUGH:
            return
        middle = median(self._norms)
        spread = 1.4826 * median(abs(x - middle) for x in self._norms)
        if norm > middle + _OUT_OF_RANGE * spread and norm > _OUT_OF_RANGE * middle:
            largest = max(held, key=lambda p: norm_of(local_values(p.grad)) if p.grad is not None else 0.0)
            name = names.get(id(largest), "a parameter")
            yield finding_at(
                None,
                "GG308",
                "warning",
                f"the gradient norm left its range at step {self.updates}: {norm:.3g}, most of it in {name}",
                reason=f"The median of the last {len(self._norms)} steps is {middle:.3g}, the spread {spread:.3g}.",
                fix="torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)     # or look at the batch of this step",
                module=name.rpartition(".")[0] or None,
            )

    def _running_away(self, norm: float, lr: float | None) -> Iterator[Finding]:
        self._series = [*self._series[-2 * _WINDOW :], (self.updates, norm)]
        last = [size for _, size in self._series[-3:]]
        # One large gradient is no trend.
        grows = last == sorted(last) and last[0] > _GROWS * max(1.0, min(size for _, size in self._series))
        found = runaway(self._series) if grows and not self._ran_away else None
        if found is not None:
            self._ran_away = True
            yield finding_at(
                None,
                "GG907",
                "error",
                f"the training runs away since update {found.update}: the gradient norm grows from {found.before:.3g} "
                f"to {found.after:.3g}" + (f" with a learning rate of {lr:g}" if lr is not None else ""),
                reason="Each update goes too far, so that the next gradient is larger.",
                fix=f"lr={lr / 100:g}     # and torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)" if lr else "",
            )

    def _not_moved(self, held: list[torch.Tensor], names: dict[int, str]) -> Iterator[Finding]:
        with undispatched(), torch.no_grad():
            now = {id(p): float(total(local_values(p)).real) for p in held if p.requires_grad and is_readable(p)}
        still = [names[number] for number, size in now.items() if self._weights.get(number) == size and number in names]
        self._weights = now
        if still:
            yield finding_at(
                None,
                "GG309",
                "warning",
                f"{listed(still, 4)} {'has' if len(still) == 1 else 'have'} not moved for {_STILL} steps",
                reason="The optimizer holds it, and its values are the same to the last bit.",
                fix="gg.diagnose(step_fn, model=model)     # names the line that takes the gradient away",
            )
