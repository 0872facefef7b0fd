"""A batch as a tree: which parts it is made of, what its leaves are, and the same tree with other parts."""

from __future__ import annotations

import copy
import dataclasses
import sys
from collections.abc import Iterator, Mapping, MutableMapping
from operator import is_
from typing import Any, TypeGuard

import torch


def with_own_containers(tree: Any) -> Any:
    """Copy the lists, mappings and dataclasses of a batch, but not what is in them.

    A loss function may rebind what is in its batch (`batch.pop("labels")`); the copy does not know of it.
    """
    kind = type(tree)
    if kind is torch.Tensor:
        return tree
    if kind is dict:
        return {key: with_own_containers(part) for key, part in tree.items()}
    if kind is list or kind is tuple:
        parts = [with_own_containers(part) for part in tree]
        return parts if kind is list else tree if all(map(is_, parts, tree)) else tuple(parts)
    children = None if is_shared(tree) or isinstance(tree, torch.Tensor) or is_array(tree) else children_of(tree)
    if children is None:
        return tree
    copies = {key: with_own_containers(part) for key, part in children.items()}
    changeable = isinstance(tree, list | MutableMapping) or dataclasses.is_dataclass(tree)
    if not changeable and all(map(is_, copies.values(), children.values())):
        return tree
    try:
        return rebuilt(tree, copies)
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
        return {key: tree[key] for key in tree}
    if is_record(tree):
        return dict(zip(tree._fields, tree, strict=True))
    if isinstance(tree, list | tuple):
        return dict(enumerate(tree))
    if dataclasses.is_dataclass(tree):
        return {field.name: getattr(tree, field.name) for field in dataclasses.fields(tree)}
    return None


def leaves_of(tree: Any) -> Iterator[Any]:
    """Give what is no container, part by part."""
    children = None if is_shared(tree) or isinstance(tree, torch.Tensor) or is_array(tree) else children_of(tree)
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
