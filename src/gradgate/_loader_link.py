"""What a loader and a guard share: which samples a batch holds, and at which step the training is.

A loader notes every batch that it gives. When a guard drops a sample, it looks the batch up among them: by the tensors
themselves, or by their values if a wrapper has copied them to a device. So ids are never those of another batch,
however many batches are loaded ahead, and a healthy step pays nothing for them.
"""

from __future__ import annotations

import os
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from typing import Any, Protocol
from weakref import ReferenceType, WeakKeyDictionary, WeakSet, ref

import torch
from torch.utils.weak import WeakIdKeyDictionary

from gradgate._text import class_name, text_of, user_level
from gradgate._torch_private import write_count
from gradgate._trees import is_array, leaves_of
from gradgate.errors import LedgerWarning
from gradgate.records import Incident, Sink

MEMORY = 64 * 2**20
"""How many bytes of recent batches a loader keeps for comparison, beyond the `AT_LEAST` last ones."""
AT_LEAST, AT_MOST = 3, 64
_VALUES = (str, bytes, int, float, complex)
MOST_AHEAD = 2
"""How many batches a wrapper may load ahead, beyond those of one step of the optimizer, for the steps of loading
incidents to be those of their batches."""


class StepCounter(Protocol):
    """A guard, as far as a loader needs it."""

    run: str
    epoch: int | None
    global_step: int
    _window: tuple[int, int]

    @property
    def _steps_made(self) -> int: ...

    def _step_after(self, batches: int) -> int: ...


class LoaderIds(tuple[str | None, ...]):
    """The ids of the batch that a loader gave most recently, which may not be the one that the guard sees."""

    source: GivenBatches | None = None

    def if_current(self, training: StepCounter, size: int) -> LoaderIds | None:
        """Return the ids if the loader has given as many batches as the guard has made steps, and this one."""
        current = self.source is not None and self.source.gave_only_this_to(training)
        return self if current and len(self) == size else None


class Given:
    """One batch that a loader gave: its parts as they were then, and the ids of its rows."""

    __slots__ = ("__weakref__", "ids", "parts", "place", "source")

    def __init__(self, parts: Sequence[Any], ids: Callable[[], tuple[str | None, ...]], source: GivenBatches) -> None:
        self.ids = ids
        self.source = ref(source)
        self.place = source.place
        self.parts = [(ref(part), write_count(part)) if isinstance(part, torch.Tensor) else (part, 0) for part in parts]

    def unchanged(self) -> list[Any]:
        """Return the parts that are still there and were not written to since."""
        pairs = [(part() if isinstance(part, ref) else part, writes) for part, writes in self.parts]
        return [
            p for p, writes in pairs if p is not None and (not isinstance(p, torch.Tensor) or write_count(p) == writes)
        ]


# By tensor, the batch that it was given in most recently.
_GIVEN_WITH: MutableMapping[torch.Tensor, Given] = WeakIdKeyDictionary()
_LOADERS: WeakSet[GivenBatches] = WeakSet()
_given_so_far = 0  # batches of all loaders
_TRAININGS: WeakKeyDictionary[Any, list[Any]] = WeakKeyDictionary()  # guard -> where its incidents go


class GivenBatches:
    """The batches that one loader gave, and the step and epoch of the next one."""

    def __init__(self, sink: Any) -> None:
        self.epoch = -1
        self.epochs_under_way = 0
        self._last_given = -AT_LEAST
        self._sink = None if sink is None else _key(sink)
        self._training: ReferenceType[Any] | None = None
        self._recent: deque[tuple[Given, list[Any], int]] = deque()
        self._bytes = 0
        self._total = 0
        self._first_step: int | None = None  # how often `backward` was called before the first batch of this epoch
        self._followed_from_start = False
        self._in_epoch = 0
        _LOADERS.add(self)

    def begin_epoch(self) -> None:
        self.epoch += 1
        self._in_epoch, self._first_step = 0, None
        self.position()

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "given": self._in_epoch, "total": self._total}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self.epoch, self._in_epoch, self._total, self._first_step = state["epoch"], state["given"], state["total"], None

    @property
    def place(self) -> tuple[int, int]:
        """The epoch, and how many batches it has had."""
        return self.epoch, self._in_epoch

    def follow(self, training: StepCounter, given: Given | None = None) -> None:
        """Number incidents by a guard's steps and epochs from now on; the guard is at this batch, if one is given."""
        if self._training is None or self._training() is not training:
            self._training, self._first_step = ref(training), None
            if given is not None and given.place[0] == self.epoch:
                self._first_step = training._steps_made - given.place[1]

    def add(self, batch: Any, ids: Callable[[], tuple[str | None, ...]]) -> None:
        parts = [part for part in leaves_of(batch) if part is not None]
        given = Given(parts, ids, self)
        size = 0
        for part in parts:
            if isinstance(part, torch.Tensor):
                _GIVEN_WITH[part] = given
                size += part.nbytes if part.layout is torch.strided else 0
        self._recent.append((given, parts, size))
        self._bytes += size
        while len(self._recent) > AT_MOST or (len(self._recent) > AT_LEAST and self._bytes > MEMORY):
            self._bytes -= self._recent.popleft()[2]
        self._total += 1
        self._in_epoch += 1
        global _given_so_far
        _given_so_far = self._last_given = _given_so_far + 1

    def gave_lately(self) -> bool:
        return self._last_given > _given_so_far - AT_LEAST

    def recent(self) -> list[Given]:
        return [given for given, _, _ in list(self._recent)]

    def position(self) -> dict[str, Any]:
        """Return the step and the epoch of the batch that is loaded now: the guard's where there is one."""
        training = self._find_training()
        if training is None:
            return {"step": self._total, "epoch": self.epoch}
        if self._first_step is None:
            self._first_step = training._steps_made - self._in_epoch
            self._followed_from_start = not self._in_epoch
        ahead = self._first_step + self._in_epoch - training._steps_made
        if not (0 <= ahead < MOST_AHEAD + training._window[1] and torch.is_grad_enabled()):
            ahead = 0  # not every batch is trained on, as in a validation loop
        return {"run": training.run, "step": training._step_after(ahead), "epoch": training.epoch}

    def gave_only_this_to(self, training: StepCounter) -> bool:
        """Return whether the guard has made a step with each batch of the epoch but the last."""
        if self._first_step is None or not self._followed_from_start or self._find_training() is not training:
            return False
        return self._first_step + self._in_epoch - training._steps_made == 1

    def _find_training(self) -> StepCounter | None:
        training: StepCounter | None = None if self._training is None else self._training()
        if training is None and self._sink is not None:
            training = next((one for one, keys in reversed(list(_TRAININGS.items())) if self._sink in keys), None)
            if training is not None:
                self.follow(training)
        return training


