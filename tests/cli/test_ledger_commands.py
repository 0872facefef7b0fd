"""`gradgate ledger ...`: what it prints, for eyes, pipes and programs, and how it ends."""

import csv
import io
import json
import math
import time

import pytest
import torch
from click.testing import CliRunner

import gradgate
from gradgate._payload import encode
from gradgate._text import moment
from gradgate.cli import _output, main
from gradgate.ledger import Ledger
from tests.ledger.made import incident


@pytest.fixture
def path(tmp_path):
    with Ledger(tmp_path / "run.ledger", payload=True, run="night", arguments={"lr": 0.1}) as ledger:
        first = incident(
            "a", id="aaaa1111", exception_type="ValueError", message="bad header", where="data.py:7", time=1e9
        )
        ledger.record(first, b"x" * 10)
        ledger.record(incident("b", id="bbbb2222", stage="loss", cause="non-finite loss", loss=math.nan, time=1.5e9))
        ledger.record(incident("c", id="cccc3333", transient=True, run="day", time=1.6e9))
    return str(tmp_path / "run.ledger")


def run(*arguments, code=0):
    done = CliRunner().invoke(main, [str(argument) for argument in arguments])
    assert done.exit_code == code, done.output
    assert done.exception is None or isinstance(done.exception, SystemExit)
    return done.output


def answer(*arguments):
    return json.loads(run(*arguments, "--json"), parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))


def test_list_in_a_pipe_is_tab_separated(path):
    head, *lines = [line.split("\t") for line in run("ledger", "list", path).splitlines()]
    assert head == ["time", "incident", "run", "step", "sample", "stage", "cause", "where", "message"]
    assert [line[1] for line in lines] == ["cccc3333", "bbbb2222", "aaaa1111"]
    assert lines[-1][4:] == ["a", "forward", "exception", "data.py:7", "ValueError: bad header"]


@pytest.mark.parametrize(
    ("options", "found"),
    [
        ([], "cba"),
        (["--run", "night"], "ba"),
        (["--cause", "non-finite loss"], "b"),
        (["--stage", "forward"], "ca"),
        (["--sample", "a"], "a"),
        (["--since", "2010-01-01"], "cb"),
        (["--until", "2010-01-01"], "a"),
        (["--since", "1h"], ""),
        (["--transient"], "c"),
        (["--persistent"], "ba"),
        (["--limit", "1"], "c"),
        (["--run", "day", "--persistent"], ""),
    ],
    ids=str,
)
def test_filters(path, options, found):
    listed = answer("ledger", "list", path, *options)
    assert "".join(one["sample_id"] for one in listed) == found
    if "--limit" not in options:
        assert answer("ledger", "stats", path, *options)["incidents"] == len(found)
        exported = list(csv.DictReader(io.StringIO(run("ledger", "export", path, "-", *options))))
        assert sorted(one["sample_id"] for one in exported) == sorted(found)


def test_show_tells_everything(path):
    told = answer("ledger", "show", path, "aaaa")
    assert (told["sample_id"], told["payload_bytes"], told["bad"]) == ("a", 10, True)
    assert told["run_details"]["arguments"] == {"lr": 0.1}
    run("ledger", "release", path, "a", "--reason", "label repaired")
    text = run("ledger", "show", path, "aaaa1111")
    for piece in ("ValueError", "bad header", "data.py:7", "label repaired", '{"lr": 0.1}', "python 3."):
        assert piece in text
    assert answer("ledger", "show", path, "bbbb")["loss"] == "nan"


def test_stats(path):
    told = answer("ledger", "stats", path)
    assert (told["incidents"], told["bad_samples"], told["by_run"]) == (3, 2, {"night": 2, "day": 1})
    assert "cause\tnon-finite loss\t1" in run("ledger", "stats", path)


def test_release(path):
    assert run("ledger", "release", path, "a", "z") == "a: released\nz: was not known to be bad\n"
    assert answer("ledger", "release", path, "b") == [{"sample_id": "b", "was_bad": True}]
    assert Ledger(path, read_only=True).bad_ids() == set()


def test_export(path, tmp_path):
    assert run("ledger", "export", path, tmp_path / "out.csv") == f"3 incidents written to {tmp_path / 'out.csv'}\n"
    assert answer("ledger", "export", path, tmp_path / "out.jsonl", "--run", "day")["incidents"] == 1
    assert len(run("ledger", "export", path, "-", "--format", "jsonl").splitlines()) == 3
    assert "no format 'xlsx'" in run("ledger", "export", path, tmp_path / "out.xlsx", code=1)


