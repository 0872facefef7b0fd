"""A training with random faults on random ranks, and the oracle: one process that never saw the bad samples."""

import random

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradgate as gg
from gradgate.guard.distributed import _replicas
from tests.guard.rank_nets import GRADIENT, IN_BACKWARD, NAN, RAISES, data, good, loss_of, marked, network
from tests.guard.ranks import same_everywhere

FAULTS = (RAISES, NAN, GRADIENT, IN_BACKWARD)


def random_batches(rng, world, seed):
    """Give every rank a batch: healthy, with some bad samples, all bad, short or empty."""
    sizes = [rng.choice((8, 8, 8, 8, 5, 1, 0)) for _ in range(world)]
    sizes[rng.randrange(world)] = 8
    batches = data(sizes, seed=seed)
    for rank, size in enumerate(sizes):
        happening = rng.random()
        if happening < 0.15:
            rows = rng.sample(range(size), min(size, rng.randint(1, 3)))
            marked(batches, **{f"rank_{rank}": {row: rng.choice(FAULTS) for row in rows}})
        elif happening < 0.2:
            marked(batches, **{f"rank_{rank}": dict.fromkeys(range(size), rng.choice(FAULTS))})
    if not len(good(batches)):
        batches[0] = data([8] * world, seed=seed)[0]
    return batches


def trained(rank, steps, seed, accumulate=False):
    """Train under guard, and the oracle beside it; compare as we go."""
    world = dist.get_world_size()
    rng = random.Random(seed)
    oracle = network(12)
    model = DistributedDataParallel(network(12))
    makers = (lambda p: torch.optim.AdamW(p, lr=0.01), lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9))
    optimizers = [makers[seed % 2](m.parameters()) for m in (model, oracle)]
    guard = gg.Guard(model, max_bad=1, patience=10**6)
    dropped = 0
    for turn in range(steps):
        batches = random_batches(rng, world, turn)
        last = not accumulate or turn % 3 == 2
        if last:
            result = guard.backward(batches[rank], loss_of(model))
        else:
            with model.no_sync():
                result = guard.backward(batches[rank], loss_of(model))
        loss = loss_of(oracle)(good(batches))
        loss.backward()
        dropped += sum(int((rows[:, 0] != 0).sum()) for rows in batches)
        torch.testing.assert_close(result.loss.double(), loss.detach(), rtol=1e-5, atol=1e-6)
        assert [i for i, row in enumerate(batches[rank]) if row[0] == 0] == result.kept, f"step {turn}"
        if last:
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            if turn % 20 == 0 or turn == steps - 1:
                same_everywhere(*model.parameters())
    for ours, theirs in zip(model.parameters(), oracle.parameters(), strict=True):
        torch.testing.assert_close(ours.detach(), theirs.detach(), rtol=1e-9, atol=1e-10)
    assert guard.summary().dropped == dropped > 0
    return guard


def two_hundred_steps_with_random_faults(rank):
    trained(rank, steps=200, seed=1)


def steps_with_random_faults_in_many_buffers(rank):
    """The same with gradients that are sent while backward runs, and with accumulation."""
    sizes = _replicas.FIRST_BYTES, _replicas.BYTES
    _replicas.FIRST_BYTES = _replicas.BYTES = 64
    try:
        guard = trained(rank, steps=40, seed=2)
        assert len(guard._agreement._buckets._buckets) > 2
        trained(rank, steps=30, seed=3, accumulate=True)
    finally:
        _replicas.FIRST_BYTES, _replicas.BYTES = sizes


def dropout_draws_as_if_the_bad_had_never_been(rank):
    """Each rank's random state is that of its good samples, whatever was tried in between."""
    torch.manual_seed(rank)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.5), nn.Linear(8, 1)))
    guard = gg.Guard(model)
    x = torch.randn(6, 3)
    x[rank] = float("nan")
    torch.manual_seed(10 + rank)
    guard.backward(x, lambda x: model(x).square().mean())
    after = torch.get_rng_state()
    torch.manual_seed(10 + rank)
    model.module(x[[row for row in range(6) if row != rank]])
    assert torch.equal(after, torch.get_rng_state())


STORIES = [
    two_hundred_steps_with_random_faults,
    steps_with_random_faults_in_many_buffers,
    dropout_draws_as_if_the_bad_had_never_been,
]
