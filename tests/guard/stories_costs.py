"""What a step costs in collectives and bytes, counted on real ranks; the documentation says the same."""

import re
import time
import warnings
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

import gradgate as gg
from gradgate.guard.distributed import _replicas
from gradgate.guard.distributed._ranks import WIDTH
from tests.guard.counted import collectives
from tests.guard.rank_nets import GRADIENT, NAN, data, loss_of, marked, network, replica

PARAMETERS, BYTES = 4, 8 * (5 * 3 + 5 + 5 + 1)  # of the network, in double precision


def what_a_step_costs(rank):
    """One all-reduce, as DDP itself needs; 12 numbers and one for each parameter travel with it."""
    sizes = [4] * dist.get_world_size()
    model = replica()
    guard = gg.Guard(model)
    guard.backward(data(sizes)[rank], loss_of(model))  # the first one also makes sure that all have the same model
    extra = 8 * (WIDTH + PARAMETERS)
    with collectives() as healthy:
        guard.backward(data(sizes)[rank], loss_of(model))
    assert healthy == [("all_reduce", BYTES + extra)]
    model.zero_grad()
    with collectives() as bad:
        guard.backward(marked(data(sizes), rank_1={0: NAN})[rank], loss_of(model))
    assert bad == [*healthy, ("all_gather_object", 0)]
    with collectives() as accumulated:  # other counts than expected, and gradients that are there: once more
        guard.backward(data(sizes)[rank], loss_of(model))
    assert accumulated == [*healthy, *healthy]
    with model.no_sync(), collectives() as local:
        guard.backward(data(sizes)[rank], loss_of(model))
    assert local == [("all_reduce", 8 * WIDTH)]


def what_a_step_of_many_buffers_costs(rank):
    """A buffer is sent once on a healthy step; on a bad one all are sent once more."""
    sizes = [4] * dist.get_world_size()
    before = _replicas.FIRST_BYTES, _replicas.BYTES
    _replicas.FIRST_BYTES = _replicas.BYTES = 16
    try:
        model = replica()
        guard = gg.Guard(model)
        guard.backward(data(sizes)[rank], loss_of(model))
        model.zero_grad()
        with collectives() as healthy:
            guard.backward(data(sizes)[rank], loss_of(model))
        model.zero_grad()
        with collectives() as bad:
            guard.backward(marked(data(sizes), rank_1={0: GRADIENT})[rank], loss_of(model))
    finally:
        _replicas.FIRST_BYTES, _replicas.BYTES = before
    count = len(guard._agreement._buckets._buckets)
    assert count == 3
    assert [name for name, _ in healthy] == ["all_reduce"] * count
    assert sum(size for _, size in healthy) == BYTES + 8 * (WIDTH + PARAMETERS)
    assert [name for name, _ in bad] == ["all_reduce"] * 2 * count + ["all_gather_object"]


def what_a_step_in_shards_costs(rank):
    """The same sums as of 8, 64 and 1,000 simulated ranks: one in a healthy step, one before each collective else."""
    world, units = dist.get_world_size(), 2
    model = network()
    fully_shard(model.front)
    fully_shard(model)
    guard = gg.Guard(model)
    end, announced = ("all_reduce", 8 * (WIDTH + PARAMETERS)), ("all_reduce", 8 * (2 * units + 2))
    seen = {}
    for kind in ("first", "healthy", "bad"):
        batches = marked(data([4] * world), rank_1={0: NAN} if kind == "bad" else {})
        model.zero_grad()
        with collectives() as seen[kind]:
            guard.backward(batches[rank], loss_of(model))
    assert seen["healthy"] == [end]
    # Each unit is gathered before forward and reduced after backward, the inner one gathered again; one more ends it.
    sums = [one for one in seen["first"] if one[0] == "all_reduce"]
    assert sums == [announced] * (len(sums) - 1) + [end]
    assert 2 * units + 1 <= len(sums) - 1 <= 3 * units + 1
    bad = seen["bad"]
    assert [one for one in bad if one[0] == "all_reduce" and one != announced] == [end, end]
    assert [one for one in bad if one[0] != "all_reduce"] == [("all_gather_object", 0)]  # the incidents


def warnings_of(guard, model, rank, steps, seconds=0.0):
    """Return what healthy steps of a slow loss function warn of."""

    def slow(x):
        time.sleep(seconds)
        return loss_of(model)(x)

    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for _ in range(steps):
            guard.backward(data([4] * dist.get_world_size())[rank], slow)
    return [str(one.message) for one in seen if issubclass(one.category, gg.errors.GradgateWarning)]


def a_search_that_would_exceed_the_timeout_is_announced(rank):
    """DDP: the others wait for a whole search. FSDP2: only from one gather to the next."""
    model = replica(process_group=dist.new_group(timeout=timedelta(seconds=200)))
    guard = gg.Guard(model)
    assert guard._agreement.timeout == 200
    guard._agreement.timeout = 2.0
    assert warnings_of(guard, model, rank, steps=1, seconds=0.2) == []  # it may have compiled the model
    (text,) = warnings_of(guard, model, rank, steps=2, seconds=0.2)  # once
    assert text.startswith(f"Guard: a search for bad samples on rank {rank} may keep the other ranks waiting for ")
    wait, one = map(float, re.search(r"waiting for (\S+) s \(12 passes of (\S+) s\), ", text).groups())
    assert wait >= 2.4  # the sleep, and what a loaded machine adds
    assert one >= 0.2
    assert "and the timeout of the process group is 2 s.\nWhy: they wait in a collective, " in text
    assert "\nFix: dist.init_process_group(..., timeout=timedelta(seconds=" in text

    model = fully_shard(network())
    guard = gg.Guard(model)
    assert guard._agreement.timeout > 20  # that of the default group
    assert warnings_of(guard, model, rank, steps=2) == []
    guard._agreement.timeout = 0.1
    (text,) = warnings_of(guard, model, rank, steps=2, seconds=0.2)
    assert " s (its longest time between two gathers), and the timeout of the process group is 0.1 s.\nWhy: " in text


STORIES = [
    what_a_step_costs,
    what_a_step_of_many_buffers_costs,
    what_a_step_in_shards_costs,
    a_search_that_would_exceed_the_timeout_is_announced,
]
