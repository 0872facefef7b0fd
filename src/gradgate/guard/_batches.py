"""Batches of any form: how many samples they hold, some of their rows, their ids, and which rows are not finite."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from math import isfinite
from typing import Any, cast

import torch
from torch.nn.utils.rnn import PackedSequence

from gradgate._loader_link import LoaderIds
from gradgate._names import describe, listed
from gradgate._torch_private import tree_flatten, write_counts
from gradgate._trees import children_of, is_array, is_record, is_shared, leaves_of, rebuilt
from gradgate.errors import ArgumentTypeError, ArgumentValueError

Rows = Sequence[int]
Ids = Sequence[Any] | torch.Tensor
ReadIds = str | Callable[[Any], Ids]
Select = Callable[[Any, list[int]], Any]
_MISSING = object()
SELECT_FIX = "Guard(model, select=lambda batch, rows: ...)   # the same batch with only these rows"


class BatchReader:
    """Counts and takes the samples of a batch.

    Args:
        batch_dim: The dimension of tensors that samples are stacked along.
        select: The user's own way to take rows, for batches that cannot be read.
        count: The user's own way to count samples, for the same.
    """

    def __init__(
        self, batch_dim: int = 0, select: Select | None = None, count: Callable[[Any], int] | None = None
    ) -> None:
        self.batch_dim = batch_dim
        self._select = select
        self._count = count

    def read(self, batch: Any, ids: Ids | None = None) -> tuple[int, int, Sequence[torch.Tensor]]:
        """Give what `count`, `writes` and `leaves` do; of most batches in one round, because every step asks."""
        if ids is not None and not (hasattr(ids, "__len__") and hasattr(ids, "__getitem__")):
            raise ArgumentTypeError(
                f"Guard.backward(): `ids` is {describe(ids)}.",
                why="it has one name for each row, to be looked up by the number of the row.",
                fix="guard.backward(batch, loss_fn, ids=list(ids))",
            )
        plain = self._plain(batch) if self._count is None and self._select is None else None
        if plain is None or (ids is not None and len(ids) != plain[0]):
            return self.count(batch, ids), self.writes(batch), self.leaves(batch)
        size, writes, takes_gradient = plain
        return size, writes, self.leaves(batch) if takes_gradient else ()

    def count(self, batch: Any, ids: Ids | None = None) -> int:
        """Tell how many samples a batch holds.

        Args:
            batch: The batch.
            ids: The names of its samples, where given: as many as there are samples.

        Returns:
            The number of samples.

        Raises:
            ArgumentTypeError: There is nothing in it that is per sample.
            ArgumentValueError: Its parts do not agree on a number, or not with ids.
        """
        if self._count is not None:
            found = self._count(batch)
        elif self._select is not None:
            found = _count_for_select(batch, self.batch_dim, ids)
        else:
            # Nearly every batch is a few tensors of one length; the general way costs ten times as much.
            plain = self._plain(batch)
            found = -1 if plain is None else plain[0]
            if found < 0 or (ids is not None and len(ids) != found):
                found = self._agreed(batch, ids)
        if ids is not None and len(ids) != found and not isinstance(ids, LoaderIds):
            raise ArgumentValueError(
                f"Guard.backward(): `ids` has {len(ids)} entries, the batch has {found} samples.",
                why="each sample has one name.",
                fix="guard.backward(batch, loss_fn, ids=ids_of_this_batch)",
            )
        return found

    def writes(self, batch: Any) -> int:
        """Count the writes into the tensors of a batch that autograd has seen so far."""
        return write_counts(leaf for leaf in leaves_of(batch) if isinstance(leaf, torch.Tensor))

    def leaves(self, batch: Any) -> list[torch.Tensor]:
        """List the tensors of a batch that take a gradient themselves."""
        kind = type(batch)
        parts = batch if kind is tuple or kind is list else (batch,) if kind is torch.Tensor else leaves_of(batch)
        found = [part for part in parts if isinstance(part, torch.Tensor) and part.requires_grad]
        return [tensor for tensor in found if tensor.is_leaf]

    def select(self, batch: Any, rows: Rows, size: int) -> Any:
        """Take some samples of a batch.

        Args:
            batch: The batch.
            rows: Which ones, by their place.
            size: How many samples the batch holds.

        Returns:
            A batch of the same form with these samples only.
        """
        return self.taking(batch, size)(rows, index_of(rows))

    def taking(self, batch: Any, size: int) -> Callable[[Rows, torch.Tensor], Any]:
        """Give `select` of a batch as a function of the rows, which are given as numbers and as an index."""
        if (select := self._select) is not None:
            return lambda rows, index: select(batch, list(rows))
        take = taking(batch, size, self.batch_dim)
        return lambda rows, index: take(index)

    def _plain(self, batch: Any) -> tuple[int, int, bool] | None:
        """Give the size of a few tensors of one length, the writes to them, and whether any takes a gradient."""
        kind = type(batch)
        parts = batch if kind is tuple or kind is list else batch.values() if kind is dict else (batch,)
        size, takes_gradient, dim = -1, False, self.batch_dim
        for part in parts:
            if type(part) is not torch.Tensor or part.is_nested:
                return None
            shape = part.shape
            if len(shape) <= dim or shape[dim] != size >= 0:
                return None
            size = shape[dim]
            takes_gradient = takes_gradient or part.requires_grad
        return None if size < 0 else (size, write_counts(parts), takes_gradient)

    def _agreed(self, batch: Any, ids: Ids | None) -> int:
        possible = _sizes(batch, self.batch_dim)
        if possible is None:
            raise ArgumentTypeError(
                f"Guard.backward(): the batch is {describe(batch)}, and nothing in it is per sample.",
                why="the guard takes samples out of a batch, so it must see which parts belong to one sample.",
                fix=SELECT_FIX,
            )
        if ids is not None and len(ids) in possible:
            return len(ids)
        if possible and not _only_by_length(batch, self.batch_dim):
            return possible[0]
        seen = [f"{path}: {size}" for path, size in _leaf_sizes(batch, self.batch_dim, "batch")]
        raise ArgumentValueError(
            f"Guard.backward(): the parts of the batch do not agree on the number of samples ({listed(seen, 8)}).",
            why="a part that is not per sample (class weights, a flat list of tokens) cannot be told from one that is.",
            fix=f"guard.backward(batch, loss_fn, ids=...)   # for a list with one tensor for each sample\n{SELECT_FIX}",
        )


def read_ids(where: ReadIds, batch: Any, size: int) -> Ids:
    """Read the ids of the samples from a batch, by `Guard(ids=...)`."""
    ids: Any = _MISSING
    if not isinstance(where, str):
        ids = where(batch)
    else:
        keys = list(batch.keys()) if hasattr(batch, "keys") else None
        if keys is None:
            ids = getattr(batch, where, _MISSING)
        elif where in keys:
            ids = batch[where]
        if ids is _MISSING:
            raise ArgumentValueError(
                f"Guard(ids={where!r}): the batch has no {where!r}; it is {describe(batch)}.",
                why="`ids` is a key or an attribute of each batch" + (f"; there are {listed(keys)}." if keys else "."),
                fix="Guard(model, ids=lambda batch: ...)   # one id for each sample",
            )
    if not (hasattr(ids, "__len__") and hasattr(ids, "__getitem__")) or len(ids) != size:
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


def select_rows(tree: Any, index: torch.Tensor, size: int, batch_dim: int) -> Any:
    """Take rows of every part of a tree that is per sample; parts of another size are shared.

    Args:
        tree: The batch, or the arguments or the output of a module.
        index: The rows, as an integer tensor.
        size: How many samples the tree holds.
        batch_dim: The dimension of tensors that samples are stacked along.

    Returns:
        A tree of the same form.
    """
    if isinstance(tree, torch.Tensor):
        dim = batch_dim_of(tree, size, batch_dim)
        if dim is None:
            return tree
        # The memory layout must be the one of `x[rows]`, which a faster index_select has for contiguous x only.
        index = index.to(tree.device)
        return tree.index_select(dim, index) if tree.is_contiguous() else tree[(slice(None),) * dim + (index,)]
    if is_array(tree):
        dim = batch_dim_of(tree, size, batch_dim)
        return tree if dim is None else tree.take(index.numpy(), axis=dim)
    if is_shared(tree):
        return tree
    children = children_of(tree)
    if children is None:
        return _items(tree, index.tolist()) if len(tree) == size else tree
    if isinstance(tree, list | tuple) and not is_record(tree) and _as_samples(tree, size, batch_dim):
        return type(tree)([tree[row] for row in index.tolist()])
    return rebuilt(tree, {key: select_rows(child, index, size, batch_dim) for key, child in children.items()})


def taking(tree: Any, size: int, batch_dim: int) -> Callable[[torch.Tensor], Any]:
    """Give `select_rows` of a tree as a function of the rows alone, told all that can be told before.

    Args:
        tree: As for `select_rows`.
        size: As for `select_rows`.
        batch_dim: As for `select_rows`.

    Returns:
        A function of the rows, as an integer tensor.
    """
    if isinstance(tree, torch.Tensor):
        dim = batch_dim_of(tree, size, batch_dim)
        if dim is not None and tree.is_cpu and tree.is_contiguous():
            return partial(tree.index_select, dim)
    elif type(tree) in (tuple, list) and not _as_samples(tree, size, batch_dim):
        kind, takes = type(tree), [taking(part, size, batch_dim) for part in tree]
        return lambda index: kind([take(index) for take in takes])
    return lambda index: select_rows(tree, index, size, batch_dim)


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


def _as_samples(tree: Sequence[Any], size: int, batch_dim: int) -> bool:
    """Tell whether a list holds samples, not fields: its length fits, and its fields cannot all have this size."""
    if len(tree) != size:
        return False
    fields = _common(tree, batch_dim)
    return fields is None or size not in fields


def _sizes(tree: Any, batch_dim: int) -> list[int] | None:
    """Give the numbers of samples that a tree may hold, best first; None where it says nothing."""
    if isinstance(tree, PackedSequence) or (isinstance(tree, torch.Tensor) and tree.is_nested):
        kind = "PackedSequence" if isinstance(tree, PackedSequence) else "nested tensor"
        raise ArgumentTypeError(
            f"Guard.backward(): the batch holds a {kind}.",
            why="its samples do not lie along one dimension, so rows cannot be taken in general.",
            fix=SELECT_FIX,
        )
    if isinstance(tree, torch.Tensor) or is_array(tree):
        shape = tuple(tree.shape)
        return list(dict.fromkeys(shape[dim] for dim in (batch_dim, 0) if dim < len(shape))) or None
    if is_shared(tree):
        return None
    children = children_of(tree)
    if children is None:
        return [len(tree)]
    fields = _common(children.values(), batch_dim)
    if isinstance(tree, list | tuple) and not is_record(tree):
        return list(dict.fromkeys([*(fields or []), len(tree)])) if tree else None
    return fields


def _common(parts: Iterable[Any], batch_dim: int) -> list[int] | None:
    """Give the numbers of samples that all parts may hold, best first; None where none says anything."""
    common: list[int] | None = None
    for part in parts:
        sizes = _sizes(part, batch_dim)
        if sizes is not None:
            common = sizes if common is None else [size for size in common if size in sizes]
    return common


def _only_by_length(tree: Any, batch_dim: int) -> bool:
    """Tell whether a list of tensors is a batch only if each of them is a sample: more likely, they do not fit."""
    if not isinstance(tree, list | tuple) or is_record(tree):
        return False
    tensors = any(isinstance(part, torch.Tensor) or is_array(part) for part in tree)
    return tensors and _common(tree, batch_dim) == []


def _leaf_sizes(tree: Any, batch_dim: int, path: str) -> list[tuple[str, int]]:
    """List the sizes that the parts of a tree ask for, with their paths, for a message."""
    children = None if is_shared(tree) or is_array(tree) or isinstance(tree, torch.Tensor) else children_of(tree)
    if children is None:
        sizes = _sizes(tree, batch_dim)
        return [(path, sizes[0])] if sizes else []
    return [leaf for key, child in children.items() for leaf in _leaf_sizes(child, batch_dim, f"{path}[{key!r}]")]


def _count_for_select(batch: Any, batch_dim: int, ids: Ids | None) -> int:
    """Count the samples of a batch that only the user's `select` can cut."""
    if ids is not None:
        return len(ids)
    if isinstance(batch, PackedSequence):
        return int(batch.batch_sizes[0])
    if isinstance(batch, torch.Tensor):
        return batch.size(0) if batch.is_nested else batch.size(batch_dim)
    if isinstance(batch, list | tuple):
        return _count_for_select(batch[0], batch_dim, None)
    if isinstance(batch, Mapping):
        return _count_for_select(next(iter(batch.values())), batch_dim, None)
    if hasattr(type(batch), "__len__"):
        return len(batch)
    raise ArgumentTypeError(
        f"Guard.backward(): the number of samples of {describe(batch)} is not known.",
        why="`select` takes rows, but something must say how many there are.",
        fix="Guard(model, select=..., count=lambda batch: ...)   # or guard.backward(batch, loss_fn, ids=...)",
    )


