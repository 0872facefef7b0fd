"""Handwritten digits, some of them broken, and four trainings: plain, skipping batches, guarded, without the broken.

All four have the same data and seeds. Each is the loop that one would write; they differ in the few lines that matter.
They are shown side by side, with a page about them at the end.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text
from torch.nn import functional
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler, default_collate

from gradgate.doctor import diagnose
from gradgate.errors import ArgumentValueError
from gradgate.guard import Guard
from gradgate.ledger import Ledger
from gradgate.loading import resilient
from gradgate.modes import grad_mode
from gradgate.replaying import Replay, replay
from gradgate.report import write_page

BATCH = 32
FAULTS = {
    "corrupt record": "reading it raises an OSError",
    "NaN pixels": "a few pixels are NaN",
    "unreadable weight": 'its weight says "n/a", so the loss code raises',
    "blank image": "its loss is finite, its gradient NaN",
    "unknown label": "the label is 255",
}
"""What is wrong with a broken sample, and how that shows."""


class Digits(Dataset[dict[str, Any]]):
    """Images of 8 x 8 pixels with a label and, as text, a weight."""

    def __init__(self, images: torch.Tensor, labels: torch.Tensor, broken: dict[int, str]) -> None:
        self.images = images
        self.labels = labels
        self.broken = broken

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> dict[str, Any]:
        fault = self.broken.get(index)
        if fault == "corrupt record":
            raise OSError(f"digit {index}: the checksum does not fit")
        image = self.images[index].clone()
        if fault == "NaN pixels":
            image[2:4, 3] = float("nan")
        elif fault == "blank image":
            image.zero_()
        return {
            "image": image[None],
            "label": 255 if fault == "unknown label" else int(self.labels[index]),
            "weight": "n/a" if fault == "unreadable weight" else "1.0",
            "id": index,
        }


def load(seed: int, bad_fraction: float) -> tuple[Digits, Digits]:
    """Load scikit-learn's digits, and break a part of the training half."""
    try:
        from sklearn.datasets import load_digits  # type: ignore[import-untyped]
    except ImportError:
        raise ArgumentValueError(
            "gradgate demo: scikit-learn is not installed.",
            why="the demonstration trains on the handwritten digits that come with it.",
            fix="pip install 'gradgate[demo]'",
        ) from None
    digits = load_digits()
    images = torch.from_numpy(digits.images).float() / 16
    labels = torch.from_numpy(digits.target).long()
    chance = random.Random(seed)
    order = list(range(len(images)))
    chance.shuffle(order)
    test, train = order[:360], order[360:]
    chosen = chance.sample(range(len(train)), round(bad_fraction * len(train)))
    kinds = list(FAULTS)
    broken = {index: kinds[number % len(kinds)] for number, index in enumerate(chosen)}
    return Digits(images[train], labels[train], broken), Digits(images[test], labels[test], {})


@dataclass
class Progress:
    epoch: int = 0
    loss: float = float("nan")
    accuracy: float = 0.0
    steps: int = 0
    batches_lost: int = 0
    samples_lost: int = 0
    end: str = ""

    def cells(self) -> list[str]:
        loss = "nan" if math.isnan(self.loss) else f"{self.loss:.4f}"
        return [str(self.epoch), loss, f"{self.accuracy:.1%}", str(self.batches_lost), str(self.samples_lost)]


class Network(torch.nn.Module):
    """A small CNN with BatchNorm and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = torch.nn.Conv2d(1, 16, 3, padding=1, bias=False)
        self.body = torch.nn.Sequential(
            torch.nn.BatchNorm2d(16),
            torch.nn.ReLU(),
            torch.nn.Conv2d(16, 32, 3, padding=1),
            torch.nn.BatchNorm2d(32),
            torch.nn.ReLU(),
            torch.nn.MaxPool2d(2),
            torch.nn.Flatten(),
            torch.nn.Dropout(0.2),
            torch.nn.Linear(512, 10),
        )

    def forward(self, image: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the scores, and how much light each image has: a norm, whose gradient at 0 is NaN."""
        edges = self.stem(image)
        return self.body(edges), edges.flatten(1).square().sum(1).sqrt()


