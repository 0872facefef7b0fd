"""`resilient`: a loader that survives bad samples. It wraps a DataLoader that returns reports with its batches."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import islice
from numbers import Real
from typing import Any, Generic, TypedDict, TypeVar, Unpack, overload

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, IterDataPipe, MapDataPipe

from gradgate._checks import wrong_type, wrong_value
from gradgate._loader_link import GivenBatches
from gradgate._names import describe, listed
from gradgate.errors import ArgumentTypeError, ArgumentValueError, TooManyBadSamples
from gradgate.ledger import Ledger
from gradgate.loading._bad_samples import Attempts, BadSample, Catch, LoadingLog, Names, this_rank
from gradgate.loading._fetching import (
    FetchingDataset,
    FetchingStream,
    Gather,
    Report,
    ResilientDataset,
    ResilientStream,
)
from gradgate.loading._known_bad import QuarantineSampler
from gradgate.loading._refilling import Asking, Counted, Position, check_state, drawn_again, random_states
from gradgate.loading._workers import Board, WatchedEpoch
from gradgate.records import Incident, Sink

Batch = TypeVar("Batch")
Exceptions = type[Exception] | tuple[type[Exception], ...]


class ResilientLoader(Generic[Batch]):
    """The batches of a DataLoader without its bad samples; made by `resilient(loader)`.

    What it does not have itself (`dataset`, `sampler`, `batch_size`, ...) is read from and written to the loader.
    `len()` is that of the loader too: what an epoch without bad samples has, and so the most that there can be.

    A guard finds the ids of its batches by itself, also if a wrapper loads ahead or moves them to a device.

    Args:
        loader: The loader.
        attempts: What is caught, and what is tried again.
        log: Writes down what was left out, and gives samples their ids.
        refill: Whether batches are filled up.
        patience: How many bad samples in a row are a fault of the code.
        worker_timeout: How many seconds a worker may take for a sample; None if workers are not watched.

    Attributes:
        exceptions: The exceptions themselves by the incident's id, where they could be brought out of the worker.
        skipped: How many batches were left out because none of their samples could be loaded.

    Examples:
        >>> images = {index: torch.tensor(index) for index in (0, 1, 2, 3, 5)}
        >>> loader = gg.resilient(torch.utils.data.DataLoader(images, sampler=range(6), batch_size=3))
        >>> [(batch.tolist(), loader.ids) for batch in loader]
        [([0, 1, 2], ('0', '1', '2')), ([3, 5], ('3', '5'))]
        >>> [(incident.sample_id, incident.exception_type) for incident in loader.incidents]
        [('4', 'KeyError')]
    """

    _own = frozenset({"exceptions", "skipped"})

    def __init__(
        self,
        loader: DataLoader[Any],
        attempts: Attempts,
        log: LoadingLog,
        refill: bool,
        patience: int | None,
        worker_timeout: float | None = None,
    ) -> None:
        _check(loader, refill, worker_timeout)
        self._settings = attempts, log, refill, patience, worker_timeout
        self._loader, self._attempts, self._log = loader, attempts, log
        self._refill, self._worker_timeout = refill, worker_timeout
        self._size = loader.batch_size or getattr(loader.batch_sampler, "batch_size", None) or 1
        self._patience = max(32, 2 * self._size) if patience is None else patience
        single = loader.batch_sampler is None
        order = Asking(loader.sampler if single else loader.batch_sampler, refill=refill, single=single)
        self._asking = None if isinstance(loader.dataset, IterableDataset) else order
        self._inner = self._reporting_loader(self._asking)
        self._given = GivenBatches(log.sink)
        self._last: list[Any] = []
        self._resume: Mapping[str, Any] | None = None
        self._progress: Counted | None = None  # of the epoch that began most recently
        self._even = False  # whether a batch of which nothing could be loaded is given, as `_empty_batch`
        self._empty_batch: Any = None
        self.exceptions: dict[str, Exception] = {}
        self.skipped = 0

    @property
    def incidents(self) -> tuple[Incident, ...]:
        """What was left out, and what was loaded only at a retry (`transient`), in all epochs so far."""
        return self._log.incidents

    @property
    def ids(self) -> tuple[str | None, ...]:
        """The ids of the samples in the batch that was loaded most recently, row by row.

        A guard needs no help to find the ids of its batches. Behind a wrapper that loads ahead these are those of a
        later batch.
        """
        ids = self._log.ids(self._last)
        ids.source = self._given
        return ids

    def _inside(self, prepared: Any) -> Any:
        """Load for a loader that Accelerate has prepared, which shards and moves the batches of `base_dataloader`."""
        several = this_rank()[1] > 1
        if several and type(prepared).__name__ == "DataLoaderDispatcher":
            what = "resilient(): the loader is a DataLoaderDispatcher, in which one process loads for all."
            why = "it cuts each batch into equal parts, and would lose rows of a batch that is short."
            fix = "Accelerator(dataloader_config=DataLoaderConfiguration(dispatch_batches=False))"
            raise ArgumentTypeError(what, why=why, fix=fix)
        prepared.base_dataloader = self._again_around(prepared.base_dataloader, several=several)
        return prepared

    def _again_around(self, loader: DataLoader[Any], *, several: bool, nothing: Any = None) -> ResilientLoader[Any]:
        """Load in the same way from the loader that a framework has made of this one's."""
        # Where several processes load, all have equally many batches: one of which nothing can be loaded is `nothing`.
        if several and self._refill:
            what = "resilient(): `refill` is True, and several processes load."
            why = "the one that has fewer samples would have fewer batches, and the others would wait for it."
            raise ArgumentValueError(what, why=why, fix="gg.resilient(loader, refill=False)")
        own = self._like(loader)
        own._even, own._empty_batch = several or self._even, nothing
        return own

    def _like(self, loader: DataLoader[Batch]) -> ResilientLoader[Batch]:
        """Load from another loader of the same samples, such as the rest of an epoch; incidents and guard stay."""
        if loader is self._loader:
            return self
        other = ResilientLoader[Batch](loader, *self._settings)
        other._given, other._even = self._given, self._even
        return other

    def __len__(self) -> int:
        return len(self._inner)  # not the loader's: torch warns in an epoch of what it was asked here

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._loader, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name.startswith("_") or name in self._own:
            object.__setattr__(self, name, value)
            return
        setattr(self._loader, name, value)  # torch refuses what cannot be changed
        _check(self._loader, self._refill, self._worker_timeout)
        self._inner = self._reporting_loader(self._asking)

    def __repr__(self) -> str:
        return self._log.describe(self._loader)

    def state_dict(self) -> dict[str, Any]:
        """Return where the epoch is as plain values and tensors, to be saved with a checkpoint.

        Raises:
            ArgumentValueError: The loader has `in_order=False`, so the batches so far are not the first ones.

        Examples:
            >>> loader = gg.resilient(torch.utils.data.DataLoader(range(6), batch_size=2, shuffle=True))
            >>> epoch = iter(loader)
            >>> first, state, rest = next(epoch), loader.state_dict(), [batch.tolist() for batch in epoch]
            >>> loader.load_state_dict(state)
            >>> [batch.tolist() for batch in loader] == rest
            True
        """
        if not self._loader.in_order:
            what = "ResilientLoader.state_dict(): the loader has in_order=False."
            why = "the batches that were given so far are not the first of the epoch."
            raise ArgumentValueError(what, why=why, fix="DataLoader(dataset, in_order=True)")
        state: dict[str, Any] = {
            **self._given.state_dict(),
            "skipped": self.skipped,
            "position": None,
            "quarantine": None,
        }
        if self._progress is None:
            return {**state, "random": random_states(self._loader)}
        if (quarantine := self._quarantine()) is not None:
            state["quarantine"] = {**quarantine.state_dict(), "given": 0}
        return {**state, "position": tuple(self._progress.settled), "random": self._progress.random}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let the next epoch go on where a saved one was: the batches that it had not given yet, in their order.

        Samples that were given are not loaded again; those of a stream are. Random numbers that workers draw are not
        those of the saved run, because each draws them one after the other. The random state of the training is yours.

        Args:
            state: What `state_dict` gave, of a loader with the same dataset and settings.

        Raises:
            ArgumentValueError: It is something else.
        """
        check_state("ResilientLoader", state, self.state_dict())
        self._given.load_state_dict({**state, "given": 0})
        self.skipped, self._progress, self._resume = state["skipped"], None, None
        if state["position"] is not None:
            self._resume = state
            return
        with drawn_again(self._loader, state["random"]):
            pass  # afterwards only torch's own generator is as before

    def __iter__(self) -> Iterator[Batch]:
        state, self._resume = self._resume, None
        self._given.begin_epoch()
        if state is None:
            return self._epoch(random_states(self._loader))
        self._given.load_state_dict(state)
        if (quarantine := self._quarantine()) is not None and state["quarantine"] is not None:
            quarantine.load_state_dict(state["quarantine"])
        with drawn_again(self._loader, state["random"]):
            return self._epoch(state["random"], Position(*state["position"]))

    def _epoch(self, random: Sequence[torch.Tensor], start: Position | None = None) -> Iterator[Batch]:
        # At once, as in torch: the workers start, and their seed is drawn.
        batches: Iterator[tuple[Any, Report]]
        if self._asking is None or not self._loader.in_order:
            start = start or Position()
            batches = islice(iter(self._inner), start.batches, None)
            self._progress = Counted(start, None if self._asking is None else self._asking.requests)
        else:
            self._asking.start = start
            if self._worker_timeout is None:
                begun, requests = self._asking.begin(self._inner)
                batches = self._asking.to_the_end(begun, self._inner, requests)
            else:
                # Workers that are started for each epoch have a board of their own: there may be two epochs at once.
                inner = self._inner if self._inner.persistent_workers else self._reporting_loader(self._asking)
                limit = self._worker_timeout
                batches = WatchedEpoch(inner, self._reporting_loader, self._asking, limit, self._record)
                requests = batches.requests
            requests.begin()
            self._progress = requests
        self._progress.random = random
        return self._epoch_of(batches, self._progress)

    def _epoch_of(self, batches: Iterator[tuple[Any, Report]], requests: Counted) -> Iterator[Batch]:
        streak = _BadStreak(self._patience, self._log)
        self._given.epochs_under_way += 1
        try:
            for batch, report in batches:
                if self._is_ready(report, requests, streak):
                    self._last = kept = report.kept
                    given: Any = batch if kept else self._empty_batch
                    self._given.add(given, partial(self._log.ids, kept))
                    yield given
            if self._progress is requests:
                self._progress = None
            streak.close()
        finally:
            if isinstance(batches, WatchedEpoch):
                batches.close()
                self._inner = batches.loader
            self._given.epochs_under_way -= 1

    def _quarantine(self) -> QuarantineSampler | None:
        inner = getattr(self._loader.batch_sampler, "sampler", None)
        candidates = (self._loader.batch_sampler, self._loader.sampler, inner)
        return next((one for one in candidates if isinstance(one, QuarantineSampler)), None)

    def _is_ready(self, report: Report, requests: Counted, streak: _BadStreak) -> bool:
        """Write down what is bad about a batch; return whether the rest of it is a batch."""
        asked = requests.received()
        known = asked is None or len(asked) == len(report.indices)  # or the dataset gave more or fewer samples
        if report.bad or report.skipped:
            rows = requests.mark_bad(asked, report.bad) if known else list(report.bad)
            bad = [*report.skipped, *(report.bad[row] for row in rows)]
            self._record(bad, [*[None] * len(report.skipped), *rows])
            streak.count(report)
        else:
            streak.reset()
        if report.retried:
            self._record([marker for _, marker in report.retried], [row for row, _ in report.retried])
        if not requests.settles(asked, has_bad=known and bool(report.bad)):
            return False
        good = len(report.indices) - len(report.bad)
        if not good:
            self.skipped += 1 if report.indices else 0
            return self._even and bool(report.indices)
        return not (self._refill and self._loader.drop_last and good < self._size)

    def _record(self, markers: list[BadSample], rows: list[int | None]) -> None:
        self._log.record(markers, rows, **self._given.position())
        self.exceptions |= {one.incident.id: one.exception for one in markers if one.exception is not None}

    def _reporting_loader(self, asking: Asking | None, workers: int | None = None) -> DataLoader[tuple[Any, Report]]:
        """Make a loader with the settings of the user's, that gives reports along with its batches."""
        loader, attempts, watched = self._loader, self._attempts, self._worker_timeout
        workers = loader.num_workers if workers is None else workers
        board = None if watched is None else Board(workers)
        kept = (
            "generator",
            "in_order",
            "multiprocessing_context",
            "persistent_workers",
            "pin_memory",
            "worker_init_fn",
        )
        settings: dict[str, Any] = {name: getattr(loader, name) for name in kept}
        settings["num_workers"], settings["timeout"] = workers, loader.timeout
        settings["collate_fn"] = Gather(loader.collate_fn, loader.batch_sampler is not None, attempts.catch, board)
        if watched is not None:
            settings["timeout"] = min(watched / 10, 0.2)  # between two checks
        if workers:
            settings["prefetch_factor"] = loader.prefetch_factor
        if asking is None:
            stream = FetchingStream(loader.dataset, attempts, self._patience if self._refill else 0)
            return DataLoader(stream, batch_size=loader.batch_size, drop_last=loader.drop_last, **settings)
        order = {"batch_size": None, "sampler": asking} if asking.single else {"batch_sampler": asking}
        return DataLoader(FetchingDataset(loader.dataset, attempts, board), **order, **settings)


