"""The page that the demonstration ends with: the ledger of the guarded training, and the doctor about a plain step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch.utils.data import default_collate

from gradgate.cli.demo._data import Digits
from gradgate.cli.demo._trainings import Training, loss_of
from gradgate.doctor import diagnose
from gradgate.ledger import Ledger
from gradgate.report import write_page

_SAMPLES = 8


def write_ending(path: Path, ledger: Path, training: Training) -> Path:
    """Write the page."""
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
