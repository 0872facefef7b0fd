"""A ledger from someone else under every command: an answer or an error, no traceback, and nothing for the terminal."""

import csv
import io
import json
import os
import random
import sqlite3

import pytest
import torch
from click.testing import CliRunner

from gradgate._payload import encode
from gradgate._state import capture
from gradgate.cli import main
from gradgate.ledger import Ledger
from tests.ledger.made import incident
from tests.ledger.test_fuzz import mutated
from tests.test_text import NASTY

MUTATIONS = int(os.environ.get("GRADGATE_MUTATIONS", "120"))  # The long run has 10,000, with --timeout=0.
ENTRY = "strangers_program:loss_fn"
PROGRAM = """
import torch

model = torch.nn.Linear(8, 1)


def loss_fn(batch):
    if batch.isnan().any():
        raise ValueError("bad \\x1b]0;x\\x07 \\u202e pixel")
    return model(batch).mean()
"""


@pytest.fixture(scope="module", autouse=True)
def program(tmp_path_factory):
    """A loss function to replay with."""
    folder = tmp_path_factory.mktemp("program")
    (folder / "strangers_program.py").write_text(PROGRAM)
    patch = pytest.MonkeyPatch()
    patch.chdir(folder)
    patch.syspath_prepend(str(folder))
    yield folder
    patch.undo()


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    """The bytes of a small ledger with something in every table."""
    path = tmp_path_factory.mktemp("sound") / "run.ledger"
    sample = torch.full((1, 8), float("nan"))
    with Ledger(path, payload=True, snapshot=True, run="night", arguments={"lr": 1}) as ledger:
        for number in range(12):
            one = incident(
                f"img_{number % 5}.png", id=f"id{number:04}", message="a message " * 5, loss=0.5, epoch=number
            )
            ledger.record_many([one], {one.id: encode(sample)}, snapshot=capture(torch.nn.Linear(8, 1)))
        ledger.release("img_0.png")
    return path.read_bytes()


def commands(path, folder):
    """Everything that a curious user may do with a ledger, in an order that spoils nothing for the next."""
    yield from (
        ("ledger", "list", path),
        ("ledger", "list", path, "--json", "--since", "2000-01-01"),
        ("ledger", "show", path, "id0003"),
        ("ledger", "show", path, "id0003", "--json"),
        ("ledger", "stats", path),
        ("ledger", "stats", path, "--json"),
        ("ledger", "sql", path, "SELECT * FROM incidents", "--seconds", "5"),
        ("ledger", "sql", path, "SELECT * FROM samples", "--json", "--seconds", "5"),
        ("ledger", "export", path, folder / "out.csv"),
        ("ledger", "export", path, folder / "out.jsonl", "--json"),
        ("ledger", "merge", folder / "target.ledger", path),
        ("replay", path, "id0003", "--entry", ENTRY),
        ("replay", path, "id0003", "--entry", ENTRY, "--model", "strangers_program:model", "--json"),
        ("report", path, "-o", folder / "page.html"),
        ("ledger", "release", path, "img_1.png"),
        ("ledger", "merge", path, folder / "target.ledger", "--json"),
    )


def run(command):
    """Run a command; it must end by itself, without a traceback, and print nothing that steers a terminal."""
    done = CliRunner().invoke(main, [str(word) for word in command])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise AssertionError(f"{command}: {done.exception!r}") from done.exception
    assert done.exit_code in (0, 1, 3, 4), done.output
    said = done.output.replace("\n", "").replace("\t", "")
    assert said.isprintable(), (command, said)
    if done.exit_code == 1:
        assert "Fix: " in done.output
    if "--json" in command and done.exit_code != 1:
        json.loads(done.stdout)
    return done


