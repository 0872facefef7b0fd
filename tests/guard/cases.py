"""Random trainings with faults, and the law that holds for each of them.

A case is a small model of random layers, a batch in which some rows carry a mark, and a fault that the mark sets off
somewhere: in a module, in the body of a forward, in the loss, in the batch itself. The law: after a guarded step and
an optimizer step, everything is `torch.equal` to the same step on the batch without the marked rows.
"""

import copy
import logging
import random

import torch
from torch import nn
from torch.nn import functional as F

import gradgate as gg

FAULTS = ("raise", "nan", "inf", "gradient", "body", "loss raise", "loss nan", "loss gradient", "input")
# The others may come to nothing: tanh makes infinity 1, and a gradient in front of every weight reaches none.
SURE = ("raise", "nan", "body", "loss raise", "loss nan", "loss gradient")
OPTIMIZERS = (
    lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    lambda p: torch.optim.Adam(p, lr=0.01),
    lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1),
    lambda p: torch.optim.RMSprop(p, lr=0.01),
    lambda p: torch.optim.Adagrad(p, lr=0.05),
)


def has(mark, fault):
    return mark == FAULTS.index(fault)


class Trap(nn.Module):
    """Raises, or spoils a value or a gradient, for the rows that are marked so."""

    def forward(self, x, mark):
        if bool(has(mark, "raise").any()):
            raise ValueError("this layer does not like a row")
        shape = (-1, *[1] * (x.dim() - 1))
        x = x + torch.where(has(mark, "nan"), float("nan"), 0.0).reshape(shape)
        x = x + torch.where(has(mark, "inf"), float("inf"), 0.0).reshape(shape)
        zero = torch.where(has(mark, "gradient"), 0.0, 1.0).reshape(shape)
        return x * (zero * (1 + 0 * x)).sqrt()


class Residual(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(width, width), nn.ReLU())

    def forward(self, x):
        return x + self.inner(x)


