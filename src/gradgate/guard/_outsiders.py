"""Modules that run in the loss and are not under guard: found in the first step and in bad ones, warned of once.

Nothing is hooked. What a loss function can reach is walked (closures, globals that its code names, attributes), and of
that only what the step has really written or trained is reported: a teacher in eval mode is reachable, but unchanged.
"""

from __future__ import annotations

import functools
import types
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import islice
from typing import Any
from weakref import WeakKeyDictionary

import torch

from gradgate._names import listed
from gradgate._text import user_level
from gradgate._torch_private import buffers_of, children_of, write_count
from gradgate.errors import GradgateWarning

# Objects looked at, and elements of one container: a trainer may lead to a dataset of millions.
REACHED, ELEMENTS = 5_000, 200
_LEAVES = (str, bytes, int, float, complex, types.NoneType, torch.dtype, torch.device, torch.Size)
_EVERY_MODULE_HAS = frozenset(vars(torch.nn.Module()))
Marks = list[tuple[int, int]]


def reachable(function: Callable[..., Any]) -> Iterator[tuple[str, Any]]:
    """Walk what a function can reach, nearest first, each with the expression that the user writes for it."""
    waiting: deque[tuple[str, Any]] = deque([("", function)])
    seen: set[int] = set()
    while waiting and len(seen) < REACHED:
        path, thing = waiting.popleft()
        if id(thing) not in seen and not isinstance(thing, _LEAVES):
            seen.add(id(thing))
            yield path, thing
            waiting.extend(islice(_parts(path, thing), ELEMENTS))


def _parts(path: str, thing: Any) -> Iterator[tuple[str, Any]]:
    """List what hangs directly on an object, without running any code of its class."""
    if isinstance(thing, types.MethodType):
        yield path.rpartition(".")[0] or "self", thing.__self__
        yield "", thing.__func__
    elif isinstance(thing, types.FunctionType):
        yield from _of_function(thing)
    elif isinstance(thing, functools.partial):
        yield from (("", part) for part in (thing.func, *thing.args, *thing.keywords.values()))
    elif isinstance(thing, dict):
        yield from ((f"{path}[{key!r}]" if path else "", value) for key, value in list(thing.items()))
    elif isinstance(thing, list | tuple):
        yield from ((f"{path}[{number}]" if path else "", value) for number, value in enumerate(thing))
    elif isinstance(thing, torch.nn.Module):
        yield from _of_names(path, {**children_of(thing), **thing.__dict__})
    elif not isinstance(thing, type | types.ModuleType | torch.Tensor):
        with suppress(AttributeError):
            yield from _of_names(path, object.__getattribute__(thing, "__dict__"))
        if isinstance(call := getattr(type(thing), "__call__", None), types.FunctionType):  # noqa: B004
            yield "", call


