"""A walk is short: how many files of the library a call goes through, and names that stand once in the tree."""

import ast
import logging
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
from torch import nn

import gradgate as gg
from gradgate import masked

SOURCE = Path(gg.__file__).parent
NAN = float("nan")
LINES = 33_500
FILES = 114


def files_of(call):
    """Files of the library that a call goes through, after one that loads what is loaded lazily."""
    files = set()

    def note(frame, event, _):
        if event == "call" and frame.f_code.co_filename.startswith(str(SOURCE)):
            files.add(str(Path(frame.f_code.co_filename).relative_to(SOURCE)))

    call()
    before = sys.getprofile()
    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(before)
    return sorted(files)


@pytest.fixture(autouse=True)
def _quiet():
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.fixture
def model():
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1))


def guarded(model, rows):
    x = torch.randn(8, 3)
    x[rows] = NAN
    guard = gg.Guard(model)
    return lambda: guard.backward(x, lambda b: model(b).square().mean())


def test_a_healthy_guarded_step(model):
    assert len(files_of(guarded(model, []))) <= 8


def test_a_guarded_step_with_a_bad_sample(model):
    assert len(files_of(guarded(model, [2]))) <= 15


@pytest.mark.parametrize("given", [{"exclude": NAN}, {"keep": torch.tensor([True, False, True])}])
def test_a_masked_mean(given):
    assert len(files_of(lambda: masked.mean(torch.tensor([1.0, NAN, 3.0]), **given))) <= 4


def test_an_edit():
    assert len(files_of(lambda: gg.at(torch.zeros(3))[1].set(2.0))) <= 4


def test_a_freeze(model):
    def frozen():
        with gg.freeze(model, "0.*"):
            pass

    assert len(files_of(frozen)) <= 5


def test_a_diagnosis(model):
    x = torch.randn(8, 3)
    assert len(files_of(lambda: gg.diagnose(lambda: model(x).square().mean(), model=model))) <= 25


def test_a_longer_walk_is_noticed():
    assert len(files_of(lambda: gg.diagnose(lambda: torch.ones(2, requires_grad=True).sum()))) > 8


def repeated(names):
    return sorted(name for name, count in Counter(names).items() if count > 1)


def test_a_file_name_stands_once():
    assert not repeated(path.name for path in SOURCE.rglob("*.py") if not path.name.startswith("__"))


@pytest.mark.slow
def test_a_class_name_stands_once():
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in SOURCE.rglob("*.py")]
    assert not repeated(node.name for tree in trees for node in tree.body if isinstance(node, ast.ClassDef))


def test_the_tree_does_not_grow_unnoticed():
    sizes = [len(path.read_text(encoding="utf-8").splitlines()) for path in SOURCE.rglob("*.py")]
    assert sum(sizes) <= LINES
    assert len(sizes) <= FILES
