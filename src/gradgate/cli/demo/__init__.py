"""`gradgate demo`: why this library exists, on real data, in under two minutes."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from gradgate.cli._output import json_option, say, show_json

if TYPE_CHECKING:
    from gradgate.cli.demo._trainings import Training

__all__ = ["demo"]


@click.command()
@click.option("--epochs", default=6, show_default=True, type=click.IntRange(min=1), help="How long to train.")
@click.option("--seed", default=0, show_default=True, help="Chooses the split, the broken samples and the weights.")
@click.option(
    "--bad-fraction", default=0.03, show_default=True, type=click.FloatRange(0, 0.3), help="The part that is broken."
)
@click.option(
    "--out",
    default=Path("gradgate-demo"),
    show_default=True,
    type=click.Path(file_okay=False, path_type=Path),
    help="Where the ledger and the page go; files of an earlier demonstration there are replaced.",
)
@json_option
@click.pass_context
def demo(ctx: click.Context, epochs: int, seed: int, bad_fraction: float, out: Path, as_json: bool) -> None:
    """Train on handwritten digits, some of them broken, in four ways side by side.

    Ends with 0 only if the guarded training is bit for bit the one without the broken samples.

    Example: gradgate demo --epochs 3 --bad-fraction 0.05
    """
    if not as_json:  # At once: loading torch takes its time.
        say(f"The same network {epochs} epochs on handwritten digits, in four ways. The table fills as they train.")
    import torch  # Here and below, because all of it loads torch, and `--help` does not need it.

    from gradgate.cli.demo._show import Screen, write_ending
    from gradgate.cli.demo._trainings import TRAININGS, Training, load
    from gradgate.ledger import Ledger

    ctx.with_resource(_quiet_log())
    torch.set_num_threads(1)  # The images are small: more threads would only wait for each other.
    train, test = load(seed, bad_fraction)
    path = _fresh_ledger(out)
    ledger = Ledger(path, payload=True)
    screen = Screen(train, test, quiet=as_json)
    trainings: dict[str, Training] = {}
    with screen:
        for way, (_, run) in TRAININGS.items():
            training = trainings[way] = Training(train, test, epochs, seed, ledger if way == "c" else None)
            for progress in run(training):
                screen.show(way, progress)
            screen.show(way, training.progress)
    same = _same_weights(trainings["c"], trainings["d"])
    found = {str(incident.sample_id) for incident in ledger.incidents()}
    right = found == {str(index) for index in train.broken}
    replayed = _replayed(ledger, trainings["c"])
    ledger.close()
    page = write_ending(out / "report.html", path, Training(train, test, epochs, seed))
    if as_json:
        show_json({**_answer(trainings, train.broken, same, right, path, replayed), "report": str(page)})
    else:
        screen.conclude(same=same, right=right, ledger=path, replayed=replayed, page=page)
    ctx.exit(0 if same and right else 1)


@contextmanager
def _quiet_log() -> Iterator[None]:
    """Keep the line that each drop logs out of the table."""
    log = logging.getLogger("gradgate")
    before = log.level
    log.setLevel(logging.ERROR)
    yield
    log.setLevel(before)


def _fresh_ledger(out: Path) -> Path:
    out.mkdir(parents=True, exist_ok=True)
    path = out / "demo.ledger"
    for file in (path, *(path.with_name(path.name + ending) for ending in ("-wal", "-shm"))):
        file.unlink(missing_ok=True)
    return path


def _same_weights(one: Training, other: Training) -> bool:
    import torch

    pairs = zip(one.model.state_dict().items(), other.model.state_dict().items(), strict=True)
    return all(a == b and torch.equal(x, y) for (a, x), (b, y) in pairs)


def _replayed(ledger: Any, training: Training) -> Any:
    from gradgate.cli.demo._trainings import loss_of
    from gradgate.replaying import replay

    stored = [incident for incident in ledger.incidents() if incident.stage == "backward"]
    if not stored:
        return None
    return replay(ledger, stored[0].id, lambda batch: loss_of(training.model, batch))


def _answer(
    trainings: dict[str, Training], broken: dict[int, str], same: bool, right: bool, path: Path, replayed: Any
) -> dict[str, Any]:
    from dataclasses import asdict

    from gradgate.cli.demo._trainings import TRAININGS

    return {
        "broken": {str(index): fault for index, fault in broken.items()},
        "ways": {way: {"name": TRAININGS[way][0], **asdict(training.progress)} for way, training in trainings.items()},
        "bit_identical": same,
        "exactly_the_broken_were_found": right,
        "ledger": str(path),
        "replayed": None if replayed is None else replayed.to_dict(),
    }
