"""Stored samples as something to look at, without torch: pictures where they are pictures, numbers otherwise.

A payload is a safetensors file with the tree of the sample in its header (see `gradgate._payload`). Nothing here
trusts it: whatever does not fit is an error, and every length is checked before it is used.
"""

from __future__ import annotations

import base64
import json
import math
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from gradgate._text import visible
from gradgate.report._columns import number

__all__ = ["Budget", "look_at"]

_PARTS = 12
_DEEPEST = 20
_DIMENSIONS = 64
_SIDE = 64
_VALUES_SHOWN = 48
_VALUES_READ = 200_000
_TEXT_SHOWN = 300
_CODES = {
    "BOOL": "?", "U8": "B", "I8": "b", "U16": "H", "I16": "h", "U32": "I", "I32": "i", "U64": "Q", "I64": "q",
    "F16": "e", "BF16": "H", "F32": "f", "F64": "d",
}  # fmt: skip


@dataclass
class Budget:
    """How much may still be read and shown.

    Args:
        values: How many values may be read.
        pixels: How many bytes of pictures may be shown.
    """

    values: int = 1_500_000
    pixels: int = 240_000


def look_at(data: bytes, budget: Budget) -> list[dict[str, Any]]:
    """Show the parts of a stored sample.

    Args:
        data: The payload.
        budget: How much may be read and shown; what is used is taken off.

    Returns:
        One entry for each part: its path in the sample, its `kind` ("picture", "numbers", "text"), and the rest.
    """
    try:
        length = int.from_bytes(data[:8], "little")
        if not 2 <= length <= len(data) - 8:
            raise ValueError("the header is longer than the file")
        header = json.loads(data[8 : 8 + length])
        tree = json.loads(header["__metadata__"]["gradgate"])
        parts: list[dict[str, Any]] = []
        for path, kind, node in _leaves(tree, "", 0):
            if len(parts) == _PARTS:
                parts.append({"path": "", "kind": "text", "text": "and more"})
                break
            parts.append({"path": path, **_part(kind, node, header, memoryview(data)[8 + length :], budget)})
        return parts
    except (
        ValueError,
        KeyError,
        TypeError,
        IndexError,
        AttributeError,
        OverflowError,
        struct.error,
        RecursionError,
    ) as error:
        text = f"The stored sample cannot be shown: {type(error).__name__}: {visible(error)}"
        return [{"path": "", "kind": "text", "text": text[:_TEXT_SHOWN]}]


def _leaves(node: Any, path: str, depth: int) -> Iterator[tuple[str, str, Any]]:
    """Walk over a tree as `gradgate._payload` writes it: a plain value, or an object whose first key says its kind."""
    if depth > _DEEPEST:
        yield path, "text", "nested too deeply"
        return
    if not isinstance(node, dict):
        yield path, "text", node
        return
    if not node:
        raise ValueError("a part without a kind")
    kind, inner = next(iter(node.items()))
    if kind == "dict":
        for key, item in inner:
            name = key if isinstance(key, str) else json.dumps(key)
            yield from _leaves(item, f"{path}.{name}" if path else name, depth + 1)
    elif kind in ("list", "tuple", "set", "frozenset"):
        for place, item in enumerate(inner):
            yield from _leaves(item, f"{path}[{place}]", depth + 1)
    elif kind == "fields":
        for name, item in zip(node["names"], inner, strict=True):
            yield from _leaves(item, f"{path}.{name}" if path else str(name), depth + 1)
    elif kind == "array":
        yield from _leaves(inner, path, depth + 1)
    elif kind == "tensor" and not node["complex"]:
        yield path, "tensor", inner
    elif kind == "missing":
        yield path, "text", f"not stored: {inner}"
    else:
        yield path, "text", inner if kind in ("float", "int", "path", "dtype", "device", "complex") else f"({kind})"


def _part(kind: str, node: Any, header: dict[str, Any], body: memoryview, budget: Budget) -> dict[str, Any]:
    if kind == "text":
        text = node if isinstance(node, str) else json.dumps(node)
        return {"kind": "text", "text": text if len(text) <= _TEXT_SHOWN else text[:_TEXT_SHOWN] + "…"}
    entry = header[node]
    dtype, shape = str(entry["dtype"]), list(entry["shape"])
    if len(shape) > _DIMENSIONS or not all(type(size) is int and 0 <= size < 2**63 for size in shape):
        raise ValueError("a shape that no tensor has")
    start, end = (int(place) for place in entry["data_offsets"])
    about = {"dtype": dtype.lower(), "shape": shape}
    if dtype not in _CODES:
        return {"kind": "text", "text": f"{dtype.lower()} of shape {shape}", **about}
    count = math.prod(shape)
    size = struct.calcsize("<" + _CODES[dtype])
    if not 0 <= start <= end <= len(body) or count * size != end - start:
        raise ValueError(f"a tensor of shape {shape} in {end - start} bytes")
    values = _Values(dtype, body[start:end], count)
    picture = _picture_axes(shape, dtype)
    if picture is not None:
        shown = _picture(values, picture, dtype, budget)
        if shown is not None:
            return {"kind": "picture", **about, **shown}
    return {"kind": "numbers", **about, **_summary(values, count, budget)}


