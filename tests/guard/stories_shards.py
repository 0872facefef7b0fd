"""Two ranks with FSDP2: a fault in the middle of a forward leaves nobody inside an all-gather."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import gradgate as gg
from gradgate.errors import OtherRankError
from tests.guard.rank_nets import (
    CODE,
    GRADIENT,
    IN_BACKWARD,
    NAN,
    RAISES,
    check_union,
    data,
    good,
    loss_of,
    marked,
    network,
    raised_by,
    shared_folder,
    whole,
)
from tests.guard.stories_models import branches


def sharded(**options):
    """Give a model in shards, and one of its parts in shards of its own."""
    model = network()
    mesh = init_device_mesh("cpu", (2,))
    fully_shard(model.front, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def shards_with_unequal_counts(rank):
    model = sharded()
    guard = gg.Guard(model)
    for turn in range(3):
        model.zero_grad()
        batches = data([2 + turn, 5], seed=turn)
        result = guard.backward(batches[rank], loss_of(model))
        torch.testing.assert_close(result.loss, check_union(model, torch.cat(batches)))


def shards_with_a_fault_on_one_rank(rank):
    for fault in (RAISES, NAN, GRADIENT, IN_BACKWARD):
        for guilty in (0, 1):
            model = sharded()
            guard = gg.Guard(model)
            batches = marked(data([4, 5]), **{f"rank_{guilty}": {2: fault}})
            for _ in range(2):
                model.zero_grad()
                result = guard.backward(batches[rank], loss_of(model))
                assert len(result.dropped) == (rank == guilty)
                torch.testing.assert_close(result.loss, check_union(model, good(batches)))


def shards_without_a_good_sample(rank):
    model = sharded()
    guard = gg.Guard(model)
    batches = marked(data([4, 4]), rank_0=dict.fromkeys(range(4), RAISES))
    assert guard.backward(batches[rank], loss_of(model)).kept == [[], [0, 1, 2, 3]][rank]
    check_union(model, good(batches))
    both = marked(data([4, 4]), rank_0=dict.fromkeys(range(4), RAISES), rank_1=dict.fromkeys(range(4), RAISES))
    assert type(raised_by(lambda: guard.backward(both[rank], loss_of(model)))) is ValueError
    few = marked(data([4, 4]), rank_0={0: NAN})
    error = raised_by(lambda: gg.Guard(model, max_bad=0.1).backward(few[rank], loss_of(model)))
    assert type(error) is gg.TooManyBadSamples
    assert [one.rank for one in error.incidents] == [0]
    check_union(model, good(batches))  # neither has left a trace


def shards_and_what_one_rank_raises(rank):
    model = sharded()
    guard = gg.Guard(model)
    batches = marked(data([4, 4]), rank_1={0: CODE})
    error = raised_by(lambda: guard.backward(batches[rank], loss_of(model)))
    assert type(error) is (OtherRankError if rank == 0 else KeyboardInterrupt)
    guard.backward(data([4, 4])[rank], loss_of(model))
    check_union(model, torch.cat(data([4, 4])))


def shards_accumulate(rank):
    model = sharded()
    guard = gg.Guard(model)
    windows = [
        marked(data([4, 2], seed=5), rank_0={1: NAN}),
        marked(data([5, 4], seed=6), rank_1=dict.fromkeys(range(4), RAISES)),
        marked(data([5, 4], seed=7), rank_1={0: GRADIENT}),
    ]
    for synchronous in (False, True):
        model.zero_grad()
        for number, batches in enumerate(windows):
            model.set_requires_gradient_sync(synchronous or number == 2)
            guard.backward(batches[rank], loss_of(model))
        oracle = network()
        for batches in windows:
            loss_of(oracle)(good(batches)).backward()
        for ours, theirs in zip(model.parameters(), oracle.parameters(), strict=True):
            torch.testing.assert_close(whole(ours.grad), theirs.grad)


def shards_train_as_one_process(rank):
    """Twenty steps of AdamW with a fault in each, and plain steps of FSDP in between."""
    model, oracle = sharded(), network()
    guard = gg.Guard(model, patience=100)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.05) for m in (model, oracle)]
    for turn in range(20):
        batches = marked(data([4, 4], seed=turn), **{f"rank_{turn % 2}": {turn % 4: (RAISES, NAN, GRADIENT)[turn % 3]}})
        for optimizer in optimizers:
            optimizer.zero_grad()
        if turn % 5 == 4:
            batches = data([4, 4], seed=turn)
            loss_of(model)(batches[rank]).backward()
        else:
            guard.backward(batches[rank], loss_of(model))
        loss_of(oracle)(good(batches)).backward()
        for optimizer in optimizers:
            optimizer.step()
    for ours, theirs in zip(model.parameters(), oracle.parameters(), strict=True):
        torch.testing.assert_close(whole(ours).detach(), theirs.detach())


def shards_in_mixed_precision(rank):
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    torch.manual_seed(0)
    model = fully_shard(nn.Linear(3, 1), mesh=init_device_mesh("cpu", (2,)), mp_policy=policy)
    x = torch.randn(2, 4, 3, generator=torch.Generator().manual_seed(0))
    x[1, 0] = float("nan")
    result = gg.Guard(model).backward(x[rank], lambda x: model(x).float().square().mean())
    assert len(result.dropped) == rank
    found = whole(model.weight.grad)
    assert found.dtype == torch.float32
    twin = nn.Linear(3, 1)
    twin.load_state_dict({name: whole(value) for name, value in model.state_dict().items()})
    twin(torch.cat([x[0], x[1, 1:]])).square().mean().backward()
    torch.testing.assert_close(found, twin.weight.grad, rtol=0.05, atol=0.05)


def shards_whose_parameters_only_one_rank_uses(rank):
    model, twin = fully_shard(branches(), mesh=init_device_mesh("cpu", (2,))), branches()
    x = data([4, 2])
    gg.Guard(model).backward(x[rank], lambda x: model(x, rank).square().mean())
    ((twin(x[0], 0).square().sum() + twin(x[1], 1).square().sum()) / 6).backward()
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        assert (ours.grad is None) == (theirs.grad is None)
        if ours.grad is not None:
            torch.testing.assert_close(whole(ours.grad), theirs.grad)


def shards_are_looked_at_without_a_backward(rank):
    model = sharded()
    batch = marked(data([4, 4]), rank_1={1: NAN})[rank]
    out, keep = gg.Guard(model).forward(batch, model)
    assert keep.tolist() == [True, rank == 0, True, True]
    assert bool(out[keep].isfinite().all())
    gg.Guard(model).backward(data([4, 4])[rank], loss_of(model))
    check_union(model, torch.cat(data([4, 4])))


def shards_on_a_mesh_of_two_dimensions(rank):
    model = fully_shard(network(), mesh=init_device_mesh("cpu", (2, 1), mesh_dim_names=("copies", "shards")))
    guard = gg.Guard(model)
    assert guard._agreement.world_size == dist.get_world_size()
    batches = marked(data([4, 5]), rank_1={2: GRADIENT})
    guard.backward(batches[rank], loss_of(model))
    check_union(model, good(batches))


def shards_give_no_snapshot(rank):
    folder = shared_folder(rank)
    sink = gg.Ledger(f"{folder}/run.ledger", snapshot=True) if rank == 0 else None
    model = sharded()
    guard = gg.Guard(model, ledger=sink)
    batches = marked(data([4, 4]), rank_0={1: NAN}, rank_1={2: RAISES})
    guard.backward(batches[rank], loss_of(model))
    check_union(model, good(batches))
    if rank == 0:
        assert [sink.snapshot_of(one.id) for one in sink.incidents()] == [None, None]


def shards_split_by_tensor_parallelism_are_refused(rank):
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("data", "tensor"))
    model = parallelize_module(nn.Sequential(nn.Linear(4, 4)), mesh["tensor"], {"0": ColwiseParallel()})
    error = raised_by(lambda: gg.Guard(fully_shard(model, mesh=mesh["data"])))
    assert type(error) is gg.errors.ArgumentTypeError
    assert "split by tensor parallelism" in str(error)


STORIES = [
    shards_with_unequal_counts,
    shards_with_a_fault_on_one_rank,
    shards_without_a_good_sample,
    shards_and_what_one_rank_raises,
    shards_accumulate,
    shards_train_as_one_process,
    shards_in_mixed_precision,
    shards_whose_parameters_only_one_rank_uses,
    shards_are_looked_at_without_a_backward,
    shards_on_a_mesh_of_two_dimensions,
    shards_give_no_snapshot,
    shards_split_by_tensor_parallelism_are_refused,
]
