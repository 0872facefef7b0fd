"""The losses of samples over epochs: kept in the ledger, and who among them is hard or suspicious."""

import json
import sqlite3
from contextlib import closing

import pytest
import torch
from click.testing import CliRunner
from torch import nn
from torch.utils.data import DataLoader

import gradgate as gg
from gradgate.cli import main


def trained(path, *, epochs=5, size=24, wrong=(7,), history=True, **more):
    """Lines with one label wrong: its loss stays while the others fall."""
    torch.manual_seed(0)
    x = torch.randn(size, 2)
    y = x.sum(1)
    for row in wrong:
        y[row] += 20
    x[3] = float("nan")
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    guard = gg.Guard(model, ledger=path, history=history, **more)
    loader = gg.resilient(DataLoader([*zip(x, y, strict=True)], batch_size=6, shuffle=True))
    for _ in range(epochs):
        for _ in guard.loop(loader, lambda batch: (model(batch[0])[:, 0] - batch[1]).abs(), optimizer):
            pass
    return gg.Ledger(path)


def test_every_kept_sample_has_its_losses_and_the_wrong_one_is_found(tmp_path):
    ledger = trained(tmp_path / "run.ledger")
    histories = {one.sample_id: one for one in ledger.hardest(100)}
    assert set(histories) == {str(row) for row in range(24) if row != 3}
    assert {len(one.losses) for one in histories.values()} == {5}
    assert ledger.hardest(1)[0].sample_id == "7"
    assert [one.sample_id for one in ledger.suspicious()] == ["7"]
    assert ledger.hardest(1)[0].losses[-1] == pytest.approx(20, abs=6)
    assert ledger.bad_ids() == {"3"}


def test_the_command(tmp_path):
    path = str(tmp_path / "run.ledger")
    trained(path)
    found = CliRunner().invoke(main, ["ledger", "hardest", path, "--suspicious", "--json"])
    assert [one["sample_id"] for one in json.loads(found.output)] == ["7"]
    lines = CliRunner().invoke(main, ["ledger", "hardest", path, "-k", "2"]).output.splitlines()
    assert len(lines) == 3
    assert lines[1].startswith("7\t")


def test_a_ring_of_the_last_losses_in_half_precision(tmp_path):
    ledger = gg.Ledger(tmp_path / "run.ledger")
    assert ledger.hardest() == ledger.suspicious() == []
    ledger.record_losses(("a", float(step)) for step in range(50))
    ledger.record_losses([("a", float("nan")), ("b", 1e9), (None, 1.0), (4, -1e9)])
    hardest = {one.sample_id: one.losses for one in ledger.hardest()}
    assert hardest == {"b": (65504.0,), "a": tuple(map(float, range(18, 50))), "4": (-65504.0,)}


def test_what_falls_or_is_young_is_not_suspicious(tmp_path):
    ledger = gg.Ledger(tmp_path / "run.ledger")
    for name in range(20):
        ledger.record_losses([(name, 1.0 + name / 100)] * 6)
    ledger.record_losses([("falls", loss) for loss in (90.0, 80.0, 70.0, 60.0, 50.0, 40.0)])
    ledger.record_losses([("young", 100.0)] * 3)
    ledger.record_losses([("stays", 50.0)] * 6)
    assert [one.sample_id for one in ledger.suspicious()] == ["stays"]
    assert [one.sample_id for one in ledger.hardest(3)] == ["young", "falls", "stays"]


def test_histories_are_merged_and_a_file_without_them_stays_as_it_was(tmp_path):
    one, other = gg.Ledger(tmp_path / "a"), gg.Ledger(tmp_path / "b")
    other.record_losses([("x", 1.0), ("x", 2.0), ("y", 3.0)])
    one.record_losses([("x", 5.0)])
    for _ in range(2):
        one.merge(other)
    assert {h.sample_id: h.losses for h in one.hardest()} == {"x": (5.0,), "y": (3.0,)}
    trained(tmp_path / "plain", epochs=1, history=False)
    with closing(sqlite3.connect(tmp_path / "plain")) as connection:
        assert not connection.execute("SELECT 1 FROM sqlite_master WHERE name = 'history'").fetchone()


@pytest.mark.parametrize("damage", ["UPDATE history SET losses = 'text'", "UPDATE history SET losses = x'0102ff'"])
def test_a_damaged_history_is_an_error_or_passed_over(tmp_path, damage):
    ledger = gg.Ledger(tmp_path / "a")
    ledger.record_losses([("x", 1.0)])
    ledger.close()
    with sqlite3.connect(tmp_path / "a") as connection:
        connection.execute(damage)
    connection.close()
    if "text" in damage:
        with pytest.raises(OSError, match="a history"):
            gg.Ledger(tmp_path / "a", read_only=True).hardest()
    else:
        (history,) = gg.Ledger(tmp_path / "a", read_only=True).hardest()
        assert len(history.losses) == 1


def test_without_ids_or_losses_nothing_is_kept(tmp_path):
    model = nn.Linear(2, 1)
    guard = gg.Guard(model, ledger=tmp_path / "run.ledger", history=True)
    guard.backward(torch.ones(4, 2), lambda x: model(x)[:, 0])
    guard.backward(torch.ones(4, 2), lambda x: model(x).mean(), ids=range(4))
    guard.state_dict()
    assert gg.Ledger(tmp_path / "run.ledger").hardest() == []
    guard.backward(torch.ones(4, 2), lambda x: model(x)[:, 0], ids=torch.arange(4))
    guard.state_dict()
    assert len(gg.Ledger(tmp_path / "run.ledger").hardest()) == 4


def test_a_history_needs_a_ledger():
    with pytest.raises(ValueError, match=r"`history` is the bool True(.|\n)*there is no `ledger`"):
        gg.Guard(nn.Linear(1, 1), history=True)
