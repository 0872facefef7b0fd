"""What things are called: parameters and modules by their path, plain tensors by the user's variable."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch

from gradgate._torch_compat import without_compiled_wrappers


def namespaces_of(function: Callable[..., Any]) -> list[Mapping[str, Any]]:
    """Give the variables that a function sees: those that it closes over, then the globals of its module."""
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
    """Knows the names of one step."""

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
                if isinstance(value, torch.Tensor):
                    self._tensors.setdefault(id(value), f"{path}.{name}" if path else name)
        for tensors in (root.named_parameters(prefix=prefix), root.named_buffers(prefix=prefix)):
            for path, tensor in tensors:
                self._tensors.setdefault(id(tensor), path)

    def named_modules(self) -> Iterator[tuple[str, torch.nn.Module]]:
        """Give every module of the model, or of those that were called where there is none, with its path."""
        for root, prefix in self._roots[: 1 if self._has_model else None]:
            yield from root.named_modules(prefix=prefix)

    def has_tensor(self, number: int) -> bool:
        """Tell whether a tensor belongs to a module: a parameter, a buffer or an attribute."""
        return number in self._tensors

    def variable(self, thing: object) -> str | None:
        """Give the name of the user's variable that holds a thing."""
        for space in self._spaces:
            for name, value in list(space.items()):
                if value is thing and not name.startswith("__"):
                    return name
        return None

    def of_module(self, module: torch.nn.Module | None) -> str | None:
        """Give the path of a module."""
        if module is None:
            return None
        return self._modules.get(id(module), "") or type(without_compiled_wrappers(module)).__name__

    def of_tensor(self, tensor: torch.Tensor) -> str | None:
        """Give the name of a tensor."""
        return self._tensors.get(id(tensor)) or self.variable(tensor)
