"""What trains from which epoch or step on: `FreezeSchedule`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal
from weakref import WeakKeyDictionary, ref

from torch import nn

from gradgate._names import describe, listed
from gradgate.errors import ArgumentTypeError, ArgumentValueError
from gradgate.freezing._layers import FreezeHandle, Selector, bare, freeze_named, named_parameters, select

_last: WeakKeyDictionary[nn.Module, ref[FreezeSchedule]] = WeakKeyDictionary()
"""The schedule of each model: a schedule decides about all of it, so the one that spoke last holds alone."""


class FreezeSchedule:
    """Thaws a model part by part: each part learns from its epoch (or step) on, all else is frozen.

    Build the optimizer over all of `model.parameters()`: what is frozen costs it nothing, and what thaws is there. The
    state of the schedule is where it stands, not what it did: after `load_state_dict`, or `set_epoch` with any
    number, forwards or backwards, exactly that epoch's parts learn. Create it after DistributedDataParallel, which
    must know every parameter that will learn. A new schedule of a model takes the place of its old one.

    Args:
        model: The model.
        plan: For each epoch (or step), from 0 on: what learns from then on, as a list of selectors of `freeze`. What
            is in no list never learns.
        by: Whether the numbers are epochs or steps.
        statistics: Whether running statistics of frozen parts stop.

    Attributes:
        at: The epoch or step it stands at; 0 in the beginning.
        handle: What is frozen now; None where nothing is.

    Raises:
        NothingMatchedError: A selector of the plan matches nothing.
        ArgumentTypeError: The plan is no mapping from numbers to lists.
        ArgumentValueError: A number is negative, or the plan is empty.

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
    ) -> None:
        self._model = bare(model, "FreezeSchedule")
        if by not in ("epoch", "step"):
            raise ArgumentValueError(
                f"FreezeSchedule(): `by` is {describe(by)}.",
                why="the numbers of the plan are epochs or steps.",
                fix='gg.FreezeSchedule(model, plan, by="step")',
            )
        _check_plan(plan)
        self._by = by
        self._statistics = statistics
        self._learns = {at: select(self._model, tuple(plan[at]), "FreezeSchedule") for at in sorted(plan)}
        self.handle: FreezeHandle | None = None
        self.at = 0
        self._apply(0)

    def __repr__(self) -> str:
        learning, later = len(self.learning()), [str(at) for at in self._learns if at > self.at]
        more = f"; more from {self._by} {', '.join(later)} on" if later else ""
        total = len(named_parameters(self._model))
        return f"FreezeSchedule({self._by} {self.at}: {learning} of {total} parameters learn{more})"

    def set_epoch(self, epoch: int) -> None:
        """Let learn what learns in this epoch, and freeze the rest.

        Args:
            epoch: The epoch, from 0 on.

        Raises:
            ArgumentValueError: The schedule goes by steps, or the number is negative.
        """
        self._set("epoch", epoch)

    def set_step(self, step: int) -> None:
        """Let learn what learns at this step, and freeze the rest.

        Args:
            step: The step, from 0 on.

        Raises:
            ArgumentValueError: The schedule goes by epochs, or the number is negative.
        """
        self._set("step", step)

    def learning(self) -> list[str]:
        """Give the names of what the plan lets learn now.

        Returns:
            The names in the model's order.
        """
        now = {name for at, names in self._learns.items() if at <= self.at for name in names}
        return [name for name in named_parameters(self._model) if name in now]

    def state_dict(self) -> dict[str, Any]:
        """Give where the schedule stands, and its plan by names, to be saved with the model.

        Returns:
            Plain values that any checkpoint can frozen.
        """
        return {"by": self._by, "at": self.at, "learns": {at: list(names) for at, names in self._learns.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to where a saved schedule stood.

        Args:
            state: What `state_dict` gave.

        Raises:
            ArgumentValueError: It belongs to another plan.
        """
        learns = {int(at): list(names) for at, names in state["learns"].items()}
        if state["by"] != self._by or learns != self._learns:
            differing = sorted({at for at in {*learns, *self._learns} if learns.get(at) != self._learns.get(at)})
            raise ArgumentValueError(
                "load_state_dict(): the saved schedule has another plan"
                + (f", at {state['by']} {listed(differing)}." if differing else f": it goes by {state['by']}s."),
                why="the run would go on with other parts learning than it had.",
                fix="schedule = gg.FreezeSchedule(model, the_plan_of_that_run)",
            )
        self._apply(int(state["at"]))

    def _set(self, by: str, at: Any) -> None:
        if by != self._by:
            raise ArgumentValueError(
                f"set_{by}(): this schedule goes by {self._by}s.",
                why="the numbers of its plan mean something else.",
                fix=f"schedule.set_{self._by}(0)   # or by={by!r} in FreezeSchedule",
            )
        if not isinstance(at, int) or isinstance(at, bool) or at < 0:
            raise ArgumentValueError(
                f"set_{by}(): `{by}` is {describe(at)}.",
                why=f"{by}s are counted from 0.",
                fix=f"schedule.set_{by}(0)",
            )
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
        self.handle = freeze_named(self._model, names, label, statistics=self._statistics) if names else None
        if before is not None:
            before.thaw()
        other = _last[self._model]() if self._model in _last else None
        if other is not None and other is not self and other.handle is not None:
            other.handle.thaw()
        _last[self._model] = ref(self)


def _check_plan(plan: Any) -> None:
    right = isinstance(plan, Mapping) and all(
        isinstance(at, int) and isinstance(what, list | tuple) and what for at, what in plan.items()
    )
    if not right:
        raise ArgumentTypeError(
            f"FreezeSchedule(): `plan` is {describe(plan)}.",
            why="it says from which number on which list of selectors learns.",
            fix='gg.FreezeSchedule(model, {0: ["head.*"], 3: ["layer4.*"]})',
        )
    if not plan or min(plan) < 0:
        raise ArgumentValueError(
            f"FreezeSchedule(): `plan` {'is empty' if not plan else f'has the number {min(plan)}'}.",
            why="nothing would ever learn." if not plan else "epochs and steps are counted from 0.",
            fix='gg.FreezeSchedule(model, {0: ["head.*"], 3: ["layer4.*"]})',
        )
