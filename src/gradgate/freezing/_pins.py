"""Rows and elements of a parameter: `pin` keeps them from moving, `train_rows` lets only some rows of a table learn."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from functools import partial
from typing import Any, Self

import torch
from torch import nn
from torch.nn import functional
from torch.utils.hooks import RemovableHandle

from gradgate._checks import broadcasts_to, check_module, wrong_type
from gradgate._names import describe, listed
from gradgate._torch_private import is_sharded, whole_tensor
from gradgate.errors import ArgumentIndexError, ArgumentTypeError, ArgumentValueError
from gradgate.freezing._freeze_state import (
    ROWS_TOKEN,
    Watcher,
    attach,
    detach,
    freeze_state_of,
    gathered,
    holds,
    make_freeze_state,
    owners_of,
    region_of,
    release,
    replicated,
    shard_region,
    union,
    watchers_of,
)
from gradgate.freezing._layers import bare, check_values
from gradgate.freezing._verify import Part, Registrations, Verified, computed_by, computed_value


class Pin(Verified):
    """Elements of one parameter that stay what they are; made by `pin`.

    As a context manager it releases at the end of the block. Pins of one parameter may overlap; an element is free
    without the last of its pins.

    Attributes:
        parameter: The parameter, the same object as before.
        count: How many elements it keeps; of a sharded parameter, over all processes.

    Examples:
        >>> embedding = torch.nn.Embedding(4, 2)
        >>> pin = gg.pin(embedding.weight, rows=[0, 3])
        >>> pin
        Pin(4 of 8 elements)
        >>> pin.release()
    """

    def __init__(self, parameter: torch.Tensor, frozen: torch.Tensor) -> None:
        self.parameter = parameter
        self._region = region_of(frozen)
        self._local = shard_region(self._region, parameter)
        self.count = self._region.count
        self._token = uuid.uuid4().hex
        make_freeze_state(parameter).pin(parameter, self._token, self._region)
        self._registrations = Registrations(parameter)
        self.accept()

    @property
    def active(self) -> bool:  # type: ignore[override]
        """Whether it still keeps its elements."""
        return holds(self.parameter, self._token)

    @property
    def frozen(self) -> torch.Tensor:
        """The pinned elements as a boolean mask of the parameter's shape."""
        return self._region.mask(self.parameter.shape, self.parameter.device).clone()

    def release(self) -> None:
        """Let the elements learn again; a second call does nothing."""
        release(self.parameter, self._token)

    def _frozen(self) -> dict[str, Part]:
        # What a layer computes with: the parameter itself, or what is computed from it since.
        for module, name in self._registrations.computing():
            return {"parameter": (computed_value(module, name), self._local, computed_by(module, name))}
        return {"parameter": (self.parameter.detach(), self._local, "")}

    def save_in(self, model: nn.Module) -> None:
        """Write what is pinned into the model's `state_dict`, and compare when one is loaded.

        There is one more key, the parameter's name followed by `_frozen`. A model that is not pinned, or is pinned
        otherwise, refuses such a state, and this model refuses a state without it.

        Args:
            model: A model that has the parameter.

        Raises:
            ArgumentValueError: It does not have it.

        Examples:
            >>> model = torch.nn.Linear(2, 2)
            >>> pin = gg.pin(model.weight, rows=[0])
            >>> pin.save_in(model)
            >>> list(model.state_dict())
            ['weight', 'bias', 'weight_frozen']
        """
        for module in bare(model, "save_in").modules():
            for name, candidate in module.named_parameters(recurse=False):
                if candidate is self.parameter:
                    saved = module.__dict__.setdefault("_gradgate_saved_masks", set())
                    if name in saved:
                        return
                    saved.add(name)
                    module.register_state_dict_post_hook(partial(_save_mask, name))  # type: ignore[no-untyped-call]
                    module.register_load_state_dict_pre_hook(partial(_compare_mask, name))  # type: ignore[no-untyped-call]
                    return
        what = f"save_in(): this {type(model).__name__} does not have the pinned parameter."
        why = "the mask is saved beside the parameter that it belongs to."
        raise ArgumentValueError(what, why=why, fix="pin.save_in(the_model_that_has_it)")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.release()

    def __repr__(self) -> str:
        state = "" if self.active else "; released"
        return f"Pin({self.count:,} of {self.parameter.numel():,} elements{state})"


