"""One case: everything that the rules may ask about a step that is over."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property

import torch

from gradgate.doctor._flow import Flow
from gradgate.doctor._gradients import Gradient
from gradgate.doctor._naming import Names
from gradgate.doctor._places import Place, place_of_traceback
from gradgate.doctor._source import Line
from gradgate.doctor._trace import Op, Raised, Spot, Trace
from gradgate.records import Finding, Severity

__all__ = ["Case", "finding_at", "module_of_names", "place"]


@dataclass
class Case:
    """One step, as the rules see it.

    Args:
        trace: What the tracer wrote down.
        previous: The trace of the step before, where there is one.
        names: What things are called.
        parameters: The parameters that ought to learn, by name.
        gradients: Their gradients, by `id`.
        exception: What the step raised.
        known_model: Whether the user gave the model, so that every parameter of it ought to learn.
        one_step: Whether it is one step that ought to come to backward.
        files: Files of the user to read, besides those that the trace was in.
    """

    trace: Trace
    names: Names
    parameters: dict[str, torch.Tensor]
    gradients: dict[int, Gradient]
    exception: BaseException | None = None
    previous: Trace = field(default_factory=Trace)
    known_model: bool = True
    one_step: bool = True
    files: tuple[str, ...] = ()

    @cached_property
    def flow(self) -> Flow:
        """Give the flow of values."""
        return Flow(self.trace)

    @cached_property
    def values_of(self) -> dict[int, list[int]]:
        """Give the values that each leaf held when it was first read, by the leaf's `id`."""
        found: dict[int, list[int]] = {}
        for value, root in self.trace.roots.items():
            found.setdefault(root.number, []).append(value)
        return found

    @property
    def errors(self) -> list[Raised]:
        """Give what calls of torch raised, also where the user caught it, and last what ended the step."""
        error = self.exception
        raised = list(self.trace.raised)
        if error is not None and not any(str(error) == other.text for other in raised):
            where = place_of_traceback(error.__traceback__)
            spot = (where.code, where.instruction) if where is not None else None
            raised.append(Raised(str(error), (), spot, len(self.trace.backwards) - 1))
        return raised

    def severity_of(self, error: Raised) -> Severity:
        """Give how bad it is that a call raised: the user may have caught it, and then it is a warning."""
        return "error" if self.exception is not None and str(self.exception) == error.text else "warning"

    def gradient(self, parameter: torch.Tensor) -> Gradient:
        """Give the gradient of a parameter."""
        return self.gradients.get(id(parameter), Gradient(present=False))

    def module(self, op: Op) -> str | None:
        """Give the path of the module that an operation ran in."""
        return self.names.of_module(op.module)


def place(spot: Spot) -> Place | None:
    """Turn what the tracer noted into a place."""
    return Place(*spot) if spot is not None else None


def finding_at(
    where: Place | Line | None,
    code: str,
    severity: Severity,
    title: str,
    *,
    reason: str,
    fix: str,
    module: str | None = None,
    samples: Iterable[int] = (),
    also: Iterable[Place | Line | None] = (),
) -> Finding:
    """Make a finding at a place.

    Args:
        where: The user's place.
        code: The code.
        severity: How bad it is.
        title: One line.
        reason: Why.
        fix: Code to paste.
        module: The module concerned.
        samples: The rows concerned.
        also: Further places.

    Returns:
        The finding.
    """
    main = where.text if where is not None else None
    others = dict.fromkeys(other.text for other in also if other is not None)
    return Finding(
        code=code,
        severity=severity,
        title=title,
        where=main,
        source=where.source if where is not None else None,
        module=module,
        reason=reason,
        fix=fix,
        samples=tuple(samples),
        also=tuple(text for text in others if text != main),
    )


def module_of_names(names: list[str]) -> str | None:
    """Give the longest path that parameters have in common.

    Args:
        names: Names of parameters.

    Returns:
        The path of the module that holds them all, or None.
    """
    parts = [name.split(".")[:-1] for name in names]
    common = []
    for level in zip(*parts, strict=False):
        if len(set(level)) > 1:
            break
        common.append(level[0])
    return ".".join(common) or None
