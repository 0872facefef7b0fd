"""Why does it not learn? A tracer, rules over what it saw, and a watch that stays on while training."""

from gradgate._names import suggest_names
from gradgate.doctor._diagnose import Tracing, diagnose, trace
from gradgate.doctor._diagnosis import Diagnosis
from gradgate.doctor._script import ModesReport, RecordingGap, ScriptReport, examine_modes, examine_script
from gradgate.doctor._watch import Watch, watch

__all__ = [
    "Diagnosis",
    "ModesReport",
    "RecordingGap",
    "ScriptReport",
    "Tracing",
    "Watch",
    "diagnose",
    "examine_modes",
    "examine_script",
    "trace",
    "watch",
]

suggest_names(__name__)
