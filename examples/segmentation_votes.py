"""Merge the label maps of five annotators, where 255 means "not labelled", and train on the result.

Pixels of handwritten digits are paper, edge or ink, and most annotators leave edges out because they are hard.
`torch.mode` cannot exclude a value, so 255 wins there, and a network that is trained on the result has hardly seen an
edge. `masked.mode(exclude=255)` counts only real labels. Where no annotator labelled a pixel,
`cross_entropy(ignore_index=255)` is NaN, because it divides by 0; `losses.masked_loss` is 0.

Run it: python examples/segmentation_votes.py        (needs scikit-learn, no network; a few seconds)
"""

from __future__ import annotations

import sys

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F

from gradgate import losses, masked

SILENT, ANNOTATORS, BATCH, EDGE = 255, 5, 32, 1

chance = torch.Generator().manual_seed(0)
images = torch.from_numpy(load_digits().images).float()[:512, None] / 16
truth = (images[:, 0] > 0.2).long() + (images[:, 0] > 0.7).long()  # 0 paper, 1 edge, 2 ink
noisy = images + 0.1 * torch.randn(images.shape, generator=chance)  # what the scanner records


def ask_annotators() -> torch.Tensor:
    """Collect the votes, (annotators, n, 8, 8): one in ten is wrong, and edges are left out more often than not."""
    votes = truth.repeat(ANNOTATORS, 1, 1, 1)
    wrong = torch.rand(votes.shape, generator=chance) < 0.1
    votes[wrong] = torch.randint(0, 3, votes.shape, generator=chance)[wrong]
    leaves_out = torch.where(truth == EDGE, 0.7, 0.2)
    votes[torch.rand(votes.shape, generator=chance) < leaves_out] = SILENT
    votes[:, -BATCH:] = SILENT  # the last images are not labelled yet
    return votes


def train(labels: torch.Tensor) -> torch.Tensor:
    """Train a small network on the labels; return its answers."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 3, 3, padding=1))
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
    for _ in range(6):
        for x, y in zip(noisy.split(BATCH), labels.split(BATCH), strict=True):
            optimizer.zero_grad()
            losses.masked_loss(F.cross_entropy, net(x), y, exclude=SILENT).backward()
            optimizer.step()
    with torch.no_grad():
        return net(noisy).argmax(1)


def show(name: str, labels: torch.Tensor) -> float:
    """Print how many edges are labelled, how many labels are right, and what a network learns from them."""
    there, answers = labels != SILENT, train(labels)
    edges_seen = there[truth == EDGE].float().mean()
    found = (answers == truth)[truth == EDGE].float().mean().item()
    right = (answers == truth).float().mean()
    print(f"{name:28}{there.float().mean():16.1%}{edges_seen:16.1%}{right:16.1%}{found:16.1%}")
    return found


def main() -> int:
    """Merge and train both ways."""
    votes = ask_annotators()
    said = (votes != SILENT).any(0)
    by_torch, ours = torch.mode(votes, 0).values, masked.mode(votes, 0, exclude=SILENT, empty=SILENT)
    print(f"{'':28}{'labelled':>16}{'of the edges':>16}{'network right':>16}{'edges found':>16}")
    plain_found = show("torch.mode", by_torch)
    found = show("masked.mode(exclude=255)", ours.values)

    logits, nobody = torch.zeros(BATCH, 3, 8, 8), ours.values[-BATCH:]
    by_index = F.cross_entropy(logits, nobody, ignore_index=SILENT)
    left_out = losses.masked_loss(F.cross_entropy, logits, nobody, exclude=SILENT)
    print(f"a batch without labels: cross_entropy(ignore_index=255) {by_index:.1f}, masked_loss {left_out:.1f}")

    complete = torch.equal(ours.values != SILENT, said) and bool((ours.counts[~said] == 0).all())
    return 0 if complete and found > plain_found + 0.2 and by_index.isnan() and left_out == 0 else 1


if __name__ == "__main__":
    sys.exit(main())
