"""Whose code a frame belongs to is a matter of its file, not of what the code says."""

import torch

from gradgate._source import is_foreign


def test_a_copy_of_a_file_of_torch_is_the_users():
    source = "def forward(x):\n    return x + 1\n"
    theirs = compile(source, f"{torch.__path__[0]}/nn/modules/copied.py", "exec")
    copied = compile(source, "/home/somebody/project/copied.py", "exec")
    assert theirs == copied  # for Python
    assert is_foreign(theirs.co_filename)
    assert not is_foreign(copied.co_filename)
