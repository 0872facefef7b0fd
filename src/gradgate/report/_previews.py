"""Which stored samples are shown: one of each kind first, then the newest, as many as a page has room for."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import Any

from gradgate.records import Incident
from gradgate.report._book import Book
from gradgate.report._tensors import Budget, look_at

__all__ = ["choose_previews"]

_SHOWN = 400
_ASKED = 3000
_BYTES_READ = 256 * 2**20


def choose_previews(book: Book, incidents: Sequence[Incident]) -> dict[str, Any]:
    """Show stored samples.

    Args:
        book: The ledger.
        incidents: Its incidents, the oldest first.

    Returns:
        `samples`, each a list of parts, and `of`: the number of the incident and which of the samples is its own.
    """
    budget, read = Budget(), _BYTES_READ
    samples: list[list[dict[str, Any]]] = []
    seen: dict[bytes, int] = {}
    whose: list[tuple[int, int]] = []
    for asked, place in enumerate(_in_turn(incidents)):
        if asked == _ASKED or len(samples) == _SHOWN or budget.pixels <= 0 or budget.values <= 0 or read <= 0:
            break
        payload = book.payload_of(incidents[place].id)
        if payload is None:
            continue
        read -= len(payload)
        digest = hashlib.sha256(payload).digest()
        if digest not in seen:  # The same sample fails in every epoch.
            seen[digest] = len(samples)
            samples.append(look_at(payload, budget))
        whose.append((place, seen[digest]))
    return {"samples": samples, "of": sorted(whose)}


def _in_turn(incidents: Sequence[Incident]) -> Iterator[int]:
    """Give the places of the incidents, one of each kind first, then the rest, the newest first."""
    kinds: dict[tuple[str | None, ...], int] = {}
    for place in range(len(incidents) - 1, -1, -1):
        one = incidents[place]
        kinds.setdefault((one.stage, one.cause, one.exception_type, one.where), place)
    yield from kinds.values()
    chosen = set(kinds.values())
    yield from (place for place in range(len(incidents) - 1, -1, -1) if place not in chosen)
