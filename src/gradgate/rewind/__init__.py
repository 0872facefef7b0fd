"""Rewind: a loss that runs away costs some batches, not the run."""

from gradgate.rewind._rewind import Rewind, Rewound

__all__ = ["Rewind", "Rewound"]
