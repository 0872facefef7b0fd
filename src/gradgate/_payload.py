"""A sample as bytes: tensors in the safetensors format, the rest of the tree as JSON in its header; never pickle.

Writing always gives something: what cannot be stored (a picture object, a tensor over the limit) leaves a `Missing` in
its place that says what it was. Reading trusts nothing: every length is checked against the bytes that are there
before anything is made of it, and no class is looked up by a name from the file.
"""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from functools import partial
from pathlib import Path, PurePath
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save

from gradgate._torch_private import holds_its_values
from gradgate._trees import children_of
from gradgate.errors import LedgerError

LIMIT = 16 * 2**20
"""How many bytes a payload may take unless more is allowed."""

_DEEPEST = 60
_KEY = "gradgate"


@dataclass(frozen=True, slots=True)
class Missing:
    """What stands where something could not be stored."""

    what: str


class Fields(tuple[Any, ...]):
    """What stands for a dataclass or a named tuple whose class is not at hand: its fields by name and in order."""

    _fields: tuple[str, ...]

    def __new__(cls, names: Iterable[str], values: Iterable[Any]) -> Fields:
        new = super().__new__(cls, values)
        new._fields = tuple(names)
        return new

    def _replace(self, **values: Any) -> Fields:
        return Fields(values, values.values())

    def __getattr__(self, name: str) -> Any:
        if name != "_fields" and name in self._fields:
            return self[self._fields.index(name)]
        raise AttributeError(name)


def encode(tree: Any, *, limit: int = LIMIT) -> bytes:
    """Write a tree of tensors and plain values as bytes."""
    writer = _Writer(limit)
    data = _file(writer.node(tree), writer.tensors)
    return data if len(data) <= limit else _file(_missing(tree, "too large"), {})


def decode(data: bytes, *, classes: Iterable[type] = ()) -> Any:
    try:
        length = int.from_bytes(data[:8], "little")
        if not 2 <= length <= len(data) - 8:
            raise ValueError(f"its header claims {length} bytes of {len(data)}")
        text = json.loads(data[8 : 8 + length])["__metadata__"][_KEY]
        return _Reader(load(data), classes).tree(json.loads(text))
    except (
        SafetensorError, KeyError, ValueError, TypeError, IndexError, RuntimeError, OverflowError, RecursionError,
        AttributeError, MemoryError,
    ) as error:  # fmt: skip
        raise LedgerError(
            f"a stored sample cannot be read: {type(error).__name__}: {error}.",
            why="its bytes are damaged, or gradgate did not write them.",
            fix="PRAGMA integrity_check   -- in sqlite3, on the ledger",
        ) from error


def missing_in(tree: Any) -> list[str]:
    if isinstance(tree, Missing):
        return [tree.what]
    parts = tree if isinstance(tree, set | frozenset) else (children_of(tree) or {}).values()
    return [line for part in parts for line in missing_in(part)]


def _file(node: Any, tensors: dict[str, torch.Tensor]) -> bytes:
    return save(tensors, metadata={_KEY: json.dumps(node, allow_nan=False)})


class _Writer:
    """Turns a tree into JSON and puts its tensors aside, within a number of bytes."""

    # What JSON holds by itself stays as it is; everything else is an object whose first key says its kind.

    def __init__(self, limit: int) -> None:
        self.left = limit
        self.tensors: dict[str, torch.Tensor] = {}

    def node(self, value: Any, depth: int = 0) -> Any:
        if depth > _DEEPEST:
            return _missing(value, "nested too deeply")
        if value is None or isinstance(value, bool):
            return value
        if isinstance(value, torch.Tensor):
            return self.tensor(value)
        if isinstance(value, int):
            return int(value) if abs(value) < 2**63 else {"int": hex(value)}
        if isinstance(value, float):
            return float(value) if math.isfinite(value) else {"float": str(float(value))}
        for name, (kinds, write, _) in _LEAVES.items():
            if isinstance(value, kinds):
                plain = write(value)
                if not self.takes(2 * len(plain)):
                    return _missing(value, "too large")
                return {name: plain} if name else plain
        return self.container(value, depth + 1)

    def container(self, value: Any, depth: int) -> Any:
        names = [] if isinstance(value, type) else _field_names(value)
        parts = len(value) if isinstance(value, Mapping | list | tuple | set | frozenset) else len(names)
        if not self.takes(16 * parts):
            return _missing(value, "too large")
        if isinstance(value, Mapping):
            return {"dict": [[self.node(key, depth), self.node(item, depth)] for key, item in value.items()]}
        if names:
            values = [self.node(getattr(value, name, None), depth) for name in names]
            return {"fields": values, "names": names, "class": type(value).__qualname__}
        for name, kind in _SEQUENCES.items():
            if isinstance(value, kind):
                return {name: [self.node(item, depth) for item in value]}
        if hasattr(value, "__array__") and hasattr(value, "dtype"):
            return self.array(value)
        return _missing(value)

    def tensor(self, value: torch.Tensor) -> Any:
        if value.layout is torch.sparse_coo:
            value = value.coalesce()
            return {"sparse": [self.tensor(value.indices()), self.tensor(value.values())], "size": list(value.shape)}
        real = value.dtype.to_real() if value.is_complex() else value.dtype
        stored = value.layout is torch.strided and not value.is_nested and value.device.type != "meta"
        if not (stored and real in _DTYPES and holds_its_values(value)):
            return _missing(value)
        if not self.takes(value.numel() * value.element_size() + 128):
            return _missing(value, "too large")
        try:
            plain = _copied(value)
        except RuntimeError:  # A tensor that torch.func traces has no memory.
            return _missing(value)
        name = str(len(self.tensors))
        self.tensors[name] = plain
        return {"tensor": name, "complex": value.is_complex(), "grad": value.requires_grad and value.is_leaf}

    def array(self, value: Any) -> Any:
        try:
            array = value.__array__()
            tensor = torch.from_numpy(array.copy())
        except (TypeError, ValueError, AttributeError):
            return _missing(value)
        return {"array": self.tensor(tensor), "scalar": not hasattr(value, "__setitem__")}

    def takes(self, size: int) -> bool:
        if size > self.left:
            return False
        self.left -= size
        return True


