"""A batch as a tree: its parts, its leaves, the same tree with other parts, and classes that know their samples."""

from __future__ import annotations

import copy
import dataclasses
import sys
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from operator import is_
from typing import Any, NamedTuple, NoReturn, TypeGuard

import torch
from torch.nn.utils.rnn import PackedSequence, pack_sequence, unpack_sequence
from torch.utils.weak import WeakTensorKeyDictionary

from gradgate._names import describe
from gradgate.errors import ArgumentTypeError


def with_own_containers(tree: Any) -> Any:
    """Copy the lists, mappings and dataclasses of a batch, but not what is in them."""
    # A loss function may rebind what is in its batch (`batch.pop("labels")`); the copy does not know of it.
    kind = type(tree)
    if kind is torch.Tensor:
        return tree
    if kind is dict:
        return {key: with_own_containers(part) for key, part in tree.items()}
    if kind is list or kind is tuple:
        parts = [with_own_containers(part) for part in tree]
        return parts if kind is list else tree if all(map(is_, parts, tree)) else tuple(parts)
    if isinstance(tree, torch.Tensor | PackedSequence) or is_array(tree):
        return tree
    if batch_class(tree) is not None:
        return _copied(copy.copy, tree)
    children = None if is_shared(tree) else children_of(tree)
    if children is None:
        return tree
    copies = {key: with_own_containers(part) for key, part in children.items()}
    changeable = isinstance(tree, list | MutableMapping) or dataclasses.is_dataclass(tree)
    if not changeable and all(map(is_, copies.values(), children.values())):
        return tree
    return _copied(lambda tree: rebuilt(tree, copies), tree)


def _copied(make: Callable[[Any], Any], tree: Any) -> Any:
    try:
        return make(tree)
    except TypeError:  # a class of the user's own that cannot be copied: it is used as it is
        return tree


