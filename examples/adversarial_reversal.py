"""Adversarial training with gradient reversal: features that do not reveal which scanner a picture comes from.

Half of the digits come from a scanner that produces negatives. A second head tries to distinguish the scanners; behind
a gradient reversal, its success teaches the features to hide the difference. Afterwards scikit-learn's logistic
regression, which took no part in the training, tries the same. `gg.ReverseGrad` is a module whose strength is an
attribute, so the usual schedule is an assignment. The Function that people copy from repository to repository produces
the same weights bit for bit, but needs the strength in every call.

Run it: python examples/adversarial_reversal.py        (needs scikit-learn, no network; a few seconds)
"""

from __future__ import annotations

import math
import sys
from typing import Any

import torch
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression
from torch import nn
from torch.nn import functional as F

import gradgate as gg

STEPS, TRAIN = 400, 1200

digits = load_digits()
chance = torch.Generator().manual_seed(0)
order = torch.randperm(len(digits.images), generator=chance)
images, labels = torch.from_numpy(digits.images).float()[order].flatten(1) / 16, torch.from_numpy(digits.target)[order]
scanner = torch.rand(len(images), generator=chance) < 0.5
images[scanner] = 1 - images[scanner]  # the negatives


class CopiedReversal(torch.autograd.Function):
    """Reverse the gradient, as most repositories do it."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, strength: float) -> torch.Tensor:
        """Return x."""
        ctx.strength = strength
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Return the gradient, reversed and scaled."""
        return gradient.neg() * ctx.strength, None


def train(way: str) -> nn.Sequential:
    """Train features for the digits, against the second head; return them with the first head."""
    torch.manual_seed(0)
    features = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 16), nn.Tanh())
    digit, which = nn.Linear(16, 10), nn.Linear(16, 1)
    reversal = gg.ReverseGrad()
    modules = nn.ModuleList([features, digit, which])
    optimizer = torch.optim.Adam(modules.parameters(), lr=2e-3, betas=(0.0, 0.99))  # no momentum against an adversary
    for step in range(STEPS):
        rows = torch.randint(0, TRAIN, (128,))
        strength = 2 / (1 + math.exp(-10 * step / STEPS)) - 1
        optimizer.zero_grad()
        hidden = features(images[rows])
        if way == "gg.ReverseGrad":
            reversal.strength = strength
            seen = reversal(hidden)
        else:
            seen = CopiedReversal.apply(hidden, strength) if way == "copied Function" else hidden.detach()
        distinguished = F.binary_cross_entropy_with_logits(which(seen)[:, 0], scanner[rows].float())
        (F.cross_entropy(digit(hidden), labels[rows]) + distinguished).backward()
        optimizer.step()
    return nn.Sequential(features, digit)


@torch.no_grad()
def show(way: str, net: nn.Sequential) -> tuple[float, float]:
    """Print how well the features reveal digits and scanners."""
    right = (net(images[TRAIN:]).argmax(1) == labels[TRAIN:]).float().mean().item()
    features = net[0](images).numpy()
    probe = LogisticRegression(max_iter=1000).fit(features[:TRAIN], scanner[:TRAIN])
    recognised = float(probe.score(features[TRAIN:], scanner[TRAIN:]))
    print(f"{way:20}{right:14.1%}{recognised:20.1%}")
    return right, recognised


def main() -> int:
    """Train with and without the adversary."""
    ways = {way: train(way) for way in ("no adversary", "copied Function", "gg.ReverseGrad")}
    print(f"{'':20}{'digits read':>14}{'scanners found':>20}")
    found = {way: show(way, net) for way, net in ways.items()}
    pairs = zip(ways["copied Function"].parameters(), ways["gg.ReverseGrad"].parameters(), strict=True)
    same = all(torch.equal(a, b) for a, b in pairs)
    print("the same weights as with the copied Function, bit for bit:", "yes" if same else "NO")
    (_, plain_recognised), (right, recognised) = found["no adversary"], found["gg.ReverseGrad"]
    return 0 if same and right > 0.9 and recognised < plain_recognised - 0.1 else 1


if __name__ == "__main__":
    sys.exit(main())
