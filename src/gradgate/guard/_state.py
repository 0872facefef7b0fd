"""What a step may write besides its result: buffers, gradients, random state, modes; taken before, put back after.

Parameters are not copied: a step does not write them. `written_parameters` finds the models that do.

An interrupt may come between any two lines here. Nothing is put back that was not completely taken, putting back can be
repeated, and what was not put back is put back before the next step.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from functools import partial

import torch

from gradgate._patches import Patches, to_the_end
from gradgate._random_state import RandomState
from gradgate._torch_compat import ThreadModes, add_tensors, buffers_of, write_count, write_mark
from gradgate.guard._buffer_copies import BufferCopies

__all__ = ["TrainingState"]


class TrainingState:
    """Buffers, gradients, random state and modes around some modules.

    Args:
        modules: The modules that a step runs.

    Attributes:
        open: Whether a step has begun whose end was neither `close` nor `give_back`.
        patches: What a search replaces in hooks and modules.
    """

    def __init__(self, modules: Sequence[torch.nn.Module]) -> None:
        self._roots = list(modules)
        self._random = RandomState()
        self._modes = ThreadModes()
        self.patches = Patches()
        self.open = False
        self._complete = False
        self._extra: list[torch.nn.Parameter] = []
        self._gradients: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._added: tuple[torch.Tensor, int] | None = None
        self.refresh()

    def refresh(self, guests: Sequence[torch.Tensor] = ()) -> None:
        """Look again at what parameters and buffers there are; modules may have been moved or extended."""
        modules = dict.fromkeys(module for root in self._roots for module in root.modules())
        found = (parameter for module in modules for parameter in module.parameters(recurse=False))
        parameters: list[torch.Tensor] = list(dict.fromkeys([*found, *self._extra, *guests]))
        tables = [table for module in modules if (table := buffers_of(module))]
        bound = [(table, name, buffer) for table in tables for name, buffer in table.items()]
        dense = [_without_repeats(b) for b in dict.fromkeys(buffer for *_, buffer in bound) if b is not None]
        copies = BufferCopies(dense)
        self._random.watch({tensor.device for tensor in [*parameters, *dense]})
        self.modules, self.parameters, self._guests = modules, parameters, list(guests)
        self._tables, self._bound, self._copies = tables, bound, copies

    def adopt(self, parameters: Iterable[torch.nn.Parameter]) -> list[torch.nn.Parameter]:
        """Take in parameters that a step is about to train although no guarded module owns them, and give these."""
        known = set(self.parameters)
        strangers = [parameter for parameter in parameters if parameter not in known]
        self._lay_aside(strangers)  # first: what is not laid aside must not be dropped
        self._extra += strangers
        self.parameters += strangers
        return strangers

    def remember(self, guests: Sequence[torch.Tensor] = ()) -> None:
        """Take the state as it is before a step; gradients of earlier steps are laid aside, not copied.

        Args:
            guests: Tensors besides the parameters that take a gradient in this step: inputs.
        """
        if self.open:
            self.give_back()
        self._modes.remember()
        self._gradients, self._added, self._complete, self.open = [], None, False, True
        self._random.remember()
        if guests or self._guests:
            self.refresh(guests)
        if self._bound:
            if self._was_rebound():
                self.refresh(guests)
            self._copies.take()
        self._lay_aside(self.parameters)
        self._complete = True

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
        self._modes.restore()

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

    def sums(self, without: Collection[torch.Tensor] = ()) -> tuple[list[list[torch.Tensor]], list[list[torch.Tensor]]]:
        """Make ready to add the step's gradients to those laid aside, as autograd does, in one call or none.

        Args:
            without: Parameters whose gradients have been added already.

        Returns:
            The arguments of that call: `map(add_tensors, *state.sums())`. Until it is made, `give_back` can be called.
        """
        earlier_ones, new_ones, done = list[torch.Tensor](), list[torch.Tensor](), set(without)
        for parameter, earlier in self._gradients:
            if parameter in done:
                continue
            new = parameter.grad
            if new is not None and earlier.is_sparse and not new.is_sparse:
                parameter.grad = (new + earlier).detach()
                continue
            parameter.grad = earlier
            if new is not None:
                earlier_ones.append(earlier.detach() if earlier.requires_grad else earlier)
                new_ones.append(new.detach() if new.requires_grad else new)
        if not new_ones:
            return [], []
        self._added = earlier_ones[-1], write_count(earlier_ones[-1])
        return [earlier_ones], [new_ones]

    def add_earlier_gradients(self, without: Collection[torch.Tensor] = ()) -> None:
        """Add the step's gradients to those laid aside, and end the step; arguments as for `sums`."""
        _ = [*map(add_tensors, *self.sums(without))]
        self.open = False

    def give_back(self, *, device_died: bool = False) -> None:
        """Leave everything as it was before the step, unless that has been done or the step was finished.

        Args:
            device_died: Put back only what needs no work on a device.
        """
        if self.open:
            to_the_end(partial(self._give_back, device_died))

    def _give_back(self, device_died: bool) -> None:
        self.patches.undo()
        self._modes.restore()
        if self._added is None or write_count(self._added[0]) == self._added[1]:
            if self._complete:
                if not device_died:
                    self.restore()
                self.forget_gradients()
            for parameter, earlier in self._gradients:
                parameter.grad = earlier
            self._modes.restore()
        self.open = False

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
