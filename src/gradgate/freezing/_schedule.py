"""What trains from which epoch or step on: `FreezeSchedule`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal
from weakref import WeakKeyDictionary, ref

import torch
from torch import nn

from gradgate._checks import wrong_type, wrong_value
from gradgate._names import listed
from gradgate._text import html_table
from gradgate._torch_private import OPTIMIZER_HOOKS
from gradgate.errors import ArgumentValueError
from gradgate.freezing._layers import FreezeHandle, Selector, bare, named_parameters, select

_last: WeakKeyDictionary[nn.Module, ref[FreezeSchedule]] = WeakKeyDictionary()
"""The schedule of each model: a schedule decides about all of it, so only the newest one counts."""


class FreezeSchedule:
    """Thaws a model part by part: each part learns from its epoch (or step) on, all else is frozen.

    Build the optimizer over all of `model.parameters()`. The state of the schedule is its position: after
    `load_state_dict`, or `set_epoch` with any number, exactly that epoch's parts learn. Create it after
    DistributedDataParallel, which must know every parameter that will learn. A new schedule replaces an old one.

    Args:
        model: The model.
        plan: For each epoch (or step), from 0 on: what learns from then on, as a list of selectors of `freeze`. What
            is in no list never learns.
        by: Whether the numbers are epochs or steps.
        statistics: Whether running statistics of frozen parts stop.
        lr: For some numbers of the plan, the learning rate that what thaws there begins with. It grows until it
            reaches that of its parameter group, which stays as it is.
        growth: By how much that learning rate is multiplied each epoch (or step).

    Attributes:
        at: The present epoch or step; 0 at first.
        handle: What is frozen now; None where nothing is.

    Raises:
        NothingMatchedError: A selector of the plan matches nothing.
        ArgumentTypeError: The plan is no mapping from numbers to lists, or `lr` none from numbers to learning rates.
        ArgumentValueError: A negative number, an empty plan, an `lr` outside of the plan, or a `growth` not above 1.

    Examples:
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1))
        >>> schedule = gg.FreezeSchedule(model, {0: ["1.*"], 3: ["0.*"]})
        >>> model[0].weight.requires_grad, model[1].weight.requires_grad
        (False, True)
        >>> schedule.set_epoch(3)
        >>> model[0].weight.requires_grad
        True
    """

    def __init__(
        self,
        model: nn.Module,
        plan: Mapping[int, Sequence[Selector]],
        *,
        by: Literal["epoch", "step"] = "epoch",
        statistics: bool = True,
        lr: Mapping[int, float] | None = None,
        growth: float = 2.0,
    ) -> None:
        self._model = bare(model, "FreezeSchedule")
        _check(plan, by, lr, growth)
        self._by = by
        self._lr, self._growth = dict(lr or {}), growth
        self._statistics = statistics
        self._learns = {at: select(self._model, tuple(plan[at]), "FreezeSchedule") for at in sorted(plan)}
        self.handle: FreezeHandle | None = None
        self.at = 0
        self._apply(0)
        if self._lr:
            before, after = OPTIMIZER_HOOKS
            before.setdefault(__name__, _before_step)
            after.setdefault(__name__, _after_step)

    def __repr__(self) -> str:
        learning, later = len(self.learning()), [str(at) for at in self._learns if at > self.at]
        more = f"; more from {self._by} {', '.join(later)} on" if later else ""
        more += "".join(f"; what thawed at {at} with lr <= {rate:.3g}" for at, rate in self._rates().items())
        total = len(named_parameters(self._model))
        return f"FreezeSchedule({self._by} {self.at}: {learning} of {total} parameters learn{more})"

    def _repr_html_(self) -> str:
        rows = [(f"{self._by} {at}", "\n".join(names)) for at, names in self._learns.items()]
        tones = ["good" if at <= self.at else "" for at in self._learns]
        return html_table(repr(self), ("from", "these learn too"), rows, tones=tones)

    def _rates(self) -> dict[int, float]:
        return {at: rate * self._growth ** (self.at - at) for at, rate in self._lr.items() if at <= self.at}

    def _limits(self) -> dict[nn.Parameter, float]:
        known, rates = named_parameters(self._model), self._rates()
        first = {name: at for at in reversed(self._learns) for name in self._learns[at]}  # when each one thaws
        return {known[name]: rates[at] for name, at in first.items() if at in rates and name in known}

    def set_epoch(self, epoch: int) -> None:
        """Thaw what learns in this epoch, counted from 0, and freeze the rest; raise if the schedule goes by steps."""
        self._set("epoch", epoch)

    def set_step(self, step: int) -> None:
        """Thaw what learns at this step, counted from 0, and freeze the rest; raise if the schedule goes by epochs."""
        self._set("step", step)

    def learning(self) -> list[str]:
        """Return the names of what learns now by the plan, in the model's order."""
        now = {name for at, names in self._learns.items() if at <= self.at for name in names}
        return [name for name in named_parameters(self._model) if name in now]

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the schedule and its plan by names, as plain values, to save them with the model."""
        state = {"by": self._by, "at": self.at, "learns": {at: list(names) for at, names in self._learns.items()}}
        return {**state, "lr": dict(self._lr), "growth": self._growth} if self._lr else state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to the position of a saved schedule; raise ArgumentValueError if that had another plan or other rates."""
        learns = {int(at): list(names) for at, names in state["learns"].items()}
        lr = {int(at): rate for at, rate in state.get("lr", {}).items()}
        growth = state.get("growth", self._growth)
        differing = sorted(at for at in {*learns, *self._learns} if learns.get(at) != self._learns.get(at))
        what = ""
        if differing or state["by"] != self._by:
            what = f"another plan, at {state['by']} {listed(differing)}" if differing else f"by={state['by']!r}"
        elif (lr, growth) != (self._lr, self._growth):
            what = f"lr={lr}, growth={growth}"
        if what:
            why = "the run would go on with other parts learning, or at other rates, than it had."
            fix = f"gg.FreezeSchedule(model, the_plan_of_that_run, by={state['by']!r}, lr={lr}, growth={growth})"
            raise ArgumentValueError(f"load_state_dict(): the saved schedule has {what}.", why=why, fix=fix)
        self._apply(int(state["at"]))

    def _set(self, by: str, at: Any) -> None:
        if by != self._by:
            why = "the numbers of its plan mean something else."
            fix = f"schedule.set_{self._by}(0)   # or by={by!r} in FreezeSchedule"
            raise ArgumentValueError(f"set_{by}(): this schedule goes by {self._by}s.", why=why, fix=fix)
        if not isinstance(at, int) or isinstance(at, bool) or at < 0:
            raise wrong_value(at, by, f"set_{by}", f"{by}s are counted from 0.", f"schedule.set_{by}(0)")
        # Steps come often and rarely change anything.
        if any((number <= at) != (number <= self.at) for number in self._learns):
            self._apply(at)
        self.at = at

    def _apply(self, at: int) -> None:
        before, self.at = self.handle, at
        learning = set(self.learning())
        names = [name for name in named_parameters(self._model) if name not in learning]
        label = f"FreezeSchedule at {self._by} {at}"
        # The new freeze comes before the old one goes, so that nothing is free in between.
        self.handle = FreezeHandle(self._model, names, label, statistics=self._statistics) if names else None
        if before is not None:
            before.thaw()
        other = _last.get(self._model, lambda: None)()
        if other is not None and other is not self and other.handle is not None:
            other.handle.thaw()
        _last[self._model] = ref(self)


