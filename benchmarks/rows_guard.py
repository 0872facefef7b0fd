"""The guard: what a healthy step costs, and what a bad one costs against a clean step and against the usual recipes."""

from __future__ import annotations

import logging
import math
import tempfile
from contextlib import suppress
from functools import partial
from itertools import cycle
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

import gradgate as gg
from benchmarks.harness import Growth, Row
from gradgate._torch_private import find_non_finite

BATCHES = (64, 256, 1024)


class Picky(nn.Module):
    """A layer that refuses some samples, as a Cholesky factorisation does, and gives the others as they are."""

    def forward(self, x):
        """Raise if any row is marked."""
        if bool((x.flatten(1)[:, 0] > 1e6).any()):
            raise ValueError("a row is out of range")
        return x


class Spoiling(nn.Module):
    """A layer whose value (log of 0) or gradient (sqrt at 0) is not finite for marked rows."""

    def __init__(self, gradient):
        super().__init__()
        self.gradient = gradient

    def forward(self, x):
        """Spoil marked rows."""
        marked = x.detach().flatten(1).abs().amax(1) > 1e6
        zero = torch.where(marked, 0.0, 1.0).reshape(-1, *[1] * (x.dim() - 1))
        return x * (zero * (1 + 0 * x)).sqrt() if self.gradient else x + zero.log()


class Net(nn.Module):
    """A trunk, the marks of bad rows, the fault (in a module, or in the body of forward), a head."""

    def __init__(self, front, fault, back, in_body=False):
        super().__init__()
        self.front, self.fault, self.back, self.in_body = front, fault, back, in_body

    def forward(self, x, marks):
        """Run the parts."""
        hidden = self.front(x)
        hidden = hidden + marks.reshape(-1, *[1] * (hidden.dim() - 1))
        if self.in_body and bool((hidden.flatten(1)[:, 0] > 1e6).any()):
            raise ValueError("a row is out of range")
        return self.back(self.fault(hidden))


def mlp():
    """Two hidden layers with BatchNorm: about 0.3 ms for 64 samples on a quiet core."""
    front = nn.Sequential(nn.Linear(64, 128), nn.BatchNorm1d(128), nn.ReLU())
    back = nn.Sequential(nn.Linear(128, 128), nn.BatchNorm1d(128), nn.ReLU(), nn.Linear(128, 10))
    return front, back, (64,)


def cnn():
    """Three convolutions with BatchNorm."""
    front = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU())
    rest = (nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.Conv2d(32, 32, 3, stride=2))
    return front, nn.Sequential(*rest, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10)), (3, 16, 16)


def transformer():
    """Two layers of attention over 16 positions."""

    def layer():
        return nn.TransformerEncoderLayer(32, 4, 64, dropout=0.1, batch_first=True)

    return nn.Sequential(nn.Linear(16, 32), layer()), nn.Sequential(layer(), nn.Flatten(), nn.Linear(512, 10)), (16, 16)


MODELS = {"MLP": mlp, "CNN": cnn, "transformer": transformer}


def training(kind, size, bad, fault, in_body=False):
    """Make a model, an optimizer, a batch with some bad rows, and its loss."""
    torch.manual_seed(0)
    front, back, shape = MODELS[kind]()
    model = Net(front, fault, back, in_body)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    x, y = torch.randn(size, *shape), torch.randint(0, 10, (size,))
    marks = torch.zeros(size)
    marks[torch.randperm(size)[:bad]] = 1e7

    def loss_fn(batch):
        inputs, labels, marks = batch
        return F.cross_entropy(model(inputs, marks), labels)

    return model, optimizer, (x, y, marks), loss_fn


def plain_step(optimizer, batch, loss_fn):
    """Make an ordinary training step."""
    optimizer.zero_grad()
    loss_fn(batch).backward()
    optimizer.step()


def guarded_step(guard, optimizer, batch, loss_fn):
    """Make the same under guard."""
    optimizer.zero_grad()
    guard.backward(batch, loss_fn)
    optimizer.step()


def fails(loss_fn, batch, rows, backward):
    """Probe some rows as people do: at least two of them, for BatchNorm."""
    part = [leaf[rows if len(rows) > 1 else rows * 2] for leaf in batch]
    try:
        for parameter in loss_fn.parameters:
            parameter.grad = None
        with torch.set_grad_enabled(backward):
            loss = loss_fn(part)
            if not torch.isfinite(loss):
                return True
            if not backward:
                return False
            loss.backward()
            return not all(torch.isfinite(p.grad).all() for p in loss_fn.parameters if p.grad is not None)
    except ValueError:
        return True


def search_one_by_one(rows, failing):
    """Try each row."""
    return [row for row in rows if failing([row])]


def search_by_halves(rows, failing):
    """Try halves of what fails."""
    if not failing(rows):
        return []
    if len(rows) == 1:
        return rows
    middle = len(rows) // 2
    return search_by_halves(rows[:middle], failing) + search_by_halves(rows[middle:], failing)


