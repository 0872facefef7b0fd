"""Train a sharded model (FSDP2) on two ranks while one of them has broken samples.

The handwritten digits of scikit-learn, half for each rank, and a network whose blocks are sharded one by one. On the
second rank some pictures are missing (NaN), and some fail a check in the middle of a block: without the guard, a rank
that raises there leaves the other one waiting inside a gather. With the guard every step stays FSDP2's own, in shards
from beginning to end, and the weights are up to rounding those of one process that never saw the broken samples.

Run it: torchrun --nproc-per-node 2 examples/fsdp_train.py      (needs scikit-learn, no network; a few seconds)
"""

from __future__ import annotations

import gc
import logging
import sys

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

import gradgate as gg

EPOCHS, BATCH, WIDTH = 3, 100, 64

digits, labels = load_digits(return_X_y=True)
pictures, classes = torch.from_numpy(digits).double() / 16, torch.from_numpy(labels)
mixed = torch.randperm(len(classes), generator=torch.Generator().manual_seed(0)).tolist()
shares, rest = [mixed[:700], mixed[700:1400]], mixed[1400:]  # two ranks, and the test
missing, too_bright = shares[1][3::40], shares[1][11::70]
broken = {*missing, *too_bright}


class Block(nn.Module):
    """Two layers, with a check between them that some samples break."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Run the block."""
        hidden = self.up(x).relu()
        if bool((hidden > 1e6).any()):
            raise ValueError("an activation is out of range")
        return x + self.down(hidden)


def new_net() -> nn.Sequential:
    """Build the same network for every run."""
    torch.manual_seed(0)
    return nn.Sequential(Block(), Block(), Block(), nn.Linear(WIDTH, 10)).double()


def loaded(rows: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Load a batch as it is on the disk, broken samples included."""
    x = pictures[rows]
    for place, row in enumerate(rows):
        if row in missing:
            x[place] = float("nan")
        elif row in too_bright:
            x[place] *= 1e9
    return x, classes[rows]


def batches_of(rank: int) -> list[list[int]]:
    """Return the rows of each batch of a rank."""
    rows = shares[rank] if rank < len(shares) else []
    return [rows[start : start + BATCH] for start in range(0, len(rows), BATCH)]


def train_guarded(rank: int) -> tuple[nn.Module, gg.Guard, int]:
    """Train in shards under guard; the two lines that differ from a plain loop are marked. Count wrong drops."""
    net = new_net()
    for block in net:
        fully_shard(block)
    fully_shard(net)
    optimizer = torch.optim.AdamW(net.parameters(), lr=5e-3)
    guard = gg.Guard(net, patience=1000)  # new
    wrong = 0
    for _ in range(EPOCHS):
        for rows in batches_of(rank):
            optimizer.zero_grad()
            result = guard.backward(
                loaded(rows), lambda batch: F.cross_entropy(net(batch[0]), batch[1]), ids=rows
            )  # new
            optimizer.step()
            wrong += {int(one.sample_id or -1) for one in result.dropped} != broken.intersection(rows)
    return net, guard, wrong


def train_alone(world: int) -> nn.Module:
    """Train in one process on the samples of all ranks, without the broken ones."""
    net = new_net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=5e-3)
    for _ in range(EPOCHS):
        for parts in zip(*[batches_of(rank) for rank in range(world)], strict=True):
            rows = [row for part in parts for row in part if row not in broken]
            optimizer.zero_grad()
            F.cross_entropy(net(pictures[rows]), classes[rows]).backward()
            optimizer.step()
    return net


def compare() -> bool:
    """Train, compare, and print on the first rank; return True if a claim fails."""
    rank, world = dist.get_rank(), dist.get_world_size()
    net, guard, wrong = train_guarded(rank)
    counts = torch.tensor([wrong])
    dist.all_reduce(counts)
    held = sum(p.to_local().numel() for p in net.parameters()) / sum(p.numel() for p in net.parameters())
    weights = [parameter.full_tensor() for parameter in net.parameters()]

    if rank == 0:
        alone = train_alone(world)
        pairs = zip(weights, alone.parameters(), strict=True)
        off = max(float((ours - theirs).detach().abs().max()) for ours, theirs in pairs)
        with torch.no_grad():
            read = float((alone(pictures[rest]).argmax(1) == classes[rest]).double().mean())
        print(f"each of {world} ranks holds {held:.0%} of the weights")
        print(f"digits read                  {read:6.1%}")
        same = "yes" if off < 1e-6 else "no"
        print(f"the weights are those of one process without the broken samples: {same} ({off:.0e})")
        print(f"every broken sample was dropped, and no other: {'no' if counts.item() else 'yes'}")
        print(guard.summary())
        return bool(counts.item()) or off >= 1e-6 or read < 0.85
    return False


def main() -> None:
    """Train in a process group."""
    logging.getLogger("gradgate").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    failed = compare()
    gc.collect()  # shards that outlive their process group can abort the process at its exit
    dist.destroy_process_group()
    sys.exit(failed)


if __name__ == "__main__":
    main()
