"""`diagnose`: one step under the tracer, and what the rules say about it."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch

from gradgate._checks import check_module
from gradgate._names import describe
from gradgate._torch_compat import is_compiled, without_compiled_wrappers
from gradgate.doctor._case import Case
from gradgate.doctor._diagnosis import Diagnosis
from gradgate.doctor._gradients import Gradients
from gradgate.doctor._looking import is_all_zero, is_readable
from gradgate.doctor._naming import Names, namespaces_of
from gradgate.doctor._rules import conclude
from gradgate.doctor._tracer import Tracer
from gradgate.errors import ArgumentTypeError
from gradgate.records import Finding


class Examination:
    """A tracer together with what it takes to draw a conclusion."""

    def __init__(self, model: torch.nn.Module | None, namespaces: list[Mapping[str, Any]]) -> None:
        self.given = model
        self.model = without_compiled_wrappers(model) if model is not None else None
        self.namespaces = namespaces
        self.tracer = Tracer()
        self.tracer.before_step.append(self._before_step)
        self._surroundings = ExitStack()
        self.thorough = True
        self.one_step = True
        self.files: tuple[str, ...] = ()
        self.gradients = Gradients(model.parameters() if model is not None else ())
        if model is not None:
            self.tracer.reuse.start(model.parameters())
            self.tracer.running.drawn = frozenset(id(module) for module in model.modules())

    def _before_step(self, optimizer: torch.optim.Optimizer) -> None:
        if self.thorough:
            self.gradients.take(parameter for group in optimizer.param_groups for parameter in group["params"])

    @contextmanager
    def running(self) -> Iterator[None]:
        """Trace a block."""
        self.tracer.install()
        self.resume()
        try:
            yield
        finally:
            self.pause()
            self.tracer.uninstall()

    def resume(self) -> None:
        """Begin to trace, with torch.compile standing aside."""
        self._surroundings.enter_context(torch.compiler.set_stance("force_eager"))
        self._surroundings.enter_context(_without_a_word_on_hooks())
        self.tracer.resume()

    def pause(self) -> None:
        """Trace no longer."""
        self.tracer.pause()
        self._surroundings.close()

    def run(self, step_fn: Callable[[], Any]) -> None:
        """Run a step, and backward if the step leaves it to us."""
        result = step_fn()
        if isinstance(result, torch.Tensor) and not self.tracer.trace.backwards:
            result.backward()  # type: ignore[no-untyped-call]

    def attempt(self, step_fn: Callable[[], Any]) -> Exception | None:
        """Trace a step."""
        try:
            with self.running():
                self.run(step_fn)
        except Exception as error:  # noqa: BLE001 - whatever the step raises is what the diagnosis is about
            return error
        return None

    def conclude(self, exception: BaseException | None) -> Diagnosis:
        """Say what was found."""
        trace = self.tracer.trace
        names = Names(self.model, trace.modules, self.namespaces)
        parameters = self._parameters(names)
        self.gradients.take(parameters.values())
        trace.gradients_left = any(
            p.grad is not None and (not is_readable(p.grad) or not is_all_zero(p.grad)) for p in parameters.values()
        )
        case = Case(
            trace=trace,
            names=names,
            parameters=parameters,
            gradients=self.gradients.taken,
            exception=exception,
            previous=self.tracer.previous,
            known_model=self.model is not None or bool(trace.optimizer_steps),
            one_step=self.one_step,
            files=self.files,
        )
        diagnosis = conclude(case)
        roots = [*trace.modules, *([self.given] if self.given is not None else [])]
        compiled = [path for root in roots for path, module in root.named_modules() if is_compiled(module)]
        return replace(diagnosis, findings=(*diagnosis.findings, *_note_on_compiling(compiled)))

    def _parameters(self, names: Names) -> dict[str, torch.Tensor]:
        """Give what ought to learn: the model's parameters, else what the optimizers hold, else the leaves in use."""
        if self.model is not None:
            return dict(self.model.named_parameters())
        trace = self.tracer.trace
        steps = trace.optimizer_steps
        leaves = [
            root.tensor for root in trace.roots.values() if root.leaf and root.requires_grad and root.tensor is not None
        ]
        held = [p for step in steps for group in step.optimizer.param_groups for p in group["params"]]
        if held:
            # Another network may take part that is not meant to learn here; what has a gradient is asked about, though.
            leaves = [leaf for leaf in leaves if leaf.grad is not None]
        used = [p for module in trace.modules for p in module.parameters()] if not held else []
        found: dict[str, torch.Tensor] = {}
        for leaf in dict.fromkeys([*held, *used, *leaves]):
            name = names.of_tensor(leaf) or f"the tensor of shape {tuple(leaf.shape)}"
            found[name if name not in found else f"{name} ({len(found)})"] = leaf
        return found


