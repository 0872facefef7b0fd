"""Run by torchrun from test_exact_mean.py: each rank compares its gradients with those of one process on the union."""

import contextlib
import gc
import sys

import torch
from torch import distributed
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from gradgate import losses


def made():
    torch.manual_seed(3)
    return torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Tanh(), torch.nn.Linear(6, 4)).double()


def compare(wrapper):
    rank = distributed.get_rank()
    torch.manual_seed(0)
    x, target = torch.randn(7, 4, dtype=torch.float64), torch.randint(0, 4, (7,))
    # Rank 0 has six samples in micro-batches of 4 and 2; rank 1 has one, and nothing in its second micro-batch.
    parts = [[(0, 4), (4, 6)], [(6, 7), (7, 7)]][rank]

    model = made()
    wrapped = DistributedDataParallel(model) if wrapper == "ddp" else fully_shard(model)
    exact = losses.ExactMean(wrapped)
    for number, (start, stop) in enumerate(parts):
        first = number == 0
        if wrapper == "fsdp":
            wrapped.set_requires_gradient_sync(not first)
        with wrapped.no_sync() if first and wrapper == "ddp" else contextlib.nullcontext():
            loss = F.cross_entropy(wrapped(x[start:stop]), target[start:stop], reduction="sum")
            exact.backward(loss, stop - start)
    mean = exact.finish()

    single = made()
    whole = F.cross_entropy(single(x), target)
    whole.backward()
    torch.testing.assert_close(mean, whole.detach().float())
    for ours, theirs in zip(wrapped.parameters(), single.parameters(), strict=True):
        gradient = ours.grad.full_tensor() if hasattr(ours.grad, "full_tensor") else ours.grad
        torch.testing.assert_close(gradient, theirs.grad)
    print("equal to the single process", flush=True)


if __name__ == "__main__":
    distributed.init_process_group("gloo")
    compare(sys.argv[1])
    # A group that a wrapped model still holds outlives `destroy`; its threads then abort a process that is ending.
    gc.collect()
    distributed.destroy_process_group()
