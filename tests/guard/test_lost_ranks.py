"""A rank is killed, or does not come: the others end with a clear error, and do not wait until it comes."""

import os
import signal
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

import gradgate as gg
from tests.guard.rank_nets import data, loss_of, network, raised_by, replica

pytestmark = pytest.mark.distributed
TIMEOUT = 10


def one_rank(rank, store, fate, kind, results):
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    # Only the steps have little time: a loaded machine may take longer to start the second process.
    dist.init_process_group("gloo", f"file://{store}", rank=rank, world_size=2, timeout=timedelta(seconds=300))
    dist.barrier()
    group = dist.new_group(timeout=timedelta(seconds=TIMEOUT))
    if kind == "shards":
        model = fully_shard(network(), mesh=DeviceMesh.from_group(group, "cpu"))
    else:
        model = replica(process_group=group)
    guard = gg.Guard(model)

    def loss_fn(x):
        if rank == 1 and len(seen) == 3:
            if fate == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            if fate == "stopped":
                os.kill(os.getpid(), signal.SIGSTOP)
            time.sleep(1000)
        return loss_of(model)(x)

    seen = []
    error = None
    while error is None:
        model.zero_grad()
        error = raised_by(lambda: seen.append(guard.backward(data([4, 4])[rank], loss_fn)))
    untouched = all(p.grad is None for p in model.parameters())
    results.put((rank, len(seen), type(error).__name__, str(error), untouched))
    results.close()
    results.join_thread()
    os._exit(0)  # the group is broken; leaving it in order would wait


@pytest.mark.parametrize("kind", ["replicas", "shards"])
@pytest.mark.parametrize("fate", ["killed", "asleep", "stopped"])
def test_the_others_are_told_in_time(tmp_path, fate, kind):
    context = mp.get_context("spawn")
    results = context.Queue()
    given = tmp_path / "store", fate, kind, results
    processes = [context.Process(target=one_rank, args=(rank, *given)) for rank in range(2)]
    for process in processes:
        process.start()
    try:
        rank, steps, kind, text, untouched = results.get(timeout=250)
    finally:
        for process in processes:
            process.kill()
            process.join()
    assert (rank, steps, kind, untouched) == (0, 3, "OtherRankError", True)
    assert text.startswith("Guard: rank 0 of 2 cannot reach the others: ")
    assert "another rank has ended, was killed, or did not come to this step within the timeout" in text
    assert "guard.batches(loader)" in text
