"""gradgate.edits against `clone` and an assignment in place, which is what people write today."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import gradgate as gg
from benchmarks.harness import Candidate, Row


def clone_and_assign(x: torch.Tensor, index: Any, value: Any) -> torch.Tensor:
    """Do what an edit does, by hand; with repeated indices its result and its gradient are anybody's."""
    new = x.clone()
    new[index] = value
    return new


def forward(make: Callable[[], tuple[torch.Tensor, Any, Any]], **keywords: Any) -> Callable[[], dict[str, Candidate]]:
    """Set values without recording."""

    def candidates() -> dict[str, Candidate]:
        x, index, value = make()
        field: dict[str, Candidate] = {
            "gg.at": lambda: gg.at(x)[index].set(value, **keywords),
            "clone + assign": lambda: clone_and_assign(x, index, value),
        }
        if isinstance(index, torch.Tensor) and index.dtype is torch.int64:
            field["index_put"] = lambda: x.index_put((index,), torch.as_tensor(value))
        return field

    return candidates


def both(make: Callable[[], tuple[torch.Tensor, Any, Any]]) -> Callable[[], dict[str, Candidate]]:
    """Set values and walk back to x and v."""

    def candidates() -> dict[str, Candidate]:
        x, index, value = make()
        x.requires_grad_()
        value.requires_grad_()

        def run(edit: Callable[[], torch.Tensor]) -> Candidate:
            return lambda: torch.autograd.grad(edit().sum(), (x, value))

        return {
            "gg.at": run(lambda: gg.at(x)[index].set(value)),
            "clone + assign": run(lambda: clone_and_assign(x, index, value)),
        }

    return candidates


def matrix(side: int, index: Any, value: Any) -> Callable[[], tuple[torch.Tensor, Any, Any]]:
    """Make a square matrix, an index and a value for it."""
    return lambda: (torch.randn(side, side), index() if callable(index) else index, value())


def elements(count: int, size: int = 1_000_000) -> Callable[[], tuple[torch.Tensor, Any, Any]]:
    """Make a row of elements, and different places in it in random order."""
    return lambda: (torch.randn(size), torch.randperm(size)[:count], torch.randn(count))


def table() -> tuple[torch.Tensor, Any, Any]:
    """Make an embedding table and the rows of one batch."""
    return torch.randn(50_000, 64), torch.randperm(50_000)[:512], torch.randn(512, 64)


def masked_elements() -> tuple[torch.Tensor, Any, Any]:
    """Make a matrix, a mask and as many values as it has True elements."""
    keep = torch.rand(1000, 1000) > 0.5
    return torch.randn(1000, 1000), keep, torch.randn(int(keep.sum()))


def row(
    title: str,
    candidates: Callable[[], dict[str, Candidate]],
    at_most: float | None = 1.15,
    peers: tuple[str, ...] = ("clone + assign",),
) -> Row:
    """Compare with the assignment in place."""
    return Row("edits", title, candidates, ours="gg.at", base="clone + assign", at_most=at_most, peers=peers)


def rows_by_index(side: int, count: int) -> Callable[[], tuple[torch.Tensor, Any, Any]]:
    """Make a matrix, and the numbers and values of some of its rows."""
    return matrix(side, lambda: torch.randperm(side)[:count], lambda: torch.randn(count, side))


def rows_by_slice(side: int, count: int) -> Callable[[], tuple[torch.Tensor, Any, Any]]:
    """Make a matrix, and the values of rows that lie together."""
    return matrix(side, slice(100, 100 + count), lambda: torch.randn(count, side))


def small_step() -> dict[str, Candidate]:
    """Make a step of a small network, plain and inside the scope."""
    model = torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.ReLU(), torch.nn.Linear(512, 512), torch.nn.ReLU())
    x = torch.randn(128, 256)

    def step() -> None:
        model.zero_grad()
        model(x).square().mean().backward()

    def inside() -> None:
        with gg.allow_overwrites():
            step()

    return {"allow_overwrites": inside, "plain": step}


