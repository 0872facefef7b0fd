"""What the demonstration shows: four trainings side by side, the result, and a page about it."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text
from torch.utils.data import default_collate

from gradgate.cli.demo._trainings import FAULTS, TRAININGS, Digits, Progress, Training, loss_of
from gradgate.doctor import diagnose
from gradgate.ledger import Ledger
from gradgate.report import write_page

_SAMPLES = 8


class Screen:
    """A table that fills while the trainings run."""

    def __init__(self, train: Digits, test: Digits, *, quiet: bool) -> None:
        self._console = Console(quiet=quiet, highlight=False)
        self._states: dict[str, Progress] = {}
        self._live = Live(self._table(), console=self._console, auto_refresh=False)
        tell = self._console.print
        tell(f"\n{len(train):,} handwritten digits to learn from, {len(test)} to test with. ", end="")
        tell(f"{len(train.broken)} of the first are broken:" if train.broken else "None is broken.", style="bold")
        for kind, count in Counter(train.broken.values()).items():
            tell(f"  {count:>3} x {kind}: {FAULTS[kind]}")
        tell("\nThe same network, seeds and batches in four ways:")

    def __enter__(self) -> Screen:
        self._live.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.__exit__(kind, error, trace)

    def show(self, way: str, progress: Progress) -> None:
        """Show where a training stands."""
        self._states[way] = progress
        self._live.update(self._table(), refresh=True)

    def conclude(self, *, same: bool, right: bool, ledger: Path, replayed: Any, page: Path) -> None:
        """Say what came of it."""
        tell = self._console.print
        tell()
        tell(self._verdict(same, "(c) ended with the weights and statistics of (d), bit for bit."))
        tell(self._verdict(right, "Exactly the broken samples were dropped, and nothing else."))
        if replayed is not None:
            tell("\n[bold]One of them again[/bold], from the ledger:")
            for line in str(replayed).splitlines():
                tell(Text("  " + line))
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
        for way, (name, _) in TRAININGS.items():
            state = self._states.get(way)
            table.add_row(way, name, *(_cells(state) if state else [""] * 5), style="bold" if way == "c" else "")
            if state and state.end:
                ends.append(Text(f"({way}) {state.end}", style="yellow"))
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
    """Give a batch as plain training meets it: whole samples, and one with a finite loss and a non-finite gradient."""
    whole = [index for index in range(len(data)) if index not in data.broken]
    blank = [index for index, fault in data.broken.items() if fault == "blank image"]
    return default_collate([data[index] for index in whole[:_SAMPLES] + blank[:1]])
