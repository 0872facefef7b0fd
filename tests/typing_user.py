"""What users write, checked by mypy --strict: the public signatures seen from outside."""

import torch

import gradgate as gg

incident: gg.Incident = gg.Incident(stage="load", cause="exception")
row: int | None = incident.row

edited: torch.Tensor = gg.at(torch.zeros(3))[0, ..., None].set(1.0, mode="drop")
chosen: torch.Tensor = gg.at(torch.zeros(3))[[0, 1]].get(fill_value=0)
state: dict[str, torch.Tensor] = gg.at(torch.nn.Linear(2, 1), "weight")[0].apply(torch.relu)
