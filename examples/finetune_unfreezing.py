"""Fine-tune with frozen layers, thaw them by a schedule, and resume in the middle of it.

A network has learned the digits 0-4. Its trunk stays frozen while a new head learns 5-9 from 60 images of a brighter
scanner; from epoch 8 on the second block learns as well. Plain PyTorch freezes with `requires_grad_(False)`: the
weights stay, but the statistics of BatchNorm do not, and the trunk forgets the old digits. `gg.FreezeSchedule` freezes
all of it, and its state goes into the checkpoint.

Run it: python examples/finetune_unfreezing.py        (needs scikit-learn, no network; a few seconds)
"""

from __future__ import annotations

import copy
import sys

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F

import gradgate as gg

PLAN = {0: ["head.*"], 8: ["block2.*"]}  # what learns from which epoch on; block1 never does
THAW, RESTART, EPOCHS = 8, 5, 16

digits = load_digits()
images, labels = torch.from_numpy(digits.images).float()[:, None] / 16, torch.from_numpy(digits.target)
old_x, old_y = images[labels < 5], labels[labels < 5]
new_x, new_y = 3 * images[labels >= 5], labels[labels >= 5] - 5
few_x, few_y, rest_x, rest_y = new_x[:60], new_y[:60], new_x[60:], new_y[60:]


class Net(nn.Module):
    """Two blocks with BatchNorm and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.block1 = nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2))
        self.block2 = nn.Sequential(nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2))
        self.head = nn.Linear(128, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the logits."""
        return self.head(self.block2(self.block1(x)).flatten(1))


def train_epoch(net: Net, optimizer: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor) -> None:
    """Go once over the data in batches of 20."""
    net.train()
    for rows in torch.randperm(len(x)).split(20):
        optimizer.zero_grad()
        F.cross_entropy(net(x[rows]), y[rows]).backward()
        optimizer.step()


@torch.no_grad()
def accuracy(net: Net, x: torch.Tensor, y: torch.Tensor, head: nn.Module | None = None) -> float:
    """The share of right answers, with this head or another."""
    net.eval()
    out = (head or net.head)(net.block2(net.block1(x)).flatten(1))
    return (out.argmax(1) == y).float().mean().item()


def tune(start: Net, *, scheduled: bool) -> tuple[Net, float]:
    """Fine-tune a copy; return it, and the accuracy of its trunk on the old digits just before the thaw."""
    torch.manual_seed(1)
    net, known = copy.deepcopy(start), 0.0
    net.head.reset_parameters()
    optimizer = torch.optim.AdamW(net.parameters(), lr=3e-3)
    schedule = gg.FreezeSchedule(net, PLAN) if scheduled else None
    for epoch in range(EPOCHS):
        if epoch == THAW:
            known = accuracy(net, old_x, old_y, start.head)
        if schedule is None:
            net.block1.requires_grad_(False)
            net.block2.requires_grad_(epoch >= THAW)
        else:
            if epoch == RESTART:  # a new process: build and load everything again
                saved = net.state_dict(), optimizer.state_dict(), schedule.state_dict()
                net = Net()
                optimizer, schedule = torch.optim.AdamW(net.parameters(), lr=3e-3), gg.FreezeSchedule(net, PLAN)
                for part, state in zip((net, optimizer, schedule), saved, strict=True):
                    part.load_state_dict(state)
            schedule.set_epoch(epoch)
        train_epoch(net, optimizer, few_x, few_y)
    return net, known


def main() -> int:
    """Fine-tune in both ways and compare the frozen trunks on the old digits."""
    torch.manual_seed(0)
    start = Net()
    optimizer = torch.optim.AdamW(start.parameters(), lr=3e-3)
    for _ in range(4):
        train_epoch(start, optimizer, old_x, old_y)
    before = accuracy(start, old_x, old_y)
    plain, plain_known = tune(start, scheduled=False)
    ours, ours_known = tune(start, scheduled=True)
    pairs = zip(ours.block1.state_dict().values(), start.block1.state_dict().values(), strict=True)
    same, learned = all(torch.equal(a, b) for a, b in pairs), accuracy(ours, rest_x, rest_y)

    print(f"{'':24}old digits, trunk frozen    new digits, at the end")
    print(f"{'before':24}{before:24.1%}")
    print(f"{'requires_grad_(False)':24}{plain_known:24.1%}{accuracy(plain, rest_x, rest_y):26.1%}")
    print(f"{'gg.FreezeSchedule':24}{ours_known:24.1%}{learned:26.1%}")
    print("block1, weights and statistics, is bit-identical to the start:", "yes" if same else "NO")
    return 0 if same and ours_known == before and plain_known < before - 0.1 and learned > 0.8 else 1


if __name__ == "__main__":
    sys.exit(main())
