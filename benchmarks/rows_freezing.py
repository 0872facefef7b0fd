"""What freezing costs: a pinned table, a few rows of a large one, half a frozen model, and the proof."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

import gradgate as gg
from benchmarks.harness import Candidate, Growth, Row

TABLE = (50_000, 768)
IDS = torch.randint(0, TABLE[0], (16, 128), generator=torch.Generator().manual_seed(0))


def stepping(embedding: nn.Embedding) -> Candidate:
    """One training step as users write it: zero_grad, forward, backward, AdamW."""
    ids = IDS % embedding.num_embeddings
    optimizer = torch.optim.AdamW(embedding.parameters(), lr=1e-3)

    def step() -> None:
        optimizer.zero_grad()
        embedding(ids).sum().backward()
        optimizer.step()

    step()
    return step


def pinned(share: float, by: str) -> dict[str, Candidate]:
    """A table with a share of it pinned, against the plain one."""
    plain, ours = nn.Embedding(*TABLE), nn.Embedding(*TABLE)
    if by == "rows":
        gg.pin(ours.weight, rows=torch.randperm(TABLE[0])[: int(share * TABLE[0])])
    else:
        gg.pin(ours.weight, frozen=torch.rand(TABLE) < share)
    return {"plain": stepping(plain), "pin": stepping(ours)}


def pinned_and_bound(share: float, by: str) -> dict[str, Candidate]:
    """The same, and the least that holding most of a table takes: each gradient and each value touched once more."""
    bare = nn.Embedding(*TABLE)
    start = bare.weight.detach().clone()

    def touch(weight: torch.Tensor) -> None:
        weight.grad.mul_(1.0)

    bare.weight.register_post_accumulate_grad_hook(touch)
    step = stepping(bare)

    def touched() -> None:
        step()
        with torch.no_grad():
            bare.weight.copy_(start)

    return {**pinned(share, by), "a pass over gradient and values, no mask": touched}


def hooked() -> dict[str, Candidate]:
    """Half of the rows pinned, against the recipe that users write, which does not hold the values."""
    ours, theirs = nn.Embedding(*TABLE), nn.Embedding(*TABLE)
    half = torch.arange(TABLE[0]) % 2 == 0
    gg.pin(ours.weight, rows=half.nonzero().squeeze(1))
    keep = (~half).float().unsqueeze(1)
    theirs.weight.register_hook(lambda gradient: gradient * keep)
    step, start = stepping(theirs), theirs.weight.detach().clone()

    def restored() -> None:
        step()
        with torch.no_grad():
            theirs.weight.copy_(torch.where(half[:, None], start, theirs.weight))

    return {"hook and torch.where": restored, "pin": stepping(ours)}


def rows() -> dict[str, Candidate]:
    """Ten rows of the table learn, against the whole table."""
    plain, ours = nn.Embedding(*TABLE), nn.Embedding(*TABLE)
    gg.train_rows(ours, rows=range(10))
    return {"plain": stepping(plain), "train_rows": stepping(ours)}


def optimizer_state(embedding: nn.Embedding) -> int:
    """Count the elements that AdamW keeps for a table after a step."""
    optimizer = torch.optim.AdamW(embedding.parameters(), lr=1e-3)
    embedding(IDS).sum().backward()
    optimizer.step()
    return sum(value.numel() for entry in optimizer.state.values() for value in entry.values())


def state_of_rows() -> dict[str, Candidate]:
    """What AdamW keeps for ten rows of the table, against the table itself."""
    table = nn.Embedding(*TABLE)
    gg.train_rows(table, rows=range(10))
    return {"the table": lambda: TABLE[0] * TABLE[1], "train_rows": lambda: optimizer_state(table)}


def growing(count: int) -> dict[str, Candidate]:
    """A table of so many rows: plain, half of it pinned, ten rows of it learning."""
    plain, half, ten = (nn.Embedding(count, 64) for _ in range(3))
    gg.pin(half.weight, rows=torch.randperm(count)[: count // 2])
    gg.train_rows(ten, rows=range(10))
    return {
        "plain": stepping(plain),
        "pin, half of the rows": stepping(half),
        "train_rows, 10": stepping(ten),
    }


def deep(freeze_by: str) -> Candidate:
    """A stack of layers of which the first half is frozen: by us, by hand, or not at all."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(40)])
    first_half = [f"{number}.*" for number in range(20)]
    if freeze_by == "gg.freeze":
        gg.freeze(model, *first_half)
    elif freeze_by == "requires_grad_(False)":
        model[:20].requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    x = torch.randn(64, 64)

    def step() -> None:
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()

    step()
    return step