class _BadStreak:
    """Counts bad samples in a row, and raises when it is the code that is bad."""

    def __init__(self, patience: int, log: LoadingLog) -> None:
        self._patience, self._log = patience, log
        self._good = False
        self._row: list[BadSample] = []

    def count(self, report: Report) -> None:
        for outcome in (*report.skipped, *map(report.bad.get, range(len(report.indices)))):
            if outcome is None:
                self.reset()
            else:
                self._row.append(outcome)
            if len(self._row) >= self._patience:
                self._raise(f"{len(self._row)} samples in a row could not be loaded.")

    def reset(self) -> None:
        self._good = True
        self._row.clear()

    def close(self) -> None:
        if self._row and not self._good:
            self._raise(f"none of the {len(self._row)} samples could be loaded.")

    def _raise(self, what: str) -> None:
        error, first = self._row[0].exception, self._row[0].incident
        row = {one.incident.id for one in self._row}
        incidents = [incident for incident in self._log.incidents if incident.id in row]
        evidence = TooManyBadSamples(
            f"resilient(): {what} The first: sample {first.sample_id}, {first.exception_type}: {first.message} "
            f"({first.where}).",
            why="when every sample fails the fault is in the code or the storage; leaving all out would hide it.",
            fix=f"gg.resilient(loader, patience={4 * self._patience})   # if they really are that many: "
            f"{listed([incident.sample_id for incident in incidents])}",
            incidents=incidents,
        )
        if error is None:
            raise evidence
        with suppress(Exception):  # a class may forbid notes; the evidence has the place and the text
            error.add_note(first.details["traceback"])
        raise error from evidence


