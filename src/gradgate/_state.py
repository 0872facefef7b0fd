"""The state of a training: random state, buffers, gradients and modes around a step, and snapshots of weights as bytes.

**Random state.** Taking it must be nearly free, because it happens in every step. torch clones a generator in a
microsecond, but python's `random.getstate()` takes ten and numpy's forty, since they build objects for 624 numbers.
In most programs neither has moved since the last step. Both keep their numbers in one block of memory of which
every draw changes a known part, so that part is looked at, and the state is taken only if it has changed. Where the
block does not look as expected (checked once, against the official state), the state is taken each time.

**A step** may write buffers, gradients, random state and modes. Parameters are not copied: a step does not write
them, and `written_parameters` finds the models that do. An interrupt may come between any two lines. Nothing is put
back that was not completely taken, putting back can be repeated, and what was not put back is put back before the
next step.
"""

from __future__ import annotations

import random
import struct
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from gradgate import _kernels
from gradgate._kernels import memory
from gradgate._patches import Patches, to_the_end
from gradgate._payload import decode, encode, missing_in
from gradgate._torch_private import (
    ThreadModes,
    add_tensors,
    buffers_of,
    copy_tensors,
    find_non_finite,
    local_part,
    write_count,
    write_mark,
)
from gradgate.errors import LedgerError

# --- Random state ---------------------------------------------------------------------------------------------------


TWISTER_WORDS = 624


class RandomState:
    """Remembers all random states of the process and puts them back."""

    def __init__(self, devices: Iterable[torch.device] = ()) -> None:
        self._torch = torch.default_generator.clone_state()
        self._taken: torch.Tensor | None = None
        self._twisters: list[_Twister] = [_PythonState()]
        self._devices: list[tuple[Any, torch.device]] = []
        self._of_devices: list[torch.Tensor] = []
        self.watch(devices)

    def watch(self, devices: Iterable[torch.device]) -> None:
        others = dict.fromkeys(device for device in devices if device.type not in ("cpu", "meta"))
        self._devices = [(torch.get_device_module(device), device) for device in others]

    def remember(self) -> None:
        """Take the state as it is now."""
        self._torch, self._taken = torch.default_generator.clone_state(), None
        if len(self._twisters) == 1 and "numpy" in sys.modules:
            self._twisters.append(_NumpyState())
        for twister in self._twisters:
            twister.remember()
        if self._devices:
            self._of_devices = [module.get_rng_state(device) for module, device in self._devices]

    def restore(self) -> None:
        """Put back the state that was remembered, as often as wanted."""
        for twister in self._twisters:
            twister.restore()
        if self._taken is None:
            self._taken = self._torch.get_state()
        torch.default_generator.set_state(self._taken)
        for (module, device), state in zip(self._devices, self._of_devices, strict=True):
            module.set_rng_state(state, device)


class _Twister:
    """The state of a Mersenne twister, taken and put back only if the memory that every draw changes has changed."""

    def __init__(self, take: Callable[[], Any], put: Callable[[Any], None]) -> None:
        self._take, self._put = take, put
        self._state: Any = None
        self._mark: tuple[Any, ...] = ()
        self.remember()

    def look(self) -> tuple[Any, ...]:
        """Return what every draw changes; nothing where it cannot be read."""
        raise NotImplementedError

    def remember(self) -> None:
        mark = self.look()
        if not mark or mark != self._mark:
            state = self._take()
            # A normal draw of numpy may be answered from a stored second value, which changes nothing in that memory.
            stored = isinstance(state, dict) and state["has_gauss"]
            self._state, self._mark = state, () if stored else mark

    def restore(self) -> None:
        if not self._mark or self.look() != self._mark:
            self._put(self._state)


