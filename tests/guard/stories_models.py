"""Two ranks: models of all kinds, what DistributedDataParallel can be told, and what is refused."""

import itertools

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

import gradgate as gg
from gradgate.guard.distributed import _replicas
from tests.guard.rank_nets import (
    GRADIENT,
    NAN,
    RAISES,
    check_union,
    data,
    good,
    loss_of,
    marked,
    network,
    raised_by,
    replica,
)
from tests.guard.ranks import needs, same_everywhere


class Branches(nn.Module):
    """Each rank uses a branch of its own, both use one, nobody uses the last."""

    def __init__(self):
        super().__init__()
        self.common = nn.Linear(3, 2)
        self.own = nn.ModuleList([nn.Linear(2, 1), nn.Linear(2, 1)])
        self.unused = nn.Linear(2, 1)

    def forward(self, x, branch):
        return self.own[branch](self.common(x[:, 1:]))


def branches():
    torch.manual_seed(2)
    return Branches().double()


def parameters_that_only_some_ranks_use(rank):
    for unused in (False, True):
        model = DistributedDataParallel(branches(), find_unused_parameters=unused)
        guard = gg.Guard(model)
        for turn in range(3):
            model.zero_grad()
            batches = data([4, 2], seed=turn)
            if turn == 1:
                marked(batches, rank_0={0: NAN})
                batches[0][0, 1] = float("nan")
            guard.backward(batches[rank], lambda x: model(x, rank).square().mean())  # noqa: B023
            oracle = branches()
            parts = [rows[rows[:, 0] == 0] for rows in batches]
            losses = [oracle(rows, branch).square().sum() for branch, rows in enumerate(parts)]
            (sum(losses) / sum(map(len, parts))).backward()
            for ours, theirs in zip(model.parameters(), oracle.parameters(), strict=True):
                assert (ours.grad is None) == (theirs.grad is None)  # nobody's parameter stays without
                if ours.grad is not None:
                    torch.testing.assert_close(ours.grad, theirs.grad)


def frozen_and_thawed_on_the_way(rank):
    model = replica()
    guard = gg.Guard(model)
    for frozen in (False, True, False):
        model.module.front.requires_grad_(not frozen)
        model.zero_grad()
        batches = marked(data([4, 4]), rank_0={1: RAISES})
        guard.backward(batches[rank], loss_of(model))
        assert (model.module.front[0].weight.grad is None) == frozen
        if not frozen:
            check_union(model.module, good(batches))


def static_graphs(rank):
    model = replica(static_graph=True)
    guard = gg.Guard(model)
    for turn in range(3):
        model.zero_grad()
        batches = marked(data([4, 4], seed=turn), rank_1={2: GRADIENT} if turn != 1 else {})
        guard.backward(batches[rank], loss_of(model))
        check_union(model.module, good(batches))


def many_buffers_sent_while_backward_runs(rank):
    """The gradients are cut into pieces of a few numbers, so that some are sent before the fault shows."""
    sizes = _replicas.FIRST_BYTES, _replicas.BYTES
    _replicas.FIRST_BYTES = _replicas.BYTES = 16
    try:
        a_model_of_many_buffers(rank)
    finally:
        _replicas.FIRST_BYTES, _replicas.BYTES = sizes


def a_model_of_many_buffers(rank):
    for view in (False, True):
        model = replica(gradient_as_bucket_view=view)
        guard = gg.Guard(model)
        for turn, fault in enumerate((0.0, RAISES, NAN, GRADIENT, 5.0, 0.0)):
            model.zero_grad()
            batches = marked(data([4, 5], seed=turn), rank_1={1: fault})
            guard.backward(batches[rank], loss_of(model))
            check_union(model.module, good(batches))
            assert len(guard._agreement._buckets._buckets) > 2
        # Twice in a row without zero_grad: what was there is in the sum, once.
        guard.backward(batches[rank], loss_of(model))
        oracle = gradients_of(good(batches))
        for ours, theirs in zip(model.parameters(), oracle, strict=True):
            torch.testing.assert_close(ours.grad, 2 * theirs)

        def twice(x):
            loss_of(model)(x).backward()  # noqa: B023 - a loss that walks back by itself: gradients come twice
            return loss_of(model)(x)  # noqa: B023

        model.zero_grad()
        guard.backward(batches[rank], twice)
        for ours, theirs in zip(model.parameters(), oracle, strict=True):
            torch.testing.assert_close(ours.grad, 2 * theirs)


