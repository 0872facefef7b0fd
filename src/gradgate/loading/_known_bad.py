"""Known-bad samples are left out of the epochs to come.

`without` gives a dataset that lacks them, as it is now: for a new run, or a loader that is made anew for each epoch.
`QuarantineSampler` asks the ledger at the beginning of every epoch, leaves indexes as they are, and keeps the ranks of
a `DistributedSampler` at the same number of samples.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager
from copy import copy
from itertools import chain, cycle, islice
from typing import Any, TypeVar, cast

import torch.distributed
from torch.utils.data import Dataset, IterableDataset, Sampler, Subset
from torch.utils.data.distributed import DistributedSampler
from torch.utils.data.sampler import RandomSampler, SequentialSampler, SubsetRandomSampler

from gradgate._checks import wrong_type
from gradgate._text import user_level
from gradgate.errors import ArgumentTypeError, LedgerError, LedgerWarning
from gradgate.ledger import Ledger
from gradgate.loading._bad_samples import Names, name_of, names_for, this_rank
from gradgate.loading._refilling import check_state, drawn_again, random_states

Sample = TypeVar("Sample", covariant=True)


class _Without(Subset[Sample]):
    """A dataset without some samples; `indices` gives the place of each in the whole, `sample_id` its name there."""

    def __init__(self, dataset: Dataset[Sample], indices: Sequence[int], names: Names) -> None:
        super().__init__(dataset, indices)
        self._names = names

    def __repr__(self) -> str:
        whole = len(cast("Sized", self.dataset))
        return f"without({type(self.dataset).__name__}: {len(self.indices)} of {whole} samples)"

    def sample_id(self, index: int) -> str:
        """Return the name of a sample in the whole dataset, which is the one that belongs in a ledger."""
        return name_of(self._names, self.indices[index])


def without(
    dataset: Dataset[Sample],
    ledger: Ledger | str | os.PathLike[str],
    *,
    ids: Names = None,
    min_count: int = 1,
    cause: str | None = None,
) -> Subset[Sample]:
    """Return a dataset without the samples that a ledger knows to be bad.

    It is made of what is known now. For a set that changes from epoch to epoch, call it again, or use a
    `QuarantineSampler`. A ledger that is not there yet knows nothing: the first run can have the same line.

    Args:
        dataset: The dataset, with `__len__` and `__getitem__`.
        ledger: The ledger, or its path.
        ids: What the samples are called in the ledger: names by index, or a function of the index; if None, what the
            dataset's own `sample_id(index)` says, or the index itself.
        min_count: How many incidents make a sample bad.
        cause: Count only incidents of this cause.

    Returns:
        A `torch.utils.data.Subset`; its `indices` are those that are left, and its `sample_id(index)` gives the name
        of a sample in the whole dataset.

    Raises:
        ArgumentTypeError: The dataset has no length.
        LedgerError: The ledger cannot be read.

    Examples:
        >>> import tempfile
        >>> ledger = gg.Ledger(tempfile.mkdtemp() + "/run.ledger")
        >>> ledger.record(gg.Incident(stage="load", cause="exception", sample_id="1"))
        >>> list(gg.without(["a", "b", "c"], ledger))
        ['a', 'c']
    """
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
        why = "samples are left out by their index, and a stream has none."
        fix = "bad = ledger.bad_ids(); (sample for sample in dataset if name_of(sample) not in bad)"
        raise wrong_type(dataset, "dataset", "without", why, fix)
    names = names_for(dataset, ids, "without")
    if not isinstance(ledger, Ledger) and os.path.exists(ledger):
        ledger = Ledger(ledger, read_only=True)
    bad = ledger.bad_ids(min_count, cause) if isinstance(ledger, Ledger) else set()
    return _Without(dataset, [index for index in range(len(dataset)) if name_of(names, index) not in bad], names)


class QuarantineSampler(Sampler[Any]):
    """A sampler that leaves out what the ledger knows to be bad when an epoch begins.

    It gives the indexes of another sampler, in its order, without the bad ones. Around a `DistributedSampler` the bad
    ones are taken out before the samples are shared among the ranks, so that every rank still has as many; all ranks
    use the samples that any of them knows to be bad. What was left out and what got another chance is recorded.

    Args:
        sampler: The sampler to filter; one that gives lists of indexes (a batch sampler) is filtered list by list.
        ledger: The ledger, or its path.
        ids: What the samples are called in the ledger: names by index, or a function of the index; the index itself
            if None.
        min_count: How many incidents make a sample bad.
        cause: Count only incidents of this cause.
        retry_after: Give a sample another chance when it has sat out this many epochs; never if None.

    Raises:
        LedgerError: The ledger cannot be opened. One that fails later is a `LedgerWarning`, and what was known stays.

    Examples:
        >>> import tempfile
        >>> ledger = gg.Ledger(tempfile.mkdtemp() + "/run.ledger")
        >>> sampler = gg.QuarantineSampler(torch.utils.data.SequentialSampler(range(4)), ledger)
        >>> list(sampler)
        [0, 1, 2, 3]
        >>> ledger.record(gg.Incident(stage="forward", cause="exception", sample_id="2"))
        >>> list(sampler), len(sampler)
        ([0, 1, 3], 3)
    """

    def __init__(
        self,
        sampler: Sampler[Any],
        ledger: Ledger | str | os.PathLike[str],
        *,
        ids: Names = None,
        min_count: int = 1,
        cause: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        # One that shares samples as torch's own does can do it again without some.
        if getattr(sampler, "num_replicas", 1) > 1 and type(sampler).__iter__ is not DistributedSampler.__iter__:
            name = type(sampler).__name__
            what = f"QuarantineSampler(): `sampler` is a {name}, which shares samples among ranks in its own way."
            why = "the ranks would have different numbers of batches, and wait for each other without end."
            fix = f"{name}(gg.without(dataset, ledger), ...)   # before they are shared"
            raise ArgumentTypeError(what, why=why, fix=fix)
        self.sampler, self.ids = sampler, ids
        self.ledger = ledger if isinstance(ledger, Ledger) else Ledger(ledger)
        self.min_count, self.cause, self.retry_after = min_count, cause, retry_after
        self.epoch = 0
        self._length: int | None = None
        self._given = 0
        self._random: list[torch.Tensor] = []
        self._resume: Mapping[str, Any] | None = None
        self._bad = self._known()

    def __repr__(self) -> str:
        return f"QuarantineSampler({type(self.sampler).__name__}, {self.ledger!r}, known_bad={len(self._bad)})"

    def set_epoch(self, epoch: int) -> None:
        """Say which epoch begins; needed for `retry_after`, and passed on to the sampler within.

        Args:
            epoch: The epoch.
        """
        self.epoch = epoch
        if hasattr(self.sampler, "set_epoch"):
            self.sampler.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Return where the epoch is, to be saved with a checkpoint; also for torchdata's StatefulDataLoader."""
        return {"epoch": self.epoch, "given": self._given, "bad": sorted(self._bad), "random": self._random}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let the next iteration go on where a saved one was: the same order, and the same samples left out.

        Args:
            state: What `state_dict` gave.

        Raises:
            ArgumentValueError: It is something else.
        """
        check_state("QuarantineSampler", state, self.state_dict())
        self._resume = state
        self.set_epoch(state["epoch"])

    def __iter__(self) -> Iterator[Any]:
        # A generator does nothing before the first index; what is drawn from random numbers is drawn then, as in torch.
        state, self._resume = self._resume, None
        entries = self._entries()
        if state is None or not state["random"]:
            self._begin()
            self._given, self._random = 0, random_states(self.sampler)
        else:
            self._bad, self._length, self._random = set(state["bad"]), None, state["random"]
            self._given = state["given"]
            with drawn_again(self.sampler, self._random):
                # One more than were given, now: the order is drawn with the first index.
                entries = chain(list(islice(entries, self._given + 1))[self._given :], entries)
        for entry in entries:
            self._given += 1
            yield entry

    def _entries(self) -> Iterator[Any]:
        if isinstance(self.sampler, DistributedSampler):
            yield from self._share(self.sampler)
            return
        for entry in self.sampler:
            if isinstance(entry, list | tuple):
                if kept := [index for index in entry if self._is_good(index)]:
                    yield kept
            elif self._is_good(entry):
                yield entry

    def __len__(self) -> int:
        """Count how many indexes an epoch has by what is known now; at most that many where it cannot be foreseen."""
        if self._length is None:
            self._length = self._count(self.sampler)
        return self._length

    def _count(self, sampler: Sampler[Any]) -> int:
        if isinstance(sampler, DistributedSampler):
            return len(self._share(sampler))
        if isinstance(sampler, SubsetRandomSampler):
            return sum(self._is_good(index) for index in sampler.indices)
        length = len(sampler)  # type: ignore[arg-type] # A sampler without a length says so itself.
        each_once = isinstance(sampler, SequentialSampler) or (
            isinstance(sampler, RandomSampler) and not sampler.replacement and length == len(sampler.data_source)
        )
        return sum(self._is_good(index) for index in range(length)) if each_once else length

    def _is_good(self, index: int) -> bool:
        return name_of(self.ids, index) not in self._bad

    def _share(self, sampler: DistributedSampler[Any]) -> list[int]:
        """Share the good ones among the ranks as the sampler does: the rest dropped, or filled up from the start."""
        whole = copy(sampler)  # the indexes of all ranks, in the order of this epoch
        whole.num_replicas, whole.rank = 1, 0
        whole.num_samples = whole.total_size = len(sampler.dataset)  # type: ignore[arg-type]
        good = [index for index in whole if self._is_good(index)]
        ranks = sampler.num_replicas
        size = (len(good) if sampler.drop_last else len(good) + ranks - 1) // ranks * ranks
        return list(islice(cycle(good), size))[sampler.rank :: ranks]

    def _begin(self) -> None:
        """Read what is bad, agree on it with the other ranks, and record the decisions."""
        mine, ever = self._bad, self._bad
        with _warning_only():
            mine, ever = self._known(), self.ledger.bad_ids(self.min_count, self.cause)
        self._bad = _union(mine)  # Whatever became of this rank's ledger: the others wait for its answer.
        self._length = None
        if this_rank()[0] == 0:
            with _warning_only():
                self.ledger.record_decisions("skip", sorted(self._bad), self.epoch)
                self.ledger.record_decisions("retry", sorted(ever - self._bad), self.epoch)

    def _known(self) -> set[str]:
        return self.ledger.bad_ids(self.min_count, self.cause, retry_after=self.retry_after, epoch=self.epoch)


@contextmanager
def _warning_only() -> Iterator[None]:
    """Turn the failure of a ledger during a training into a warning."""
    try:
        yield
    except LedgerError as error:
        warnings.warn(f"the quarantine stays as it was: {error}", LedgerWarning, stacklevel=user_level())


def _union(mine: set[str]) -> set[str]:
    """Return what any rank knows: each may have its own file, or read a shared one a moment earlier than another."""
    _, world_size = this_rank()
    if world_size == 1:
        return mine
    everyone: list[Any] = [None] * world_size
    torch.distributed.all_gather_object(everyone, sorted(mine))
    return {name for names in everyone for name in names}
