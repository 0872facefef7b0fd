"""Two processes: freezing after and before DistributedDataParallel, and what would drift apart is refused."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import gradgate as gg
from gradgate.errors import ArgumentValueError, FrozenMovedError
from tests.guard.ranks import lived

pytestmark = pytest.mark.distributed


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 1))


def trained(wrapped, rank, steps=3, inner=None):
    """Train on data that differs from process to process; the result must not."""
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=0.1, weight_decay=0.1)
    for step in range(steps):
        optimizer.zero_grad()
        wrapped(torch.randn(4, 2, generator=torch.Generator().manual_seed(10 * step + rank))).pow(2).sum().backward()
        norm = torch.nn.utils.clip_grad_norm_(wrapped.parameters(), 1.0)
        optimizer.step()
    together = torch.cat([p.detach().flatten() for p in wrapped.parameters()])
    others = [torch.empty_like(together) for _ in range(2)]
    dist.all_gather(others, together)
    assert torch.equal(others[0], others[1]), "the processes drifted apart"
    return norm


def frozen_after_the_wrap(rank):
    for bucket_view in (False, True):
        model = network()
        wrapped = DistributedDataParallel(model, gradient_as_bucket_view=bucket_view)
        trained(wrapped, rank)
        handle = gg.freeze(model[0] if bucket_view else wrapped, "0.weight" if not bucket_view else "weight")
        before = model[1].weight.detach().clone()
        trained(wrapped, rank)
        handle.verify()
        assert model[0].weight.grad is None
        assert not torch.equal(model[1].weight, before)
        handle.thaw()
        before = model[0].weight.detach().clone()
        trained(wrapped, rank)
        assert not torch.equal(model[0].weight, before)


def clipping_after_the_wrap(rank):
    """The reduced gradient of what is frozen is 0, so the norm is that of the rest."""
    model, twin = network(), network()
    wrapped = DistributedDataParallel(model)
    gg.freeze(wrapped, "0.*")
    gg.freeze(twin, "0.*")
    norms = [trained(wrapped, rank, steps=1), trained(DistributedDataParallel(twin), rank, steps=1)]
    torch.testing.assert_close(norms[0], norms[1])


def pinned_around_the_wrap(rank):
    for before_wrap in (False, True):
        model = network()
        if before_wrap:
            pin = gg.pin(model[0].weight, rows=[0])
        wrapped = DistributedDataParallel(model)
        if not before_wrap:
            pin = gg.pin(model[0].weight, rows=[0])
        before = model[0].weight.detach().clone()
        trained(wrapped, rank)
        pin.verify()
        assert not torch.equal(model[0].weight[1], before[1])
        gg.freezing.thaw(model)
        assert not pin.active


def values_of_the_first_process_are_taken(rank):
    """The wrap copies the values of process 0 to the others, pinned ones too; they are kept from then on."""
    model = network()
    with torch.no_grad():
        model[0].weight += rank
    pin = gg.pin(model[0].weight, rows=[0])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.step()
    wrapped = DistributedDataParallel(model)
    trained(wrapped, rank)
    pin.accept()


def thawed_after_the_wrap(rank):
    model = network()
    handle = gg.freeze(model, "0.*")
    wrapped = DistributedDataParallel(model)
    trained(wrapped, rank)
    for refused in (handle.thaw, lambda: gg.freezing.thaw(model)):
        with pytest.raises(ArgumentValueError, match=r"`0\.weight` was frozen when DistributedDataParallel was built"):
            refused()
    handle.verify()
    del wrapped


def scheduled(rank):
    wrapped = DistributedDataParallel(network())
    schedule = gg.FreezeSchedule(wrapped, {0: ["2.*"], 1: ["1.*"]})
    for epoch in range(3):
        schedule.set_epoch(epoch)
        trained(wrapped, rank)
        schedule.handle.verify()


def rows_before_and_after_the_wrap(rank):
    model = nn.Sequential(nn.Linear(2, 4), nn.Linear(4, 1))
    training = gg.train_rows(model[0], rows=[1])
    trained(DistributedDataParallel(model), rank)
    training.verify()
    other = network()
    wrapped = DistributedDataParallel(other)
    with pytest.raises(ArgumentValueError, match="DistributedDataParallel is around this module already"):
        gg.train_rows(other[0], rows=[0])
    trained(wrapped, rank)


def sharded(rank):
    """FSDP2: parameters in shards; each process proves its own part. What was held before the sharding is replaced."""
    model = network()
    before = gg.freeze(model, "0.*")
    for part in (*model, model):
        fully_shard(part, mesh=init_device_mesh("cpu", (2,)))
    with pytest.raises(FrozenMovedError, match="another tensor was put in its place"):
        before.verify()
    handle = gg.freeze(model, "0.*")
    start = model[0].weight.full_tensor().detach().clone()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(4, 2)).sum().backward()
        optimizer.step()
    handle.verify()
    assert torch.equal(model[0].weight.full_tensor(), start)
    assert model[1].weight.grad is not None


STORIES = [
    frozen_after_the_wrap,
    clipping_after_the_wrap,
    pinned_around_the_wrap,
    values_of_the_first_process_are_taken,
    thawed_after_the_wrap,
    scheduled,
    rows_before_and_after_the_wrap,
    sharded,
]


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    return lived(STORIES, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("story", STORIES, ids=lambda story: story.__name__)
def test_54_freezing_and_distributed_data_parallel(told, story):
    for rank in range(2):
        assert told.get((rank, story.__name__), "not reached") == ""
