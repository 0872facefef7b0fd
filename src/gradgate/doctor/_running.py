"""Which modules are running, one inside the other, and which of their calls are written down."""

from __future__ import annotations

import torch

from gradgate.doctor._trace import Call, Trace


class Running:
    """The modules that have begun and not ended yet."""

    def __init__(self) -> None:
        self.drawn: frozenset[int] | None = None
        self._modules: list[torch.nn.Module] = []
        self._calls: list[int] = []

    @property
    def module(self) -> torch.nn.Module | None:
        """Give the innermost module."""
        return self._modules[-1] if self._modules else None

    @property
    def call(self) -> int:
        """Give the place in `Trace.calls` of the innermost call; -1 outside of all."""
        return self._calls[-1] if self._calls else -1

    def begin(self, module: torch.nn.Module, trace: Trace) -> None:
        """Note that a module begins."""
        outer = self.call
        self._modules.append(module)
        again = bool(trace.backwards) and trace.backwards[-1].running  # a checkpoint that computes once more
        if again or (self.drawn is not None and id(module) not in self.drawn):
            self._calls.append(outer)
            return
        if outer >= 0:
            trace.calls[outer].leaf = False
        self._calls.append(len(trace.calls))
        trace.calls.append(Call(module))

    def end(self) -> None:
        """Note that the innermost module ends."""
        if self._modules:
            self._modules.pop()
            self._calls.pop()

    def go_on_in(self, trace: Trace) -> None:
        """Write the calls that are running down in a new trace."""
        modules = self._modules
        self.forget()
        for module in modules:
            self.begin(module, trace)

    def forget(self) -> None:
        """Forget all of them."""
        self._modules, self._calls = [], []