def overwriting_step() -> dict[str, Candidate]:
    """Make a step that overwrites what autograd has saved, inside the scope and inside torch's own mode."""
    model = torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.Tanh(), torch.nn.Linear(512, 512))
    x = torch.randn(128, 256)

    def step(mode: Callable[[], Any]) -> Candidate:
        def run() -> None:
            model.zero_grad()
            with mode():
                hidden = model[1](model[0](x))
                hidden[:, :8] = 0.0
                model[2](hidden).square().mean().backward()

        return run

    torchs = torch.autograd.graph.allow_mutation_on_saved_tensors
    return {"allow_overwrites": step(gg.allow_overwrites), "torch's own mode": step(torchs)}


def edited_module() -> dict[str, Candidate]:
    """Give a model of 20 layers another row in one of them, as a state for functional_call."""
    model = torch.nn.Sequential(*[torch.nn.Linear(256, 256) for _ in range(20)])
    row = torch.randn(256)

    def by_hand() -> dict[str, torch.Tensor]:
        state = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        state["7.weight"] = clone_and_assign(state["7.weight"], 3, row)
        return state

    return {"gg.at": lambda: gg.at(model)["7.weight"][3].set(row), "dict, clone + assign": by_hand}


def edited_tree() -> dict[str, Candidate]:
    """Change one tensor of a nested batch."""
    batch = {"image": [torch.randn(64, 3, 32, 32) for _ in range(4)], "label": torch.arange(64), "meta": {"id": 7}}

    def by_hand() -> dict[str, Any]:
        images = list(batch["image"])  # type: ignore[call-overload]
        images[1] = clone_and_assign(images[1], 5, 0.0)
        return {**batch, "image": images}

    return {"gg.at": lambda: gg.at(batch)["image.1"][5].set(0.0), "dict, clone + assign": by_hand}


BY_HAND = ("dict, clone + assign",)
BY_INDEX = ("clone + assign", "index_put")

ROWS = [
    row("set a slice of 200 rows, 2000x2000", forward(rows_by_slice(2000, 200))),
    row("set a number in every second row, 2000x2000", forward(matrix(2000, slice(None, None, 2), lambda: 0.0))),
    row("set 200 rows by an index tensor, 2000x2000", forward(rows_by_index(2000, 200)), peers=BY_INDEX),
    row("set 1000 rows by an index tensor, 2000x2000", forward(rows_by_index(2000, 1000)), peers=BY_INDEX),
    row("set 512 rows of an embedding table, 50000x64", forward(table), peers=BY_INDEX),
    row(
        "set a number under a mask, half of 1000x1000",
        forward(matrix(1000, lambda: torch.rand(1000, 1000) > 0.5, lambda: 0.0)),
    ),
    row("set a value for each True of a mask, half of 1000x1000", forward(masked_elements)),
    row("set 200 rows by an index tensor, 2000x2000, with backward", both(rows_by_index(2000, 200))),
    row("set a slice of 200 rows, 2000x2000, with backward", both(rows_by_slice(2000, 200))),
    row("set a slice of 100 rows, 1000x1000 (a call shows)", forward(rows_by_slice(1000, 100))),
    row(
        "set 100 rows by an index tensor, 1000x1000 (a call shows)",
        forward(rows_by_index(1000, 100)),
        peers=BY_INDEX,
    ),
    row(
        "set 100,000 single elements of 1e6 (the search shows)",
        forward(elements(100_000)),
        at_most=None,
        peers=BY_INDEX,
    ),
    row(
        "the same with unique_indices=True",
        forward(elements(100_000), unique_indices=True),
        at_most=None,
        peers=BY_INDEX,
    ),
    Row("edits", "a step of a small MLP inside allow_overwrites", small_step, ours="allow_overwrites", base="plain"),
    Row(
        "edits",
        "a step that overwrites saved activations, against torch's own mode",
        overwriting_step,
        ours="allow_overwrites",
        base="torch's own mode",
        at_most=1.05,
        peers=("torch's own mode",),
    ),
    Row(
        "edits",
        "set a row in one of 20 layers of a model",
        edited_module,
        ours="gg.at",
        base=BY_HAND[0],
        at_most=1.5,
        peers=BY_HAND,
    ),
    Row(
        "edits",
        "set an image in a nested batch",
        edited_tree,
        ours="gg.at",
        base=BY_HAND[0],
        at_most=1.5,
        peers=BY_HAND,
    ),
    row("set 4 elements of 16 (what a call costs)", forward(elements(4, 16)), at_most=None, peers=BY_INDEX),
]