def recipe_step(model, optimizer, batch, loss_fn, search, backward):
    """Make a step with one of the usual recipes: on a fault, find the bad rows and leave them out."""
    optimizer.zero_grad()
    rows = list(range(len(batch[0])))
    probe = partial(fails, loss_fn, batch, backward=backward)
    if probe(rows):
        bad = set(search(rows, lambda some: probe(some)))
        optimizer.zero_grad()
        batch = [leaf[[row for row in rows if row not in bad]] for leaf in batch]
    loss_fn(batch).backward()
    optimizer.step()


def checked_step(optimizer, batch, loss_fn, parameters, found, one):
    """Make a plain step that only looks at its gradients, in one fused pass with one read: no guard does less."""
    optimizer.zero_grad()
    loss_fn(batch).backward()
    find_non_finite([p.grad for p in parameters], found, one)
    found.item()
    optimizer.step()


def attempt(loss_fn, batch, recording):
    """Try a batch that fails."""
    with torch.set_grad_enabled(recording), suppress(ValueError):
        loss = loss_fn(batch)
        if recording and loss.isfinite():
            loss.backward()


def known_step(optimizer, batch, loss_fn, look=None):
    """Make the step of somebody who knows the bad rows: the failed try, perhaps a look, and the step without them.

    It puts nothing back, finds nothing and writes nothing down: no guard can take less.
    """
    optimizer.zero_grad()
    attempt(loss_fn, batch, recording=True)
    if look is not None:
        look()
    optimizer.zero_grad()
    rows = (batch[2] == 0).nonzero().flatten()
    loss_fn([leaf[rows] for leaf in batch]).backward()
    optimizer.step()


def least_tests(module, hidden, marks):
    """Run as many tests of a module as any search by passing and failing groups needs: log2 of all possible answers."""
    bad, good = ((marks == mark).nonzero().flatten() for mark in (1e7, 0))
    count = math.ceil(math.log2(math.comb(len(marks), len(bad))))
    group = good[: max(2, round(0.7 * len(marks) / len(bad)))]
    groups = [torch.cat([group[1:], bad[:1]]) if number % 2 else group for number in range(count)]

    def look():
        for rows in groups:
            with torch.no_grad(), suppress(ValueError):
                module(hidden[rows])

    return look


def healthy(kind, size):
    """A clean batch, plain and guarded."""
    model, optimizer, batch, loss_fn = training(kind, size, 0, nn.Identity())
    guard = gg.Guard(model)
    flags = torch.zeros(1), torch.ones(1)
    return {
        "plain": partial(plain_step, optimizer, batch, loss_fn),
        "guarded": partial(guarded_step, guard, optimizer, batch, loss_fn),
        "limit: gradients checked": partial(checked_step, optimizer, batch, loss_fn, list(model.parameters()), *flags),
    }


def with_options(kind, size, options):
    """A clean batch under a guard with some options, against one without."""
    model, optimizer, batch, _ = training(kind, size, 0, nn.Identity())
    size = len(batch[0])

    def losses_of(batch):
        inputs, labels, marks = batch
        return F.cross_entropy(model(inputs, marks), labels, reduction="none")

    firsts = cycle(range(0, 64 * size, size))  # an epoch of 64 batches

    def step(guard):
        optimizer.zero_grad()
        first = next(firsts)
        guard.backward(batch, losses_of, ids=range(first, first + size))
        optimizer.step()

    ledger = gg.Ledger(Path(tempfile.mkdtemp()) / "run.ledger")
    guards = {"without": gg.Guard(model, ledger=ledger), "with": gg.Guard(model, ledger=ledger, **options)}
    return {name: partial(step, guard) for name, guard in guards.items()}


def clipping(kind, size):
    """Clip each sample's gradient: under guard, and with a loop over the samples."""
    torch.manual_seed(0)
    front, back, shape = MODELS[kind]()
    model = without_batch_norm(nn.Sequential(front, back))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    batch = torch.randn(size, *shape), torch.randint(0, 10, (size,))
    guard = gg.Guard(model, clip_samples=1.0)

    def loss_fn(batch):
        return F.cross_entropy(model(batch[0]), batch[1])

    def loop():
        totals = [torch.zeros_like(p) for p in model.parameters()]
        for row in range(size):
            optimizer.zero_grad()
            loss_fn([leaf[row : row + 1] for leaf in batch]).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for total, parameter in zip(totals, model.parameters(), strict=True):
                total += parameter.grad
        for total, parameter in zip(totals, model.parameters(), strict=True):
            parameter.grad = total / size
        optimizer.step()

    return {
        "loop": loop,
        "guarded": partial(guarded_step, guard, optimizer, batch, loss_fn),
        "not clipped": partial(plain_step, optimizer, batch, loss_fn),
    }


def without_batch_norm(model):
    """Put nothing in the place of BatchNorm, in which samples meet."""
    for module in model:
        for name, child in module.named_children():
            if isinstance(child, nn.BatchNorm1d | nn.BatchNorm2d):
                setattr(module, name, nn.Identity())
    return model


