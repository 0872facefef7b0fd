"""A thousand ranks in one process: collectives that do nothing are counted, so the cost of a step is known exactly."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore

import gradgate as gg
from gradgate.guard.distributed._ranks import WIDTH, Ranks
from tests.guard.counted import collectives

RANKS = 1000


@pytest.fixture(params=[8, 64, RANKS])
def many(monkeypatch, request):
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=request.param)
    # What the others would have said: the same.
    monkeypatch.setattr(Ranks, "gather", lambda self, value: [value] * self.world_size)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("width", [64, 1024])
def test_a_healthy_step_costs_the_same_collectives_as_with_two(many, width):
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


def sharded_steps(monkeypatch, ranks):
    """Give the bytes of every sum of a healthy and of a bad step, with other ranks that do the same."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    gradient = torch.full((1,), float("nan"))
    dist.reduce_scatter(gradient, [torch.ones(1)] * ranks)
    if gradient.isnan():
        dist.destroy_process_group()
        pytest.skip(f"what a fake process group reduces is any memory, in torch {torch.__version__}")
    monkeypatch.setattr(Ranks, "gather", lambda self, value: [value] * self.world_size)
    seen = []

    def add(self, numbers, *, in_haste=False):
        seen.append(numbers.nbytes)
        numbers.mul_(self.world_size)

    monkeypatch.setattr(Ranks, "add", add)
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(ranks, ranks) for _ in range(3)])
    for layer in model:
        fully_shard(layer)
    fully_shard(model)

    def loss_fn(x):
        if bool(x.isnan().any()):
            raise ValueError("a row is missing")
        return x.square().mean() if len(x) == 0 else model(x.clamp(0, 0)).square().mean()

    guard = gg.Guard(model, patience=100)
    healthy, bad = torch.randn(8, ranks), torch.randn(8, ranks)
    bad[3] = float("nan")
    found = {}
    for kind, batch in (("first", healthy), ("healthy", healthy), ("bad", bad)):
        seen.clear()
        model.zero_grad()
        assert len(guard.backward(batch, loss_fn).dropped) == (kind == "bad")
        found[kind] = list(seen)
    dist.destroy_process_group()
    return found


@pytest.mark.slow
def test_what_steps_in_shards_tell_does_not_depend_on_how_many_ranks_there_are(monkeypatch):
    costs = [sharded_steps(monkeypatch, ranks) for ranks in (8, 64, RANKS)]
    assert costs[0] == costs[1] == costs[2]
    units, end = 3, 8 * (WIDTH + 6)
    announced = 8 * (2 * units + 2)
    assert costs[0]["healthy"] == [end]
    # Each unit is gathered on the way forward and on the way back, and reduced; one more ends the step.
    assert costs[0]["first"].count(announced) == len(costs[0]["first"]) - 1 == 3 * units + 1
    assert set(costs[0]["bad"]) == {announced, end}
    assert costs[0]["bad"].count(end) == 2