def test_merge(path, tmp_path):
    merged = tmp_path / "all.ledger"
    assert run("ledger", "merge", merged, path) == f"{path}: 3 new incidents\n"
    assert answer("ledger", "merge", merged, path) == [{"ledger": path, "new_incidents": 0}]


def test_sql(path):
    assert run("ledger", "sql", path, "SELECT cause, count(*) AS n FROM incidents GROUP BY 1") == (
        "cause\tn\nexception\t2\nnon-finite loss\t1\n"
    )
    assert answer("ledger", "sql", path, "SELECT data, 9e999 AS big FROM payload") == [
        {"data": "<10 bytes>", "big": "inf"}
    ]
    assert "the question cannot be asked: not authorized" in run("ledger", "sql", path, "DELETE FROM incident", code=1)
    assert "took longer" in run(
        "ledger", "sql", path, "WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x FROM n) SELECT max(x) FROM n",
        "--seconds", "0.05", code=1,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("entry", "exception_type", "code", "verdict"),
    [
        ("torch:sum", "ValueError", 0, "passes"),
        ("torch:linalg.inv", "torch._C._LinAlgError", 3, "same"),
        ("torch:linalg.inv", "ValueError", 4, "another"),
    ],
)
def test_replay_ends_with_its_verdict(tmp_path, entry, exception_type, code, verdict):
    with Ledger(tmp_path / "run.ledger", payload=True) as ledger:
        bad = incident("a", exception_type=exception_type, message="linalg.inv: (Batch element 0): The diagonal")
        ledger.record(bad, encode(torch.zeros(1, 2, 2)))
    told = run("replay", ledger.path, bad.id[:8], "--entry", entry, "--json", code=code)
    assert json.loads(told)["verdict"] == verdict
    assert "Sample 'a' failed in forward." in run("replay", ledger.path, bad.id, "--entry", entry, code=code)
    file = tmp_path / "test_a.py"
    assert f"written: {file}" in run("replay", ledger.path, bad.id, "--entry", entry, "--as-test", file, code=code)