class _PythonState(_Twister):
    """The state of the functions in python's `random`."""

    def __init__(self) -> None:
        # random.random() and its like are methods of this one object; there is no public name for it.
        self._owner: random.Random = random.random.__self__  # type: ignore[attr-defined]
        # In CPython: an int that each draw moves on, then the words, which change when it has come round.
        self._draws = memory(id(self._owner) + object.__basicsize__, 12)
        self._readable = self._block_is_the_state()
        super().__init__(self._owner.getstate, self._owner.setstate)

    def _block_is_the_state(self) -> bool:
        if sys.implementation.name != "cpython" or type(self._owner) is not random.Random:
            return False
        if random.Random.__basicsize__ < object.__basicsize__ + 4 * (TWISTER_WORDS + 1):
            return False
        numbers = self._owner.getstate()[1]
        return self._draws.tobytes() == struct.pack("=i2I", numbers[-1], *numbers[:2])

    def look(self) -> tuple[Any, ...]:
        return (self._draws.tobytes(), self._owner.gauss_next) if self._readable else ()  # type: ignore[attr-defined]


class _NumpyState(_Twister):
    """The state of the functions in `numpy.random`, from when numpy is imported."""

    def __init__(self) -> None:
        self._generator: Any = None
        self._draws: tuple[memoryview, ...] = ()
        numpy = sys.modules["numpy"].random
        super().__init__(lambda: numpy.get_state(legacy=False), lambda state: numpy.set_state(state))

    def look(self) -> tuple[Any, ...]:
        generator = sys.modules["numpy"].random.get_bit_generator()
        if generator is not self._generator:
            known = type(generator).__name__ == "MT19937"
            # In numpy: the words, which change when all are drawn, then an int that each draw moves on.
            address = generator.ctypes.state_address if known else 0
            self._draws = (memory(address, 8), memory(address + 4 * TWISTER_WORDS, 4)) if known else ()
            self._generator = generator
        return tuple(map(bytes, self._draws))


# --- Snapshots as bytes ---------------------------------------------------------------------------------------------


LIMIT = 256 * 2**20
"""How many bytes a snapshot may take unless more is allowed."""


def capture(model: torch.nn.Module | None = None, *, limit: int = LIMIT) -> bytes:
    """Take the weights and buffers of a model and the random states of this process."""
    weights = None if model is None else dict(model.state_dict())
    return encode({"model": weights, "random": random_state()}, limit=limit)


@contextmanager
def restored(data: bytes | None, model: torch.nn.Module | None = None) -> Iterator[None]:
    state = None if data is None else _whole(decode(data))
    weights = {} if model is None else {name: value.clone() for name, value in model.state_dict().items()}
    chance = random_state()
    try:
        if state is not None:
            _put_in_force(state, model)
        yield
    finally:
        set_random_state(chance)
        if model is not None:
            model.load_state_dict(weights)