def _check(loader: DataLoader[Any], refill: bool, worker_timeout: float | None) -> None:
    own_state = hasattr(loader, "state_dict") and not hasattr(loader.dataset, "state_dict")  # torchdata's; we have ours
    if type(loader).__iter__ is not DataLoader.__iter__ and not own_state:
        what = f"resilient(): {type(loader).__name__} has an __iter__ of its own."
        why = "it would be lost: a resilient loader asks a plain DataLoader of the same settings."
        raise ArgumentTypeError(what, why=why, fix="gg.resilient(dataset)   # with collate_fn=gg.collate")
    if refill and not loader.in_order:
        what = "resilient(): `refill` is True, and the loader has in_order=False."
        why = "a batch is filled up with the samples after it, so there must be an order."
        raise ArgumentValueError(what, why=why, fix="gg.resilient(loader, refill=False)")
    if isinstance(loader.dataset, IterDataPipe | MapDataPipe):
        what = f"resilient(): the dataset is {describe(loader.dataset)}, a data pipe."
        why = "torch gives its random seeds to data pipes only, not to what is around them."
        raise ArgumentTypeError(what, why=why, fix="a Dataset or IterableDataset")
    if worker_timeout is None:
        return
    given = "resilient(): `worker_timeout` is given, and the"
    if isinstance(loader.dataset, IterableDataset):
        what = f"{given} dataset is {describe(loader.dataset)}, a stream."
        why = "what a stream has read is lost with its worker; a new one would begin at its start."
        raise ArgumentTypeError(what, why=why, fix="gg.resilient(loader)   # or a Dataset with __getitem__")
    for wrong, setting, why, right in (
        (not loader.num_workers, "num_workers", "only a process that is not the worker survives a sample.", 2),
        (not loader.in_order, "in_order", "the order of the batches tells what a lost worker was asked for.", True),
        (bool(loader.timeout), "timeout", "the loader's own timeout ends the epoch.", 0),
    ):
        if wrong:
            what = f"{given} loader has {setting}={getattr(loader, setting)}."
            raise ArgumentValueError(what, why=why, fix=f"DataLoader(dataset, {setting}={right})")


