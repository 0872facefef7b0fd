"""Data with bad samples and a small network, for the tests of the frameworks."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from torch.utils.data import DataLoader, Dataset

ROOT = Path(__file__).parents[2]
FAULTS = ("nan", "raise", "load", "gradient")
BAD = (5, 14)
SAMPLES, BATCH = 24, 4
_FLAGS = {"raise": 1.0, "gradient": 2.0}


class Samples(Dataset):
    """Rows of which some are bad in one way: `nan` in the input, `raise` in forward, `load`, or the `gradient`."""

    def __init__(self, fault=None, bad=BAD, size=SAMPLES):
        self.rows = torch.randn(size, 4, generator=torch.Generator().manual_seed(1))
        self.fault, self.bad = fault, bad if fault else ()

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        row, flag = self.rows[index].clone(), 0.0
        if index in self.bad:
            if self.fault == "load":
                raise ValueError("truncated")
            if self.fault == "nan":
                row[0] = float("nan")
            flag = _FLAGS.get(self.fault, 0.0)
        return row, torch.tensor(flag)


class Network(torch.nn.Module):
    """Statistics of the batch, random numbers, and what the flags of a sample ask for."""

    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(4, 8)
        self.norm = torch.nn.BatchNorm1d(8)
        self.dropout = torch.nn.Dropout(0.2)
        self.last = torch.nn.Linear(8, 1)
        self.dtypes = set()

    def forward(self, rows, flags):
        if (flags == 1).any():
            raise ValueError("a row that cannot be read")
        hidden = self.first(rows)
        self.dtypes.add(hidden.dtype)
        out = self.last(self.dropout(self.norm(hidden))).squeeze(-1)
        return out + torch.where(flags == 2, out * 0, 1.0).sqrt() - 1  # the gradient of sqrt at 0

    def loss(self, batch):
        rows, flags = batch
        return (self(rows, flags) - rows.sum(1)).square().mean()


def batches_without(bad, size=SAMPLES, batch=BATCH):
    """The batches that a loader gives, without the bad samples."""
    return [[i for i in range(start, start + batch) if i not in bad] for start in range(0, size, batch)]


def loader_of(fault):
    """A loader of all samples; without a fault, the same batches without the bad samples."""
    if fault is None:
        return DataLoader(Samples(), batch_sampler=batches_without(BAD))
    return DataLoader(Samples(fault), batch_size=BATCH)


def equal(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def run_ranks(module, *arguments, timeout=300):
    """Run the `on_rank` of a test module in two processes that must both end, and give what each has printed."""
    with tempfile.TemporaryDirectory() as folder:
        code = f"from tests.integrations.faulty import meet; meet({folder!r}); from {module} import on_rank"
        command = [sys.executable, "-W", "ignore", "-c", f"{code}; on_rank(*{arguments!r})"]
        common = {**os.environ, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}
        common |= {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": "1",
            "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]),
        }
        ranks = [
            subprocess.Popen(
                command,
                env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                cwd=ROOT,
            )
            for rank in range(2)
        ]
        try:
            printed = [rank.communicate(timeout=timeout) for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
    for rank, (_, errors) in zip(ranks, printed, strict=True):
        assert rank.returncode == 0, errors
    return [out.splitlines()[-1] for out, _ in printed]


def meet(folder):
    """Make the process group by a file: no port can be taken by somebody else. The frameworks find it made."""
    rank = int(os.environ["RANK"])
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
