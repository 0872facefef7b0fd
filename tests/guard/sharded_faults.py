"""A training in shards with random faults in random blocks on random ranks, and the oracle: one process."""

import gc
import os
import random
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

import gradgate as gg
from gradgate.errors import ArgumentTypeError, ArgumentValueError, OtherRankError
from tests.guard.rank_nets import GRADIENT, IN_BACKWARD, NAN, RAISES, RaisesInBackward, data, marked, raised_by, whole
from tests.guard.ranks import same_everywhere

IN_LOSS = 7.0
BLOCKS = 3
# A mark is a kind of fault; its fraction says in which block.
FAULTS = [kind + block / 8 for kind in (RAISES, NAN, GRADIENT, IN_BACKWARD) for block in range(BLOCKS)] + [IN_LOSS]


class Block(nn.Module):
    """One part of the network, with a trap for marked rows between its two layers."""

    def __init__(self, number, width):
        super().__init__()
        self.place = number / 8
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x, mark):
        here = torch.where(mark % 1 == self.place, mark.floor(), torch.zeros_like(mark))
        hidden = self.up(x).tanh()
        if bool((here == RAISES).any()):
            raise ValueError("a row is out of range")
        hidden = hidden + torch.where(here == NAN, float("nan"), 0.0)[:, None].to(hidden)
        zero = torch.where(here == GRADIENT, 0.0, 1.0)[:, None].to(hidden)
        hidden = hidden * (zero * (1 + 0 * hidden)).sqrt()
        return x + RaisesInBackward.apply(self.down(hidden), here)


class Tower(nn.Module):
    """Blocks between a layer and a head; with activation checkpointing, or without."""

    def __init__(self, width=6, checkpointed=False):
        super().__init__()
        self.front, self.head = nn.Linear(3, width), nn.Linear(width, 1)
        self.blocks = nn.ModuleList(Block(number, width) for number in range(BLOCKS))
        self.checkpointed = checkpointed

    def forward(self, x):
        mark, hidden = x[:, 0].clone(), self.front(x[:, 1:])
        for block in self.blocks:
            hidden = checkpoint(block, hidden, mark, use_reentrant=False) if self.checkpointed else block(hidden, mark)
        return self.head(hidden)


def tower(**options):
    torch.manual_seed(1)
    return Tower(**options).double()


def sharded_tower(checkpointed=False, compiled=False, mesh=None, **options):
    model = tower(checkpointed=checkpointed)
    mesh = mesh or init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:
        if compiled:
            block.compile(backend="eager")
        fully_shard(block, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def tower_loss(model):
    def loss_fn(x):
        out = model(x)
        if bool((x[:, 0] == IN_LOSS).any()):
            raise IndexError("no such label")
        return out.double().square().mean()

    return loss_fn


def random_batches(rng, world, seed):
    """Give every rank a batch: healthy, with some bad samples, all bad, short or empty."""
    sizes = [rng.choice((6, 6, 6, 6, 5, 1, 0)) for _ in range(world)]
    sizes[rng.randrange(world)] = 6
    batches = data(sizes, seed=seed)
    for rank, size in enumerate(sizes):
        happening = rng.random()
        if happening < 0.2:
            rows = rng.sample(range(size), min(size, rng.randint(1, 2)))
            marked(batches, **{f"rank_{rank}": {row: rng.choice(FAULTS) for row in rows}})
        elif happening < 0.25:
            marked(batches, **{f"rank_{rank}": dict.fromkeys(range(size), rng.choice(FAULTS))})
    if not any(len(rows) and bool((rows[:, 0] == 0).any()) for rows in batches):
        batches[0] = data([6] * world, seed=seed)[0]
    return batches


def train_in_shards(rank, steps, seed, *, accumulate=False, tolerance=1e-9, keep_whole=False, **options):
    """Train under guard, and the oracle beside it; compare as we go."""
    world, rng = dist.get_world_size(), random.Random(seed)
    model, oracle = sharded_tower(**options), tower()
    if keep_whole:
        model.set_reshard_after_backward(False)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.01) for m in (model, oracle)]
    seen = []
    sink = type("Sink", (), {"record_many": lambda self, incidents, payloads=None: seen.extend(incidents)})()
    guard = gg.Guard(model, max_bad=1, patience=10**6, sink=sink if rank == 0 else None)
    bad = []
    for turn in range(steps):
        batches = random_batches(rng, world, turn)
        last = not accumulate or turn % 3 == 2
        model.set_requires_gradient_sync(last)
        ids = [f"{turn}/{rank}/{row}" for row in range(len(batches[rank]))]
        result = guard.backward(batches[rank], tower_loss(model), ids=ids)
        rows = torch.cat(batches)
        loss = tower_loss(oracle)(rows[rows[:, 0] == 0])
        loss.backward()
        torch.testing.assert_close(result.loss.double(), loss.detach(), rtol=max(tolerance, 1e-6), atol=1e-6)
        assert [row for row, line in enumerate(batches[rank]) if line[0] == 0] == result.kept, f"step {turn}"
        bad += [f"{turn}/{of}/{row}" for of, part in enumerate(batches) for row, x in enumerate(part) if x[0] != 0]
        if last:
            for ours, theirs in zip(model.parameters(), oracle.parameters(), strict=True):
                torch.testing.assert_close(whole(ours.grad), theirs.grad, rtol=100 * tolerance, atol=tolerance)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            if turn % 10 == 0:
                same_everywhere(*(whole(p) for p in model.parameters()))
    assert guard.summary().dropped == len(bad) > 0
    if rank == 0:
        assert sorted(incident.sample_id for incident in seen) == sorted(bad)


