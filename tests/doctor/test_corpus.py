"""Precision and recall: no complaint about healthy programs, and the right line first in broken ones."""

import random
import sys
import warnings

import pytest
import torch

import gradgate as gg
from tests.doctor.corpus import methods, sequences, vision
from tests.doctor.corpus.broken import BUGS

PROGRAMS = {**vision.PROGRAMS, **sequences.PROGRAMS, **methods.PROGRAMS}


@pytest.fixture(autouse=True)
def _as_before():
    state, threads = torch.get_rng_state(), torch.get_num_threads()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, on sparse tensors and the like
        yield
    torch.set_grad_enabled(True)
    torch.set_rng_state(state)
    torch.set_num_threads(threads)
    random.seed()


def examine(tmp_path, name, source):
    path = tmp_path / f"{name}.py"
    path.write_text(source)
    return path, gg.doctor.examine_script(path)


@pytest.mark.slow
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_healthy_program_is_left_alone(name, tmp_path, capfd):
    _, report = examine(tmp_path, name, PROGRAMS[name])
    assert report.exit_code == 0, capfd.readouterr().err
    assert report.diagnosis.healthy, str(report.diagnosis)


@pytest.mark.slow
@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: f"{bug.kind}-{bug.program}".replace(" ", "_"))
def test_the_bug_is_named_first_and_nothing_else(bug, tmp_path, capfd):
    source = PROGRAMS[bug.program]
    assert source.count(bug.old)
    source = source.replace(bug.old, bug.new, 1)
    path, report = examine(tmp_path, bug.program, source)
    findings = report.diagnosis.at_least("warning")
    assert [finding.code[: len(bug.code)] for finding in findings] == [bug.code], str(report.diagnosis)
    lines = [n for n, line in enumerate(source.splitlines(), 1) if "# BUG" in line]
    if lines:
        assert findings[0].where == f"{path}:{lines[0]}", str(report.diagnosis)


def test_the_corpus_is_large_enough():
    assert len(PROGRAMS) >= 40
    assert len(BUGS) >= 40
    assert "tests.doctor.corpus.broken" in sys.modules
