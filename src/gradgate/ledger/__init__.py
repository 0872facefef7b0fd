"""What was dropped, why, and again: a durable record in one SQLite file, readable without torch."""

from __future__ import annotations

from gradgate._names import suggest_names
from gradgate.ledger._ledger import Ledger
from gradgate.ledger._runs import Decision, Run, SampleHistory
from gradgate.ledger._select import Answer, Stats

__all__ = ["Answer", "Decision", "Ledger", "Run", "SampleHistory", "Stats"]

suggest_names(__name__)
