"""Starts real processes (gloo on the CPU) for stories that several ranks live through together."""

import logging
import os
import traceback
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def needs(version, what):
    """Mark a story of something that torch does from a version on."""

    def mark(story):
        story.missing = f"{what}, not torch {torch.__version__}" if torch.__version__ < version else ""
        return story

    return mark


def missing(story):
    return getattr(story, "missing", "")


def one_rank(rank, world, store, stories, results, timeout):
    """Be one rank: live through the stories, and tell how each ended."""
    torch.set_num_threads(1)
    logging.getLogger("gradgate").setLevel(logging.ERROR)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    limit = timedelta(seconds=timeout)
    dist.init_process_group("gloo", f"file://{store}", rank=rank, world_size=world, timeout=limit)
    for story in stories:
        torch.manual_seed(0)
        try:
            story(rank)
            results.put((rank, story.__name__, ""))
        except BaseException:  # noqa: BLE001 - whatever it is, the parent tells it
            results.put((rank, story.__name__, traceback.format_exc()))
            break  # the other ranks wait in vain; their timeout is told as their failure
    dist.destroy_process_group()


def lived(stories, folder, world=2, timeout=300):
    """Start the ranks once for all stories, and give by rank and name how they ended: "" is well."""
    context = mp.get_context("spawn")
    stories = [story for story in stories if not missing(story)]
    results = context.Queue()
    processes = [
        context.Process(target=one_rank, args=(rank, world, folder / "store", stories, results, timeout))
        for rank in range(world)
    ]
    for process in processes:
        process.start()
    found = {}
    for _ in range(world * len(stories)):
        rank, name, trace = results.get(timeout=600)
        found[rank, name] = trace
        if trace:
            break
    for process in processes:
        process.join(5 if any(found.values()) else 60)
        process.kill()
    return found


def ended_well(found, story, world=2):
    """State that a story ended well on every rank."""
    if missing(story):
        pytest.skip(missing(story))
    traces = [found.get((rank, story.__name__), "not reached") for rank in range(world)]
    assert not any(traces), "\n".join(f"rank {rank}: {trace}" for rank, trace in enumerate(traces))


def same_everywhere(*tensors):
    """State that tensors are bit-identical on all ranks."""
    flat = torch.cat([tensor.detach().flatten().double() for tensor in tensors])
    others = [torch.empty_like(flat) for _ in range(dist.get_world_size())]
    dist.all_gather(others, flat)
    assert all(torch.equal(others[0], other) for other in others), "the ranks drifted apart"
