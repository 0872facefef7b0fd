"""The graph that autograd records: Functions, nodes, what they saved."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch

__all__ = [
    "apply_function",
    "bound_apply",
    "current_node",
    "function_class_of",
    "latest_node_number",
    "leaf_of",
    "node_number",
    "nodes_below",
    "saved_tensors_of",
    "schema_of",
]


def apply_function(function: type[torch.autograd.Function], *args: Any) -> Any:
    """Call an autograd Function without the per-call signature lookup of `Function.apply`.

    `Function.apply` of a new-style Function (one with `setup_context`) looks at the signature of `forward` on
    each call, about 20 us; the C-level apply beneath it does not. Only the C-level one runs old-style Functions
    (a `forward` that takes ctx) just as `apply` does, and only outside torch.func and torch.compile.

    Args:
        function: The Function, with a forward that takes ctx.
        *args: What forward takes after ctx.

    Returns:
        What forward returns.
    """
    return super(torch.autograd.Function, function).apply(*args)  # type: ignore[misc]


def bound_apply(function: type[torch.autograd.Function]) -> Any:
    """Give what `apply_function` calls for this Function, to be kept and called where every microsecond counts.

    Args:
        function: As for `apply_function`.

    Returns:
        The C-level apply.
    """
    return super(torch.autograd.Function, function).apply  # type: ignore[misc]


current_node = torch._C._current_autograd_node
"""Give the node of the graph whose backward runs in this thread, or None."""


def latest_node_number() -> int:
    """Give the number of the node that autograd made last in this thread: in an operation, the operation's own."""
    return torch._C._autograd._get_sequence_nr() - 1


def node_number(node: Any) -> int:
    """Give the number of a node of the graph, which `latest_node_number` gave when it was made; -1 for leaves.

    Args:
        node: A node, as in `tensor.grad_fn`.

    Returns:
        Its number.
    """
    number = int(node._sequence_nr())
    return -1 if number >= 2**63 else number


def nodes_below(tensors: Iterable[torch.Tensor]) -> Iterator[Any]:
    """Walk through the graph that tensors were computed by.

    Args:
        tensors: Where to begin; those without a graph are passed over.

    Yields:
        Every node that a backward from there would come to, once each.
    """
    waiting = [tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None]
    seen = set(waiting)
    while waiting:
        node = waiting.pop()
        yield node
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                waiting.append(following)


def leaf_of(node: Any) -> torch.Tensor | None:
    """Give the leaf that a node adds gradients to.

    Args:
        node: A node of the graph.

    Returns:
        The leaf, or None for a node that stands for an operation.
    """
    return getattr(node, "variable", None)


def schema_of(operator: Any) -> Any:
    """Give the schema of an operator: its arguments and results, and which of them it writes to or views.

    Args:
        operator: What a dispatch mode is handed as `func`.

    Returns:
        The schema.
    """
    return operator._schema


def function_class_of(node: Any) -> type[torch.autograd.Function] | None:
    """Give the user's autograd Function that made a node.

    Args:
        node: A node, as in `tensor.grad_fn`.

    Returns:
        The class, or None for nodes of torch's own.
    """
    return getattr(type(node), "_forward_cls", None)


def saved_tensors_of(node: Any) -> dict[str, torch.Tensor]:
    """Give the tensors that a node of torch's own saved for backward and has not let go of.

    Args:
        node: A node whose backward runs.

    Returns:
        The tensors, each by its name in the formula, such as "self" or "result".
    """
    found = {}
    for name in dir(node):
        if name.startswith("_saved_"):
            try:
                value = getattr(node, name)
            except RuntimeError:  # it was overwritten, which is told elsewhere, or let go
                continue
            if isinstance(value, torch.Tensor):
                found[name.removeprefix("_saved_")] = value
    return found
