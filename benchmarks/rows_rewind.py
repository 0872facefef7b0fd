"""What `Rewind` costs a healthy training: the copies, once every 50 steps, and an observation for each step."""

from __future__ import annotations

import copy

import torch
from torch import nn

import gradgate as gg
from benchmarks.harness import Row

STEPS = 50  # one snapshot


def mlp() -> tuple[nn.Module, torch.Tensor]:
    """Give a model of 2.4 million parameters and a batch."""
    return nn.Sequential(nn.Linear(512, 1536), nn.ReLU(), nn.Linear(1536, 1024), nn.ReLU(), nn.Linear(1024, 1)), (
        torch.randn(64, 512)
    )


def transformer() -> tuple[nn.Module, torch.Tensor]:
    """Give a model of about 5 million parameters and a batch."""
    layer = nn.TransformerEncoderLayer(256, 4, 1024, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 6, enable_nested_tensor=False), torch.randn(2, 16, 256)


MODELS = {"MLP 2.4 M": mlp, "transformer 4.7 M": transformer}


def training(name: str, *, steps: int = STEPS):
    """Line up a plain training and one with Rewind, of as many steps as lie between two snapshots."""
    model, batch = MODELS[name]()

    def run(watched: bool):
        own = copy.deepcopy(model)
        optimizer = torch.optim.AdamW(own.parameters(), lr=1e-6)
        rewind = gg.Rewind(own, optimizer, every=STEPS)

        def train() -> None:
            for x in rewind.batches([batch] * steps) if watched else [batch] * steps:
                optimizer.zero_grad()
                loss = own(x).square().mean()
                loss.backward()
                optimizer.step()
                if watched:
                    rewind.observe(loss)

        return train

    return {"plain": run(False), "gradgate": run(True)}


def observing():
    """Observe losses, with a window that is full."""
    model = nn.Linear(1, 1)
    rewind = gg.Rewind(model, every=10**9)
    losses = torch.rand(1000).unbind()

    def forever():
        while True:
            yield from losses

    stream = rewind.batches(forever())
    for _ in range(300):
        rewind.observe(next(stream))
    empty = nn.Linear(1, 1).weight.detach

    def observe() -> None:
        rewind._open.append(rewind._steps[-1].batches[0])
        rewind.observe(losses[0])
        rewind._steps.pop()

    return {"plain": empty, "gradgate": observe}


def going_back(name: str):
    """Restore a snapshot, beside loading a checkpoint from memory."""
    model, batch = MODELS[name]()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)
    model(batch).square().mean().backward()
    optimizer.step()
    rewind = gg.Rewind(model, optimizer)
    next(rewind.batches([batch]))
    kept = copy.deepcopy((model.state_dict(), optimizer.state_dict()))

    def load() -> None:
        model.load_state_dict(kept[0])
        optimizer.load_state_dict(copy.deepcopy(kept[1]))  # it takes the tensors themselves

    return {"load_state_dict": load, "gradgate": rewind._snapshots[0].restore}


ROWS = [
    *[
        Row(
            "rewind",
            f"{STEPS} healthy steps with a snapshot, {name}",
            lambda name=name: training(name),
            "gradgate",
            "plain",
            1.02,
            quick=False,
            seconds=15.0,
        )
        for name in MODELS
    ],
    Row("rewind", "observe a loss, window of 200", observing, "gradgate", "plain", microseconds=20.0),
    *[
        Row("rewind", f"go back to a snapshot, {name}", lambda name=name: going_back(name), "gradgate",
            "load_state_dict", 1.0)
        for name in MODELS
    ],
]  # fmt: skip