class _Reader:
    """Turns JSON back into the tree; whatever is not as `_Writer` writes it is an error."""

    def __init__(self, tensors: dict[str, torch.Tensor], classes: Iterable[type]) -> None:
        self.tensors = tensors
        self.classes = {kind.__qualname__: kind for kind in classes}

    def tree(self, node: Any) -> Any:
        if not isinstance(node, dict):
            if isinstance(node, list):
                raise ValueError("a list without a kind")
            return node
        kind, value = next(iter(node.items()), ("", ()))
        if not kind:
            raise ValueError("a part without a kind")
        if kind in _LEAVES:
            return _LEAVES[kind][2](value)
        if kind in _SEQUENCES:
            return _SEQUENCES[kind](self.tree(item) for item in value)
        return getattr(self, f"read_{kind}")(value, node)

    def read_tensor(self, name: Any, node: Any) -> torch.Tensor:
        tensor = self.tensors[name]
        tensor = torch.view_as_complex(tensor) if node["complex"] else tensor
        return tensor.requires_grad_() if node["grad"] else tensor

    def read_sparse(self, parts: Any, node: Any) -> torch.Tensor:
        indices, values = (self.tree(part) for part in parts)
        return torch.sparse_coo_tensor(indices, values, node["size"], check_invariants=True).coalesce()

    def read_array(self, tensor: Any, node: Any) -> Any:
        array = self.tree(tensor).numpy()
        return array[()] if node["scalar"] else array

    def read_dict(self, pairs: Any, _: Any) -> dict[Any, Any]:
        return {self.tree(key): self.tree(item) for key, item in pairs}

    def read_fields(self, items: Any, node: Any) -> Any:
        names, values = [str(name) for name in node["names"]], [self.tree(item) for item in items]
        kind = self.classes.get(node["class"])
        if len(names) != len(values):
            raise ValueError("fields without names")
        if kind is None or _field_names(kind) != names:
            return Fields(names, values)
        if issubclass(kind, tuple):
            return tuple.__new__(kind, values)
        made = object.__new__(kind)  # Not through __init__: nothing of the class runs.
        for name, value in zip(names, values, strict=True):
            object.__setattr__(made, name, value)
        return made


_DTYPES = frozenset(
    getattr(torch, name)
    for name in (
        "bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64",
        "float16", "bfloat16", "float32", "float64", "float8_e4m3fn", "float8_e5m2",
    )
)  # fmt: skip


# By the name that they get ("" for what JSON holds): the classes of a leaf, how it is written, and how it is read.
_LEAVES: dict[str, tuple[Any, Callable[[Any], Any], Callable[[Any], Any]]] = {
    "": (str, str, str),
    "bytes": (
        bytes | bytearray,
        lambda data: base64.b64encode(data).decode(),
        partial(base64.b64decode, validate=True),
    ),
    "dtype": (torch.dtype, str, {str(dtype): dtype for dtype in _DTYPES}.__getitem__),
    "device": (torch.device, str, torch.device),
    "path": (PurePath, str, Path),
    "complex": (complex, str, complex),
    "size": (torch.Size, list, torch.Size),
    # These three are written by `_Writer.node` and `_missing`.
    "int": ((), str, partial(int, base=16)),
    "float": ((), str, float),
    "missing": ((), str, lambda what: Missing(str(what))),
}

_SEQUENCES: dict[str, Any] = {"list": list, "tuple": tuple, "frozenset": frozenset, "set": set}


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    """Copy a tensor to a plain one on the CPU, in memory of its own: the format refuses shared memory."""
    with torch.no_grad():
        plain = tensor.detach().resolve_conj().resolve_neg()
        plain = torch.view_as_real(plain) if plain.is_complex() else plain
        plain = plain.to("cpu", copy=True, memory_format=torch.contiguous_format).as_subclass(torch.Tensor)
        plain.data_ptr()
    return plain


def _field_names(value: Any) -> list[str]:
    kind = value if isinstance(value, type) else type(value)
    if issubclass(kind, tuple):
        return list(getattr(kind, "_fields", ()))
    return [part.name for part in fields(kind)] if is_dataclass(kind) and not issubclass(kind, Mapping) else []


def _missing(value: Any, reason: str = "") -> Any:
    what = f"{type(value).__module__}.{type(value).__qualname__}"
    if isinstance(value, torch.Tensor):
        what = f"{value.dtype} of shape {tuple(value.shape)}"
    return {"missing": f"{what} ({reason})" if reason else what}
