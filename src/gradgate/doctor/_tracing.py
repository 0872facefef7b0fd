"""`trace`: the tracer itself, always on, step after step."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any

import torch

from gradgate._checks import check_module
from gradgate.doctor._diagnosing import Examination
from gradgate.doctor._diagnosis import Diagnosis
from gradgate.doctor._gradients import Gradients
from gradgate.doctor._graph import Graph, Layer
from gradgate.doctor._trace import Trace
from gradgate.records import Finding

# The rules look at so many steps in full; after that only at steps in which the tracer saw something new.
_STEPS_IN_FULL = 2


class Tracing:
    """A trace in progress; `trace` makes it.

    Attributes:
        steps: How many optimizer steps have been traced.
        tracing: Whether it is tracing now.
        without_saves: Do not look at what is saved for backward; torch.func.grad cannot run while that is done.
        after_step: Called after each optimizer step that was traced.
    """

    def __init__(
        self, model: torch.nn.Module | None, namespaces: list[Mapping[str, Any]], files: tuple[str, ...] = ()
    ) -> None:
        self.steps = 0
        self.tracing = False
        self.without_saves = False
        self.after_step: Callable[[], None] | None = None
        self._examination = Examination(model, namespaces)
        self._examination.one_step, self._examination.files = False, files
        self._examination.tracer.before_step.insert(0, self._before_step)
        self._examination.tracer.after_step.append(self._after_step)
        self._findings: dict[Finding, None] = {}
        self._drawn: tuple[Graph | None, tuple[Layer, ...]] = (None, ())
        self._exception: BaseException | None = None
        self._zeros = 0

    @property
    def diagnosis(self) -> Diagnosis:
        """Give what was found so far, over all steps; inside the block, up to the last step of the optimizer.

        The graph is that of the newest step that the rules looked at: one of the first, or a later one that looked
        suspicious.
        """
        order = ("error", "warning", "info")
        findings = sorted(self._findings, key=lambda finding: order.index(finding.severity))
        return Diagnosis(tuple(findings), self._exception, *self._drawn)

    def __enter__(self) -> Tracing:
        self._examination.tracer.install()
        self.resume()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self.tracing:
            self.pause(error)
        self._examination.tracer.uninstall()

    def resume(self) -> None:
        """Go on tracing after `pause`."""
        self._examination.tracer.saves = not self.without_saves
        self.tracing = True
        self._examination.resume()

    def pause(self, error: BaseException | None = None) -> None:
        """Stop tracing until `resume`, and say what was found in what has been traced."""
        self.tracing = False
        self._examination.pause()
        self._exception = error if isinstance(error, Exception) else None
        trace = self._examination.tracer.trace
        if self._exception is not None or trace.backwards or not self.steps:
            self._add(self._examination.conclude(self._exception))
        self._begin_step()

    def _before_step(self, optimizer: torch.optim.Optimizer) -> None:
        trace = self._examination.tracer.trace
        self._examination.thorough = self.steps < _STEPS_IN_FULL or _is_suspicious(trace, self._zeros)

    def _after_step(self, optimizer: torch.optim.Optimizer) -> None:
        examination = self._examination
        self.steps += 1
        if examination.thorough or examination.tracer.trace.optimizer_steps[-1].again:
            self._zeros = len(examination.tracer.trace.zeros)
            self._add(examination.conclude(None))
        self._begin_step()
        if self.after_step is not None and examination.tracer.can_pause():
            self.after_step()

    def _add(self, diagnosis: Diagnosis) -> None:
        self._findings.update(dict.fromkeys(diagnosis.findings))
        if diagnosis.graph is not None:
            self._drawn = diagnosis.graph, diagnosis.layers

    def _begin_step(self) -> None:
        examination, model = self._examination, self._examination.model
        examination.tracer.begin_again()
        examination.gradients = Gradients(model.parameters() if model is not None else ())
        examination.thorough = True


def _is_suspicious(trace: Trace, zeros: int) -> bool:
    return (
        bool(trace.overwrites)
        or len(trace.zeros) != zeros
        or any(bad.kind == "nan" or bad.stage == "backward" for bad in trace.bad)
        or any(backward.loss is not None and not math.isfinite(backward.loss) for backward in trace.backwards)
    )


def trace(model: torch.nn.Module | None = None) -> Tracing:
    """Trace everything that this thread does in a block, step after step, and say what is wrong with it.

    It costs about as much as `torch.autograd.detect_anomaly` and says more; for a watch that costs nearly nothing see
    `watch`. A step ends with the step of an optimizer. An exception of the block is explained and goes on its way.

    Args:
        model: The model that ought to learn. Without it, what the optimizers hold counts, else whatever is used.

    Returns:
        The trace, to be used as a block; its `diagnosis` says what was found.

    Raises:
        ArgumentTypeError: `model` is not a module.

    Examples:
        >>> layer = torch.nn.Linear(2, 1)
        >>> optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
        >>> with gg.trace(layer) as traced:
        ...     for _ in range(3):
        ...         layer(torch.ones(4, 2)).mean().backward()
        ...         optimizer.step()
        >>> print(traced.diagnosis.findings[0].title)
        gradients grow from step to step: zero_grad is missing
    """
    if model is not None:
        check_module(model, name="model", function="trace")
    frame = sys._getframe(1)
    return Tracing(model, [frame.f_locals, frame.f_globals])