def _pinned_mask(module: nn.Module, name: str) -> torch.Tensor | None:
    parameter = module.get_parameter(name)
    frozen = freeze_state_of(parameter)
    if frozen is None or not frozen.pins:
        return None
    shape, device = parameter.shape, parameter.device
    return union(frozen.pins.values(), shape, device).mask(shape, device).clone()


def _save_mask(name: str, module: nn.Module, state: dict[str, Any], prefix: str, metadata: dict[str, Any]) -> None:
    mask = _pinned_mask(module, name)
    if mask is not None:
        state[f"{prefix}{name}_frozen"] = mask


def _compare_mask(name: str, module: nn.Module, state: dict[str, Any], prefix: str, *rest: Any) -> None:
    _, _, missing, _, errors = rest  # after the metadata and `strict`; between them are the unexpected keys
    key = f"{prefix}{name}_frozen"
    mine, saved = _pinned_mask(module, name), state.pop(key, None)
    if saved is None and mine is not None:
        missing.append(key)
    elif saved is not None:
        here = mine if mine is not None else torch.zeros_like(saved)
        if not torch.equal(here.cpu(), saved.cpu()):
            errors.append(
                f"{prefix}{name} has {int(here.sum())} pinned elements here and {int(saved.sum())} in the checkpoint, "
                f"not the same; pin it as it was: gg.pin(parameter, frozen=state[{key!r}])."
            )


def pin(
    parameter: torch.Tensor,
    *,
    frozen: torch.Tensor | None = None,
    rows: Sequence[int] | torch.Tensor | range | None = None,
) -> Pin:
    """Keep elements of a parameter bit-identical under any optimizer, while the others learn as if they were alone.

    From the backward on the gradient is exactly 0 at the pinned elements, so clipping does not see them; after every
    step of any `torch.optim.Optimizer` their values are written back bit by bit; their part of the optimizer's state is
    set to 0 at the first step. Values that you load or assign under `no_grad` between steps are kept from then on; what
    is written through `.data`, which autograd does not see, is undone. `verify` finds both.

    Copies and pickles of the model carry the pin (`gg.freezing.thaw` frees those). Pin the parameters of an FSDP2 model
    after `fully_shard`, on every process, by their global rows or mask.

    Args:
        parameter: The parameter, or any other leaf tensor that learns; a sharded one (DTensor) too.
        frozen: A boolean mask of its shape, or of its number of dimensions and broadcastable; True does not move.
        rows: Rows that do not move: numbers along the first dimension, negative ones counted from the end.

    Returns:
        The pin, to release and to verify; also a context manager. Dropping the reference does not release.

    Raises:
        ArgumentTypeError: Not a floating tensor of torch's own, not a boolean mask, rows that are not integers.
        ArgumentValueError: Not a leaf, a mask of another shape, neither mask nor rows, or gathered by FSDP2.
        ArgumentIndexError: A row that does not exist.

    Examples:
        >>> weight = torch.nn.Parameter(torch.ones(3))
        >>> pin = gg.pin(weight, frozen=torch.tensor([True, False, False]))
        >>> optimizer = torch.optim.AdamW([weight], lr=0.1, weight_decay=0.5)
        >>> weight.sum().backward()
        >>> optimizer.step()
        >>> weight.grad, weight.data
        (tensor([0., 1., 1.]), tensor([1.0000, 0.8500, 0.8500]))
    """
    _check_parameter(parameter)
    if frozen is None and rows is None:
        why = "it must be said which elements stay."
        fix = "gg.pin(parameter, rows=[0, 5])   # a whole parameter: gg.freeze(model, parameter)"
        raise ArgumentValueError("pin(): neither `frozen` nor `rows` is given.", why=why, fix=fix)
    together = torch.zeros(parameter.shape, dtype=torch.bool, device=parameter.device)
    if frozen is not None:
        together |= _check_mask(whole_tensor(frozen), parameter).to(parameter.device)
    if rows is not None:
        together[row_numbers(rows, parameter, "pin")] = True
    return Pin(parameter, together)


