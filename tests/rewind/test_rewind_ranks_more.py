"""Four ranks of which one sees the spike, and a rank that is killed (SIGKILL) in the middle of a rewind."""

import os
import signal
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel

import gradgate as gg
from tests.guard.ranks import ended_well, lived, same_everywhere
from tests.rewind.stories import build, shard, stream, train

pytestmark = [pytest.mark.slow, pytest.mark.distributed]
WRAPPERS = {"replicas": DistributedDataParallel, "shards": shard}


# --- Four ranks -----------------------------------------------------------------------------------------------------


def one_of_four_sees_the_spike(rank, wrap):
    batches = stream(rank)
    found, (rewound,) = train(wrap, batches, {"every": 6}, seen_by=2)
    assert (rewound.to_step, rewound.skipped) == (24, (29, 30, 31, 32))
    assert {incident.rank for incident in rewound.incidents} == {rank}
    wanted, _ = train(wrap, [batch for batch in batches if batch["step"] not in rewound.skipped])
    assert all(map(torch.equal, found, wanted))
    return found


def one_of_four_replicas_sees_the_spike(rank):
    same_everywhere(*one_of_four_sees_the_spike(rank, DistributedDataParallel))


def one_of_four_shards_sees_the_spike(rank):
    one_of_four_sees_the_spike(rank, shard)


OF_FOUR = [one_of_four_replicas_sees_the_spike, one_of_four_shards_sees_the_spike]


@pytest.fixture(scope="module")
def found_by_four(tmp_path_factory):
    return lived(OF_FOUR, tmp_path_factory.mktemp("four"), world=4)


@pytest.mark.parametrize("story", OF_FOUR, ids=lambda story: story.__name__)
def test_one_of_four_ranks_sees_the_spike(found_by_four, story):
    ended_well(found_by_four, story, world=4)


# --- Killed and resumed ---------------------------------------------------------------------------------------------


def train_with_checkpoints(rank, wrap, folder, killed_at=None):
    """Save everything after every step; one rank is killed at a step, or as it goes back. Resume what is there."""
    model, optimizer = build(wrap)
    rewind = gg.Rewind(model, optimizer, ids="id", every=6)
    parts = model, optimizer, rewind
    saved = [{int(path.stem) for path in folder.glob(f"{of}/*.pt")} for of in range(dist.get_world_size())]
    made = max(set.intersection(*saved), default=0)
    if made:
        states = torch.load(folder / str(rank) / f"{made}.pt", weights_only=False)
        for part, state in zip(parts, states, strict=True):
            part.load_state_dict(state)
    went_back = 0
    for batch in rewind.batches(stream(rank)):
        optimizer.zero_grad()
        loss = (model(batch["x"]) - batch["x"].sum(1, keepdim=True)).square().mean()
        loss.backward()
        optimizer.step()
        high = batch["step"] in (30, 31, 32) and rank == 0
        rewound = rewind.observe(1e3 if high else loss)
        went_back += rewound is not None
        made += 1
        if rank == 1 and (made == killed_at or (killed_at == "going back" and rewound is not None)):
            os.kill(os.getpid(), signal.SIGKILL)
        path = folder / str(rank) / f"{made}.pt"
        path.parent.mkdir(exist_ok=True)
        torch.save([part.state_dict() for part in parts], path.with_suffix(".part"))
        path.with_suffix(".part").rename(path)
    weights = [p.detach() for p in model.parameters()]
    return [weight.to_local() if hasattr(weight, "to_local") else weight for weight in weights], went_back


def one_rank(rank, store, kind, folder, killed_at):
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", f"file://{store}", rank=rank, world_size=2, timeout=timedelta(seconds=120))
    train_with_checkpoints(rank, WRAPPERS[kind], folder, killed_at)


class Resumed:
    """A story: the training goes on from the last checkpoint that all ranks have, and ends as if never killed."""

    __name__ = "resumed"

    def __init__(self, kind, folder, times):
        self.wrap, self.folder, self.times = WRAPPERS[kind], folder, times

    def __call__(self, rank):
        found, went_back = train_with_checkpoints(rank, self.wrap, self.folder)
        assert went_back == self.times
        wanted, done = train(self.wrap, stream(rank), {"every": 6}, seen_by=0)
        assert done[0].to_step == 24
        assert all(map(torch.equal, found, wanted))


@pytest.mark.parametrize(
    ("kind", "killed_at", "last", "times"), [("replicas", 35, 34, 0), ("shards", "going back", 32, 1)]
)
def test_a_rank_is_killed_in_the_middle_of_a_rewind(tmp_path, kind, killed_at, last, times):
    context = mp.get_context("spawn")
    given = tmp_path / "first", kind, tmp_path, killed_at
    processes = [context.Process(target=one_rank, args=(rank, *given)) for rank in range(2)]
    for process in processes:
        process.start()
    processes[1].join(300)
    for process in processes:
        process.kill()
        process.join()
    assert processes[1].exitcode == -signal.SIGKILL
    assert max(int(path.stem) for path in tmp_path.glob("1/*.pt")) == last
    story = Resumed(kind, tmp_path, times)
    (tmp_path / "second").mkdir()
    ended_well(lived([story], tmp_path / "second"), story)
