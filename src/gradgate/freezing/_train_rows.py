"""A few rows of a large table learn, at the cost of these rows: `train_rows`.

The rows are a small parameter of their own beside the table, which is frozen. A forward hook puts them into the output
of the frozen table, so the gradient goes to the small parameter only; gradient, optimizer state and step are as large
as the rows. After each step the rows are copied into the table; `state_dict` has the table under its own key and
nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.hooks import RemovableHandle

from gradgate._checks import check_module
from gradgate._names import describe
from gradgate._torch_private import is_sharded
from gradgate.errors import ArgumentTypeError, ArgumentValueError
from gradgate.freezing._freeze_state import (
    ROWS_TOKEN,
    Watcher,
    attach,
    detach,
    gathered,
    make_freeze_state,
    owners_of,
    region_of,
    release,
    replicated,
    watchers_of,
)
from gradgate.freezing._pins import row_numbers
from gradgate.freezing._verify import Part, Verified

_SUFFIX = "_rows"
_HANDLE = "_gradgate_rows"


class RowTraining(Verified):
    """Rows that learn beside a frozen table; made by `train_rows`.

    Attributes:
        rows: The numbers of the rows, sorted.
        modules: The modules that have the table: more than the given one if it is tied.
        active: False once `merge` has been called.

    Examples:
        >>> embedding = torch.nn.Embedding(1000, 4)
        >>> training = gg.train_rows(embedding, rows=[7, 8])
        >>> training
        RowTraining(2 of 1,000 rows of Embedding)
        >>> [parameter.shape for parameter in training.parameters()]
        [torch.Size([2, 4])]
        >>> weight = training.merge()
        >>> weight is embedding.weight, weight.requires_grad
        (True, True)
    """

    def __init__(self, modules: list[nn.Module], rows: torch.Tensor) -> None:
        self.rows = rows
        self.modules = tuple(modules)
        self.active = True
        self._hooks: list[RemovableHandle] = []
        self._tables: list[tuple[nn.Module, str]] = []
        split: dict[nn.Parameter, nn.Parameter] = {}
        for module in modules:
            names = ["weight", "bias"] if isinstance(module, nn.Linear) and module.bias is not None else ["weight"]
            for name in names:
                table = module.get_parameter(name)
                small = split[table] = split[table] if table in split else _split(table, rows)
                module.register_parameter(name + _SUFFIX, small)
                self._tables.append((module, name))
            module.register_buffer("row_numbers", rows, persistent=False)
            overlay: Any = _overlay_linear
            if isinstance(module, nn.Embedding):
                overlay = _overlay_embedding
                slots = torch.full((module.num_embeddings,), -1, device=rows.device)
                slots[rows] = torch.arange(len(rows), device=rows.device)
                module.register_buffer("row_slots", slots, persistent=False)
            register: Any = module  # torch has no types for some of these
            self._hooks += [
                register.register_forward_hook(overlay, prepend=True, with_kwargs=True),
                register.register_state_dict_pre_hook(partial(_before_saving, names)),
                register.register_state_dict_post_hook(partial(_after_saving, names)),
                register.register_load_state_dict_pre_hook(partial(_before_loading, names)),
            ]
            module.__dict__[_HANDLE] = self
        self.accept()

    def parameters(self) -> list[nn.Parameter]:
        """Return the small parameters for an optimizer: rows of the table, and for a Linear those of its bias."""
        return list(dict.fromkeys(module.get_parameter(name + _SUFFIX) for module, name in self._tables))

    def merge(self) -> nn.Parameter:
        """Write the rows into the table, make it a plain parameter again and return it; do nothing a second time."""
        weight = self.modules[0].get_parameter("weight")
        if not self.active:
            return weight
        self.active = False
        for hook in self._hooks:
            hook.remove()
        for module, name in self._tables:
            table, small = module.get_parameter(name), module.get_parameter(name + _SUFFIX)
            _write_rows(module, name)
            delattr(module, name + _SUFFIX)
            detach(small, "mirror")  # an optimizer that goes on stepping must not write old rows
            release(table, ROWS_TOKEN)
            detach(table, "table")
        for module in self.modules:
            del module.row_numbers
            if isinstance(module, nn.Embedding):
                del module.row_slots
            del module.__dict__[_HANDLE]
        return weight

    def _frozen(self) -> dict[str, Part]:
        found = {}
        for number, (module, name) in enumerate(self._tables):
            table = module.get_parameter(name)
            others = torch.ones_like(table, dtype=torch.bool)
            others[self.rows.to(table.device)] = False
            found[name if name not in found else f"{name} of table {number}"] = (table.detach(), region_of(others), "")
        return found

    def __repr__(self) -> str:
        kinds = " and ".join(type(module).__name__ for module in self.modules)
        total = len(self.modules[0].get_parameter("weight"))
        return f"RowTraining({len(self.rows):,} of {total:,} rows of {kinds}{'' if self.active else '; merged'})"


def train_rows(module: nn.Module, rows: Sequence[int] | torch.Tensor | range) -> RowTraining:
    """Let only these rows of an Embedding or a Linear learn; gradient, optimizer state and step cost only them.

    Build the optimizer afterwards, over `model.parameters()` or over the handle's. A Linear's bias learns at the same
    rows. If the table is tied - an embedding that is the output layer too - the rows learn from both uses. The table
    keeps its name, its object and its place in `state_dict`, and holds the learned rows after every step.

    Args:
        module: A `torch.nn.Embedding` (dense or sparse gradients) or a `torch.nn.Linear`.
        rows: Numbers along the first dimension of the weight, negative ones counted from the end.

    Returns:
        The handle: `parameters()`, `verify()`, and `merge()` to make the table a plain parameter again.

    Raises:
        ArgumentTypeError: Another module, or one that computes in its own way; rows that are not integers.
        ArgumentIndexError: A row that does not exist.
        ArgumentValueError: The rows of this table learn already, DistributedDataParallel is around it already, or
            the Embedding changes its table by itself (`max_norm`, `scale_grad_by_freq`).

    Examples:
        >>> embedding = torch.nn.Embedding(1000, 4)
        >>> training = gg.train_rows(embedding, rows=[7])
        >>> optimizer = torch.optim.AdamW(embedding.parameters())
        >>> embedding(torch.tensor([3, 7])).sum().backward()
        >>> optimizer.step()
        >>> training.verify()
        >>> list(embedding.state_dict()), sum(p.numel() for p in optimizer.state)
        (['weight'], 4)
    """
    _check_module(module, "module")
    modules = [module, *(owner for owner in owners_of(module.get_parameter("weight")) if owner is not module)]
    for owner in modules[1:]:
        _check_module(owner, f"the weight of `module` is tied to {describe(owner)}; that")
    if id(module.weight) in replicated():
        raise ArgumentValueError(
            "train_rows(): DistributedDataParallel is around this module already.",
            why="it would not synchronise the new parameter, and the processes would drift apart silently.",
            fix="model = DistributedDataParallel(model)   # after gg.train_rows, not before",
        )
    return RowTraining(modules, row_numbers(rows, module.get_parameter("weight"), "train_rows"))


def merge_rows(model: nn.Module) -> None:
    """Merge every `train_rows` of a model; for copies and unpickled models, which have no handle.

    Args:
        model: The model.

    Raises:
        ArgumentTypeError: `model` is not a module.

    Examples:
        >>> import copy
        >>> embedding = torch.nn.Embedding(10, 2)
        >>> training = gg.train_rows(embedding, rows=[7])
        >>> other = copy.deepcopy(embedding)
        >>> gg.freezing.merge_rows(other)
        >>> [name for name, _ in other.named_parameters()]
        ['weight']
    """
    for module in list(check_module(model, name="model", function="merge_rows").modules()):
        if (handle := rows_of(module)) is not None:
            handle.merge()


def rows_of(module: nn.Module) -> RowTraining | None:
    return module.__dict__.get(_HANDLE)


def _split(table: nn.Parameter, rows: torch.Tensor) -> nn.Parameter:
    small = nn.Parameter(table.detach().index_select(0, rows))
    label = f"train_rows: {len(rows):,} of its rows learn"
    make_freeze_state(table).freeze(table, ROWS_TOKEN, label, synchronised=False)
    attach(small, "mirror", _Mirror(table, rows))
    attach(table, "table", _Table())
    return small


def _write_rows(module: nn.Module, name: str) -> None:
    table, small = module.get_parameter(name), module.get_parameter(name + _SUFFIX)
    with torch.no_grad():
        table.index_copy_(0, module.get_buffer("row_numbers"), small)


# --- Forward: the rows in the output of the frozen table --------------------------------------------------------


def _overlay_embedding(
    module: nn.Embedding, args: tuple[Any, ...], kwargs: dict[str, Any], output: torch.Tensor
) -> torch.Tensor:
    slots = module.get_buffer("row_slots")
    small = _small_weight(module)
    here = slots[args[0] if args else kwargs["input"]]
    if module.padding_idx is not None:  # the padding's row gets no gradient, learning or not
        here = here.masked_fill(here == slots[module.padding_idx], -1)
    if not small.shape[0]:
        return output
    if module.sparse:
        # A sparse gradient must name the rows that were used and no other, so only these are looked up.
        places = (here.flatten() >= 0).nonzero().squeeze(1)
        found = functional.embedding(here.flatten()[places], small, sparse=True)
        return output.reshape(here.numel(), module.embedding_dim).index_copy(0, places, found).view(output.shape)
    found = functional.embedding(here.clamp(min=0), small)
    return torch.where((here >= 0).unsqueeze(-1), found, output)


def _overlay_linear(
    module: nn.Linear, args: tuple[Any, ...], kwargs: dict[str, Any], output: torch.Tensor
) -> torch.Tensor:
    small, bias = _small_weight(module), getattr(module, "bias" + _SUFFIX, None)
    found = functional.linear(args[0] if args else kwargs["input"], small, bias)
    return output.index_copy(-1, module.get_buffer("row_numbers"), found)


def _small_weight(module: nn.Module) -> torch.Tensor:
    small: torch.Tensor = getattr(module, "weight" + _SUFFIX)  # under functional_call it is no Parameter
    replaced = not torch.compiler.is_compiling() and isinstance(small, nn.Parameter) and not watchers_of(small)
    if replaced and id(small) in gathered():
        raise ArgumentValueError(
            "train_rows(): fully_shard was applied to a module whose rows learn.",
            why="FSDP2 replaces the rows and the table by shards, and nothing would copy the rows into the table.",
            fix="gg.freezing.merge_rows(model)   # before fully_shard; then gg.pin(module.weight, rows=...)",
        )
    return small


# --- State dict: the table under its own key, nothing else ------------------------------------------------------


def _before_saving(names: list[str], module: nn.Module, prefix: str, keep_vars: bool) -> None:
    for name in names:
        _write_rows(module, name)


def _after_saving(
    names: list[str], module: nn.Module, state: dict[str, Any], prefix: str, metadata: dict[str, Any]
) -> None:
    for name in names:
        del state[prefix + name + _SUFFIX]


def _before_loading(names: list[str], module: nn.Module, state: dict[str, Any], prefix: str, *rest: Any) -> None:
    for name in names:
        rows, table = module.get_parameter(name + _SUFFIX).detach(), state.get(prefix + name)
        if isinstance(table, torch.Tensor) and table.shape == module.get_parameter(name).shape:
            rows = table[module.get_buffer("row_numbers").to(table.device)]
        state[prefix + name + _SUFFIX] = rows  # as they are where torch complains of the table


# --- Steps ------------------------------------------------------------------------------------------------------


class _Mirror(Watcher):
    """Watches the small parameter: after each step its rows are copied into the restored table."""

    late = True

    def __init__(self, table: nn.Parameter, rows: torch.Tensor) -> None:
        self.table, self.rows = table, rows

    def after_step(self, parameter: torch.Tensor, optimizer: torch.optim.Optimizer) -> None:
        with torch.no_grad():
            self.table.index_copy_(0, self.rows.to(parameter.device), parameter.to(self.table.dtype))


class _Table(Watcher):
    """Watches the table: an optimizer that has it and not the rows was built too early, and would train nothing."""

    def before_step(self, parameter: torch.Tensor, optimizer: torch.optim.Optimizer) -> None:
        mirrors = [watchers_of(p).get("mirror") for group in optimizer.param_groups for p in group["params"]]
        if not any(mirror is not None and mirror.table is parameter for mirror in mirrors):
            raise ArgumentValueError(
                f"train_rows(): this {type(optimizer).__name__} has the table and not the rows that learn.",
                why="it was built before train_rows, so the rows would never move.",
                fix='optimizer.add_param_group({"params": training.parameters()})',
            )


def _check_module(module: nn.Module, what: str) -> None:
    kind = next((kind for kind in (nn.Embedding, nn.Linear) if isinstance(module, kind)), None)
    fix = "gg.pin(module.weight, rows=[0])   # works on any parameter, shards too; the rows that must not move"
    if kind is None or type(module).forward is not kind.forward or module.__dict__.get("forward") is not None:
        why = "it replaces rows of what torch.nn.Embedding and torch.nn.Linear compute; others compute otherwise."
        raise ArgumentTypeError(f"train_rows(): {what} is {describe(module)}.", why=why, fix=fix)
    if is_sharded(module.get_parameter("weight")):
        why = "the rows that learn would be a parameter of their own, which belongs to no process."
        raise ArgumentTypeError("train_rows(): the weight of `module` is sharded (a DTensor).", why=why, fix=fix)
    if rows_of(module) is not None:
        raise ArgumentValueError(
            f"train_rows(): rows of this {type(module).__name__} learn already.",
            why="there is one small parameter for each table.",
            fix="training.merge()   # then train_rows with all rows",
        )
    if isinstance(module, nn.Embedding) and (module.max_norm is not None or module.scale_grad_by_freq):
        option = "max_norm" if module.max_norm is not None else "scale_grad_by_freq"
        raise ArgumentValueError(
            f"train_rows(): this Embedding has {option}.",
            why="max_norm rewrites the frozen rows in each forward, scale_grad_by_freq counts over the whole table.",
            fix=f"embedding.{option} = {'None' if option == 'max_norm' else 'False'}",
        )
