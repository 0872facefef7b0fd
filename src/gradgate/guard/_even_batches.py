"""Equally many batches on all ranks: a rank that has no more takes part with nothing until all are done."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from gradgate.errors import ArgumentValueError
from gradgate.guard._agreement import Agreement

if TYPE_CHECKING:
    from gradgate.guard._guard import Guard

END = object()


def even_batches(guard: Guard, agreement: Agreement, loader: Iterable[Any]) -> Iterator[Any]:
    """Give batches until no rank has any more, then batches of 0 rows (None where such a batch cannot be made).

    Each step tells the other ranks whether this one has another batch, so there is one collective, at the beginning.
    """
    batches = iter(loader)
    batch = next(batches, END)
    nothing = None if batch is END else _of_no_rows(guard, batch)
    forms = agreement.gather((batch is not END, nothing))
    if not any(has_one for has_one, _ in forms):
        return
    if batch is END:
        batch = nothing = next((form for _, form in forms if form is not None), None)
        following = END
    else:
        following = next(batches, END)
    while True:
        guard._more, guard._others_have_more = following is not END, None
        yield batch
        if guard._others_have_more is None:
            raise ArgumentValueError(
                "Guard.batches(): no step was made with the last batch.",
                why="the other ranks make one, and wait for this one.",
                fix="for batch in guard.batches(loader): guard.backward(batch, loss_fn)   # with every batch",
            )
        if not guard._others_have_more:
            return
        if following is END:
            batch = nothing
        else:
            batch, following = following, next(batches, END)


def _of_no_rows(guard: Guard, batch: Any) -> Any:
    """Make a batch of the same form with no rows; None if it cannot be, as with some functions of the user's."""
    try:
        return guard._reader.select(batch, [], guard._reader.count(batch))
    except Exception:  # noqa: BLE001 - the batch itself is judged when it is used
        return None
