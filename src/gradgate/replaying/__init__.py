"""A recorded sample again: the same fault, another one, or none; and a test that remembers it."""

from __future__ import annotations

from gradgate.replaying._examining import examine
from gradgate.replaying._regression import assert_passes, write_test
from gradgate.replaying._replay import Replay, replay
from gradgate.replaying._trial import Fault

__all__ = ["Fault", "Replay", "assert_passes", "examine", "replay", "write_test"]
