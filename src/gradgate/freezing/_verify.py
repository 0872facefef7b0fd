"""Prove that frozen values did not move, and name the one that did.

Values are read as integers. Each block of 32 has a sum of word times weight, modulo 2**64, with odd weights of 64 bits
that differ from place to place: a single changed word always changes its sum, because an odd weight has an inverse, and
several cancel as rarely as random numbers do. If a sum differs, the word that alone explains the difference is named,
with the value it had. Words of 32 bits need one sum, because no change exceeds 32 bits; words of 64 bits need two, and
are mixed first, or a changed sign would look the same at every place. For float32 it takes a sixteenth of a copy.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.nn.utils import parametrize
from torch.utils.hooks import RemovableHandle

from gradgate import _kernels
from gradgate._names import describe
from gradgate._torch_distributed import sharded_like
from gradgate._torch_private import computed_name, forward_pre_hooks, is_sharded, local_part, parameters_of
from gradgate.errors import ArgumentTypeError, ArgumentValueError, FrozenMovedError
from gradgate.freezing._freeze_state import FrozenRegion

# --- Checksums ------------------------------------------------------------------------------------------------------


_BLOCK = 32  # words in a block
_STRETCH = 2**15  # words at a time, so that the products stay in the cache
_SIZE = 2**64
_MIX = 0x2545_F491_4F6C_DD1D  # any odd number with its bits well spread


@dataclass(frozen=True)
class Moved:
    """The first movement is in the elements from first to last; where it is one element, `before` is its old value."""

    first: int
    last: int
    before: float | complex | None


@dataclass(frozen=True)
class Fingerprint:
    sums: torch.Tensor
    dtype: torch.dtype
    count: int

    def moved(self, values: torch.Tensor) -> Moved | None:
        now = fingerprint(values).sums
        then = self.sums.to(now.device)
        wrong = (now != then).any(dim=0).nonzero()
        if not len(wrong):
            return None
        block = int(wrong[0])
        words = _words(values)
        start, stop = block * _BLOCK, min((block + 1) * _BLOCK, words.numel())
        per_element = max(1, values.element_size() // 8)
        alone = _alone((now[:, block] - then[:, block]).tolist(), stop - start)
        if alone is None:
            return Moved(start // per_element, (stop - 1) // per_element, None)
        word, change = alone
        element, part = divmod(start + word, per_element)
        return Moved(element, element, _value_before(values, element, part, change))


def fingerprint(values: torch.Tensor) -> Fingerprint:
    words = _words(values)
    rows = 1 if values.element_size() <= 4 else 2
    weights = _weights()[:rows]
    if _kernels.usable(words):
        return Fingerprint(_kernels.checksums(words, weights, _BLOCK), values.dtype, values.numel())
    weights, sums = weights.to(words.device), []
    for stretch in torch.split(words, _STRETCH):
        blocks = torch.nn.functional.pad(_mixed(stretch), (0, -len(stretch) % _BLOCK)).view(-1, 1, _BLOCK)
        sums.append((blocks * weights).sum(2))
    return Fingerprint(torch.cat(sums).T, values.dtype, values.numel())


def _words(values: torch.Tensor) -> torch.Tensor:
    """Read values as integers as wide as they are, 64 bits at most."""
    flat = values.detach().contiguous().view(-1)
    return flat.view({1: torch.int8, 2: torch.int16, 4: torch.int32}.get(values.element_size(), torch.int64))


def _mixed(words: torch.Tensor) -> torch.Tensor:
    """Widen words to 64 bits; full ones are mixed, so that their high bits show in the low ones."""
    return _fold(words * _MIX) if words.dtype is torch.int64 else words.to(torch.int64)


def _fold(words: torch.Tensor) -> torch.Tensor:
    """Fold the high half into the low half; done twice it undoes itself."""
    return words ^ ((words >> 32) & 0xFFFF_FFFF)


def _weights() -> torch.Tensor:
    generator = torch.Generator().manual_seed(0x6761_7465)
    limits = torch.iinfo(torch.int64)
    return torch.randint(limits.min, limits.max, (2, _BLOCK), generator=generator, dtype=torch.int64) | 1


def _alone(differences: list[int], words: int) -> tuple[int, int] | None:
    """Find the one word whose change explains every difference, and that change."""
    weights = _weights().tolist()
    for word in range(words):
        changes = {d * pow(weights[row][word], -1, _SIZE) % _SIZE for row, d in enumerate(differences)}
        change = changes.pop()
        if not changes and (len(differences) > 1 or min(change, _SIZE - change) < 2**32):
            return word, change
    return None


def _value_before(values: torch.Tensor, element: int, part: int, change: int) -> float | complex:
    raw = values.detach().contiguous().view(-1)[element : element + 1].cpu().clone()
    words = _words(raw)
    old = torch.tensor([_signed(int(_mixed(words)[part]) - change)])
    words[part] = (_fold(old) * _signed(pow(_MIX, -1, _SIZE)) if words.dtype is torch.int64 else old)[0]
    return raw.item()


def _signed(number: int) -> int:
    """Wrap a number into the range of int64."""
    return (number + _SIZE // 2) % _SIZE - _SIZE // 2


# --- What moved -----------------------------------------------------------------------------------------------------


Part = tuple[torch.Tensor, FrozenRegion, str]
"""A tensor, what of it is frozen, and what computes the tensor if it is not a parameter."""


class Verified:
    """What all handles share: a checksum of everything that they froze."""

    active: bool

    def _frozen(self) -> dict[str, Part]:
        """Return what is frozen now, by name."""
        raise NotImplementedError

    def accept(self) -> None:
        """Take the present values as the frozen ones, after you have changed them or loaded a checkpoint."""
        self._accepted = {
            name: (fingerprint(region.gather(local_part(tensor))), how)
            for name, (tensor, region, how) in self._frozen().items()
        }

    def verify(self) -> None:
        """Prove that nothing moved since the freeze (or since `accept`): frozen values and statistics.

        It also finds a spectral or weight norm, a pruning or another parametrization that was applied since: the
        parameter rests, but the layer computes with something else. Of a sharded model it checks this process's part.

        Raises:
            FrozenMovedError: Something did; the first element is named, with both values.
            ArgumentValueError: The handle has thawed, or was released or merged.
        """
        if not self.active:
            what = f"verify(): this {type(self).__name__} freezes nothing any more."
            why = "what is free may move."
            raise ArgumentValueError(what, why=why, fix="handle.verify()   # before thaw, release or merge")
        for name, (tensor, region, how) in self._frozen().items():
            then, accepted = self._accepted[name]
            if how and how != accepted:
                raise FrozenMovedError(
                    f"{name} is frozen, but {how} was applied to it since and now computes the values that the layer "
                    "uses.",
                    why="the frozen parameter rests, and what is computed from it does not.",
                    fix="handle.accept()   # if that is meant; else remove it, or freeze after it was applied",
                )
            self._accepted[name] = (_check_unmoved(name, tensor, region, then, how), how)


def assert_frozen(*handles: Verified) -> None:
    """Prove that nothing moved since these were frozen.

    Args:
        *handles: What `freeze`, `train_only`, `pin` or `train_rows` returned.

    Raises:
        FrozenMovedError: A frozen element moved; the message names it. It is an AssertionError too.
        ArgumentTypeError: Something else was given.

    Examples:
        >>> model = torch.nn.Linear(2, 1)
        >>> handle = gg.freeze(model)
        >>> gg.freezing.assert_frozen(handle)
        >>> model.weight.data[0, 1] = 7.0
        >>> gg.freezing.assert_frozen(handle)
        Traceback (most recent call last):
        gradgate.errors.FrozenMovedError: weight[0, 1] is frozen and moved: it was 0.37932288646698 and is 7.0.
        Why: something wrote to it that is no step of a torch.optim.Optimizer: ...
        Fix: handle.accept()   # if the new values are meant, as after load_state_dict
    """
    for handle in handles:
        if not callable(getattr(handle, "verify", None)):
            why = "only what was frozen knows what it was."
            fix = "handle = gg.freeze(model)\ngg.freezing.assert_frozen(handle)"
            raise ArgumentTypeError(f"assert_frozen(): {describe(handle)} is no handle.", why=why, fix=fix)
        handle.verify()


def _check_unmoved(name: str, tensor: torch.Tensor, region: FrozenRegion, then: Fingerprint, how: str) -> Fingerprint:
    """Compare frozen elements with their fingerprint, and return the one to compare with next time."""
    values = region.gather(local_part(tensor.detach()))
    if values.numel() != then.count:
        what = f"{name} is frozen and has now {values.numel()} elements instead of {then.count}."
        why = "another tensor was put in its place."
        raise FrozenMovedError(what, why=why, fix="handle = gg.freeze(model)   # again: the new tensor is not frozen")
    if values.dtype is not then.dtype:  # converted since, which rounds on purpose
        return fingerprint(values)
    moved = then.moved(values)
    if moved is None:
        return then
    start, stop = (list(_place(tensor, region, number)) for number in (moved.first, moved.last))
    what = f"{name}{start} to {name}{stop} are frozen, and several of them moved."
    if moved.before is not None:
        now = values[moved.first].item()
        what = f"{name}{start or ''} is frozen and moved: it was {moved.before!r} and is {now!r}."
    updates = "a home-made update, .data, or a loaded state"
    why = f"something wrote to it that is no step of a torch.optim.Optimizer: {updates}."
    fix = "handle.accept()   # if the new values are meant, as after load_state_dict"
    raise FrozenMovedError(what, why=f"{how} computes it anew." if how else why, fix=fix)


def _place(tensor: torch.Tensor, region: FrozenRegion, number: int) -> tuple[int, ...]:
    """Return the index of a frozen element, the global one if the tensor is sharded."""
    place = region.place(number, local_part(tensor).shape)
    if not is_sharded(tensor):
        return place
    numbers = torch.arange(tensor.numel(), device=tensor.device).view(tensor.shape)
    return tuple(int(i) for i in torch.unravel_index(sharded_like(tensor, numbers)[place], tensor.shape))


# --- What computes a tensor that was a parameter ----------------------------------------------------------------------


def computed_by(module: nn.Module, name: str) -> str:
    """Name what computes this tensor of a module: a parametrization, a norm of weights, a pruning; "" for nothing."""
    if (parametrizations := _parametrizations_of(module, name)) is not None:
        kinds = [type(each).__name__.lstrip("_") for each in parametrizations]
    else:
        kinds = [type(hook).__name__ for hook in forward_pre_hooks(module).values() if computed_name(hook) == name]
    return " and ".join(kinds)


def computed_value(module: nn.Module, name: str) -> torch.Tensor:
    """Compute such a tensor as in evaluation, so that a power iteration does not go on."""
    parametrizations = _parametrizations_of(module, name)
    parts = [] if parametrizations is None else list(parametrizations.modules())
    modes = [part.training for part in parts]
    for part in parts:
        part.training = False
    try:
        with torch.no_grad():
            value: torch.Tensor = getattr(module, name) if parametrizations is None else parametrizations()
            return value.detach()
    finally:
        for part, mode in zip(parts, modes, strict=True):
            part.training = mode


def _parametrizations_of(module: nn.Module, name: str) -> parametrize.ParametrizationList | None:
    if isinstance(module, parametrize.ParametrizationList):
        return module
    found = module.parametrizations[name] if parametrize.is_parametrized(module, name) else None  # type: ignore[index]
    return found if isinstance(found, parametrize.ParametrizationList) else None


class Registrations:
    """Where a parameter was registered since it was pinned: all of these replace a parameter by registering another."""

    # A pin knows no module, and to search for it among all objects would take a tenth of a second.

    _watched: ClassVar[weakref.WeakValueDictionary[int, Registrations]] = weakref.WeakValueDictionary()
    _hook: ClassVar[RemovableHandle | None] = None  # torch's own; it stays, as the step hooks do

    def __init__(self, parameter: torch.Tensor) -> None:
        self.__setstate__({"_parameter": parameter, "_places": []})

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._parameter: torch.Tensor = state["_parameter"]
        self._places = [(weakref.ref(module), name) for module, name in state["_places"]]
        Registrations._watched[id(self)] = self
        if Registrations._hook is None:
            Registrations._hook = register_module_parameter_registration_hook(_registered)

    def __getstate__(self) -> dict[str, Any]:
        return {"_parameter": self._parameter, "_places": self._present()}

    def _present(self) -> list[tuple[nn.Module, str]]:
        present = [(reference(), name) for reference, name in self._places]
        return [(module, name) for module, name in present if module is not None and name in parameters_of(module)]

    def add(self, module: nn.Module, name: str, parameter: nn.Parameter) -> None:
        """Note a registration if it is of the pinned parameter, or of one over the same memory (weight_norm)."""
        pointer, own = parameter.untyped_storage().data_ptr(), local_part(self._parameter.detach())
        if parameter is self._parameter or (pointer and pointer == own.untyped_storage().data_ptr()):
            self._places.append((weakref.ref(module), name))

    def computing(self) -> list[tuple[nn.Module, str]]:
        """List the modules and names of tensors that are now computed from the parameter."""
        now = [(module, name.removesuffix("_orig").removesuffix("_v")) for module, name in self._present()]
        return [(module, name) for module, name in now if computed_by(module, name)]


def _registered(module: nn.Module, name: str, parameter: torch.Tensor | None) -> None:
    if type(parameter) is nn.Parameter and not parameter.is_meta:
        for watched in list(Registrations._watched.values()):
            watched.add(module, name, parameter)