def loss_of(model: Network, batch: dict[str, Any]) -> torch.Tensor:
    """Return the mean loss of a batch: weighted cross entropy, and a little for bright images."""
    weights = torch.tensor([float(text) for text in batch["weight"]])
    scores, light = model(batch["image"])
    per_sample = functional.cross_entropy(scores, batch["label"], reduction="none")
    loss: torch.Tensor = (weights * per_sample + 1e-3 * light).mean()
    return loss


@dataclass
class Training:
    """One training: its data, model, optimizer, and where it stands."""

    train: Digits
    test: Digits
    epochs: int
    seed: int
    ledger: Ledger | None = None

    def __post_init__(self) -> None:
        torch.manual_seed(self.seed)
        self.model = Network()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=2e-3)
        self.chance = torch.Generator().manual_seed(self.seed)
        self.progress = Progress()

    def loader(self, *, whole: bool = False) -> DataLoader[dict[str, Any]]:
        """Make the loader of one training; with `whole` the broken samples are left out of its batches."""
        sampler: Any = BatchSampler(RandomSampler(self.train, generator=self.chance), BATCH, drop_last=False)
        if whole:
            kept = ([index for index in batch if index not in self.train.broken] for batch in sampler)
            sampler = (batch for batch in kept if batch)
        return DataLoader(self.train, batch_sampler=sampler, generator=self.chance)

    def evaluate(self) -> None:
        self.model.eval()
        with grad_mode(False):
            scores, _ = self.model(self.test.images[:, None])
        self.model.train()
        self.progress.accuracy = (scores.argmax(1) == self.test.labels).float().mean().item()


def plain(training: Training, *, whole: bool = False) -> Iterator[Progress]:
    """Train as everybody does, until something breaks; with `whole`, on batches without the broken samples."""
    state, model, optimizer = training.progress, training.model, training.optimizer
    for state.epoch in range(1, training.epochs + 1):
        try:
            for batch in training.loader(whole=whole):
                optimizer.zero_grad()
                loss = loss_of(model, batch)
                loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                state.loss = loss.item()
                state.steps += 1
        except Exception as error:  # noqa: BLE001 - whatever it is, it ends this training: that is the point
            state.end = f"{type(error).__name__}: {error}"
        training.evaluate()
        yield state
        if state.end:
            state.end = f"crashed at step {state.steps + 1}: {state.end}"
            return


def skipping(training: Training) -> Iterator[Progress]:
    """Train with the usual remedy: a batch that raises or whose loss or gradient is not finite is skipped."""
    state, model, optimizer = training.progress, training.model, training.optimizer
    for state.epoch in range(1, training.epochs + 1):
        loader = iter(training.loader())
        while True:
            try:
                batch = next(loader)
            except StopIteration:
                break
            except OSError:
                state.batches_lost += 1
                state.samples_lost += BATCH
                continue
            try:
                optimizer.zero_grad()
                loss = loss_of(model, batch)
                loss.backward()  # type: ignore[no-untyped-call]
                good = loss.isfinite() and all(
                    p.grad.isfinite().all() for p in model.parameters() if p.grad is not None
                )
            except (ValueError, IndexError):
                good = False
            if good:
                optimizer.step()
                state.loss = loss.item()
                state.steps += 1
            else:
                state.batches_lost += 1
                state.samples_lost += len(batch["label"])
        training.evaluate()
        yield state
    poisoned = [name for name, buffer in model.named_buffers() if not buffer.isfinite().all()]
    state.end = f"{len(poisoned)} statistics of BatchNorm have become NaN" if poisoned else ""


def guarded(training: Training) -> Iterator[Progress]:
    """Train with gradgate: three lines are different."""
    state, model, optimizer = training.progress, training.model, training.optimizer
    guard = Guard(model, ledger=training.ledger, ids="id", payload=True, patience=10**9)
    for state.epoch in range(1, training.epochs + 1):
        guard.epoch = state.epoch
        loader = resilient(training.loader(), retries=0, ledger=training.ledger)
        for batch in loader:
            optimizer.zero_grad()
            result = guard.backward(batch, lambda batch: loss_of(model, batch))
            optimizer.step()
            state.loss = result.loss.item()
            state.steps += 1
            state.samples_lost += len(result.dropped)
        state.samples_lost += len(loader.incidents)
        training.evaluate()
        yield state


# By letter: what they are called, and how they train.
TRAININGS: dict[str, tuple[str, Callable[[Training], Iterator[Progress]]]] = {
    "a": ("plain PyTorch", plain),
    "b": ("skip bad batches", skipping),
    "c": ("gradgate", guarded),
    "d": ("clean data", partial(plain, whole=True)),
}