@pytest.mark.slow
def test_damaged_ledgers_under_every_command(sound, tmp_path):
    chance = random.Random(0)
    path = tmp_path / "run.ledger"
    codes = []
    for _ in range(MUTATIONS):
        for end in ("", "-wal", "-shm"):
            path.with_name(path.name + end).unlink(missing_ok=True)
        path.write_bytes(mutated(sound, chance))
        codes.append([run(command).exit_code for command in commands(path, tmp_path)])
    refused = sum(set(line) == {1} for line in codes)
    untouched = sum(1 not in line for line in codes)
    assert min(refused, untouched, MUTATIONS - refused - untouched) > MUTATIONS / 50  # The mutations reach everything.


def change(path, *statements):
    connection = sqlite3.connect(path)
    for statement in statements:
        connection.execute(*statement) if isinstance(statement, tuple) else connection.execute(statement)
    connection.commit()
    connection.close()


@pytest.fixture
def path(sound, tmp_path):
    made = tmp_path / "run.ledger"
    made.write_bytes(sound)
    return made


def test_nothing_in_a_ledger_reaches_the_terminal(path, tmp_path):
    safe = NASTY.encode("utf-8", "ignore").decode()
    for column in ("run", "sample_id", "stage", "cause", "exception_type", "message", "place", "module"):
        change(path, (f"UPDATE incident SET {column} = ?", (safe,)))
    change(
        path,
        ("UPDATE incident SET details = ?", (json.dumps({NASTY: [NASTY]}),)),
        ("UPDATE run SET name = ?, torch = ?, git_commit = ?, arguments = ?", (*[safe] * 3, json.dumps({"a": NASTY}))),
        ("UPDATE decision SET sample_id = ?, reason = ?", (safe, safe)),
    )
    for command in commands(path, tmp_path):
        done = run(command)
        assert done.exit_code in (0, 3, 4), done.output
    assert json.loads(run(("ledger", "show", path, "id0003", "--json")).stdout)["message"] == safe
    assert run(("ledger", "show", path, NASTY)).exit_code == 1
    assert run(("ledger", "sql", path, f"SELECT 1 AS '{safe.replace(chr(0), '')}'")).exit_code == 0
    assert json.loads((tmp_path / "out.jsonl").read_text().splitlines()[0])["details"] == {
        NASTY.encode("utf-8", "backslashreplace").decode(): [NASTY]
    }


DEEP = '{"a":' + "[" * 700 + "]" * 700 + "}"
ODD_ROWS = {
    "details nested 700 deep": ("UPDATE incident SET details = ?", (DEEP,)),
    "arguments nested 700 deep": ("UPDATE run SET arguments = ?", (DEEP,)),
    "details nested 100,000 deep": ("UPDATE incident SET details = ?", ('{"a":' + "[" * 100_000,)),
    "infinite times": ("UPDATE incident SET time = 1e999 * (1 - 2 * (number % 2))",),
    "times of no calendar": ("UPDATE incident SET time = 1e300",),
    "infinite runs": ("UPDATE run SET started = -1e999, ended = 1e999",),
    "infinite decisions": ("UPDATE decision SET time = 1e999",),
    "half a pair in the details": ("UPDATE incident SET details = ?", ('{"\\ud800": "\\udfff"}',)),
    "half a pair in the arguments": ("UPDATE run SET arguments = ?", ('{"\\ud800": "\\udfff"}',)),
    "4,000 digits": ("UPDATE incident SET details = ?", ('{"shape": [%s]}' % ("9" * 4000),)),
    "5,000 digits": ("UPDATE incident SET details = ?", ('{"shape": [%s]}' % ("9" * 5000),)),
    "NaN in JSON": ("UPDATE incident SET details = ?", ('{"loss": [NaN, Infinity, -Infinity]}',)),
    "the largest numbers": ("UPDATE incident SET loss = 1.7976931348623157e308, grad_norm = -1.797e308",),
    "huge integers": ("UPDATE incident SET step = 9223372036854775807, epoch = -9223372036854775808, row = -1",),
    "no payload": ("UPDATE payload SET data = ?", (b"",)),
    "no snapshot": ("UPDATE snapshot SET data = ?", (b"",)),
    "a digest that is no text": ("UPDATE incident SET snapshot = ?", (b"\xff",)),
    "bytes for text": ("UPDATE incident SET message = ?", (b"\xff\xfe",)),
    "text that is no text": ("UPDATE incident SET message = CAST(x'ff80' AS TEXT)",),
}


