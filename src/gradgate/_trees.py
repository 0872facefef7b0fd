"""Batches as trees: parts and leaves, the number of samples, some of their rows, their ids, rows with NaN."""

from __future__ import annotations

import copy
import dataclasses
import sys
from array import array
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, MutableMapping, Sequence
from math import isfinite
from operator import is_
from typing import Any, NamedTuple, NoReturn, TypeGuard, TypeVar, cast

import torch
from torch.nn.utils.rnn import PackedSequence, pack_sequence, unpack_sequence
from torch.utils.weak import WeakTensorKeyDictionary

from gradgate._checks import wrong_type
from gradgate._names import describe, listed
from gradgate._torch_private import tree_flatten, write_counts
from gradgate.errors import ArgumentTypeError, ArgumentValueError


def with_own_containers(tree: Any) -> Any:
    """Copy the lists, mappings and dataclasses of a batch, but not what is in them."""
    # A loss function may rebind what is in its batch (`batch.pop("labels")`); the copy does not know of it.
    if isinstance(tree, (torch.Tensor, PackedSequence)):
        return tree
    # The search in the known classes takes longer than all else, and every step asks.
    known = type(tree) not in (dict, list, tuple) and batch_class(tree) is not None
    parts = {} if known else children_of(tree)
    if parts is None:
        return tree
    own = {key: with_own_containers(part) for key, part in parts.items()}
    changeable = known or isinstance(tree, (list, MutableMapping)) or dataclasses.is_dataclass(tree)
    if not changeable and all(map(is_, own.values(), parts.values())):
        return tree
    try:
        return copy.copy(tree) if known else rebuilt(tree, own)
    except TypeError:  # a class of the user's own that cannot be copied: it is used as it is
        return tree


def is_array(value: object) -> TypeGuard[Any]:
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.ndarray)


def _is_dense(value: object) -> TypeGuard[Any]:
    return is_array(value) or (isinstance(value, torch.Tensor) and not value.is_nested)


def is_shared(value: object) -> bool:
    """Return whether a leaf belongs to all samples: it cannot be cut into samples at all."""
    kind = type(value)
    indexed = dataclasses.is_dataclass(kind) or (hasattr(kind, "__getitem__") and hasattr(kind, "__len__"))
    return isinstance(value, (str, bytes, int, float, complex)) or not indexed


def is_record(value: object) -> bool:
    return isinstance(value, tuple) and hasattr(value, "_fields")


def children_of(tree: Any) -> dict[Any, Any] | None:
    """Return the parts of a container by key, or None for an object that is only known by its items."""
    if isinstance(tree, Mapping):
        return dict(tree.items())
    if is_record(tree):
        return dict(zip(tree._fields, tree, strict=True))
    if isinstance(tree, (list, tuple)):
        return dict(enumerate(tree))
    if dataclasses.is_dataclass(type(tree)):
        return {field.name: getattr(tree, field.name) for field in dataclasses.fields(tree)}
    return None


def leaves_of(tree: Any) -> Iterator[Any]:
    """Return what is no container, part by part; of a class that knows its samples, what its attributes hold."""
    plain = isinstance(tree, (torch.Tensor, PackedSequence)) or batch_class(tree) is None
    children = children_of(tree) if plain else getattr(tree, "__dict__", None)
    if children is None:
        yield tree
    else:
        for child in children.values():
            yield from leaves_of(child)


def rebuilt(tree: Any, children: dict[Any, Any]) -> Any:
    """Return a container of the same kind with other parts; a mapping that cannot be changed as a dict."""
    if is_record(tree):
        return tree._replace(**children)
    if isinstance(tree, (list, tuple)):
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

    matches: Callable[[Any], Any]
    select: Callable[[Any, list[int]], Any]
    count: Callable[[Any], int]


def batch_class(tree: Any) -> BatchClass | None:
    """Find how a batch of a class that knows its samples is read; None for all others."""
    return next((entry for entry in BATCH_CLASSES if entry.matches(tree)), None)


