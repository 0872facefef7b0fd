"""The data of the page: incidents as columns, and small pictures of stored samples."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import os
import struct
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Any, Protocol, runtime_checkable

from gradgate._text import json_text, plain, visible
from gradgate.records import Incident

# --- Where incidents come from --------------------------------------------------------------------------------------


@runtime_checkable
class Book(Protocol):
    """What a page can be made from: a `gradgate.Ledger`, or anything else that answers these questions.

    One that has `hardest(k)` and `suspicious()` too, as a ledger has, gets a section about hard samples.

    Examples:
        >>> import tempfile
        >>> isinstance(gg.Ledger(tempfile.mkdtemp() + "/run.ledger"), gg.report.Book)
        True
    """

    def incidents(self, *, limit: int | None = None, newest_first: bool = False) -> Sequence[Incident]:
        """Return the incidents in the order of time."""

    def stats(self) -> Any:
        """Count them, as `gradgate.ledger.Stats` does; `incidents` is asked for."""

    def runs(self) -> Sequence[Any]:
        """Return the runs, each as a `gradgate.ledger.Run` with `to_dict`."""

    def bad_ids(self) -> set[str]:
        """Return the samples that are known to be bad."""

    def payload_of(self, incident_id: str) -> bytes | None:
        """Return the stored sample of an incident, if there is one."""


# --- Columns --------------------------------------------------------------------------------------------------------


def words(values: Iterable[str | None]) -> dict[str, Any]:
    """Write texts as a list of the different ones and the place of each in it; -1 stands for None."""
    places: dict[str | None, int] = {}
    index = [-1 if value is None else places.setdefault(value, len(places)) for value in values]
    return {"words": list(places), "index": index}


def deltas(values: Iterable[int | None]) -> dict[str, Any]:
    """Write whole numbers as the steps from one to the next: small ones, where they are in order."""
    steps: list[int | None] = []
    last = 0
    for value in values:
        steps.append(None if value is None else value - last)
        last = last if value is None else value
    return {"deltas": steps}


def number(value: float | None) -> float | str | None:
    """Return a number with the four digits that a page shows; what JSON does not have becomes text."""
    if value is None:
        return None
    if not math.isfinite(value):
        return str(float(value))
    rounded = float(f"{value:.4g}")
    return rounded if math.isfinite(rounded) else value  # The largest numbers would be rounded to infinity.


# --- Stored samples -------------------------------------------------------------------------------------------------


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
    """How much may still be read and shown."""

    values: int = 1_500_000
    pixels: int = 240_000


def look_at(data: bytes, budget: Budget) -> list[dict[str, Any]]:
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
    except (ValueError, LookupError, TypeError, AttributeError, OverflowError, struct.error, RecursionError) as error:
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
    if kind in ("dict", "fields"):
        for key, item in inner if kind == "dict" else zip(node["names"], inner, strict=True):
            name = key if isinstance(key, str) else json.dumps(key)
            yield from _leaves(item, f"{path}.{name}" if path else name, depth + 1)
    elif kind in ("list", "tuple", "set", "frozenset"):
        for place, item in enumerate(inner):
            yield from _leaves(item, f"{path}[{place}]", depth + 1)
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
    values = _reader(dtype, body[start:end])
    axes = _picture_axes(shape)
    picture = None if axes is None else _picture(values, axes, dtype, budget)
    if picture is not None:
        return {"kind": "picture", **about, **picture}
    return {"kind": "numbers", **about, **_summary(values, count, budget)}


def _reader(dtype: str, data: memoryview) -> Callable[[int], float]:
    """Return a function that gives the value at a place of a tensor."""
    one = struct.Struct("<" + _CODES[dtype])
    if dtype == "BF16":  # The upper half of a float32.
        return lambda place: struct.unpack("<f", bytes(2) + data[2 * place : 2 * place + 2])[0]
    return lambda place: one.unpack_from(data, place * one.size)[0]


def _summary(values: Callable[[int], float], count: int, budget: Budget) -> dict[str, Any]:
    """Return the first values, and the range of all, or of evenly spread ones where there are too many to read."""
    first = [number(values(place)) for place in range(min(count, _VALUES_SHOWN))]
    stride = max(1, -(-count // max(1, min(_VALUES_READ, budget.values))))
    read = [values(place) for place in range(0, count, stride)]
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


def _picture_axes(shape: Sequence[int]) -> tuple[int, int, int, int, int, int] | None:
    """Return whether a tensor looks like a picture: channels, height, width and the step along each of them."""
    while len(shape) > 2 and shape[0] == 1:
        shape = shape[1:]
    if len(shape) == 2 and min(shape) >= 4:
        shape = (*shape, 1)
    if len(shape) == 3 and shape[0] in (3, 4) and min(shape[1:]) >= 4:
        channels, height, width = shape
        return channels, height, width, height * width, width, 1
    if len(shape) == 3 and shape[2] in (1, 3, 4) and min(shape[:2]) >= 4:
        height, width, channels = shape
        return channels, height, width, 1, width * channels, channels
    return None


def _picture(
    values: Callable[[int], float], axes: tuple[int, int, int, int, int, int], dtype: str, budget: Budget
) -> dict[str, Any] | None:
    """Return a small picture: a byte for each pixel and channel, 255 for one that holds NaN or Inf."""
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
                    values(channel * over_channels + y * over_rows + x * over_columns)
                    for y in range(row, min(row + block, height), skip)
                    for x in range(column, min(column + block, width), skip)
                ]
                wrong = sum(not math.isfinite(value) for value in seen)
                bad += wrong
                cells.append(None if wrong else _mean(seen))
    finite = [cell for cell in cells if cell is not None]
    low, high = min(finite, default=None), max(finite, default=None)
    black, white = low or 0.0, 1.0 if high is None else high
    if dtype == "U8" or (black >= 0 and white <= 1):
        black, white = 0.0, 255.0 if dtype == "U8" else 1.0  # The usual ends, where the values lie between them.
    span = white / 2 - black / 2  # Halves, because the difference of two large numbers may be infinite.
    shades = (None if cell is None else (cell / 2 - black / 2) / span if span else 0.0 for cell in cells)
    pixels = bytes(255 if shade is None else min(254, max(0, round(254 * shade))) for shade in shades)
    return {
        "height": len(rows),
        "width": len(columns),
        "channels": shown,
        "pixels": base64.b64encode(pixels).decode(),
        "low": number(low),
        "high": number(high),
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


# --- Which samples are shown ----------------------------------------------------------------------------------------


_SHOWN = 400
_ASKED = 3000
_BYTES_READ = 256 * 2**20


def choose_previews(book: Book, incidents: Sequence[Incident]) -> dict[str, Any]:
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
    """Return the places of the incidents, one of each kind first, then the rest, the newest first."""
    kinds: dict[tuple[str | None, ...], int] = {}
    for place in range(len(incidents) - 1, -1, -1):
        one = incidents[place]
        kinds.setdefault((one.stage, one.cause, one.exception_type, one.where), place)
    yield from kinds.values()
    chosen = set(kinds.values())
    yield from (place for place in range(len(incidents) - 1, -1, -1) if place not in chosen)


# --- Hard samples ---------------------------------------------------------------------------------------------------


_HARD = 12


def hard_samples(book: Any) -> dict[str, Any] | None:
    """Return the hardest and the suspicious samples with their losses; None where no losses were recorded."""
    histories = book.hardest(sys.maxsize) if hasattr(book, "hardest") else ()
    if not histories:
        return None
    suspicious = {history.sample_id for history in book.suspicious()}
    listed = [*histories[:_HARD], *[one for one in histories[_HARD:] if one.sample_id in suspicious][:_HARD]]
    return {
        "samples": len(histories),
        "suspicious": len(suspicious),
        "median": number(median(history.recent for history in histories)),
        "listed": [
            {
                "sample": one.sample_id,
                "losses": [number(loss) for loss in one.losses],
                "recent": number(one.recent),
                "suspicious": one.sample_id in suspicious,
            }
            for one in listed
        ],
    }


# --- All of it ------------------------------------------------------------------------------------------------------


LIMIT = 200_000  # incidents on a page, the newest ones; beyond, browsers become slow. The counts are of all.
_TEXT = 3_000_000  # characters that the different messages may have together before they are cut; likewise details
_SHORTEST_NAME = 8
_ENCODE = json.JSONEncoder(ensure_ascii=False, allow_nan=False).encode  # Made once: there may be 200,000 of them.


def gather(book: Book, name: str) -> dict[str, Any]:
    """Read a ledger into plain values for the page."""
    incidents = list(book.incidents(limit=LIMIT, newest_first=True))[::-1]

    def each(attribute: str) -> Iterator[Any]:
        return (getattr(incident, attribute) for incident in incidents)

    samples = words(each("sample_id"))
    bad = book.bad_ids()
    messages, cut = _within(words(each("message")))
    details, details_cut = _within(words(map(_details, incidents)), whole=True)
    return {
        "name": name,
        "total": max(book.stats().incidents, len(incidents)),
        "bad": len(bad),
        "runs": [plain(run.to_dict()) for run in book.runs()],
        "cut": cut or details_cut,
        "bad_words": deltas(place for place, sample in enumerate(samples["words"]) if sample in bad),
        "id": _beginnings(list(each("id"))),
        "columns": {
            "time": deltas(map(_milliseconds, each("time"))),
            "sample": samples,
            "exception": words(each("exception_type")),
            "message": messages,
            "loss": {"numbers": [number(loss) for loss in each("loss")]},
            "norm": {"numbers": [number(norm) for norm in each("grad_norm")]},
            "transient": deltas(map(int, each("transient"))),
            "details": details,
            **{name: deltas(each(name)) for name in ("step", "epoch", "rank", "row")},
            **{name: words(each(name)) for name in ("run", "stage", "cause", "where", "module")},
        },
        "previews": choose_previews(book, incidents),
        "hard": hard_samples(book),
    }


def _milliseconds(seconds: float) -> int | None:
    """Return a time in whole milliseconds, if a calendar knows it."""
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
    """Return the beginnings of the ids, long enough to tell them apart: `gradgate ledger show` takes them."""
    ordered = sorted(names)
    alike = (pair for pair in pairwise(ordered) if pair[0][:_SHORTEST_NAME] == pair[1][:_SHORTEST_NAME])
    shared = (os.path.commonprefix(pair) for pair in alike)  # noqa: RUF071 - of characters
    length = max((len(prefix) + 1 for prefix in shared), default=_SHORTEST_NAME)
    return [name[:length] for name in names]
