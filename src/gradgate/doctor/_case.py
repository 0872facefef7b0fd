"""One step as the rules see it, with the names of its parameters, modules and tensors."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import takewhile
from typing import Any, cast

import torch

from gradgate._source import Location, SourceLine, locate_traceback
from gradgate._text import text_of
from gradgate._torch_private import without_compiled_wrappers
from gradgate.doctor._numerics import Gradient, Gradients
from gradgate.doctor._trace import Call, Flow, Op, Raised
from gradgate.doctor._tracer import Tracer, parameters_of
from gradgate.records import Finding, Severity

SEVERITIES = ("error", "warning", "info")
_MOST_ITEMS = 1000

# --- names ------------------------------------------------------------------------------------------------------------


def namespaces_of(function: Callable[..., Any]) -> list[Mapping[str, Any]]:
    """Return the variables that a function sees: those that it closes over, then the globals of its module."""
    code = getattr(function, "__code__", None)
    cells = getattr(function, "__closure__", None) or ()
    closed = {}
    for name, cell in zip(code.co_freevars if code else (), cells, strict=False):
        try:
            closed[name] = cell.cell_contents
        except ValueError:  # not filled yet
            continue
    return [closed, getattr(function, "__globals__", {})]


class Names:
    """The names of modules, parameters and other tensors."""

    def __init__(
        self,
        model: torch.nn.Module | None,
        modules: Iterable[torch.nn.Module] = (),
        namespaces: Iterable[Mapping[str, Any]] = (),
    ) -> None:
        self._spaces = list(namespaces)
        self._modules: dict[int, str] = {}
        self._tensors: dict[int, str] = {}
        self._roots: list[tuple[torch.nn.Module, str]] = []
        self._has_model = model is not None
        self.unregistered: dict[int, str] = {}  # by `id` of a parameter: the plain list or dict that holds its layer
        if model is not None:
            self._add(without_compiled_wrappers(model), "")
        for module in modules:
            module = without_compiled_wrappers(module)
            if id(module) not in self._modules:
                self._add(module, self.variable(module) or type(module).__name__)

    def _add(self, root: torch.nn.Module, prefix: str) -> None:
        self._roots.append((root, prefix))
        for path, module in root.named_modules(prefix=prefix):
            self._modules.setdefault(id(module), path)
            for name, value in vars(module).items():
                self._add_attribute(f"{path}.{name}" if path else name, value)
        for tensors in (root.named_parameters(prefix=prefix), root.named_buffers(prefix=prefix)):
            for path, tensor in tensors:
                self._tensors.setdefault(id(tensor), path)

    def _add_attribute(self, path: str, value: object, container: str = "") -> None:
        """Name a tensor, or the layers in a plain list or dict, which are not registered."""
        if isinstance(value, torch.Tensor):
            self._tensors.setdefault(id(value), path)
            if container and isinstance(value, torch.nn.Parameter):
                self.unregistered.setdefault(id(value), container)
        elif isinstance(value, torch.nn.Module) and container:
            for name, parameter in value.named_parameters(prefix=path):
                self._add_attribute(name, parameter, container)
        elif isinstance(value, (list, tuple)) and len(value) <= _MOST_ITEMS and not path.endswith("]"):
            for index, item in enumerate(value):
                self._add_attribute(f"{path}[{index}]", item, path)
        elif type(value) is dict and not path.rpartition(".")[2].startswith("_") and len(value) <= _MOST_ITEMS:
            for key, item in value.items():
                self._add_attribute(f"{path}[{key!r}]", item, path)

    def named_modules(self) -> Iterator[tuple[str, torch.nn.Module]]:
        """Yield every module of the model, or without a model of those that were called, with its path."""
        for root, prefix in self._roots[: 1 if self._has_model else None]:
            yield from root.named_modules(prefix=prefix)

    def has_tensor(self, number: int) -> bool:
        """Return whether a tensor belongs to a module: a parameter, a buffer or an attribute."""
        return number in self._tensors

    def variable(self, thing: object) -> str | None:
        """Return the name of the user's variable that refers to a thing."""
        for space in self._spaces:
            for name, value in list(space.items()):
                if value is thing and not name.startswith("__"):
                    return name
        for space in self._spaces if isinstance(thing, torch.nn.Module) else ():
            for name, value in list(space.items()):
                if isinstance(value, torch.nn.Module):
                    for path, module in value.named_modules(prefix=name):
                        if module is thing:
                            return str(path)
        return None

    def path_of(self, module: torch.nn.Module) -> str:
        """Return the path of a module; the empty text for the model itself."""
        return self._modules.get(id(module), "")

    def of_module(self, module: torch.nn.Module | None) -> str | None:
        """Return the path of a module, or its class if it has none."""
        if module is None:
            return None
        return self.path_of(module) or type(without_compiled_wrappers(module)).__name__

    def of_tensor(self, tensor: torch.Tensor) -> str | None:
        return self._tensors.get(id(tensor)) or self.variable(tensor)


# --- the step ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Unused:
    """A parameter that a step does not use; another step may."""

    name: str
    parameter: torch.Tensor
    location: Location | None
    routed: bool