class _DatasetOptions(TypedDict, total=False):
    retries: int
    backoff: float
    retry_on: Exceptions
    catch: Exceptions
    ids: Names
    sink: Sink | None
    ledger: Ledger | str | os.PathLike[str] | None


class _LoaderOptions(_DatasetOptions, total=False):
    refill: bool
    patience: int | None
    worker_timeout: float | None


@overload
def resilient(source: DataLoader[Batch], **options: Unpack[_LoaderOptions]) -> ResilientLoader[Batch]: ...
@overload
def resilient(source: IterableDataset[Any], **options: Unpack[_DatasetOptions]) -> ResilientStream: ...
@overload
def resilient(source: Any, **options: Unpack[_DatasetOptions]) -> ResilientDataset: ...


def resilient(
    source: Any,
    *,
    refill: bool = False,
    retries: int = 2,
    backoff: float = 0.1,
    retry_on: Exceptions = (OSError, TimeoutError),
    patience: int | None = None,
    catch: Exceptions = (Exception,),
    ids: Names = None,
    sink: Sink | None = None,
    ledger: Ledger | str | os.PathLike[str] | None = None,
    worker_timeout: float | None = None,
) -> Any:
    """Let one bad sample cost one sample, not the epoch.

    Around a `DataLoader`: where `__getitem__`, `next` or the collation of a sample raises, that sample is left out,
    with an incident, and the batch goes on without it. Any number of workers, any sampler, any collation; batches that
    have no bad sample are exactly those of the loader. No index ever answers with another sample.

    Around a loader that `accelerator.prepare` gave: the same, inside of it.

    Around a dataset: a bad sample is given as a `BadSample`, which `gg.collate` leaves out.

    Args:
        source: A DataLoader, or a dataset, map-style or iterable.
        refill: For a loader: fill batches up with the samples that come next, in the order of the sampler, instead of
            leaving them short. The batch and what was prefetched after it are loaded again.
        retries: How often a sample is tried again, before it is blamed, if it raises one of `retry_on`. What passes
            then is in the batch, and its incident is `transient`: the sample is not left out later. A stream is not
            tried again, because it would give its next sample.
        backoff: How many seconds to wait before the first retry; twice as many before each further one.
        retry_on: What is tried again.
        patience: For a loader: how many bad samples in a row are taken for a fault of the code, which is raised; by
            default two batches, and at least 32. If no sample of an epoch can be loaded that is raised in any case.
        catch: What may be blamed on a sample. KeyboardInterrupt, SystemExit and running out of memory always pass.
        ids: The ids of the samples: a sequence by index, or a function of the index. By default the dataset's own
            `sample_id(index)` if it has one, else the index.
        sink: Where incidents go besides `.incidents`; around a dataset it is called in the workers.
        ledger: A Ledger, or its path, as the sink.
        worker_timeout: For a loader with workers and a map-style dataset: survive samples that kill their worker (a
            crash in a decoder, no memory) or hang it for this many seconds. Such a sample is loaded once more, alone
            in a fresh worker and with more time; if it fails again while its neighbours pass, it is left out. All
            workers are replaced, with their `worker_init_fn`, and what they had prefetched is loaded again.

    Returns:
        A `ResilientLoader`, a `ResilientDataset` or a `ResilientStream`.

    Raises:
        ArgumentTypeError: The source is neither a loader nor a dataset, or a loader that cannot be made again.
        ArgumentValueError: An argument does not fit, or `sink` and `ledger` are both given.
        LedgerError: The ledger cannot be opened.

    Examples:
        >>> samples = {0: torch.tensor(0.0), 1: torch.tensor(1.0), 3: torch.tensor(3.0)}
        >>> loader = gg.resilient(torch.utils.data.DataLoader(samples, sampler=range(4), batch_size=2))
        >>> [batch.tolist() for batch in loader]
        [[0.0, 1.0], [3.0]]
        >>> loader.incidents[0].sample_id, loader.incidents[0].exception_type
        ('2', 'KeyError')
    """
    if patience is not None and (type(patience) is not int or patience < 1):
        raise wrong_value(patience, "patience", "resilient", "it is a number of bad samples in a row.", "patience=64")
    if type(retries) is not int or retries < 0:
        why = "it is how often loading is tried again; 0 for never."
        raise wrong_value(retries, "retries", "resilient", why, "retries=2")
    if not _is_time(backoff):
        why = "it is the number of seconds to wait before the first retry."
        raise wrong_value(backoff, "backoff", "resilient", why, "backoff=0.1")
    if worker_timeout is not None and not (_is_time(worker_timeout) and worker_timeout):
        why = "it is the number of seconds that a worker may take for one sample; None for no limit."
        raise wrong_value(worker_timeout, "worker_timeout", "resilient", why, "worker_timeout=30")
    if sink is not None and ledger is not None:
        what, why = (
            "resilient(): `sink` and `ledger` are both given.",
            "a ledger is a sink; incidents go to one of them.",
        )
        raise ArgumentValueError(what, why=why, fix='gg.resilient(loader, ledger="run.ledger")')
    if sink is not None and not isinstance(sink, Sink):
        why = "a sink takes incidents by record_many(incidents, payloads=None)."
        raise wrong_type(sink, "sink", "resilient", why, 'gg.resilient(loader, ledger="run.ledger")')
    attempts = Attempts(_classes("catch", catch), _classes("retry_on", retry_on), retries, float(backoff))
    if ledger is not None:
        sink = ledger if isinstance(ledger, Ledger) else Ledger(ledger)
    inner = getattr(source, "base_dataloader", None)
    if isinstance(loader := inner if isinstance(inner, DataLoader) else source, DataLoader):
        log = LoadingLog(loader.dataset, ids, sink)
        made: ResilientLoader[Any] = ResilientLoader(loader, attempts, log, refill, patience, worker_timeout)
        return made if loader is source else made._inside(source)  # prepared by Accelerate
    if not isinstance(source, Dataset) and not hasattr(source, "__getitem__"):
        why = "it stands around a torch.utils.data.DataLoader, or a dataset."
        raise wrong_type(source, "source", "resilient", why, "gg.resilient(torch.utils.data.DataLoader(dataset))")
    if refill or patience is not None or worker_timeout is not None:
        what = "resilient(): `refill`, `patience` and `worker_timeout` are for a loader, the source is a dataset."
        fix = "gg.resilient(DataLoader(dataset, ...), refill=True)"
        raise ArgumentValueError(what, why="a dataset answers for one sample at a time.", fix=fix)
    around = ResilientStream if isinstance(source, IterableDataset) else ResilientDataset
    return around(source, attempts, LoadingLog(source, ids, sink))


def _is_time(seconds: Any) -> bool:
    return not isinstance(seconds, bool) and isinstance(seconds, Real) and 0 <= float(seconds) < math.inf


def _classes(argument: str, given: Any) -> Catch:
    classes = given if isinstance(given, tuple) else (given,)
    for one in classes:
        if not (isinstance(one, type) and issubclass(one, Exception)):
            why = "only classes of exceptions can be caught; KeyboardInterrupt and SystemExit always pass."
            what, fix = f"resilient(): `{argument}` has {one!r}.", f"{argument}=(OSError, ValueError)"
            raise ArgumentTypeError(what, why=why, fix=fix)
    return classes
