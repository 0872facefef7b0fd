"""Whose code a file holds, and which line a message names."""

import json
import os
import sysconfig

import pytest
import torch
from torch.utils.data import default_collate

import gradgate
from gradgate._source import Owner, nearest_line, owner_of, raising_line, shown_path, written

PACKAGE = f"{sysconfig.get_path('purelib')}/somebody/layers.py"
GRADGATE = os.path.dirname(gradgate.__file__)


@pytest.mark.parametrize(
    ("file", "owner"),
    [
        (__file__, Owner.USER),
        ("<ipython-input-3-abc>", Owner.USER),
        ("train.py", Owner.USER),
        (f"{GRADGATE}/cli/demo/training.py", Owner.USER),
        (f"{GRADGATE}/guard/_guard.py", Owner.OURS),
        (f"{GRADGATE}_of_mine/train.py", Owner.USER),
        (torch.nn.functional.__file__, Owner.TORCH),
        (PACKAGE, Owner.PACKAGE),
        (json.__file__, Owner.PYTHON),
        ("<frozen importlib._bootstrap>", Owner.PYTHON),
        ("<string>", Owner.PYTHON),
    ],
)
def test_whose_code_a_file_holds(file, owner):
    assert owner_of(file) is owner


def test_the_users_line_goes_before_that_of_a_package():
    torch_line, ours = (torch.nn.functional.__file__, 3), (f"{GRADGATE}/guard/_guard.py", 4)
    inner, outer, package = ("train.py", 1), ("train.py", 2), (PACKAGE, 5)
    assert nearest_line([torch_line, package, inner, outer]) == inner
    assert nearest_line([torch_line, package, (json.__file__, 6), ours]) == package
    assert nearest_line([torch_line, ours]) is None
    assert nearest_line([]) is None


def test_the_line_of_an_exception():
    def collate():
        return default_collate([object()])

    with pytest.raises(TypeError) as caught:
        collate()
    assert raising_line(caught.tb) == f"tests/test_source.py:{collate.__code__.co_firstlineno + 1}"
    assert raising_line(None) is None
    with pytest.raises(json.JSONDecodeError) as caught:
        json.loads("{")
    # From the outermost frame of the traceback on there is only the standard library.
    inside = caught.tb.tb_next
    while "json" not in inside.tb_frame.f_code.co_filename:
        inside = inside.tb_next
    assert raising_line(inside).startswith(json.__file__.rpartition("/")[0])


def test_paths_are_shown_from_the_working_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert shown_path(str(tmp_path / "deep" / "train.py")) == os.path.join("deep", "train.py")
    assert written((f"{tmp_path}_2/train.py", 7)) == f"{tmp_path}_2/train.py:7"
