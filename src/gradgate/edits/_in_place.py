"""Edits in place: a module's state that is written back and undone; a scope for in-place operations."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from gradgate._names import describe
from gradgate._patches import Patches
from gradgate._torch_private import register_pytree_node
from gradgate.errors import ArgumentValueError


class State(dict[str, torch.Tensor]):
    """The parameters and buffers of a module, some of them edited: what `at(model)["name"][idx].set(v)` returns.

    A dictionary for `torch.func.functional_call`, which can be edited further and written into the module. Nothing is
    written until then.

    Args:
        tensors: The tensors by name.
        module: The module that they belong to.

    Examples:
        >>> model = torch.nn.Linear(2, 1)
        >>> state = gg.at(model)["weight"][0, 0].set(7.0)
        >>> state.write_back()
        >>> model.weight[0, 0].item()
        7.0
        >>> state.undo()
        >>> model.weight[0, 0].item() == 7.0
        False
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor], module: torch.nn.Module) -> None:
        super().__init__(tensors)
        self.module = module
        self._before: list[tuple[torch.Tensor, torch.Tensor]] = []

    @classmethod
    def of(cls, module: torch.nn.Module) -> State:
        """Return the tensors of a module as they are, tied ones under all their names.

        Args:
            module: The module.

        Returns:
            The state.
        """
        parameters = module.named_parameters(remove_duplicate=False)
        return cls({**dict(parameters), **dict(module.named_buffers(remove_duplicate=False))}, module)

    def write_back(self) -> None:
        """Write what was edited into the tensors of the module, in place; autograd does not record it.

        Optimizers and hooks go on with the same parameters. What was there is kept for `undo`.

        Raises:
            ArgumentValueError: A tensor of another shape stands for one of the module's.
        """
        own = State.of(self.module)
        edited = [(own[name], new) for name, new in self.items() if name in own and new is not own[name]]
        for old, new in edited:
            if new.shape != old.shape:
                what = f"State.write_back(): {describe(new)} cannot be written into {describe(old)}."
                why = "parameters keep their shape, because optimizers have a state of that shape."
                raise ArgumentValueError(what, why=why)
        with torch.no_grad():
            for old, new in edited:
                self._before.append((old, old.detach().clone()))
                old.copy_(new)

    def undo(self) -> None:
        """Put back what was in the module before `write_back`, bit for bit.

        Raises:
            ArgumentValueError: Nothing was written back.
        """
        if not self._before:
            fix = "state.write_back()   # before state.undo()"
            raise ArgumentValueError("State.undo(): nothing was written back.", why="the module is as it was.", fix=fix)
        with torch.no_grad():
            while self._before:
                tensor, old = self._before.pop()
                tensor.copy_(old)

    def __repr__(self) -> str:
        return f"State({type(self.module).__name__}, {', '.join(self)})"


# torch.func takes a state for what it is, a dictionary of tensors.
register_pytree_node(
    State,
    lambda state: (list(state.values()), (list(state), state.module)),
    lambda tensors, context: State(dict(zip(context[0], tensors, strict=True)), context[1]),
)


_open = 0


def _first_order(run: Callable[..., Any], order: int) -> Callable[..., Any]:
    """Wrap backward or grad with an error for a second derivative, which would be silently wrong."""

    @functools.wraps(run)
    def checked(*args: Any, **options: Any) -> Any:
        if options.get("create_graph") or (len(args) > order and args[order]):
            what = f"allow_overwrites(): torch.autograd.{run.__name__} is called with create_graph=True."
            why = "what is kept of an overwritten tensor is a constant, so that second derivatives would be wrong."
            fix = "y = gg.at(x)[idx].set(v)   # instead of x[idx] = v, without this scope"
            raise ArgumentValueError(what, why=why, fix=fix)
        return run(*args, **options)

    return checked


@contextmanager
def allow_overwrites() -> Iterator[None]:
    """Let in-place edits overwrite what autograd has saved for backward: it keeps a copy of what they destroy.

    Without it, backward refuses with "one of the variables needed for gradient computation has been modified by an
    inplace operation". This is `torch.autograd.graph.allow_mutation_on_saved_tensors` as a scope that may be nested.
    Each operation is differentiated at the values that it saw. Forward and backward have to run inside the scope. A
    copy is made only of what is overwritten while it is needed, but every operation passes through Python:
    docs/packages/edits.md has the measured cost. Use it around code that you cannot change, and `gg.at` in your own.

    Returns:
        A context manager; it can decorate a function, too.

    Raises:
        ArgumentValueError: Inside, backward or grad is called with `create_graph=True`: torch keeps values, not their
            history, and a second derivative would be wrong.

    Examples:
        >>> x = torch.tensor([1.0, 2.0], requires_grad=True)
        >>> with gg.allow_overwrites():
        ...     y = x.exp()
        ...     y += 1   # exp() has saved its result
        ...     y.sum().backward()
        >>> torch.equal(x.grad, x.detach().exp())
        True
    """
    global _open
    if _open:  # torch's own cannot be nested
        yield
        return
    patches = Patches()
    with torch.autograd.graph.allow_mutation_on_saved_tensors(), patches.block():
        for name, order in (("backward", 3), ("grad", 4)):  # where create_graph stands among the arguments
            patches.put(vars(torch.autograd), name, _first_order(vars(torch.autograd)[name], order))
        _open += 1
        try:
            yield
        finally:
            _open -= 1
