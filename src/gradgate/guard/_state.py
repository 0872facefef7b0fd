"""What a step may write besides its result: buffers, gradients and random state, taken before and put back after.

Parameters are not copied: a step does not write them. `written_parameters` finds the models that do.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

import torch

from gradgate._random_state import RandomState
from gradgate._torch_compat import buffers_of, write_mark
from gradgate.guard._buffer_copies import BufferCopies

__all__ = ["TrainingState"]


class TrainingState:
    """Buffers, gradients and random state of some modules.

    Args:
        modules: The modules that a step runs.
    """

    def __init__(self, modules: Sequence[torch.nn.Module]) -> None:
        self._roots = list(modules)
        self._random = RandomState()
        self._extra: list[torch.nn.Parameter] = []
        self._guests: list[torch.Tensor] = []
        self._gradients: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.refresh()

    def refresh(self) -> None:
        """Look again at what parameters and buffers there are; modules may have been moved or extended."""
        self.modules = unique = dict.fromkeys(module for root in self._roots for module in root.modules())
        found = (parameter for module in unique for parameter in module.parameters(recurse=False))
        self.parameters: list[torch.Tensor] = list(dict.fromkeys([*found, *self._extra, *self._guests]))
        self._tables = [table for module in unique if (table := buffers_of(module))]
        self._bound = [(table, name, buffer) for table in self._tables for name, buffer in table.items()]
        dense = [_without_repeats(b) for b in dict.fromkeys(buffer for *_, buffer in self._bound) if b is not None]
        self._copies = BufferCopies(dense)
        self._random.watch({tensor.device for tensor in [*self.parameters, *dense]})

    def adopt(self, parameters: Iterable[torch.nn.Parameter]) -> list[torch.nn.Parameter]:
        """Take in parameters that a step is about to train although no guarded module owns them, and give these."""
        known = set(self.parameters)
        strangers = [parameter for parameter in parameters if parameter not in known]
        self._extra += strangers
        self.parameters += strangers
        self._lay_aside(strangers)
        return strangers

    def remember(self, guests: Sequence[torch.Tensor] = ()) -> None:
        """Take the state as it is before a step; gradients of earlier steps are laid aside, not copied.

        Args:
            guests: Tensors besides the parameters that take a gradient in this step: inputs.
        """
        self._random.remember()
        if guests or self._guests:
            self._guests = list(guests)
            self.refresh()
        if self._bound:
            if self._was_rebound():
                self.refresh()
            self._copies.take()
        self._gradients = []
        self._lay_aside(self.parameters)

    def _was_rebound(self) -> bool:
        """Tell whether the model was moved, or a buffer was assigned, added or deleted."""
        for table, name, buffer in self._bound:
            if table.get(name, self) is not buffer:
                return True
        return sum(map(len, self._tables)) != len(self._bound)

    def _lay_aside(self, parameters: Iterable[torch.Tensor]) -> None:
        for parameter in parameters:
            if (gradient := parameter.grad) is not None:
                self._gradients.append((parameter, gradient))
                parameter.grad = None

    def restore(self) -> None:
        """Put everything back to what it was before the step, with no gradients: ready for another try."""
        for table, name, buffer in self._bound:
            table[name] = buffer
        self._copies.put_back()
        self._random.restore()
        self.forget_gradients()
        # A cast of a weight that was cached without recording would cut the weight off in the next try.
        torch.clear_autocast_cache()

    def restore_tensors(self) -> None:
        """Put back what is put back in a moment: the values of buffers and torch's own random state."""
        self._copies.put_back()
        self._random.restore_torch()

    def forget_gradients(self) -> None:
        """Drop the gradients of a try that does not count."""
        for parameter in self.parameters:
            parameter.grad = None

    def gradients(self) -> list[torch.Tensor]:
        """Give the gradients that the current try has made."""
        return [gradient for parameter in self.parameters if (gradient := parameter.grad) is not None]

    def has_own_gradients(self) -> bool:
        """Tell whether a parameter has a gradient, inputs left aside."""
        return any(p.grad is not None for p in self.parameters if isinstance(p, torch.nn.Parameter))

    def earlier(self) -> dict[torch.Tensor, torch.Tensor]:
        """Give the gradients laid aside, by parameter."""
        return dict(self._gradients)

    def add_earlier_gradients(self, without: Collection[torch.Tensor] = ()) -> None:
        """Add the step's gradients to those laid aside, in the order and with the rounding that autograd uses.

        Args:
            without: Parameters whose gradients have been added already.
        """
        if not self._gradients:
            return
        done = set(without)
        with torch.no_grad():
            for parameter, earlier in self._gradients:
                if parameter in done:
                    continue
                new = parameter.grad
                if new is None:
                    parameter.grad = earlier
                elif earlier.is_sparse and not new.is_sparse:
                    parameter.grad = new + earlier
                else:
                    parameter.grad = earlier.add_(new)
        self._gradients = []

    def give_back(self) -> None:
        """Leave everything as it was before the step, the earlier gradients included."""
        self.restore()
        self.give_back_gradients()

    def give_back_gradients(self) -> None:
        """Put back only the gradients, which needs no work on a device (it may have died)."""
        self.forget_gradients()
        for parameter, earlier in self._gradients:
            parameter.grad = earlier
        self._gradients = []

    def new_buffers(self) -> list[str]:
        """Name the buffers that appeared during the step; what they were before is not known."""
        if sum(len(buffers_of(module)) for module in self.modules) == len(self._bound):
            return []
        known = {(id(table), name) for table, name, _ in self._bound}
        return [
            f"{path}.{name}".lstrip(".")
            for root in self._roots
            for path, module in root.named_modules()
            for name in buffers_of(module)
            if (id(buffers_of(module)), name) not in known
        ]

    def parameter_marks(self) -> list[tuple[int, int]]:
        """Give marks that change when somebody writes a parameter."""
        return [write_mark(parameter) for parameter in self.parameters]

    def written_parameters(self, marks: list[tuple[int, int]]) -> list[str]:
        """Name the parameters that were written since the marks were taken."""
        now = zip(self.parameters, marks, self.parameter_marks(), strict=False)  # more may have been taken in
        return self._names(parameter for parameter, before, after in now if before != after)

    def spoilt_parameters(self) -> list[str]:
        """Name the parameters that are not finite."""
        return self._names(p for p in self.parameters if not bool(torch.isfinite(p.detach()).all()))

    def _names(self, parameters: Iterable[torch.Tensor]) -> list[str]:
        chosen = list(parameters)
        if not chosen:
            return []
        names = {id(p): name for root in self._roots for name, p in root.named_parameters()}
        return [names.get(id(parameter), "a parameter") for parameter in chosen]


def _without_repeats(buffer: torch.Tensor) -> torch.Tensor:
    """Narrow expanded dimensions to one element, so that every element lies in memory once."""
    if buffer.layout is not torch.strided:
        return buffer
    for dim, (size, stride) in enumerate(zip(buffer.shape, buffer.stride(), strict=True)):
        if stride == 0 and size > 1:
            buffer = buffer.narrow(dim, 0, 1)
    return buffer
