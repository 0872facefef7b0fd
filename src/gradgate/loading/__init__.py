"""Loading that survives bad samples, and leaves out those that are known."""

from __future__ import annotations

from gradgate.loading._collating import collate
from gradgate.loading._datasets import ResilientDataset, ResilientStream
from gradgate.loading._loader import ResilientLoader
from gradgate.loading._markers import BadSample
from gradgate.loading._quarantine import QuarantineSampler, without
from gradgate.loading._resilient import resilient

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