def _of_names(path: str, names: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in list(names.items()):
        if name not in _EVERY_MODULE_HAS:
            yield (f"{path}.{name}" if path else ""), value


def _of_function(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    if function.__module__ and function.__module__.partition(".")[0] == "torch":
        scope: dict[str, Any] = {}  # what torch's own functions name is not the user's; their closures may be
    else:
        scope = function.__globals__
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=False):
        if cell != types.CellType():  # an empty one has no contents to ask for
            yield name, cell.cell_contents
    arguments = function.__code__.co_varnames[: function.__code__.co_argcount]
    defaults = function.__defaults__ or ()
    yield from zip(arguments[len(arguments) - len(defaults) :], defaults, strict=True)
    yield from (function.__kwdefaults__ or {}).items()
    names = _names_in(function.__code__)
    for name in names:
        value = scope.get(name)
        if not isinstance(value, type | types.ModuleType):
            yield name, value
        elif value is not torch:
            yield from ((f"{name}.{inner}", vars(value)[inner]) for inner in names if inner in vars(value))


def _names_in(code: types.CodeType) -> list[str]:
    nested = (const for const in code.co_consts if isinstance(const, types.CodeType))
    return [*code.co_names, *(name for inner in nested for name in _names_in(inner))]


class Outsiders:
    """What runs in a guard's steps and is not under guard."""

    def __init__(self, roots: Sequence[torch.nn.Module]) -> None:
        self._roots = roots
        self._looked = self._warned = False
        self._names: WeakKeyDictionary[torch.nn.Module, str] = WeakKeyDictionary()
        self.forget()

    def forget(self) -> None:
        """FreezeState on to nothing after a step."""
        self._marks: dict[torch.nn.Module, Marks] = {}
        self._found: dict[torch.nn.Module, str] = {}

    def look(self, function: Callable[..., Any]) -> None:
        """Note the modules that a function can reach, and what their buffers are now; they are looked for once."""
        if not self._looked:
            for path, thing in reachable(function):
                if issubclass(type(thing), torch.nn.Module):  # not isinstance: a weak proxy says that it is one
                    self._names.setdefault(thing, path)
            self._looked = True
        self.note(self._names)

    def note(self, modules: Iterable[torch.nn.Module]) -> None:
        """Note modules that may run, and what the buffers are of those that are not under guard."""
        inside = {module for root in self._roots for module in root.modules()}
        for module in modules:
            if module not in inside:
                self._marks.setdefault(module, _marks(module))

    def trained(self, parameters: Iterable[torch.Tensor]) -> None:
        """Note who owns parameters that the loss trains although no guarded module owns them."""
        wanted = set(parameters)
        for module in self._marks:
            if wanted and not wanted.isdisjoint(module.parameters(recurse=False)):
                self._found[module] = "parameters that the loss trains"

    def written(self) -> str:
        """Say which modules have written buffers since they were noted; empty where none has."""
        wrote = [module for module, marks in self._marks.items() if _marks(module) != marks]
        self._found |= dict.fromkeys(wrote, "buffers that the step writes")
        if not wrote:
            return ""
        return f"modules that are not under guard wrote buffers: {self._listed(wrote)}; use {self._line(wrote)}"

    def warn(self) -> None:
        """Warn, once, of what was found; then hold on to nothing."""
        self.written()
        found, self._warned = self._found if not self._warned else {}, self._warned or bool(self._found)
        text = ""
        if found:
            names, reasons = self._listed(list(found)), " and ".join(dict.fromkeys(found.values()))
            text = (
                f"Guard: a module runs in the loss and is not under guard: {names}.\n"
                f"Why: it has {reasons}; only what is under guard is checked and put back in every step.\n"
                f"Fix: guard = {self._line(list(found))}"
            )
        self.forget()
        if text:
            warnings.warn(text, GradgateWarning, stacklevel=user_level())

    def _tops(self, modules: Sequence[torch.nn.Module]) -> list[torch.nn.Module]:
        """Give the outermost named modules that are not under guard and contain these."""
        named = [module for module in self._marks if self._names.get(module)]
        inner = {part for module in named for part in module.modules() if part is not module}
        top_of = {part: top for top in named if top not in inner for part in top.modules()}
        return list(dict.fromkeys(top_of.get(module, module) for module in modules))

    def _listed(self, modules: Sequence[torch.nn.Module]) -> str:
        tops = [(self._names.get(top), type(top).__name__) for top in self._tops(modules)]
        return listed(list(dict.fromkeys(f"`{name}` ({kind})" if name else kind for name, kind in tops)), 3)

    def _line(self, modules: Sequence[torch.nn.Module]) -> str:
        """Write the guard that would have them all."""
        tops = self._tops(modules)
        contained = {inner for top in tops for inner in top.modules()}
        inside = [root for root in self._roots if root not in contained and self._runs(root)]
        named = [self._names.get(root) or "model" for root in inside] + [
            self._names.get(top) or "other" for top in tops
        ]
        return f"gg.Guard({named[0]})" if len(named) == 1 else f"gg.Guard([{', '.join(dict.fromkeys(named))}])"

    def _runs(self, root: torch.nn.Module) -> bool:
        """Tell whether a guarded module has a part in the loss, as far as that is known."""
        return root in self._names or any(parameter.grad is not None for parameter in root.parameters())


def _marks(module: torch.nn.Module) -> Marks:
    return [(id(buffer), -1 if buffer is None else write_count(buffer)) for buffer in buffers_of(module).values()]