def gradients_of(rows):
    from tests.guard.rank_nets import network

    oracle = network()
    loss_of(oracle)(rows).backward()
    return [p.grad for p in oracle.parameters()]


def dtypes_and_layouts(rank):
    torch.manual_seed(3)
    conv = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16, 2)).to(
        memory_format=torch.channels_last
    )
    x = torch.randn(6, 3, 4, 4)
    x[4] = float("nan")
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 3e-2)):
        twin = DistributedDataParallel(conv.to(dtype))
        twin.zero_grad()
        part = x.to(dtype).split([2, 4])[rank]
        result = gg.Guard(twin).backward(part, lambda x: twin(x).square().mean())  # noqa: B023
        assert result.kept == [[0, 1], [0, 1, 3]][rank]
        ours = [p.grad.clone() for p in conv.parameters()]
        same_everywhere(*(p.float() for p in ours))
        conv.zero_grad()
        conv(x[[0, 1, 2, 3, 5]].to(dtype)).square().mean().backward()
        for a, p in zip(ours, conv.parameters(), strict=True):
            torch.testing.assert_close(a, p.grad, rtol=tolerance, atol=tolerance)


@needs("2.9", "Gloo reduces complex numbers")
def complex_numbers(rank):
    spun = DistributedDataParallel(nn.Linear(3, 1, dtype=torch.complex64))
    z = torch.randn(6, 3, dtype=torch.complex64, generator=torch.Generator().manual_seed(0))
    gg.Guard(spun).backward(z.split([4, 2])[rank], lambda z: spun(z).abs().square().mean())
    ours = spun.module.weight.grad.clone()
    spun.module.zero_grad()
    spun.module(z).abs().square().mean().backward()
    torch.testing.assert_close(ours, spun.module.weight.grad)


def sparse_gradients_become_dense(rank):
    torch.manual_seed(0)
    table = DistributedDataParallel(nn.Embedding(6, 2, sparse=True))
    words = torch.tensor([[0, 1], [2, 2], [5, 0]]).split([2, 1])[rank]
    gg.Guard(table).backward(words, lambda words: table(words).square().mean())
    ours = table.module.weight.grad
    assert not ours.is_sparse
    table.module.zero_grad()
    table.module(torch.tensor([[0, 1], [2, 2], [5, 0]])).square().mean().backward()
    torch.testing.assert_close(ours, table.module.weight.grad.to_dense())


def a_scale_that_overflows_on_one_rank_is_lowered_on_all(rank):
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(3, 1))
    guard = gg.Guard(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**120)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.ones(4, 3) * (1e10 if rank == 1 else 1.0)
    weights = model.module.weight.detach().clone()
    guard.backward(x, lambda x: model(x).mean(), scaler=scaler)
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 2.0**119
    assert torch.equal(model.module.weight, weights)
    optimizer.zero_grad()
    small = torch.amp.GradScaler("cpu", init_scale=8.0)
    spoilt = torch.ones(4, 3)
    spoilt[1] = float("inf") if rank == 0 else 1.0
    result = guard.backward(spoilt, lambda x: model(x).mean(), scaler=small)
    assert len(result.dropped) == (rank == 0)
    small.unscale_(optimizer)
    torch.testing.assert_close(model.module.weight.grad, torch.ones(1, 3))


