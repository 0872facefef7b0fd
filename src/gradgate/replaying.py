"""A recorded sample again: the same fault, another one, or none; and a test that remembers it."""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Callable
from dataclasses import dataclass, field, is_dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch

from gradgate._checks import wrong_type
from gradgate._names import describe, listed, suggest_names
from gradgate._payload import decode, missing_in
from gradgate._source import raising_line
from gradgate._state import restored
from gradgate._text import class_name, html_table, text_of, visible
from gradgate._torch_private import leaf_of, nodes_below
from gradgate._trees import BatchLayout, index_of, select_rows
from gradgate.doctor import Diagnosis, diagnose
from gradgate.errors import ArgumentTypeError, ArgumentValueError, LedgerError
from gradgate.ledger import Ledger
from gradgate.records import Incident, Stage

__all__ = ["Fault", "Replay", "assert_passes", "examine", "replay", "write_test"]


# --- What was stored ------------------------------------------------------------------------------------------------


def stored(ledger: Ledger | str | os.PathLike[str], incident_id: str) -> tuple[Incident, bytes, bytes | None]:
    """Fetch an incident, the bytes of its sample, and those of the weights and the random state if they were kept."""
    book = ledger if isinstance(ledger, Ledger) else Ledger(ledger, read_only=True)
    incident = book.incident(incident_id)
    data = book.payload_of(incident.id)
    if data is not None:
        return incident, data, book.snapshot_of(incident.id)
    reason = incident.details.get("not_stored")
    if incident.stage == "load":
        why = "it failed while it was loaded, so there was no sample to keep."
        fix = f"dataset[{incident.sample_id}]   # load it again"
    else:
        why = "values of samples are kept only where that was asked for."
        fix = 'gg.Guard(model, ledger="run.ledger", payload=True)   # for the next run'
    what = f"the sample of incident {incident.id} was not stored{f': {reason}' if reason else ''}."
    raise LedgerError(what, why=why, fix=fix)


def read_sample(data: bytes, loss_fn: LossFunction) -> Any:
    """Read a stored sample, with the named tuples and dataclasses that the module of loss_fn knows."""
    sample = decode(data, classes=_classes(loss_fn))
    missing = missing_in(sample)
    if missing:
        raise LedgerError(
            f"the sample was not stored whole; missing: {', '.join(missing[:5])}.",
            why="only tensors, numbers, text and trees of them are stored, up to a limit.",
            fix='gg.Ledger("run.ledger", payload=True, payload_limit=2**28)   # if it was too large',
        )
    return sample


def _classes(loss_fn: LossFunction) -> list[type]:
    function: Any = inspect.unwrap(loss_fn)
    while isinstance(function, partial):
        function = function.func
    function = getattr(function, "__func__", function)
    if not hasattr(function, "__globals__"):
        function = getattr(type(function), "__call__", None)  # noqa: B004 - the function
    classes = [thing for thing in getattr(function, "__globals__", {}).values() if isinstance(thing, type)]
    return [one for one in classes if is_dataclass(one) or (issubclass(one, tuple) and hasattr(one, "_fields"))]


# --- One trial ------------------------------------------------------------------------------------------------------


