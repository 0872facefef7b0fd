"""Two ranks: one ledger for all, batches until the last rank is done, and a rank that only looks."""

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import gradgate as gg
from gradgate._payload import decode
from tests.guard.rank_nets import (
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
    shared_folder,
)
from tests.guard.ranks import same_everywhere
from tests.guard.stories_replicas import Kept


def incidents_of_all_ranks_reach_one_ledger(rank):
    path = f"{shared_folder(rank)}/run.ledger"
    model = replica()
    guard = gg.Guard(model, ledger=path, payload=True)
    batches = marked(data([4, 4]), rank_0={3: RAISES}, rank_1={1: NAN, 2: RAISES})
    names = [f"{rank}-{row}" for row in range(4)]
    result = guard.backward(batches[rank], loss_of(model), ids=names)
    guard.backward(data([4, 4])[rank], loss_of(model))
    dist.barrier()
    runs = [None, None]
    dist.all_gather_object(runs, guard.run)
    assert runs[0] == runs[1]
    if rank == 0:
        ledger = gg.Ledger(path)
        found = sorted(ledger.incidents(), key=lambda one: one.sample_id)
        assert [(one.sample_id, one.rank, one.world_size) for one in found] == [
            ("0-3", 0, 2),
            ("1-1", 1, 2),
            ("1-2", 1, 2),
        ]
        assert {one.run for one in found} == {guard.run}
        for one in found:
            sample = decode(ledger.payload_of(one.id))
            assert torch.equal(sample, batches[one.rank][one.row : one.row + 1])
    assert [one.rank for one in result.dropped] == ([0] if rank == 0 else [1, 1])
    dist.barrier()


def a_ledger_with_snapshots_has_those_of_the_rank(rank):
    path = f"{shared_folder(rank)}/run.ledger"
    model = replica()
    ledger = gg.Ledger(path, snapshot=True) if rank == 0 else None
    guard = gg.Guard(model, ledger=ledger)
    batches = marked(data([4, 4]), rank_1={1: NAN})
    guard.backward(batches[rank], loss_of(model))
    dist.barrier()
    if rank == 0:
        (incident,) = ledger.incidents()
        assert incident.rank == 1
        assert ledger.snapshot_of(incident.id)
    dist.barrier()


def sinks_of_the_first_rank_take_all(rank):
    sink = Kept()
    model = replica()
    guard = gg.Guard(model, sink=sink)
    guard.backward(marked(data([4, 4]), rank_1={0: NAN})[rank], loss_of(model))
    assert [one.rank for one in sink.incidents] == ([1] if rank == 0 else [])


def one_rank_looks_alone(rank):
    """Guard.forward waits for nobody in DDP; what it finds goes to the ledger of the same name."""
    path = f"{shared_folder(rank)}/run.ledger"
    model = replica()
    guard = gg.Guard(model, ledger=path)
    if rank == 1:
        _, keep = guard.forward(marked(data([4, 4]), rank_1={2: NAN})[1], model)
        assert keep.tolist() == [True, True, False, True]
    dist.barrier()
    if rank == 0:
        assert [one.rank for one in gg.Ledger(path).incidents()] == [1]
    guard.backward(data([4, 4])[rank], loss_of(model))
    check_union(model.module, torch.cat(data([4, 4])))


def uneven_loaders_end_together(rank):
    """Five batches on one rank, two on the other; the optimizer makes the same five steps on both."""
    model, oracle = replica(), network()
    guard = gg.Guard(model)
    optimizer, other = (torch.optim.Adam(m.parameters(), lr=0.1) for m in (model, oracle))
    for _ in range(2):
        rounds = [data([3, 3], seed=turn) for turn in range(5)]
        marked(rounds[4], rank_0={1: NAN})
        marked(rounds[1], rank_1={0: RAISES})
        loader = [batches[rank] for batches in rounds[: (5, 2)[rank]]]
        seen = []
        for batch in guard.batches(loader):
            optimizer.zero_grad()
            result = guard.backward(batch, loss_of(model))
            optimizer.step()
            seen.append((len(batch), len(result.kept)))
        assert seen == [[(3, 3)] * 4 + [(3, 2)], [(3, 3), (3, 2)] + [(0, 0)] * 3][rank]
        for number, batches in enumerate(rounds):
            other.zero_grad()
            loss_of(oracle)(good(batches if number < 2 else batches[:1])).backward()
            other.step()
    for ours, theirs in zip(model.parameters(), oracle.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)
    same_everywhere(*model.parameters())


class Broken(torch.utils.data.Dataset):
    """Sample 5 cannot be loaded, 2 and 7 of each rank are NaN."""

    def __init__(self, rank, size):
        self.rank, self.size = rank, size

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        if index == 5:
            raise ValueError("cannot be decoded")
        value = float("nan") if index in (2, 7) else index / 10
        return torch.tensor([0, value, 1, 2], dtype=torch.float64)

    def sample_id(self, index):
        return f"rank {self.rank}, {index}"


