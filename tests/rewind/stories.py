"""What ranks live through together: a spike that only one of them sees."""

import copy

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import gradgate as gg
from tests.guard.counted import collectives
from tests.guard.ranks import same_everywhere


def build(wrap):
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    model = wrap(model)
    return model, torch.optim.AdamW(model.parameters(), lr=0.02)


def train(wrap, batches, rewind_options=None, seen_by=None, stop=None):
    """Train on this rank's batches; the losses of one rank look high from some step on. May stop and resume."""
    model, optimizer = build(wrap)
    rewind = None if rewind_options is None else gg.Rewind(model, optimizer, ids="id", **rewind_options)
    done = []
    running = iter(batches if rewind is None else rewind.batches(batches))
    made = 0
    while (batch := next(running, None)) is not None:
        optimizer.zero_grad()
        loss = (model(batch["x"]) - batch["x"].sum(1, keepdim=True)).square().mean()
        loss.backward()
        optimizer.step()
        if rewind is not None:
            high = batch["step"] in (30, 31, 32) and dist.get_rank() == seen_by
            rewound = rewind.observe(1e3 if high else loss)
            done += [rewound] if rewound is not None else []
        made += 1
        if made == stop:
            saved = copy.deepcopy([part.state_dict() for part in (model, optimizer, rewind)])
            model, optimizer = build(wrap)
            rewind = gg.Rewind(model, optimizer, ids="id", **rewind_options)
            for part, state in zip((model, optimizer, rewind), saved, strict=True):
                part.load_state_dict(state)
            running = rewind.batches(batches)
    tensors = [p.detach() for p in model.parameters()]
    return [t.to_local() if hasattr(t, "to_local") else t for t in tensors], done


def stream(rank):
    generator = torch.Generator().manual_seed(rank)
    return [
        {"x": torch.randn(5, 4, generator=generator), "step": step, "id": [f"{rank}-{step}-{row}" for row in range(5)]}
        for step in range(45)
    ]


def lawful(rank, wrap):
    batches = stream(rank)
    for seen_by in range(dist.get_world_size()):
        found, done = train(wrap, batches, {"every": 6}, seen_by)
        assert [one.skipped for one in done] == [(29, 30, 31, 32)]
        assert {i.rank for i in done[0].incidents} == {rank}
        wanted, _ = train(wrap, [batch for batch in batches if batch["step"] not in done[0].skipped])
        assert all(map(torch.equal, found, wanted))
    return found


def resumed(rank, wrap):
    """A checkpoint among the batches that come again: step 30 is seen as high, and the way back leads to 24."""
    wanted, done = train(wrap, stream(rank), {"every": 6}, seen_by=0)
    assert done[0].to_step == 24
    # A new wrapper adds the gradients of more than two ranks in another order at first, also without Rewind.
    same = torch.equal if dist.get_world_size() == 2 else torch.allclose
    for stop in (20, 33, 35):
        found, _ = train(wrap, stream(rank), {"every": 6}, seen_by=0, stop=stop)
        assert all(map(same, found, wanted))


def replicas_go_back_together(rank):
    same_everywhere(*lawful(rank, DistributedDataParallel))


def shard(model):
    for layer in (model[0], model[2], model):
        fully_shard(layer)
    return model


def shards_go_back_together(rank):
    lawful(rank, shard)


def replicas_resume_in_the_middle_of_a_rewind(rank):
    resumed(rank, DistributedDataParallel)


def shards_resume_in_the_middle_of_a_rewind(rank):
    resumed(rank, shard)


def ranks_without_a_wrapper_go_back_together(rank):
    lawful(rank, lambda model: model)


def ranks_find_the_culprit_together(rank):
    batches = stream(rank)
    if rank == 1:
        batches[31]["x"] *= 1e4
    model = build(DistributedDataParallel)[0]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    rewind = gg.Rewind(model, optimizer, every=6, ids="id", patience=2)

    def step(batch):
        optimizer.zero_grad()
        loss = (model(batch["x"]) - batch["x"].sum(1, keepdim=True)).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    found = None
    for batch in rewind.batches(batches):
        if rewind.observe(step(batch)):
            before = [p.detach().clone() for p in model.parameters()]
            found = rewind.blame(step)
            assert all(map(torch.equal, model.parameters(), before))
    assert found is not None
    assert found.steps == (31,)
    assert found.rows == {}  # samples are looked for in a single process only
    assert found.sample_ids == [f"{rank}-31-{row}" for row in range(5)]
    same_everywhere(*[p.detach() for p in model.parameters()])


def the_loss_of_a_guard_needs_no_collective_of_its_own(rank):
    """It is the mean over all ranks already; the loss of one rank is not, and from then on the ranks ask again."""
    batches = stream(rank)
    if rank == 1:
        for batch in batches[31:34]:
            batch["x"] *= 1e4
    counts = {}
    for name in ("guard", "rank"):
        model, optimizer = build(DistributedDataParallel)
        guard = gg.Guard(model)
        rewind = gg.Rewind(model, optimizer, guard, every=6)
        made = []
        for batch in rewind.batches(batches):
            optimizer.zero_grad()
            result = guard.backward(batch["x"], lambda x, m=model: (m(x) - x.sum(1, keepdim=True)).square().mean())
            optimizer.step()
            with collectives() as seen:
                rewound = rewind.observe(result.loss if name == "guard" else result.loss * 1)
            made += [] if rewound else seen
        (done,) = rewind.rewinds
        assert set(done.skipped) >= {31, 32, 33}
        counts[name] = len(made)
        same_everywhere(*[p.detach() for p in model.parameters()])
    assert counts["guard"] == 0
    assert counts["rank"] == len(batches) - 1  # and more in the one that goes back


def the_first_rank_records_for_all(rank, path=None):
    import tempfile
    from pathlib import Path

    folder = [tempfile.mkdtemp()] if rank == 0 else [None]
    dist.broadcast_object_list(folder)
    path = Path(folder[0]) / "run.ledger"
    train(DistributedDataParallel, stream(rank), {"every": 6, "ledger": path}, seen_by=1)
    if rank == 0:
        with gg.Ledger(path) as ledger:
            kept = ledger.incidents()
        world = dist.get_world_size()
        assert len(kept) == world * 4 * 5
        assert {one.rank for one in kept} == set(range(world))
    dist.barrier()


STORIES = [
    replicas_go_back_together,
    shards_go_back_together,
    replicas_resume_in_the_middle_of_a_rewind,
    shards_resume_in_the_middle_of_a_rewind,
    ranks_without_a_wrapper_go_back_together,
    ranks_find_the_culprit_together,
    the_loss_of_a_guard_needs_no_collective_of_its_own,
    the_first_rank_records_for_all,
]
