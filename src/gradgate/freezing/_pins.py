"""Single elements and rows of a parameter that do not move, while the others learn: `pin`."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from functools import partial
from typing import Any, Self

import torch
from torch import nn

from gradgate._checks import broadcasts_to, wrong_type
from gradgate._names import describe, listed
from gradgate._torch_private import is_sharded, whole_tensor
from gradgate.errors import ArgumentIndexError, ArgumentTypeError, ArgumentValueError
from gradgate.freezing._freeze_state import (
    freeze_state_of,
    holds,
    make_freeze_state,
    region_of,
    release,
    shard_region,
    union,
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

        Without this the keys of the state dict are what they always were. With it there is one more, the parameter's
        name followed by `_frozen`: a model that is not pinned refuses such a state as having an unexpected key, one
        that is pinned otherwise refuses it as a mismatch, and this model refuses a state without it.

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
        raise ArgumentValueError(
            f"save_in(): this {type(model).__name__} does not have the pinned parameter.",
            why="the mask is saved beside the parameter that it belongs to.",
            fix="pin.save_in(the_model_that_has_it)",
        )

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

    The parameter stays the same object under the same name. From the backward on its gradient is exactly 0 at the
    pinned elements, so clipping does not see them; after every step of any `torch.optim.Optimizer` their values are
    written back bit by bit; their part of the optimizer's state is set to 0 at the first step. In between you may
    change them on purpose - `load_state_dict`, an assignment under `no_grad` - and the new values are then kept. The
    next step undoes what is written through `.data`, which autograd does not see. `verify` finds both.

    The pin travels with the parameter into copies and pickles of the model (`gg.freezing.thaw` frees those), through
    `model.to(...)`, `torch.compile` and DistributedDataParallel. Pin the parameters of an FSDP2 model after
    `fully_shard`, on every process, by their global rows or mask; each process keeps its own shard.

    Args:
        parameter: The parameter, or any other leaf tensor that learns; a sharded one (DTensor) too.
        frozen: A boolean mask of its shape, or of its number of dimensions and broadcastable; True does not move.
        rows: Rows that do not move: numbers along the first dimension, negative ones counted from the end.

    Returns:
        The pin, to release and to verify; also a context manager. Dropping the reference does not release.

    Raises:
        ArgumentTypeError: Not a floating tensor of torch's own, not a boolean mask, rows that are not integers.
        ArgumentValueError: Not a leaf, a mask of another shape, neither mask nor rows, or a whole parameter that FSDP2
            has gathered for the moment.
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
        raise ArgumentValueError(
            "pin(): neither `frozen` nor `rows` is given.",
            why="it must be said which elements stay.",
            fix="gg.pin(parameter, rows=[0, 5])   # a whole parameter: gg.freeze(model, parameter)",
        )
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
        raise ArgumentIndexError(
            f"{function}(): row {listed(wrong)} does not exist in {describe(parameter)}.",
            why=f"its rows are 0 to {length - 1}." if length else "it has no rows.",
            fix=f"rows=[row for row in rows if -{length} <= row < {length}]",
        )
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
        raise ArgumentValueError(
            f"pin(): `parameter` is no leaf, it was computed by {type(parameter.grad_fn).__name__}.",
            why="no optimizer moves a computed tensor; what moves is what it was computed from.",
            fix="gg.pin(model.layer.weight, rows=[0])   # instead of gg.pin(model.layer.weight[0], ...)",
        )


def _check_mask(frozen: Any, parameter: torch.Tensor) -> torch.Tensor:
    if not isinstance(frozen, torch.Tensor) or frozen.dtype is not torch.bool:
        fix = f"frozen={'frozen' if isinstance(frozen, torch.Tensor) else 'torch.as_tensor(frozen)'} != 0"
        raise wrong_type(frozen, "frozen", "pin", "it is a boolean tensor; True does not move.", fix)
    if frozen.dim() != parameter.dim() or not broadcasts_to(frozen.shape, parameter.shape):
        row_mask = frozen.dim() == 1 and parameter.dim() > 1 and frozen.shape[0] == parameter.shape[0]
        raise ArgumentValueError(
            f"pin(): `frozen` has shape {tuple(frozen.shape)}, the parameter {tuple(parameter.shape)}.",
            why="each element needs one answer.",
            fix="gg.pin(parameter, rows=frozen.nonzero().squeeze(1))" if row_mask else "",
        )
    return frozen
