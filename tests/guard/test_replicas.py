"""Two ranks in DistributedDataParallel: what happens on one of them, and what both do then."""

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradgate as gg
from tests.guard.ranks import ended_well, lived, same_everywhere

pytestmark = pytest.mark.distributed
WORLD = 2


class Net(nn.Module):
    """Raises for marked rows."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1)).double()

    def forward(self, x):
        if bool((x[:, 0] > 1e6).any()):
            raise ValueError("a row is out of range")
        return self.body(x)


def network():
    torch.manual_seed(1)
    return Net()


def data(sizes, seed=0):
    """Give each rank's rows."""
    rows = torch.randn(sum(sizes), 3, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return list(rows.split(sizes))


def loss_of(model):
    return lambda x: model(x).square().mean()


def check_against_union(model, kept):
    """State that gradients are those of one process on all rows that are kept, and the same on every rank."""
    oracle = network()
    loss = loss_of(oracle)(torch.cat(kept))
    loss.backward()
    for ours, theirs in zip(model.parameters(), oracle.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)
    same_everywhere(*(p.grad for p in model.parameters()))
    return loss.detach()


def healthy_with_equal_counts_is_what_ddp_gives(rank):
    ours, theirs = DistributedDataParallel(network()), DistributedDataParallel(network())
    guard = gg.Guard(ours)
    batches = data([4, 4])
    for _ in range(3):
        ours.zero_grad()
        theirs.zero_grad()
        step = guard.step(batches[rank], loss_of(ours))
        loss_of(theirs)(batches[rank]).backward()
        for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
            assert torch.equal(a.grad, b.grad)
    assert step.kept == [0, 1, 2, 3]
    torch.testing.assert_close(step.loss, check_against_union(ours.module, batches))


def unequal_counts_weigh_as_they_should(rank):
    for sizes in ([5, 1], [2, 7], [3, 3]):
        model = DistributedDataParallel(network())
        guard = gg.Guard(model)
        for turn in range(3):
            batches = data([size + turn for size in sizes], seed=turn)
            model.zero_grad()
            step = guard.step(batches[rank], loss_of(model))
            torch.testing.assert_close(step.loss, check_against_union(model.module, batches))


STORIES = [
    healthy_with_equal_counts_is_what_ddp_gives,
    unequal_counts_weigh_as_they_should,
]


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    return lived(STORIES, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("story", STORIES, ids=lambda story: story.__name__)
def test_two_replicas(told, story):
    ended_well(told, story)