class _Values:
    """The values of a tensor: all of them read at once, or one by one where there are too many."""

    def __init__(self, dtype: str, data: memoryview, count: int) -> None:
        self._one = struct.Struct("<" + _CODES[dtype])
        self._brain = dtype == "BF16"
        self._data = data
        self._all = struct.unpack(f"<{count}{_CODES[dtype]}", data) if count <= _VALUES_READ else None

    def __getitem__(self, place: int) -> float:
        value = self._one.unpack_from(self._data, place * self._one.size)[0] if self._all is None else self._all[place]
        if self._brain:  # The upper half of a float32.
            value = struct.unpack("<f", struct.pack("<I", value << 16))[0]
        return value  # type: ignore[no-any-return]


def _summary(values: _Values, count: int, budget: Budget) -> dict[str, Any]:
    """Give the first values, and the range of all, or of evenly spread ones where there are too many to read."""
    first = [number(values[place]) for place in range(min(count, _VALUES_SHOWN))]
    stride = max(1, -(-count // max(1, min(_VALUES_READ, budget.values))))
    read = [values[place] for place in range(0, count, stride)]
    budget.values -= len(read)
    finite = [value for value in read if math.isfinite(value)]
    return {
        "values": first,
        "low": number(min(finite, default=None)),
        "high": number(max(finite, default=None)),
        "mean": number(_mean(finite)) if finite else None,
        "bad": len(read) - len(finite),
        "part": stride > 1,
    }


def _picture_axes(shape: Sequence[int], dtype: str) -> tuple[int, int, int, int, int, int] | None:
    """Tell whether a tensor looks like a picture: channels, height, width and the step along each of them."""
    if dtype == "BOOL" and len(shape) < 2:
        return None
    while len(shape) > 2 and shape[0] == 1:
        shape = shape[1:]
    if len(shape) == 2 and min(shape) >= 4:
        height, width = shape
        return 1, height, width, 0, width, 1
    if len(shape) == 3 and shape[0] in (3, 4) and min(shape[1:]) >= 4:
        channels, height, width = shape
        return channels, height, width, height * width, width, 1
    if len(shape) == 3 and shape[2] in (1, 3, 4) and min(shape[:2]) >= 4:
        height, width, channels = shape
        return channels, height, width, 1, width * channels, channels
    return None


def _picture(
    values: _Values, axes: tuple[int, int, int, int, int, int], dtype: str, budget: Budget
) -> dict[str, Any] | None:
    """Give a small picture: a byte for each pixel and channel, 255 for one that holds NaN or Inf."""
    channels, height, width, over_channels, over_rows, over_columns = axes
    shown = min(channels, 3)  # A fourth one is transparency.
    block = max(1, -(-max(height, width) // _SIDE))
    rows, columns = range(0, height, block), range(0, width, block)
    cost = len(rows) * len(columns) * shown
    skip = max(1, math.isqrt(height * width * shown // _VALUES_READ) + 1)
    reads = shown * (height // skip + 1) * (width // skip + 1)
    if cost > budget.pixels or reads > budget.values:
        return None
    budget.pixels -= cost
    budget.values -= reads
    cells: list[float | None] = []
    bad = 0
    for row in rows:
        for column in columns:
            for channel in range(shown):
                seen = [
                    values[channel * over_channels + y * over_rows + x * over_columns]
                    for y in range(row, min(row + block, height), skip)
                    for x in range(column, min(column + block, width), skip)
                ]
                wrong = sum(not math.isfinite(value) for value in seen)
                bad += wrong
                cells.append(None if wrong else _mean(seen))
    finite = [cell for cell in cells if cell is not None]
    black, white = _ends(finite, dtype)
    span = white / 2 - black / 2  # Halves, because the difference of two large numbers may be infinite.
    shades = (None if cell is None else (cell / 2 - black / 2) / span if span else 0.0 for cell in cells)
    pixels = bytes(255 if shade is None else min(254, max(0, round(254 * shade))) for shade in shades)
    return {
        "height": len(rows),
        "width": len(columns),
        "channels": shown,
        "pixels": base64.b64encode(pixels).decode(),
        "low": number(min(finite, default=None)),
        "high": number(max(finite, default=None)),
        "black": number(black),
        "white": number(white),
        "bad": bad,
        "part": skip > 1,
    }


def _mean(values: Sequence[float]) -> float:
    try:
        return math.fsum(values) / len(values)
    except OverflowError:  # The sum is larger than any number; the mean is not.
        mean = 2 * math.fsum(value / 2 / len(values) for value in values)
        return min(max(mean, min(values)), max(values))


def _ends(cells: Sequence[float], dtype: str) -> tuple[float, float]:
    """Give what is black and what is white: the usual ends where the values lie between them, else their own."""
    low, high = min(cells, default=0.0), max(cells, default=1.0)
    if dtype == "U8":
        return 0.0, 255.0
    if low >= 0 and high <= 1:
        return 0.0, 1.0
    return low, high