def _base(tree: Any, name: str) -> Any:
    """Return the class of this name that an object is an instance of, or None; its package may not be installed."""
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
    BatchClass(lambda tree: _base(tree, _GRAPHS), _select_graphs, lambda batch: int(batch.num_graphs)),
    BatchClass(lambda tree: _base(tree, "torch_geometric.data.data.BaseData"), _refuse_graph, _refuse_graph),
    # TensorDict, and the classes that @tensorclass makes, which have no common base.
    BatchClass(lambda tree: hasattr(type(tree), "batch_dims"), lambda batch, rows: batch[rows], _count_rows),
]
"""Those that are known; `register_batch` puts more in front of them."""


Rows = Sequence[int]
Ids = Sequence[Any] | torch.Tensor
ReadIds = str | Callable[[Any], Ids]
Select = Callable[[Any, list[int]], Any]
Batch = TypeVar("Batch")
SELECT_FIX = "Guard(model, select=lambda batch, rows: ...)   # the same batch with only these rows"


# --- Samples and rows -------------------------------------------------------------------------------------------------


def register_batch(
    cls: type[Batch], select: Callable[[Batch, list[int]], Batch], count: Callable[[Batch], int]
) -> None:
    """Say how batches of a class of your own are read, by every guard, also where they are parts of other batches.

    The guard sees the tensors that the attributes of such a batch hold. It copies the batch by `copy.copy` before a
    step, because a loss function may rebind its attributes.

    Args:
        cls: The class; its subclasses are read in the same way.
        select: `select(batch, rows)` returns the same batch with only these rows, in this order, also with repeats.
        count: `count(batch)` returns the number of samples.

    Raises:
        ArgumentTypeError: An argument has the wrong kind.

    Examples:
        >>> class Pairs:
        ...     def __init__(self, left, right):
        ...         self.left, self.right = left, right
        >>> gg.guard.register_batch(
        ...     Pairs,
        ...     select=lambda batch, rows: Pairs(batch.left[rows], batch.right[rows]),
        ...     count=lambda batch: len(batch.left),
        ... )
        >>> model = torch.nn.Linear(3, 1)
        >>> batch = Pairs(torch.randn(4, 3), torch.tensor([0.0, 1.0, float("nan"), 1.0]))
        >>> gg.Guard(model).backward(batch, lambda b: (model(b.left)[:, 0] - b.right).square().mean()).kept
        [0, 1, 3]
    """
    given: tuple[Any, Any, Any] = cls, select, count
    if not isinstance(given[0], type) or not all(map(callable, given)):
        raise ArgumentTypeError(
            f"register_batch(): the arguments are {describe(cls)}, {describe(select)} and {describe(count)}.",
            why="a class is read by two functions of its batches.",
            fix="gg.guard.register_batch(MyBatch, select=lambda batch, rows: batch[rows], count=len)",
        )
    BATCH_CLASSES.insert(0, BatchClass(lambda tree: isinstance(tree, cls), select, count))


class BatchLayout(NamedTuple):
    """Where the samples lie in the tensors of a batch."""

    dim: int = 0
    dims: Mapping[Any, int] = {}
    shared: frozenset[Any] = frozenset()

    def of(self, key: Any) -> BatchLayout | None:
        """Return the layout of the part with this key; None if it is shared."""
        if key in self.shared:
            return None
        return self._replace(dim=self.dims[key]) if key in self.dims else self


