"""Loading that survives bad samples, and leaves out those that are known."""

from __future__ import annotations

from gradgate.loading._quarantine import QuarantineSampler, without

__all__ = ["QuarantineSampler", "without"]