def buffers_are_those_of_the_first_rank(rank):
    """BatchNorm on the first rank has seen its good samples only; the others get its statistics with the next step."""
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)))
    guard = gg.Guard(model)
    x = torch.randn(2, 6, 3, generator=torch.Generator().manual_seed(1))
    x[0, 2] = float("nan")
    twin = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    twin.load_state_dict({k: v for k, v in model.module.state_dict().items() if not k.startswith("2")})
    guard.backward(x[rank], lambda x: model(x).square().mean())
    twin(x[0, [0, 1, 3, 4, 5]])
    if rank == 0:
        assert torch.equal(model.module[1].running_mean, twin[1].running_mean)
    seen = []

    def loss_fn(x):
        seen.append(model.module[1].running_mean.clone())
        return model(x).square().mean()

    guard.backward(x[rank], loss_fn)
    assert all(torch.equal(mean, twin[1].running_mean) for mean in seen)
    loss_of(model)  # a plain forward afterwards: as ever
    model(x[1])


def a_group_of_ones_own_and_several_modules(rank):
    group = dist.new_group([0, 1])
    torch.manual_seed(0)
    front = DistributedDataParallel(nn.Linear(3, 4).double(), process_group=group)
    back = DistributedDataParallel(nn.Linear(4, 1).double(), process_group=group)
    guard = gg.Guard([front, back, nn.MSELoss()])
    batches = marked(data([4, 5]), rank_1={0: NAN})
    batches[1][0, 1] = float("nan")
    result = guard.backward(batches[rank], lambda x: back(front(x[:, 1:])).square().mean())
    assert len(result.dropped) == (rank == 1)
    ours = [p.grad.clone() for m in (front, back) for p in m.parameters()]
    front.module.zero_grad()
    back.module.zero_grad()
    back.module(front.module(good(batches)[:, 1:])).square().mean().backward()
    for a, p in zip(ours, [*front.parameters(), *back.parameters()], strict=True):
        torch.testing.assert_close(a, p.grad)


def a_weight_from_the_last_step_does_not_overflow(rank):
    """One sample in the step before, eight in this one: gradients near the end of float32 are four times too large."""
    model = DistributedDataParallel(nn.Linear(1, 1, bias=False))
    guard = gg.Guard(model)
    guard.backward(torch.ones(1 - rank, 1), lambda x: model(x).mean())
    model.zero_grad()
    guard.backward(torch.full((4, 1), 2e38), lambda x: (model(x) * 1e-3).mean() * 1e3)
    torch.testing.assert_close(model.module.weight.grad, torch.full((1, 1), 2e38))


def losses_that_talk_to_other_ranks_themselves_are_refused(rank):
    """After a fault one rank would call them alone; the first step counts collectives, also if it is a bad one."""
    for make, mark in itertools.product((replica, lambda: fully_shard(network())), (0.0, RAISES, NAN, GRADIENT)):
        model = make()
        guard = gg.Guard(model)
        batch = marked(data([4, 4]), rank_1={1: mark})[rank]

        def loss_fn(x, model=model):
            seen = torch.ones(1)
            dist.all_reduce(seen)
            return loss_of(model)(x) * (seen.item() == 2)

        error = raised_by(lambda guard=guard, batch=batch, loss_fn=loss_fn: guard.backward(batch, loss_fn))
        assert type(error) is gg.errors.ArgumentValueError, (mark, error)
        assert "`loss_fn` makes collectives of its own (1 in the first step)" in str(error)
        guard.backward(data([4, 4])[rank], loss_of(model))
        check_union(getattr(model, "module", model), torch.cat(data([4, 4])))


def parameters_of_nobody_stay_local(rank):
    """A parameter that no module owns is in no wrapper: DDP does not reduce it, and neither does the guard."""
    model = replica()
    factor = nn.Parameter(torch.ones((), dtype=torch.float64))
    batches = marked(data([4, 4]), rank_1={0: NAN})
    gg.Guard(model).backward(batches[rank], lambda x: (factor * model(x)).square().mean())
    check_union(model.module, good(batches))
    own = batches[rank][batches[rank][:, 0] == 0]
    torch.testing.assert_close(factor.grad, 2 * model.module(own).square().mean().detach())


