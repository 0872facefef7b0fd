"""Workers that die or hang: noticed, ended, and the sample that did it found.

Each worker notes in shared memory which sample it is loading. When it dies, or its note stays the same for too long,
that sample is a suspect, and no more: the system may have killed the worker, or the machine may be slow. The suspect
is loaded again, alone in a fresh worker, after samples that are not suspected. Only if one of those passes and the
suspect fails again is it to blame. Time counts while the main process waits, in turns of its own waiting: where the
machine stands still, so does this clock. The second time, the suspect has at least twice as long, and ten times as long
as its neighbour took.

All that was under way is lost with the worker: it is asked for again, from workers that are all new.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import connection
from time import monotonic
from typing import Any

import torch
from torch.utils.data import DataLoader, get_worker_info

from gradgate._kernels import memory
from gradgate._names import listed
from gradgate._torch_private import is_broken_message, is_waiting, is_worker_death, own_workers, stop_workers
from gradgate.errors import GradgateError
from gradgate.loading._bad_samples import BadSample, mark
from gradgate.loading._refilling import Asking, Order, Requests

NOTHING, ONE_SAMPLE, WHOLE_BATCH = range(3)
"""What a worker is doing."""
WITNESSES = 2  # how many samples that are not suspected are loaded before a suspect
STRIKES = 3  # how many workers in a row may be lost, with no batch between and no sample to blame
SLOWER = 10  # how much longer than its neighbour a suspect may take

_KILLED = "killed its worker"

MakeLoader = Callable[[Asking, int], DataLoader[Any]]
"""Makes a loader of an order and a number of workers; they note what they do on the board of its `collate_fn`."""


class Board:
    """What each worker of a loader is doing, in memory that all of them share with the main process."""

    def __init__(self, workers: int) -> None:
        self._notes = torch.zeros(workers, 3, dtype=torch.int64)
        self._notes.share_memory_()  # type: ignore[no-untyped-call]
        self._mine: memoryview | None = None

    def note(self, doing: int, place: int | None = None) -> None:
        """Note what this worker does now, and with which sample of the epoch; with the same one if none is given."""
        if self._mine is None:
            worker = get_worker_info()
            assert worker is not None
            self._mine = memory(self._notes[worker.id].data_ptr(), 24).cast("q")
        if place is not None:
            self._mine[1] = place
        self._mine[0] = doing
        self._mine[2] += 1

    def read(self) -> list[list[int]]:
        """Return what each worker is doing, the place of its sample, and how many notes it has made."""
        notes: list[list[int]] = self._notes.tolist()
        return notes


@dataclass(frozen=True, slots=True)
class Lost:
    doing: int
    place: int
    cause: str
    text: str


class WorkersLost(Exception):
    """Some workers are gone; `error` is what torch says about it."""

    def __init__(self, lost: list[Lost], error: Exception) -> None:
        super().__init__(*(one.text for one in lost))
        self.lost = lost
        self.error = error


class WatchedWorkers:
    """Iterates over a loader, and ends with `WorkersLost` where a worker dies, or hangs for longer than `limit`."""

    def __init__(self, loader: DataLoader[Any], limit: float) -> None:
        self._loader = loader
        self._board: Board = loader.collate_fn.board  # type: ignore[union-attr]
        self.limit = limit
        self._batches: Iterator[Any] = iter(())
        self._workers: list[Any] = []
        self._notes = self._board.read()
        self._waited = [0.0] * len(self._notes)

    def begin(self, asking: Asking, requests: Requests | None) -> Requests:
        """Start the workers, for a new epoch or for the rest of one."""
        try:
            self._batches, requests = asking.begin(self._loader, requests)
            self._workers = own_workers(self._batches)
        except RuntimeError as error:
            if not is_worker_death(error) and not is_waiting(error):  # waiting for workers that persist
                raise
            raise WorkersLost(self._dead(), error) from error
        return requests

    def __next__(self) -> Any:
        while True:
            try:
                return next(self._batches)
            except (RuntimeError, OSError, EOFError) as error:
                hung = self._hung() if is_waiting(error) else []
                if hung or is_worker_death(error) or (is_broken_message(error) and self._is_dying()):
                    raise WorkersLost(hung or self._dead(), error) from error
                if not is_waiting(error):
                    raise

    def close(self) -> None:
        if self._workers:
            stop_workers(self._batches)
        self._batches, self._workers = iter(()), []

    def _is_dying(self) -> bool:
        """Return whether a worker is gone, or is in a moment: what it has sent cannot be read any more."""
        gone = connection.wait([worker.sentinel for worker in self._workers], timeout=5)
        for worker in self._workers:
            if worker.sentinel in gone:
                worker.join()
        return bool(gone)

    def _dead(self) -> list[Lost]:
        notes = self._board.read()
        gone = [
            Lost(note[0], note[1], _KILLED, _ending(worker.exitcode))
            for note, worker in zip(notes, self._workers, strict=False)
            if not worker.is_alive()
        ]
        # If none is, it died while the workers were being started, so which it was is not known.
        return gone or [Lost(note[0], note[1], _KILLED, "the worker died at its start") for note in notes]

    def _hung(self) -> list[Lost]:
        """Return the workers whose note has been the same for too long, and end them."""
        notes = self._board.read()
        lost = []
        for number, (note, before) in enumerate(zip(notes, self._notes, strict=True)):
            same = note == before and note[0] != NOTHING
            self._waited[number] = self._waited[number] + self._loader.timeout if same else 0.0
            if self._waited[number] >= self.limit:
                self._workers[number].kill()
                self._workers[number].join()
                text = f"the worker did not come back within {self.limit:g} s"
                lost.append(Lost(note[0], note[1], "hung its worker", text))
        self._notes = notes
        return lost


class WatchedEpoch:
    """The batches of one epoch; workers that are lost are replaced, and samples that are to blame are left out."""

    def __init__(
        self,
        loader: DataLoader[Any],
        make: MakeLoader,
        asking: Asking,
        limit: float,
        record: Callable[[list[BadSample], list[int | None]], object],
    ) -> None:
        self.loader = loader
        self._make = make
        self._asking = asking
        self._limit = limit
        self._record = record
        self._strikes = 0
        self._watch: WatchedWorkers | None = None
        self.requests = self._begin(None)

    def __iter__(self) -> WatchedEpoch:
        return self

    def __next__(self) -> Any:
        while True:
            assert self._watch is not None
            try:
                batch = next(self._watch)
                self._strikes = 0
                return batch
            except StopIteration:
                if not self.requests.more():
                    raise
                self.close()
            except WorkersLost as gone:
                self._recover(gone, self.requests)
            self._begin(self.requests)

    def close(self) -> None:
        """End the workers, unless they are to persist."""
        if self._watch is not None and not self.loader.persistent_workers:
            self._watch.close()

    def _begin(self, requests: Requests | None) -> Requests:
        while True:
            self._watch = WatchedWorkers(self.loader, self._limit)
            try:
                return self._watch.begin(self._asking, requests)
            except WorkersLost as gone:
                requests = self._asking.requests
                assert requests is not None
                self._recover(gone, requests)

    def _recover(self, gone: WorkersLost, requests: Requests) -> None:
        """Find out who is to blame, and have all that was under way asked for again."""
        assert self._watch is not None
        self._watch.close()
        self.loader = self._make(self._asking, self.loader.num_workers)
        batches = requests.ask_again()
        samples = [place for batch in batches for place in batch.places]
        samples = [place for place in samples if not isinstance(requests.indices[place], BadSample)]
        suspects = {place: lost for lost in gone.lost for place in _suspected(lost, batches) if place in samples}
        witnesses = [place for place in samples if place not in suspects][:WITNESSES]
        if suspects and self._blame(suspects, witnesses, requests, gone):
            return
        self._strikes += 1
        if self._strikes >= STRIKES:
            _refuse(gone, f"{STRIKES} workers in a row were lost, and no sample is to blame")
        first, index = gone.lost[0], next((requests.indices[place] for place in suspects), None)
        self._record([_marker(first, index, f"{first.cause}, not again", transient=True)], [None])

    def _blame(
        self, suspects: dict[int, Lost], witnesses: Sequence[int], requests: Requests, gone: WorkersLost
    ) -> list[int]:
        """Load suspects alone in fresh workers, after some that are not suspected; blame those that fail again."""
        failed = self._alone([*witnesses, *suspects], requests)
        if len(failed) == len(witnesses) + len(suspects) > 1:
            names = listed([requests.indices[place] for place in failed])
            _refuse(gone, f"each of the samples {names} does the same to a fresh worker in which it is alone")
        blamed = [place for place in suspects if place in failed]
        for place in blamed:
            lost = suspects[place]
            requests.indices[place] = _marker(lost, requests.indices[place], lost.cause, again=failed[place])
        return blamed

    def _alone(self, places: Sequence[int], requests: Requests) -> dict[int, str]:
        """Load samples one by one in a worker of their own; give what happened to those that it did not survive."""
        rest, failed = list(places), dict[int, str]()
        while rest:
            each = Asking([requests.indices[place] for place in rest], refill=False, single=True)
            watch = WatchedWorkers(self._make(each, 1), 2 * self._limit)
            left = list(rest)
            try:
                watch.begin(each, each.new())
                for place in left:
                    began = monotonic()
                    next(watch)
                    rest.remove(place)
                    watch.limit = max(watch.limit, SLOWER * (monotonic() - began))
            except WorkersLost as gone:
                (lost,) = gone.lost
                if lost.doing == NOTHING:
                    _refuse(gone, "a fresh worker was lost while it did nothing")
                failed[left[lost.place]] = lost.text
                rest.remove(left[lost.place])
            finally:
                watch.close()
        return failed


def _suspected(lost: Lost, batches: list[Order]) -> Sequence[int]:
    """Return the places of what a worker was loading: one sample, or those of a batch."""
    if lost.doing == WHOLE_BATCH:
        return next((batch.places for batch in batches if lost.place in batch.places), ())
    return [lost.place] if lost.doing == ONE_SAMPLE else []


def _marker(lost: Lost, index: Any, cause: str, **details: Any) -> BadSample:
    error = TimeoutError(lost.text) if lost.cause.startswith("hung") else RuntimeError(lost.text)
    return mark(error, index, cause, **details)


def _ending(code: int | None) -> str:
    if code is not None and code < 0:
        with suppress(ValueError):
            return f"the worker was killed by {signal.Signals(-code).name}"
    return f"the worker exited with code {code}"


def _refuse(gone: WorkersLost, evidence: str) -> None:
    """Raise what torch says about a lost worker, with the reason why no sample is blamed for it."""
    raise gone.error from GradgateError(
        f"resilient(): {evidence} ({gone}).",
        why="a fault of the code, of worker_init_fn or of the machine must be seen; no sample was left out for it.",
        fix="DataLoader(dataset, num_workers=0)   # the same in this process, under a debugger",
    )
