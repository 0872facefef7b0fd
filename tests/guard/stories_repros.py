"""Twins of reported problems, on two ranks, ending well: unequal counts, a rank that skips, a NaN that spreads."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import gradgate as gg
from tests.guard.ranks import same_everywhere


def tokens():
    """Twelve tokens for two ranks; of the second rank's six only one has a label."""
    torch.manual_seed(0)
    weight, x, labels = torch.randn(3, 5), torch.randn(12, 5), torch.randint(0, 3, (12,))
    labels[6:11] = -100
    return weight, x, labels


def with_weight(weight):
    model = nn.Linear(5, 3, bias=False)
    model.weight.data = weight.clone()
    return model


def reported_50_unequal_counts_in_an_accumulation_window(rank):
    """Micro-batches of six tokens and one, under no_sync: each is a mean over ranks, as said; nothing is lost."""
    weight, x, labels = tokens()
    model, oracle = DistributedDataParallel(with_weight(weight)), with_weight(weight)
    guard = gg.Guard(model)
    valid = labels != -100
    parts = [[slice(0, 4), slice(4, 6)], [slice(6, 9), slice(9, 12)]]
    for number in range(2):
        model.require_backward_grad_sync = number == 1  # what no_sync does
        part = parts[rank][number]
        keep = valid[part]
        guard.backward((x[part][keep], labels[part][keep]), lambda batch: F.cross_entropy(model(batch[0]), batch[1]))
        rows = torch.cat([torch.arange(12)[parts[other][number]] for other in range(2)])
        rows = rows[valid[rows]]
        F.cross_entropy(oracle(x[rows]), labels[rows]).backward()
    torch.testing.assert_close(model.module.weight.grad, oracle.weight.grad)


def reported_51_unequal_counts_on_two_ranks(rank):
    """DDP averages the means of ranks: 43.6 % off. The guard weighs ranks by their samples."""
    weight, x, labels = tokens()
    plain, model, oracle = (with_weight(weight) for _ in range(3))
    plain, model = DistributedDataParallel(plain), DistributedDataParallel(model)
    part = slice(rank * 6, rank * 6 + 6)
    F.cross_entropy(plain(x[part]), labels[part]).backward()
    keep = labels[part] != -100
    result = gg.Guard(model).backward(
        (x[part][keep], labels[part][keep]), lambda batch: F.cross_entropy(model(batch[0]), batch[1])
    )
    whole = F.cross_entropy(oracle(x), labels)
    whole.backward()
    off = (plain.module.weight.grad - oracle.weight.grad).norm() / oracle.weight.grad.norm()
    assert off > 0.1
    torch.testing.assert_close(model.module.weight.grad, oracle.weight.grad)
    torch.testing.assert_close(result.loss, whole.detach())


def reported_52_a_rank_that_skips_a_batch(rank):
    """The loss of one rank is NaN: the other does not wait in vain (that would raise), and both make the step."""
    model = DistributedDataParallel(nn.Linear(2, 1))
    guard = gg.Guard(model)
    for turn in range(2):
        x = torch.ones(1, 2)
        if rank == 1 and turn == 0:
            x[0, 0] = float("nan")
        result = guard.backward(x, lambda x: model(x).sum())
        assert result.kept == ([] if rank == 1 and turn == 0 else [0])
    same_everywhere(*(p.grad for p in model.parameters()))


def reported_53_a_nan_on_one_rank_poisons_all(rank):
    """One of eight samples is NaN: the gradient is [[1, 1]] on both ranks, and the sample is known."""
    model = DistributedDataParallel(nn.Linear(2, 1, bias=False))
    x = torch.ones(4, 2)
    if rank == 1:
        x[0, 0] = float("nan")
    result = gg.Guard(model).backward(x, lambda x: model(x).mean(), ids=range(4))
    assert torch.equal(model.module.weight.grad, torch.ones(1, 2))
    assert [one.sample_id for one in result.dropped] == ([] if rank == 0 else ["0"])


STORIES = [
    reported_50_unequal_counts_in_an_accumulation_window,
    reported_51_unequal_counts_on_two_ranks,
    reported_52_a_rank_that_skips_a_batch,
    reported_53_a_nan_on_one_rank_poisons_all,
]