def row_numbers(rows: Sequence[int] | torch.Tensor | range, parameter: torch.Tensor, function: str) -> torch.Tensor:
    """Return row numbers as a sorted tensor without repetitions, on the parameter's device."""
    try:
        numbers = rows if isinstance(rows, torch.Tensor) else torch.as_tensor(list(rows))
    except (TypeError, ValueError, RuntimeError):  # not iterable, or a list of anything
        numbers = torch.empty(0, 0)
    if numbers.shape == (0,):
        numbers = numbers.long()
    if numbers.dtype is torch.bool or numbers.is_floating_point() or numbers.is_complex() or numbers.dim() != 1:
        why = "rows are a list of integers, numbers along the first dimension."
        fix = "rows=mask.nonzero().squeeze(1)   # from a boolean mask of the rows"
        raise wrong_type(rows, "rows", function, why, fix)
    length = parameter.shape[0] if parameter.dim() else 0
    if wrong := [int(row) for row in numbers[(numbers < -length) | (numbers >= length)]]:
        what = f"{function}(): row {listed(wrong)} does not exist in {describe(parameter)}."
        why = f"its rows are 0 to {length - 1}." if length else "it has no rows."
        raise ArgumentIndexError(what, why=why, fix=f"rows=[row for row in rows if -{length} <= row < {length}]")
    result: torch.Tensor = torch.unique(numbers.to(parameter.device) % max(length, 1))
    return result


def _check_parameter(parameter: Any) -> None:
    check_values({"`parameter`": parameter}, "pin")
    # A partial placement has elements of which each process has a summand.
    splits = is_sharded(parameter) and not any(placement.is_partial() for placement in parameter.placements)
    known = type(parameter) in (torch.Tensor, nn.Parameter) or splits
    if not known or not (parameter.is_floating_point() or parameter.is_complex()):
        raise ArgumentTypeError(
            f"pin(): `parameter` is {describe(parameter)}"
            + (f" of type {type(parameter).__name__}." if isinstance(parameter, torch.Tensor) else "."),
            why="it pins elements of a plain or sharded floating tensor; quantised ones are stored in several parts.",
            fix="gg.pin(model.embedding.weight, rows=[0, 5])",
        )
    if not parameter.is_leaf:
        what = f"pin(): `parameter` is no leaf, it was computed by {type(parameter.grad_fn).__name__}."
        why = "no optimizer moves a computed tensor; what moves is what it was computed from."
        fix = "gg.pin(model.layer.weight, rows=[0])   # instead of gg.pin(model.layer.weight[0], ...)"
        raise ArgumentValueError(what, why=why, fix=fix)


def _check_mask(frozen: Any, parameter: torch.Tensor) -> torch.Tensor:
    if not isinstance(frozen, torch.Tensor) or frozen.dtype is not torch.bool:
        fix = f"frozen={'frozen' if isinstance(frozen, torch.Tensor) else 'torch.as_tensor(frozen)'} != 0"
        raise wrong_type(frozen, "frozen", "pin", "it is a boolean tensor; True does not move.", fix)
    if frozen.dim() != parameter.dim() or not broadcasts_to(frozen.shape, parameter.shape):
        row_mask = frozen.dim() == 1 and parameter.dim() > 1 and frozen.shape[0] == parameter.shape[0]
        what = f"pin(): `frozen` has shape {tuple(frozen.shape)}, the parameter {tuple(parameter.shape)}."
        why = "each element needs one answer."
        fix = "gg.pin(parameter, rows=frozen.nonzero().squeeze(1))" if row_mask else ""
        raise ArgumentValueError(what, why=why, fix=fix)
    return frozen


# --- Rows that learn beside a frozen table --------------------------------------------------------------------------