STEPS = int(os.environ.get("GRADGATE_STEPS", "12"))


def shards_with_random_faults(rank):
    train_in_shards(rank, steps=STEPS, seed=1)


def shards_that_recompute_activations(rank):
    train_in_shards(rank, steps=STEPS // 2, seed=2, checkpointed=True)


def shards_with_compiled_blocks(rank):
    """Each block compiled and sharded; a search runs them as they were written."""
    train_in_shards(rank, steps=STEPS // 2, seed=6, compiled=True)


def shards_of_two_precisions(rank):
    policy = MixedPrecisionPolicy(param_dtype=torch.float32, reduce_dtype=torch.float64, cast_forward_inputs=True)
    train_in_shards(rank, steps=STEPS // 2, seed=3, tolerance=2e-5, mp_policy=policy)


def shards_that_accumulate_and_stay_whole(rank):
    train_in_shards(
        rank, steps=STEPS - STEPS % 3, seed=4, accumulate=True, keep_whole=True, reshard_after_forward=False
    )


def shards_in_copies(rank):
    """HSDP: two copies of the model, each in two shards."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "shards"))
    train_in_shards(rank, steps=STEPS // 2, seed=5, mesh=mesh)


def shards_of_a_model_that_changes_its_order(rank):
    """The order of units is another one in every step: it is announced, and no rank waits for what never comes."""
    model, oracle = sharded_tower(), tower()
    order = list(model.blocks)

    def loss_fn(x):
        hidden = model.front(x[:, 1:])
        for block in order:
            hidden = block(hidden, x[:, 0])
        return model.head(hidden).square().mean()

    guard = gg.Guard(model)
    model.forward = lambda x: loss_fn(x)
    for turn in range(6):
        order.reverse()
        batches = data([4] * dist.get_world_size(), seed=turn)
        if turn > 2:
            marked(batches, rank_1={turn - 3: RAISES + 1 / 8})
        model.zero_grad()
        result = guard.backward(batches[rank], model)
        assert len(result.dropped) == (turn > 2 and rank == 1)
        rows = torch.cat(batches)
        rows = rows[rows[:, 0] == 0]
        hidden = oracle.front(rows[:, 1:])
        blocks = list(oracle.blocks)
        for block in blocks[::-1] if turn % 2 == 0 else blocks:
            hidden = block(hidden, rows[:, 0])
        oracle.zero_grad()
        oracle.head(hidden).square().mean().backward()
        for ours, theirs in zip(model.parameters(), oracle.parameters(), strict=True):
            torch.testing.assert_close(whole(ours.grad), theirs.grad)


def shards_used_twice_prefetched_and_with_buffers(rank):
    """A unit that runs twice, explicit prefetching, BatchNorm, a frozen block, a total and its count."""
    torch.manual_seed(1)
    make = lambda: [nn.Linear(3, 6).double(), nn.BatchNorm1d(6).double(), *tower().blocks]  # noqa: E731
    nets = []
    for sharded in (True, False):
        torch.manual_seed(1)
        parts = nn.Sequential(*make())
        if sharded:
            for part in parts:
                fully_shard(part)
            fully_shard(parts)
            parts[2].set_modules_to_forward_prefetch([parts[3]])
            parts[4].set_modules_to_backward_prefetch([parts[3], parts[2]])
        parts[3].requires_grad_(False)
        parts.forward = partial(_twice, parts)
        nets.append(parts)
    model, oracle = nets
    guard = gg.Guard(model)
    for turn in range(4):
        batches = marked(data([5, 4], seed=turn), **{f"rank_{turn % 2}": {2: FAULTS[5 * turn % 12]}} if turn else {})
        before = [buffer.clone() for buffer in model.buffers()]
        model.zero_grad()
        oracle.zero_grad()
        guard.backward(batches[rank], lambda x: (model(x).sum(), len(x)))
        guard.finish()
        kept = [rows[rows[:, 0] == 0] for rows in batches]
        for of, rows in enumerate(kept):  # each rank's batch has statistics of its own
            for mine, theirs in zip(oracle.buffers(), before, strict=True):
                mine.copy_(theirs)
            (oracle(rows).sum() / sum(map(len, kept))).backward()
            if of == rank:
                after = [buffer.clone() for buffer in oracle.buffers()]
        for ours, theirs in zip(model.parameters(), oracle.parameters(), strict=True):
            assert (ours.grad is None) == (theirs.grad is None)
            if ours.grad is not None:
                torch.testing.assert_close(whole(ours.grad), theirs.grad)
        assert all(map(torch.equal, model.buffers(), after))


def _twice(parts, x):
    hidden = parts[1](parts[0](x[:, 1:]))
    for place in (2, 3, 4, 2):
        hidden = parts[place](hidden, x[:, 0])
    return hidden.square()


def shards_and_what_guard_forward_raises(rank):
    """Every sample of one rank fails: that rank raises, the other gets its outputs, and both go on."""
    model = sharded_tower()
    guard = gg.Guard(model)
    batches = marked(data([4, 4]), rank_1=dict.fromkeys(range(4), RAISES))
    error = raised_by(lambda: guard.forward(batches[rank], model))
    assert type(error) is (ValueError if rank else type(None))
    guard.backward(data([4, 4])[rank], tower_loss(model))
    oracle = tower()
    tower_loss(oracle)(torch.cat(data([4, 4]))).backward()
    for ours, theirs in zip(model.parameters(), oracle.parameters(), strict=True):
        torch.testing.assert_close(whole(ours.grad), theirs.grad)


def a_fault_in_a_new_order_is_raised(rank):
    """A rank that raises in an order of units that it has never seen to its end cannot know what the others do."""
    model = sharded_tower()
    blocks = list(model.blocks)

    def forward(x):
        hidden = model.front(x[:, 1:])
        for block in blocks:
            hidden = block(hidden, x[:, 0])
        return model.head(hidden).square().mean()

    model.forward = forward
    guard = gg.Guard(model)
    guard.backward(data([4, 4])[rank], model)
    blocks.reverse()
    batches = marked(data([4, 4]), rank_0={0: RAISES + 1 / 8}, rank_1={0: RAISES + 1 / 8})  # both, so that none waits
    error = raised_by(lambda: guard.backward(batches[rank], model))
    assert type(error) is OtherRankError
    assert type(error.__cause__) is ValueError
    assert f"rank {rank} raised in a step that gathers its parameters in another order" in str(error)
    blocks.reverse()
    guard.backward(data([4, 4])[rank], model)


def shards_whose_loss_writes_into_the_batch(rank):
    model = sharded_tower()
    guard = gg.Guard(model)
    loss_fn = tower_loss(model)

    def writes(x):
        x[:, 1:].mul_(2)
        return loss_fn(x)

    error = raised_by(lambda: guard.backward(marked(data([4, 4]), rank_1={2: RAISES})[rank], writes))
    assert type(error) is (ArgumentValueError if rank == 0 else ValueError)
    assert "`loss_fn` has written into the batch of this one" in str(error) or rank == 1
    guard.backward(data([4, 4])[rank], loss_fn)


def settings_of_shards_that_are_refused(rank):
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("copies", "shards"))
    model = fully_shard(tower(), mesh=mesh)
    guard = gg.Guard(model)
    model.set_requires_all_reduce(False)
    error = raised_by(lambda: guard.backward(data([4, 4])[rank], tower_loss(model)))
    assert type(error) is ArgumentTypeError
    assert "the model has set_requires_all_reduce(False)" in str(error)


def bytes_in_tensors():
    """Add up the memory of all tensors that are alive."""
    storages = {}
    for thing in gc.get_objects():
        if type(thing) in (torch.Tensor, nn.Parameter) and thing.layout is torch.strided and thing.is_cpu:
            storage = thing.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def the_memory_of_a_healthy_step_in_shards(rank):
    """The same as FSDP2's own, measured around every block on the way forward and back."""
    peaks = {}
    for kind in ("plain", "guarded"):
        torch.manual_seed(0)
        model = nn.Sequential(*[nn.Sequential(nn.Linear(128, 256), nn.ReLU(), nn.Linear(256, 128)) for _ in range(6)])
        size = sum(p.nbytes for p in model.parameters())
        for block in model:
            fully_shard(block)
        fully_shard(model)
        guard = gg.Guard(model) if kind == "guarded" else None
        seen = []

        def look(*_, seen=seen):
            seen.append(bytes_in_tensors())

        x = torch.randn(4, 128)
        for turn in range(3):
            model.zero_grad()
            if turn == 2:
                gc.collect()
                for block in model:
                    block[1].register_forward_hook(look)
                    block[1].register_full_backward_hook(look)
            loss_fn = lambda x, model=model: model(x).square().mean()  # noqa: E731
            loss_fn(x).backward() if guard is None else guard.backward(x, loss_fn)
        assert len(seen) == 12
        peaks[kind] = max(seen)
        del model, guard
        gc.collect()
    assert peaks["guarded"] <= 1.05 * peaks["plain"], peaks
    assert peaks["guarded"] < 2 * size, (peaks, size)  # whole parameters and gradients would be more


STORIES = [
    shards_with_random_faults,
    shards_that_recompute_activations,
    shards_with_compiled_blocks,
    shards_of_two_precisions,
    shards_that_accumulate_and_stay_whole,
    shards_of_a_model_that_changes_its_order,
    shards_used_twice_prefetched_and_with_buffers,
    shards_and_what_guard_forward_raises,
    a_fault_in_a_new_order_is_raised,
    shards_whose_loss_writes_into_the_batch,
    settings_of_shards_that_are_refused,
    the_memory_of_a_healthy_step_in_shards,
]