def halves() -> dict[str, Candidate]:
    """Half a model frozen, against the same by hand."""
    return {name: deep(name) for name in ("requires_grad_(False)", "gg.freeze", "nothing frozen")}


def proving() -> dict[str, Candidate]:
    """verify() of the table, against comparing it with a copy."""
    table = nn.Embedding(*TABLE)
    handle = gg.freeze(table)
    kept = table.weight.detach().clone()
    return {
        "torch.equal with a copy": lambda: torch.equal(table.weight, kept),
        "verify": handle.verify,
    }


def routed() -> dict[str, Candidate]:
    """One encoder and two heads, three losses: which loss trains which part, by us, by hand, and not at all."""
    model = nn.ModuleDict(
        {
            "encoder": nn.Sequential(*[nn.Linear(256, 256) for _ in range(6)]),
            "rebuild": nn.Linear(256, 256),
            "classify": nn.Linear(256, 10),
        }
    )
    x = torch.randn(128, 256)
    parts = {name: list(model[name].parameters()) for name in model}

    def losses() -> dict[str, torch.Tensor]:
        model.zero_grad()
        code = model["encoder"](x)
        return {
            "rebuilt": (model["rebuild"](code) - x).square().mean(),
            "class": model["classify"](code).logsumexp(1).mean(),
        }

    routes = {"encoder.*": ["rebuilt"], "rebuild.*": ["rebuilt"], "classify.*": ["class"]}

    def by_hand() -> None:
        found = losses()
        torch.autograd.backward(found["rebuilt"], inputs=parts["encoder"] + parts["rebuild"], retain_graph=True)
        torch.autograd.backward(found["class"], inputs=parts["classify"])

    return {
        "backward(inputs=...) by hand": by_hand,
        "gg.route": lambda: gg.route(routes, losses(), model),
        "one backward of the sum": lambda: sum(losses().values()).backward(),  # type: ignore[union-attr]
    }


def of_table(what: str, candidates: Callable[[], dict[str, Candidate]], ours: str, at_most: float | None) -> Row:
    """A row about one step of the large table."""
    base = "hook and torch.where" if candidates is hooked else "plain"
    peers = (base,) if candidates is hooked else ()
    title = f"AdamW step, 50,000 x 768, {what}"
    return Row("freezing", title, candidates, ours, base, at_most=at_most, peers=peers, rounds=11)


def of_size(count: int) -> Row:
    """A row of a table of some size."""
    growth = Growth("AdamW step of a table, 64 wide", "rows", count)
    return Row(
        "freezing", f"AdamW step, {count:,} x 64", lambda: growing(count), "train_rows, 10", "plain", growth=growth
    )


ROWS = [
    of_table("1 % of the rows pinned", lambda: pinned(0.01, "rows"), "pin", 1.10),
    of_table("half of the rows pinned", lambda: pinned(0.5, "rows"), "pin", 1.10),
    of_table("99 % of the rows pinned", lambda: pinned_and_bound(0.99, "rows"), "pin", 1.10),
    of_table("one element in 1,000 pinned", lambda: pinned(0.001, "elements"), "pin", 1.10),
    of_table("a random half of the elements pinned", lambda: pinned_and_bound(0.5, "elements"), "pin", 1.10),
    of_table("half of the rows pinned, against a hook and where", hooked, "pin", 1.0),
    of_table("10 rows learn", rows, "train_rows", 0.05),
    Row(
        "freezing",
        "AdamW step, half of 40 layers frozen",
        halves,
        "gg.freeze",
        "requires_grad_(False)",
        at_most=1.02,
        peers=("requires_grad_(False)",),
        rounds=60,
    ),
    Row(
        "freezing",
        "prove that 50,000 x 768 did not move",
        proving,
        "verify",
        "torch.equal with a copy",
        peers=("torch.equal with a copy",),
    ),
    Row(
        "freezing",
        "optimizer state of AdamW, 50,000 x 768, 10 rows learn",
        state_of_rows,
        "train_rows",
        "the table",
        0.01,
        counts=True,
    ),
    Row(
        "freezing",
        "two losses, each trains its own part of an encoder with two heads",
        routed,
        "gg.route",
        "backward(inputs=...) by hand",
        at_most=1.1,
        peers=("backward(inputs=...) by hand",),
    ),
    *[of_size(count) for count in (1_000, 10_000, 100_000)],
]
