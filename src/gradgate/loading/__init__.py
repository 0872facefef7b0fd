"""Loading that survives bad samples, and leaves out those that are known."""

from __future__ import annotations

from gradgate._names import suggest_names
from gradgate.loading._bad_samples import BadSample
from gradgate.loading._fetching import ResilientDataset, ResilientStream, collate
from gradgate.loading._known_bad import QuarantineSampler, without
from gradgate.loading._loader import ResilientLoader, resilient

__all__ = [
    "resilient",
    "collate",
    "BadSample",
    "ResilientLoader",
    "ResilientDataset",
    "ResilientStream",
    "QuarantineSampler",
    "without",
]

suggest_names(__name__)