# --- What is shown --------------------------------------------------------------------------------------------------


class Screen:
    def __init__(self, train: Digits, test: Digits, *, quiet: bool) -> None:
        self._console = Console(quiet=quiet, highlight=False)
        self._states: dict[str, Progress] = {}
        self.live = Live(self._table(), console=self._console, auto_refresh=False)
        tell = self._console.print
        tell(f"\n{len(train):,} handwritten digits to learn from, {len(test)} to test with. ", end="")
        tell(f"{len(train.broken)} of the first are broken:" if train.broken else "None is broken.", style="bold")
        for kind, count in Counter(train.broken.values()).items():
            tell(f"  {count:>3} x {kind}: {FAULTS[kind]}")
        tell("\nThe same network, seeds and batches, trained in four variants:")

    def show(self, letter: str, progress: Progress) -> None:
        self._states[letter] = progress
        self.live.update(self._table(), refresh=True)

    def conclude(self, *, same: bool, right: bool, ledger: Path, replayed: Any, page: Path) -> None:
        tell = self._console.print
        tell()
        for holds, sentence in (
            (same, "(c) ended with the weights and statistics of (d), bit for bit."),
            (right, "Exactly the broken samples were dropped, and nothing else."),
        ):
            tell(Text.assemble(("yes  ", "bold green") if holds else ("NO   ", "bold red"), sentence))
        if replayed is not None:
            tell("\n[bold]One of them again[/bold], from the ledger:")
            for line in str(replayed).splitlines():
                tell(Text("  " + line), soft_wrap=True)
        tell(f"\n[bold]Every drop is written down:[/bold] gradgate ledger list {ledger}", soft_wrap=True)
        tell(f"[bold]All of it on one page:[/bold] {page}", soft_wrap=True)

    def _table(self) -> Group:
        table = Table(box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
        for head in ("", "", "epoch", "loss", "accuracy", "lost batches", "lost samples"):
            table.add_column(head, justify="right" if head else "left", no_wrap=True)
        ends = []
        for letter, (name, _) in TRAININGS.items():
            state = self._states.get(letter)
            table.add_row(letter, name, *(state.cells() if state else [""] * 5), style="bold" if letter == "c" else "")
            if state and state.end:
                ends.append(Text(f"({letter}) {state.end}", style="yellow"))
        return Group(table, *ends)


def write_ending(path: Path, ledger: Path, training: Training) -> Path:
    """Write the page: the ledger of the guarded training, and the doctor about a plain step."""
    data = training.train
    whole = [index for index in range(len(data)) if index not in data.broken]
    blank = [index for index, fault in data.broken.items() if fault == "blank image"]
    batch = default_collate([data[index] for index in whole[:8] + blank[:1]])  # what plain training meets
    diagnosis = diagnose(lambda: loss_of(training.model, batch), model=training.model)
    with Ledger(ledger) as book:  # Not read-only: only a writer tidies up beside the file when it leaves.
        write_page(path, book, diagnosis.to_dict())
    return path


def same_weights(one: Training, other: Training) -> bool:
    """Compare the weights and the statistics of two trainings bit by bit."""
    pairs = zip(one.model.state_dict().items(), other.model.state_dict().items(), strict=True)
    return all(a == b and torch.equal(x, y) for (a, x), (b, y) in pairs)


def replayed_from(ledger: Ledger, training: Training) -> Replay | None:
    """Run one sample whose gradient was not finite again."""
    stored = [incident for incident in ledger.incidents() if incident.stage == "backward"]
    return replay(ledger, stored[0].id, lambda batch: loss_of(training.model, batch)) if stored else None


def as_dict(
    trainings: dict[str, Training], same: bool, right: bool, path: Path, replayed: Replay | None
) -> dict[str, Any]:
    """Return the results as values that JSON can hold."""
    return {
        "broken": {str(index): fault for index, fault in trainings["c"].train.broken.items()},
        "ways": {
            letter: {"name": TRAININGS[letter][0], **asdict(training.progress)}
            for letter, training in trainings.items()
        },
        "bit_identical": same,
        "exactly_the_broken_were_found": right,
        "ledger": str(path),
        "replayed": None if replayed is None else replayed.to_dict(),
    }
