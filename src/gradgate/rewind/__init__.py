"""Rewind: a loss that runs away costs some batches, not the run."""

from gradgate._names import suggest_names
from gradgate.rewind._rewind import Rewind, Rewound
from gradgate.rewind._spikes import Culprits

__all__ = ["Rewind", "Rewound", "Culprits"]

suggest_names(__name__)