def random_state() -> dict[str, Any]:
    state: dict[str, Any] = {"torch": torch.get_rng_state(), "python": random.getstate()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        state["cuda"] = torch.cuda.get_rng_state_all()
    if "numpy" in sys.modules:
        state["numpy"] = sys.modules["numpy"].random.get_state()
    return state


def set_random_state(state: Mapping[str, Any]) -> None:
    torch.set_rng_state(state["torch"])
    random.setstate(state["python"])
    if "cuda" in state and torch.cuda.is_available() and len(state["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(state["cuda"])
    if "numpy" in state and "numpy" in sys.modules:
        sys.modules["numpy"].random.set_state(state["numpy"])


def _whole(state: Any) -> dict[str, Any]:
    missing = missing_in(state)
    if isinstance(state, dict) and {"model", "random"} <= set(state) and not missing:
        return state
    raise LedgerError(
        f"the stored weights are not whole: {', '.join(missing[:3]) or 'something else was stored'}.",
        why="what does not fit into the limit is left out.",
        fix="gg.Ledger(path, payload=True, snapshot=True, snapshot_limit=2**30)",
    )


def _put_in_force(state: Mapping[str, Any], model: torch.nn.Module | None) -> None:
    odd = (RuntimeError, TypeError, ValueError, KeyError, AttributeError, IndexError, OverflowError)
    try:
        if model is not None and state["model"] is not None:
            model.load_state_dict(state["model"])
    except odd as error:
        raise LedgerError(
            f"the stored weights do not fit the model: {error}",
            why="they are those of the model that the fault happened in.",
            fix="give the model that was trained, or none to replay with the weights that loss_fn has",
        ) from error
    try:
        chance = state["random"]
        # numpy believes whatever position it is given, and reads there.
        if "numpy" in chance and not 0 <= chance["numpy"][2] <= 624:
            raise ValueError(f"numpy's position is {chance['numpy'][2]}")
        set_random_state(chance)
    except odd as error:
        raise LedgerError(
            f"the stored random state cannot be used: {type(error).__name__}: {error}.",
            why="it is damaged, or gradgate did not write it.",
            fix="PRAGMA integrity_check   -- in sqlite3, on the ledger",
        ) from error


# --- Copies of buffers ----------------------------------------------------------------------------------------------


class BufferCopies:
    """Copies of some tensors, in none of which an element lies in memory twice."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        self._tensors = tensors
        # What is sparse needs a copy with the same elements, not only of the same shape.
        self._copies = [torch.empty_like(t) if t.layout is torch.strided else t.detach().clone() for t in tensors]

    def take(self) -> None:
        for number, (copy, tensor) in enumerate(zip(self._copies, self._tensors, strict=True)):
            if copy.shape != tensor.shape or copy.dtype is not tensor.dtype:  # somebody gave it other memory
                self._copies[number] = torch.empty_like(tensor)
        copy_tensors(self._copies, self._tensors)

    def put_back(self) -> None:
        """Write into the tensors what was copied last; autograd sees it."""
        for copy, tensor in zip(self._copies, self._tensors, strict=True):
            if copy.shape != tensor.shape or copy.dtype is not tensor.dtype:
                tensor.data = copy.clone()
        with torch.no_grad():
            copy_tensors(self._tensors, self._copies)


# --- What a step may write ------------------------------------------------------------------------------------------


class TrainingState:
    """Buffers, gradients, random state and modes around some modules."""

    def __init__(self, modules: Sequence[torch.nn.Module]) -> None:
        self._roots = list(modules)
        self._random = RandomState()
        self._modes = ThreadModes()
        self.patches = Patches()
        self.open = False
        self._complete = False
        self.adopted: list[torch.nn.Parameter] = []
        self._gradients: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._added: tuple[torch.Tensor, int] | None = None
        self.reset_model: Callable[[], None] | None = None
        """Ends what a forward or backward of the model has left unfinished, where a wrapper must know of it."""
        self.refresh()

    def refresh(self, batch_leaves: Sequence[torch.Tensor] = ()) -> None:
        """Look again at what parameters and buffers there are; modules may have been moved or extended."""
        modules = dict.fromkeys(module for root in self._roots for module in root.modules())
        found = (parameter for module in modules for parameter in module.parameters(recurse=False))
        parameters: list[torch.Tensor] = list(dict.fromkeys([*found, *self.adopted, *batch_leaves]))
        tables = [table for module in modules if (table := buffers_of(module))]
        bound = [(table, name, buffer) for table in tables for name, buffer in table.items()]
        dense = [_without_repeats(b) for b in dict.fromkeys(buffer for *_, buffer in bound) if b is not None]
        copies = BufferCopies(dense)
        self._random.watch({tensor.device for tensor in [*parameters, *dense]})
        self._device = _device_of(parameters)
        self.modules, self.parameters, self._batch_leaves = modules, parameters, list(batch_leaves)
        self._tables, self._bound, self._copies = tables, bound, copies

    def adopt(self, parameters: Iterable[torch.nn.Parameter]) -> list[torch.nn.Parameter]:
        """Add parameters that a step is about to train although no guarded module owns them; return the new ones."""
        known = set(self.parameters)
        new = [parameter for parameter in parameters if parameter not in known]
        self._lay_aside(new)  # first: what is not laid aside must not be dropped
        self.adopted += new
        self.parameters += new
        return new

    def remember(self, batch_leaves: Sequence[torch.Tensor] = ()) -> None:
        """Take the state as it is before a step; gradients of earlier steps are laid aside, not copied."""
        if self.open:
            self.give_back()
        self._modes.remember()
        self._gradients, self._added, self._complete, self.open = [], None, False, True
        if batch_leaves or self._batch_leaves or self.was_rebound():
            self.refresh(batch_leaves)
        if self._bound:
            self._copies.take()
        self._random.remember()
        self._lay_aside(self.parameters)
        self._complete = True

    def was_rebound(self) -> bool:
        """Return whether the model was moved, or a buffer was assigned, added or deleted."""
        for table, name, buffer in self._bound:
            if table.get(name, self) is not buffer:
                return True
        return sum(map(len, self._tables)) != len(self._bound) or self._device != _device_of(self.parameters)

    def _lay_aside(self, parameters: Iterable[torch.Tensor]) -> None:
        for parameter in parameters:
            if (gradient := parameter.grad) is not None:
                self._gradients.append((parameter, gradient))
                parameter.grad = None

    def restore(self) -> None:
        """Put everything back to what it was before the step, with no gradients: ready for another try."""
        if self.reset_model is not None:
            self.reset_model()
        for table, name, buffer in self._bound:
            table[name] = buffer
        self._copies.put_back()
        self._random.restore()
        self.forget_gradients()
        self._modes.restore()

    def forget_gradients(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None

    def gradients(self) -> list[torch.Tensor]:
        return [gradient for parameter in self.parameters if (gradient := parameter.grad) is not None]

    def has_own_gradients(self) -> bool:
        return any(p.grad is not None for p in self.parameters if isinstance(p, torch.nn.Parameter))

    def earlier(self) -> dict[torch.Tensor, torch.Tensor]:
        return dict(self._gradients)

    def sums(self, without: Collection[torch.Tensor] = ()) -> tuple[list[list[torch.Tensor]], list[list[torch.Tensor]]]:
        """Make ready to add the step's gradients to those laid aside, as autograd does, in one call or none."""
        earlier_ones, new_ones, done = list[torch.Tensor](), list[torch.Tensor](), set(without)
        for parameter, earlier in self._gradients:
            if parameter in done:
                continue
            new = parameter.grad
            if new is not None and earlier.is_sparse and not new.is_sparse:
                parameter.grad = (new + earlier).detach()
                continue
            parameter.grad = earlier
            if new is not None:
                earlier_ones.append(earlier.detach() if earlier.requires_grad else earlier)
                new_ones.append(new.detach() if new.requires_grad else new)
        if not new_ones:
            return [], []
        self._added = earlier_ones[-1], write_count(earlier_ones[-1])
        return [earlier_ones], [new_ones]

    def add_earlier_gradients(self, without: Collection[torch.Tensor] = ()) -> None:
        """Add the step's gradients to those laid aside, and end the step; arguments as for `sums`."""
        _ = [*map(add_tensors, *self.sums(without))]
        self.open = False

    def give_back(self, *, device_died: bool = False) -> None:
        """Leave everything as it was before the step, unless that has been done or the step was finished."""
        if self.open:
            to_the_end(partial(self._give_back, device_died))

    def _give_back(self, device_died: bool) -> None:
        self.patches.undo()
        self._modes.restore()
        if self._added is None or write_count(self._added[0]) == self._added[1]:
            if self._complete:
                if not device_died:
                    self.restore()
                self.forget_gradients()
            for parameter, earlier in self._gradients:
                parameter.grad = earlier
            self._modes.restore()
        self.open = False

    def new_buffers(self) -> list[str]:
        """Name the buffers that appeared during the step; what they were before is not known."""
        known = {(id(table), name) for table, name, _ in self._bound}
        return [
            f"{path}.{name}".lstrip(".")
            for root in self._roots
            for path, module in root.named_modules()
            for name in buffers_of(module)
            if (id(buffers_of(module)), name) not in known
        ]

    def parameter_marks(self) -> list[tuple[int, int]]:
        return [write_mark(parameter) for parameter in self.parameters]

    def written_parameters(self, marks: list[tuple[int, int]]) -> list[str]:
        """Name the parameters that were written since the marks were taken."""
        now = zip(self.parameters, marks, self.parameter_marks(), strict=False)  # more may have been taken in
        return self._names(parameter for parameter, before, after in now if before != after)

    def spoilt_parameters(self) -> list[str]:
        return self._names(p for p in self.parameters if not bool(torch.isfinite(p.detach()).all()))

    def _names(self, parameters: Iterable[torch.Tensor]) -> list[str]:
        names = {id(p): name for root in self._roots for name, p in root.named_parameters()}
        return [names.get(id(parameter), "a parameter") for parameter in parameters]


def _device_of(tensors: list[torch.Tensor]) -> torch.device | None:
    return tensors[0].device if tensors else None


def divide_gradients(parameters: Iterable[torch.Tensor], sums: torch.Tensor, ranks: int = 1) -> torch.Tensor:
    """Divide gradients of a total by its count (`sums`, in double precision); return the mean, 0 for 0 / 0."""
    # The gradients have been averaged over this many `ranks`. Sharded ones (FSDP2) are divided shard by shard.
    total, count = sums.unbind()
    some = count != 0
    safe = torch.where(some, count, 1)
    factor = ranks / safe
    for parameter in parameters:
        if (gradient := parameter.grad) is not None:
            local = local_part(gradient)
            # Half precisions are scaled by a float32 factor: 1 / 100,000 is not a float16.
            dtype = local.dtype.to_real() if local.is_complex() else local.dtype
            local.mul_(factor.to(local.device, torch.float32 if dtype.itemsize < 4 else dtype))
    return torch.where(some, total / safe, 0).float()


def _without_repeats(buffer: torch.Tensor) -> torch.Tensor:
    """Narrow expanded dimensions to one element, so that every element lies in memory once."""
    if buffer.layout is not torch.strided:
        return buffer
    for dim, (size, stride) in enumerate(zip(buffer.shape, buffer.stride(), strict=True)):
        if stride == 0 and size > 1:
            buffer = buffer.narrow(dim, 0, 1)
    return buffer


# --- Is everything finite? ------------------------------------------------------------------------------------------


class FiniteCheck:
    """Looks for NaN and Inf in a loss and in many gradients at once, with one read by the host."""

    def has_nonfinite(self, gradients: list[torch.Tensor], loss: torch.Tensor | None = None) -> bool:
        if loss is None and (found := _kernels.nonfinite(gradients)) is not None:
            return found
        answer = None
        if gradients:
            device = gradients[0].device
            answer = torch.zeros(1, device=device)
            try:
                find_non_finite(gradients, answer, torch.ones(1, device=device))
            except RuntimeError:
                # Several devices; sparse, complex or overlapping gradients; or a device without this pass.
                answer = torch.stack([_any_non_finite(each).to(device) for each in gradients]).any().float()
        if loss is not None:
            # 0 if the loss is finite and NaN if not: it travels with the flag in the same read.
            nothing = loss - loss
            answer = nothing if answer is None else answer + nothing.to(answer.device)
        return answer is not None and answer.item() != 0


def _any_non_finite(tensor: torch.Tensor) -> torch.Tensor:
    values = tensor.coalesce().values() if tensor.is_sparse else tensor
    return ~torch.isfinite(values).all()


# --- What is frozen -------------------------------------------------------------------------------------------------

# Freezes and pins are attached to the parameter, so that whoever has the parameter can ask.

WATCHERS = "_gradgate_watchers"
"""The attribute of a parameter that has its watchers."""

FREEZES = "freezes"
"""The kind of the watcher that knows the freezes and pins; its `count` says how many elements they freeze."""


def frozen_elements(parameter: torch.Tensor) -> int:
    """Return how many elements of a parameter do not learn: frozen or pinned, or all if it does not require grad."""
    if not parameter.requires_grad:
        return parameter.numel()
    freezes = getattr(parameter, WATCHERS, {}).get(FREEZES)
    return int(freezes.count) if freezes is not None else 0