# The rows are a small parameter of their own. A forward hook puts them into the output of the frozen table, so the
# gradient goes to the small parameter only; gradient, optimizer state and step are as large as the rows. After each
# step the rows are copied into the table; `state_dict` has the table under its own key and nothing else.

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
            overlay: Any = _overlay_embedding if isinstance(module, nn.Embedding) else _overlay_linear
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
    rows. The rows of a tied table learn from all its uses. The table keeps its name and its place in `state_dict`, and
    holds the learned rows after every step.

    Args:
        module: A `torch.nn.Embedding` (dense or sparse gradients) or a `torch.nn.Linear`.
        rows: Numbers along the first dimension of the weight, negative ones counted from the end.

    Returns:
        The handle: `parameters()`, `verify()`, and `merge()` to make the table a plain parameter again.

    Raises:
        ArgumentTypeError: Another module, or one that computes in its own way; rows that are not integers.
        ArgumentIndexError: A row that does not exist.
        ArgumentValueError: Its rows learn already, DistributedDataParallel is around it already, or the Embedding
            changes its table by itself (`max_norm`, `scale_grad_by_freq`).

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
        what = "train_rows(): DistributedDataParallel is around this module already."
        why = "it would not synchronise the new parameter, and the processes would drift apart silently."
        fix = "model = DistributedDataParallel(model)   # after gg.train_rows, not before"
        raise ArgumentValueError(what, why=why, fix=fix)
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
    small, numbers = _small_weight(module), module.get_buffer("row_numbers")
    ids = (args[0] if args else kwargs["input"]).to(numbers.dtype)
    if not len(numbers):
        return output
    here = torch.searchsorted(numbers, ids).clamp(max=len(numbers) - 1)
    learns = numbers[here] == ids
    if module.padding_idx is not None:  # the padding's row gets no gradient, learning or not
        learns = learns & (ids != module.padding_idx)
    if module.sparse:
        # A sparse gradient must name the rows that were used and no other, so only these are looked up.
        places = learns.flatten().nonzero().squeeze(1)
        found = functional.embedding(here.flatten()[places], small, sparse=True)
        return output.reshape(here.numel(), module.embedding_dim).index_copy(0, places, found).view(output.shape)
    return torch.where(learns.unsqueeze(-1), functional.embedding(here, small), output)


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
        what = "train_rows(): fully_shard was applied to a module whose rows learn."
        why = "FSDP2 replaces the rows and the table by shards, and nothing would copy the rows into the table."
        fix = "gg.freezing.merge_rows(model)   # before fully_shard; then gg.pin(module.weight, rows=...)"
        raise ArgumentValueError(what, why=why, fix=fix)
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

    def after_step(self, parameter: torch.Tensor, optimizer: torch.optim.Optimizer | None) -> None:
        with torch.no_grad():
            self.table.index_copy_(0, self.rows.to(parameter.device), parameter.to(self.table.dtype))


class _Table(Watcher):
    """Watches the table: an optimizer that has it and not the rows was built too early, and would train nothing."""

    def before_step(self, parameter: torch.Tensor, optimizer: torch.optim.Optimizer) -> None:
        mirrors = [watchers_of(p).get("mirror") for group in optimizer.param_groups for p in group["params"]]
        if not any(mirror is not None and mirror.table is parameter for mirror in mirrors):
            what = f"train_rows(): this {type(optimizer).__name__} has the table and not the rows that learn."
            why = "it was built before train_rows, so the rows would never move."
            raise ArgumentValueError(what, why=why, fix='optimizer.add_param_group({"params": training.parameters()})')


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
        why = "there is one small parameter for each table."
        fix = "training.merge()   # then train_rows with all rows"
        raise ArgumentValueError(f"train_rows(): rows of this {type(module).__name__} learn already.", why=why, fix=fix)
    if isinstance(module, nn.Embedding) and (module.max_norm is not None or module.scale_grad_by_freq):
        option = "max_norm" if module.max_norm is not None else "scale_grad_by_freq"
        why = "max_norm rewrites the frozen rows in each forward, scale_grad_by_freq counts over the whole table."
        fix = f"embedding.{option} = {'None' if option == 'max_norm' else 'False'}"
        raise ArgumentValueError(f"train_rows(): this Embedding has {option}.", why=why, fix=fix)
