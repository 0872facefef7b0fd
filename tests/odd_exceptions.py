"""Exceptions that make trouble themselves: they cannot be printed, or let nobody set an attribute."""

import dataclasses


class Mute(RuntimeError):
    def __str__(self):
        raise KeyError("text")


@dataclasses.dataclass(frozen=True)
class Sealed(Exception):
    reason: str = "sealed"
