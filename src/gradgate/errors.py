"""What gradgate raises and warns of: one tree, every message in three parts.

Each class also derives from the builtin that Python programmers expect, so that `except ValueError` still works.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from gradgate._text import visible

if TYPE_CHECKING:
    from gradgate.records import Incident

__all__ = [
    "ArgumentError",
    "ArgumentIndexError",
    "ArgumentTypeError",
    "ArgumentValueError",
    "BadStepError",
    "BadStepWarning",
    "FailedCheckError",
    "FrozenMovedError",
    "GradgateError",
    "GradgateWarning",
    "LedgerError",
    "LedgerWarning",
    "NothingKeptError",
    "NothingMatchedError",
    "OtherRankError",
    "TooManyBadSamples",
    "TooManyRewinds",
]


class GradgateError(Exception):
    """The root of everything that gradgate raises.

    Args:
        what: What went wrong and where, with the values that were met.
        why: Why that cannot be, in one sentence.
        fix: The way out, as code to paste.

    Examples:
        >>> print(GradgateError("`keep` is a float32 tensor.", why="A mask answers yes or no.", fix="keep > 0"))
        `keep` is a float32 tensor.
        Why: A mask answers yes or no.
        Fix: keep > 0
    """

    def __init__(self, what: str, *, why: str = "", fix: str = "") -> None:
        # Only `what` is in args: pickling calls the class with args and then restores __dict__. Set here and not by
        # super().__init__, which torch.compile cannot trace: it would show that instead of this message.
        self.args = (what,)
        self.what = what
        self.why = why
        self.fix = fix

    def __str__(self) -> str:
        parts = [self.what, f"Why: {self.why}" if self.why else "", f"Fix: {self.fix}" if self.fix else ""]
        return visible("\n".join(part for part in parts if part), lines=True)


class ArgumentError(GradgateError):
    """The call itself was wrong; nothing has been done."""


class ArgumentTypeError(ArgumentError, TypeError):
    """An argument is of a kind that cannot be used here."""


class ArgumentValueError(ArgumentError, ValueError):
    """An argument is of the right kind, but its value or shape cannot be used here."""


class ArgumentIndexError(ArgumentError, IndexError):
    """An index or a dimension is out of range."""


class NothingKeptError(ArgumentValueError):
    """A slice has no element left, and no value was given for that."""


class NothingMatchedError(ArgumentValueError, LookupError):
    """A name or pattern matched nothing."""


class BadStepError(GradgateError, ArithmeticError):
    """A step would have written NaN or Inf into the weights; it was not taken.

    Args:
        what: What went wrong and where.
        why: Why that stops the training.
        fix: The way out.
        diagnosis: What the doctor found, where it could replay the step.
    """

    def __init__(self, what: str, *, why: str = "", fix: str = "", diagnosis: object | None = None) -> None:
        super().__init__(what, why=why, fix=fix)
        self.diagnosis = diagnosis


class FailedCheckError(GradgateError, RuntimeError):
    """A tensor breaks a condition that `gg.check` asks for.

    Args:
        what: The message of the check, with the rows.
        why: Why that is wrong.
        fix: The way out.
        rows: The rows that break the condition; none where it is about all of the tensor.
    """

    def __init__(self, what: str, *, why: str = "", fix: str = "", rows: Sequence[int] = ()) -> None:
        super().__init__(what, why=why, fix=fix)
        self.rows: tuple[int, ...] = tuple(rows)


class FrozenMovedError(GradgateError, AssertionError):
    """A value that was frozen is not what it was."""


class TooManyBadSamples(GradgateError, RuntimeError):
    """More samples are bad than was allowed; the step was not taken.

    Args:
        what: What went wrong, with the counts.
        why: Why that stops the training.
        fix: The way out.
        incidents: The bad samples of this step, each with its reason.
    """

    def __init__(self, what: str, *, why: str = "", fix: str = "", incidents: Sequence[Incident] = ()) -> None:
        super().__init__(what, why=why, fix=fix)
        self.incidents: tuple[Incident, ...] = tuple(incidents)


class TooManyRewinds(GradgateError, RuntimeError):
    """The loss spikes again and again; everything is as in the last good snapshot.

    Args:
        what: What went wrong, with a table of the rewinds.
        why: Why that stops the training.
        fix: The way out.
        rewinds: The rewinds of the run.
    """

    def __init__(self, what: str, *, why: str = "", fix: str = "", rewinds: Sequence[object] = ()) -> None:
        super().__init__(what, why=why, fix=fix)
        self.rewinds: tuple[object, ...] = tuple(rewinds)


class OtherRankError(GradgateError, RuntimeError):
    """Another process of the training failed, or is gone; this one cannot make the step without it."""


class LedgerError(GradgateError, OSError):
    """The ledger cannot be opened, read or written."""


class GradgateWarning(UserWarning):
    """The root of everything that gradgate warns of."""


class BadStepWarning(GradgateWarning):
    """Some gradients of a step were NaN or Inf."""


class LedgerWarning(GradgateWarning):
    """The ledger could not be written, and keeps incidents in memory until it can be; or another sink raised."""
