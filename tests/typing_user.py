"""What users write, checked by mypy --strict: the public signatures seen from outside."""

import gradgate as gg

incident: gg.Incident = gg.Incident(stage="load", cause="exception")
row: int | None = incident.row
