"""Train on two ranks with DistributedDataParallel while one of them has broken samples.

The handwritten digits of scikit-learn, a part for each rank, one part longer than the other. On one rank some pictures
are missing (NaN), and some labels are out of range, so that the loss raises. Plain DDP spreads the NaN to every rank,
and a rank that skips a batch leaves the others waiting. With the guard every rank makes the same step with the good
samples of all ranks: the weights are bit-identical on all ranks, and up to rounding those of one process that never saw
the broken samples.

Run it: torchrun --nproc-per-node 2 examples/ddp_train.py      (needs scikit-learn, no network; a few seconds)
"""

from __future__ import annotations

import gc
import logging
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import gradgate as gg

EPOCHS, BATCH = 5, 32

digits, labels = load_digits(return_X_y=True)
pictures, classes = torch.from_numpy(digits).float() / 16, torch.from_numpy(labels)
mixed = torch.randperm(len(classes), generator=torch.Generator().manual_seed(0)).tolist()
shares, rest = [mixed[:900], mixed[900:1400]], mixed[1400:]  # two ranks, and the test
missing, unknown = shares[1][3::40], shares[1][11::70]
broken = {*missing, *unknown}


def new_training() -> tuple[nn.Module, torch.optim.Optimizer]:
    """Build the same network for every run."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    return net, torch.optim.SGD(net.parameters(), lr=0.2, momentum=0.9)


def batches_of(rank: int) -> list[list[int]]:
    """Return the rows of each batch of a rank; the ranks have different numbers."""
    rows = shares[rank] if rank < len(shares) else []
    return [rows[start : start + BATCH] for start in range(0, len(rows), BATCH)]


def loaded(rows: list[int]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Load a batch as it is on the disk, broken samples included."""
    x, y, names = pictures[rows], classes[rows].clone(), torch.tensor(rows)
    for place, row in enumerate(rows):
        if row in missing:
            x[place] = float("nan")
        elif row in unknown:
            y[place] = 99
    return x, y, names


def accuracy(net: nn.Module) -> float:
    """Return the share of the test digits that are read correctly."""
    with torch.no_grad():
        return float((net(pictures[rest]).argmax(1) == classes[rest]).float().mean())


def train_plain(rank: int) -> float:
    """Train without the guard. The labels are valid here; only pictures are missing."""
    net, _ = new_training()
    wrapped = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.2, momentum=0.9)
    for rows in batches_of(rank)[:10]:  # the same number on both ranks, or one would wait
        x, _, _ = loaded(rows)
        optimizer.zero_grad()
        F.cross_entropy(wrapped(x), classes[rows]).backward()
        optimizer.step()
    return accuracy(net)


def train_guarded(rank: int, ledger: str) -> tuple[nn.Module, gg.Guard]:
    """Train under guard; the three lines that differ from a plain loop are marked."""
    net, _ = new_training()
    wrapped = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.2, momentum=0.9)
    guard = gg.Guard(wrapped, ledger=ledger, patience=1000)  # new
    for _ in range(EPOCHS):
        for x, y, names in guard.batches(map(loaded, batches_of(rank))):  # new: until the last rank is done
            optimizer.zero_grad()
            guard.backward((x, y), lambda batch: F.cross_entropy(wrapped(batch[0]), batch[1]), ids=names)  # new
            optimizer.step()
    return net, guard


def train_alone(world: int) -> nn.Module:
    """Train in one process on the samples of all ranks, without the broken ones."""
    net, optimizer = new_training()
    every = [batches_of(rank) for rank in range(world)]
    for _ in range(EPOCHS):
        for turn in range(max(map(len, every))):
            rows = [row for batches in every for row in (batches[turn] if turn < len(batches) else [])]
            rows = [row for row in rows if row not in broken]
            optimizer.zero_grad()
            F.cross_entropy(net(pictures[rows]), classes[rows]).backward()
            optimizer.step()
    return net


def distance(net: nn.Module, other: nn.Module) -> float:
    """Return the largest difference of two weights."""
    pairs = zip(net.parameters(), other.parameters(), strict=True)
    return max(float((a - b).detach().abs().max()) for a, b in pairs)


def compare() -> bool:
    """Train without and with the guard, compare, and print on the first rank; return True if a claim fails."""
    rank, world = dist.get_rank(), dist.get_world_size()
    folder = [tempfile.mkdtemp() if rank == 0 else ""]
    dist.broadcast_object_list(folder)
    path = Path(folder[0]) / "run.ledger"

    plain = train_plain(rank)
    net, guard = train_guarded(rank, str(path))
    weights = [torch.empty(sum(p.numel() for p in net.parameters())) for _ in range(world)]
    dist.all_gather(weights, torch.cat([p.detach().flatten() for p in net.parameters()]))

    if rank == 0:
        known = {int(name) for name in gg.Ledger(path).bad_ids()}
        met = broken & {row for other in range(world) for rows in batches_of(other) for row in rows}
        same = all(torch.equal(weights[0], other) for other in weights)
        off = distance(net, train_alone(world))
        print(f"plain DDP, digits read       {plain:6.1%}")
        print(f"guarded, digits read         {accuracy(net):6.1%}")
        print(f"the weights are the same on all {world} ranks, bit for bit: {'yes' if same else 'no'}")
        print(f"and those of one process without the broken samples: {'yes' if off < 1e-4 else 'no'} ({off:.0e})")
        print(f"the ledger has the {len(met)} broken samples, and no other: {'yes' if known == met else 'no'}")
        print(guard.summary())
        for file in path.parent.iterdir():
            file.unlink()
        path.parent.rmdir()
        return not (same and off < 1e-4 and known == met and accuracy(net) > 0.85 > plain)
    return False


def main() -> None:
    """Train in a process group."""
    logging.getLogger("gradgate").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    failed = compare()
    gc.collect()  # models that outlive their process group can abort the process at its exit
    dist.destroy_process_group()
    sys.exit(failed)


if __name__ == "__main__":
    main()