class Case:
    """One step, as the rules see it."""

    one_step = True
    files: tuple[str, ...] = ()

    def __init__(
        self,
        tracer: Tracer,
        model: torch.nn.Module | None,
        namespaces: Iterable[Mapping[str, Any]],
        gradients: Gradients,
        exception: BaseException | None,
    ) -> None:
        self.trace = trace = tracer.trace
        self.previous = tracer.previous
        self.exception = exception
        self.flow = Flow(trace)
        self.names = Names(model, trace.modules, namespaces)
        self.parameters = dict(model.named_parameters()) if model is not None else self._find_parameters()
        self.known_model = model is not None or bool(trace.optimizer_steps) or trace.updated_by_hand is not None
        self.frozen_at = {n: freeze for n, (tensor, freeze) in tracer.frozen.items() if tensor() is not None}
        self.trained_modules = {id(op.module) for op in trace.ops if op.records and op.module is not None}
        self.unused: list[Unused] = []
        gradients.take(self.parameters.values())
        self.gradients = gradients.taken

    def _find_parameters(self) -> dict[str, torch.Tensor]:
        """Return what ought to learn if there is no model: what the optimizers hold, else the leaves in use."""
        trace, flow = self.trace, self.flow
        every = {v: r.tensor for v, r in trace.roots.items() if r.leaf and r.requires_grad and r.tensor is not None}
        # A plain leaf that the step itself computed is data: the input of a gradient penalty, a loss without a graph.
        given = flow.behind_losses - flow.losses - flow.maker.keys()
        leaves = [leaf for v, leaf in every.items() if v in given or isinstance(leaf, torch.nn.Parameter)]
        held = [parameter for step in trace.optimizer_steps for parameter in parameters_of(step.optimizer)]
        if held:
            # Another network may take part that is not meant to learn here; what has a gradient is examined, though.
            leaves = [leaf for leaf in leaves if leaf.grad is not None]
        used = [p for module in trace.modules for p in module.parameters()] if not held else []
        found: dict[str, torch.Tensor] = {}
        for leaf in dict.fromkeys([*held, *used, *leaves] or every.values()):
            name = self.names.of_tensor(leaf)
            if name is None and trace.modules and leaf.grad is None:  # of an old model or layer, or tied since
                continue
            name = name or f"the tensor of shape {tuple(leaf.shape)}"
            found[name if name not in found else f"{name} ({len(found)})"] = leaf
        return found

    @cached_property
    def _values(self) -> dict[int, list[int]]:
        found: defaultdict[int, list[int]] = defaultdict(list)
        for value, root in self.trace.roots.items():
            found[root.number].append(value)
        return found

    def values_of(self, leaf: torch.Tensor | int) -> list[int]:
        """Return the values that a leaf, or what has this `id`, had when it was first read."""
        return self._values.get(leaf if isinstance(leaf, int) else id(leaf), [])

    @cached_property
    def errors(self) -> list[Raised]:
        """What calls of torch raised, also where the user caught it, and last what ended the step."""
        error, raised = self.exception, list(self.trace.raised)
        if error is None:
            return raised
        text = text_of(error)
        if not any(text == other.text for other in raised):
            raised.append(Raised(text, locate_traceback(error.__traceback__), len(self.trace.backwards) - 1))
        return [other._replace(severity="error") if other.text == text else other for other in raised]

    def error(self, text: str) -> Raised | None:
        """Return the last error with a text in it."""
        return next((error for error in reversed(self.errors) if text in error.text), None)

    def gradient(self, parameter: torch.Tensor) -> Gradient:
        return self.gradients.get(id(parameter), Gradient(present=False))

    def outermost(self, call: int) -> int:
        """Return the outermost of the calls that a call is inside of; -1 outside of all."""
        while call >= 0 and self.trace.calls[call].outer >= 0:
            call = self.trace.calls[call].outer
        return call

    @property
    def outermost_calls(self) -> list[Call]:
        return [call for call in self.trace.calls if call.outer < 0]

    def calls_with(self, parameter: torch.Tensor) -> list[Call]:
        """Return the outermost calls of modules that a parameter belongs to."""
        return [c for c in self.outermost_calls if any(parameter is other for other in c.module.parameters())]

    def module(self, op: Op) -> str | None:
        """Return the path of the module that an operation ran in."""
        return self.names.of_module(op.module)

    def finding(self, op: Op, headline: str, reason: str, fix: str, **given: Any) -> Finding:
        """Make a finding at the line of an operation."""
        return finding_at(op.location, headline, reason, fix, module=self.module(op), **given)


def finding_at(
    where: Location | SourceLine | None,
    headline: str,
    reason: str,
    fix: str = "",
    *,
    module: str | None = None,
    samples: Iterable[int] = (),
    also: Iterable[Location | SourceLine | None] = (),
) -> Finding:
    """Make a finding from its first line as it is printed: "error GG101: the title"."""
    kind, _, title = headline.partition(": ")
    severity, _, code = kind.partition(" ")
    main = where.text if where is not None else None
    others = dict.fromkeys(other.text for other in also if other is not None)
    return Finding(
        code=code,
        severity=cast(Severity, severity),
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
    """Return the longest path that parameters have in common."""
    levels = zip(*(name.split(".")[:-1] for name in names), strict=False)
    return ".".join(level[0] for level in takewhile(lambda level: len(set(level)) == 1, levels)) or None
