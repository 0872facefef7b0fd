"""Incidents read from the file: several, one, and the bytes that belong to it."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Mapping
from typing import Any

from gradgate.errors import NothingMatchedError
from gradgate.ledger._filters import where
from gradgate.ledger._rows import COLUMNS, as_text, check_kinds, from_row
from gradgate.records import Incident

__all__ = ["blob", "one_incident", "select_incidents"]

_SELECT = f"SELECT {', '.join(COLUMNS)} FROM incident"
PREFIX = 4
"""How many characters of an incident's id are enough to ask for it, if they fit only one."""


def select_incidents(
    connection: sqlite3.Connection,
    filters: Mapping[str, Any],
    *,
    limit: int | None = None,
    newest_first: bool = False,
) -> Iterator[Incident]:
    """Read incidents in the order of time.

    Args:
        connection: The open file.
        filters: Which ones.
        limit: How many at most.
        newest_first: Begin with the last one.

    Yields:
        The incidents.
    """
    condition, values = where(filters)
    order = "DESC" if newest_first else "ASC"
    rows = connection.execute(
        f"{_SELECT} WHERE {condition} ORDER BY time {order}, number {order} LIMIT ?",
        [*values, -1 if limit is None else limit],
    )
    for row in rows:
        yield from_row(row)


def one_incident(connection: sqlite3.Connection, incident_id: str) -> Incident:
    """Read one incident.

    Args:
        connection: The open file.
        incident_id: Its id, or the beginning of it if that fits no other.

    Returns:
        The incident.

    Raises:
        NothingMatchedError: There is no such incident, or several begin so.
    """
    wanted = as_text(incident_id)
    row = connection.execute(f"{_SELECT} WHERE id = ?", (wanted,)).fetchone()
    if row is not None:
        return from_row(row)
    found = []
    if len(wanted) >= PREFIX:
        beyond = wanted[:-1] + chr(min(ord(wanted[-1]) + 1, 0x10FFFF))
        found = connection.execute(f"{_SELECT} WHERE id >= ? AND id < ? LIMIT 4", (wanted, beyond)).fetchall()
    if len(found) == 1:
        return from_row(found[0])
    raise NothingMatchedError(
        f"there is no incident {wanted!r}." if not found else f"several incidents begin with {wanted!r}.",
        why=(
            f"an incident is asked for by its id, or by at least {PREFIX} characters of its beginning."
            if not found
            else f"among them {', '.join(str(row[0]) for row in found)}."
        ),
        fix="gradgate ledger list LEDGER",
    )


def blob(connection: sqlite3.Connection, question: str, key: str) -> bytes | None:
    """Read the bytes that a question gives, if there are any.

    Args:
        connection: The open file.
        question: SQL with one question mark, giving one column.
        key: What stands for the question mark.

    Returns:
        The bytes.
    """
    row = connection.execute(question, (key,)).fetchone()
    if row is None:
        return None
    check_kinds({"data": row[0]}, {"data": (bytes,)}, "a payload")
    return bytes(row[0])