def _check(plan: Any, by: Any, lr: Any, growth: Any) -> None:
    function, numbers = "FreezeSchedule", (int, float)
    if by not in ("epoch", "step"):
        why = "the numbers of the plan are epochs or steps."
        raise wrong_value(by, "by", function, why, 'gg.FreezeSchedule(model, plan, by="step")')
    fix = 'gg.FreezeSchedule(model, {0: ["head.*"], 3: ["layer4.*"]})'
    if not isinstance(plan, Mapping) or not all(
        isinstance(at, int) and isinstance(what, list | tuple) and what for at, what in plan.items()
    ):
        raise wrong_type(plan, "plan", function, "it says from which number on which list of selectors learns.", fix)
    if not plan or min(plan) < 0:
        what = f"FreezeSchedule(): `plan` {'is empty' if not plan else f'has the number {min(plan)}'}."
        why = "nothing would ever learn." if not plan else "epochs and steps are counted from 0."
        raise ArgumentValueError(what, why=why, fix=fix)
    fix = f"lr={{{max(plan)}: 1e-5}}"
    if lr is not None and not (
        isinstance(lr, Mapping) and all(isinstance(rate, numbers) and 0 < rate < math.inf for rate in lr.values())
    ):
        raise wrong_type(lr, "lr", function, "it has a positive learning rate for some numbers of the plan.", fix)
    if other := [at for at in lr or () if at not in plan]:
        why = f"nothing thaws there; the plan has {listed(sorted(plan))}."
        raise ArgumentValueError(f"FreezeSchedule(): `lr` has the number {other[0]!r}.", why=why, fix=fix)
    if not (isinstance(growth, numbers) and 1 < growth < math.inf):
        why = "a learning rate that is multiplied by it must reach that of the others."
        raise wrong_value(growth, "growth", function, why, "growth=2.0")


