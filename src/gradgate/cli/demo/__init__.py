"""`gradgate demo`: why this library exists, on real data, in under two minutes."""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path

import click

from gradgate.cli._output import json_option, say, show_json

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
    """Train on handwritten digits, some of them broken, four times side by side.

    Ends with 0 only if the guarded training is bit for bit the one without the broken samples.

    Example: gradgate demo --epochs 3 --bad-fraction 0.05
    """
    if not as_json:  # At once: loading torch takes its time.
        say(f"The same network {epochs} epochs on handwritten digits, four times. The table fills as they train.")
    import torch  # Here and below, because all of it loads torch, and `--help` does not need it.

    from gradgate.cli.demo import _trainings
    from gradgate.cli.demo._trainings import TRAININGS, Training
    from gradgate.ledger import Ledger

    log = logging.getLogger("gradgate")
    ctx.call_on_close(partial(log.setLevel, log.level))
    log.setLevel(logging.ERROR)  # The line that each drop logs would break the table.
    torch.set_num_threads(1)  # The images are small: more threads would only wait for each other.
    train, test = _trainings.load(seed, bad_fraction)
    out.mkdir(parents=True, exist_ok=True)
    path = out / "demo.ledger"
    for ending in ("", "-wal", "-shm"):
        path.with_name(path.name + ending).unlink(missing_ok=True)
    ledger = Ledger(path, payload=True)
    screen = _trainings.Screen(train, test, quiet=as_json)
    trainings: dict[str, Training] = {}
    with screen.live:
        for letter, (_, run) in TRAININGS.items():
            training = trainings[letter] = Training(train, test, epochs, seed, ledger if letter == "c" else None)
            for progress in run(training):
                screen.show(letter, progress)
            screen.show(letter, training.progress)
    same = _trainings.same_weights(trainings["c"], trainings["d"])
    found = {str(incident.sample_id) for incident in ledger.incidents()}
    right = found == {str(index) for index in train.broken}
    replayed = _trainings.replayed_from(ledger, trainings["c"])
    ledger.close()
    page = _trainings.write_ending(out / "report.html", path, Training(train, test, epochs, seed))
    if as_json:
        show_json({**_trainings.as_dict(trainings, same, right, path, replayed), "report": str(page)})
    else:
        screen.conclude(same=same, right=right, ledger=path, replayed=replayed, page=page)
    ctx.exit(0 if same and right else 1)