def faulty(kind, size, bad, fault, in_body=False, backward=False):
    """A batch with bad rows under guard and with the usual recipes, against a clean step."""
    logging.getLogger("gradgate").setLevel(logging.ERROR)
    _, clean_optimizer, clean, clean_loss = training(kind, size, 0, fault(), in_body)
    model, optimizer, batch, loss_fn = training(kind, size, bad, fault(), in_body)
    loss_fn.parameters = list(model.parameters())
    guard = gg.Guard(model, patience=10**9)
    candidates = {
        "clean": partial(plain_step, clean_optimizer, clean, clean_loss),
        "guarded": partial(guarded_step, guard, optimizer, batch, loss_fn),
        "halves": partial(recipe_step, model, optimizer, batch, loss_fn, search_by_halves, backward),
    }
    if can_wait_for_one_by_one(kind, size):
        recipe = partial(recipe_step, model, optimizer, batch, loss_fn, search_one_by_one, backward)
        candidates["one by one"] = recipe
    known = candidates["limit: known rows"] = partial(known_step, optimizer, batch, loss_fn)
    if isinstance(model.fault, Picky):
        with torch.no_grad():
            hidden = model.front(batch[0]) + batch[2].reshape(-1, *[1] * (len(batch[0].shape) - 1))
        candidates["limit: least tests"] = partial(known, look=least_tests(model.fault, hidden, batch[2]))
    else:
        candidates["limit: one more look"] = partial(known, look=partial(attempt, loss_fn, batch, recording=backward))
    return candidates


def can_wait_for_one_by_one(kind, size):
    """Tell whether trying each row takes less than a few seconds."""
    return kind == "MLP" or size <= 256


def is_quick(kind, size, bad):
    """Tell whether a bad step belongs to a quick run: the small ones, the chart, and what the documentation cites."""
    return (
        size == 64
        or (size == 256 and kind == "MLP")
        or (kind, bad) == ("MLP", 1)
        or (kind, size, bad) == ("CNN", 256, 1)
    )


def faulty_row(title, goal, kind, size, bad, *options, base="clean"):
    """Make a row of a bad step, against a clean one or against a recipe."""
    candidates = partial(faulty, kind, size, bad, *options)
    recipes = ("halves", "one by one") if can_wait_for_one_by_one(kind, size) else ("halves",)
    growth = Growth(f"a guarded step, {title}, 1 bad, {kind}", "samples in the batch", size) if bad == 1 else None
    return Row(
        "guard",
        f"{title}, {bad} bad of {size}, {kind}" + ("" if base == "clean" else f", against {base}"),
        candidates,
        "guarded",
        base,
        at_most=goal,
        peers=recipes,
        growth=growth if (kind, title) == ("MLP", "a module raises") else None,
        quick=is_quick(kind, size, bad),
        rounds=5,
        seconds=1.0,
    )


ROWS = [
    Row(
        "guard", f"healthy step, batch {size}, {kind}", partial(healthy, kind, size), "guarded", "plain",
        at_most=1.03 if (kind, size) == ("MLP", 64) else 1.02, rounds=41, seconds=6.0,
        growth=Growth(f"a healthy step of the guard, {kind}", "samples in the batch", size),
    )
    for kind in MODELS
    for size in BATCHES
]  # fmt: skip
for kind in ("MLP", "transformer"):
    for title, goal, options in (
        ("healthy step with history=True", 1.03, {"history": True}),
        ('healthy step with out_of_memory="split"', 1.02, {"out_of_memory": "split"}),
    ):
        candidates = partial(with_options, kind, 256, options)
        goals = {"at_most": goal, "rounds": 41, "seconds": 6.0}
        ROWS.append(Row("guard", f"{title}, batch 256, {kind}", candidates, "with", "without", **goals))
for kind in MODELS:
    candidates = partial(clipping, kind, 64)
    title = f"gradients of samples clipped, batch 64, {kind}, against the loop"
    ROWS.append(Row("guard", title, candidates, "guarded", "loop", at_most=1, peers=("loop",), rounds=5))
for kind in MODELS:
    for size in BATCHES:
        for bad in (1, 4, size // 8):
            few = bad < size // 8
            ROWS.append(faulty_row("a module raises", 2.5 if few else 4, kind, size, bad, Picky))
            ROWS.append(faulty_row("a module gives NaN", 2.5 if few else 4, kind, size, bad, partial(Spoiling, False)))
        body = partial(faulty_row, "the body of forward raises")
        ROWS += [body(4, kind, size, bad, nn.Identity, True) for bad in (1, 4)]
        recipe = "one by one" if can_wait_for_one_by_one(kind, size) else "halves"
        ROWS.append(body(1, kind, size, size // 8, nn.Identity, True, base=recipe))
        for bad in (1, 4):
            ROWS.append(faulty_row("a gradient is NaN", 3, kind, size, bad, partial(Spoiling, True), False, True))