def ids_travel_with_batches_that_are_loaded_ahead(rank):
    """`guard.batches` loads one ahead; rank 1 has a batch less, so it ends with batches of nobody."""
    model = replica()
    guard = gg.Guard(model)
    guard.epoch, guard.global_step = 4, 20
    loader = gg.resilient(DataLoader(Broken(rank, 12 - 3 * rank), batch_size=3))
    dropped = []
    for batch in guard.batches(loader):
        dropped += guard.backward(batch, loss_of(model), ids=loader.ids if rank else None).dropped
    assert [(i.sample_id, i.step) for i in dropped] == [(f"rank {rank}, 2", 20), (f"rank {rank}, 7", 22)]
    assert [(i.sample_id, i.epoch, i.step) for i in loader.incidents] == [(f"rank {rank}, 5", 4, 21)]
    assert guard.global_step == 24


def a_rank_that_has_no_batch_at_all(rank):
    model = replica()
    guard = gg.Guard(model)
    loader = [(data([4, 1])[0], torch.arange(4))] if rank == 0 else []
    count = 0
    for x, numbers in guard.batches(loader):
        assert x.shape == ((4, 4) if rank == 0 else (0, 4))
        assert len(numbers) == len(x)
        guard.backward((x, numbers), lambda batch: loss_of(model)(batch[0]))
        count += 1
    assert count == 1
    check_union(model.module, data([4, 1])[0])
    assert list(guard.batches([])) == []


def batches_that_cannot_be_of_no_rows(rank):
    model = replica()
    guard = gg.Guard(model, select=lambda batch, rows: [batch[row] for row in rows] if rows else 1 / 0)
    loader = [list(data([4, 4])[rank])] * (2 - rank)
    for batch in guard.batches(loader):
        model.zero_grad()
        guard.backward(batch, lambda batch: loss_of(model)(torch.stack(batch)))
    check_union(model.module, data([4, 4])[0])


def a_batch_without_a_step_is_told(rank):
    guard = gg.Guard(replica())
    error = raised_by(lambda: list(guard.batches([data([4, 4])[rank]])))
    assert "no step was made with the last batch" in str(error)


def with_a_distributed_sampler(rank):
    """An epoch over 11 samples, three of them bad: every good sample counts once, in batches of at most 3."""
    model = replica()
    guard = gg.Guard(model, max_bad=1)
    rows = data([11, 1])[0]
    rows[[2, 5, 8], 0] = NAN
    dataset = TensorDataset(torch.arange(11), rows)
    sampler = DistributedSampler(dataset, shuffle=True, drop_last=False)
    kept = []
    for names, batch in guard.batches(DataLoader(dataset, batch_size=3, sampler=sampler)):
        model.zero_grad()
        result = guard.backward(batch, loss_of(model), ids=names)
        kept += names[result.kept].tolist()
    everybody = [None, None]
    dist.all_gather_object(everybody, kept)
    assert set(everybody[0] + everybody[1]) == set(range(11)) - {2, 5, 8}


def losses_of_all_ranks_reach_one_ledger(rank):
    path = f"{shared_folder(rank)}/run.ledger"
    model = replica()
    guard = gg.Guard(model, ledger=path, history=True)
    batches = marked(data([4, 3]), rank_1={1: NAN})
    names = [f"{rank}-{row}" for row in range(len(batches[rank]))]
    expected = []
    for _ in range(70):  # they are written every 64 steps, by both at once
        result = guard.backward(batches[rank], lambda x: model(x).square()[:, 0], ids=names)
        expected.append(result.losses.tolist())
        guard.backward(data([2, 0])[rank], lambda x: model(x).square()[:, 0], ids=["a", "b"][: 2 - 2 * rank])
    guard.state_dict()
    dist.barrier()
    histories = {one.sample_id: one.losses for one in gg.Ledger(path, read_only=True).hardest(100)}
    assert sorted(histories) == ["0-0", "0-1", "0-2", "0-3", "1-0", "1-2", "a", "b"]
    for place, row in enumerate(result.kept):
        wanted = torch.tensor(expected)[-32:, place]
        torch.testing.assert_close(torch.tensor(histories[f"{rank}-{row}"]), wanted, rtol=1e-3, atol=1e-3)
    error = raised_by(lambda: gg.Guard(model, history=True))
    assert error.what == "Guard(): `history` is the bool True."
    assert error.why == "the losses of samples are written into a ledger, and there is no `ledger`."
    dist.barrier()


STORIES = [
    incidents_of_all_ranks_reach_one_ledger,
    losses_of_all_ranks_reach_one_ledger,
    a_ledger_with_snapshots_has_those_of_the_rank,
    sinks_of_the_first_rank_take_all,
    one_rank_looks_alone,
    uneven_loaders_end_together,
    ids_travel_with_batches_that_are_loaded_ahead,
    a_rank_that_has_no_batch_at_all,
    batches_that_cannot_be_of_no_rows,
    a_batch_without_a_step_is_told,
    with_a_distributed_sampler,
]
