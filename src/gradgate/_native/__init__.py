"""The library of native kernels: found, checked and declared; `_kernels.py` calls it with tensors. Needs no torch."""

from __future__ import annotations

import ctypes
import os
import struct
import warnings
import zlib
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
LEVELS = ("baseline", "AVX2", "AVX-512")

_int32, _int64, _double, _pointer = ctypes.c_int32, ctypes.c_int64, ctypes.c_double, ctypes.c_void_p


INPUT = struct.Struct("PPqqqdqii")
"""What a masked kernel reads: the fields of the struct in kernels.c."""

_input = ctypes.c_char_p

# What each kernel returns and takes, as in kernels.c.
_KERNELS: dict[str, tuple[Any, list[Any]]] = {
    "valid": (None, [_input, _pointer]),
    "fold": (_int64, [_input, _int32, _pointer, _double, _pointer, _pointer]),
    "first": (None, [_input, _pointer]),
    "logsumexp": (_int64, [_input, _pointer]),
    "find": (None, [_input, _pointer, _pointer]),
    "map": (None, [_input, _int32, _pointer, _pointer, _pointer]),
    "softmax": (None, [_input, _int32, _pointer, _pointer, _pointer]),
    "mode": (_int64, [_input, _int32, _pointer, _pointer, _pointer]),
    "choose": (None, [_pointer, _pointer, _int32, _pointer, _int32, _pointer, _int64, _int64, _int32, _int32]),
    "expand": (None, [_pointer, _pointer, _int64, _int64, _int64, _int32, _pointer, _int32]),
    "checksum": (None, [_pointer, _int64, _int32, _pointer, _pointer, _int32]),
    "repeats": (_int64, [_pointer, _int64, _int64]),
    "nonfinite": (_int32, [_pointer, _int64, _int32]),
}


class Library:
    """The kernels for this processor, each under its name.

    Args:
        path: The shared library.
        level: Which kernels; by default those of the highest level that the processor runs.

    Raises:
        OSError: It cannot be loaded, or is not the one that was built from the sources beside it.
    """

    def __init__(self, path: Path, level: int | None = None) -> None:
        loaded = ctypes.CDLL(str(path))
        try:
            if loaded.gg_version() != sources_version():
                raise OSError(f"{path} was built from other sources than those beside it")
            level = loaded.gg_level() if level is None else level
            for name, (result, arguments) in _KERNELS.items():
                function = getattr(loaded, f"gg_{name}_{level}")
                function.restype, function.argtypes = result, arguments
                setattr(self, name, function)
        except AttributeError as error:
            raise OSError(f"{path} is not the library of gradgate: {error}") from None
        self.level: str = LEVELS[level]

    def __getattr__(self, name: str) -> Any:  # the kernels, for the type checker
        raise AttributeError(name)


def sources_version() -> int:
    """Return the number that the build writes into the library: one for each text of the sources."""
    text = b"".join(path.read_bytes() for path in sorted(FOLDER.glob("*.[ch]")))
    return zlib.crc32(text) & 0x7FFFFFFF


def load(path: Path = FOLDER / "kernels.so") -> tuple[Library | None, str]:
    """Load the library, and say in words which kernels are in force and why."""
    if os.environ.get("GRADGATE_NATIVE") == "0":
        return None, "torch kernels (GRADGATE_NATIVE=0)"
    if not path.exists():
        return None, "torch kernels (the native ones were not built: no C compiler when gradgate was installed)"
    try:
        library = Library(path)
    except OSError as error:
        warnings.warn(
            f"gradgate runs without its native kernels: {error}. Install gradgate again to build them, "
            "or set GRADGATE_NATIVE=0 to do without.",
            RuntimeWarning,
            stacklevel=2,
        )
        return None, f"torch kernels ({error})"
    return library, f"native kernels ({library.level})"


library, status = load()