class BatchReader:
    """Counts and takes the samples of a batch."""

    def __init__(
        self,
        batch_dim: int | Mapping[Any, int] = 0,
        select: Select | None = None,
        count: Callable[[Any], int] | None = None,
        shared: Iterable[Any] = (),
    ) -> None:
        dim, dims = (batch_dim, {}) if isinstance(batch_dim, int) else (0, dict(batch_dim))
        self.layout = BatchLayout(dim, dims, frozenset(shared))
        self.batch_dim = dim
        self._by_shape = not (dims or self.layout.shared or select or count)
        self._select = select
        self._count = count

    def read(self, batch: Any, ids: Ids | None = None) -> tuple[int, int, Sequence[torch.Tensor]]:
        """Return what `count`, `writes` and `leaves` do; of most batches in one round, because every step asks."""
        if ids is not None and not _can_be_looked_up(ids):
            why = "it has one name for each row, to be looked up by the number of the row."
            raise wrong_type(ids, "ids", "Guard.backward", why, "guard.backward(batch, loss_fn, ids=list(ids))")
        # Nearly every batch is a few tensors of one length; the general path costs ten times as much.
        size, tensors = self._plain(batch)
        if size is None or (ids is not None and len(ids) != size):
            size, tensors = self.count(batch, ids), _tensors_of(batch)
        return size, write_counts(tensors), _gradient_leaves(tensors)

    def count(self, batch: Any, ids: Ids | None = None) -> int:
        if self._count is not None:
            found = self._count(batch)
        elif self._select is not None:
            found = _count_for_select(batch, self.layout, ids)
        else:
            found = self._agreed(batch, ids)
        # Ids of a loader may be of another batch.
        if ids is not None and len(ids) != found and not hasattr(ids, "if_current"):
            raise ArgumentValueError(
                f"Guard.backward(): `ids` has {len(ids)} entries, the batch has {found} samples.",
                why="each sample has one name.",
                fix="guard.backward(batch, loss_fn, ids=ids_of_this_batch)",
            )
        return found

    def writes(self, batch: Any) -> int:
        return write_counts(_tensors_of(batch))

    def leaves(self, batch: Any) -> list[torch.Tensor]:
        """List the tensors of a batch that take a gradient themselves."""
        return _gradient_leaves(_tensors_of(batch))

    def select(self, batch: Any, rows: Rows, size: int) -> Any:
        return self.taking(batch, size)(rows, index_of(rows))

    def taking(self, batch: Any, size: int) -> Callable[[Rows, torch.Tensor], Any]:
        """Return `select` of a batch as a function of the rows, which are given as numbers and as an index."""
        if (select := self._select) is not None:
            return lambda rows, index: select(batch, list(rows))
        return lambda rows, index: select_rows(batch, index, size, self.layout)

    def _plain(self, batch: Any) -> tuple[int | None, Collection[torch.Tensor]]:
        """Return the size of a few tensors of one length, and these; no size for any other batch."""
        kind, dim, size = type(batch), self.batch_dim, None
        parts = batch if kind is tuple or kind is list else batch.values() if kind is dict else (batch,)
        for part in parts if self._by_shape else ():
            if type(part) is not torch.Tensor or part.is_nested or part.dim() <= dim:
                return None, ()
            if size is not None and part.shape[dim] != size:
                return None, ()
            size = part.shape[dim]
        return size, parts

    def _agreed(self, batch: Any, ids: Ids | None) -> int:
        possible = _sizes(batch, self.layout)
        if possible is None:
            raise ArgumentTypeError(
                f"Guard.backward(): the batch is {describe(batch)}, and nothing in it is per sample.",
                why="the guard takes samples out of a batch, so it must see which parts belong to one sample.",
                fix=f"guard.backward([sample], loss_fn)   # a batch of one\n{SELECT_FIX}",
            )
        if ids is not None and len(ids) in possible:
            return len(ids)
        if possible and not _only_by_length(batch, self.layout):
            return possible[0]
        seen = [f"{path}: {size}" for path, size in _leaf_sizes(batch, self.layout, "batch")]
        raise ArgumentValueError(
            f"Guard.backward(): the parts of the batch do not agree on the number of samples ({listed(seen, 8)}).",
            why="a part that is not per sample (class weights, a flat list of tokens) looks like one that is.",
            fix="guard.backward(batch, loss_fn, ids=...)   # for a list with one tensor for each sample\n"
            'Guard(model, shared=("class_weights",))   # keys of parts that are not per sample\n'
            f"{SELECT_FIX}",
        )


def _tensors_of(batch: Any) -> list[torch.Tensor]:
    return [leaf for leaf in leaves_of(batch) if isinstance(leaf, torch.Tensor)]


