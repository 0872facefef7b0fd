"""The incidents of a ledger as the columns of a page."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

from gradgate._text import json_text, plain
from gradgate.records import Incident
from gradgate.report._book import Book
from gradgate.report._columns import deltas, numbers, words
from gradgate.report._previews import choose_previews

__all__ = ["LIMIT", "gather"]

LIMIT = 200_000
"""How many incidents a page holds, the newest ones; beyond, browsers become slow. The counts are of all."""

_TEXT = 3_000_000
"""How many characters the different messages may have together before they are cut, and the details likewise."""

_SHORTEST_NAME = 8
_ENCODE = json.JSONEncoder(ensure_ascii=False, allow_nan=False).encode  # Made once: there may be 200,000 of them.


def gather(book: Book, name: str) -> dict[str, Any]:
    """Read a ledger into plain values for the page.

    Args:
        book: The ledger.
        name: What to call it.

    Returns:
        What the page's script reads.
    """
    incidents = list(book.incidents(limit=LIMIT, newest_first=True))[::-1]
    samples = words(incident.sample_id for incident in incidents)
    bad = book.bad_ids()
    messages, cut = _within(words(incident.message for incident in incidents))
    details, details_cut = _within(words(_details(incident) for incident in incidents), whole=True)
    names = [incident.id for incident in incidents]
    return {
        "name": name,
        "total": max(book.stats().incidents, len(incidents)),
        "bad": len(bad),
        "runs": [plain(run.to_dict()) for run in book.runs()],
        "cut": cut or details_cut,
        "bad_words": deltas(place for place, sample in enumerate(samples["words"]) if sample in bad),
        "id": _beginnings(names),
        "columns": {
            "time": deltas(_milliseconds(incident.time) for incident in incidents),
            "run": words(incident.run for incident in incidents),
            "step": deltas(incident.step for incident in incidents),
            "epoch": deltas(incident.epoch for incident in incidents),
            "rank": deltas(incident.rank for incident in incidents),
            "row": deltas(incident.row for incident in incidents),
            "sample": samples,
            "stage": words(incident.stage for incident in incidents),
            "cause": words(incident.cause for incident in incidents),
            "exception": words(incident.exception_type for incident in incidents),
            "message": messages,
            "where": words(incident.where for incident in incidents),
            "module": words(incident.module for incident in incidents),
            "loss": numbers(incident.loss for incident in incidents),
            "norm": numbers(incident.grad_norm for incident in incidents),
            "transient": deltas(int(incident.transient) for incident in incidents),
            "details": details,
        },
        "previews": choose_previews(book, incidents),
    }


def _milliseconds(seconds: float) -> int | None:
    """Give a time in whole milliseconds, if a calendar knows it."""
    return round(seconds * 1000) if math.isfinite(seconds) and abs(seconds) < 1e11 else None


def _details(incident: Incident) -> str | None:
    if not incident.details:
        return None
    try:
        return _ENCODE(incident.details)
    except (TypeError, ValueError, RecursionError):  # Not from a file: whatever a user has put there.
        return json_text(incident.details)


def _within(column: dict[str, Any], *, whole: bool = False) -> tuple[dict[str, Any], bool]:
    """Keep the texts of a column within what a page may hold: cut each, or leave all out that are only good whole."""
    texts = column["words"]
    if sum(map(len, texts)) <= _TEXT:
        return column, False
    if whole:
        return words(None for _ in column["index"]), True
    longest = max(40, _TEXT // len(texts))
    return {**column, "words": [text if len(text) <= longest else text[:longest] + "…" for text in texts]}, True


def _beginnings(names: Sequence[str]) -> list[str]:
    """Give the beginnings of the ids, long enough to tell them apart: `gradgate ledger show` takes them."""
    ordered = sorted(names)
    alike = (pair for pair in pairwise(ordered) if pair[0][:_SHORTEST_NAME] == pair[1][:_SHORTEST_NAME])
    length = max((_shared(*pair) + 1 for pair in alike), default=_SHORTEST_NAME)
    return [name[:length] for name in names]


def _shared(one: str, other: str) -> int:
    """Count the characters that two texts begin with in common."""
    pairs: Iterable[tuple[str, str]] = zip(one, other, strict=False)
    return next((place for place, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))
