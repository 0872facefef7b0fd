"""One case: everything that the rules may ask about a step that is over."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property

import torch

from gradgate._source import Location, SourceLine, locate_traceback
from gradgate.doctor._flow import Flow
from gradgate.doctor._gradients import Gradient
from gradgate.doctor._naming import Names
from gradgate.doctor._trace import Op, Raised, Trace
from gradgate.records import Finding, Severity


@dataclass
class Case:
    """One step, as the rules see it."""

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
            location = locate_traceback(error.__traceback__)
            raised.append(Raised(str(error), (), location, len(self.trace.backwards) - 1))
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


def finding_at(
    where: Location | SourceLine | None,
    code: str,
    severity: Severity,
    title: str,
    *,
    reason: str,
    fix: str,
    module: str | None = None,
    samples: Iterable[int] = (),
    also: Iterable[Location | SourceLine | None] = (),
) -> Finding:
    """Make a finding at a place."""
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
    """Give the longest path that parameters have in common."""
    parts = [name.split(".")[:-1] for name in names]
    common = []
    for level in zip(*parts, strict=False):
        if len(set(level)) > 1:
            break
        common.append(level[0])
    return ".".join(common) or None