def compiled_models_and_losses_of_each_sample(rank):
    inner = replica()
    model = torch.compile(inner, backend="eager")
    batches = marked(data([4, 5]), rank_0={3: NAN})
    result = gg.Guard(model).backward(batches[rank], lambda x: model(x).square().squeeze(1))
    assert len(result.losses) == len(result.kept) == [3, 5][rank]
    check_union(inner.module, good(batches))


def a_plain_model_in_a_group_stays_alone(rank):
    """Nothing is reduced, as without the guard; incidents know the rank."""
    model = nn.Linear(3, 1)
    x = torch.randn(4, 3)
    x[1] = float("nan")
    if rank == 1:
        (incident,) = gg.Guard(model).backward(x, lambda x: model(x).mean()).dropped
        assert (incident.rank, incident.world_size) == (1, 2)


class OldShards(FullyShardedDataParallel):
    """The first FSDP, which needs an accelerator to be built in earnest."""

    def __init__(self):
        nn.Module.__init__(self)
        self._fsdp_wrapped_module, self.training_state = nn.Linear(2, 1), None


def what_is_refused(rank):
    refused = {
        "SyncBatchNorm layers": lambda: gg.Guard(nn.SyncBatchNorm(2)),
        "is inside of a DistributedDataParallel": lambda: gg.Guard(wrapped.module),
        "parameters that no wrapper reduces": lambda: gg.Guard([wrapped, nn.Linear(1, 1)]),
        "several process groups": lambda: gg.Guard([wrapped, elsewhere]),
        "FullyShardedDataParallel": lambda: gg.Guard(OldShards()),
    }
    wrapped = replica()
    elsewhere = DistributedDataParallel(nn.Linear(2, 1), process_group=dist.new_group([0, 1]))
    for text, call in refused.items():
        error = raised_by(call)
        assert type(error) is gg.errors.ArgumentTypeError, f"{text}: {error}"
        assert text in str(error)
    for name, value in {"out_of_memory": "split", "clip_samples": 1.0}.items():
        error = raised_by(lambda given={name: value}: gg.Guard(wrapped, **given))
        assert f"`{name}` is the {type(value).__name__} {value!r}.\nWhy: several ranks share the model: " in str(error)


def what_is_refused_when_it_is_used(rank):
    hooked = replica()
    hooked.register_comm_hook(None, fp16_compress_hook)
    error = raised_by(lambda: gg.Guard(hooked).backward(data([4, 4])[rank], loss_of(hooked)))
    assert "the model has a communication hook" in str(error)
    joining = replica()
    with joining.join():
        error = raised_by(lambda: gg.Guard(joining).backward(data([4, 4])[rank], loss_of(joining)))
    assert "the model has a join context" in str(error)
    model = replica()
    error = raised_by(lambda: gg.Guard(model, max_bad=0.1 + 0.1 * rank).backward(data([4, 4])[rank], loss_of(model)))
    assert "the ranks do not have the same arguments (rank 0: max_bad=0.1, patience=20" in str(error)
    narrow = DistributedDataParallel(nn.Linear(3, 1))
    if rank == 1:
        narrow.module.bias.requires_grad_(False)
    error = raised_by(lambda: gg.Guard(narrow).backward(torch.ones(2, 3), lambda x: narrow(x).mean()))
    assert "the ranks do not have the same parameters (rank 0: 2 tensors, 4 elements" in str(error)


STORIES = [
    parameters_that_only_some_ranks_use,
    frozen_and_thawed_on_the_way,
    static_graphs,
    many_buffers_sent_while_backward_runs,
    dtypes_and_layouts,
    complex_numbers,
    sparse_gradients_become_dense,
    a_scale_that_overflows_on_one_rank_is_lowered_on_all,
    buffers_are_those_of_the_first_rank,
    a_group_of_ones_own_and_several_modules,
    a_weight_from_the_last_step_does_not_overflow,
    losses_that_talk_to_other_ranks_themselves_are_refused,
    parameters_of_nobody_stay_local,
    compiled_models_and_losses_of_each_sample,
    a_plain_model_in_a_group_stays_alone,
    what_is_refused,
    what_is_refused_when_it_is_used,
]
