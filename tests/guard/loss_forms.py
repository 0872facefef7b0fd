"""Forms of a loss, and the law that the guard keeps for each: who does no harm is not dropped, in few calls.

A sample is a row of features, a target, and a mark that sets off a fault for it. The forms differ in what a module sees
in one call: the batch, one sample, a chunk, samples of several lengths, features along its first dimension.
"""

import copy
import math
import random

import torch
from torch import nn
from torch.nn.utils.rnn import pack_sequence, pad_sequence

import gradgate as gg

FAULTS = ("raise in forward", "raise in loss", "nan", "inf", "gradient")
NONE = -1


class Encoder(nn.Module):
    """Two layers, with the fault of the marked rows in front of, between or behind them."""

    def __init__(self, width, at):
        super().__init__()
        self.at = at
        self.layers = nn.ModuleList([nn.Linear(width, width), nn.Linear(width, width)])

    def forward(self, x, mark):
        for number, layer in enumerate([*self.layers, nn.Identity()]):
            if number == self.at:
                x = spoilt(x, mark)
            x = layer(x)
        return x.tanh() if self.at != 2 else x


def spoilt(x, mark):
    """Raise, or spoil the values or gradients of rows, by their marks; x is (..., width) and mark is (...)."""
    if bool((mark == FAULTS.index("raise in forward")).any()):
        raise ValueError("a sample that the model does not like")
    mark = mark.unsqueeze(-1)
    x = x + torch.where(mark == FAULTS.index("nan"), float("nan"), 0.0) * (torch.arange(x.shape[-1]) % 3 == 1)
    x = torch.where(mark == FAULTS.index("inf"), float("inf"), x)
    zero = torch.where(mark == FAULTS.index("gradient"), 0.0, 1.0)
    return x * (zero * (1 + 0 * x.detach()) + 0 * x).sqrt()


def checked(mark):
    if bool((mark == FAULTS.index("raise in loss")).any()):
        raise LookupError("a sample that the loss does not like")


def whole(model, x, y, mark):
    out = model(x, mark)
    checked(mark)
    return (out.mean(1) - y).square().mean()


def loop(model, x, y, mark):
    losses = []
    for a, b, m in zip(x, y, mark, strict=True):
        losses.append((model(a, m).mean() - b).square())
        checked(m)
    return torch.stack(losses).mean()


def rows_of_one(model, x, y, mark):
    return sum(whole(model, x[i : i + 1], y[i : i + 1], mark[i : i + 1]) for i in range(len(x))) / len(x)


def chunks(model, x, y, mark):
    parts = zip(x.split(3), y.split(3), mark.split(3), strict=True)
    return sum(whole(model, *part) * len(part[0]) for part in parts) / len(x)


def joined(model, x, y, mark):
    out = torch.cat([model(a.unsqueeze(0), m.unsqueeze(0)) for a, m in zip(x, mark, strict=True)])
    checked(mark)
    return (out.mean(1) - y).square().mean()


def lengths(x):
    return [1 + number % 3 for number in range(len(x))]


def padded(model, x, y, mark):
    sequences = pad_sequence([a.expand(n, -1) for a, n in zip(x, lengths(x), strict=True)], batch_first=True)
    out = model(sequences, mark[:, None].expand(sequences.shape[:2]))
    checked(mark)
    return (out.mean((1, 2)) - y).square().mean()


def packed(model, x, y, mark):
    flat = pack_sequence([a.expand(n, -1) for a, n in zip(x, lengths(x), strict=True)], enforce_sorted=False).data
    marks = pack_sequence([a.expand(n) for a, n in zip(mark, lengths(x), strict=True)], enforce_sorted=False).data
    out = model(flat, marks)
    checked(mark)
    return out.square().mean() + (x.mean(1) - y).square().mean()


def called_twice(model, x, y, mark):
    out = model(model(x, torch.full_like(mark, NONE)), mark) + model(x.flip(1), mark)
    checked(mark)
    return (out.mean(1) - y).square()


def nested(model, x, y, mark):
    inner = [loop(model, a, b, m) * len(a) for a, b, m in zip(x.split(4), y.split(4), mark.split(4), strict=True)]
    return sum(inner) / len(x)


def penalised(model, x, y, mark):
    """A gradient penalty: cannot run without recording."""
    x = x.clone().requires_grad_()
    out = model(x, mark)
    checked(mark)
    (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    return (out.mean(1) - y).square().mean() + 0.01 * slope.square().mean()


def transposed(model, x, y, mark):
    """Features first, as many as there may be samples, for a module that keeps them in place."""
    out = nn.functional.hardtanh(model(x, mark).T, -9, 9)
    checked(mark)
    return nn.Identity()(out).mean()


FORMS = (whole, loop, rows_of_one, chunks, joined, padded, packed, called_twice, nested, penalised, transposed)


def check(seed, sizes=(1, 130)):
    """State the law for one random case; gives the number of calls of the loss, and how many samples were bad."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    form, fault = rng.choice(FORMS), rng.randrange(len(FAULTS))
    size = rng.choice((rng.randint(*sizes), rng.randint(2, 20)))
    count = rng.choice((1, 1, 1, rng.randint(1, max(1, size // 3))))
    bad = sorted(rng.sample(range(size), count))
    width = rng.choice((size, 4, 7))
    model = Encoder(width, rng.randrange(3)).double()
    x, y, mark = torch.randn(size, width).double(), torch.randn(size).double(), torch.full((size,), NONE)
    mark[bad] = fault
    if FAULTS[fault] in ("nan", "inf") and rng.random() < 0.3:
        x[bad, 0], mark[bad] = float(FAULTS[fault]), NONE
    calls = []

    def loss_fn(batch):
        calls.append(len(batch[0]))
        return form(model, *batch)

    said = f"seed {seed}: {form.__name__}, {FAULTS[fault]}, {size} samples, bad {bad}, width {width}"
    kept = [row for row in range(size) if row not in bad]
    clean = copy.deepcopy(model)
    try:
        form(model, x, y, mark).mean().backward()
        harmless = all(bool(p.grad.isfinite().all()) for p in model.parameters())
    except (ValueError, LookupError):
        harmless = False
    model.zero_grad(set_to_none=True)
    if harmless:
        return 0, 0
    if not kept:
        try:
            result = gg.Guard(model).backward((x, y, mark), loss_fn)
        except (ValueError, LookupError, gg.TooManyBadSamples):
            return 0, 0
        raise AssertionError(f"{said}: {result}")
    result = gg.Guard(model).backward((x, y, mark), loss_fn)
    form(clean, x[kept], y[kept], mark[kept]).mean().backward()
    assert result.kept == kept, f"{said}: dropped {[i.row for i in result.dropped]}"
    assert result.exact, said
    assert not any(i.cause == "together" for i in result.dropped), said
    for ours, theirs in zip(model.parameters(), clean.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad), said
    allowed = 2 * count * math.log2(size) + 6
    assert len(calls) <= allowed, f"{said}: {len(calls)} calls, {allowed:.1f} allowed"
    return len(calls), count
