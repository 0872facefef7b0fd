"""The guard across ranks: a healthy step against plain DDP and plain FSDP2, gloo, one thread for each rank."""

from __future__ import annotations

import atexit
import gc
import os
import tempfile
from functools import partial

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import gradgate as gg
from benchmarks.harness import Growth, Row

WORLDS = {2: "two", 3: "three", 4: "four"}


def mlp(width):
    """Three hidden layers of one width."""
    return nn.Sequential(
        nn.Linear(256, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(),
        nn.Linear(width, 10),
    )  # fmt: skip


def cnn(width):
    """Three convolutions with BatchNorm, on pictures of 16 x 16."""
    return nn.Sequential(
        nn.Unflatten(1, (1, 16, 16)),
        nn.Conv2d(1, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(),
        nn.Conv2d(width, 2 * width, 3, stride=2, padding=1), nn.BatchNorm2d(2 * width), nn.ReLU(),
        nn.Conv2d(2 * width, 2 * width, 3, stride=2), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2 * width, 10),
    )  # fmt: skip


def transformer(width):
    """Four layers of attention over 16 positions."""
    layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True)
    return nn.Sequential(
        nn.Unflatten(1, (16, 16)), nn.Linear(16, width), nn.TransformerEncoder(layer, 4), nn.Flatten(),
        nn.Linear(16 * width, 10),
    )  # fmt: skip


MODELS = {
    "MLP, 0.2 million parameters, steps of a few ms": (mlp, 256, 256),
    "MLP, 2.4 million parameters": (mlp, 1024, 256),
    "CNN with BatchNorm": (cnn, 24, 64),
    "transformer, 0.8 million parameters": (transformer, 128, 32),
    "transformer in shards (FSDP2), 3.2 million parameters": (transformer, 256, 32),
}
SHARDED = "transformer in shards (FSDP2), 3.2 million parameters"


def steps(name, group):
    """Make a plain and a guarded training of one model, as functions that make one step each."""
    make, width, size = MODELS[name]
    made = {}
    batch = torch.randn(size, 256), torch.randint(0, 10, (size,))
    for kind in ("plain", "guarded"):
        torch.manual_seed(0)
        model = (
            in_shards(make(width), group)
            if name == SHARDED
            else DistributedDataParallel(make(width), process_group=group)
        )
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        guard = gg.Guard(model) if kind == "guarded" else None
        made[kind] = partial(step, model, optimizer, guard, batch)
        if name == SHARDED:
            made[f"{kind}, bytes"] = partial(bytes_at_most, made[kind], model)
    return made


def in_shards(model, group):
    """Shard a transformer, every layer for itself."""
    mesh = DeviceMesh.from_group(group, "cpu")
    for layer in model[2].layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def bytes_at_most(make_step, model):
    """Make a step, and return the most memory that all tensors had together, measured around every layer."""
    seen = []

    def look(*_):
        things = [t for t in gc.get_objects() if type(t) in (torch.Tensor, nn.Parameter) and t.is_cpu]
        storages = {storage.data_ptr(): storage.nbytes() for storage in (t.untyped_storage() for t in things)}
        seen.append(sum(storages.values()))

    layers = model[2].layers
    handles = [
        hook(look)
        for layer in layers
        for hook in (layer.register_forward_hook, layer.linear1.register_full_backward_hook)
    ]
    make_step()
    for handle in handles:
        handle.remove()
    return max(seen)


def step(model, optimizer, guard, batch):
    """Make one training step."""

    def loss_fn(batch):
        return F.cross_entropy(model(batch[0]), batch[1])

    optimizer.zero_grad()
    if guard is None:
        loss_fn(batch).backward()
    else:
        guard.backward(batch, loss_fn)
    optimizer.step()


def join(rank, store):
    """Join the process group, and return a group of the first ranks for each number of them."""
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", f"file://{store}", rank=rank, world_size=max(WORLDS))
    return {count: dist.new_group(range(count)) for count in WORLDS}


def other_rank(rank, store, orders):
    """Run as another rank: make the steps that the first one orders."""
    groups = join(rank, store)
    made = {}
    while True:
        name, count, kind = orders.recv()
        if (name, count) not in made:
            made[name, count] = steps(name, groups[count])
        if kind:
            made[name, count][kind]()


class OtherRanks:
    """This process as the first rank, and the others, started when the first row runs."""

    orders = ()
    groups = None
    made = {}  # noqa: RUF012

    @classmethod
    def start(cls):
        """Start the other ranks, once."""
        if cls.groups is None:
            store = f"{tempfile.mkdtemp()}/store"
            context = mp.get_context("spawn")
            for rank in range(1, max(WORLDS)):
                ours, theirs = context.Pipe()
                process = context.Process(target=other_rank, args=(rank, store, theirs), daemon=True)
                process.start()
                atexit.register(process.kill)
                cls.orders = (*cls.orders, ours)
            cls.groups = join(0, store)

    @classmethod
    def send(cls, name, count, kind):
        """Send an order to the first ranks."""
        for orders in cls.orders[: count - 1]:
            orders.send((name, count, kind))

    @classmethod
    def run(cls, name, count, kind, made):
        """Make a step on each rank."""
        cls.send(name, count, kind)
        return made[kind]()


def candidates(name, count, what=""):
    """Return the two trainings of a model."""
    OtherRanks.start()
    if (name, count) not in OtherRanks.made:
        OtherRanks.send(name, count, None)
        OtherRanks.made[name, count] = steps(name, OtherRanks.groups[count])
    made = OtherRanks.made[name, count]
    return {kind: partial(OtherRanks.run, name, count, kind + what, made) for kind in ("plain", "guarded")}


def row(name, count):
    """Measure a healthy step of some ranks; the goal is one for two ranks, each with a core of its own.

    A step is as slow as the slower rank, so single rounds differ by a tenth: the goal of 3 % needs many of them.
    """
    goal = None if "few ms" in name or count > 2 else 1.03
    return Row(
        "ranks", f"healthy step of {WORLDS[count]} ranks, {name}", partial(candidates, name, count), "guarded", "plain",
        at_most=goal, rounds=41, seconds=6.0 if goal is None else 20.0,
        growth=Growth("a healthy step of the guard across ranks, CNN", "ranks", count) if "CNN" in name else None,
    )  # fmt: skip


def memory_row():
    """Measure the memory of a healthy step in shards."""
    return Row(
        "ranks", f"most memory in a healthy step of two ranks, {SHARDED}", partial(candidates, SHARDED, 2, ", bytes"),
        "guarded", "plain", at_most=1.05, counts=True, rounds=3,
    )  # fmt: skip


ROWS = (
    [row(name, 2) for name in MODELS]
    + [memory_row()]
    + [row("CNN with BatchNorm", count) for count in WORLDS if count > 2]
)
