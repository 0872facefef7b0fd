"""The door of the room: `resilient`, for a loader or for a dataset."""

from __future__ import annotations

import os
from typing import Any, TypeVar, overload

from torch.utils.data import DataLoader, Dataset, IterableDataset

from gradgate._names import describe
from gradgate.errors import ArgumentTypeError, ArgumentValueError
from gradgate.ledger import Ledger
from gradgate.loading._datasets import ResilientDataset, ResilientStream
from gradgate.loading._loader import ResilientLoader
from gradgate.loading._markers import check_catch
from gradgate.loading._quarantine import Names
from gradgate.loading._recording import Recorder
from gradgate.records import Sink

__all__ = ["resilient"]

Batch = TypeVar("Batch")


@overload
def resilient(
    source: DataLoader[Batch],
    *,
    refill: bool = ...,
    patience: int | None = ...,
    catch: type[Exception] | tuple[type[Exception], ...] = ...,
    ids: Names = ...,
    sink: Sink | None = ...,
    ledger: Ledger | str | os.PathLike[str] | None = ...,
) -> ResilientLoader[Batch]: ...
@overload
def resilient(
    source: IterableDataset[Any],
    *,
    catch: type[Exception] | tuple[type[Exception], ...] = ...,
    ids: Names = ...,
    sink: Sink | None = ...,
    ledger: Ledger | str | os.PathLike[str] | None = ...,
) -> ResilientStream: ...
@overload
def resilient(
    source: Any,
    *,
    catch: type[Exception] | tuple[type[Exception], ...] = ...,
    ids: Names = ...,
    sink: Sink | None = ...,
    ledger: Ledger | str | os.PathLike[str] | None = ...,
) -> ResilientDataset: ...


def resilient(
    source: Any,
    *,
    refill: bool = False,
    patience: int | None = None,
    catch: type[Exception] | tuple[type[Exception], ...] = (Exception,),
    ids: Names = None,
    sink: Sink | None = None,
    ledger: Ledger | str | os.PathLike[str] | None = None,
) -> Any:
    """Let one bad sample cost one sample, not the epoch.

    Around a `DataLoader`: where `__getitem__`, `next` or the collation of a sample raises, that sample is left out,
    with an incident, and the batch goes on without it. Any number of workers, any sampler, any collation; batches that
    have no bad sample are exactly those of the loader. No index ever answers with another sample.

    Around a dataset: a bad sample is given as a `BadSample`, which `gg.collate` leaves out.

    Args:
        source: A DataLoader, or a dataset, map-style or iterable.
        refill: For a loader: fill batches up with the samples that come next, in the order of the sampler, instead of
            leaving them short. The batch and what was prefetched after it are loaded again.
        patience: For a loader: how many bad samples in a row are taken for a fault of the code, which is raised; by
            default two batches, and at least 32. If no sample of an epoch can be loaded that is raised in any case.
        catch: What may be blamed on a sample. KeyboardInterrupt, SystemExit and running out of memory always pass.
        ids: What the samples are called: names by index, or a function of the index. By default the dataset's own
            `sample_id(index)` if it has one, else the index.
        sink: Where incidents go besides `.incidents`; around a dataset it is called in the workers.
        ledger: A Ledger, or its path, as the sink.

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
        raise ArgumentValueError(
            f"resilient(): `patience` is {describe(patience)}.",
            why="it is a number of bad samples in a row.",
            fix="patience=64",
        )
    if sink is not None and ledger is not None:
        raise ArgumentValueError(
            "resilient(): `sink` and `ledger` are both given.",
            why="a ledger is a sink; incidents go to one of them.",
            fix='gg.resilient(loader, ledger="run.ledger")',
        )
    if sink is not None and not isinstance(sink, Sink):
        raise ArgumentTypeError(
            f"resilient(): `sink` is {describe(sink)}.",
            why="a sink takes incidents by record_many(incidents, payloads=None).",
            fix='gg.resilient(loader, ledger="run.ledger")',
        )
    catch = check_catch(catch)
    if ledger is not None:
        sink = ledger if isinstance(ledger, Ledger) else Ledger(ledger)
    if isinstance(source, DataLoader):
        return ResilientLoader(source, catch, Recorder(source.dataset, ids, sink), refill, patience)
    if not isinstance(source, Dataset) and not hasattr(source, "__getitem__"):
        raise ArgumentTypeError(
            f"resilient(): `source` is {describe(source)}.",
            why="it stands around a torch.utils.data.DataLoader, or a dataset.",
            fix="gg.resilient(torch.utils.data.DataLoader(dataset))",
        )
    if refill or patience is not None:
        raise ArgumentValueError(
            "resilient(): `refill` and `patience` are for a loader, the source is a dataset.",
            why="a dataset answers for one sample at a time.",
            fix="gg.resilient(DataLoader(dataset, ...), refill=True)",
        )
    around = ResilientStream if isinstance(source, IterableDataset) else ResilientDataset
    return around(source, catch, Recorder(source, ids, sink))