# --- Rows that are not finite ---------------------------------------------------------------------------------------


def leaves_in(tree: Any) -> list[Any]:
    """List the leaves of arguments or of an output, in most cases without the cost of looking for containers."""
    if isinstance(tree, torch.Tensor):
        return [tree]
    parts = tree.values() if type(tree) is dict else tree
    if type(tree) in (tuple, list, dict) and all(isinstance(part, torch.Tensor) for part in parts):
        return list(parts)
    return tree_flatten(tree)[0]


def tensors_in(tree: Any) -> list[torch.Tensor]:
    """List the dense floating-point tensors in the arguments or the output of a module."""
    return [
        leaf
        for leaf in leaves_in(tree)
        if isinstance(leaf, torch.Tensor)
        and leaf.layout is torch.strided
        and (leaf.is_floating_point() or leaf.is_complex())
    ]


def non_finite_rows(tensors: Iterable[torch.Tensor], size: int, batch_dim: int) -> frozenset[int]:
    """Find the rows in which any of some tensors is not finite.

    Args:
        tensors: Floating-point tensors; those that are not per sample are passed over.
        size: How many samples there are.
        batch_dim: The dimension of the samples.

    Returns:
        The rows.
    """
    rows: set[int] = set()
    for tensor in tensors:
        dim = batch_dim_of(tensor, size, batch_dim)
        # A finite sum proves that all are finite, in a fraction of the time of a look at each; a NaN proves the
        # contrary; an infinite one may have overflowed, so the elements of such rows are looked at.
        values = tensor.detach() if tensor.requires_grad else tensor
        if dim is None or isfinite(abs(values.sum().item())):
            continue
        others = [axis for axis in range(values.dim()) if axis != dim]
        totals = (values.sum(others) if others else values).tolist()
        doubtful = [row for row, total in enumerate(totals) if total - total != 0]
        if any(totals[row] == totals[row] for row in doubtful):
            values = values.movedim(dim, 0)[doubtful]
            finite = torch.isfinite(values).reshape(len(doubtful), -1).all(1).tolist()
            doubtful = [row for row, is_finite in zip(doubtful, finite, strict=True) if not is_finite]
        rows.update(doubtful)
    return frozenset(rows)
