"""Many records in few bytes: one column for each attribute, each word written once."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any


def words(values: Iterable[str | None]) -> dict[str, Any]:
    """Write texts as a list of the different ones and the place of each in it; -1 stands for None.

    Examples:
        >>> words(["b", "a", None, "b"])
        {'words': ['b', 'a'], 'index': [0, 1, -1, 0]}
    """
    places: dict[str | None, int] = {}
    index = [-1 if value is None else places.setdefault(value, len(places)) for value in values]
    return {"words": list(places), "index": index}


def deltas(values: Iterable[int | None]) -> dict[str, Any]:
    """Write whole numbers as the steps from one to the next: small ones, where they are in order.

    Examples:
        >>> deltas([100, 101, None, 105])
        {'deltas': [100, 1, None, 4]}
    """
    steps: list[int | None] = []
    last = 0
    for value in values:
        steps.append(None if value is None else value - last)
        last = last if value is None else value
    return {"deltas": steps}


def numbers(values: Iterable[float | None]) -> dict[str, Any]:
    """Write numbers with the digits that a page shows.

    Examples:
        >>> numbers([0.123456789, float("nan"), None])
        {'numbers': [0.1235, 'nan', None]}
    """
    return {"numbers": [number(value) for value in values]}


def number(value: float | None) -> float | str | None:
    """Give a number with four digits; what JSON does not have becomes text.

    Examples:
        >>> number(float("-inf")), number(1 / 3)
        ('-inf', 0.3333)
    """
    if value is None:
        return None
    if not math.isfinite(value):
        return str(float(value))
    rounded = float(f"{value:.4g}")
    return rounded if math.isfinite(rounded) else value  # The largest numbers would be rounded to infinity.
