"""gradgate demo: the comparison holds, it says so, and it can be run again."""

import json
import sys
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

import gradgate as gg
from gradgate.cli import main
from gradgate.cli.demo._trainings import FAULTS, Training, guarded, load
from tests.report.reading import data_of


@pytest.fixture(autouse=True)
def _threads():
    yield
    torch.set_num_threads(1)


def demo(*arguments):
    return CliRunner().invoke(main, ["demo", *arguments])


@pytest.mark.slow
def test_the_guarded_training_is_the_one_without_the_broken_samples(tmp_path):
    done = demo("--epochs", "1", "--bad-fraction", "0.02", "--out", str(tmp_path), "--json")
    assert done.exit_code == 0, done.output
    answer = json.loads(done.stdout)
    assert answer["bit_identical"]
    assert answer["exactly_the_broken_were_found"]
    assert set(answer["broken"].values()) == set(FAULTS)
    assert "crashed at step" in answer["ways"]["a"]["end"]
    assert answer["ways"]["b"]["batches_lost"] > 10
    assert answer["ways"]["c"]["samples_lost"] == len(answer["broken"])
    assert answer["ways"]["c"]["accuracy"] == answer["ways"]["d"]["accuracy"] > 0.5
    assert answer["replayed"]["verdict"] == "same"
    page = data_of(Path(answer["report"]).read_text())
    assert page["ledger"]["total"] == len(answer["broken"])
    assert page["ledger"]["previews"]["of"]
    assert page["diagnosis"]["findings"][0]["code"] == "GG403"
    assert "_trainings.py:" in page["diagnosis"]["findings"][0]["where"]
    assert any(edge["nonfinite"] for edge in page["diagnosis"]["graph"]["edges"])
    with gg.Ledger(tmp_path / "demo.ledger", read_only=True) as ledger:
        raised = [incident for incident in ledger.incidents() if incident.exception_type == "ValueError"]
    assert all("_trainings.py:" in incident.where for incident in raised)


@pytest.mark.slow
def test_again_in_the_same_folder_and_with_nothing_broken(tmp_path):
    for _ in range(2):
        done = demo("--epochs", "1", "--bad-fraction", "0", "--seed", "3", "--out", str(tmp_path))
        assert done.exit_code == 0, done.output
    assert "None is broken." in done.output
    assert f"All of it on one page: {tmp_path / 'report.html'}" in done.output
    assert "yes  (c) ended with the weights and statistics of (d), bit for bit." in done.output
    assert sorted(file.name for file in tmp_path.iterdir()) == ["demo.ledger", "report.html"]


def test_wrong_arguments_are_told_without_a_traceback(tmp_path, monkeypatch):
    assert demo("--bad-fraction", "2").exit_code == 2
    assert demo("--epochs", "0").exit_code == 2
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    done = demo("--out", str(tmp_path))
    assert done.exit_code == 1
    assert "Fix: pip install 'gradgate[demo]'" in done.output
    assert "Traceback" not in done.output


@pytest.mark.slow
def test_the_data_is_the_same_for_the_same_seed():
    (one, _), (again, _), (other, _) = load(1, 0.1), load(1, 0.1), load(2, 0.1)
    assert one.broken == again.broken != other.broken
    assert torch.equal(one.images, again.images)


@pytest.mark.slow
def test_incidents_of_loading_and_of_training_have_one_numbering(tmp_path):
    data, test = load(1, 0.1)
    with gg.Ledger(tmp_path / "demo.ledger") as ledger:
        training = Training(data, test, 2, 1, ledger)
        assert [progress.steps for progress in guarded(training)][-1] == training.progress.steps
        incidents = ledger.incidents()
    each = training.progress.steps // 2
    assert {incident.stage for incident in incidents} >= {"load", "forward", "backward"}
    assert {(incident.stage, incident.epoch) for incident in incidents} >= {("load", 1), ("load", 2)}
    assert all((incident.epoch - 1) * each <= incident.step < incident.epoch * each for incident in incidents)
    assert len({incident.run for incident in incidents}) == 1
    assert {incident.sample_id for incident in incidents} == {str(index) for index in data.broken}