# --- Learning rates inside an optimizer's step ------------------------------------------------------------------------

_whole: WeakKeyDictionary[torch.optim.Optimizer, list[dict[str, Any]]] = WeakKeyDictionary()
"""The parameter groups of the optimizers that step with divided ones now."""


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _before_step(optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Divide parameter groups for one step: what has just thawed has a learning rate of its own."""
    _join(optimizer)  # a step that raised has left them divided
    schedules = [schedule for reference in _last.values() if (schedule := reference()) is not None]
    limits = {id(parameter): rate for schedule in schedules for parameter, rate in schedule._limits().items()}
    groups = [part for group in optimizer.param_groups for part in _divided(group, limits)]
    if all(part is group for part, group in zip(groups, optimizer.param_groups, strict=False)):
        return
    if isinstance(optimizer, torch.optim.LBFGS):
        why = "what thaws cannot have a learning rate of its own there."
        fix = "gg.FreezeSchedule(model, plan)   # without lr="
        raise ArgumentValueError("FreezeSchedule(): L-BFGS moves all parameters along one direction.", why=why, fix=fix)
    _whole[optimizer] = optimizer.param_groups
    optimizer.param_groups = groups


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _after_step(optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    _join(optimizer)


def _divided(group: dict[str, Any], limits: Mapping[int, float]) -> list[dict[str, Any]]:
    lr: Any = group.get("lr")
    parts: dict[float | None, list[torch.Tensor]] = {}
    for parameter in group["params"]:
        limit = limits.get(id(parameter))
        applies = limit is not None and lr is not None and (isinstance(lr, torch.Tensor) or limit < lr)
        parts.setdefault(limit if applies else None, []).append(parameter)
    if set(parts) <= {None}:
        return [group]
    rates = {limit: lr.clamp(max=limit) if isinstance(lr, torch.Tensor) else limit for limit in parts if limit}
    return [{**group, "params": own, "lr": rates[limit] if limit else lr, _FROM: group} for limit, own in parts.items()]


_FROM = "gradgate_divided_from"


def _join(optimizer: torch.optim.Optimizer) -> None:
    """Restore an optimizer's own groups, with what the step has written into the divided ones."""
    if optimizer in _whole:
        for part in optimizer.param_groups:
            if (group := part.get(_FROM)) is not None:
                group.update({key: part[key] for key in part if key not in ("params", "lr", _FROM)})
        optimizer.param_groups = _whole.pop(optimizer)
