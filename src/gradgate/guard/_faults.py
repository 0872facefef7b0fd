"""What can go wrong in a step, what may be blamed on a sample, and when two faults are the same."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from gradgate._names import class_name, text_of
from gradgate._source import raising_line, raising_spot
from gradgate._torch_compat import ModuleCall, innermost_call
from gradgate.records import Stage

__all__ = ["Fault", "must_pass"]

Cause = Literal["exception", "non-finite loss", "non-finite gradient", "non-finite output"]

FATAL = (MemoryError, torch.OutOfMemoryError, torch.AcceleratorError)
# torch says these with a plain RuntimeError: the machine has no memory left, or the device is beyond repair.
FATAL_TEXTS = (
    "out of memory",
    "can't allocate memory",
    "not enough memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "device-side assert",
)


@dataclass(frozen=True, eq=False, slots=True)
class Fault:
    """One way in which a try failed.

    Attributes:
        cause: The kind of fault.
        stage: Where it showed.
        error: The exception, if it was one.
        loss: The loss, if there was one.
        call: The innermost module that the exception came through, with its arguments.
        spot: The innermost line that it came through.
    """

    cause: Cause
    stage: Stage
    error: Exception | None = None
    loss: float | None = None
    call: ModuleCall | None = None
    spot: tuple[str, int] | None = None

    @classmethod
    def raised(cls, error: BaseException, stage: Stage | None = None) -> Fault:
        """Make the fault of an exception; in forward if it came through a module, else in the loss."""
        assert isinstance(error, Exception)
        call = innermost_call(error.__traceback__)
        found: Stage = "loss" if call is None else "forward"
        return cls("exception", stage or found, error, call=call, spot=raising_spot(error.__traceback__))

    def same_as(self, other: Fault) -> bool:
        """Tell whether another try failed in the same way: the same cause, and for exceptions the same origin."""
        if self.error is None or other.error is None:
            return self.cause == other.cause
        return type(self.error) is type(other.error) and self.spot == other.spot and self.module is other.module

    @property
    def module(self) -> torch.nn.Module | None:
        """The innermost module that the exception came through."""
        return None if self.call is None else self.call.module

    @property
    def exception_type(self) -> str | None:
        """The class of the exception with its module, as `package.Error`; Python's own without it."""
        kind = type(self.error)
        return None if self.error is None else class_name(kind)

    @property
    def message(self) -> str:
        """What the exception or the check said, in one text."""
        if self.error is not None:
            return text_of(self.error)
        return f"{self.cause}: {self.loss}" if self.cause == "non-finite loss" else self.cause

    @property
    def where(self) -> str | None:
        """The user's line that the exception came through."""
        return None if self.error is None else raising_line(self.error.__traceback__)


def must_pass(error: BaseException) -> bool:
    """Tell whether an exception is never blamed on a sample, whatever `catch` says.

    Args:
        error: The exception.

    Returns:
        True for interrupts, exits, missing memory and a device that died.
    """
    if not isinstance(error, Exception) or isinstance(error, FATAL):
        return True
    return isinstance(error, RuntimeError) and any(text in text_of(error) for text in FATAL_TEXTS)
