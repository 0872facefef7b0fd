"""One bad sample must not cost the batch: a training step that drops exactly what is bad, and says so."""

from __future__ import annotations

from gradgate._names import suggest_names
from gradgate._trees import register_batch
from gradgate.guard._guard import Guard
from gradgate.guard._result import GuardResult, Summary

__all__ = ["Guard", "GuardResult", "Summary", "register_batch"]

suggest_names(__name__)
