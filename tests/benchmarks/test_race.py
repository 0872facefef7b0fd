"""The stop-watch, the file it is kept in, and every way that a row is made."""

import json
from dataclasses import replace

import pytest
import torch

from benchmarks import __main__ as command
from benchmarks import harness, jax_peer
from benchmarks.harness import Growth, Row, quickly, race
from benchmarks.record import Record, read, this_machine
from tests.benchmarks.made import record, result


class Clock:
    """A clock that only the candidates move: what it shows does not hang on the machine."""

    def __init__(self):
        self.now = 0.0

    def perf_counter(self):
        return self.now

    def lasting(self, seconds):
        def candidate():
            self.now += seconds

        return candidate


@pytest.mark.slow
def test_a_race_gives_ratios_times_and_noise(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(harness, "time", clock)
    candidates = {"plain": clock.lasting(1e-3), "ours": clock.lasting(4e-3)}
    won = race(Row("package", "a", lambda: candidates, "ours", "plain", rounds=5, seconds=0))
    assert won.ratio == {"plain": 1.0, "ours": pytest.approx(4.0)}
    assert won.time["ours"] == pytest.approx(4e-3)
    assert won.noise == pytest.approx(0.0)
    assert won.spread.keys() == won.ratio.keys()
    assert won.took > 0


def test_a_row_that_counts_gives_its_numbers():
    row = Row(
        "package", "a", lambda: {"plain": lambda: 200, "ours": lambda: 50}, "ours", "plain", at_most=0.2, counts=True
    )
    counted = race(row)
    assert (counted.figure, counted.noise, counted.met) == (0.25, 0.0, False)
    assert counted.behind == pytest.approx(1.25)


def test_the_number_of_threads_is_put_back_when_a_row_raises():
    before = torch.get_num_threads()
    with pytest.raises(ZeroDivisionError):
        race(Row("package", "a", lambda: 1 / 0, "ours", "plain"))
    assert torch.get_num_threads() == before


def test_a_row_that_raises_costs_only_itself():
    failed = command.run(Row("package", "a", lambda: 1 / 0, "ours", "plain", at_most=1.0))
    assert failed.error == "ZeroDivisionError: division by zero"
    assert (failed.met, failed.behind, failed.faster_peers) == (None, 1.0, {})


def test_a_quick_row_is_the_same_row():
    row = Row("package", "a", dict, "ours", "plain", at_most=2.0, rounds=100, seconds=9.0)
    assert replace(quickly(row), rounds=100, seconds=9.0) == row
    assert quickly(row).rounds < 10


def test_a_quick_run_has_goals_and_charts_that_do_not_take_long():
    told = Row("package", "a", dict, "ours", "plain")
    assert not told.in_a_quick_run
    assert replace(told, at_least=2.0).in_a_quick_run
    assert replace(told, growth=Growth("a chart", "elements", 10)).in_a_quick_run
    assert not replace(told, at_most=2.0, quick=False).in_a_quick_run


# --- the file --------------------------------------------------------------------------------------------------------


def test_what_was_measured_comes_back_from_the_file(tmp_path):
    results = [
        result("a", {"ours": 1.5, "theirs": 3.0}, at_most=2.0, peers=("theirs",), size=100),
        result("b", {"ours": 0.5}, at_least=4.0),
        result("c", {"ours": 7.0}, microseconds=6.0),
    ]
    kept = record(*results, quick=True)
    kept.write(tmp_path / "results.json")
    back = read(tmp_path / "results.json")
    assert (back.quick, back.rows, back.machine, back.measured) == (True, 3, kept.machine, kept.measured)
    for one in results:
        again = back.results[one.row.name]
        assert (again.figure, again.goal, again.met, again.faster_peers) == (
            pytest.approx(one.figure), one.goal, one.met, one.faster_peers,
        )  # fmt: skip
        assert again.row.growth == one.row.growth
    assert [path.name for path in tmp_path.iterdir()] == ["results.json"]


def test_the_machine_is_told():
    assert {"processor", "cores", "Python", "torch", "numpy", "jax"} <= this_machine().keys()


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The command with two rows, writing into an empty folder."""

    def candidates():
        return {"plain": list, "ours": list}

    rows = [Row("package", name, candidates, "ours", "plain", at_most=9.0, rounds=3) for name in ("a", "b")]
    monkeypatch.setattr(command, "all_rows", lambda: rows)
    monkeypatch.setattr(command, "KEPT", tmp_path / "results.json")
    monkeypatch.setattr(command, "CHARTS", tmp_path / "charts")
    monkeypatch.setattr(command, "PAGES", {tmp_path / "results.md": (command.page, "charts/")})
    return tmp_path


def start(monkeypatch, *words):
    monkeypatch.setattr("sys.argv", ["benchmarks", *words])
    command.main()


@pytest.mark.slow
def test_a_run_that_was_cut_has_its_page_and_goes_on(folder, monkeypatch):
    race_once, raced = command.race, []

    def cut(row):
        if row.title == "b" and not raced:
            raced.append(row)
            raise KeyboardInterrupt
        return race_once(row)

    monkeypatch.setattr(command, "race", cut)
    with pytest.raises(KeyboardInterrupt):
        start(monkeypatch, "--quick", "--write")
    assert "1 of 2 rows are not in it" in (folder / "results.md").read_text(encoding="utf-8")
    first = json.loads((folder / "results.json").read_text(encoding="utf-8"))["results"]
    start(monkeypatch, "--quick", "--resume")
    second = json.loads((folder / "results.json").read_text(encoding="utf-8"))["results"]
    assert [entry["title"] for entry in second] == ["a", "b"]
    assert second[0] == first[0]
    assert "not in it" not in (folder / "results.md").read_text(encoding="utf-8")


@pytest.mark.slow
def test_a_run_goes_on_only_as_it_began(folder, monkeypatch):
    start(monkeypatch, "--quick", "--write")
    with pytest.raises(SystemExit, match="is of a quick run"):
        start(monkeypatch, "--resume")
    monkeypatch.setattr(command, "this_machine", lambda: {"processor": "abacus"})
    for words in (["--quick", "--resume"], ["--quick", "--write", "package: b"]):
        with pytest.raises(SystemExit, match="another machine or with other versions"):
            start(monkeypatch, *words)


def test_words_that_no_row_has_are_an_error(folder, monkeypatch):
    with pytest.raises(SystemExit, match=r"no row has all of \['nothing'\]"):
        start(monkeypatch, "nothing")


@pytest.mark.slow
def test_words_measure_only_those_rows_again(folder, monkeypatch):
    start(monkeypatch, "--quick", "--write")
    first = read(folder / "results.json")
    monkeypatch.setattr(Record, "add", lambda self, one: self.results.update({one.row.name: one}))
    start(monkeypatch, "--quick", "--write", "package: b")
    again = read(folder / "results.json")
    assert again.results["package: a"].time == first.results["package: a"].time
    (folder / "results.md").unlink()
    start(monkeypatch, "--pages")
    assert (folder / "results.md").exists()


# --- the rows --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_functions_of_jax_are_those_that_it_is_a_peer_for():
    if jax_peer.INSTALLED:
        assert set(jax_peer.reductions()) == set(jax_peer.NAMES)
    x = torch.ones(2, 2)
    for compiled in (jax_peer.compiled("median", x, x > 0), jax_peer.compiled_without_nan("median", x)):
        assert compiled == {}


@pytest.mark.slow
def test_no_two_rows_have_one_name():
    names = [row.name for row in command.all_rows()]
    assert len(names) == len(set(names))
