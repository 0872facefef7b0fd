"""Find the origin of a NaN with the doctor: which line, which samples, and what to write instead.

A network for handwritten digits divides each picture by its contrast. Two pictures of the batch are blank: their
contrast is 0, its root has an infinite gradient there, and after one step weights are NaN although the loss was fine.
`torch.autograd.set_detect_anomaly` names the backward function; `gg.watch` stops the step before anything is written
and names the line, the expression and the samples.

Run it: python examples/nan_hunt.py        (needs scikit-learn, no network; a few seconds)
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F

import gradgate as gg
from gradgate import masked

digits = load_digits()
images, labels = torch.from_numpy(digits.images).float()[:256] / 16, torch.from_numpy(digits.target)[:256]
BLANK = [5, 40]
images[BLANK] = 0.0


class Net(nn.Module):
    """Learn an emphasis of the pixels, normalise the contrast, classify."""

    def __init__(self, root: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.emphasis = nn.Parameter(torch.ones(64))
        self.layers = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
        self.root = root

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the logits."""
        x = x.flatten(1) * self.emphasis
        contrast = self.root(x.var(1))
        return self.layers(x / (contrast[:, None] + 1e-3))


def new_training(root: Callable[[torch.Tensor], torch.Tensor]) -> tuple[Net, Callable[[], torch.Tensor]]:
    """Make a network and its step on the first 64 pictures."""
    torch.manual_seed(0)
    net = Net(root)
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)

    def step() -> torch.Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(net(images[:64]), labels[:64])
        loss.backward()
        optimizer.step()
        return loss.detach()

    return net, step


def is_whole(net: nn.Module) -> bool:
    """Tell whether all weights are finite."""
    return all(bool(parameter.isfinite().all()) for parameter in net.parameters())


def main() -> int:
    """Meet the NaN, find it, repair it."""
    net, step = new_training(torch.sqrt)
    print(f"plain: loss {step():.2f}, weights finite: {is_whole(net)}")

    _, step = new_training(torch.sqrt)
    with warnings.catch_warnings(), torch.autograd.set_detect_anomaly(True):
        warnings.simplefilter("ignore")
        try:
            step()
        except RuntimeError as error:
            print(f"detect_anomaly: {error}")

    watched, step = new_training(torch.sqrt)
    with gg.watch(watched) as watch:
        try:
            watch.step(step)
        except gg.errors.BadStepError as error:
            diagnosis = error.diagnosis
    finding = diagnosis.findings[0]
    print(f"gg.watch: {finding.code} {finding.title}")
    print(f"    {finding.where.rpartition('/')[2]}: {finding.source.strip()}   samples {finding.samples}")
    print(f"    write {finding.fix}")
    print(f"    weights finite: {is_whole(watched)}")

    repaired, step = new_training(masked.safe_sqrt)
    losses = [step().item() for _ in range(100)]
    print(f"with masked.safe_sqrt: loss {losses[0]:.2f} -> {losses[-1]:.2f}, weights finite: {is_whole(repaired)}")

    found = "self.root(x.var(1))" in finding.source and list(finding.samples) == BLANK
    return 0 if found and is_whole(watched) and is_whole(repaired) and not is_whole(net) and losses[-1] < 0.3 else 1


if __name__ == "__main__":
    sys.exit(main())
