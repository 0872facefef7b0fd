"""What pytest looks into here: the files of tests. Scripts that other programs start are not imported."""

import pytest
from _pytest.doctest import DoctestModule


@pytest.hookimpl(wrapper=True)
def pytest_collect_file():
    """Look for examples in the docstrings of the library only: tests have none."""
    return [each for each in (yield) if not isinstance(each, DoctestModule)]