def is_array(value: object) -> TypeGuard[Any]:
    """Tell whether a value is a numpy array, without importing numpy."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.ndarray)


def is_shared(value: object) -> bool:
    """Tell whether a leaf belongs to all samples: it cannot be cut into samples at all."""
    return value is None or isinstance(value, str | bytes | int | float | complex) or not _can_be_indexed(value)


def _can_be_indexed(value: object) -> bool:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return True
    return hasattr(type(value), "__getitem__") and hasattr(type(value), "__len__")


def is_record(value: object) -> bool:
    """Tell whether a value is a named tuple."""
    return isinstance(value, tuple) and hasattr(value, "_fields")


def children_of(tree: Any) -> dict[Any, Any] | None:
    """Give the parts of a container by key, or None for an object that is only known by its items."""
    if isinstance(tree, Mapping):
        return dict(tree.items())
    if is_record(tree):
        return dict(zip(tree._fields, tree, strict=True))
    if isinstance(tree, list | tuple):
        return dict(enumerate(tree))
    if dataclasses.is_dataclass(tree):
        return {field.name: getattr(tree, field.name) for field in dataclasses.fields(tree)}
    return None


def leaves_of(tree: Any) -> Iterator[Any]:
    """Give what is no container, part by part; of a class that knows its samples, what its attributes hold."""
    children = None
    if not isinstance(tree, torch.Tensor) and not is_array(tree):
        if not isinstance(tree, PackedSequence) and batch_class(tree) is not None:
            children = getattr(tree, "__dict__", None)
        elif not is_shared(tree):
            children = children_of(tree)
    if children is None:
        yield tree
    else:
        for child in children.values():
            yield from leaves_of(child)


def rebuilt(tree: Any, children: dict[Any, Any]) -> Any:
    """Give a container of the same kind with other parts; a mapping that cannot be changed as a dict."""
    if is_record(tree):
        return tree._replace(**children)
    if isinstance(tree, list | tuple):
        return type(tree)(children.values())
    if isinstance(tree, Mapping) and not isinstance(tree, MutableMapping):
        return children
    changed = copy.copy(tree)
    for key, child in children.items():
        if isinstance(tree, Mapping):
            changed[key] = child
        else:
            object.__setattr__(changed, key, child)  # a frozen dataclass, too
    return changed


# --- Classes that know their samples --------------------------------------------------------------------------------


class BatchClass(NamedTuple):
    """How to read the batches of a class."""

    matches: Callable[[Any], bool]
    select: Callable[[Any, list[int]], Any]
    count: Callable[[Any], int]


def batch_class(tree: Any) -> BatchClass | None:
    """Find how a batch of a class that knows its samples is read; None for all others."""
    return next((entry for entry in BATCH_CLASSES if entry.matches(tree)), None)


def _has_base(name: str) -> Callable[[Any], bool]:
    return lambda tree: _base(tree, name) is not None


def _base(tree: Any, name: str) -> Any:
    return next((base for base in type(tree).__mro__ if f"{base.__module__}.{base.__qualname__}" == name), None)


def _select_packed(packed: PackedSequence, rows: list[int]) -> PackedSequence:
    sequences = unpack_sequence(packed)
    chosen = [sequences[row] for row in rows]
    lengths = [len(sequence) for sequence in chosen]
    in_order = packed.sorted_indices is None and lengths == sorted(lengths, reverse=True)
    return pack_sequence(chosen, enforce_sorted=in_order)


_OFFSETS: Any = WeakTensorKeyDictionary()
"""The last selection from the offsets of a nested tensor: tensors with common offsets have common ones afterwards."""


def _select_nested(nested: Any, rows: list[int]) -> torch.Tensor:
    parts = nested.unbind()
    chosen = [parts[row] for row in rows]
    if nested.layout is not torch.jagged:
        return torch.nested.as_nested_tensor(chosen)
    ragged = next(dim for dim, size in enumerate(nested.shape) if not isinstance(size, int))
    known_rows, offsets = _OFFSETS.get(nested.offsets(), (None, None))
    if known_rows != rows:
        lengths = [0, *(part.shape[ragged - 1] for part in chosen)]
        offsets = torch.tensor(lengths, device=nested.device).cumsum(0)
        _OFFSETS[nested.offsets()] = list(rows), offsets
    values = torch.cat(chosen or [nested.values().narrow(ragged - 1, 0, 0)], dim=ragged - 1)
    return torch.nested.nested_tensor_from_jagged(values, offsets, jagged_dim=ragged)


_GRAPHS = "torch_geometric.data.batch.Batch"


def _select_graphs(batch: Any, rows: list[int]) -> Any:
    keys = set(batch.keys())
    followed = [key for key in keys if f"{key}_batch" in keys]
    return _base(batch, _GRAPHS).from_data_list(batch.index_select(rows), follow_batch=followed)


def _refuse_graph(graph: Any, rows: Sequence[int] = ()) -> NoReturn:
    raise ArgumentTypeError(
        f"Guard.backward(): the batch is {describe(graph)}, one graph.",
        why="its rows are nodes that edges connect, not samples; the samples of a guard are whole graphs.",
        fix="guard.backward(torch_geometric.data.Batch.from_data_list([graph]), loss_fn)\n"
        "Guard(model, select=..., count=...)   # where a part of one graph is a sample",
    )


def _count_rows(batch: Any) -> int:
    if not batch.batch_dims:
        raise ArgumentTypeError(
            f"Guard.backward(): the batch is {describe(batch)} without a batch size.",
            why="its batch size says which dimension the samples lie along.",
            fix="batch.auto_batch_size_(batch_dims=1)",
        )
    return int(batch.batch_size[0])


BATCH_CLASSES = [
    BatchClass(lambda tree: isinstance(tree, torch.Tensor) and tree.is_nested, _select_nested, lambda x: x.size(0)),
    BatchClass(lambda tree: isinstance(tree, PackedSequence), _select_packed, lambda x: int(x.batch_sizes[0])),
    BatchClass(_has_base(_GRAPHS), _select_graphs, lambda batch: int(batch.num_graphs)),
    BatchClass(_has_base("torch_geometric.data.data.BaseData"), _refuse_graph, _refuse_graph),
    # TensorDict, and the classes that @tensorclass makes, which have no common base.
    BatchClass(lambda tree: hasattr(type(tree), "batch_dims"), lambda batch, rows: batch[rows], _count_rows),
]
"""Those that are known; `register_batch` puts more in front of them."""
