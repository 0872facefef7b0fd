"""Two ranks whose losses are totals and counts: the mean over a window is that of one process on all rows kept."""

import contextlib

import torch

import gradgate as gg
from tests.guard.rank_nets import GRADIENT, NAN, RAISES, check_union, data, good, marked, network, replica
from tests.guard.stories_shards import sharded


def total_of(model):
    def total(x):
        squares = model(x).square()
        return squares.sum(), len(squares)

    return total


def windows():
    """Give micro-batches of unequal counts: one with nothing left on a rank, one that a rank has nothing of."""
    return [
        marked(data([6, 2], seed=5), rank_0={1: NAN}),
        marked(data([5, 4], seed=6), rank_1=dict.fromkeys(range(4), RAISES)),
        marked(data([3, 0], seed=7), rank_0={0: GRADIENT}),
    ]


def check_windows(rank, guard, model, micro_step):
    for turn in range(2):
        model.zero_grad()
        losses = []
        for number, batches in enumerate(windows()):
            with micro_step(number, turn):
                losses.append(guard.backward(batches[rank], total_of(model)).loss)
        mean = guard.finish()
        rows = torch.cat([good(batches) for batches in windows()])
        torch.testing.assert_close(mean.double(), check_union(model, rows), rtol=1e-6, atol=0)
        for loss, batches in zip(losses, windows(), strict=True):
            torch.testing.assert_close(loss.double(), network()(good(batches)).square().mean().detach())


def totals_of_replicas(rank):
    model = replica()

    def micro_step(number, turn):
        return model.no_sync() if turn and number < 2 else contextlib.nullcontext()

    check_windows(rank, gg.Guard(model), model, micro_step)


def totals_of_shards(rank):
    model = sharded()

    def micro_step(number, turn):
        model.set_requires_gradient_sync(not turn or number == 2)
        return contextlib.nullcontext()

    check_windows(rank, gg.Guard(model), model, micro_step)


def totals_after_means(rank):
    model = replica()
    guard = gg.Guard(model)
    batches = data([4, 3])
    guard.backward(batches[rank], lambda x: model(x).square().mean())
    model.zero_grad()
    guard.backward(batches[rank], total_of(model))
    guard.finish()
    check_union(model, torch.cat(batches))


def the_first_rank_logs_for_all(rank):
    model, logged = replica(), {}
    guard = gg.Guard(model, log=lambda tag, value, step: logged.update({(step, tag): value}))
    guard.backward(marked(data([4, 3]), rank_1={0: NAN})[rank], total_of(model))
    found = {"kept": 6, "dropped": 1, "dropped_total": 1, "bad_steps": 1}
    assert logged == ({} if rank else {(0, f"gradgate/{name}"): value for name, value in found.items()})


STORIES = [totals_of_replicas, totals_of_shards, totals_after_means, the_first_rank_logs_for_all]