LossFunction = Callable[[Any], torch.Tensor | tuple[torch.Tensor, float | torch.Tensor]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """What went wrong with a sample.

    Attributes:
        cause: "exception", "non-finite loss" or "non-finite gradient".
        stage: "forward" for whatever loss_fn raised, "loss" or "backward".
        exception_type: The class of the exception, with its module.
        message: What the exception or the check said.
        where: The user's line, as "path.py:12".
        exception: The exception itself.
    """

    cause: str
    stage: Stage
    exception_type: str | None = None
    message: str = ""
    where: str | None = None
    exception: Exception | None = field(default=None, repr=False, compare=False)

    def __str__(self) -> str:
        return visible(_story(self), lines=True)


def _story(fault: Fault | Incident) -> str:
    what = f"{fault.exception_type}: {fault.message}" if fault.exception_type else fault.message or fault.cause
    return f"{what}   ({fault.where})" if fault.where else what


def find_fault(
    make_sample: Callable[[], Any],
    loss_fn: LossFunction,
    *,
    expected: Callable[[Fault], bool] = lambda fault: False,
    model: torch.nn.Module | None = None,
    batch_dim: int = 0,
) -> tuple[Fault | None, int]:
    """Run one sample, made anew each time because loss_fn may change it; return its fault, and with how many rows."""
    # A sample that fails only because it is alone (batch statistics of one value) is not at fault: unless the fault is
    # the expected one, it is tried again with the same row twice.
    names = {} if model is None else {id(parameter): name for name, parameter in model.named_parameters()}
    with torch.inference_mode(False), torch.enable_grad():
        alone = _attempt(make_sample(), loss_fn, names)
        if alone is None or expected(alone):
            return alone, 1
        return _attempt(_twice(make_sample(), batch_dim), loss_fn, names), 2


def _twice(sample: Any, dim: int) -> Any:
    return select_rows(sample, index_of([0, 0]), 1, BatchLayout(dim))


def _loss(loss_fn: LossFunction, sample: Any) -> Any:
    """Return the loss of a sample; of a total and its count, what is finite only if both are."""
    loss: Any = loss_fn(sample)
    return loss[0] + 0 * loss[1] if type(loss) is tuple and len(loss) == 2 else loss


def _attempt(sample: Any, loss_fn: LossFunction, names: dict[int, str]) -> Fault | None:
    try:
        loss = _loss(loss_fn, sample)
    except Exception as error:  # noqa: BLE001 - it is the user's function that is on trial
        return _raised(error, "forward")
    if not isinstance(loss, torch.Tensor):
        raise ArgumentTypeError(
            f"replay(): `loss_fn` returned {describe(loss)}.",
            why="it is the function that the guard was given: a mean loss, one per sample, or a total and its count.",
            fix="def loss_fn(batch): ...; return loss",
        )
    if not bool(torch.isfinite(loss).all()):
        values = ", ".join(f"{value:g}" for value in loss.detach().reshape(-1)[:4].tolist())
        more = ", ..." if loss.numel() > 4 else ""
        return Fault(cause="non-finite loss", stage="loss", message=f"non-finite loss: {values}{more}")
    leaves = [leaf for node in nodes_below([loss]) if (leaf := leaf_of(node)) is not None]
    if not leaves:
        return None
    try:
        gradients = torch.autograd.grad(loss.sum(), leaves, allow_unused=True, materialize_grads=True)
    except Exception as error:  # noqa: BLE001 - so is its backward
        return _raised(error, "backward")
    values_of = [one.coalesce().values() if one.layout is torch.sparse_coo else one for one in gradients]
    pairs = zip(leaves, values_of, strict=True)
    bad = [names.get(id(leaf), describe(leaf)) for leaf, values in pairs if not torch.isfinite(values).all()]
    if not bad:
        return None
    return Fault(cause="non-finite gradient", stage="backward", message=f"non-finite gradient of {listed(bad, 3)}")


def _raised(error: Exception, stage: Stage) -> Fault:
    return Fault(
        cause="exception",
        stage=stage,
        exception_type=class_name(type(error)),
        message=text_of(error),
        where=raising_line(error.__traceback__),
        exception=error,
    )


# --- Replay ---------------------------------------------------------------------------------------------------------


Verdict = Literal["same", "another", "passes"]

_SENTENCES = {
    "same": "The same fault came again.",
    "another": "It still fails, but with another fault.",
    "passes": "It no longer fails.",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Replay:
    """The result of a replay.

    Attributes:
        incident: What was recorded.
        verdict: "same", "another" or "passes".
        fault: What went wrong this time.
        rows: How often the sample was in the batch: 2 if it cannot run alone.
        snapshot: Whether the weights and the random state of that step were in force.
        snapshot_stored: Whether the ledger holds them.
    """

    incident: Incident
    verdict: Verdict
    fault: Fault | None
    rows: int
    snapshot: bool
    snapshot_stored: bool = False

    @property
    def fails(self) -> bool:
        """Whether something is still wrong."""
        return self.fault is not None

    def to_dict(self) -> dict[str, Any]:
        """Return the id of the incident, the fault and the rest as values that JSON can hold."""
        names = ("cause", "stage", "exception_type", "message", "where")
        fault = None if self.fault is None else {name: getattr(self.fault, name) for name in names}
        values = {name: getattr(self, name) for name in ("verdict", "rows", "snapshot", "snapshot_stored")}
        return {"incident": self.incident.id, "fault": fault, **values}

    def _repr_html_(self) -> str:
        story, *lines = str(self).splitlines()
        return html_table(story, (), [[line.strip()] for line in lines], tones=["", "bad" if self.fails else "good"])

    def __str__(self) -> str:
        then = self.incident
        step = "" if then.step is None else f" at step {then.step}"
        lines = [
            f"Sample {then.sample_id!r} failed in {then.stage}{step}.",
            f"  then: {_story(then)}",
            f"  now:  {self.fault or 'nothing'}",
            _SENTENCES[self.verdict],
        ]
        if self.rows > 1:
            lines.append("It was given twice in one batch, because alone it fails in another way (batch statistics).")
        if not self.snapshot and self.snapshot_stored:
            lines.append("The random state was that of that step, but the weights were those that loss_fn has now.")
            lines.append("The weights of that step are in the ledger; they need the model to go to: model=model.")
        elif not self.snapshot:
            lines.append("The weights were those that loss_fn has now; those of that step were not stored.")
        return visible("\n".join(lines), lines=True)


def replay(
    ledger: Ledger | str | os.PathLike[str],
    incident_id: str,
    loss_fn: LossFunction,
    *,
    model: torch.nn.Module | None = None,
    batch_dim: int = 0,
) -> Replay:
    """Run one recorded sample again, forward and backward, and say whether its fault came again.

    No `.grad` is touched, and the random state is put back; with `model`, so are its weights and buffers.

    Args:
        ledger: The ledger, or its path.
        incident_id: The incident, or the beginning of its id.
        loss_fn: The function that failed: loss_fn(batch) -> a mean loss, or one loss per sample.
        model: The model, to have the weights and buffers of that step if they were stored (`snapshot=True`).
        batch_dim: Which dimension of the sample's tensors counts the samples.

    Returns:
        What was, what is, and whether it is the same.

    Raises:
        NothingMatchedError: There is no such incident.
        LedgerError: Its sample was not stored, or not whole.
        ArgumentTypeError: loss_fn cannot be called, or gives no tensor.

    Examples:
        >>> import tempfile
        >>> ledger, model = gg.Ledger(tempfile.mkdtemp() + "/run.ledger", payload=True), torch.nn.Linear(2, 1)
        >>> loss_fn = lambda batch: model(batch).mean()
        >>> batch = torch.tensor([[1.0, 2.0], [float("nan"), 0.0]])
        >>> result = gg.Guard(model, ledger=ledger, payload=True).backward(batch, loss_fn)
        >>> gg.replay(ledger, result.dropped[0].id, loss_fn).verdict
        'same'
        >>> gg.replay(ledger, result.dropped[0].id, lambda batch: model(batch.nan_to_num()).mean()).verdict
        'passes'
    """
    if not callable(loss_fn):
        why = "it is the function that the guard was given."
        raise wrong_type(loss_fn, "loss_fn", "replay", why, "gg.replay(ledger, incident_id, loss_fn)")
    incident, data, state = stored(ledger, incident_id)
    expected = partial(_same, incident)
    with restored(state, model):
        again = partial(read_sample, data, loss_fn)
        fault, rows = find_fault(again, loss_fn, expected=expected, model=model, batch_dim=batch_dim)
    verdict: Verdict = "passes" if fault is None else "same" if expected(fault) else "another"
    there = {"snapshot": state is not None and model is not None, "snapshot_stored": state is not None}
    return Replay(incident=incident, verdict=verdict, fault=fault, rows=rows, **there)


def _same(incident: Incident, fault: Fault) -> bool:
    """Return whether a fault is the recorded one: of the same class, and at the same place or with the same words."""
    if incident.exception_type is not None or fault.exception_type is not None:
        words = incident.message.split("... (")[0]
        return fault.exception_type == incident.exception_type and (
            fault.where == incident.where or (bool(words) and fault.message.startswith(words))
        )
    cause = incident.details.get("fault") if incident.cause == "together" else incident.cause
    return fault.cause == cause


# --- The doctor on a stored sample ----------------------------------------------------------------------------------


def examine(
    ledger: Ledger | str | os.PathLike[str],
    incident_id: str,
    loss_fn: LossFunction,
    *,
    model: torch.nn.Module | None = None,
    rows: int = 1,
    batch_dim: int = 0,
) -> Diagnosis:
    """Run one recorded sample under the tracer, and let the doctor say what it sees; it raises what `replay` raises.

    Args:
        ledger: The ledger, or its path.
        incident_id: The incident, or the beginning of its id.
        loss_fn: The function that failed.
        model: The model, for names, and for the weights of that step if they were stored.
        rows: How often the sample is in the batch, as `Replay.rows` says.
        batch_dim: Which dimension of the sample's tensors counts the samples.

    Returns:
        The diagnosis.

    Examples:
        >>> import tempfile
        >>> ledger, model = gg.Ledger(tempfile.mkdtemp() + "/run.ledger", payload=True), torch.nn.Linear(2, 1)
        >>> loss_fn = lambda batch: model(batch).mean()
        >>> batch = torch.tensor([[1.0, 2.0], [float("nan"), 0.0]])
        >>> result = gg.Guard(model, ledger=ledger, payload=True).backward(batch, loss_fn)
        >>> gg.replaying.examine(ledger, result.dropped[0].id, loss_fn, model=model).findings[0].title
        'the tensor sample holds NaN before `model(batch)` reads it'
    """
    _, data, state = stored(ledger, incident_id)
    sample = read_sample(data, loss_fn)
    sample = sample if rows == 1 else _twice(sample, batch_dim)
    with restored(state, model):
        return diagnose(lambda: _loss(loss_fn, sample).mean(), model=model)


# --- A test that remembers it ---------------------------------------------------------------------------------------


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
        >>> ledger, model = gg.Ledger(tempfile.mkdtemp() + "/run.ledger", payload=True), torch.nn.Linear(2, 1)
        >>> loss_fn = lambda batch: model(batch).mean()
        >>> batch = torch.tensor([[1.0, 2.0], [float("nan"), 0.0]])
        >>> result = gg.Guard(model, ledger=ledger, payload=True).backward(batch, loss_fn)
        >>> path = ledger.path.with_name("test_bad.py")
        >>> files = gg.replaying.write_test(path, ledger, result.dropped[0].id, "train:loss_fn")
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
        >>> ledger = gg.Ledger(tempfile.mkdtemp() + "/run.ledger", payload=True)
        >>> incident = gg.Incident(stage="loss", cause="non-finite loss", sample_id="img_17.png")
        >>> ledger.record(incident, payload=b"...")
        >>> path = ledger.path.with_name("test_bad.py")
        >>> [file.name for file in gg.replaying.write_test(path, ledger, incident.id, "train:loss_fn")]
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
    sample = _one_line(incident.sample_id or incident.id)
    text = _TEMPLATE.format(
        sample=sample,
        stage=_one_line(incident.stage),
        what=_one_line(_story(incident)),
        incident=_one_line(incident.id),
        imports="\n".join(sorted(set(imports))),
        name=re.sub(r"\W+", "_", sample, flags=re.ASCII).strip("_")[:60] or "bad",
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
    """Return the import of "module:name.attribute", and the expression for it."""
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


suggest_names(__name__)
