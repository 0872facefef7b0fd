"""A small model with traps for marked rows, its data by rank, and the oracle: one process on all rows that are kept."""

import tempfile

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tests.guard.ranks import same_everywhere

RAISES, NAN, GRADIENT, IN_BACKWARD, CODE = 2.0, 3.0, 4.0, 5.0, 6.0


class RaisesInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, mark):
        ctx.save_for_backward(mark)
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        if bool((ctx.saved_tensors[0] == IN_BACKWARD).any()):
            raise ArithmeticError("not this row, on the way back")
        return grad, None


class Net(nn.Module):
    """The first column of a row is its mark."""

    def __init__(self, width=5):
        super().__init__()
        self.front = nn.Sequential(nn.Linear(3, width), nn.Tanh())
        self.back = nn.Linear(width, 1)

    def forward(self, x):
        mark = x[:, 0]
        hidden = self.front(x[:, 1:])
        if bool((mark == RAISES).any()):
            raise ValueError("a row is out of range")
        if bool((mark == CODE).any()):
            raise KeyboardInterrupt
        hidden = hidden + torch.where(mark == NAN, float("nan"), 0.0)[:, None]
        zero = torch.where(mark == GRADIENT, 0.0, 1.0)[:, None]
        hidden = hidden * (zero * (1 + 0 * hidden)).sqrt()
        return self.back(RaisesInBackward.apply(hidden, mark))


def network(width=5):
    torch.manual_seed(1)
    return Net(width).double()


def replica(width=5, **options):
    return DistributedDataParallel(network(width), **options)


def data(sizes, seed=0):
    """Give each rank's rows, none of them marked."""
    rows = torch.randn(sum(sizes), 4, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    rows[:, 0] = 0
    return list(rows.split(sizes))


def marked(batches, **marks):
    """Mark rows: rank_1={0: NAN} marks the first row of rank 1."""
    for name, rows in marks.items():
        for row, mark in rows.items():
            batches[int(name.removeprefix("rank_"))][row, 0] = mark
    return batches


def good(batches):
    """Give all rows without a mark, of all ranks."""
    rows = torch.cat(batches)
    return rows[rows[:, 0] == 0]


def loss_of(model):
    return lambda x: model(x).square().mean()


def whole(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def check_union(model, rows, width=5, oracle=None):
    """State that gradients are those of one process on some rows, and the same on every rank; give its loss."""
    oracle = network(width) if oracle is None else oracle
    loss = loss_of(oracle)(rows)
    loss.backward()
    for ours, theirs in zip(model.parameters(), oracle.parameters(), strict=True):
        torch.testing.assert_close(whole(ours.grad), theirs.grad)
    same_everywhere(*(whole(p.grad) for p in model.parameters()))
    return loss.detach()


def raised_by(call):
    """Give what a call raises."""
    try:
        call()
    except BaseException as error:  # noqa: BLE001 - asked for
        return error
    return None


def shared_folder(rank):
    folder = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(folder)
    return folder[0]
