"""A recorded sample as a test: it fails while the fault is there and passes once it is repaired."""

from __future__ import annotations

import os
import re
from functools import partial
from pathlib import Path

import torch

from gradgate._snapshot import restored
from gradgate.errors import ArgumentValueError, LedgerError
from gradgate.ledger import Ledger
from gradgate.replaying._stored import read_sample, stored
from gradgate.replaying._trial import LossFunction, find_fault

__all__ = ["assert_passes", "write_test"]

_ENTRY = re.compile(r"([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*):([A-Za-z_]\w*)((?:\.[A-Za-z_]\w*)*)", re.ASCII)


def assert_passes(
    path: str | os.PathLike[str], loss_fn: LossFunction, *, model: torch.nn.Module | None = None, batch_dim: int = 0
) -> None:
    """Make sure that a stored sample runs through a loss function, forward and backward, with finite numbers.

    Args:
        path: The stored sample; a state stored beside it as `NAME.snapshot.safetensors` is in force if it is there.
        loss_fn: loss_fn(batch) -> a mean loss, or one loss per sample.
        model: The model, to have the weights of the stored state.
        batch_dim: Which dimension of the sample's tensors counts the samples.

    Raises:
        AssertionError: It fails; the exception that it failed with is the cause.
        LedgerError: The sample cannot be read.

    Examples:
        >>> import tempfile
        >>> folder = tempfile.mkdtemp()
        >>> ledger = gg.Ledger(folder + "/run.ledger", payload=True)
        >>> model = torch.nn.Linear(2, 1)
        >>> def loss_fn(batch):
        ...     return model(batch).mean()
        >>> batch = torch.tensor([[1.0, 2.0], [float("nan"), 0.0]])
        >>> result = gg.Guard(model, ledger=ledger, payload=True).backward(batch, loss_fn)
        >>> files = gg.replaying.write_test(folder + "/test_bad.py", ledger, result.dropped[0].id, "train:loss_fn")
        >>> gg.replaying.assert_passes(files[1], lambda batch: model(batch.nan_to_num()).mean())
        >>> gg.replaying.assert_passes(files[1], loss_fn)
        Traceback (most recent call last):
        AssertionError: the sample in test_bad.safetensors still fails: non-finite loss: nan
    """
    file = Path(path)
    state = file.with_suffix(".snapshot.safetensors")
    data = file.read_bytes()
    with restored(state.read_bytes() if state.exists() else None, model):
        fault, _ = find_fault(partial(read_sample, data, loss_fn), loss_fn, model=model, batch_dim=batch_dim)
    if fault is not None:
        raise AssertionError(f"the sample in {file.name} still fails: {fault}") from fault.exception


def write_test(
    path: str | os.PathLike[str],
    ledger: Ledger | str | os.PathLike[str],
    incident_id: str,
    entry: str,
    *,
    model: str | None = None,
) -> list[Path]:
    """Write a pytest file for one incident, with its data beside it.

    Args:
        path: The test file to write, such as "tests/test_img_17.py"; one that is there is not replaced.
        ledger: The ledger, or its path.
        incident_id: The incident, or the beginning of its id.
        entry: The loss function, as "module:function".
        model: The model, as "module:name", to have the weights of that step if they were stored.

    Returns:
        The files that were written.

    Raises:
        ArgumentValueError: The path does not end in .py, is taken, or an entry is not "module:name".
        LedgerError: The sample was not stored, or a file cannot be written.

    Examples:
        >>> import tempfile
        >>> folder = tempfile.mkdtemp()
        >>> ledger = gg.Ledger(folder + "/run.ledger", payload=True)
        >>> model = torch.nn.Linear(2, 1)
        >>> def loss_fn(batch):
        ...     return model(batch).mean()
        >>> batch = torch.tensor([[1.0, 2.0], [float("nan"), 0.0]])
        >>> result = gg.Guard(model, ledger=ledger, payload=True).backward(batch, loss_fn)
        >>> files = gg.replaying.write_test(folder + "/test_bad.py", ledger, result.dropped[0].id, "train:loss_fn")
        >>> [file.name for file in files]
        ['test_bad.py', 'test_bad.safetensors']
    """
    file = Path(path)
    if file.suffix != ".py" or file.exists():
        raise ArgumentValueError(
            f"the test file {file} {'is there already' if file.exists() else 'does not end in .py'}.",
            why="a new test gets a new file.",
            fix="--as-test tests/test_bad_sample.py",
        )
    incident, payload, state = stored(ledger, incident_id)
    imports, names = zip(*(_imported(text) for text in (entry, model) if text is not None), strict=True)
    arguments = ", ".join(["SAMPLE", names[0], *(f"model={name}" for name in names[1:])])
    what = f"{incident.exception_type}: {incident.message}" if incident.exception_type else incident.cause
    text = _TEMPLATE.format(
        sample=_one_line(incident.sample_id or incident.id),
        stage=_one_line(incident.stage),
        what=_one_line(f"{what} ({incident.where})" if incident.where else what),
        incident=_one_line(incident.id),
        imports="\n".join(sorted(set(imports))),
        name=re.sub(r"\W+", "_", _one_line(incident.sample_id or incident.id), flags=re.ASCII).strip("_")[:60] or "bad",
        arguments=arguments,
    )
    contents = {file: text.encode(), file.with_suffix(".safetensors"): payload}
    if state is not None and model is not None:
        contents[file.with_suffix(".snapshot.safetensors")] = state
    try:
        for target, data in contents.items():
            target.write_bytes(data)
    except OSError as error:
        raise LedgerError(
            f"{error.filename} cannot be written: {error.strerror}.",
            why="the test and its data are files in one folder.",
            fix="--as-test tests/test_bad_sample.py   # in a folder that exists",
        ) from error
    return list(contents)


_TEMPLATE = """\
# The sample {sample} failed in {stage}:
# {what}
# From incident {incident}, by `gradgate replay --as-test`: this test fails while that fault is there.

from pathlib import Path

from gradgate.replaying import assert_passes
{imports}

SAMPLE = Path(__file__).with_suffix(".safetensors")


def test_sample_{name}():
    assert_passes({arguments})
"""


def _imported(entry: str) -> tuple[str, str]:
    """Give the import of "module:name.attribute", and the expression for it."""
    match = _ENTRY.fullmatch(entry)
    if match is None:
        raise ArgumentValueError(
            f"the entry {entry!r} is not of the form module:function.",
            why="the test imports it by that name.",
            fix="--entry train:loss_fn",
        )
    module, name, attributes = match.groups()
    return f"from {module} import {name}", f"{name}{attributes}"


def _one_line(text: str) -> str:
    """Keep a text from a ledger, which anyone may have written, inside its comment."""
    return "".join(character if character.isprintable() else " " for character in text)[:300]