def _gradient_leaves(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    return [tensor for tensor in tensors if tensor.requires_grad and tensor.is_leaf]


def _can_be_looked_up(ids: object) -> bool:
    return hasattr(ids, "__len__") and hasattr(ids, "__getitem__")


def read_ids(where: ReadIds, batch: Any, size: int) -> Ids:
    """Read the ids of the samples from a batch, by `Guard(ids=...)`."""
    keys = list(batch.keys()) if hasattr(batch, "keys") else None
    if callable(where):
        ids: Any = where(batch)
    elif where in keys if keys is not None else hasattr(batch, where):
        ids = getattr(batch, where) if keys is None else batch[where]
    else:
        raise ArgumentValueError(
            f"Guard(ids={where!r}): the batch has no {where!r}; it is {describe(batch)}.",
            why="`ids` is a key or an attribute of each batch" + (f"; there are {listed(keys)}." if keys else "."),
            fix="Guard(model, ids=lambda batch: ...)   # one id for each sample",
        )
    if not _can_be_looked_up(ids) or len(ids) != size:
        raise ArgumentValueError(
            f"Guard(ids=...): it gave {describe(ids)} for a batch of {size} samples.",
            why="there is one id for each sample, to be looked up by the number of its row.",
            fix="Guard(model, ids=lambda batch: ...)   # one id for each sample",
        )
    return cast(Ids, ids)


def index_of(rows: Rows) -> torch.Tensor:
    """Make an index tensor of row numbers; through a buffer, twenty times faster than `torch.tensor(list)`."""
    if not rows:
        return torch.empty(0, dtype=torch.int64, device="cpu")
    return torch.frombuffer(array("q", rows), dtype=torch.int64)


def select_rows(tree: Any, index: torch.Tensor, size: int, layout: BatchLayout | None) -> Any:
    """Take rows of every part of a tree that is per sample; parts of another size are shared."""
    if layout is None:
        return tree
    if _is_dense(tree):
        if (dim := batch_dim_of(tree, size, layout.dim)) is None:
            return tree
        if is_array(tree):
            return tree.take(index.numpy(), axis=dim)
        # The memory layout must be the one of `x[rows]`, which a faster index_select has for contiguous x only.
        index = index.to(tree.device)
        return tree.index_select(dim, index) if tree.is_contiguous() else tree[(slice(None),) * dim + (index,)]
    if (known := batch_class(tree)) is not None:
        return known.select(tree, index.tolist()) if known.count(tree) == size else tree
    if is_shared(tree):
        return tree
    children = children_of(tree)
    if children is None:
        return _items(tree, index.tolist()) if len(tree) == size else tree
    if isinstance(tree, list | tuple) and not is_record(tree) and _as_samples(tree, size, layout):
        return type(tree)([tree[row] for row in index.tolist()])
    return rebuilt(tree, {key: select_rows(child, index, size, layout.of(key)) for key, child in children.items()})


def batch_dim_of(tensor: Any, size: int, batch_dim: int) -> int | None:
    """Find the dimension of a tensor or array that the samples lie along, or None where it has none."""
    for dim in (batch_dim, 0):
        if tensor.ndim > dim and tensor.shape[dim] == size:
            return dim
    return None


def _items(tree: Any, rows: list[int]) -> Any:
    """Take rows of an object with `__getitem__`: by a list of rows where it can, else one by one."""
    try:
        taken = tree[rows]
        if len(taken) == len(rows):
            return taken
    except (TypeError, KeyError, IndexError, ValueError):
        return [tree[row] for row in rows]
    raise ArgumentTypeError(
        f"Guard.backward(): taking {len(rows)} rows of {describe(tree)} gave {len(taken)} items.",
        why="an object with `__getitem__` must give one item for each row that is asked for.",
        fix=SELECT_FIX,
    )


def _as_samples(tree: Sequence[Any], size: int, layout: BatchLayout) -> bool:
    """Return whether a list holds samples, not fields: its length fits, and its fields cannot all have this size."""
    if len(tree) != size:
        return False
    fields = _common(dict(enumerate(tree)), layout)
    return fields is None or size not in fields or _are_samples(tree, layout)


def _are_samples(tree: Sequence[Any], layout: BatchLayout) -> bool:
    """Return whether a list has samples like `(image, target)`: tuples alike, not all tensors of one batch size."""
    if not isinstance(tree, list) or not tree or not all(type(part) is tuple for part in tree):
        return False
    kinds = [[(type(value), getattr(value, "dtype", None)) for value in part] for part in tree]
    tensors = [value for part in tree for value in part if isinstance(value, torch.Tensor) or is_array(value)]
    if not tensors or any(kind != kinds[0] for kind in kinds):
        return False
    return len(tensors) < sum(map(len, tree)) or not _common(dict(enumerate(tensors)), layout)


def _sizes(tree: Any, layout: BatchLayout) -> list[int] | None:
    """Return the numbers of samples that a tree may hold, best first; None where it says nothing."""
    if _is_dense(tree):
        shape = tuple(tree.shape)
        return list(dict.fromkeys(shape[dim] for dim in (layout.dim, 0) if dim < len(shape))) or None
    if (known := batch_class(tree)) is not None:
        return [known.count(tree)]
    if is_shared(tree):
        return None
    children = children_of(tree)
    if children is None:
        return [len(tree)]
    fields = _common(children, layout)
    if isinstance(tree, list | tuple) and not is_record(tree):
        sizes = [*(fields or []), len(tree)]
        return list(dict.fromkeys(sizes[::-1] if _are_samples(tree, layout) else sizes)) if tree else None
    return fields


def _common(parts: Mapping[Any, Any], layout: BatchLayout) -> list[int] | None:
    """Return the numbers of samples that all parts may hold, best first; None where none says anything."""
    common: list[int] | None = None
    for key, part in parts.items():
        below = layout.of(key)
        sizes = None if below is None else _sizes(part, below)
        if sizes is not None:
            common = sizes if common is None else [size for size in common if size in sizes]
    return common


def _only_by_length(tree: Any, layout: BatchLayout) -> bool:
    """Return whether a list of tensors is a batch only if each of them is a sample: more likely, they do not fit."""
    if not isinstance(tree, list | tuple) or is_record(tree):
        return False
    tensors = any(isinstance(part, torch.Tensor) or is_array(part) for part in tree)
    return tensors and _common(dict(enumerate(tree)), layout) == []


def _leaf_sizes(tree: Any, layout: BatchLayout | None, path: str) -> list[tuple[str, int]]:
    """List the sizes that the parts of a tree ask for, with their paths, for a message."""
    if layout is None:
        return []
    children = children_of(tree) if batch_class(tree) is None else None
    if children is None:
        sizes = _sizes(tree, layout)
        return [(path, sizes[0])] if sizes else []
    return [leaf for key, child in children.items() for leaf in _leaf_sizes(child, layout.of(key), f"{path}[{key!r}]")]


def _count_for_select(batch: Any, layout: BatchLayout, ids: Ids | None) -> int:
    """Count the samples of a batch that only the user's `select` can cut."""
    if ids is not None:
        return len(ids)
    if isinstance(batch, torch.Tensor) and not batch.is_nested:
        return batch.size(layout.dim)
    if (known := batch_class(batch)) is not None:
        return known.count(batch)
    if isinstance(batch, list | tuple | Mapping):
        own = ((part, below) for key, part in (children_of(batch) or {}).items() if (below := layout.of(key)))
        return _count_for_select(*next(own), None)
    if hasattr(type(batch), "__len__"):
        return len(batch)
    raise ArgumentTypeError(
        f"Guard.backward(): the number of samples of {describe(batch)} is not known.",
        why="`select` takes rows, but something must say how many there are.",
        fix="Guard(model, select=..., count=lambda batch: ...)   # or guard.backward(batch, loss_fn, ids=...)",
    )


# --- Rows that are not finite ---------------------------------------------------------------------------------------


def tensors_in(tree: Any) -> list[torch.Tensor]:
    """List the dense floating-point tensors in the arguments or the output of a module."""
    return [
        leaf
        for leaf in tree_flatten(tree)[0]
        if isinstance(leaf, torch.Tensor)
        and leaf.layout is torch.strided
        and not leaf.is_nested
        and (leaf.is_floating_point() or leaf.is_complex())
    ]


def non_finite_rows(tensors: Iterable[torch.Tensor], size: int, batch_dim: int) -> frozenset[int]:
    """Find the rows in which any of some tensors is not finite."""
    rows: set[int] = set()
    for tensor in tensors:
        dim = batch_dim_of(tensor, size, batch_dim)
        values = tensor.detach()
        # A finite sum proves that all are finite, in a fraction of the time of a look at each.
        if dim is not None and not isfinite(abs(values.sum().item())):
            bad = ~torch.isfinite(values.movedim(dim, 0)).reshape(size, -1).all(1)
            rows.update(bad.nonzero().flatten().tolist())
    return frozenset(rows)