@pytest.mark.parametrize("statement", ODD_ROWS.values(), ids=ODD_ROWS)
def test_odd_rows_under_every_command(path, tmp_path, statement):
    change(path, statement)
    for command in commands(path, tmp_path):
        run(command)


def header(tree, **tensors):
    """A safetensors file by hand: a header of our choice, and 64 bytes."""
    head = json.dumps({"__metadata__": {"gradgate": json.dumps(tree)}, **tensors}).encode()
    return len(head).to_bytes(8, "little") + head + bytes(64)


def tensor(shape):
    return {"dtype": "F64", "shape": shape, "data_offsets": [0, 64]}


LEAF = {"tensor": "0", "complex": False, "grad": False}
ODD_PAYLOADS = {
    "an empty tree": header({}),
    "an empty tree inside": header({"list": [{}]}),
    "a shape of 4,000 digits": header(LEAF, **{"0": tensor([int("9" * 4000)] * 50)}),
    "a shape of 100,000 numbers": header(LEAF, **{"0": tensor([10**4000] * 1000)}),
    "a negative shape": header(LEAF, **{"0": tensor([-8])}),
    "a shape of text": header(LEAF, **{"0": tensor(["8"])}),
    "large numbers": encode(torch.tensor([[1.7e308, 1.7e308, -1.7e308, 1.7e308]], dtype=torch.float64)),
    "a picture of large numbers": encode(torch.tensor([1.7e308, -1.7e308] * 32, dtype=torch.float64).reshape(1, 8, 8)),
    "a picture of tiny numbers": encode(torch.tensor([5e-324, -5e-324] * 32, dtype=torch.float64).reshape(1, 8, 8)),
    "nothing": encode(None),
}


@pytest.mark.slow
@pytest.mark.parametrize("data", ODD_PAYLOADS.values(), ids=ODD_PAYLOADS)
def test_odd_samples_under_every_command(path, tmp_path, data):
    change(path, ("UPDATE payload SET data = ?", (data,)))
    for command in commands(path, tmp_path):
        run(command)
    assert (tmp_path / "page.html").stat().st_size > 10_000


def test_a_spreadsheet_takes_no_text_for_a_formula(tmp_path):
    texts = ["=1+1", "+1", "-1", "@SUM(A1)", "\tx", "\rx", "plain", "a=1"]
    with Ledger(tmp_path / "run.ledger") as ledger:
        ledger.record_many([incident(text, message=text, loss=-0.5) for text in texts])
    run(("ledger", "export", tmp_path / "run.ledger", tmp_path / "out.csv"))
    rows = list(csv.DictReader(io.StringIO((tmp_path / "out.csv").read_bytes().decode(), newline="")))
    assert [row["sample_id"] for row in rows] == [f"'{text}" for text in texts[:6]] + texts[6:]
    assert {row["loss"] for row in rows} == {"-0.5"}  # A number stays one.


def test_a_command_that_is_written_wrongly_is_quoted_visibly(path):
    done = CliRunner().invoke(main, ["ledger", "release", "no\x1b[2Jfile", "x"])
    assert done.exit_code == 2
    assert "no\\x1b[2Jfile" in done.output
    assert "\x1b" not in done.output


# --- replay without the model ---------------------------------------------------------------------------------------


def test_replay_without_the_model_says_that_the_weights_are_there_and_how_to_use_them(path):
    done = run(("replay", path, "id0003", "--entry", ENTRY))
    assert "not stored" not in done.output
    assert "The weights of that step are in the ledger" in done.output
    fix = next(line for line in done.output.splitlines() if line.startswith("Fix: gradgate "))
    assert fix.endswith("--model strangers_program:model")
    again = run(fix.removeprefix("Fix: gradgate ").split())
    assert "The weights" not in again.output
    change(path, "UPDATE incident SET snapshot = NULL")
    assert "were not stored" in run(("replay", path, "id0003", "--entry", ENTRY)).output
