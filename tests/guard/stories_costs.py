"""What a step costs in collectives and bytes, counted on real ranks; the documentation says the same."""

import torch.distributed as dist

import gradgate as gg
from gradgate.guard.distributed import _replicas
from gradgate.guard.distributed._ranks import WIDTH
from tests.guard.counted import collectives
from tests.guard.rank_nets import GRADIENT, NAN, data, loss_of, marked, replica

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


STORIES = [what_a_step_costs, what_a_step_of_many_buffers_costs]
