"""A thousand ranks in one process: collectives that do nothing are counted, so the cost of a step is known exactly."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore

import gradgate as gg
from gradgate.guard.distributed._ranks import WIDTH, Ranks
from tests.guard.counted import collectives

RANKS = 1000


@pytest.fixture
def thousand(monkeypatch):
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    # What the others would have said: the same.
    monkeypatch.setattr(Ranks, "gather", lambda self, value: [value] * self.world_size)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("width", [64, 1024])
def test_a_healthy_step_costs_the_same_collectives_as_with_two(thousand, width):
    model = DistributedDataParallel(nn.Sequential(*[nn.Linear(width, width) for _ in range(6)]))
    guard = gg.Guard(model)
    batch = torch.randn(8, width)
    guard.backward(batch, lambda x: model(x).square().mean())
    with collectives() as seen:
        guard.backward(batch, lambda x: model(x).square().mean())
    gradients = 4 * 6 * (width * width + width)
    assert {name for name, _ in seen} == {"all_reduce"}
    assert sum(size for _, size in seen) == gradients + 4 * (WIDTH + 12)
    assert len(seen) == (1 if width == 64 else 2)  # 25 MiB to a buffer, as in DDP, after a first one of 1 MiB
