"""Rewind: a loss that runs away costs some batches, not the run."""

from gradgate._names import suggest_names
from gradgate.rewind._rewind import Rewind, Rewound

__all__ = ["Rewind", "Rewound"]

suggest_names(__name__)