@contextmanager
def _without_a_word_on_hooks() -> Iterator[None]:
    """Keep torch from warning of the tracer's hooks; all other filters, also new ones, stay as the user has them."""
    warnings.filterwarnings("ignore", message="Using `torch.compile.module.` when there are global hooks")
    filter_of_ours = warnings.filters[0]
    try:
        yield
    finally:
        if filter_of_ours in warnings.filters:
            warnings.filters.remove(filter_of_ours)  # type: ignore[attr-defined]


def _note_on_compiling(compiled: list[str]) -> list[Finding]:
    if not compiled:
        return []
    return [
        Finding(
            code="GG001",
            severity="info",
            title="the model is compiled; it ran without torch.compile for this diagnosis",
            module=compiled[0] or None,
            reason="Compiled code has no lines to point at. What is found here holds for the compiled model as well, "
            "unless the compiler itself is at fault.",
            fix="",
        )
    ]


def diagnose(step_fn: Callable[[], Any], model: torch.nn.Module | None = None) -> Diagnosis:
    """Run one step under the tracer and say why it does not learn, where a NaN was born, or which line overwrote what.

    The step does forward, loss and backward itself, or returns the loss; it may call an optimizer. It is run once, and
    what it changes (gradients, weights, buffers, random state) is changed as in any step. When it raises, that is part
    of the diagnosis and not raised again. Compiled models run uncompiled.

    Args:
        step_fn: The step; takes nothing.
        model: The model that ought to learn. Without it, what the optimizers hold counts, else whatever is used.

    Returns:
        The findings, and the exception if there was one.

    Raises:
        ArgumentTypeError: `step_fn` is not callable, or `model` is not a module.

    Examples:
        >>> encoder, head = torch.nn.Linear(3, 3), torch.nn.Linear(3, 1)
        >>> model = torch.nn.ModuleDict({"encoder": encoder, "head": head})
        >>> def step():
        ...     features = encoder(torch.ones(4, 3)).detach()
        ...     return head(features).mean()
        >>> finding = gg.diagnose(step, model=model).findings[0]
        >>> finding.code, finding.title
        ('GG101', 'encoder.weight, encoder.bias get no gradient: cut at `encoder(torch.ones(4, 3)).detach()`')
    """
    if not callable(step_fn):
        raise ArgumentTypeError(
            f"diagnose(): `step_fn` is {describe(step_fn)}.",
            why="it runs one step of yours: forward, loss and backward.",
            fix="gg.diagnose(lambda: loss_fn(model(x), y), model=model)",
        )
    if model is not None:
        check_module(model, name="model", function="diagnose")
    namespaces = [*namespaces_of(step_fn), *_variables_of_caller()]
    examination = Examination(model, namespaces)
    raised = examination.attempt(step_fn)
    if raised is not None and "saved tensor hooks" in str(raised):
        # torch.func.grad does not bear the hooks that tell who saved what; the rest can be seen without them.
        examination = Examination(model, namespaces)
        examination.tracer.saves = False
        raised = examination.attempt(step_fn)
    return examination.conclude(raised)


def _variables_of_caller() -> list[Mapping[str, Any]]:
    frame = sys._getframe(2)
    return [frame.f_locals, frame.f_globals]
