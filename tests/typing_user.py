"""What users write, checked by mypy --strict: the public signatures seen from outside."""

from collections.abc import Iterator

import torch

import gradgate as gg
from gradgate import masked

incident: gg.Incident = gg.Incident(stage="load", cause="exception")
row: int | None = incident.row

edited: torch.Tensor = gg.at(torch.zeros(3))[0, ..., None].set(1.0, mode="drop")
chosen: torch.Tensor = gg.at(torch.zeros(3))[[0, 1]].get(fill_value=0)
state: dict[str, torch.Tensor] = gg.at(torch.nn.Linear(2, 1), "weight")[0].apply(torch.relu)


class NamesOfFiles(torch.utils.data.Dataset[str]):
    def __getitem__(self, index: int) -> str:
        return f"img_{index}.png"

    def __len__(self) -> int:
        return 3


ledger: gg.Ledger = gg.Ledger("run.ledger", payload=True, run="night", arguments={"lr": 0.1})
bad: set[str] = ledger.bad_ids(min_count=2, cause="exception")
recent: list[gg.Incident] = ledger.incidents(stage="load", since="2h", limit=10)
kept: torch.utils.data.Subset[str] = gg.without(NamesOfFiles(), ledger)
verdict: str = gg.replay(ledger, "5e65948f", lambda batch: torch.zeros(())).verdict

last = torch.nn.Linear(2, 1)
network = torch.nn.Sequential(torch.nn.Embedding(4, 2), last)
with gg.freeze(network, "0.*", network[1], lambda name, parameter: parameter.dim() == 1) as frozen_layers:
    frozen_names: tuple[str, ...] = frozen_layers.names
with gg.pin(last.weight, rows=[0]) as pinned:
    pinned_elements: torch.Tensor = pinned.frozen
merged: torch.nn.Parameter = gg.train_rows(network[0], rows=range(2)).merge()
schedule: gg.FreezeSchedule = gg.FreezeSchedule(network, {0: ["1.*"]}, by="step")
learning_elements: int = gg.trainable(network).totals.learning
gg.freezing.assert_frozen(gg.train_only(network, "1.*"))

meter: gg.GateMeter = gg.GateMeter()
gated: torch.Tensor = gg.gate(torch.zeros(3), lambda gradient: gradient > 0, meter=meter)
gated = gg.gate(gg.scale_grad(gated, torch.ones(3)), keep=False)
gated = gg.straight_through(gated.round(), gg.clip_grad(gg.finite_grad(gg.reverse_grad(gated, 2)), max_norm=1))
stopped: int = meter.stopped
reversal = gg.ReverseGrad(strength=0.0, save=True)
reversal.strength = torch.tensor(0.5)
modules = torch.nn.Sequential(
    reversal, gg.Gate(keep=torch.tensor(True)), gg.ScaleGrad(2), gg.ClipGrad(1.0), gg.FiniteGrad()
)

keep = torch.tensor([True, False])
roots: torch.Tensor = gg.apply_where(keep, (torch.ones(2), torch.ones(2)), torch.mul, otherwise=torch.div)
roots = gg.apply_where(keep, roots, torch.sqrt, fill_value=float("nan"))
batch_out = gg.apply_rows(keep, torch.ones(2, 3), torch.nn.Linear(3, 1), fill_value=0)
votes: torch.Tensor = gg.masked.mode(torch.ones(2, 3), (0, 1), exclude=[255, float("nan")], empty=0).counts
ratio: torch.Tensor = gg.masked.safe_divide(1, gg.masked.safe_norm(torch.ones(2, 3), (0, 1)), fill_value=1.0)
whole: torch.Tensor = gg.masked.impute(torch.ones(2, 3), keep=keep.unsqueeze(1), using=torch.amax, dim=0)

x = torch.zeros(2, 3)
average: torch.Tensor = masked.mean(x, dim=(0, 1), keepdim=True, keep=x > 0, exclude=[1, 2.5], empty="raise")
deviation: torch.Tensor = gg.masked.std(x, -1, correction=0, exclude={255}, empty=0.0)
levels: torch.Tensor = masked.quantile(x, [0.1, 0.9], dim=1, exclude=float("nan"), interpolation="nearest")
normed: torch.Tensor = masked.batch_norm(x, None, None, training=True, keep=x > 0)

guard: gg.Guard = gg.Guard([last, network], ledger="run.ledger", catch=ValueError, max_bad=0.1, patience=5)
batches: Iterator[object] = guard.batches([torch.ones(2, 3)])
result: gg.guard.GuardResult = guard.backward(
    {"x": x}, lambda batch: last(batch["x"]).mean(), ids=range(2), scaler=torch.amp.GradScaler("cpu")
)
rows_kept: list[int] = result.kept
reasons: tuple[gg.Incident, ...] = result.dropped
outputs, real = guard.forward(x, last, fill_value=0.0, ids=["a", "b"])
text: str = str(guard.summary())

images: torch.utils.data.Dataset[torch.Tensor] = torch.utils.data.Dataset()
loader: torch.utils.data.DataLoader[torch.Tensor] = torch.utils.data.DataLoader(images)
for batch in gg.resilient(loader, refill=True, ledger="run.ledger"):
    size: int = batch.shape[0]
left_out: tuple[gg.Incident, ...] = gg.resilient(loader).incidents

diagnosis: gg.Diagnosis = gg.diagnose(lambda: last(x).mean(), model=last)
findings: tuple[gg.Finding, ...] = diagnosis.at_least("warning")
with gg.watch(last, None, on_bad="skip") as watch, gg.trace(last) as traced:
    loss: torch.Tensor = watch.step(lambda: last(x).mean())
told: str = traced.diagnosis.to_json()
gg.testing.assert_learns(last, x, lambda batch: last(batch).mean(), steps=3)

book: gg.report.Book = gg.Ledger("run.ledger", read_only=True)
page: str = gg.report.render_page(book, diagnosis.to_dict(), name="night")
page_size: int = gg.report.write_page("report.html", book)
with gg.report.LiveView(gg.Ledger("run.ledger", read_only=True), port=8000) as view:
    address: str = view.url
