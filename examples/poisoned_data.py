"""Train on a poisoned data set with the guard, the resilient loader and the ledger.

The breast cancer data of scikit-learn, with rows broken like those of real tables: a text where a number should be, a
missing value written as NaN, a negative size whose logarithm is NaN. Plain PyTorch fails at the first of them; skipping
bad batches discards most of the data. With gradgate the training ends with exactly the weights that it would have
without the broken rows, and the ledger lists each of them, so that the next run can leave them out.

Run it: python examples/poisoned_data.py        (needs scikit-learn, no network; a few seconds)
"""

from __future__ import annotations

import logging
import sys
import tempfile
from pathlib import Path

import torch
from sklearn.datasets import load_breast_cancer
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, default_collate

import gradgate as gg

rows, labels = load_breast_cancer(return_X_y=True)
EVERYTHING = set(range(len(rows)))
BROKEN = {number: ("text", "missing", "negative")[number % 3] for number in range(4, len(rows), 14)}
EPOCHS = 2


class Table(Dataset[tuple[torch.Tensor, int]]):
    """Rows of 30 measurements, and whether the tumor is benign."""

    def __len__(self) -> int:
        return len(rows)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        row, fault = torch.from_numpy(rows[index]).float(), BROKEN.get(index)
        if fault == "text":
            row[3] = float("1,001.0")  # raises, as it does when a file is parsed
        elif fault == "missing":
            row[7] = float("nan")
        elif fault == "negative":
            row[0] = -row[0]
        return row, int(labels[index])


def new_training() -> tuple[nn.Module, torch.optim.Optimizer]:
    """Build the same network for every run."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.BatchNorm1d(30), nn.Linear(30, 32), nn.ReLU(), nn.Linear(32, 2))
    return net, torch.optim.Adam(net.parameters(), lr=1e-2)


def loss_of(net: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
    """Compare what the network makes of the logarithms of the sizes with the labels."""
    return F.cross_entropy(net((batch[0] + 1e-3).log()), batch[1])


def batches(epoch: int, among: set[int]) -> list[list[int]]:
    """Return the batches of an epoch, in the same order for every way of training."""
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(epoch)).split(32)
    return [[number for number in batch.tolist() if number in among] for batch in order]


def plain(among: set[int], *, skip: bool = False) -> tuple[nn.Module, str]:
    """Train as usual; with skip, leave out batches that cannot be loaded or whose loss is not finite."""
    (net, optimizer), lost = new_training(), 0
    for numbers in (numbers for epoch in range(EPOCHS) for numbers in batches(epoch, among)):
        optimizer.zero_grad()
        try:
            loss = loss_of(net, default_collate([Table()[number] for number in numbers]))
        except ValueError as error:
            if not skip:
                return net, f"crashed: {error}"
            loss = torch.tensor(torch.nan)
        if skip and not loss.isfinite():
            lost += len(numbers)
            continue
        loss.backward()
        optimizer.step()
    return net, f"{lost} samples lost"


def guarded(path: Path) -> tuple[nn.Module, str]:
    """Train with gradgate: two lines are new, one is changed."""
    net, optimizer = new_training()
    guard = gg.Guard(net, ledger=path)  # new
    for epoch in range(EPOCHS):
        loader = gg.resilient(DataLoader(Table(), batch_sampler=batches(epoch, EVERYTHING)), ledger=path)  # new
        for batch in loader:
            optimizer.zero_grad()
            guard.backward(batch, lambda batch: loss_of(net, batch))  # instead of loss.backward()
            optimizer.step()
    return net, f"{len(gg.Ledger(path).incidents())} samples lost"


def main() -> int:
    """Train in four ways and compare."""
    logging.getLogger("gradgate").setLevel(logging.ERROR)  # otherwise one line per incident
    good = sorted(EVERYTHING - set(BROKEN))
    x, y = default_collate([Table()[number] for number in good])
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.ledger"
        ways = {"plain": plain(EVERYTHING), "skip bad batches": plain(EVERYTHING, skip=True)}
        ways |= {"gradgate": guarded(path), "clean data": plain(set(good))}
        for name, (net, story) in ways.items():
            right = (net.eval()((x + 1e-3).log()).argmax(1) == y).float().mean()
            print(f"{name:20}{right:8.1%}   {story}")
        with gg.Ledger(path) as ledger:
            print(ledger.sql("SELECT stage, cause, count(DISTINCT sample_id) FROM incidents GROUP BY 1, 2").rows)
            exact = {int(name) for name in ledger.bad_ids()} == set(BROKEN) and len(gg.without(Table(), ledger)) == len(
                good
            )
    ours, clean = ways["gradgate"][0].state_dict(), ways["clean data"][0].state_dict()
    same = all(torch.equal(ours[name], clean[name]) for name in clean)
    print("the weights and statistics are those of the clean data, bit for bit:", "yes" if same else "NO")
    print(f"the ledger has the {len(BROKEN)} broken rows, and no other:", "yes" if exact else "NO")
    return 0 if same and exact else 1


if __name__ == "__main__":
    sys.exit(main())
