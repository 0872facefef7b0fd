"""Why does it not learn? A tracer, rules over what it saw, and a watch that stays on while training."""

from gradgate.doctor._diagnosing import diagnose
from gradgate.doctor._diagnosis import Diagnosis

__all__ = ["Diagnosis", "diagnose"]
