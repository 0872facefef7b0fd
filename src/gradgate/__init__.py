"""Decide, value by value, what your PyTorch model learns from - and keep training when some of the values are bad.

The root is lazy: a room, and with it torch, is loaded when one of its names is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from gradgate import ledger as ledger
    from gradgate import masked as masked
    from gradgate.errors import GradgateError as GradgateError
    from gradgate.errors import TooManyBadSamples as TooManyBadSamples
    from gradgate.ledger import Ledger as Ledger
    from gradgate.records import Finding as Finding
    from gradgate.records import Incident as Incident

# Each public name and the room that it lives in; tests/test_contracts.py keeps this equal to the imports above.
_ROOM_OF = {
    "Finding": "records",
    "GradgateError": "errors",
    "Incident": "records",
    "Ledger": "ledger",
    "TooManyBadSamples": "errors",
}
_ROOMS = ("errors", "ledger", "masked", "records")

__all__ = ["__version__", *_ROOM_OF, *_ROOMS]  # noqa: PLE0604 - all of them are text


def __getattr__(name: str) -> Any:
    if name in _ROOM_OF:
        value = getattr(import_module(f"gradgate.{_ROOM_OF[name]}"), name)
    elif name in _ROOMS:
        value = import_module(f"gradgate.{name}")
    else:
        raise AttributeError(f"module 'gradgate' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
