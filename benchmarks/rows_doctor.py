"""What it costs to be watched, to be traced, and to have a failing step explained."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

import gradgate as gg
from benchmarks.harness import Candidate, Row
from gradgate.errors import BadStepError

Made = tuple[nn.Module, Callable[[], torch.Tensor], torch.Tensor]


def _mlp(width: int, batch: int) -> Callable[[], Made]:
    def make() -> Made:
        layers = [layer for _ in range(4) for layer in (nn.Linear(width, width), nn.ReLU())]
        model = nn.Sequential(*layers, nn.Linear(width, 10))
        x = torch.randn(batch, width)
        return model, lambda: model(x), torch.randint(0, 10, (batch,))

    return make


def _cnn() -> Made:
    blocks = [
        layer
        for before, after in ((3, 16), (16, 32), (32, 32))
        for layer in (nn.Conv2d(before, after, 3, stride=2, padding=1), nn.BatchNorm2d(after), nn.ReLU(inplace=True))
    ]
    model = nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10))
    x = torch.randn(32, 3, 48, 48)
    return model, lambda: model(x), torch.randint(0, 10, (32,))


def _transformer() -> Made:
    layer = nn.TransformerEncoderLayer(128, 4, 256, batch_first=True, dropout=0.0)
    model = nn.ModuleDict(
        {"body": nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), "head": nn.Linear(128, 10)}
    )
    x = torch.randn(32, 32, 128)
    return model, lambda: model.head(model.body(x).mean(dim=1)), torch.randint(0, 10, (32,))


# The smallest is told without a goal: its whole step takes less than the tracer's look at it.
MODELS = {"MLP 64": _mlp(64, 64), "MLP 512": _mlp(512, 256), "CNN": _cnn, "transformer": _transformer}


def _step(made: Made, optimizer: torch.optim.Optimizer, factor: float = 1.0) -> Callable[[], None]:
    _, forward, labels = made

    def step() -> None:
        optimizer.zero_grad()
        loss = F.cross_entropy(forward(), labels)
        (loss * factor).backward()
        optimizer.step()

    return step


def _watched(make: Callable[[], Made]) -> Callable[[], dict[str, Candidate]]:
    def candidates() -> dict[str, Candidate]:
        made = make()
        step = _step(made, torch.optim.Adam(made[0].parameters(), lr=1e-5))
        watch = gg.watch(made[0])

        def watched() -> None:
            with watch:
                step()

        def watched_step() -> None:
            with watch:
                watch.step(step)

        return {"plain step": step, "gg.watch": watched, "watch.step": watched_step}

    return candidates


def _look(make: Callable[[], Made]) -> Callable[[], dict[str, Candidate]]:
    """What the watch adds, timed alone: two whole steps differ by more than that from one to the next."""

    def candidates() -> dict[str, Candidate]:
        made = make()
        optimizer = torch.optim.Adam(made[0].parameters(), lr=1e-5)
        step = _step(made, optimizer)
        step()
        watch = gg.watch(made[0])
        return {"plain step": step, "the look": lambda: watch._before_step(optimizer, (optimizer,), {})}

    return candidates


def _traced(make: Callable[[], Made]) -> Callable[[], dict[str, Candidate]]:
    def candidates() -> dict[str, Candidate]:
        made = make()
        step = _step(made, torch.optim.Adam(made[0].parameters(), lr=1e-5))
        # The first steps are looked at in full; what is timed is the loop that goes on.
        tracing = gg.trace(made[0])
        with tracing:
            for _ in range(3):
                step()
        warnings.simplefilter("ignore")

        def traced() -> None:
            with tracing:
                step()

        def anomaly() -> None:
            with torch.autograd.set_detect_anomaly(True):
                step()

        return {"plain step": step, "gg.trace": traced, "detect_anomaly": anomaly}

    return candidates


def _failing(make: Callable[[], Made]) -> Callable[[], dict[str, Candidate]]:
    def candidates() -> dict[str, Candidate]:
        made = make()
        optimizer = torch.optim.Adam(made[0].parameters(), lr=1e-5)
        good, bad = _step(made, optimizer), _step(made, optimizer, factor=float("nan"))
        watch = gg.watch(made[0])

        def explained() -> None:
            with watch, contextlib.suppress(BadStepError):
                watch.step(bad)

        explained()
        assert watch.diagnosis is not None
        assert watch.diagnosis.findings
        return {"plain step": good, "failing step, explained": explained}

    return candidates


def _goal(name: str, limit: float) -> float | None:
    return None if name == "MLP 64" else limit


ROWS = [
    *(
        Row("doctor", f"what a watch adds to a step, {name}", _look(make), "the look", "plain step", at_most=0.02)
        for name, make in MODELS.items()
    ),
    *(
        Row("doctor", f"watch and watch.step, whole healthy steps, {name}", _watched(make), "watch.step", "plain step")
        for name, make in MODELS.items()
    ),
    *(
        Row(
            "doctor",
            f"trace every step, {name}",
            _traced(make),
            ours="gg.trace",
            base="plain step",
            peers=("detect_anomaly",),
            at_most=_goal(name, 2.0),
        )
        for name, make in MODELS.items()
    ),
    *(
        Row(
            "doctor",
            f"a failing step and its explanation, {name}",
            _failing(make),
            ours="failing step, explained",
            base="plain step",
            at_most=_goal(name, 3.0),
        )
        for name, make in MODELS.items()
    ),
]