# --- what is wrong is told, without a traceback --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["ledger", "list", "nothing.ledger"], 1, "nothing.ledger.\nWhy: it was to be read, so it is not created."),
        (["ledger", "stats", "."], 2, "is a directory"),
        (["ledger", "release", "nothing.ledger", "a"], 2, "does not exist"),
        (["ledger", "list"], 2, "Missing argument 'LEDGER'"),
        (["ledger", "list", "{path}", "--stage", "flight"], 2, "'load', 'forward', 'loss', 'backward'"),
        (["ledger", "list", "{path}", "--since", "yesterday"], 1, "the time 'yesterday' cannot be read"),
        (["ledger", "list", "{path}", "--limit", "0"], 2, "0 is not in the range"),
        (["ledger", "show", "{path}", "zzzz"], 1, "there is no incident 'zzzz'"),
        (
            ["ledger", "merge", "{path}", "nothing.ledger"],
            1,
            "nothing.ledger.\nWhy: it was to be read, so it is not created.",
        ),
        (["legder"], 2, "No such command 'legder'"),
        (["replay", "{path}", "aaaa"], 2, "Missing option '--entry'"),
        (["replay", "{path}", "aaaa", "--entry", "train"], 2, "'train' is not of the form module:name"),
        (["replay", "{path}", "aaaa", "--entry", "no_such_module:f"], 1, "No module named 'no_such_module'"),
        (["replay", "{path}", "aaaa", "--entry", "math:nothing"], 2, "math has no nothing"),
        (["replay", "{path}", "aaaa", "--entry", "math:pi"], 2, "math:pi is not a function"),
        (["replay", "{path}", "bbbb", "--entry", "math:sqrt"], 1, "was not stored"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_mistakes(path, arguments, code, said):
    output = run(*(argument.format(path=path) for argument in arguments), code=code)
    assert said in output
    assert "Traceback" not in output


def test_a_file_that_is_no_ledger(tmp_path):
    (tmp_path / "notes.txt").write_text("my notes " * 100)
    assert "Fix: gg.Ledger(" in run("ledger", "list", tmp_path / "notes.txt", code=1)


def test_help_and_version():
    assert run("--version").startswith(f"gradgate {gradgate.__version__}, ")
    assert "ledger  What was dropped" in run("--help")
    for command in ("list", "show", "stats", "release", "export", "merge", "sql"):
        assert "--json" in run("ledger", command, "--help")
    assert "--json" in run("replay", "-h")


# --- eyes ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def terminal(monkeypatch):
    monkeypatch.setattr(_output, "on_a_terminal", lambda: True)
    monkeypatch.setattr("gradgate.cli._ledger_commands.on_a_terminal", lambda: True)
    monkeypatch.setenv("COLUMNS", "80")


@pytest.mark.usefixtures("terminal")
def test_a_terminal_gets_a_table_that_fits(path):
    text = run("ledger", "list", path)
    assert "forward: ValueError: bad" in text
    assert "aaaa1111" in text
    assert max(map(len, text.splitlines())) <= 80
    assert "the newest 2; more with --limit" in run("ledger", "list", path, "--limit", "2")


@pytest.mark.usefixtures("terminal")
def test_a_ledger_cannot_steer_the_terminal_or_the_table(tmp_path):
    with Ledger(tmp_path / "run.ledger") as ledger:
        ledger.record(incident("[red]x\x1b[2J", message="\x1b]0;title\x07\ttab\nline", exception_type="X"))
    for arguments in (["list"], ["stats"], ["show", ledger.incidents()[0].id], ["sql", "SELECT * FROM incidents"]):
        name, *rest = arguments
        text = run("ledger", name, tmp_path / "run.ledger", *rest)
        assert "\x1b" not in text
        assert "\x07" not in text
        assert "[red]x\\x1b[2J" in text.replace("\n", "") or name != "list"


def test_times_that_are_no_dates_are_shown_as_numbers():
    assert moment(1e30) == "1e+30"
    assert moment(None) == ""
    assert moment(time.time()).startswith("20")


@pytest.mark.usefixtures("terminal")
@pytest.mark.parametrize("width", [80, 200])
def test_long_names_leave_room_for_the_other_columns(tmp_path, monkeypatch, width):
    name = "/mnt/data/imagenet/train/n01440764/with/a/very/long/path/n01440764_10026.JPEG"
    with Ledger(tmp_path / "run.ledger") as ledger:
        ledger.record(incident(name, message="the file is truncated", where="data.py:7"))
        (found,) = ledger.incidents()
    monkeypatch.setenv("COLUMNS", str(width))
    for command, seen in (("list", [found.id[:8], "what", "data.py:7"]), ("stats", ["worst sample", "count"])):
        text = run("ledger", command, tmp_path / "run.ledger")
        assert max(map(len, text.splitlines())) <= width
        assert all(word in text for word in [moment(found.time), ".JPEG", *seen]), text


@pytest.mark.usefixtures("terminal")
def test_a_rank_is_shown_where_there_are_several(tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    with Ledger(tmp_path / "run.ledger") as ledger:
        ledger.record(incident("a", where="data.py:7", rank=0, world_size=4))
        ledger.record(incident("b", where="data.py:8"))
    text = run("ledger", "list", tmp_path / "run.ledger")
    assert "data.py:7, rank 0" in text
    assert text.count("rank") == 1


@pytest.mark.usefixtures("terminal")
def test_an_empty_answer_says_so_on_a_terminal(tmp_path):
    Ledger(tmp_path / "run.ledger", run="night").close()
    assert run("ledger", "list", tmp_path / "run.ledger") == "no incidents\n"
    assert "gg.Guard(history=True)" in run("ledger", "hardest", tmp_path / "run.ledger")
    assert run("ledger", "hardest", tmp_path / "run.ledger", "--suspicious") == "no such sample\n"


def test_every_help_has_an_example_in_one_line_and_cuts_no_sentence():
    def below(group, path):
        for name in group.list_commands(None):
            yield (*path, name)
            command = group.get_command(None, name)
            yield from below(command, (*path, name)) if hasattr(command, "list_commands") else ()

    for path in ((), *below(main, ())):
        lines = [*run(*path, "--help").splitlines(), ""]
        (place,) = [at for at, line in enumerate(lines) if line.strip().startswith("Example: gradgate")]
        assert lines[place + 1] == "", path
        assert not any(line.endswith("...") for line in lines[place:]), path
