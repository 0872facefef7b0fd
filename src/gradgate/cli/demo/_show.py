"""What the demonstration shows: four trainings side by side, the result, and a page about it."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text
from torch.utils.data import default_collate

from gradgate.cli.demo._trainings import FAULTS, TRAININGS, Digits, Progress, Training, loss_of
from gradgate.doctor import diagnose
from gradgate.ledger import Ledger
from gradgate.replaying import Replay, replay
from gradgate.report import write_page

_SAMPLES = 8


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
        tell(self._verdict(same, "(c) ended with the weights and statistics of (d), bit for bit."))
        tell(self._verdict(right, "Exactly the broken samples were dropped, and nothing else."))
        if replayed is not None:
            tell("\n[bold]One of them again[/bold], from the ledger:")
            for line in str(replayed).splitlines():
                tell(Text("  " + line), soft_wrap=True)
        tell(f"\n[bold]Every drop is written down:[/bold] gradgate ledger list {ledger}", soft_wrap=True)
        tell(f"[bold]All of it on one page:[/bold] {page}", soft_wrap=True)

    @staticmethod
    def _verdict(holds: bool, sentence: str) -> Text:
        return Text.assemble(("yes  ", "bold green") if holds else ("NO   ", "bold red"), sentence)

    def _table(self) -> Group:
        table = Table(box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
        for head in ("", "", "epoch", "loss", "accuracy", "lost batches", "lost samples"):
            table.add_column(head, justify="right" if head else "left", no_wrap=True)
        ends = []
        for letter, (name, _) in TRAININGS.items():
            state = self._states.get(letter)
            table.add_row(letter, name, *(_cells(state) if state else [""] * 5), style="bold" if letter == "c" else "")
            if state and state.end:
                ends.append(Text(f"({letter}) {state.end}", style="yellow"))
        return Group(table, *ends)


def _cells(state: Progress) -> list[str]:
    loss = "nan" if math.isnan(state.loss) else f"{state.loss:.4f}"
    return [str(state.epoch), loss, f"{state.accuracy:.1%}", str(state.batches_lost), str(state.samples_lost)]


def write_ending(path: Path, ledger: Path, training: Training) -> Path:
    """Write the page: the ledger of the guarded training, and the doctor about a plain step."""
    batch = _telling_batch(training.train)
    diagnosis = diagnose(lambda: loss_of(training.model, batch), model=training.model)
    with Ledger(ledger) as book:  # Not read-only: only a writer tidies up beside the file when it leaves.
        write_page(path, book, diagnosis.to_dict())
    return path


def _telling_batch(data: Digits) -> Any:
    """Return whole samples, and one with a finite loss and a non-finite gradient: what plain training meets."""
    whole = [index for index in range(len(data)) if index not in data.broken]
    blank = [index for index, fault in data.broken.items() if fault == "blank image"]
    return default_collate([data[index] for index in whole[:_SAMPLES] + blank[:1]])


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