def announce(training: StepCounter, sinks: Iterable[Any]) -> None:
    """Say where the incidents of a guard go, so that loaders with the same ledger have the guard's steps and epochs."""
    _TRAININGS[training] = [_key(sink) for sink in sinks]


def follow(loader: Any, batch: Any, training: StepCounter) -> None:
    """Let the loader, or the loader that gave this batch, number its incidents by the steps of a guard."""
    given = getattr(loader, "_given", None)
    if isinstance(given, GivenBatches):
        given.follow(training)
        return
    for part in leaves_of(batch):
        if (found := _owner(part)) is not None and (source := found.source()) is not None:
            source.follow(training, found)


def ids_of(batch: Any, size: int | None = None) -> tuple[str | None, ...] | None:
    """Find the ids of the rows of a batch that a loader gave."""
    # A batch is found if each of its parts is one of a given batch, or the other way round: the same tensor, or one of
    # the same bytes. Where several given batches fit, rows have an id if these agree on it. A tensor that was given
    # belongs to no other batch, whatever its values are. Copies are compared with the recent batches of the loaders
    # that are in an epoch, or gave one of the last batches of all.
    parts = [part for part in leaves_of(batch) if part is not None]
    owners = {id(given): given for part in parts if (given := _owner(part)) is not None}
    loaders = [loader for loader in list(_LOADERS) if loader.epochs_under_way or loader.gave_lately()]
    candidates = [*owners.values()] or [given for loader in loaders for given in loader.recent()]
    for compare in (_Identity(), _Equality()):
        matches = [given.ids() for given in candidates if compare.fits(given, parts)]
        if found := [ids for ids in matches if len(ids) == (len(matches[0]) if size is None else size)]:
            return tuple(names[0] if len(set(names)) == 1 else None for names in zip(*found, strict=True))
    return None


def _owner(part: Any) -> Given | None:
    return _GIVEN_WITH.get(part) if isinstance(part, torch.Tensor) else None


class _Identity:
    """Compares the parts of a batch with those of a given one: tensors are the same if they are one object."""

    def fits(self, given: Given, parts: list[Any]) -> bool:
        """Return whether each part is one of the given ones, or each given one is among the parts."""
        theirs = given.unchanged()
        if not theirs or not parts:
            return False
        return self._are_among(parts, theirs) or (len(theirs) == len(given.parts) and self._are_among(theirs, parts))

    def _are_among(self, some: list[Any], others: list[Any]) -> bool:
        return all(any(self._same(one, other) for other in others) for one in some)

    def _same(self, one: Any, other: Any) -> bool:
        return one is other or (type(one) is type(other) and isinstance(one, _VALUES) and bool(one == other))


class _Equality(_Identity):
    """The same by bytes, wherever tensors are; each is brought to the CPU once."""

    def __init__(self) -> None:
        self._bytes: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def _same(self, one: Any, other: Any) -> bool:
        tensors = isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor)
        if not tensors and not (is_array(one) and is_array(other)):
            return super()._same(one, other)
        if one.shape != other.shape or one.dtype != other.dtype:
            return False
        if tensors:
            return _is_plain(one) and _is_plain(other) and torch.equal(self._bytes_of(one), self._bytes_of(other))
        return not one.dtype.hasobject and bool(one.tobytes() == other.tobytes())

    def _bytes_of(self, tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in self._bytes:
            values = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
            self._bytes[id(tensor)] = tensor, values.reshape(-1).view(torch.uint8)  # both, so that the id stays its own
        return self._bytes[id(tensor)][1]


def _is_plain(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_nested and not tensor.is_meta


_failed_sinks: WeakSet[type] = WeakSet()


def give_to(sink: Sink, incidents: Sequence[Incident], *payloads: Mapping[str, bytes] | None) -> None:
    """Give incidents to a user's sink; if it raises, warn once for its class, and let the training go on."""
    try:
        sink.record_many(incidents, *payloads)
    except Exception as error:  # noqa: BLE001 - a user's own method may raise anything
        if type(sink) in _failed_sinks:
            return
        _failed_sinks.add(type(sink))
        warnings.warn(
            f"the sink {class_name(type(sink))} raised {class_name(type(error))}: {text_of(error)}. The training goes "
            f"on; the sink may lack {len(incidents)} or more incidents, which are in `result.dropped` of the guard, or "
            "in `loader.incidents`. This is said once.",
            LedgerWarning,
            stacklevel=user_level(),
        )


def _key(sink: Any) -> Any:
    """Return the file of a ledger, so that two ledgers of one file are one; for other sinks the object itself."""
    path = sink if isinstance(sink, str | os.PathLike) else getattr(sink, "path", None)
    return os.path.realpath(path) if isinstance(path, str | os.PathLike) else id(sink)