class Attention(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.attention = nn.MultiheadAttention(width, 2, batch_first=True)

    def forward(self, x):
        return self.attention(x, x, x, need_weights=False)[0]


class Recurrent(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.lstm = nn.LSTM(width, width, batch_first=True)

    def forward(self, x):
        return self.lstm(x)[0]


class Transposed(nn.Module):
    """Normalises the features of sequences, which BatchNorm1d wants in the middle."""

    def __init__(self, width):
        super().__init__()
        self.norm = nn.BatchNorm1d(width)

    def forward(self, x):
        return self.norm(x.transpose(1, 2)).transpose(1, 2)


class RandomModel(nn.Module):
    """Random layers with a trap somewhere among them, and a head."""

    def __init__(self, rng):
        super().__init__()
        self.kind = rng.choice(("vector", "image", "sequence"))
        width = rng.choice((2, 4, 6))
        blocks = {
            "vector": (
                lambda: nn.Linear(width, width), lambda: nn.BatchNorm1d(width), lambda: nn.LayerNorm(width),
                lambda: nn.Dropout(0.4), nn.Tanh, lambda: Residual(width),
                lambda: nn.Sequential(nn.Linear(width, width), nn.ReLU(inplace=True)),
            ),
            "image": (
                lambda: nn.Conv2d(width, width, 3, padding=1), lambda: nn.BatchNorm2d(width), lambda: nn.Dropout2d(0.3),
                nn.ReLU, nn.GELU, lambda: nn.GroupNorm(1, width),
            ),
            "sequence": (
                lambda: Recurrent(width), lambda: Attention(width), lambda: nn.LayerNorm(width),
                lambda: Residual(width), lambda: Transposed(width), lambda: nn.Dropout(0.2),
            ),
        }[self.kind]  # fmt: skip
        layers = [rng.choice(blocks)() for _ in range(rng.randint(1, 4))]
        self.shape = {"vector": (width,), "image": (width, 3, 3), "sequence": (3, width)}[self.kind]
        self.at = rng.randint(0, len(layers))
        self.before = nn.Sequential(*layers[: self.at])
        self.trap = Trap()
        self.after = nn.Sequential(*layers[self.at :])
        self.head = nn.Linear(width, 3)

    def forward(self, x, mark):
        x = self.trap(self.before(x), mark)
        if bool(has(mark, "body").any()):
            raise RuntimeError("the body of the model does not like a row")
        x = self.after(x)
        return self.head(x.flatten(2).mean(2) if self.kind == "image" else x.mean(1) if self.kind == "sequence" else x)


def random_loss(model, rng):
    """Make a loss function: scalar, one for each sample, or one that mixes samples."""
    form = rng.choice(("mean", "each", "mixing"))

    def loss_fn(batch):
        x, y, mark = batch
        out = model(x, mark)
        if bool(has(mark, "loss raise").any()):
            raise ArithmeticError("the loss does not like a row")
        losses = F.cross_entropy(out, y, reduction="none")
        losses = losses + torch.where(has(mark, "loss nan"), float("nan"), 0.0)
        zero = torch.where(has(mark, "loss gradient"), 0.0, 1.0)
        losses = losses + (out.square().sum(1) * zero).sqrt()
        if form == "mixing":
            normal = F.normalize(out, dim=1, eps=1e-3)
            return losses.mean() + (normal @ normal.T).logsumexp(1).mean()
        return losses if form == "each" else losses.mean()

    return loss_fn


def random_case(seed):
    """Make a case: a model, its loss, an optimizer maker, batches, and the rows that are bad in the last."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    model = RandomModel(rng)
    size = rng.randint(3, 12)
    # Two samples stay at least: BatchNorm and the mean of one sample are another matter.
    bad = sorted(rng.sample(range(size), rng.randint(1, min(size // 2, size - 2))))
    faults = rng.sample(FAULTS, rng.choice((1, 1, 1, 2, 3)))
    batches = []
    for _ in range(rng.choice((1, 1, 2))):
        x, y = torch.randn(size, *model.shape), torch.randint(0, 3, (size,))
        mark = torch.full((size,), -1)
        batches.append((x, y, mark))
    for row in bad:
        mark[row] = FAULTS.index(rng.choice(faults))
        if has(mark[row], "input"):
            x[row] = rng.choice((float("nan"), float("inf")))
    return model, random_loss(model, rng), rng.choice(OPTIMIZERS), batches, bad


def tensors_of(model, optimizer):
    """Everything that a training carries from step to step."""
    states = optimizer.state_dict()["state"]
    yield from model.parameters()
    yield from model.buffers()
    yield from (p.grad for p in model.parameters() if p.grad is not None)
    yield from (v for entry in states.values() for v in entry.values() if isinstance(v, torch.Tensor))


def same(left, right):
    return len(left) == len(right) and all(
        a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(left, right, strict=True)
    )


def check(seed):
    """State the law for one random case; gives the step."""
    logging.getLogger("gradgate").setLevel(logging.ERROR)
    model, loss_fn, make_optimizer, batches, bad = random_case(seed)
    start = torch.get_rng_state(), copy.deepcopy(model.state_dict())

    optimizer = make_optimizer(model.parameters())
    guard = gg.Guard(model)
    for batch in batches[:-1]:
        assert not guard.backward(batch, loss_fn).dropped
    result = guard.backward(batches[-1], loss_fn)
    optimizer.step()
    found = [tensor.clone() for tensor in tensors_of(model, optimizer)]
    random_found = torch.get_rng_state(), random.getstate()

    model.zero_grad()
    model.load_state_dict(start[1])
    torch.set_rng_state(start[0])
    optimizer = make_optimizer(model.parameters())
    for batch in batches[:-1]:
        loss_fn(batch).mean().backward()
    loss = loss_fn([leaf[result.kept] for leaf in batches[-1]]).mean()
    loss.backward()
    optimizer.step()

    dropped = [incident.row for incident in result.dropped]
    x, _, mark = batches[-1]
    sure = [row for row in bad if FAULTS[mark[row]] in SURE or x[row].isnan().any()]
    assert sorted(dropped + result.kept) == list(range(len(x))), f"seed {seed}"
    assert set(sure) <= set(dropped) <= set(bad), f"seed {seed}: dropped {dropped}, marked {bad}: {result.dropped}"
    assert result.exact, f"seed {seed}: {result.reason}"
    assert torch.equal(result.loss, loss.detach()), f"seed {seed}"
    assert bool(loss.isfinite()), f"seed {seed}"
    assert torch.equal(torch.get_rng_state(), random_found[0]), f"seed {seed}"
    assert random.getstate() == random_found[1], f"seed {seed}"
    wanted = list(tensors_of(model, optimizer))
    assert all(bool(tensor.isfinite().all()) for tensor in wanted), f"seed {seed}"
    assert same(found, wanted), f"seed {seed}"
    return result
